"""Copies; device, dtype and memory layout of leaves; their gradients; results that come early."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._descriptor import LOCKED_BY_SHARING, describe, device_of, dtype_of
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    a_type,
    listed,
    wrong_type,
)
from kd_core._leaves.foreach import wraps_tensors
from kd_core._leaves.loops import kinds_of, stored_in
from kd_core._naming import also_named, public_in
from kd_core._nodes import is_data, is_row_data, is_unbatched, leaf_or_node
from kd_core._ops.access import dict_of, with_own_data
from kd_core._ops.binary import cast_leaves, cloned
from kd_core._ops.description import become
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    engine,
    leaves_of,
    lock,
    locked_as,
    name_in,
    unlock,
)
from kd_core._shapes import batch_of, refuse_open
from kd_core._torch_private import dispatch_modes, is_view
from kd_core._unbatched import wrap_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self, TypedDict, Unpack

    from kd_core._nodes import Entry
    from kd_core._ops.binary import CastFilter
    from kd_core._types import BatchSize, DeviceLike, DtypeLike, LeafFn

    W = TypeVar("W", bound=AbstractContainer)

    class Waited(Protocol):
        """What can be waited for."""

        def result(self) -> object:
            """Wait for the end."""

    class Further(TypedDict, total=False):
        """The keyword arguments that `to`, `cpu` and `cuda` share."""

        dtype: DtypeLike | None
        other: Tensor | AbstractContainer | None
        tensor: Tensor | None
        non_blocking_pin: bool
        cast_filter: CastFilter | None
        memory_format: torch.memory_format | None
        batch_size: BatchSize | None
        inplace: bool
        num_threads: int

    class Options(Further, total=False):
        """The keyword arguments of `to`."""

        device: DeviceLike | None
        non_blocking: bool


# Moving a container to a device: the arguments of `to`, `cpu` and `cuda`, and the move itself.


def moved(td: W, device: torch.device, non_blocking: bool, stated: bool = True) -> W:
    """Return a new container of the leaves on a device; those that are there already are shared.

    Args:
        td: the container.
        device: where to.
        non_blocking: copy without waiting.
        stated: each level states the device; else those alone that state one.
    """
    there = stated or td._kd_desc.device is not None
    desc = describe(td._kd_desc.batch, device if there else None)
    if isinstance(td, Composite):
        return td._by_member(lambda member: moved(member, device, non_blocking, stated))
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        if isinstance(value, Tensor):
            # Asked first: `to` takes long to find out that there is nothing to do.
            is_there = value.device == device
            entries[key] = value if is_there else value.to(device, non_blocking=non_blocking)
        elif isinstance(value, AbstractContainer):
            entries[key] = moved(value, device, non_blocking, stated)
        elif is_unbatched(value):
            entries[key] = value._kd_map_each(
                lambda leaf: leaf.to(device, non_blocking=non_blocking)
            )._kd_with_descriptor(desc)
        else:
            entries[key] = value._kd_with_descriptor(describe(value._kd_desc.batch, desc.device))
    return td._kd_like(entries, desc)


MOST_PINNED: Final = 2**28
"""A container of at most so many bytes is moved from a GPU into pinned memory, where torch copies
with up to 30 times the speed and waits once."""
_OPTIONS: Final = frozenset({"device", "dtype", "other", "tensor", "batch_size", "inplace"}) | {
    *("non_blocking", "non_blocking_pin", "cast_filter", "memory_format", "num_threads"),
}
_DIMS: Final = {torch.channels_last: 4, torch.channels_last_3d: 5}
"""How many dimensions a leaf must have for a memory format; the others suit all leaves."""


class Target:
    """What the arguments ask for."""

    __slots__ = ("device", "dtype", "memory_format", "non_blocking", "pin")

    def __init__(self, options: Options) -> None:
        self.device: torch.device | None = None
        self.dtype: torch.dtype | None = None
        self.non_blocking = bool(options.get("non_blocking"))
        self.pin = bool(options.get("non_blocking_pin"))
        self.memory_format = options.get("memory_format")


def read_target(where: Sequence[object], options: Options) -> Target:
    """Return what the arguments of `to` ask for.

    Raises:
        InvalidArgument: if one is unknown or of the wrong type, or two are of a kind.
    """
    given = [*where]
    if options:
        _check_names(options)
        given += [options.get(name) for name in ("device", "dtype", "other", "tensor")]
    target = Target(options)
    for position, each in enumerate(given):
        if each is None:
            continue
        if type(each) is bool and 0 < position == len(where) - 1:
            target.non_blocking = bool(each)
            continue
        device, dtype = read_argument(each)
        if (device and target.device is not None) or (dtype and target.dtype is not None):
            raise InvalidArgument(
                "`to` expected at most one device and one dtype, got two of a kind. Pass each once."
            )
        target.device, target.dtype = device or target.device, dtype or target.dtype
    if target.dtype is None and options.get("cast_filter") is not None:
        raise InvalidArgument("`cast_filter` chooses what is cast to a dtype. Pass `dtype`, too.")
    return target


def with_format(memory_format: torch.memory_format) -> LeafFn:
    """Return a function that gives a leaf a memory format, if it has as many dimensions."""
    if not isinstance(memory_format, torch.memory_format):
        raise wrong_type("`memory_format`", "a `torch.memory_format`", memory_format)
    if memory_format is torch.preserve_format:
        return lambda leaf: leaf
    ndim = _DIMS.get(memory_format)
    return lambda leaf: (
        leaf.contiguous(memory_format=memory_format) if ndim in (None, leaf.ndim) else leaf
    )


def _check_names(options: Options) -> None:
    unknown = [name for name in options if name not in _OPTIONS]
    if not unknown:
        return
    raise InvalidArgument(
        f"`to` got unexpected keyword arguments: {listed(unknown)}; it takes "
        f"{listed(sorted(_OPTIONS))}."
    )


def read_argument(where: object) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype that an argument of `to` stands for."""
    if isinstance(where, torch.dtype):
        return None, where
    if isinstance(where, Tensor):
        return where.device, where.dtype
    if isinstance(where, AbstractContainer):  # without a device it says nothing
        return where._kd_desc.device, None
    if isinstance(where, (torch.device, str, int)):
        return device_of(where), None
    if where in (int, float, bool, complex):  # as in torch
        return None, dtype_of(cast("type[complex]", where))
    raise wrong_type("an argument of `to`", "a device, a dtype, a tensor or a container", where)


class Placement(AbstractContainer):
    """Copies, and the device, dtype and layout of leaves.

    What is in place already is shared, and the container itself is returned where nothing changes.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.ones(2), "n": torch.arange(2)}, [2])
        >>> td.to("cpu", torch.float64)["n"].dtype, td.to("cpu").device
        (torch.float64, device(type='cpu'))
        >>> td.to(torch.float32)["a"] is td["a"]
        True
    """

    __slots__ = ()

    def to(
        self,
        *where: DeviceLike | DtypeLike | Tensor | AbstractContainer | bool | None,
        **options: Unpack[Options],
    ) -> Self:
        """Move to a device, cast to a dtype, or both.

        Args:
            *where: a device, a dtype, a device and a dtype, a tensor whose device and dtype are
                taken, or a container whose device is taken; then, as in torch, `non_blocking`.
            **options: `device`, `dtype` and `other` (a tensor or a container) by keyword;
                `non_blocking`: do not wait for copies between pinned memory and a GPU;
                `non_blocking_pin`: pin the memory first, where the target is a GPU; a move from a
                GPU to the CPU of up to 256 MiB ends in pinned memory anyway;
                `cast_filter`: called with the path and the tensor of each leaf, says whether it is
                cast to the dtype; `memory_format`: that of leaves with as many dimensions as it is
                for; `batch_size`: that of the result; `inplace`: change this container instead of
                making a new one; `num_threads`: nothing, torch uses all threads that it has.

        Raises:
            InvalidArgument: if an argument is something else, or one is given twice.
            ShapeMismatch: if an entry does not fit `batch_size`.
            Locked: if `inplace` and the container is locked.
        """
        if len(where) == 1 and not options and where[0] is not None:  # "to" in the benchmarks
            device, dtype = read_argument(where[0])
            td = self if dtype is None else cast_leaves(self, dtype)
            return td if device is None else _move(td, device, False)
        target = read_target(where, options)
        td = self
        if target.dtype is not None:
            td = cast_leaves(td, target.dtype, options.get("cast_filter"))
        if target.device is not None:
            td = _move(td, target.device, target.non_blocking, target.pin)
        if not options:
            return locked_as(self, td)
        if target.memory_format is not None:
            td = td._kd_map_each(with_format(target.memory_format))
        batch_size = options.get("batch_size")
        if batch_size is not None:
            td = td._kd_with_descriptor(td._kd_desc.unlocked().with_batch(batch_of(batch_size)))
        return become(self, td, "move in place") if options.get("inplace") else locked_as(self, td)

    def cpu(self, **options: Unpack[Options]) -> Self:
        """Move to the CPU; the options are those of `to`."""
        return self.to("cpu", **options) if options else _move(self, "cpu", False)

    def cuda(
        self, device: int | None = None, non_blocking: bool = False, **options: Unpack[Further]
    ) -> Self:
        """Move to a GPU: the current one, or that of a number; the options are those of `to`."""
        where = "cuda" if device is None else f"cuda:{device}"
        if options:
            return self.to(where, non_blocking=non_blocking, **options)
        return _move(self, where, non_blocking)

    def as_tensor(self) -> Self:
        """Return the container with plain tensors in place of those mapped from files."""
        return locked_as(self, self._kd_map_each(lambda leaf: _plain(leaf)))

    def clear_refs_for_compile_(self) -> Self:
        """Return self: a container holds no reference to the one that encloses it."""
        return self

    @also_named(dtype="dst_type")
    def type(self, dst_type: torch.dtype, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to a dtype.

        Args:
            dst_type: the dtype.
            cast_filter: called with the path and the tensor of each leaf; says whether it is cast.
        """
        cast = cast_leaves(self, dst_type, cast_filter)
        return unlock(cast) if self._kd_desc.frozen else cast

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all leaves, or `None` where they differ or there are none."""
        dtypes = {leaf.dtype for leaf in leaves_of(self)}
        return dtypes.pop() if len(dtypes) == 1 else None

    @property
    def is_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return self._kd_desc.device is not None and self._kd_desc.device.type == "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self._kd_desc.device is not None and self._kd_desc.device.type == "cuda"

    @property
    def is_meta(self) -> bool:
        """Whether the device is `meta`, whose tensors have no data."""
        return self._kd_desc.device is not None and self._kd_desc.device.type == "meta"

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
        """Return the container with contiguous leaves; those that are so already are shared.

        Args:
            canonical: copy also what is contiguous but has other strides than a new tensor, as
                dimensions of size 1 may have.
            inplace: change this container instead of making a new one.
        """
        result = self._kd_map_each(_canonical if canonical else Tensor.contiguous)
        if not inplace:
            return with_dense_parts(result)
        pairs = zip(leaves_of(result), leaves_of(self), strict=True)
        if self._kd_desc.frozen and all(new is old for new, old in pairs):
            return self
        return become(self, result, "make contiguous in place")

    def is_contiguous(self) -> bool:
        """Return whether all leaves are contiguous; those of a lazy stack are in its members.

        Rows of data that is not a tensor are not, either.
        """
        if isinstance(self, Composite) or _holds_rows(self):
            return False
        return all(leaf.is_contiguous() for leaf in leaves_of(self))

    def pin_memory(self, num_threads: int | None = None, inplace: bool = False) -> Self:
        """Copy all leaves to pinned memory, from which a GPU reads without waiting.

        Args:
            num_threads: nothing: torch copies with all threads that it has.
            inplace: change this container instead of making a new one.

        Raises:
            InvalidValue: if there is no GPU to pin memory for.
        """
        if not torch.cuda.is_available():
            raise InvalidValue(
                "memory can be pinned for a GPU only, and none is available. Skip the call."
            )
        result = self._kd_map_each(Tensor.pin_memory)
        return become(self, result, "pin memory in place") if inplace else result

    def pin_memory_(self, num_threads: int = 0) -> Self:
        """Replace all leaves by copies in pinned memory; return self. See `pin_memory`."""
        return engine(self).pin_memory(self, inplace=True)

    def record_stream(self, stream: torch.cuda.Stream) -> Self:
        """Record on all leaves that a stream uses them: `torch.Tensor.record_stream`; return self.

        Raises:
            InvalidValue: if a leaf is not on a GPU; then nothing is recorded.
        """
        leaves = leaves_of(self)
        for leaf in leaves:
            if not leaf.is_cuda:
                raise InvalidValue(
                    f"{name_in(self, leaf)} must be on a GPU to be used by a stream, got "
                    f"{leaf.device}. Move the container with `cuda()` first."
                )
        for leaf in leaves:
            leaf.record_stream(stream)
        return self

    def is_pinned(self) -> bool:
        """Return whether all leaves are in pinned memory."""
        return all(leaf.is_pinned() for leaf in leaves_of(self))

    def share_memory_(self) -> Self:
        """Move the storage of all leaves to shared memory, for other processes; return self.

        The container is locked then: another process would not see an entry that is added or
        replaced. Leaves in an arena are shared already, and stay there.

        Raises:
            InvalidValue: if a leaf is sparse, or made of other tensors (`DTensor`); nothing is
                moved then.
        """
        leaves = leaves_of(self)
        for leaf in leaves:
            if leaf.layout not in (torch.strided, torch.jagged):
                raise InvalidValue(
                    f"{name_in(self, leaf)} of layout {leaf.layout} cannot be in shared memory. "
                    "`exclude` it first, or make it dense."
                )
            if not leaf.is_nested and wraps_tensors(leaf):
                raise InvalidValue(  # torch crashes on a `DTensor`
                    f"{name_in(self, leaf)} is {a_type(leaf)}, whose storage cannot be "
                    "in shared memory. `exclude` it first, or share the tensors it is made of."
                )
        for leaf in leaves:
            for part in stored_in(leaf):
                if not _is_in_arena(part):
                    part.share_memory_()
        return lock(self, LOCKED_BY_SHARING)

    def is_shared(self) -> bool:
        """Return whether all leaves are in shared memory, and the container is locked.

        Once it is unlocked, an entry may be replaced, which other processes would not see. Memory
        of a GPU is shared always. Without leaves, whether it was shared. See `is_memmap` for those
        in an arena.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": [1, 2]}, [2]).share_memory_()
            >>> td.is_shared(), td.unlock_().is_shared()
            (True, False)
        """
        parts = [part for leaf in leaves_of(self) for part in stored_in(leaf)]
        if not parts:
            return self._kd_desc.lock == LOCKED_BY_SHARING
        locked = self._kd_desc.frozen
        return all(part.is_shared() and (locked or part.is_cuda) for part in parts)

    def clone(self, recurse: bool = True) -> Self:
        """Copy the container; the copy is not locked.

        Args:
            recurse: copy the tensors too, and one value for all rows by `copy.deepcopy`, if it can
                be copied; of values of rows lists, tuples and dicts alone. Else all are shared.
                A value that is written in place is written in one of the copies.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
            (False, True)
        """
        if not recurse:
            copy = self._kd_shallow()
            return with_own_data(copy) if copy._kd_nested else copy
        copy = cloned(self)
        if copy._kd_nested and not is_compiling():
            _copy_values(copy)
        return copy

    def copy(self) -> Self:
        """Copy the container, its nested ones and what holds data; tensors are shared."""
        return with_own_data(self._kd_shallow())

    def __copy__(self) -> Self:
        return engine(self).copy(self)

    def to_dict(
        self,
        *,
        retain_none: bool = True,
        convert_tensors: bool | Literal["numpy"] = False,
        tolist_first: bool = False,
    ) -> dict[str, object]:
        """Convert the container into nested plain dicts; tensors are shared, data is unwrapped.

        Of a lazy stack they are the entries that all members hold; `tolist` keeps those of each.

        Args:
            retain_none: keep entries whose value is `None`.
            convert_tensors: return tensors as numbers or nested lists of numbers; `"numpy"`: as
                arrays, which share their memory where they can.
            tolist_first: return a nested container that has a batch as a list of its rows.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": {"b": 1.0, "s": "text"}}).to_dict()
            {'a': {'b': tensor(1.), 's': 'text'}}
            >>> TensorDict({"a": {"b": [1.0, 2.0]}}).to_dict(convert_tensors=True)
            {'a': {'b': [1.0, 2.0]}}
        """
        return dict_of(self, retain_none, convert_tensors, tolist_first)


def _copy_values(td: AbstractContainer) -> None:
    """Copy the values of a copy that are not tensors."""
    if isinstance(td, Composite):
        for member in td._members:
            _copy_values(member)
    elif td._kd_nested:
        for _, value in kinds_of(td._kd_entries):
            if isinstance(value, AbstractContainer):
                _copy_values(value)
            elif is_data(value):
                value._copy_values()


def _holds_rows(td: AbstractContainer) -> bool:
    """Return whether values of rows that are not tensors, or a lazy stack, are in a container."""
    if not td._kd_nested:
        return False
    return any(
        isinstance(value, Composite) or _holds_rows(value)
        if isinstance(value, AbstractContainer)
        else is_row_data(value)
        for _, value in kinds_of(td._kd_entries)
    )


def _is_in_arena(leaf: Tensor) -> bool:
    from kd_core._store.mapped_tensor import place_of

    return place_of(leaf) is not None


def with_dense_parts(td: W) -> W:
    """Make the lazy stacks in a new container dense; return it."""
    for key, value in kinds_of(td._kd_entries) if td._kd_nested else ():
        if isinstance(value, Composite):
            td._kd_set_entry(key, value._kd_engine.contiguous(value))
        elif isinstance(value, AbstractContainer):
            with_dense_parts(value)
    return td


def _canonical(leaf: Tensor) -> Tensor:
    """Return a leaf with the strides of a new tensor of its shape."""
    stride = 1
    for size, step in zip(reversed(leaf.shape), reversed(leaf.stride()), strict=True):
        if step != stride:
            return leaf.clone(memory_format=torch.contiguous_format)
        stride *= max(size, 1)
    return leaf


def _move(td: W, device: DeviceLike, non_blocking: bool, pin: bool = False) -> W:
    target = device_of(device)
    desc = td._kd_desc
    if desc.device == target:
        return td
    if target.type not in ("cuda", "cpu") or is_compiling() or dispatch_modes():
        return locked_as(td, moved(td, target, non_blocking))
    if pin and target.type == "cuda":
        return locked_as(td, moved(td._kd_map_each(_pinned), target, True))
    # All copies are on their way before the first is waited for.
    at_once = torch.cuda.is_initialized() and not non_blocking  # it is not where leaves are fake
    waited = _waited_for(td, target) if at_once else set()
    made = moved(td, target, non_blocking or bool(waited))
    for device in waited:
        torch.cuda.current_stream(device).synchronize()
    return locked_as(td, made)


def _waited_for(td: AbstractContainer, target: torch.device) -> set[torch.device]:
    """Return the GPUs whose streams copy the leaves to a device, if they all may start at once.

    torch then fills pinned memory of the CPU, and keeps what is freed: not for large containers.
    """
    leaves = leaves_of(td)
    if target.type == "cuda":
        return {target} if any(leaf.is_cpu for leaf in leaves) else set()
    found = [leaf for leaf in leaves if leaf.is_cuda]
    if sum(leaf.numel() * leaf.itemsize for leaf in found) > MOST_PINNED:
        return set()
    return {leaf.device for leaf in found}


def _pinned(leaf: Tensor) -> Tensor:
    return leaf.pin_memory() if leaf.is_cpu else leaf


def dense_copy(td: W, retain_none: bool) -> W:
    """Return a copy in which every container is a `TensorDict`."""
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        if isinstance(value, Tensor):
            entries[key] = value.clone()
        elif isinstance(value, AbstractContainer):
            entries[key] = dense_copy(value, retain_none)
        elif retain_none or value._kd_item() is not None:
            entries[key] = value._kd_map_each(Tensor.clone)
    if td._kd_desc.open:
        refuse_open(td._kd_desc.batch)
    return registry.make_dense(entries, td._kd_desc.unlocked())


def _plain(leaf: Tensor) -> Tensor:
    """Return a tensor of a subclass that only says where its memory is as a plain one."""
    is_plain = type(leaf) is Tensor or isinstance(leaf, nn.Parameter) or leaf.is_nested
    return leaf if is_plain else leaf.as_subclass(Tensor)


# Gradients: `detach`, `requires_grad_`, `grad` and `zero_grad`.


class Autograd(AbstractContainer):
    """The methods for gradients of leaves.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"w": torch.ones(2), "b": torch.ones(1)}).requires_grad_()
        >>> (td * 3).sum(reduce=True).backward()
        >>> td.grad["w"], td.detach().requires_grad
        (tensor([3., 3.]), False)
        >>> td.zero_grad().grad is None
        True
    """

    __slots__ = ()

    @property
    def requires_grad(self) -> bool:
        """Whether any leaf requires gradients."""
        return any(leaf.requires_grad for leaf in leaves_of(self))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether every leaf requires gradients; return self.

        Raises:
            InvalidValue: if a leaf cannot have gradients; then nothing is changed.
        """
        leaves = leaves_of(self)
        # Compiled code, which cannot ask, has no inference tensors but those it is given.
        asks = requires_grad and not (is_dynamo_compiling() or torch.is_inference_mode_enabled())
        for leaf in leaves:
            if requires_grad and not (leaf.is_floating_point() or leaf.is_complex()):
                raise InvalidValue(
                    f"{name_in(self, leaf)} must have a floating point or complex dtype to require "
                    f"gradients, got {leaf.dtype}. `exclude` it first, or cast it."
                )
            if asks and leaf.is_inference():
                raise InvalidValue(
                    f"{name_in(self, leaf)} must not be an inference tensor to require gradients. "
                    "`clone` the container first."
                )
            if not requires_grad and not leaf.is_leaf:
                raise InvalidValue(
                    f"{name_in(self, leaf)} must be a leaf of the graph to stop requiring "
                    "gradients, got the result of an operation. Use `detach()`."
                )
        for leaf in leaves:
            leaf.requires_grad_(requires_grad)
        return self

    def backward(
        self,
        gradient: AbstractContainer | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: AbstractContainer | Sequence[Tensor] | None = None,
    ) -> None:
        """Compute the gradients of the graph behind all leaves that require them.

        Args:
            gradient: a container of the same keys, the gradient of each leaf; `None`: each leaf
                must be one number.
            retain_graph: keep the graph; `None`: as `create_graph`.
            create_graph: record the computation of the gradients.
            inputs: the leaves of the graph whose gradients are wanted; `None`: all.

        Raises:
            InvalidValue: if no leaf requires gradients, or one is not one number.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2)}, [2]).requires_grad_()
            >>> (td * 3).sum().backward()
            >>> td.grad["a"]
            tensor([3., 3.])
        """
        mine = leaves_of(self)
        given: list[Tensor] | None = None
        if gradient is not None:
            mine, given = [], []
            self._kd_collect_pair(gradient, mine, given, ())
        roots = [leaf for leaf in mine if leaf.requires_grad]
        if not roots:
            raise InvalidValue(
                "`backward` expected a leaf that requires gradients, got none. Call "
                "`requires_grad_()` before the computation."
            )
        if given is None:
            for leaf in roots:
                if leaf.numel() != 1:
                    raise InvalidValue(
                        f"{name_in(self, leaf)} must be one number, got shape "
                        f"{tuple(leaf.shape)}. Pass `gradient`, or reduce it with `sum()`."
                    )
        else:
            given = [each for leaf, each in zip(mine, given, strict=True) if leaf.requires_grad]
        wanted = leaves_of(inputs) if isinstance(inputs, AbstractContainer) else inputs
        torch.autograd.backward(roots, given, retain_graph, create_graph, inputs=wanted)

    def detach(self) -> Self:
        """Return the container with all leaves detached from the graph; storage is shared."""
        return locked_as(self, self._kd_map_each(Tensor.detach))

    def detach_(self) -> Self:
        """Detach all leaves from the graph, in place; return self.

        Raises:
            InvalidValue: if a leaf is a view of another tensor; then nothing is changed.
        """
        leaves = leaves_of(self)
        for leaf in leaves:
            if is_view(leaf):
                raise InvalidValue(
                    f"{name_in(self, leaf)} must not be a view of another tensor to be detached in "
                    "place. Use `detach()`."
                )
        for leaf in leaves:
            leaf.detach_()
        return self

    @property
    def data(self) -> Self:
        """The container of the data of all leaves: detached from the graph, storage shared."""
        return locked_as(self, self._kd_map_each(lambda leaf: leaf.data))

    @property
    def grad(self) -> Self | None:
        """The container of the gradients; `None` if no leaf has one, as for a tensor.

        A leaf without a gradient is left out; data that is not a tensor is kept, and is reason
        enough for a container.
        """
        gradients = _gradients(self)
        return locked_as(self, gradients) if gradients._kd_entries else None

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Set the gradients of all leaves to `None` or zero; return self.

        Args:
            set_to_none: set gradients to `None`; else write zeros into them.
        """
        for leaf in leaves_of(self):
            # Of a result that keeps no gradient there is none to read, of which torch warns.
            if not (leaf.is_leaf or leaf.retains_grad) or leaf.grad is None:
                continue
            if set_to_none:
                leaf.grad = None
            else:
                with torch.no_grad():  # as `torch.nn.Module.zero_grad` does
                    leaf.grad.requires_grad_(False) if leaf.grad.is_leaf else leaf.grad.detach_()
                    leaf.grad.zero_()
        return self


def _same(leaf: Tensor) -> Tensor:
    return leaf


def _gradients(td: W) -> W:
    if isinstance(td, Composite):
        return td._by_member(_gradients)
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            inner = _gradients(value)
            if inner._kd_entries:
                entries[key] = inner
            continue
        leaf = leaf_or_node(value)
        if not isinstance(leaf, Tensor):
            entries[key] = leaf._kd_map_each(_same)
            continue
        grad = leaf.grad
        if grad is not None:
            entries[key] = grad if leaf is value else wrap_tensor(grad, td._kd_desc)
    return td._kd_like(entries, td._kd_desc.unlocked())


@public_in("kd_core")
class TensorDictFuture:
    """What `memmap(return_early=True, num_threads=2)` returns: the result is there already.

    Args:
        futures: what is waited for.
        resulting_td: the result.

    Example:
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": [1, 2]}, [2])
        >>> td.memmap("early.kd", return_early=True, num_threads=2).result()["a"]
        tensor([1, 2])
    """

    __slots__ = ("futures", "resulting_td")

    def __init__(self, futures: Iterable[Waited], resulting_td: AbstractContainer) -> None:
        self.futures = list(futures)
        self.resulting_td = resulting_td

    def result(self) -> AbstractContainer:
        """Return the container, as soon as all are done."""
        for future in self.futures:
            future.result()
        return self.resulting_td


def early(td: W, return_early: bool, threads: int) -> W:
    """Return a container, in a `TensorDictFuture` if it is asked for."""
    return cast("W", TensorDictFuture([], td)) if return_early and threads > 1 else td
