"""Counts of what a container holds: levels, numbers, bytes, data, and a table of all of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._batch.shapes import EVERYTHING
from kd_core._errors import ShapeMismatch, shape_text
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import has_entry, kinds_by_key, kinds_of
from kd_core._nodes.entry import is_unbatched, tensor_of
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    check_has,
    leaves_of,
    level_at,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from kd_core._display import Table
    from kd_core._nodes.entry import Data
    from kd_core._types import NestedKey


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
            leaf = tensor_of(kind)
            if leaf is None:
                rows.append((name, "", type(cast("Data", kind)._kd_item()).__name__, "", ""))
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
) -> Iterator[tuple[tuple[str, ...], AbstractContainer, Tensor | Data]]:
    """Yield the path of each leaf, its level and the leaf, or one like it in a stack."""
    for key, kind in kinds_of(level._kd_entries):
        if not isinstance(kind, AbstractContainer):
            yield (*path, key), level, cast("Tensor | Data", kind)
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
    leaf = tensor_of(entry)
    return tuple(cast("Data", entry)._kd_desc.batch if leaf is None else leaf.shape)


def _leaves_at(level: AbstractContainer, key: str) -> Iterator[Tensor]:
    """Yield the tensors that a leaf is stacked from."""
    if isinstance(level, Composite):
        for member in level._members:
            yield from _leaves_at(member, key)
    else:
        yield cast("Tensor", tensor_of(level._kd_entries[key]))


def _leaves(td: AbstractContainer, count_duplicates: bool) -> Sequence[Tensor]:
    leaves = leaves_of(td)
    return leaves if count_duplicates else list({id(leaf): leaf for leaf in leaves}.values())


def _bytes(leaf: Tensor) -> int:
    return math.prod(leaf.shape) * leaf.element_size()


def _depth_of(td: AbstractContainer) -> int:
    nested = [v for _, v in kinds_of(td._kd_entries) if isinstance(v, AbstractContainer)]
    return 1 + max(map(_depth_of, nested)) if nested else 0
