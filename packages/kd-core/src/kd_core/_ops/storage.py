"""All leaves in one storage, for one copy to a device or one file, or in one tensor of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from kd_core._descriptor import (
    LOCKED_BY_ARENA,
    LOCKED_BY_CONSOLIDATING,
    LOCKED_BY_USER,
    describe,
    device_of,
)
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    ShapeMismatch,
    different_keys,
    refuse_existing,
    refuse_pickles,
    shape_text,
    wrong_type,
)
from kd_core._keys import format_key, path_of
from kd_core._leaves.foreach import run_copies
from kd_core._leaves.loops import restored_from, stored_in, strided_view
from kd_core._leaves.views import walk_items
from kd_core._naming import public_in
from kd_core._nodes import is_data
from kd_core._ops.description import put_on
from kd_core._ops.placement import early, moved
from kd_core._protocol import (
    AbstractContainer,
    leaves_of,
    lock,
    name_in,
    refuse_partial,
    refuse_unbatched,
    relock,
    take_leaves,
)
from kd_core._shapes import without_names, wrap_dim
from kd_core._torch_private import flatten, storage_of, unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Never, Self

    from kd_core._nodes import Node
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
        exist_ok: bool = True,
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
            exist_ok: whether a file of that name is replaced; else that is an error.

        Returns:
            A locked container, whose leaves are views of that storage: it would not hold one that
            takes their place. Pickled and loaded again it is not locked, unless this one was.

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

            refuse_existing(filename, exist_ok)
            files.make_folders(Path(filename).parent)
            single.save(self, Path(filename))
        place = _Place(
            None if device is None else device_of(device), non_blocking, share_memory, pin_memory
        )
        if inplace:
            self._kd_check_unlocked("replace leaves by views of one storage")
            moves = any(leaf.device != place.device for leaf in leaves_of(self))
            if place.device not in (None, self._kd_desc.device) and moves:
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
            return lock(self, LOCKED_BY_CONSOLIDATING)
        reason = LOCKED_BY_USER if self._kd_desc.frozen else LOCKED_BY_CONSOLIDATING
        if place.device is None or place.device == self._kd_desc.device:
            return lock(made, reason)
        return lock(moved(made, place.device, non_blocking, stated=False), reason)

    def is_consolidated(self) -> bool:
        """Return whether it is locked, as `consolidate` does, and all leaves are in one storage.

        Leaves without elements have nothing there; one that is sparse is elsewhere. Without leaves:
        whether `consolidate` locked it.
        """
        if not self._kd_desc.frozen:
            return False
        leaves = [part for leaf in leaves_of(self) for part in stored_in(leaf)]
        if not leaves:
            return self._kd_desc.lock == LOCKED_BY_CONSOLIDATING
        if any(leaf.layout is not torch.strided for leaf in leaves):
            return False
        return len({storage_of(leaf) for leaf in leaves if leaf.numel()}) <= 1

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
            KeySetMismatch: if the keys are not those of `layout`, or not those of all members of a
                lazy stack.
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
        if layout is not None and not isinstance(layout, PackLayout):
            raise wrong_type("`layout`", "a `PackLayout`", layout)
        ndim, batch = self._kd_desc.ndim, without_names(self._kd_desc.batch)
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
        return flat.share_memory_() if self.share else flat


def _leaves(td: AbstractContainer) -> dict[NestedKey, Tensor]:
    """Return the leaves by key, checked to fit into one tensor."""
    refuse_unbatched(td, "packed")
    refuse_partial(td, "pack")
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


C_co = TypeVar("C_co", bound=AbstractContainer, covariant=True)


@public_in("kd_core")
class PackLayout(Generic[C_co]):
    """Where each leaf stands in the tensor that `TensorDict.pack` returns.

    Two layouts are equal if they have the same keys, shapes and dimension.

    Attributes:
        keys: the keys of the leaves in their order; those of nested ones are tuples.
        shapes: the dimensions of each leaf after the batch size.
        dim: the dimension of the features, counted from the end.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.ones(3)}}, [3])
        >>> flat, layout = td.pack()
        >>> layout.keys, layout.offsets, layout.numel
        (('a', ('b', 'c')), (0, 2), 3)
        >>> layout.unpack(flat[0])["b", "c"]
        tensor(1.)
    """

    __slots__ = ("_row", "dim", "keys", "shapes")
    keys: tuple[NestedKey, ...]
    shapes: tuple[torch.Size, ...]
    dim: int
    _row: C_co

    def __init__(
        self, keys: tuple[NestedKey, ...], shapes: tuple[torch.Size, ...], dim: int, row: C_co
    ) -> None:
        values = {"keys": keys, "shapes": shapes, "dim": dim, "_row": row}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> Never:
        raise AttributeError(
            f"cannot set `{name}`: a layout does not change. Pack a container to get another one."
        )

    def __delattr__(self, name: str) -> Never:
        raise AttributeError(f"cannot delete `{name}`: a layout does not change.")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.keys, self.shapes, self.dim, self._row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackLayout):
            return NotImplemented
        return (self.keys, self.shapes, self.dim) == (other.keys, other.shapes, other.dim)

    def __hash__(self) -> int:
        return hash((self.keys, self.shapes, self.dim))

    def __repr__(self) -> str:
        return f"PackLayout(keys={self.keys!r}, shapes={self.shapes!r}, dim={self.dim!r})"

    @property
    def numel(self) -> int:
        """The number of features: the size of the dimension `dim`."""
        return sum(map(prod, self.shapes))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The position of the first feature of each leaf."""
        return tuple(accumulate(map(prod, self.shapes), initial=0))[:-1]

    def unpack(self, flat: Tensor) -> C_co:
        """Return a container whose leaves are views of a tensor of this layout.

        Nested containers and classes are those of the container that was packed. The batch size is
        that of the tensor without the dimension of the features, so rows may have been selected,
        stacked or computed.

        Args:
            flat: a tensor of `numel` features in dimension `dim`, of any dtype.

        Raises:
            ShapeMismatch: if it does not have as many features.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> flat, layout = TensorDict({"a": torch.zeros(3, 2), "b": torch.ones(3)}, [3]).pack()
            >>> layout.unpack(torch.stack([flat, flat * 2])).batch_size
            torch.Size([2, 3])
        """
        if flat.ndim < -self.dim or flat.shape[self.dim] != self.numel:
            raise ShapeMismatch(
                f"a tensor of this layout must have {self.numel} features in dimension "
                f"{self.dim}, got shape {shape_text(flat.shape)}."
            )
        last = flat.movedim(self.dim, -1)
        batch = tuple(last.shape[:-1])
        parts = iter(torch.split(last, [prod(shape) for shape in self.shapes], -1))
        row = self._row
        if row._kd_desc.device not in (None, flat.device):
            row = moved(row, flat.device, False)
        return row._kd_map_each(
            lambda leaf: next(parts).reshape((*batch, *leaf.shape)), lambda inner: batch + inner
        )


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


# Leaves in a file that several processes fill and add entries to: arenas.


class MemoryMaps(AbstractContainer):
    """Containers whose leaves are in an arena: a file in memory that every process sees."""

    __slots__ = ()

    def memmap(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: str | int | None = None,
        atomic: bool = False,
        exist_ok: bool = True,
    ) -> Self:
        """Write the container to an arena, and return one whose leaves are in it.

        A write in place to a leaf of the result, or of what `load_memmap` returns in any process,
        is seen by all of them. An arena has no checksums, and may be lost when the machine stops,
        until `kd_core.store.seal` makes it a store like a saved one.

        Args:
            prefix: the directory; it and those above it are created, and what a store there holds
                is replaced. `None`: a temporary one, which is removed when the process ends.
            copy_existing: nothing: leaves in another arena are copied wherever a `prefix` is given.
            num_threads: nothing: one file is written in one piece.
            return_early: return a `TensorDictFuture`, if `num_threads` is above 1.
            share_non_tensor: nothing: data that is not a tensor does not change in an arena.
            existsok: as `exist_ok`, under the name of tensordict.
            robust_key: nothing: any string is a key.
            archive: write a single file, as `save` does; `None`: if the path ends in `.tdz`.
            compression: nothing: what is mapped is not compressed.
            atomic: nothing: every write is seen whole or not at all.
            exist_ok: whether what is at the path is replaced; else that is an error.

        Returns:
            A container on the CPU that is locked: its keys and shapes are those of the arena.

        Raises:
            InvalidArgument: if the type of an entry cannot be saved; nothing is written.
            InvalidValue: if the value of an entry cannot be saved, or the path is something else.
            AlreadyExists: if something is at the path, and `exist_ok` is false.
            OSError: if writing fails, as on a full disk; the old content stays.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).memmap("arena.kd")
            >>> td["a"][1] = 1
            >>> TensorDict.load_memmap("arena.kd")["a"]
            tensor([0., 1., 0.])
        """
        from kd_core._store.forms import create_arena, load_arena, save

        single = _is_archive(prefix, archive, compression)
        stays = prefix is None and self._kd_desc.frozen
        if stays and _path_of_leaves(self) is not None:
            return _result(self._kd_shallow(), True, return_early, num_threads)
        if prefix is not None and single:
            refuse_existing(prefix, existsok and exist_ok)
            save(self, prefix, archive=True)
            made = load_arena(prefix)
        else:
            made = create_arena(self, prefix, exist_ok=existsok and exist_ok)
        return _result(
            cast("Self", made), self._kd_desc.device is not None, return_early, num_threads
        )

    def memmap_(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        atomic: bool = False,
        exist_ok: bool = True,
    ) -> Self:
        """Write the container to an arena, and replace its leaves by those in it; return self.

        Args:
            prefix: the directory; what a store there holds is replaced. `None`: a temporary one,
                which is removed when the process ends.
            copy_existing: this and what follows is as in `memmap`.
            num_threads: as above.
            return_early: as above.
            share_non_tensor: as above.
            existsok: as above.
            robust_key: as above.
            atomic: as above.
            exist_ok: as above.

        Returns:
            The container itself, on the CPU and locked; see `memmap`. One that is in an arena
            already stays there, if no other directory is asked for.

        Raises:
            Locked: if an enclosing container is locked.
            InvalidArgument: if the type of an entry cannot be saved; nothing is written.
            InvalidValue: if the value of an entry cannot be saved, or the path is something else.
        """
        from kd_core._store.forms import create_arena
        from kd_core._store.mapped_tensor import record_root, root_of

        place = _path_of_leaves(self) if self._kd_desc.frozen else None
        if place is not None and (prefix is None or Path(prefix).absolute() == Path(place)):
            return _result(self, True, return_early, num_threads)
        if self._kd_desc.held:
            self._kd_check_unlocked("replace leaves by those in an arena")
        made = create_arena(self, prefix, exist_ok=existsok and exist_ok)
        reason = self._kd_desc.lock
        relock(self, None)
        try:
            take_leaves(self, made)
        except BaseException:
            relock(self, reason)
            raise
        stated = self._kd_desc.device is not None
        put_on(self, torch.device("cpu"))
        root = root_of(made)
        assert root is not None
        record_root(self, root)
        return _result(self, stated, return_early, num_threads)

    def memmap_like(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        existsok: bool = True,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        overwrite: bool = False,
        exist_ok: bool = True,
    ) -> Self:
        """Create an arena for a container of this structure, whose leaves are zeros.

        Leaves are not read and their bytes are not written, so an expanded container, or one on the
        meta device, describes a large arena. Non-tensor data is copied. If an arena of the same
        structure is there already, it is opened with what it holds: a program that starts again
        finds its data.

        Args:
            prefix: the directory. `None`: a temporary one, which is removed when the process ends.
            copy_existing: nothing, as in `memmap`.
            existsok: as `exist_ok`, under the name of tensordict.
            num_threads: nothing, as in `memmap`.
            return_early: as in `memmap`.
            share_non_tensor: nothing, as in `memmap`.
            robust_key: nothing, as in `memmap`.
            archive: `True` is refused, since a single file is not filled in place.
            overwrite: replace what is there by zeros.
            exist_ok: whether there may be something at the path.

        Returns:
            A container that is locked; see `memmap`.

        Raises:
            InvalidArgument: if the type of an entry cannot be saved; nothing is written.
            InvalidValue: if the value of an entry cannot be saved, or the path is something else,
                or a store of another structure is there and `overwrite` is not given.
            OSError: if there is no room for it; the old content stays.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict, store
            >>> row = TensorDict({"x": torch.zeros(4), "done": False})
            >>> data = row.expand(1000).memmap_like("rows.arena")
            >>> data[:2] = row.apply(torch.ones_like).expand(2)
            >>> row.expand(1000).memmap_like("rows.arena")["x"].sum()
            tensor(8.)
            >>> store.seal("rows.arena")
            >>> TensorDict.load("rows.arena")["x"].sum()
            tensor(8.)
        """
        from kd_core._store.forms import create_arena

        if archive:
            raise InvalidValue(
                "`archive=True` makes a single file, whose leaves cannot be filled in place. Write "
                "a directory, and call `kd_core.pack_memmap` when it is filled."
            )
        made = create_arena(
            self._kd_map_each(_on_cpu, lambda sizes: sizes),
            prefix,
            filled=False,
            exist_ok=(existsok and exist_ok) or overwrite,
            overwrite=overwrite,
        )
        return _result(
            cast("Self", made), self._kd_desc.device is not None, return_early, num_threads
        )

    @classmethod
    def load_memmap(
        cls,
        prefix: PathLike,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        *,
        out: AbstractContainer | None = None,
        robust_key: bool | None = True,
        subpath: NestedKey | None = None,
        mode: str | None = None,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
    ) -> Self:
        """Return the container in an arena or a store; writes in place go to its file.

        A store that `save` wrote becomes an arena: from then on it has no checksums, until
        `kd_core.store.seal` records them. With `mode="r"`, and where this process must not write,
        it stays as it is, as for `load`. So does a single file. A directory that the package
        tensordict wrote stays one: writes and new entries go to its files.

        Args:
            prefix: what `memmap`, `memmap_like` or `save` wrote.
            device: where the tensors are copied; `None`: they stay in the file.
            non_blocking: return before the copy to `device` has finished.
            out: a container that takes the values, and is returned.
            robust_key: nothing: any string is a key.
            subpath: the key of a nested container, which is returned.
            mode: `"r"`: writes stay in this process; `None` and `"r+"`: they go to the file.
            num_threads: nothing: a file is mapped in one piece.
            allow_pickle: `False` or `None`; no file can run code when it is read.

        Returns:
            A container on the CPU, not locked; what is added to it is not added to the arena.

        Raises:
            FormatError: if it is damaged.
            OSError: if there is nothing at the path.
            InvalidValue: if there is no such mode or `subpath`, or `allow_pickle` is `True`.
        """
        from kd_core._store.forms import load_arena, part_at, taken
        from kd_core._store.mapped_tensor import is_private

        refuse_pickles(allow_pickle)
        found = part_at(load_arena(prefix, private=is_private(mode)), subpath, prefix)
        return cast("Self", taken(found, device, non_blocking, out))

    def load_memmap_(
        self,
        prefix: PathLike,
        robust_key: bool | None = True,
        *,
        allow_pickle: bool | None = None,
        mode: str | None = None,
    ) -> Self:
        """Write the values of an arena into entries that exist, and add the others; return self.

        Allowed on a locked container that has all keys. To map the arena itself use `load_memmap`.

        Args:
            prefix: what `memmap`, `memmap_like` or `save` wrote.
            robust_key: nothing: any string is a key.
            allow_pickle: `False` or `None`; no file can run code when it is read.
            mode: nothing: the values are read.

        Raises:
            Locked: if the arena has a key that a locked container does not have.
            ShapeMismatch: if a value cannot be broadcast to its entry.
            FormatError: if it is damaged.
        """
        from kd_core._store.forms import load
        from kd_core._store.mapped_tensor import is_private

        refuse_pickles(allow_pickle)
        is_private(mode)
        return self._kd_engine.update(self, load(prefix), inplace=True)

    def is_memmap(self) -> bool:
        """Return whether all leaves are in one arena, and the container is locked.

        If none has elements, whether it is an arena itself. Once it is unlocked, an entry may be
        replaced by one that is elsewhere.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": [1, 2]}, [2])
            >>> td.is_memmap(), td.memmap("is.arena").is_memmap()
            (False, True)
        """
        if any(map(Tensor.numel, leaves_of(self))):
            return self._kd_desc.frozen and _path_of_leaves(self) is not None
        return self._kd_desc.lock == LOCKED_BY_ARENA

    @property
    def saved_path(self) -> Path | None:
        """The directory of the arena in which all leaves are.

        `None` for an arena without a path, whose directory is removed when the process ends. That
        of an empty container is the one from which it was made.

        Raises:
            AttributeError: if not all leaves are in one arena.
        """
        from kd_core._store.files import is_temporary
        from kd_core._store.mapped_tensor import root_of

        found = _path_of_leaves(self) if any(map(Tensor.numel, leaves_of(self))) else root_of(self)
        if found is None:
            raise AttributeError(
                "a container whose leaves are not all in one memory map does not have a "
                "`saved_path`. Call `memmap` first."
            )
        return None if is_temporary(found) else Path(found)

    def make_memmap(
        self,
        key: NestedKey,
        shape: Sequence[int] | Tensor,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry of zeros to the arena of the container, and return it.

        Other processes see it after `memmap_refresh_`. The container is what `memmap`, `memmap_`,
        `memmap_like` or `load_memmap` returned, and it may be empty at first.

        Args:
            key: the key; levels that do not exist are created.
            shape: the shape, which starts with the batch size; a tensor with a row of sizes for
                each row makes a nested tensor of the strided layout.
            dtype: the dtype; `None`: the default of torch.
            robust_key: nothing: any string is a key.

        Raises:
            InvalidValue: if the container is not the whole of an arena.
            KeyCollision: if there is such an entry, here or in the arena.
            ShapeMismatch: if the shape does not start with the batch size.
            FormatError: if the arena is sealed.
            OSError: if there is no room for it; nothing is changed.

        Example:
            >>> from kd_core import TensorDict
            >>> data = TensorDict({}, [1000]).memmap("grown.arena")
            >>> data.make_memmap("obs", (1000, 4))[:2] = 1
            >>> TensorDict.load_memmap("grown.arena")["obs"].sum()
            tensor(8.)
        """
        dtype = dtype or torch.get_default_dtype()
        if isinstance(shape, Tensor) and shape.ndim == 2:
            zeros = torch.zeros(int(shape.prod(1).sum()), dtype=dtype)
            return _added(self, key, strided_view(zeros, shape), filled=False)
        sizes = shape.tolist() if isinstance(shape, Tensor) else shape
        checked = torch.empty(tuple(sizes), device="meta").shape
        return _added(self, key, torch.zeros((), dtype=dtype).expand(checked), filled=False)

    def make_memmap_from_tensor(
        self,
        key: NestedKey,
        tensor: Tensor,
        *,
        copy_data: bool = True,
        existsok: bool = True,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the values of a tensor to the arena of the container; return it.

        Args:
            key: the key; levels that do not exist are created.
            tensor: the values, whose shape starts with the batch size.
            copy_data: whether the values are copied; else the entry is zeros.
            existsok: nothing: an entry that exists is an error, and is written to in place.
            robust_key: nothing: any string is a key.

        Raises:
            InvalidValue: if the tensor cannot be saved; else as `make_memmap`.
        """
        return _added(self, key, tensor, filled=copy_data)

    def make_memmap_from_storage(
        self,
        key: NestedKey,
        storage: torch.UntypedStorage,
        shape: Sequence[int] | Tensor,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the bytes of a storage to the arena of the container; return it.

        Args:
            key: the key; levels that do not exist are created.
            storage: the storage; its bytes are copied.
            shape: the shape, which starts with the batch size; a tensor with a row of sizes for
                each row makes a nested tensor of the strided layout.
            dtype: the dtype of the elements; `None`: the default of torch.
            robust_key: nothing: any string is a key.

        Raises:
            RuntimeError: if the storage has fewer bytes; else as `make_memmap`.
        """
        from kd_core._store.mapped_tensor import tensor_of

        dtype = dtype or torch.get_default_dtype()
        if isinstance(shape, Tensor) and shape.ndim == 2:
            values = tensor_of(storage, [int(shape.prod(1).sum())], dtype)
            return _added(self, key, strided_view(values, shape), filled=True)
        sizes = shape.tolist() if isinstance(shape, Tensor) else shape
        return _added(self, key, tensor_of(storage, sizes, dtype), filled=True)

    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Self:
        """Add the entries to the container that its arena has by now; return self.

        Values need no refresh: all processes see them at once.

        Args:
            allow_pickle: `False` or `None`; no file can run code when it is read.

        Raises:
            InvalidValue: if the container is not the whole of an arena.
            FormatError: if the arena is sealed, or is damaged.

        Example:
            >>> from kd_core import TensorDict
            >>> data = TensorDict({}, [3]).memmap("refreshed.arena")
            >>> TensorDict.load_memmap("refreshed.arena").make_memmap("new", (3,))
            tensor([0., 0., 0.])
            >>> list(data.keys()), list(data.memmap_refresh_().keys())
            ([], ['new'])
        """
        from kd_core._store.forms import refresh

        refuse_pickles(allow_pickle)
        refresh(self)
        return self


def _result(td: C, stated: bool, return_early: bool, threads: int) -> C:
    """Return a container in an arena, locked; in a `TensorDictFuture` if it is asked for.

    Data that is not a tensor is on the CPU if the container was on a device before (`stated`).
    """
    if not stated:
        _clear_device_of_data(td)
    return early(lock(td, LOCKED_BY_ARENA), return_early, threads)


def _on_cpu(leaf: Tensor) -> Tensor:
    """Return a leaf, or what describes one on the meta device without memory."""
    if not leaf.is_meta:
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device="cpu").expand(leaf.shape)


def _clear_device_of_data(node: Node) -> None:
    """Let data that is not a tensor be on no device: it is not in the arena."""
    for below in node._kd_below():
        if is_data(below):
            own = below._kd_desc
            below._kd_describe(describe(own.batch).with_lock(own.lock, own.held))
        else:
            _clear_device_of_data(below)


def _is_archive(path: PathLike | None, archive: bool | None, compression: str | int | None) -> bool:
    single = Path(path).suffix == ".tdz" if archive is None and path is not None else bool(archive)
    from kd_core._store.forms import check_compression

    check_compression(compression, single)
    return single


def _path_of_leaves(td: AbstractContainer) -> str | None:
    """Return the directory of the one arena in which all leaves are that have elements."""
    from kd_core._store.mapped_tensor import place_of

    parts = (part for leaf in leaves_of(td) for part in stored_in(leaf))
    found = map(place_of, filter(Tensor.numel, parts))
    places = {None if place is None else place.path for place in found}
    return places.pop() if len(places) == 1 else None


def _added(td: AbstractContainer, key: NestedKey, leaf: Tensor, *, filled: bool) -> Tensor:
    from kd_core._store.forms import add_entry

    return add_entry(td, path_of(key), leaf, filled=filled)
