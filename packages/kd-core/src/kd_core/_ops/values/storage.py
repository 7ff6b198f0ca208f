"""All leaves in one storage, for one copy to a device or one file, or in one tensor of rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import device_of
from kd_core._batch.names import without_names
from kd_core._batch.shapes import wrap_dim
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    ShapeMismatch,
    different_keys,
    shape_text,
    wrong_type,
)
from kd_core._keys import format_key
from kd_core._leaves.foreach import run_copies
from kd_core._leaves.nested import restored_from, stored_in
from kd_core._leaves.views import walk_items
from kd_core._ops.values.moving import moved
from kd_core._protocol.composite import take_leaves
from kd_core._protocol.primitives import (
    AbstractContainer,
    leaves_of,
    lock,
    name_in,
    refuse_unbatched,
)
from kd_core._torch_private import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self, TypeVar

    from kd_core._ops.values.pack_layout import PackLayout
    from kd_core._types import DeviceLike, NestedKey

    W = TypeVar("W", bound=AbstractContainer)
    C = TypeVar("C", bound=AbstractContainer)

PathLike: TypeAlias = "str | Path"
ALIGNMENT: Final = 16
"""Bytes: where the leaves of a dtype start, so that each dtype may be viewed there."""


class Storage(AbstractContainer):
    """All leaves in one storage, or in one tensor."""

    __slots__ = ()

    def consolidate(
        self,
        filename: PathLike | None = None,
        *,
        num_threads: int = 0,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        inplace: bool = False,
        return_early: bool = False,
        use_buffer: bool = False,
        share_memory: bool = False,
        pin_memory: bool = False,
        metadata: bool = False,
    ) -> Self:
        """Copy all leaves into one storage.

        Leaves of one dtype stand one behind the other in it. The copies are outside the graph.

        Args:
            filename: a file to which the container is written, too, and its folders;
                `from_consolidated` reads it.
            num_threads: nothing: torch copies with all threads that it has.
            device: where the storage is; it is moved there in one copy. `None`: where the leaves
                are. A container that says no device of its leaves does not say this one either.
            non_blocking: return before the copy to `device` has finished.
            inplace: replace the leaves of this container, and return it.
            return_early: nothing: the copy is there when the call returns.
            use_buffer: nothing: a file is written in pieces.
            share_memory: put the storage in shared memory, for other processes.
            pin_memory: put the storage in pinned memory.
            metadata: nothing: where leaves are is read from the leaves.

        Returns:
            A locked container, whose leaves are views of that storage: it would not hold one that
            takes their place.

        Raises:
            InvalidValue: if the leaves are on several devices, or one is sparse.
            InvalidArgument: if options cannot be combined.
            Locked: if the container is locked, and `inplace`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2), "b": torch.arange(2)}, [2]).consolidate()
            >>> td.is_consolidated(), td["a"].untyped_storage().nbytes()
            (True, 32)
        """
        if filename is not None:
            from kd_core._store import files, single

            files.make_folders(Path(filename).parent)
            single.save(self, Path(filename))
        place = _Place(
            None if device is None else device_of(device), non_blocking, share_memory, pin_memory
        )
        if inplace:
            self._kd_check_unlocked("replace leaves by views of one storage")
            if place.device not in (None, self._kd_desc.device):
                raise InvalidArgument(
                    "`inplace=True` cannot be combined with another `device`, which every leaf "
                    "would have to move to. Leave out `inplace`, and use the result."
                )
        leaves = leaves_of(self)
        with torch.no_grad():
            placed = _consolidated(self, leaves, place) if leaves else []
        made = self._kd_rebuild(iter(placed))
        if inplace:
            take_leaves(self, made)
            return lock(self)
        if place.device is None or place.device == self._kd_desc.device:
            return lock(made)
        return lock(moved(made, place.device, non_blocking, stated=False))

    def is_consolidated(self) -> bool:
        """Return whether all leaves are in one storage; a leaf that was replaced is not.

        Leaves without elements have nothing there; one that is sparse is elsewhere.
        """
        leaves = [part for leaf in leaves_of(self) for part in stored_in(leaf)]
        if not leaves or any(leaf.layout is not torch.strided for leaf in leaves):
            return False
        # The storages themselves: all addresses on the meta device are 0.
        return len({leaf.untyped_storage()._cdata for leaf in leaves if leaf.numel()}) <= 1

    def pack(
        self, dim: int = -1, *, layout: PackLayout[AbstractContainer] | None = None
    ) -> tuple[Tensor, PackLayout[Self]]:
        """Concatenate the features of all leaves: each row of the batch becomes a vector.

        For what computes with vectors, such as a solver, an evolution strategy or a network on all
        entries. `layout.unpack` makes a container of the result again. Gradients flow through both.

        Args:
            dim: the position of the features among the batch dimensions.
            layout: a layout whose dimension and order of keys are taken, so that vectors of
                containers that were built in another order fit together; `None`: the order of the
                entries.

        Returns:
            A tensor of shape `batch_size` with one dimension more, and its layout.

        Raises:
            InvalidValue: if leaves have different dtypes, or an entry is not a dense tensor.
            KeySetMismatch: if the keys are not those of `layout`.
            ShapeMismatch: if a leaf does not have the shape of `layout`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.ones(3, 2, 2)}}, [3])
            >>> flat, layout = td.pack()
            >>> flat.shape
            torch.Size([3, 6])
            >>> layout.unpack(flat * 2)["b", "c"].sum()
            tensor(24.)
        """
        from kd_core._ops.values.pack_layout import PackLayout  # a dataclass, which few need

        if layout is not None and not isinstance(layout, PackLayout):
            raise wrong_type("`layout`", "a `PackLayout`", layout)
        ndim, batch = self._kd_desc.ndim, without_names(self._kd_desc.batch)
        if not isinstance(layout, (PackLayout, NoneType)):
            raise wrong_type("`layout`", "a `PackLayout`", layout)
        at = wrap_dim(dim if layout is None else layout.dim, ndim + 1) - ndim - 1
        leaves = _leaves(self)
        if layout is None:
            shapes = tuple(leaf.shape[ndim:] for leaf in leaves.values())
            layout = PackLayout(tuple(leaves), shapes, at, _row_of(self))
        else:
            _check_layout(leaves, layout, ndim)
        parts = [
            leaves[key].reshape(*batch, prod(shape)).movedim(-1, at)
            for key, shape in zip(layout.keys, layout.shapes, strict=True)
        ]
        if not parts:
            parts = [torch.zeros(*batch, 0, device=self._kd_desc.device).movedim(-1, at)]
        return torch.cat(parts, at), cast("PackLayout[Self]", layout)


def _consolidated(td: AbstractContainer, leaves: list[Tensor], place: _Place) -> list[Tensor]:
    """Copy the leaves of a container into one storage.

    Offsets that several ragged leaves share stay shared: torch compares them by identity.
    """
    for leaf in leaves:
        _check_place(td, leaf, leaves[0].device)
    if not any(leaf.is_nested for leaf in leaves):
        return _together(leaves, place)
    stored: list[Tensor] = []
    rows: dict[int, int] = {}
    numbers = []
    for leaf in leaves:
        values, *more = stored_in(leaf)
        for part in more:
            if id(part) not in rows:
                rows[id(part)] = len(stored)
                stored.append(part)
        numbers.append([len(stored), *(rows[id(part)] for part in more)])
        stored.append(values)
    placed = _together(stored, place)
    return [
        restored_from(leaf, [placed[number] for number in each])
        for leaf, each in zip(leaves, numbers, strict=True)
    ]


def _check_place(td: AbstractContainer, leaf: Tensor, device: torch.device) -> None:
    """Raise `InvalidValue` for a leaf that does not fit into one storage with others."""
    if leaf.device != device:
        raise InvalidValue(
            f"{name_in(td, leaf)} is on {leaf.device}, but others are on {device}: one storage "
            "is on one device. Move the container first, with `to`."
        )
    if leaf.layout is not (torch.jagged if leaf.is_nested else torch.strided):
        raise InvalidValue(
            f"{name_in(td, leaf)} is of layout {leaf.layout}: only dense and jagged leaves fit "
            "into one storage. `exclude` it first, or make it dense."
        )


def _together(leaves: list[Tensor], place: _Place) -> list[Tensor]:
    """Copy leaves into one storage, one dtype behind the other."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.dtype, []).append(leaf)
    if len(groups) == 1:
        flat = flatten(leaves)
        if len(leaves) == 1:  # then it is a view of the leaf
            flat = flat.clone()
        return list(unflatten(place.put(flat), leaves))
    sizes = [sum(leaf.nbytes for leaf in group) for group in groups.values()]
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device=leaves[0].device)
    spans = list(zip(groups.items(), starts, sizes, strict=False))
    for (dtype, group), start, size in spans:
        run_copies(list(unflatten(buffer[start : start + size].view(dtype), group)), group, False)
    buffer = place.put(buffer)
    placed: dict[torch.dtype, Iterator[Tensor]] = {
        dtype: iter(unflatten(buffer[start : start + size].view(dtype), group))
        for (dtype, group), start, size in spans
    }
    return [next(placed[leaf.dtype]) for leaf in leaves]


class _Place:
    """Where the storage is to be."""

    __slots__ = ("device", "non_blocking", "pin", "share")

    def __init__(
        self, device: torch.device | None, non_blocking: bool, share: bool, pin: bool
    ) -> None:
        self.device = device
        self.non_blocking = non_blocking
        self.share = share
        self.pin = pin

    def put(self, flat: Tensor) -> Tensor:
        """Return a tensor whose storage is there.

        What is pinned or shared afterwards is read: the copy that comes before it is waited for.
        """
        if self.pin and flat.is_cpu:
            flat = flat.pin_memory()
        if self.device is not None:
            is_read = self.device.type == "cpu" and (self.pin or self.share)
            flat = flat.to(self.device, non_blocking=self.non_blocking and not is_read)
        if self.pin and flat.is_cpu and not flat.is_pinned():
            flat = flat.pin_memory()
        return flat.share_memory_() if self.share else flat  # type: ignore[no-untyped-call]  # by torch


def _leaves(td: AbstractContainer) -> dict[NestedKey, Tensor]:
    """Return the leaves by key, checked to fit into one tensor."""
    refuse_unbatched(td, "packed")
    leaves: dict[NestedKey, Tensor] = {}
    dtype = None
    for key, leaf in walk_items(td._kd_entries, (True, True, _is_data, False)):
        if not isinstance(leaf, Tensor):
            raise InvalidArgument(
                f"entry {format_key(key)} is not a tensor and cannot be packed. Pack "
                "`td.filter_non_tensor_data()`."
            )
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise InvalidValue(
                f"entry {format_key(key)} is of layout {leaf.layout}: only dense leaves can be "
                "packed. `exclude` it first, or make it dense."
            )
        dtype = dtype or leaf.dtype
        if leaf.dtype is not dtype:
            raise InvalidArgument(
                f"leaves must have one dtype to be packed, got {leaf.dtype} in entry "
                f"{format_key(key)} after {dtype}. Cast the container first, with `td.float()`."
            )
        leaves[key] = leaf
    return leaves


def _is_data(kind: type) -> bool:
    return not issubclass(kind, AbstractContainer)


def _row_of(td: C) -> C:
    """Return a container of the same structure for one row, whose values take no memory."""
    ndim = td._kd_desc.ndim

    def row(leaf: Tensor) -> Tensor:
        return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape[ndim:])

    return td._kd_map_each(row, lambda batch: batch[ndim:])


def _check_layout(
    leaves: Mapping[NestedKey, Tensor], layout: PackLayout[AbstractContainer], ndim: int
) -> None:
    if leaves.keys() != set(layout.keys):
        raise different_keys(
            map(str, leaves), map(str, layout.keys), ("the container", "the layout")
        )
    for key, shape in zip(layout.keys, layout.shapes, strict=True):
        found = leaves[key].shape[ndim:]
        if found != shape:
            raise ShapeMismatch(
                f"entry {format_key(key)} must have the shape {shape_text(shape)} of the layout "
                f"after the batch size, got {shape_text(found)}."
            )
