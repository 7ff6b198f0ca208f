"""Operations with two operands (`clamp`, `lerp`, `addcmul`, `addcdiv`), `mod` and `rsub`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._errors import InvalidArgument
from kd_core._naming import also_named
from kd_core._ops.math.binary import binary
from kd_core._ops.math.operands import is_plain, written_to
from kd_core._ops.math.ternary import blend, blend_
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from kd_core._ops.math.defaults import Default
    from kd_core._ops.math.operands import Operand


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
        """Limit every value to a range: `torch.clamp`.

        Args:
            min: the lower bound; `None`: not bounded.
            max: the upper bound; `None`: not bounded.
            out: a container into whose leaves the result is written.
        """
        _check_limits(min, max)
        fn = torch.clamp if is_plain(min) and is_plain(max) else _clamp
        return written_to(out, blend(self, fn, min, max))

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
            from kd_core._ops.math.defaults import binary_with_default

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
            from kd_core._ops.math.defaults import binary_with_default

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
            from kd_core._ops.math.defaults import binary_with_default

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


def _clamp(leaf: Tensor, low: object, high: object) -> Tensor:
    if _are_unlike(low, high):
        leaf, low = torch.clamp(leaf, low, None), None  # type: ignore[call-overload]  # as torch
    return torch.clamp(leaf, low, high)  # type: ignore[call-overload, no-any-return]  # as torch


def _clamp_(leaf: Tensor, low: object, high: object) -> Tensor:
    if _are_unlike(low, high):
        leaf, low = leaf.clamp_(low, None), None  # type: ignore[call-overload]  # as torch
    return leaf.clamp_(low, high)  # type: ignore[call-overload, no-any-return]  # as torch


def _are_unlike(low: object, high: object) -> bool:
    """Return whether one limit is a number and one a tensor, which torch takes one by one only."""
    one, other = (low, high) if isinstance(high, Tensor) else (high, low)
    if one is None or isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return bool(other.ndim) or other.requires_grad  # else torch reads it as a number


def _check_limits(low: object, high: object) -> None:
    if low is None and high is None:
        raise InvalidArgument("`clamp` expected `min`, `max`, or both, got neither.")
