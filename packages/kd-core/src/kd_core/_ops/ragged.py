"""Rows of different lengths, as stacks, nested tensors and padded tensors; rows that are added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._errors import InvalidValue, KeyCollision
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import has_entry, padded_leaf, row_mask
from kd_core._ops.description import StaysLazy, become, locked_as_rows
from kd_core._protocol import AbstractContainer, Composite, is_container, map_by
from kd_core._shapes import Padded, as_ints, cached, resized, wrap_dim

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._nodes import Entry, Node
    from kd_core._types import Batch, BatchFn, LeafFn, NestedKey

    C = TypeVar("C", bound=AbstractContainer)


class Ragged(AbstractContainer):
    """Rows of different lengths, and rows added before and after those of a batch."""

    __slots__ = ()

    def _kd_dense_entry(self, key: str, layout: torch.layout) -> Entry:
        entry = self._kd_entries[key]
        return densified(entry, layout) if is_container(entry, self) else entry

    def to_padded_tensor(
        self,
        padding: float = 0.0,
        mask_key: NestedKey | None = None,
        *,
        keys: Iterable[NestedKey] | None = None,
    ) -> Self:
        """Return a dense container with rows of different lengths padded to the longest.

        These are nested tensors, and entries of lazy stacks that cannot be stacked.

        Args:
            padding: the value of the elements that are added.
            mask_key: where to store a mask that is true for real elements; it is that of the first
                of `keys`, or of the first padded entry.
            keys: entries that have a mask whatever the lengths of their rows are: the mask of one
                whose rows are all of one length, as in a last batch of one row, is all true.

        Raises:
            KeyCollision: if there is an entry at `mask_key`.
            InvalidValue: if there is no entry to make a mask of.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 2)])
            >>> padded = stack.to_padded_tensor(mask_key="mask", keys=["a"])
            >>> padded["a"], padded["mask"]
            (tensor([[1., 0.],
                    [1., 1.]]), tensor([[ True, False],
                    [ True,  True]]))
        """
        dense = densified(self, torch.jagged)
        masks: list[Tensor] = []
        if keys is not None:
            masks += [_mask_at(cast("AbstractContainer", dense), path_of(key)) for key in keys]

        def padded(leaf: Tensor) -> Tensor:
            if not leaf.is_nested:
                return leaf
            if not masks:
                masks.append(row_mask(leaf))
            return padded_leaf(leaf, padding)

        made = cast("Self", dense._kd_map_each(padded))
        if mask_key is None:
            return made
        if not masks:
            raise InvalidValue(
                "no entry is ragged, so there is no mask for `mask_key`. Pass `keys`, the entries "
                "that have a mask in any case."
            )
        path = path_of(mask_key)
        if has_entry(made._kd_entries, path):
            raise KeyCollision(f"key {format_key(path)} exists already. Pass another `mask_key`.")
        made._kd_store(path, masks[0])
        return made

    def pad(
        self,
        pad_size: Sequence[int],
        value: float = 0.0,
        inplace: bool = False,
        safe: bool = True,
    ) -> Self:
        """Add rows before and after those along each batch dimension.

        Args:
            pad_size: the numbers of rows to add before and after, for the first batch dimension,
                then for the second, and so on; negative numbers remove rows.
            value: the value of the new rows.
            inplace: change this container instead of making a new one. The members of a lazy
                stack stay: they are padded themselves, and new ones are added at both ends.
            safe: nothing: every call checks its sizes.

        Raises:
            InvalidValue: if the numbers are not pairs, or there are too many.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.ones(2)}, [2]).pad([0, 1], value=5)["a"]
            tensor([1., 1., 5.])
        """
        batch = self._kd_desc.batch
        new, backwards = _padded_sizes(batch, as_ints(pad_size))
        stack: AbstractContainer = self
        if inplace and isinstance(stack, Composite):
            _pad_members(stack, new, backwards, value)
            return self

        def pad_leaf(leaf: Tensor) -> Tensor:
            return torch.constant_pad_nd(leaf, [0, 0] * (leaf.ndim - len(batch)) + backwards, value)

        result = map_by((pad_leaf, new, Padded(new, len(batch))), self)
        return become(self, result, "pad in place") if inplace else result


def _row(dim: int, row: int) -> tuple[LeafFn, BatchFn]:
    return (
        lambda leaf: leaf.select(dim, row),
        lambda batch: batch[:dim] + batch[dim + 1 :],
    )


def _pad_members(stack: Composite, new: Batch, backwards: Sequence[int], value: float) -> None:
    """Pad the members of a lazy stack in place, and add members to both ends.

    Args:
        stack: the stack.
        new: its batch size then.
        backwards: the rows to add before and after, as `_padded_sizes` returns them.
        value: the value of the new rows.
    """
    stack._kd_check_unlocked("pad in place")
    dim = stack._dim
    if not new[dim]:
        raise StaysLazy("cannot pad in place: a lazy stack must keep a member.")
    pairs = [backwards[at : at + 2] for at in reversed(range(0, len(backwards), 2))]
    before, after = pairs.pop(dim)
    inner = [rows for pair in pairs for rows in pair]
    members = stack._members
    padded = members
    if any(inner):
        padded = [cast("Ragged", member).pad(inner, value) for member in members]

    def blank(member: AbstractContainer) -> AbstractContainer:
        rows = member._kd_engine.unsqueeze(member, 0)
        return rows._kd_engine.unbind(cast("Ragged", rows).pad([1, -1], value), 0)[0]

    heads = [blank(padded[0]) for _ in range(before)]
    tails = [blank(padded[-1]) for _ in range(after)]
    for member, result in zip(members, padded, strict=True):
        if result is not member:
            become(member, result, "pad in place")
    kept = members[max(-before, 0) : len(members) - max(-after, 0)]
    stack._replace_members([*heads, *kept, *tails])
    stack._kd_describe(stack._kd_desc.with_batch(new))


def _mask_at(td: AbstractContainer, path: tuple[str, ...]) -> Tensor:
    """Return which elements of an entry are not padding; one row after the other is looked at."""
    leaf = td._kd_read(path)
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return row_mask(leaf)
    ndim = td._kd_desc.ndim
    if not isinstance(leaf, Tensor) or leaf.ndim <= ndim:
        raise InvalidValue(
            f"entry {format_key(path)} must be a tensor with a dimension behind the batch to have "
            "a mask. Leave it out of `keys`."
        )
    return leaf.new_ones(leaf.shape[: ndim + 1], dtype=torch.bool)


def densified(container: AbstractContainer, layout: torch.layout) -> Node:
    """Return a dense container in which entries that cannot be stacked are nested tensors.

    One without lazy stacks is returned itself.
    """
    ragged, mine = cast("Ragged", container), container._kd_entries
    entries = {key: ragged._kd_dense_entry(key, layout) for key in mine}
    if not isinstance(container, Composite) and all(entries[key] is mine[key] for key in mine):
        return cast("Node", container)
    return cast("Node", container._kd_like(entries, container._kd_desc.unlocked()))


def as_stack(container: C, dim: int | str) -> C:
    """Return a lazy stack of the rows along a batch dimension."""
    at = wrap_dim(dim, container._kd_desc.batch)
    if isinstance(container, Composite) and container._dim == at:
        return container
    rows = [container._kd_map_each(*_row(at, row)) for row in range(container._kd_desc.batch[at])]
    if container._kd_desc.frozen:
        rows = [locked_as_rows(container, row) for row in rows]
    stack: C = registry.lazy_stack(rows, at)
    if container._kd_desc.named:
        desc = stack._kd_desc.with_batch(container._kd_desc.batch)
        stack._kd_describe(desc)
    return stack


@cached
def _padded_sizes(batch: Batch, pad_size: Batch) -> tuple[Batch, list[int]]:
    """Return the batch size after padding, and the rows to add with the last dimension first.

    The padding value is not an argument: -0.0 and 0.0 would be the same key of the cache.
    """
    ndim = len(batch)
    if len(pad_size) % 2 or len(pad_size) > 2 * ndim:
        raise InvalidValue(
            f"`pad_size` must hold a pair (rows before, rows after) for at most {ndim} batch "
            f"dimensions, got {pad_size}."
        )
    pairs = [pad_size[i : i + 2] for i in range(0, len(pad_size), 2)]
    pairs += [(0, 0)] * (ndim - len(pairs))
    new = tuple(resized(size, size + sum(pair)) for size, pair in zip(batch, pairs, strict=True))
    if any(size < 0 for size in new):
        raise InvalidValue(
            f"`pad_size` must not remove more rows than batch_size {batch} has, got {pad_size}."
        )
    return new, [rows for pair in reversed(pairs) for rows in pair]
