"""The immutable, shared description of a container: batch size, device and lock.

Descriptors are cached in a pool for each device, keyed by batch tuple, so equal descriptors are
usually the same object. A container is therefore two references and a flag ("memory" in the
benchmarks), batch sizes are compared by `is` first, locking replaces one reference, and results of
arithmetic reuse the descriptor of their input.

While dynamo traces, reading the pool would add a guard on its contents, so a new descriptor becomes
a constant of the graph. It is built in the graph only where a size is symbolic and has no hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch.compiler import is_dynamo_compiling

from kd_core._errors import InvalidArgument, InvalidValue, KdError, not_valid, restores
from kd_core._shapes import (
    NamedSize,
    constants_of,
    fitted,
    has_names,
    has_open,
    shown_sizes,
    without_names,
)
from kd_core._torch_private import assume_constant_result, current_trace, traced_as

if TYPE_CHECKING:
    from kd_core._types import Batch, DeviceLike, DtypeLike, Sizes

LOCKED_BY_USER: Final = "`lock_()`"
LOCKED_BY_ARENA: Final = "its memory map"
LOCKED_BY_SHARING: Final = "`share_memory_()`"
LOCKED_BY_CONSOLIDATING: Final = "`consolidate`"
LOCKED_BY_PARENT: Final = "the lock of an enclosing container"
LOCKED_AS_PART: Final = "`lock_()` of a container that enclosed it before it was pickled"
LOCKED_WITH_ROWS: Final = (LOCKED_BY_ARENA, LOCKED_BY_SHARING)
"""What locks rows, too, where they are views: other processes have the same memory."""
_POOL_LIMIT: Final = 4096
_Size: Final = torch.Size  # under its own name: see `_ops.joining`


class Descriptor:
    """What all containers of one batch size, device and lock have in common.

    Attributes:
        batch: the batch size as a plain tuple.
        ndim: the number of batch dimensions.
        named: whether one of them has a name.
        open: whether the size of one differs among the members of a stack. Such a descriptor is
            of a lazy stack, and not kept in a pool.
        device: the device of all entries, or `None` where they may differ.
        lock: what locked the container itself, or `None`.
        held: how many locked containers enclose it.
        frozen: whether the structure may not change: `lock` is set or `held` is not 0.
        on_cpu: whether `device` is the CPU; reading the type of a device is slow.
        plain: whether any tensor of the right shape may be stored: not frozen, no device.
        plain_on_cpu: whether any such tensor on the CPU may be: not frozen, and `on_cpu`.
        rows: the number of rows if the descriptor is `plain` and has one batch dimension, else -1;
            for the fast path that compares the first size of a tensor only.
        size: the batch size as users see it.
    """

    __slots__ = (
        "_held_once",
        "_locked_alone",
        "_pool",
        "_row",
        "_unlocked",
        "batch",
        "device",
        "frozen",
        "held",
        "lock",
        "named",
        "ndim",
        "on_cpu",
        "open",
        "plain",
        "plain_on_cpu",
        "rows",
        "size",
    )

    _pool: dict[Batch, Descriptor]
    _row: Descriptor | None
    _unlocked: Descriptor
    _held_once: Descriptor | None
    _locked_alone: Descriptor | None
    batch: Batch
    ndim: int
    named: bool
    open: bool
    device: torch.device | None
    lock: str | None
    held: int
    frozen: bool
    on_cpu: bool
    plain: bool
    plain_on_cpu: bool
    rows: int
    size: torch.Size

    @assume_constant_result
    def _constant(self, batch: Batch, device: torch.device | None) -> Descriptor:
        """Call the function of this name: dynamo guards functions of a module, not methods."""
        return _constant(batch, device)

    @assume_constant_result
    def _constant_reshaped(
        self, ndim: int, sizes: Batch, device: torch.device | None
    ) -> Descriptor | None:
        """Reshape while dynamo traces; `None` where it must trace what is raised.

        Nothing is read from the descriptor: where the program made it, dynamo has none yet.

        Args:
            ndim: the number of batch dimensions.
            sizes: the batch size, and behind it the new one.
            device: the device.
        """
        try:
            return _constant(fitted(sizes[:ndim], sizes[ndim:]), device)
        except KdError:
            return None

    constants_of = constants_of  # a method: dynamo guards functions

    def traced_reshaped(self, shape: Sizes) -> Descriptor:
        """Return the descriptor of a reshaped batch while dynamo traces: a constant if possible."""
        batch = self.batch
        sizes = self.constants_of((*batch, *shape))  # type: ignore[arg-type]  # or there are sequences
        if sizes is not None:
            known = self._constant_reshaped(len(batch), sizes, self.device)
            if known is not None:
                return known
        return self.with_batch(fitted(batch, shape))

    def with_batch(self, batch: Batch) -> Descriptor:
        """Return the unlocked descriptor of the same device with another batch size."""
        # Not `traced_as`: torch 2.15 has no guard for it where the descriptor is not an input.
        if is_dynamo_compiling():  # in this frame, for "compile" in the benchmarks
            device, known = self.device, self.constants_of(batch)
            if known is None:
                return _build(batch, device, None, 0)
            return self._constant(known, device)
        try:
            return self._pool[batch]
        except (KeyError, TypeError):  # a symbolic size has no hash
            return _pooled(batch, self.device, self._pool)

    def row(self) -> Descriptor:
        """Return the descriptor of one row, kept in `_row` for loops over a batch.

        Must not be called in traced code, which would add a guard on `_row`.
        """
        row = self._row = self.with_batch(self.batch[1:])
        return row

    def unlocked(self) -> Descriptor:
        """Return this descriptor without any lock."""
        return self._unlocked if self.frozen else self

    def with_lock(self, lock: str | None, held: int) -> Descriptor:
        """Return this descriptor with another lock and number of enclosing locked containers."""
        free = self._unlocked
        if lock is None:
            if held == 0:
                return free
            kept = free._held_once if held == 1 and not is_dynamo_compiling() else None
        else:
            kept = free._locked_alone if held == 0 and not is_dynamo_compiling() else None
            if kept is not None and kept.lock != lock:
                kept = None
        return free._locked_twin(lock, held) if kept is None else kept

    def _locked_twin(self, lock: str | None, held: int) -> Descriptor:
        """Build a locked descriptor, and cache it if nothing locked encloses its containers.

        One that is locked itself is cached until another lock is used: most programs use one.
        """
        twin = _build(self.batch, self.device, lock, held)
        if not is_dynamo_compiling():
            if lock is None and held == 1:
                self._held_once = twin
            elif lock is not None and held == 0:
                self._locked_alone = twin
        return twin

    @property
    def pickled_lock(self) -> str | None:
        """The lock of a copy in a pickle, which has not the one storage of `consolidate`.

        That of a part is its own until the container that encloses it is restored, too.
        """
        if self.lock is None:
            return LOCKED_AS_PART if self.held else None
        return None if self.lock == LOCKED_BY_CONSOLIDATING else self.lock

    @property
    def locked_by(self) -> str:
        """What locked the container, for messages."""
        return self.lock if self.lock is not None else LOCKED_BY_PARENT

    def __reduce__(self) -> tuple[object, ...]:
        return restore_descriptor, (self.batch, self.device, self.lock, self.held)

    def __copy__(self) -> Descriptor:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Descriptor:
        return self

    def __repr__(self) -> str:
        return f"Descriptor(batch={self.batch}, device={self.device}, lock={self.lock})"


_ANYWHERE: Final[dict[Batch, Descriptor]] = {}
_ON_CPU: Final[dict[Batch, Descriptor]] = {}
_POOLS: Final[dict[torch.device | None, dict[Batch, Descriptor]]] = {
    None: _ANYWHERE,
    torch.device("cpu"): _ON_CPU,
}


def _build(batch: Batch, device: torch.device | None, lock: str | None, held: int) -> Descriptor:
    desc = object.__new__(Descriptor)
    desc.batch = batch
    desc.ndim = len(batch)
    desc.named = has_names(batch)
    desc.open = has_open(batch)
    desc.device = device
    desc.lock = lock
    desc.held = held
    desc.frozen = lock is not None or held > 0
    desc.on_cpu = device is not None and device.type == "cpu"
    desc.plain = device is None and not desc.frozen
    desc.plain_on_cpu = desc.on_cpu and not desc.frozen
    desc.size = _Size(shown_sizes(batch)) if desc.open else _size_of(batch)
    desc.rows = desc.size[0] if desc.plain and desc.ndim == 1 else -1
    desc._row = None
    desc._locked_alone = None
    desc._held_once = None
    if is_dynamo_compiling():
        desc._pool = {}
        desc._unlocked = _build(batch, device, None, 0) if desc.frozen else desc
        return desc
    desc._pool = _POOLS.setdefault(device, {})
    desc._unlocked = _pooled(batch, device, desc._pool) if desc.frozen else desc
    return desc


def _size_of(batch: Batch) -> torch.Size:
    try:
        size = _Size(without_names(batch))
    except TypeError:
        raise InvalidArgument(f"batch_size must hold integers, got {batch!r}.") from None
    if is_dynamo_compiling():  # comparing a data-dependent size would add a guard
        return size
    for rows in batch:
        if rows.__class__ is int and rows < 0:
            raise InvalidValue(f"batch_size must be non-negative, got {batch}.")
    return size


def _pooled(batch: Batch, device: torch.device | None, pool: dict[Batch, Descriptor]) -> Descriptor:
    try:
        known = pool.get(batch)
    except TypeError:  # a symbolic size has no hash
        return _build(batch, device, None, 0)
    if known is not None:
        return known
    desc = _build(batch, device, None, 0)
    if desc.open:
        return desc
    if len(pool) >= _POOL_LIMIT:
        pool.clear()
    pool[batch] = desc
    return desc


def _traced_describe(batch: Batch, device: torch.device | None = None) -> Descriptor:
    known = constants_of(None, batch)
    return _build(batch, device, None, 0) if known is None else _constant(known, device)


@traced_as(_traced_describe)
def describe(batch: Batch, device: torch.device | None = None) -> Descriptor:
    """Return the unlocked descriptor of a batch size and a device."""
    try:
        return _ANYWHERE[batch] if device is None else _POOLS[device][batch]
    except (KeyError, TypeError):  # new, or a symbolic size that has no hash
        return _pooled(batch, device, _POOLS.setdefault(device, {}))


@assume_constant_result
def _constant(batch: Batch, device: torch.device | None) -> Descriptor:
    """Return a descriptor without symbolic size: a constant of compiled code.

    It is new for each program that is traced, never one of the pool: dynamo would take the one that
    an input has for the same object, without a guard, and use that of a later input in its place.
    """
    trace = current_trace()
    known = {} if trace is None else _CONSTANTS.setdefault(trace, {})
    desc = known.get((batch, device))
    if desc is None:
        desc = known[batch, device] = _build(batch, device, None, 0)
    return desc


_CONSTANTS: Final[WeakKeyDictionary[object, dict[tuple[object, ...], Descriptor]]] = (
    WeakKeyDictionary()
)
"""The descriptors that each program being traced has as constants."""


def describe_on(batch: Batch, device: DeviceLike | None) -> Descriptor:
    """Return the unlocked descriptor of a batch size and a device as users name it."""
    if device is None:
        return describe(batch)
    if (device == "cpu" or device == _CPU) and not is_dynamo_compiling():
        try:
            return _ON_CPU[batch]
        except (KeyError, TypeError):
            pass
    return describe(batch, device_of(device))


def device_of(device: DeviceLike) -> torch.device:
    """Return a device with its index, so that equal devices compare equal."""
    found = _DEVICES.get(device) if isinstance(device, str) else None
    if found is None:
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            text = f"{device!r} is not a valid device: {reason}."
            if isinstance(getattr(torch, str(device), None), torch.dtype):
                text = f"{device!r} is not a valid device. Pass the dtype as `torch.{device}`."
            if str(device).partition(":")[0] in ("gpu", "nvidia"):
                text = f"{device!r} is not a valid device. Did you mean `cuda`?"
            named = type(device) is int or isinstance(device, str)
            raise (InvalidValue if named else InvalidArgument)(text) from None
        if found == _CUDA and torch.cuda.is_available():
            found = torch.device("cuda", torch.cuda.current_device())
    return found


_CPU: Final = torch.device("cpu")
_CUDA: Final = torch.device("cuda")
_DEVICES: Final = {"cpu": _CPU}


def dtype_of(dtype: DtypeLike | None) -> torch.dtype:
    """Return the dtype that torch means by a class of Python; `None`: its default."""
    if isinstance(dtype, torch.dtype):
        return dtype
    return torch.empty(0, dtype=cast("torch.dtype", dtype), device="cpu").dtype


def device_beside(desc: Descriptor) -> torch.device | str:
    """Return where an index is that the CPU does not take: with the leaves, or on the GPU."""
    return desc.device or torch.accelerator.current_accelerator() or "cpu"


@restores
def restore_descriptor(
    batch: Batch, device: torch.device | None, lock: str | None, held: int
) -> Descriptor:
    """Rebuild a descriptor from its parts; what pickle calls."""
    if type(held) is not int or held < 0:
        raise not_valid(f"a container is not held {held!r} times")
    return restored(batch, device, lock).with_lock(lock, held)


def restored(batch: object, device: object, lock: object = None) -> Descriptor:
    """Return the unlocked descriptor that a pickle describes.

    Raises:
        FormatError: if it is none. Descriptors are shared, so one of a size like `3.0` would stand
            for others that are equal.
    """
    if not isinstance(batch, (tuple, list)):
        raise not_valid(f"{batch!r} is not a batch size")
    for size in batch:
        if type(size) not in (int, NamedSize) or not 0 <= size < _TOO_LARGE:
            raise not_valid(f"{batch!r} is not a batch size")
    names = [size.name for size in batch if type(size) is NamedSize]
    if len({*names}) < len(names) or not all(type(name) is str for name in names):
        raise not_valid(f"{names!r} are not names of dimensions")
    if (device is not None and type(device) is not torch.device) or not (
        lock is None or type(lock) is str
    ):
        raise not_valid(f"{device!r} is not a device, or {lock!r} no reason for a lock")
    return describe(tuple(batch), device)


_TOO_LARGE: Final = 1 << 63
