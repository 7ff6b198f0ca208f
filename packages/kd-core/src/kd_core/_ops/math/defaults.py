"""Functions of two containers whose keys differ: what stands for an entry that one of them lacks.

`default` is a number or a 0-d tensor that takes the place of every missing leaf, or
`"intersection"`: then only the keys that both have are kept. Entries that are missing on either
side are computed with the default on that side, so `sub` of a key that only the second container
has is `default - value`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.names import without_names
from kd_core._batch.plans import Grown
from kd_core._errors import InvalidValue, KeySetMismatch, ShapeMismatch, a_type, wrong_type
from kd_core._keys import format_key
from kd_core._leaves.loops import Selection
from kd_core._nodes import registry
from kd_core._nodes.entry import is_unbatched
from kd_core._ops.math.binary import binary, number_beside
from kd_core._ops.math.operands import check_batches
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer, locked_as

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes.entry import Data, Entries, Entry, TensorData
    from kd_core._types import Batch

    W = TypeVar("W", bound=AbstractContainer)

Default: TypeAlias = "complex | Tensor | Literal['intersection']"
"""What stands for an entry that one container lacks; `"intersection"`: leave such entries out."""

_Fn: TypeAlias = Callable[[Tensor, Tensor], Tensor]
_SHARED: Final = "intersection"
_LEAVES: Final = (Tensor, AbstractContainer)


def binary_with_default(
    td: W,
    other: object,
    fn: Callable[..., Tensor],
    default: Default,
    otherwise: Callable[[W, object, Callable[..., Tensor]], W] = binary,
) -> W:
    """Apply a function of two to the entries of two containers whose keys may differ.

    Args:
        td: the first operand.
        other: the second operand; one that is not a container has no keys, so nothing is missing.
        fn: the function of two leaves.
        default: what stands for a missing leaf, or `"intersection"`.
        otherwise: what applies the function to an operand that is not a container.

    Raises:
        InvalidValue: if the default is another string, not one number, or an integer that the dtype
            of the leaf beside it does not hold.
        KeySetMismatch: if a key is a leaf in one container and a container in the other.
    """
    _check_default(default)
    if not isinstance(other, AbstractContainer):
        return otherwise(td, other, fn)
    check_batches(td._kd_desc.batch, other._kd_desc.batch)
    return locked_as(td, _Join(fn, default).level(td, other, ()))


def _check_default(default: object) -> None:
    if isinstance(default, str):
        if default != _SHARED:
            raise InvalidValue(
                f'`default` must be a number, a 0-d tensor or "intersection", got {default!r}.'
            )
    elif isinstance(default, Tensor):
        if default.ndim:
            raise InvalidValue(
                f"`default` must be one number, got a tensor of shape {tuple(default.shape)}."
            )
    elif not isinstance(default, (int, float, complex)):
        raise wrong_type("`default`", 'a number, a 0-d tensor or "intersection"', default)


class _Join:
    """One traversal of two containers by key."""

    def __init__(self, fn: _Fn, default: Default, in_stack: bool = False) -> None:
        self.fn, self.default = fn, default
        self.in_stack = in_stack
        """Whether leaves are those of members, which have a dimension less than their stack."""

    def level(self, td: W, other: AbstractContainer, path: tuple[str, ...]) -> W:
        batch = td._kd_desc.batch
        if isinstance(td, Composite) and other._kd_desc.batch[: len(batch)] == batch:
            joins = self._of_members(td)
            return td._by_member(lambda member, row: next(joins).level(member, row, path), other)
        mine, theirs = td._kd_entries, other._kd_entries
        entries: dict[str, Entry] = {}
        for key, value in mine.items():
            if key in theirs:
                entries[key] = self._both(value, theirs[key], (*path, key), batch)
            elif self.default != _SHARED:
                entries[key] = self._one(value, False)
        if self.default != _SHARED:
            self._add_theirs(entries, mine, theirs, batch, len(other._kd_desc.batch))
        return td._kd_like(entries, td._kd_desc.unlocked())

    def _of_members(self, stack: Composite) -> Iterator[_Join]:
        """Iterate over the traversals of the members of a stack."""
        fn = self.fn
        for position in range(len(stack._members)):
            if isinstance(fn, Selection) and fn.of_member is not None:
                yield _Join(fn.of_member(stack._dim, position), self.default, True)
            else:
                yield self if self.in_stack else _Join(fn, self.default, True)

    def _both(self, mine: Entry, theirs: Entry, path: tuple[str, ...], batch: Batch) -> Entry:
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            return self._leaf(mine, theirs, path, batch)
        if isinstance(mine, AbstractContainer) and isinstance(theirs, AbstractContainer):
            return cast("Entry", self.level(mine, theirs, path))
        if is_unbatched(mine) and is_unbatched(theirs):
            return mine._kd_zip_each(theirs, self.fn, path)
        if isinstance(mine, _LEAVES) or isinstance(theirs, _LEAVES) or _are_unlike(mine, theirs):
            raise KeySetMismatch(
                f"entry {format_key(path)} must be of one kind in both containers, got "
                f"{a_type(mine)} and {a_type(theirs)}."
            )
        if isinstance(self.fn, Selection):
            return mine._kd_zip_each(theirs, self.fn, path)
        return mine

    def _leaf(self, mine: Tensor, theirs: Tensor, path: tuple[str, ...], batch: Batch) -> Tensor:
        try:
            result = self.fn(mine, theirs)
        except (RuntimeError, TypeError) as error:
            if not is_compiling():
                error.add_note(f"This is entry {format_key(path)}.")
            raise
        if tuple(result.shape[: len(batch)]) != without_names(batch):  # for dynamo, as in `binary`
            raise ShapeMismatch(
                f"the result for entry {format_key(path)} must have a shape that starts with "
                f"batch_size {batch}, got {tuple(result.shape)}. Expand the first container, or "
                "exchange the operands."
            )
        return result

    def _add_theirs(
        self, entries: dict[str, Entry], mine: Entries, theirs: Entries, batch: Batch, ndim: int
    ) -> None:
        """Append the entries that only the second container has, with the batch of the first."""
        for key, value in theirs.items():
            if key in mine:
                continue
            entry = self._one(value, True)
            if batch and not ndim:
                entry = _expanded(entry, batch)
            entries[key] = entry

    def _one(self, entry: Entry, on_the_right: bool) -> Entry:
        """Return the result for an entry that only one container has."""
        if isinstance(entry, Tensor):
            return self._with_default(entry, on_the_right)
        if isinstance(entry, Composite):
            joins = self._of_members(entry)
            return entry._by_member(
                lambda member: cast("AbstractContainer", next(joins)._one(member, on_the_right))
            )
        if isinstance(entry, AbstractContainer):
            found = {key: self._one(each, on_the_right) for key, each in entry._kd_entries.items()}
            return cast("Entry", entry._kd_like(found, entry._kd_desc.unlocked()))
        if is_unbatched(entry):
            return self._unbatched(entry, on_the_right)
        if not isinstance(self.fn, Selection) or cast("Data", entry)._of_batch:
            return entry._kd_shallow()
        none = registry.wrap_data(None, entry._kd_desc)
        pair = (none, entry) if on_the_right else (entry, none)
        return pair[0]._kd_zip_each(pair[1], self.fn)

    def _unbatched(self, entry: TensorData, on_the_right: bool) -> Entry:
        """Return the result for a tensor without batch dimensions that one container has."""
        if isinstance(self.fn, Selection):
            raise InvalidValue(
                "an `UnbatchedTensor` that only one container has cannot be padded at some rows. "
                "`exclude` it first, or give it the batch dimensions with `expand`."
            )
        return entry._kd_map_each(lambda leaf: self._with_default(leaf, on_the_right))

    def _with_default(self, leaf: Tensor, on_the_right: bool) -> Tensor:
        default = self.default
        if self.in_stack and isinstance(default, Tensor) and not leaf.ndim:
            # Beside the stacked leaf it would not widen its dtype, so neither beside a row of it.
            default = default.to(torch.result_type(leaf.reshape(1), default))
        if not isinstance(default, Tensor):
            number = cast("complex", default)
            default = number_beside(leaf, number)
            if isinstance(self.fn, Selection) and _holds(leaf.dtype, number):
                default = default.to(leaf.dtype)
        elif default.device != leaf.device:
            default = default.to(leaf.device)
        return self.fn(default, leaf) if on_the_right else self.fn(leaf, default)


def _holds(dtype: torch.dtype, number: complex) -> bool:
    """Return whether a dtype holds what stands at some rows for a leaf that is missing.

    torch would make floats of integers, and integers of flags.
    """
    if dtype is torch.bool:
        return number in (0, 1)
    return isinstance(number, (int, float)) and number == number // 1


def _are_unlike(mine: Entry, theirs: Entry) -> bool:
    return is_unbatched(mine) is not is_unbatched(theirs)


def _expanded(entry: Entry, batch: Batch) -> Entry:
    """Return an entry without batch dimensions, expanded to a batch."""

    def expand(leaf: Tensor) -> Tensor:
        return leaf.expand((*batch, *leaf.shape))

    if isinstance(entry, Tensor):
        return expand(entry)
    return entry._kd_map_each(expand, Grown(batch, 0))
