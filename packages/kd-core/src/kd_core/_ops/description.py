"""Batch size and device, and counts of what a container holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core._descriptor import LOCKED_BY_ARENA, LOCKED_BY_SHARING, LOCKED_WITH_ROWS, describe
from kd_core._errors import (
    FROZEN,
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    ShapeMismatch,
    listed,
    shape_text,
    wrong_type,
)
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import (
    common_batch,
    has_entry,
    is_shapeless,
    kinds_by_key,
    kinds_of,
    rows_shape,
    stored_in,
)
from kd_core._nodes import is_data, is_row_data, is_unbatched, leaf_or_node, tensor_of
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    check_has,
    leaves_of,
    level_at,
    lock,
    redescribe,
    relock,
    set_names,
    unchanged_on_error,
)
from kd_core._shapes import (
    EVERYTHING,
    batch_of,
    checked_names,
    has_names,
    numel,
    plain_size,
    wrap_dim,
)
from kd_core._torch_private import is_possible
from kd_core._validation import as_entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self, TypeVar

    from kd_core._descriptor import Descriptor
    from kd_core._display import Table
    from kd_core._nodes import Entry
    from kd_core._shapes import Names
    from kd_core._types import Batch, BatchSize, NestedKey

    W = TypeVar("W", bound=AbstractContainer)


# Giving a container another batch: other entries with another size, or names of its dimensions.


class StaysLazy(InvalidArgument, NotImplementedError):
    """A change in place that a lazy stack cannot make."""


def take_batch_size(
    td: AbstractContainer,
    source: object,
    clone: bool,
    keys_to_update: Iterable[NestedKey] | None = None,
) -> bool:
    """Replace the entries and the batch size by those of a source; `False` if it has the same.

    Raises:
        KeySetMismatch: if the source lacks a key, whose entry would keep the old batch size.
        Locked: if the container is locked.
    """
    if not isinstance(source, AbstractContainer):
        remedy = "Only a container has a batch size."
        raise wrong_type("the source of `update_batch_size=True`", "a container", source, remedy)
    if source._kd_desc.batch == td._kd_desc.batch:
        return False
    if keys_to_update is not None:
        raise InvalidArgument(
            "`update_batch_size=True` replaces all entries and cannot be combined with "
            "`keys_to_update`. Pass one of them."
        )
    td._kd_check_unlocked("change the batch size")
    check_has_keys(td, source, ())
    copy = source._kd_map_each(Tensor.clone) if clone else source._kd_shallow()
    after = td._kd_desc.with_batch(source._kd_desc.batch)
    _take(td, {key: as_entry(key, value, after) for key, value in copy._kd_entries.items()}, after)
    return True


def become(td: W, result: AbstractContainer, action: str) -> W:
    """Replace the entries and the batch size by those of a result of the same keys; return it.

    Raises:
        Locked: if the container is locked.
        InvalidArgument: if it is a lazy stack, whose members stay.
    """
    td._kd_check_unlocked(action)
    if isinstance(td, Composite):
        _take_members(td, result, action)
        return td
    check_has_keys(td, result, ())
    _take(td, dict(result._kd_entries), result._kd_desc)
    return td


def _take_members(td: Composite, result: AbstractContainer, action: str) -> None:
    """Replace the members of a stack by the rows of a result along the stacked dimension."""
    dim, batch = td._dim, result._kd_desc.batch
    if dim >= len(batch) or not batch[dim]:
        raise StaysLazy(
            f"cannot {action}: a lazy stack must keep its stacked dimension and a member, got "
            f"batch_size {batch}. Leave out `inplace=True`."
        )
    same = False
    members: Sequence[AbstractContainer]
    if isinstance(result, Composite) and result._dim == dim:
        same, members = True, result._members
    else:
        members = result._kd_engine.unbind(result, dim)
    members = [
        member if same or batch == td._kd_desc.batch else member._kd_map_each(torch.clone)
        for member in members
    ]
    td._replace_members(members)
    td._kd_describe(td._kd_desc.with_batch(batch))


def _take(td: AbstractContainer, entries: dict[str, Entry], after: Descriptor) -> None:
    """Store checked entries under another descriptor: all of them, or nothing is changed."""
    before = td._kd_desc
    with unchanged_on_error(td):
        try:
            td._kd_describe(after)
            for key, entry in entries.items():
                td._kd_set_entry(key, entry)
        except BaseException:
            td._kd_describe(before)
            raise


def check_has_keys(td: AbstractContainer, source: AbstractContainer, path: tuple[str, ...]) -> None:
    """Refuse a source that lacks a key of the container."""
    theirs = source._kd_entries
    missing = [key for key in td._kd_entries if key not in theirs]
    if missing:
        where = f" below {format_key(path)}" if path else ""
        raise KeySetMismatch(
            f"the source lacks {listed(missing)}{where}, which would keep batch_size "
            f"{td._kd_desc.batch} beside {source._kd_desc.batch}. Remove these entries first."
        )
    if isinstance(td, Composite):  # whose members have the nested ones
        return
    for key, value in td._kd_entries.items():
        other = theirs[key]
        if isinstance(value, AbstractContainer) and isinstance(other, AbstractContainer):
            value._kd_check_unlocked(f"replace {format_key((*path, key))}")
            check_has_keys(value, other, (*path, key))


def check_names(names: Sequence[str | None] | None, batch: Batch) -> Names:
    """Return one name or `None` for each batch dimension; `None` stands for no names.

    Raises:
        InvalidArgument: if one is neither a string nor `None`.
        InvalidValue: if there is not one for each dimension, or one is given twice.
    """
    return checked_names([None] * len(batch) if names is None else names, batch)


def named(td: W, names: Sequence[str | None] | None) -> W:
    """Return a container under other names, locked if it is; tensors are shared."""
    checked = check_names(names, td._kd_desc.batch)
    new = td._kd_shallow()
    set_names(new, checked)
    return relock(new, td._kd_desc.lock)


def put_on(level: AbstractContainer, device: torch.device | None) -> None:
    """Set the device of a container and of all below; no leaf is moved."""
    below = level._kd_below()
    data = False
    for node in below:
        if isinstance(node, AbstractContainer):
            put_on(node, device)
        else:
            data = True
    if data and level._kd_owns_leaves:
        for key, value in list(level._kd_entries.items()):
            if not isinstance(value, (Tensor, AbstractContainer)):
                level._kd_set_entry(
                    key, value._kd_with_descriptor(describe(value._kd_desc.batch, device))
                )
    old = level._kd_desc.device
    if old is not device and old != device:
        redescribe(level, describe(level._kd_desc.batch, device))


def locked_as_rows(container: AbstractContainer, rows: W) -> W:
    """Lock views of the rows of a locked container, if its memory is that of other processes.

    Views of rows of another container are not locked: they are new containers.
    """
    desc = container._kd_desc
    if desc.lock in LOCKED_WITH_ROWS:
        return lock(rows, desc.locked_by)
    if desc.lock is not None:
        return rows
    from kd_core._store.mapped_tensor import place_of

    for leaf in leaves_of(container):  # an enclosing container is locked, which it does not know
        for part in stored_in(leaf):
            if place_of(part) is not None:
                return lock(rows, LOCKED_BY_ARENA)
            return lock(rows, LOCKED_BY_SHARING) if part.is_shared() else rows
    return rows


class Description(AbstractContainer):
    """Batch size and device."""

    __slots__ = ()

    @property
    def batch_size(self) -> torch.Size:
        """The leading dimensions shared by all entries.

        Assigning to it checks every entry and changes nothing if one does not fit. The first
        dimensions keep their names, as far as their sizes stay. A lock does not cover it.
        """
        return self._kd_desc.size

    @batch_size.setter
    def batch_size(self, batch_size: BatchSize) -> None:
        resize(self, batch_size)

    @property
    def shape(self) -> torch.Size:
        """The batch size; assigning to it is assigning to `batch_size`."""
        return self._kd_desc.size

    @shape.setter
    def shape(self, shape: BatchSize) -> None:
        resize(self, shape)

    def size(self, dim: int | str | None = None) -> torch.Size | int:
        """Return the batch size, or one of its dimensions."""
        return (
            self._kd_desc.size
            if dim is None
            else self._kd_desc.size[wrap_dim(dim, self._kd_desc.batch)]
        )

    @property
    def batch_dims(self) -> int:
        """The number of batch dimensions."""
        return self._kd_desc.ndim

    @property
    def ndim(self) -> int:
        """The number of batch dimensions."""
        return self._kd_desc.ndim

    def dim(self) -> int:
        """Return the number of batch dimensions."""
        return self._kd_desc.ndim

    def ndimension(self) -> int:
        """Return the number of batch dimensions."""
        return self._kd_desc.ndim

    def numel(self) -> int:
        """Return the number of rows: the product of the batch size (1 if it is empty)."""
        return numel(self._kd_desc.batch)

    @property
    def device(self) -> torch.device | None:
        """The device of all entries, or `None` where they may be on different ones."""
        return self._kd_desc.device

    @device.setter
    def device(self, device: torch.device | None) -> None:
        raise InvalidArgument(
            f"`device` cannot be assigned, got {device!r}. Move the container with `to(device)`, "
            "or call `clear_device_()` or `auto_device_()`."
        )

    def clear_device_(self) -> Self:
        """Clear the device, here and below: entries may be on different ones; return self."""
        put_on(self, None)
        return self

    def auto_device_(self) -> Self:
        """Set the device to the one that all leaves share, else to `None`; return self.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": 0.0}).auto_device_().device
            device(type='cpu')
        """
        found = {leaf.device for leaf in leaves_of(self)}
        put_on(self, found.pop() if len(found) == 1 else None)
        return self

    def auto_batch_size_(
        self, batch_dims: int | None = None, keep_compliant_size: bool = False
    ) -> Self:
        """Set the batch size to the leading dimensions that all entries share; return self.

        Nested containers come first, each by its own entries. One without entries takes the batch
        size of the entries before it, if there are any. Values of rows that are not tensors share
        the dimensions of their rows.

        Args:
            batch_dims: how many dimensions at most; `None`: all that they share.
            keep_compliant_size: nothing: a batch size that fits grows to the same one.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(3, 4), "b": torch.zeros(3)}).auto_batch_size_().shape
            torch.Size([3])
        """
        if batch_dims is not None and batch_dims < 0:
            raise InvalidValue(
                f"`batch_dims` must be non-negative, got {batch_dims}. Pass how many leading "
                "dimensions to share."
            )
        _refuse_frozen(self)
        _share_batch(self, batch_dims)
        return self


def _refuse_frozen(level: AbstractContainer) -> None:
    """Refuse to change an instance of a frozen class; other locks cover the entries alone."""
    if level._kd_desc.lock == FROZEN:
        level._kd_check_unlocked("change the batch size")


def _share_batch(level: AbstractContainer, batch_dims: int | None) -> bool:
    """Set the batch size to the dimensions that all entries share, at every level from below.

    Returns:
        Whether there is an entry at any level; else the batch size is that of the entries before.
    """
    shapes: list[tuple[int, ...]] = []
    filled = False
    for _, value in kinds_of(level._kd_entries):
        full = True
        if isinstance(value, Composite):
            shapes.append(value._kd_desc.batch)
        elif isinstance(value, AbstractContainer):
            full = _share_batch(value, batch_dims)
            if full or not shapes:
                shapes.append(value._kd_desc.batch)
        elif isinstance(value, Tensor):
            shapes.append(rows_shape(value))
        elif is_row_data(value):
            shapes.append(value._kd_desc.batch)
        filled = filled or full
    if not shapes and batch_dims:
        shapes.append(level._kd_desc.batch)
    if shapes:
        batch = _with_same_names(common_batch(shapes, batch_dims), level._kd_desc.batch)
        desc = level._kd_desc.with_batch(batch)
        _grow_children(level, desc, inferred=True)
        redescribe(level, desc)
    return filled


def _grow_children(level: AbstractContainer, desc: Descriptor, inferred: bool = False) -> None:
    """Set nested entries to at least the batch size of `desc`, which fits all leaves.

    One value for all rows takes an inferred batch size, and keeps its own, longer one otherwise.
    """
    if isinstance(level, Composite):
        inner = desc.batch[: level._dim] + desc.batch[level._dim + 1 :]
        for member in level._members:
            _grow_children(member, member._kd_desc.with_batch(inner), inferred)
        return
    for key, value in list(kinds_of(level._kd_entries)):
        if isinstance(value, Tensor):
            continue
        own = value._kd_desc
        whole = is_unbatched(value) or (
            inferred and desc.ndim and is_data(value) and not is_row_data(value)
        )
        if own.batch[: desc.ndim] != desc.batch or (whole and own is not desc):
            own = desc if own.device == desc.device else own.with_batch(desc.batch)
            if not isinstance(value, AbstractContainer):
                level._kd_set_entry(key, value._kd_with_descriptor(own))
                continue
            redescribe(value, own.unlocked())
        if isinstance(value, AbstractContainer):
            _grow_children(value, own, inferred)


def resize(td: AbstractContainer, batch_size: BatchSize) -> None:
    """Set the batch size of a container, and of those in it that start with the old one."""
    _refuse_frozen(td)
    batch, old = batch_of(batch_size), td._kd_desc
    if (old.open or not is_dynamo_compiling()) and batch == old.size:
        return  # as users see it; while dynamo traces, comparing sizes would add guards
    desc = old.with_batch(_with_same_names(batch, old.batch))
    td._kd_with_descriptor(desc)  # refuses what does not fit, before anything is changed
    _grow_children(td, desc)
    redescribe(td, desc)


def _with_same_names(batch: Batch, old: Batch) -> Batch:
    """Return a batch size whose first sizes are the old ones, with their names, while equal."""
    if not has_names(old):
        return batch
    same: list[int] = []
    for before, size in zip(old, batch, strict=False):
        if is_possible(plain_size(before) != size):  # to dynamo no symbol is equal to a named size
            break
        same.append(before)
    return (*same, *batch[len(same) :])


def shapes_of(level: AbstractContainer) -> Iterator[tuple[int, ...]]:
    """Yield the shape of each leaf, and of the values of rows that are not tensors."""
    if isinstance(level, Composite):  # stacking them may be impossible
        dim, count = level._dim, len(level._members)
        for member in level._members:
            yield from ((*shape[:dim], count, *shape[dim:]) for shape in shapes_of(member))
        return
    for value in level._kd_entries.values():
        if isinstance(value, Tensor):
            yield () if is_shapeless(value) else value.shape
        elif isinstance(value, AbstractContainer):
            yield from shapes_of(value)
        elif is_row_data(value):
            yield value._kd_desc.batch


# Counts of what a container holds: levels, numbers, bytes, data, and a table of all of it.


class Inventory(AbstractContainer):
    """Counts and tables of entries."""

    __slots__ = ()

    @property
    def depth(self) -> int:
        """The number of levels of containers below this one: 0 for a flat one.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": {"b": {"c": 0.0}}}).depth
            2
        """
        return _depth_of(self)

    @property
    def sorted_keys(self) -> list[str]:
        """The keys of this level in alphabetical order."""
        return sorted(self._kd_entries)

    def param_count(self, count_duplicates: bool = True) -> int:
        """Count the numbers in all leaves.

        Args:
            count_duplicates: count a tensor that two keys hold twice.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 3), "b": 1.0}).param_count()
            7
        """
        return sum(leaf.numel() for leaf in _leaves(self, count_duplicates))

    def bytes(self, count_duplicates: bool = True) -> int:
        """Count the bytes of the numbers in all leaves.

        Args:
            count_duplicates: count a tensor that two keys hold twice.
        """
        return sum(_bytes(leaf) for leaf in _leaves(self, count_duplicates))

    def entry_class(self, key: NestedKey) -> type:
        """Return the class of the entry at a key, `NoneType` if it is missing; nothing is stacked.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": 1.0, "b": {"c": "text"}}).entry_class(("b", "c"))
            <class 'kd_core.NonTensorData'>
        """
        from kd_core._store.mapped_tensor import MemoryMappedTensor, place_of

        path = path_of(key)
        found = _kind_at(self, path) if has_entry(self._kd_entries, path) else None
        is_mapped = type(found) is Tensor and place_of(found) is not None
        return MemoryMappedTensor if is_mapped else type(found)

    def get_item_shape(self, key: NestedKey) -> torch.Size:
        """Return the shape of the entry at a key: of a tensor, or the batch size of another entry.

        A size that differs among the members of a lazy stack is -1.

        Raises:
            KeyNotFound: if there is no such entry.
            ShapeMismatch: if the numbers of dimensions differ among the members of a stack.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict, lazy_stack
            >>> lazy_stack([TensorDict(a=torch.zeros(n, 4)) for n in (2, 3)]).get_item_shape("a")
            torch.Size([2, -1, 4])
        """
        path = path_of(key)
        check_has(self, path)
        return torch.Size(_shape_at(self, path))

    def is_non_tensor(self, key: NestedKey) -> bool:
        """Return whether the entry at a key is non-tensor data.

        Raises:
            KeyNotFound: if there is no such entry.
        """
        kind = _kind_at(self, path_of(key))
        return not isinstance(kind, AbstractContainer) and tensor_of(kind) is None

    def data_ptr(self, *, storage: bool = False) -> Self:
        """Return the address of the data of every leaf: a container of 0-d integer tensors.

        Args:
            storage: the address of the whole storage, where the leaf may be a part of it.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3)}, [2])
            >>> bool((td.data_ptr() == td[:1].data_ptr()).all())
            True
        """

        def address(leaf: Tensor) -> Tensor:
            data = leaf.untyped_storage() if storage else leaf
            return torch.tensor(data.data_ptr(), dtype=torch.int64, device="cpu")

        return self._kd_map_each(address, EVERYTHING)

    def is_floating_point(self) -> bool:
        """Return whether all leaves have a floating point dtype."""
        return all(map(torch.is_floating_point, leaves_of(self)))

    def non_tensor_items(
        self, include_nested: bool = False
    ) -> tuple[tuple[NestedKey, object], ...]:
        """List the non-tensor data: keys and wrappers.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": 1.0, "b": {"c": "text"}}).non_tensor_items(include_nested=True)
            ((('b', 'c'), NonTensorData(data='text', batch_size=torch.Size([]))),)
        """
        return tuple(
            (path if path[1:] else path[0], kind)
            for path, _, kind in _kinds(self, (), include_nested)
            if tensor_of(kind) is None
        )

    def summary(self) -> Table:
        """Return a table: a line for each leaf, with its key, shape, dtype, device and bytes.

        It is a string, which a prompt shows as lines and a notebook as a table.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 3), "b": {"c": "text"}}, [2]).summary()
            key         shape   dtype    device  bytes
            a           (2, 3)  float32  cpu        24
            ('b', 'c')          str
            1 tensor            6 numbers           24
        """
        from kd_core._display import Table  # programs that print nothing need none

        rows: list[tuple[str, ...]] = [("key", "shape", "dtype", "device", "bytes")]
        for path, level, kind in _kinds(self, (), True):
            name = str(path if path[1:] else path[0])
            leaf = leaf_or_node(kind)
            if not isinstance(leaf, Tensor):
                rows.append((name, "", type(leaf._kd_item()).__name__, "", ""))
                continue
            shape = str(_shape_at(level, path[-1:]))
            dtype = str(leaf.dtype).removeprefix("torch.")
            size = sum(map(_bytes, _leaves_at(level, path[-1])))
            rows.append((name, shape, dtype, str(leaf.device), f"{size:,}"))
        leaves = leaves_of(self)
        count = f"{len(leaves)} tensor{'' if len(leaves) == 1 else 's'}"
        numbers = sum(leaf.numel() for leaf in leaves)
        total = sum(map(_bytes, leaves))
        rows.append((count, "", f"{numbers:,} numbers", "", f"{total:,}"))
        return Table.of(rows)


def _kind_at(td: AbstractContainer, path: tuple[str, ...]) -> object:
    """Return the entry at a path, or one of the same kind where reading it would stack."""
    check_has(td, path)
    return kinds_by_key(level_at(td, path[:-1])._kd_entries)[path[-1]]


def _kinds(
    level: AbstractContainer, path: tuple[str, ...], nested: bool
) -> Iterator[tuple[tuple[str, ...], AbstractContainer, Entry]]:
    """Yield the path of each leaf, its level and the leaf, or one like it in a stack."""
    for key, kind in kinds_of(level._kd_entries):
        if not isinstance(kind, AbstractContainer):
            yield (*path, key), level, kind
        elif nested:
            yield from _kinds(kind, (*path, key), nested)


def _shape_at(level: AbstractContainer, path: tuple[str, ...]) -> tuple[int, ...]:
    """Return the shape of an entry; a size that differs among the members of a stack is -1."""
    if isinstance(level, Composite):
        shapes = {_shape_at(member, path): None for member in level._members}
        if len({len(shape) for shape in shapes}) > 1:
            raise ShapeMismatch(
                f"the numbers of dimensions of {format_key(path)} differ among the members: their "
                f"shapes are {', '.join(map(shape_text, shapes))}. Read it with "
                f"`get({path[-1]!r}, as_list=True)`."
            )
        if is_unbatched(_kind_at(level, path)):
            return next(iter(shapes))
        sizes = [each[0] if len(set(each)) == 1 else -1 for each in zip(*shapes, strict=True)]
        return (*sizes[: level._dim], len(level._members), *sizes[level._dim :])
    entry = level._kd_entries[path[0]]
    if path[1:] and isinstance(entry, AbstractContainer):
        return _shape_at(entry, path[1:])
    leaf = leaf_or_node(entry)
    return tuple(leaf.shape if isinstance(leaf, Tensor) else leaf._kd_desc.batch)


def _leaves_at(level: AbstractContainer, key: str) -> Iterator[Tensor]:
    """Yield the tensors that a leaf is stacked from."""
    if isinstance(level, Composite):
        for member in level._members:
            yield from _leaves_at(member, key)
    else:
        leaf = tensor_of(level._kd_entries[key])
        if leaf is not None:
            yield leaf


def _leaves(td: AbstractContainer, count_duplicates: bool) -> Sequence[Tensor]:
    leaves = leaves_of(td)
    return leaves if count_duplicates else list({id(leaf): leaf for leaf in leaves}.values())


def _bytes(leaf: Tensor) -> int:
    return math.prod(leaf.shape) * leaf.element_size()


def _depth_of(td: AbstractContainer) -> int:
    nested = [v for _, v in kinds_of(td._kd_entries) if isinstance(v, AbstractContainer)]
    return 1 + max(map(_depth_of, nested)) if nested else 0
