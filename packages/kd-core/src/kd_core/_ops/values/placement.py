"""Copies, and the device, dtype and memory layout of leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from kd_core._batch.descriptor import LOCKED_BY_SHARING, device_of
from kd_core._batch.shapes import batch_of
from kd_core._compat import clone_all
from kd_core._errors import InvalidValue, a_type
from kd_core._leaves.foreach import wraps_tensors
from kd_core._leaves.loops import kinds_of
from kd_core._leaves.nested import stored_in
from kd_core._naming import also_named
from kd_core._nodes import registry
from kd_core._nodes.entry import is_row_data
from kd_core._ops.entries.listing import dict_of
from kd_core._ops.math.binary import cast_leaves, unary
from kd_core._ops.shape.rebatching import become
from kd_core._ops.values.moving import moved, read_argument, read_target, with_format
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import (
    AbstractContainer,
    engine,
    leaves_of,
    lock,
    locked_as,
    name_in,
    unlock,
)
from kd_core._torch_private import dispatch_modes

if TYPE_CHECKING:
    from typing import Self, TypeVar, Unpack

    from kd_core._nodes.entry import Entry, Node
    from kd_core._ops.math.binary import CastFilter
    from kd_core._ops.values.moving import Further, Options
    from kd_core._types import DeviceLike

    W = TypeVar("W", bound=AbstractContainer)


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
        *where: DeviceLike | torch.dtype | Tensor | AbstractContainer | bool | None,
        **options: Unpack[Options],
    ) -> Self:
        """Move to a device, cast to a dtype, or both.

        Args:
            *where: a device, a dtype, a device and a dtype, a tensor whose device and dtype are
                taken, or a container whose device is taken; then, as in torch, `non_blocking`.
            **options: `device`, `dtype` and `other` (a tensor or a container) by keyword;
                `non_blocking`: do not wait for copies between pinned memory and a GPU;
                `non_blocking_pin`: pin the memory first, where the target is a GPU;
                `cast_filter`: called with the path and the tensor of each leaf, says whether it is
                cast to the dtype; `memory_format`: that of leaves with as many dimensions as it is
                for; `batch_size`: that of the result; `inplace`: change this container instead of
                making a new one; `num_threads`: nothing, torch uses all threads that it has.

        Raises:
            InvalidArgument: if an argument is none of these, or one is given twice.
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
            return result
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
                    part.share_memory_()  # type: ignore[no-untyped-call]  # untyped in torch
        return lock(self, LOCKED_BY_SHARING)

    def is_shared(self) -> bool:
        """Return whether all leaves, at least one, are in shared memory.

        See `is_memmap` for those in an arena.
        """
        parts = [part for leaf in leaves_of(self) for part in stored_in(leaf)]
        return bool(parts) and all(part.is_shared() for part in parts)  # type: ignore[no-untyped-call]  # by torch

    def clone(self, recurse: bool = True) -> Self:
        """Copy the container; the copy is not locked.

        Args:
            recurse: copy the tensors too; else the copy shares them.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
            (False, True)
        """
        if not recurse:
            return self._kd_shallow()
        copy = unary(self, torch.clone, clone_all)
        return unlock(copy) if self._kd_desc.frozen else copy

    def copy(self) -> Self:
        """Copy the container and its nested ones; tensors are shared."""
        return self._kd_shallow()

    def __copy__(self) -> Self:
        return self._kd_shallow()

    def to_dict(
        self,
        *,
        retain_none: bool = True,
        convert_tensors: bool = False,
        tolist_first: bool = False,
    ) -> dict[str, object]:
        """Convert the container into nested plain dicts; tensors are shared, data is unwrapped.

        Args:
            retain_none: keep entries whose value is `None`.
            convert_tensors: return tensors as numbers or nested lists of numbers.
            tolist_first: return a nested container that has a batch as a list of its rows.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": {"b": 1.0, "s": "text"}}).to_dict()
            {'a': {'b': tensor(1.), 's': 'text'}}
            >>> TensorDict({"a": {"b": [1.0, 2.0]}}).to_dict(convert_tensors=True)
            {'a': {'b': [1.0, 2.0]}}
        """
        return dict_of(self, retain_none, convert_tensors, tolist_first)


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
    from kd_core._store.places import place_of

    return place_of(leaf) is not None


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
    if target.type != "cuda" or is_compiling() or dispatch_modes():
        return locked_as(td, moved(td, target, non_blocking))
    if pin:
        made = moved(td._kd_map_each(_pinned), target, True)
    else:  # all copies are on their way before the first is waited for
        waits = not non_blocking and any(leaf.is_cpu for leaf in leaves_of(td))
        made = moved(td, target, True)
        if waits:
            torch.cuda.current_stream(target).synchronize()
    return locked_as(td, made)


def _pinned(leaf: Tensor) -> Tensor:
    return leaf.pin_memory() if leaf.is_cpu else leaf


def dense_copy(td: AbstractContainer, retain_none: bool) -> Node:
    """Return a copy in which every container is a `TensorDict`."""
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        if isinstance(value, Tensor):
            entries[key] = value.clone()
        elif isinstance(value, AbstractContainer):
            entries[key] = dense_copy(value, retain_none)
        elif retain_none or value._kd_item() is not None:
            entries[key] = value._kd_map_each(Tensor.clone)
    return registry.make_dense(entries, td._kd_desc.unlocked())


def _plain(leaf: Tensor) -> Tensor:
    """Return a tensor of a subclass that only says where its memory is as a plain one."""
    is_plain = leaf.__class__ is Tensor or isinstance(leaf, nn.Parameter) or leaf.is_nested
    return leaf if is_plain else leaf.as_subclass(Tensor)
