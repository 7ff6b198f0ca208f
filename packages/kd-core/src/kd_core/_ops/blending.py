"""Operations with two operands (`clamp`, `lerp`, `addcmul`, `addcdiv`), `mod` and `rsub`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    ShapeMismatch,
    a_type,
    wrong_type,
)
from kd_core._keys import format_key
from kd_core._leaves.loops import Selection
from kd_core._naming import also_named
from kd_core._nodes import is_unbatched
from kd_core._ops.binary import (
    binary,
    blend,
    blend_,
    blended,
    check_batches,
    is_plain,
    lined_up,
    number_beside,
    written_to,
)
from kd_core._protocol import AbstractContainer, Composite, locked_as
from kd_core._shapes import Grown, without_names

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._nodes import Entries, Entry, TensorData
    from kd_core._ops.binary import Operand
    from kd_core._types import Batch

    W = TypeVar("W", bound=AbstractContainer)


# Functions of two containers whose keys differ: what stands for an entry that one of them lacks.
#
# `default` is a number or a 0-d tensor that takes the place of every missing leaf, or
# `"intersection"`: then only the keys that both have are kept. Entries that are missing on either
# side are computed with the default on that side, so `sub` of a key that only the second container
# has is `default - value`.

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
    wide, other = lined_up(td, other)
    check_batches(wide._kd_desc.batch, other._kd_desc.batch)
    return locked_as(td, _Join(fn, default).level(wide, other, ()))


def select(td: W, other: AbstractContainer, selection: Selection, pad: float | None) -> W:
    """Return rows of two containers; data that one of them lacks is that of the other.

    Raises:
        KeySetMismatch: if one of them lacks a tensor, and there is no `pad`.
    """
    if pad is not None:
        return binary_with_default(td, other, selection, pad)
    try:
        return td._kd_zip_each(other, selection)
    except KeySetMismatch as error:
        try:
            return locked_as(td, _Join(selection, None).level(td, other, ()))
        except KeySetMismatch:
            raise error from None


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

    def __init__(self, fn: _Fn, default: Default | None, in_stack: bool = False) -> None:
        self.fn, self.default = fn, default
        """What stands for a missing leaf; `None`: nothing does, only data may be missing."""
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
            return self.level(mine, theirs, path)
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
        if self.default is None and (isinstance(entry, Tensor) or is_unbatched(entry)):
            raise KeySetMismatch("expected the same keys.")  # `select` says which
        if isinstance(entry, Tensor):
            return self._with_default(entry, on_the_right)
        if isinstance(entry, Composite):
            joins = self._of_members(entry)
            return entry._by_member(
                lambda member: cast("AbstractContainer", next(joins)._one(member, on_the_right))
            )
        if isinstance(entry, AbstractContainer):
            found = {key: self._one(each, on_the_right) for key, each in entry._kd_entries.items()}
            return entry._kd_like(found, entry._kd_desc.unlocked())
        if is_unbatched(entry):
            return self._unbatched(entry, on_the_right)
        # data that is not a tensor has nothing to be padded with
        return entry._kd_with_descriptor(entry._kd_desc.unlocked())

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


class Blending(AbstractContainer):
    """The methods that combine every leaf with two operands.

    An operand is a tensor over the batch dimensions, a container of the same keys, or a number if
    the torch function accepts one. Forms with `_` write in place; all leaves are checked before the
    first is written.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> target = TensorDict({"w": torch.zeros(2), "b": torch.zeros(1)})
        >>> online = TensorDict({"w": torch.ones(2), "b": torch.ones(1)})
        >>> target.lerp_(online, 0.25)["w"]
        tensor([0.2500, 0.2500])
        >>> (online * 7).clamp(0, 5)["b"]
        tensor([5.])
    """

    __slots__ = ()

    def clamp(
        self,
        min: Operand | None = None,
        max: Operand | None = None,
        *,
        out: Self | None = None,
    ) -> Self:
        """Limit every value to a range: `torch.clamp`; between two bounds the result is unlocked.

        Args:
            min: the lower bound; `None`: not bounded.
            max: the upper bound; `None`: not bounded.
            out: a container into whose leaves the result is written.
        """
        _check_limits(min, max)
        fn = torch.clamp if is_plain(min) and is_plain(max) else _clamp
        between = min is not None and max is not None
        return written_to(out, (blended if between else blend)(self, fn, min, max))

    def clamp_(self, min: Operand | None = None, max: Operand | None = None) -> Self:
        """Limit every value to a range, in place; return self."""
        _check_limits(min, max)
        return blend_(self, _clamp_, min, max)

    @also_named(min="other")
    def clamp_min(self, other: Operand, default: Default | None = None) -> Self:
        """Raise every value to at least `other`.

        Args:
            other: the lower bound.
            default: what stands for an entry that `self` or a container `other` lacks; see `add`.
        """
        if default is not None:
            return binary_with_default(self, other, torch.clamp_min, default)
        return blend(self, torch.clamp, other, None)

    @also_named(min="other")
    def clamp_min_(self, other: Operand) -> Self:
        """Raise every value to at least `other`, in place; return self."""
        return blend_(self, Tensor.clamp_, other, None)

    @also_named(max="other")
    def clamp_max(self, other: Operand, default: Default | None = None) -> Self:
        """Lower every value to at most `other`.

        Args:
            other: the upper bound.
            default: what stands for an entry that `self` or a container `other` lacks; see `add`.
        """
        if default is not None:
            return binary_with_default(self, other, torch.clamp_max, default)
        return blend(self, torch.clamp, None, other)

    @also_named(max="other")
    def clamp_max_(self, other: Operand) -> Self:
        """Lower every value to at most `other`, in place; return self."""
        return blend_(self, Tensor.clamp_, None, other)

    def mod(self, other: Operand) -> Self:
        """Return the remainder with the sign of the divisor; another name of `remainder`."""
        return binary(self, other, torch.remainder)

    def rsub(self, other: Operand, *, alpha: float = 1, default: Default | None = None) -> Self:
        """Subtract from the operand: `other - alpha * leaf`, as `torch.rsub`.

        Args:
            other: what is subtracted from.
            alpha: the factor of the leaves.
            default: what stands for an entry that `self` or a container `other` lacks; see `add`.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": 1.0}).rsub(3)["a"]
            tensor(2.)
        """
        subtract = partial(torch.rsub, alpha=alpha)
        if default is not None:
            return binary_with_default(self, other, subtract, default)
        return binary(self, other, subtract)

    def lerp(self, end: Operand, weight: Operand) -> Self:
        """Interpolate: `leaf + weight * (end - leaf)`, as `torch.lerp`.

        Args:
            end: the result for a weight of 1.
            weight: the weight of `end`.
        """
        return blend(self, torch.lerp, end, weight, torch._foreach_lerp)

    def lerp_(self, end: Operand, weight: Operand) -> Self:
        """Interpolate in place; return self."""
        return blend_(self, torch.Tensor.lerp_, end, weight, torch._foreach_lerp_)

    @also_named(tensor1="other1", tensor2="other2")
    def addcmul(self, other1: Operand, other2: Operand, value: float = 1) -> Self:
        """Add a product: `leaf + value * other1 * other2`, as `torch.addcmul`."""
        return blend(self, partial(torch.addcmul, value=value), other1, other2)

    @also_named(tensor1="other1", tensor2="other2")
    def addcmul_(self, other1: Operand, other2: Operand, value: float = 1) -> Self:
        """Add a product in place; return self."""
        return blend_(self, partial(Tensor.addcmul_, value=value), other1, other2)

    @also_named(tensor1="other1", tensor2="other2")
    def addcdiv(self, other1: Operand, other2: Operand, value: float = 1) -> Self:
        """Add a quotient: `leaf + value * other1 / other2`, as `torch.addcdiv`."""
        return blend(self, partial(torch.addcdiv, value=value), other1, other2)

    @also_named(tensor1="other1", tensor2="other2")
    def addcdiv_(self, other1: Operand, other2: Operand, value: float = 1) -> Self:
        """Add a quotient in place; return self."""
        return blend_(self, partial(Tensor.addcdiv_, value=value), other1, other2)


def _clamp(leaf: Tensor, low: Any, high: Any) -> Tensor:
    if _operands_are_unlike(low, high):
        leaf, low = torch.clamp(leaf, low, None), None
    return torch.clamp(leaf, low, high)


def _clamp_(leaf: Tensor, low: Any, high: Any) -> Tensor:
    if _operands_are_unlike(low, high):
        leaf, low = leaf.clamp_(low, None), None
    return leaf.clamp_(low, high)


def _operands_are_unlike(low: object, high: object) -> bool:
    """Return whether one limit is a number and one a tensor, which torch takes one by one only."""
    one, other = (low, high) if isinstance(high, Tensor) else (high, low)
    if one is None or isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return bool(other.ndim) or other.requires_grad  # else torch reads it as a number


def _check_limits(low: object, high: object) -> None:
    if low is None and high is None:
        raise InvalidArgument("`clamp` expected `min`, `max`, or both, got neither.")
