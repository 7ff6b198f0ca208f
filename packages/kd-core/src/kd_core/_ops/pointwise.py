"""Pointwise operations: one typed method per row of `tools/operations.py`.

Written by `tools/generate_ops.py`: change the table, then run `nox -s generate`.
`_ops.binary` has the rules for operands, and runs the functions.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from kd_core._leaves.foreach import (
    add_tensor,
    add_tensor_,
    div_tensor,
    div_tensor_,
    mul_tensor,
    mul_tensor_,
    sub_tensor,
    sub_tensor_,
)
from kd_core._leaves.writes import fmax_, fmin_, logaddexp_, maximum_, minimum_
from kd_core._naming import also_named
from kd_core._ops.binary import (
    as_float,
    as_truth,
    binary,
    binary_,
    binary_of_tensors,
    binary_of_tensors_,
    binary_swapped,
    cast_leaves,
    compared,
    is_comparable,
    reflected,
    unary,
    unary_,
)
from kd_core._protocol import AbstractContainer, Addable

if TYPE_CHECKING:
    from typing import Self

    from kd_core._ops.binary import CastFilter, Comparable, Operand
    from kd_core._ops.blending import Default

OPERATORS: Final = {  # of the operations that have one: "truediv" for `/`, which is `__truediv__`
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "truediv",
    "pow": "pow",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
}


class Unary(AbstractContainer):
    """Functions of one tensor, applied to every leaf.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([-4.0]), "b": {"c": torch.tensor([9.0])}})
        >>> td.abs().sqrt().to_dict()
        {'a': tensor([2.]), 'b': {'c': tensor([3.])}}
    """

    __slots__ = ()

    def abs(self) -> Self:
        """Return the absolute value of every leaf: `torch.abs`."""
        return unary(self, torch.abs, torch._foreach_abs)

    def __abs__(self) -> Self:
        return unary(self, torch.abs, torch._foreach_abs)

    def neg(self) -> Self:
        """Return the negative of every leaf: `torch.neg`."""
        return unary(self, torch.neg, torch._foreach_neg)

    def __neg__(self) -> Self:
        return unary(self, torch.neg, torch._foreach_neg)

    def positive(self) -> Self:
        """Return the value itself of every leaf: `torch.positive`."""
        return unary(self, torch.positive)

    def __pos__(self) -> Self:
        return unary(self, torch.positive)

    def bitwise_not(self) -> Self:
        """Return the bitwise negation of every leaf: `torch.bitwise_not`."""
        return unary(self, torch.bitwise_not)

    def __invert__(self) -> Self:
        return unary(self, operator.invert)

    def acos(self) -> Self:
        """Return the inverse cosine of every leaf: `torch.acos`."""
        return unary(self, torch.acos, torch._foreach_acos)

    def asin(self) -> Self:
        """Return the inverse sine of every leaf: `torch.asin`."""
        return unary(self, torch.asin, torch._foreach_asin)

    def atan(self) -> Self:
        """Return the inverse tangent of every leaf: `torch.atan`."""
        return unary(self, torch.atan, torch._foreach_atan)

    def cos(self) -> Self:
        """Return the cosine of every leaf: `torch.cos`."""
        return unary(self, torch.cos, torch._foreach_cos)

    def cosh(self) -> Self:
        """Return the hyperbolic cosine of every leaf: `torch.cosh`."""
        return unary(self, torch.cosh, torch._foreach_cosh)

    def erf(self) -> Self:
        """Return the error function of every leaf: `torch.erf`."""
        return unary(self, torch.erf, torch._foreach_erf)

    def frac(self) -> Self:
        """Return the fractional part of every leaf: `torch.frac`."""
        return unary(self, torch.frac, torch._foreach_frac)

    def erfc(self) -> Self:
        """Return the complementary error function of every leaf: `torch.erfc`."""
        return unary(self, torch.erfc, torch._foreach_erfc)

    def exp(self) -> Self:
        """Return the exponential of every leaf: `torch.exp`."""
        return unary(self, torch.exp, torch._foreach_exp)

    def expm1(self) -> Self:
        """Return the exponential minus one of every leaf: `torch.expm1`."""
        return unary(self, torch.expm1, torch._foreach_expm1)

    def lgamma(self) -> Self:
        """Return the logarithm of the absolute gamma function of every leaf: `torch.lgamma`."""
        return unary(self, torch.lgamma, torch._foreach_lgamma)

    def log(self) -> Self:
        """Return the natural logarithm of every leaf: `torch.log`."""
        return unary(self, torch.log, torch._foreach_log)

    def log10(self) -> Self:
        """Return the logarithm to base 10 of every leaf: `torch.log10`."""
        return unary(self, torch.log10, torch._foreach_log10)

    def log1p(self) -> Self:
        """Return the natural logarithm of one plus the value of every leaf: `torch.log1p`."""
        return unary(self, torch.log1p, torch._foreach_log1p)

    def log2(self) -> Self:
        """Return the logarithm to base 2 of every leaf: `torch.log2`."""
        return unary(self, torch.log2, torch._foreach_log2)

    def reciprocal(self) -> Self:
        """Return the reciprocal of every leaf: `torch.reciprocal`."""
        return unary(self, torch.reciprocal, torch._foreach_reciprocal)

    def rsqrt(self) -> Self:
        """Return the reciprocal of the square root of every leaf: `torch.rsqrt`."""
        return unary(self, torch.rsqrt, torch._foreach_rsqrt)

    def sigmoid(self) -> Self:
        """Return the logistic sigmoid of every leaf: `torch.sigmoid`."""
        return unary(self, torch.sigmoid, torch._foreach_sigmoid)

    def sin(self) -> Self:
        """Return the sine of every leaf: `torch.sin`."""
        return unary(self, torch.sin, torch._foreach_sin)

    def sinh(self) -> Self:
        """Return the hyperbolic sine of every leaf: `torch.sinh`."""
        return unary(self, torch.sinh, torch._foreach_sinh)

    def sqrt(self) -> Self:
        """Return the square root of every leaf: `torch.sqrt`."""
        return unary(self, torch.sqrt, torch._foreach_sqrt)

    def tan(self) -> Self:
        """Return the tangent of every leaf: `torch.tan`."""
        return unary(self, torch.tan, torch._foreach_tan)

    def tanh(self) -> Self:
        """Return the hyperbolic tangent of every leaf: `torch.tanh`."""
        return unary(self, torch.tanh, torch._foreach_tanh)

    def acosh(self) -> Self:
        """Return the inverse hyperbolic cosine of every leaf: `torch.acosh`."""
        return unary(self, torch.acosh)

    def asinh(self) -> Self:
        """Return the inverse hyperbolic sine of every leaf: `torch.asinh`."""
        return unary(self, torch.asinh)

    def atanh(self) -> Self:
        """Return the inverse hyperbolic tangent of every leaf: `torch.atanh`."""
        return unary(self, torch.atanh)

    def deg2rad(self) -> Self:
        """Return radians from degrees of every leaf: `torch.deg2rad`."""
        return unary(self, torch.deg2rad)

    def digamma(self) -> Self:
        """Return the digamma function of every leaf: `torch.digamma`."""
        return unary(self, torch.digamma)

    def erfinv(self) -> Self:
        """Return the inverse error function of every leaf: `torch.erfinv`."""
        return unary(self, torch.erfinv)

    def exp2(self) -> Self:
        """Return the power of two of every leaf: `torch.exp2`."""
        return unary(self, torch.exp2)

    def rad2deg(self) -> Self:
        """Return degrees from radians of every leaf: `torch.rad2deg`."""
        return unary(self, torch.rad2deg)

    def sinc(self) -> Self:
        """Return the normalised sinc of every leaf: `torch.sinc`."""
        return unary(self, torch.sinc)

    def logit(self, eps: float | None = None) -> Self:
        """Return the log-odds of every leaf: `torch.logit`."""
        if eps is not None:
            return unary(self, partial(torch.logit, eps=eps))
        return unary(self, torch.logit)

    def ceil(self) -> Self:
        """Return the smallest integer that is not less of every leaf: `torch.ceil`."""
        return unary(self, torch.ceil, torch._foreach_ceil)

    def floor(self) -> Self:
        """Return the largest integer that is not greater of every leaf: `torch.floor`."""
        return unary(self, torch.floor, torch._foreach_floor)

    def sign(self) -> Self:
        """Return the sign of every leaf: `torch.sign`."""
        return unary(self, torch.sign, torch._foreach_sign)

    def trunc(self) -> Self:
        """Return the integer part of every leaf: `torch.trunc`."""
        return unary(self, torch.trunc, torch._foreach_trunc)

    def round(self, *, decimals: int = 0) -> Self:
        """Return the nearest integer of every leaf: `torch.round`."""
        if type(decimals) is not int or decimals != 0:
            return unary(self, partial(torch.round, decimals=decimals))
        return unary(self, torch.round, torch._foreach_round)

    def logical_not(self) -> Self:
        """Return the logical negation of every leaf: `torch.logical_not`."""
        return unary(self, torch.logical_not)

    def relu(self) -> Self:
        """Return the positive part of every leaf: `torch.relu`."""
        return unary(self, torch.relu)

    def sgn(self) -> Self:
        """Return the sign (for complex numbers the unit phase) of every leaf: `torch.sgn`."""
        return unary(self, torch.sgn)

    def square(self) -> Self:
        """Return the square of every leaf: `torch.square`."""
        return unary(self, torch.square)

    def nan_to_num(
        self, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
    ) -> Self:
        """Return finite numbers for NaN and infinities of every leaf: `torch.nan_to_num`."""
        if nan is not None or posinf is not None or neginf is not None:
            return unary(self, partial(torch.nan_to_num, nan=nan, posinf=posinf, neginf=neginf))
        return unary(self, torch.nan_to_num)

    def isfinite(self) -> Self:
        """Return whether a value is finite of every leaf: `torch.isfinite`."""
        return unary(self, torch.isfinite)

    def isinf(self) -> Self:
        """Return whether a value is infinite of every leaf: `torch.isinf`."""
        return unary(self, torch.isinf)

    def isnan(self) -> Self:
        """Return whether a value is NaN of every leaf: `torch.isnan`."""
        return unary(self, torch.isnan)

    def isneginf(self) -> Self:
        """Return whether a value is negative infinity of every leaf: `torch.isneginf`."""
        return unary(self, torch.isneginf)

    def isposinf(self) -> Self:
        """Return whether a value is positive infinity of every leaf: `torch.isposinf`."""
        return unary(self, torch.isposinf)

    def isreal(self) -> Self:
        """Return whether a value is real of every leaf: `torch.isreal`."""
        return unary(self, torch.isreal)

    def signbit(self) -> Self:
        """Return whether the sign bit is set of every leaf: `torch.signbit`."""
        return unary(self, torch.signbit)


class UnaryInPlace(AbstractContainer):
    """Functions of one tensor that write into the storage of every leaf.

    All leaves are checked before the first is written; allowed on a locked container.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> a = torch.tensor([4.0])
        >>> td = TensorDict({"a": a}).lock_()
        >>> td.sqrt_() is td, a
        (True, tensor([2.]))
    """

    __slots__ = ()

    def abs_(self) -> Self:
        """Write the absolute value into every leaf; return self."""
        return unary_(self, torch.Tensor.abs_, torch._foreach_abs_)

    def neg_(self) -> Self:
        """Write the negative into every leaf; return self."""
        return unary_(self, torch.Tensor.neg_, torch._foreach_neg_)

    def bitwise_not_(self) -> Self:
        """Write the bitwise negation into every leaf; return self."""
        return unary_(self, torch.Tensor.bitwise_not_)

    def acos_(self) -> Self:
        """Write the inverse cosine into every leaf; return self."""
        return unary_(self, torch.Tensor.acos_, torch._foreach_acos_)

    def asin_(self) -> Self:
        """Write the inverse sine into every leaf; return self."""
        return unary_(self, torch.Tensor.asin_, torch._foreach_asin_)

    def atan_(self) -> Self:
        """Write the inverse tangent into every leaf; return self."""
        return unary_(self, torch.Tensor.atan_, torch._foreach_atan_)

    def cos_(self) -> Self:
        """Write the cosine into every leaf; return self."""
        return unary_(self, torch.Tensor.cos_, torch._foreach_cos_)

    def cosh_(self) -> Self:
        """Write the hyperbolic cosine into every leaf; return self."""
        return unary_(self, torch.Tensor.cosh_, torch._foreach_cosh_)

    def erf_(self) -> Self:
        """Write the error function into every leaf; return self."""
        return unary_(self, torch.Tensor.erf_, torch._foreach_erf_)

    def frac_(self) -> Self:
        """Write the fractional part into every leaf; return self."""
        return unary_(self, torch.Tensor.frac_, torch._foreach_frac_)

    def erfc_(self) -> Self:
        """Write the complementary error function into every leaf; return self."""
        return unary_(self, torch.Tensor.erfc_, torch._foreach_erfc_)

    def exp_(self) -> Self:
        """Write the exponential into every leaf; return self."""
        return unary_(self, torch.Tensor.exp_, torch._foreach_exp_)

    def expm1_(self) -> Self:
        """Write the exponential minus one into every leaf; return self."""
        return unary_(self, torch.Tensor.expm1_, torch._foreach_expm1_)

    def lgamma_(self) -> Self:
        """Write the logarithm of the absolute gamma function into every leaf; return self."""
        return unary_(self, torch.Tensor.lgamma_, torch._foreach_lgamma_)

    def log_(self) -> Self:
        """Write the natural logarithm into every leaf; return self."""
        return unary_(self, torch.Tensor.log_, torch._foreach_log_)

    def log10_(self) -> Self:
        """Write the logarithm to base 10 into every leaf; return self."""
        return unary_(self, torch.Tensor.log10_, torch._foreach_log10_)

    def log1p_(self) -> Self:
        """Write the natural logarithm of one plus the value into every leaf; return self."""
        return unary_(self, torch.Tensor.log1p_, torch._foreach_log1p_)

    def log2_(self) -> Self:
        """Write the logarithm to base 2 into every leaf; return self."""
        return unary_(self, torch.Tensor.log2_, torch._foreach_log2_)

    def reciprocal_(self) -> Self:
        """Write the reciprocal into every leaf; return self."""
        return unary_(self, torch.Tensor.reciprocal_, torch._foreach_reciprocal_)

    def rsqrt_(self) -> Self:
        """Write the reciprocal of the square root into every leaf; return self."""
        return unary_(self, torch.Tensor.rsqrt_, torch._foreach_rsqrt_)

    def sigmoid_(self) -> Self:
        """Write the logistic sigmoid into every leaf; return self."""
        return unary_(self, torch.Tensor.sigmoid_, torch._foreach_sigmoid_)

    def sin_(self) -> Self:
        """Write the sine into every leaf; return self."""
        return unary_(self, torch.Tensor.sin_, torch._foreach_sin_)

    def sinh_(self) -> Self:
        """Write the hyperbolic sine into every leaf; return self."""
        return unary_(self, torch.Tensor.sinh_, torch._foreach_sinh_)

    def sqrt_(self) -> Self:
        """Write the square root into every leaf; return self."""
        return unary_(self, torch.Tensor.sqrt_, torch._foreach_sqrt_)

    def tan_(self) -> Self:
        """Write the tangent into every leaf; return self."""
        return unary_(self, torch.Tensor.tan_, torch._foreach_tan_)

    def tanh_(self) -> Self:
        """Write the hyperbolic tangent into every leaf; return self."""
        return unary_(self, torch.Tensor.tanh_, torch._foreach_tanh_)

    def acosh_(self) -> Self:
        """Write the inverse hyperbolic cosine into every leaf; return self."""
        return unary_(self, torch.Tensor.acosh_)

    def asinh_(self) -> Self:
        """Write the inverse hyperbolic sine into every leaf; return self."""
        return unary_(self, torch.Tensor.asinh_)

    def atanh_(self) -> Self:
        """Write the inverse hyperbolic tangent into every leaf; return self."""
        return unary_(self, torch.Tensor.atanh_)

    def deg2rad_(self) -> Self:
        """Write radians from degrees into every leaf; return self."""
        return unary_(self, torch.Tensor.deg2rad_)

    def digamma_(self) -> Self:
        """Write the digamma function into every leaf; return self."""
        return unary_(self, torch.Tensor.digamma_)

    def erfinv_(self) -> Self:
        """Write the inverse error function into every leaf; return self."""
        return unary_(self, torch.Tensor.erfinv_)

    def exp2_(self) -> Self:
        """Write the power of two into every leaf; return self."""
        return unary_(self, torch.Tensor.exp2_)

    def rad2deg_(self) -> Self:
        """Write degrees from radians into every leaf; return self."""
        return unary_(self, torch.Tensor.rad2deg_)

    def sinc_(self) -> Self:
        """Write the normalised sinc into every leaf; return self."""
        return unary_(self, torch.Tensor.sinc_)

    def logit_(self, eps: float | None = None) -> Self:
        """Write the log-odds into every leaf; return self."""
        if eps is not None:
            return unary_(self, partial(torch.Tensor.logit_, eps=eps))
        return unary_(self, torch.Tensor.logit_)

    def ceil_(self) -> Self:
        """Write the smallest integer that is not less into every leaf; return self."""
        return unary_(self, torch.Tensor.ceil_, torch._foreach_ceil_)

    def floor_(self) -> Self:
        """Write the largest integer that is not greater into every leaf; return self."""
        return unary_(self, torch.Tensor.floor_, torch._foreach_floor_)

    def sign_(self) -> Self:
        """Write the sign into every leaf; return self."""
        return unary_(self, torch.Tensor.sign_, torch._foreach_sign_)

    def trunc_(self) -> Self:
        """Write the integer part into every leaf; return self."""
        return unary_(self, torch.Tensor.trunc_, torch._foreach_trunc_)

    def round_(self, *, decimals: int = 0) -> Self:
        """Write the nearest integer into every leaf; return self."""
        if type(decimals) is not int or decimals != 0:
            return unary_(self, partial(torch.Tensor.round_, decimals=decimals))
        return unary_(self, torch.Tensor.round_, torch._foreach_round_)

    def logical_not_(self) -> Self:
        """Write the logical negation into every leaf; return self."""
        return unary_(self, torch.Tensor.logical_not_)

    def relu_(self) -> Self:
        """Write the positive part into every leaf; return self."""
        return unary_(self, torch.Tensor.relu_)

    def sgn_(self) -> Self:
        """Write the sign (for complex numbers the unit phase) into every leaf; return self."""
        return unary_(self, torch.Tensor.sgn_)

    def square_(self) -> Self:
        """Write the square into every leaf; return self."""
        return unary_(self, torch.Tensor.square_)

    def nan_to_num_(
        self, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
    ) -> Self:
        """Write finite numbers for NaN and infinities into every leaf; return self."""
        if nan is not None or posinf is not None or neginf is not None:
            return unary_(
                self, partial(torch.Tensor.nan_to_num_, nan=nan, posinf=posinf, neginf=neginf)
            )
        return unary_(self, torch.Tensor.nan_to_num_)


class Arithmetic(Addable):
    """Arithmetic with a number, a tensor over the batch dimensions, or a container.

    Two containers must have the same keys, and batch sizes that torch broadcasts, of which the
    shorter one must not fit the first dimensions of the other, too. With `default` their keys may
    differ: it is the number that stands for a leaf that one of them lacks, or `"intersection"`, and
    only the keys that both have are kept.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, 3)}, [2])
        >>> (1 - td / 2)["a"]
        tensor([0.5000, 0.5000])
        >>> (td * torch.tensor([1.0, 2.0]) + td)["b"]
        tensor([[2., 2., 2.],
                [3., 3., 3.]])
        >>> td.sub(TensorDict({"a": torch.ones(2), "c": torch.ones(2)}, [2]), default=0)["c"]
        tensor([-1., -1.])
    """

    __slots__ = ()

    def add(self, other: Operand, alpha: float = 1, *, default: Default | None = None) -> Self:
        """Return the sum, leaf by leaf: `torch.add`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, partial(torch.add, alpha=alpha), default)
        if type(alpha) is not int or alpha != 1:
            return binary(self, other, partial(torch.add, alpha=alpha))
        return binary(self, other, torch.add, torch._foreach_add, add_tensor)

    def __add__(self, other: Operand) -> Self:  # type: ignore[override]  # sums, does not chain
        return binary(self, other, torch.add, torch._foreach_add, add_tensor)

    def __radd__(self, other: Operand) -> Self:
        return binary_swapped(self, other, torch.add, torch._foreach_add, add_tensor)

    def sub(self, other: Operand, alpha: float = 1, *, default: Default | None = None) -> Self:
        """Return the difference, leaf by leaf: `torch.sub`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, partial(torch.sub, alpha=alpha), default)
        if type(alpha) is not int or alpha != 1:
            return binary(self, other, partial(torch.sub, alpha=alpha))
        return binary(self, other, torch.sub, torch._foreach_sub, sub_tensor)

    def __sub__(self, other: Operand) -> Self:
        return binary(self, other, torch.sub, torch._foreach_sub, sub_tensor)

    def __rsub__(self, other: Operand) -> Self:
        return reflected(self, other, operator.sub, exact=True)

    def mul(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the product, leaf by leaf: `torch.mul`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.mul, default)
        return binary(self, other, torch.mul, torch._foreach_mul, mul_tensor)

    def __mul__(self, other: Operand) -> Self:
        return binary(self, other, torch.mul, torch._foreach_mul, mul_tensor)

    def __rmul__(self, other: Operand) -> Self:
        return binary_swapped(self, other, torch.mul, torch._foreach_mul, mul_tensor)

    def div(
        self, other: Operand, *, rounding_mode: str | None = None, default: Default | None = None
    ) -> Self:
        """Return the quotient, leaf by leaf: `torch.div`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(
                self, other, partial(torch.div, rounding_mode=rounding_mode), default
            )
        if rounding_mode is not None:
            return binary(self, other, partial(torch.div, rounding_mode=rounding_mode))
        return binary(self, other, torch.div, torch._foreach_div, div_tensor)

    def __truediv__(self, other: Operand) -> Self:
        return binary(self, other, torch.div, torch._foreach_div, div_tensor)

    def __rtruediv__(self, other: Operand) -> Self:
        return reflected(self, other, operator.truediv)

    @also_named(exponent="other")
    def pow(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the power, leaf by leaf: `torch.pow`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.pow, default)
        return binary(self, other, torch.pow, torch._foreach_pow)

    def __pow__(self, other: Operand) -> Self:
        return binary(self, other, torch.pow, torch._foreach_pow)

    def __rpow__(self, other: Operand) -> Self:
        return reflected(self, other, operator.pow)

    def floor_divide(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the floor of the quotient, leaf by leaf: `torch.floor_divide`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.floor_divide, default)
        return binary(self, other, torch.floor_divide)

    def __floordiv__(self, other: Operand) -> Self:
        return binary(self, other, torch.floor_divide)

    def __rfloordiv__(self, other: Operand) -> Self:
        return reflected(self, other, operator.floordiv)

    def remainder(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the remainder, with the sign of the divisor, leaf by leaf: `torch.remainder`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.remainder, default)
        return binary(self, other, torch.remainder)

    def __mod__(self, other: Operand) -> Self:
        return binary(self, other, torch.remainder)

    def __rmod__(self, other: Operand) -> Self:
        return reflected(self, other, operator.mod)

    def fmod(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the remainder, with the sign of the dividend, leaf by leaf: `torch.fmod`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.fmod, default)
        return binary(self, other, torch.fmod)

    def maximum(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the larger value, leaf by leaf: `torch.maximum`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(
                self, other, torch.maximum, default, otherwise=binary_of_tensors
            )
        return binary_of_tensors(self, other, torch.maximum, torch._foreach_maximum)

    def minimum(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the smaller value, leaf by leaf: `torch.minimum`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(
                self, other, torch.minimum, default, otherwise=binary_of_tensors
            )
        return binary_of_tensors(self, other, torch.minimum, torch._foreach_minimum)

    def fmax(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the larger value, ignoring NaN, leaf by leaf: `torch.fmax`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(
                self, other, torch.fmax, default, otherwise=binary_of_tensors
            )
        return binary_of_tensors(self, other, torch.fmax)

    def fmin(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the smaller value, ignoring NaN, leaf by leaf: `torch.fmin`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(
                self, other, torch.fmin, default, otherwise=binary_of_tensors
            )
        return binary_of_tensors(self, other, torch.fmin)

    def atan2(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the angle of the point (other, value), leaf by leaf: `torch.atan2`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(
                self, as_float(other), torch.atan2, default, otherwise=binary_of_tensors
            )
        return binary_of_tensors(self, as_float(other), torch.atan2)

    def copysign(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the magnitude with the sign of the operand, leaf by leaf: `torch.copysign`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.copysign, default)
        return binary(self, other, torch.copysign)

    def hypot(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the length of the hypotenuse, leaf by leaf: `torch.hypot`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(
                self, other, torch.hypot, default, otherwise=binary_of_tensors
            )
        return binary_of_tensors(self, other, torch.hypot)

    def logaddexp(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the logarithm of the sum of exponentials, leaf by leaf: `torch.logaddexp`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(
                self, other, torch.logaddexp, default, otherwise=binary_of_tensors
            )
        return binary_of_tensors(self, other, torch.logaddexp)

    def xlogy(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the value times the logarithm of the operand, leaf by leaf: `torch.xlogy`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.xlogy, default)
        return binary(self, other, torch.xlogy)


class ArithmeticInPlace(AbstractContainer):
    """Arithmetic that writes into the storage of every leaf.

    All leaves are checked before the first is written; allowed on a locked container.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> a = torch.ones(2)
        >>> td = TensorDict({"a": a}, [2])
        >>> td += 1
        >>> a
        tensor([2., 2.])
    """

    __slots__ = ()

    def add_(self, other: Operand, alpha: float = 1) -> Self:
        """Write the sum into every leaf; return self."""
        if type(alpha) is not int or alpha != 1:
            return binary_(self, other, partial(torch.Tensor.add_, alpha=alpha))
        return binary_(self, other, torch.Tensor.add_, torch._foreach_add_, add_tensor_)

    def __iadd__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.add_, torch._foreach_add_, add_tensor_)

    def sub_(self, other: Operand, alpha: float = 1) -> Self:
        """Write the difference into every leaf; return self."""
        if type(alpha) is not int or alpha != 1:
            return binary_(self, other, partial(torch.Tensor.sub_, alpha=alpha))
        return binary_(self, other, torch.Tensor.sub_, torch._foreach_sub_, sub_tensor_)

    def __isub__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.sub_, torch._foreach_sub_, sub_tensor_)

    def mul_(self, other: Operand) -> Self:
        """Write the product into every leaf; return self."""
        return binary_(self, other, torch.Tensor.mul_, torch._foreach_mul_, mul_tensor_)

    def __imul__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.mul_, torch._foreach_mul_, mul_tensor_)

    def div_(self, other: Operand, *, rounding_mode: str | None = None) -> Self:
        """Write the quotient into every leaf; return self."""
        if rounding_mode is not None:
            return binary_(self, other, partial(torch.Tensor.div_, rounding_mode=rounding_mode))
        return binary_(self, other, torch.Tensor.div_, torch._foreach_div_, div_tensor_)

    def __itruediv__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.div_, torch._foreach_div_, div_tensor_)

    @also_named(exponent="other")
    def pow_(self, other: Operand) -> Self:
        """Write the power into every leaf; return self."""
        return binary_(self, other, torch.Tensor.pow_, torch._foreach_pow_)

    def __ipow__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.pow_, torch._foreach_pow_)

    def floor_divide_(self, other: Operand) -> Self:
        """Write the floor of the quotient into every leaf; return self."""
        return binary_(self, other, torch.Tensor.floor_divide_)

    def __ifloordiv__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.floor_divide_)

    def remainder_(self, other: Operand) -> Self:
        """Write the remainder, with the sign of the divisor into every leaf; return self."""
        return binary_(self, other, torch.Tensor.remainder_)

    def __imod__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.remainder_)

    def fmod_(self, other: Operand) -> Self:
        """Write the remainder, with the sign of the dividend into every leaf; return self."""
        return binary_(self, other, torch.Tensor.fmod_)

    def maximum_(self, other: Operand) -> Self:
        """Write the larger value into every leaf; return self."""
        return binary_of_tensors_(self, other, maximum_, torch._foreach_maximum_)

    def minimum_(self, other: Operand) -> Self:
        """Write the smaller value into every leaf; return self."""
        return binary_of_tensors_(self, other, minimum_, torch._foreach_minimum_)

    def fmax_(self, other: Operand) -> Self:
        """Write the larger value, ignoring NaN into every leaf; return self."""
        return binary_of_tensors_(self, other, fmax_)

    def fmin_(self, other: Operand) -> Self:
        """Write the smaller value, ignoring NaN into every leaf; return self."""
        return binary_of_tensors_(self, other, fmin_)

    def atan2_(self, other: Operand) -> Self:
        """Write the angle of the point (other, value) into every leaf; return self."""
        return binary_of_tensors_(self, as_float(other), torch.Tensor.atan2_)

    def copysign_(self, other: Operand) -> Self:
        """Write the magnitude with the sign of the operand into every leaf; return self."""
        return binary_(self, other, torch.Tensor.copysign_)

    def hypot_(self, other: Operand) -> Self:
        """Write the length of the hypotenuse into every leaf; return self."""
        return binary_of_tensors_(self, other, torch.Tensor.hypot_)

    def logaddexp_(self, other: Operand) -> Self:
        """Write the logarithm of the sum of exponentials into every leaf; return self."""
        return binary_of_tensors_(self, other, logaddexp_)

    def xlogy_(self, other: Operand) -> Self:
        """Write the value times the logarithm of the operand into every leaf; return self."""
        return binary_(self, other, torch.Tensor.xlogy_)


class Logic(AbstractContainer):
    """Bitwise and logical operations.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([True, False])}, [2])
        >>> (~td | torch.tensor([True, False]))["a"]
        tensor([True, True])
    """

    __slots__ = ()

    def bitwise_and(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the bitwise and, leaf by leaf: `torch.bitwise_and`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.bitwise_and, default)
        return binary(self, other, torch.bitwise_and)

    def __and__(self, other: Operand) -> Self:
        return binary(self, other, torch.bitwise_and)

    def __rand__(self, other: Operand) -> Self:
        return binary(self, other, torch.bitwise_and)

    def bitwise_or(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the bitwise or, leaf by leaf: `torch.bitwise_or`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.bitwise_or, default)
        return binary(self, other, torch.bitwise_or)

    def __or__(self, other: Operand) -> Self:
        return binary(self, other, torch.bitwise_or)

    def __ror__(self, other: Operand) -> Self:
        return binary(self, other, torch.bitwise_or)

    def bitwise_xor(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the bitwise exclusive or, leaf by leaf: `torch.bitwise_xor`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.bitwise_xor, default)
        return binary(self, other, torch.bitwise_xor)

    def __xor__(self, other: Operand) -> Self:
        return binary(self, other, torch.bitwise_xor)

    def __rxor__(self, other: Operand) -> Self:
        return binary(self, other, torch.bitwise_xor)

    def bitwise_left_shift(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the bits shifted to the left, leaf by leaf: `torch.bitwise_left_shift`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.bitwise_left_shift, default)
        return binary(self, other, torch.bitwise_left_shift)

    def __lshift__(self, other: Operand) -> Self:
        return binary(self, other, torch.bitwise_left_shift)

    def __rlshift__(self, other: Operand) -> Self:
        return reflected(self, other, operator.lshift)

    def bitwise_right_shift(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the bits shifted to the right, leaf by leaf: `torch.bitwise_right_shift`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, other, torch.bitwise_right_shift, default)
        return binary(self, other, torch.bitwise_right_shift)

    def __rshift__(self, other: Operand) -> Self:
        return binary(self, other, torch.bitwise_right_shift)

    def __rrshift__(self, other: Operand) -> Self:
        return reflected(self, other, operator.rshift)

    def logical_and(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the logical and, leaf by leaf: `torch.logical_and`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, as_truth(other), torch.logical_and, default)
        return binary(self, as_truth(other), torch.logical_and)

    def logical_or(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the logical or, leaf by leaf: `torch.logical_or`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, as_truth(other), torch.logical_or, default)
        return binary(self, as_truth(other), torch.logical_or)

    def logical_xor(self, other: Operand, *, default: Default | None = None) -> Self:
        """Return the logical exclusive or, leaf by leaf: `torch.logical_xor`."""
        if default is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(self, as_truth(other), torch.logical_xor, default)
        return binary(self, as_truth(other), torch.logical_xor)


class LogicInPlace(AbstractContainer):
    """Bitwise and logical operations that write into the storage of every leaf.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([True, False])}, [2])
        >>> td.logical_xor_(torch.tensor([True, True]))["a"]
        tensor([False,  True])
    """

    __slots__ = ()

    def bitwise_and_(self, other: Operand) -> Self:
        """Write the bitwise and into every leaf; return self."""
        return binary_(self, other, torch.Tensor.bitwise_and_)

    def __iand__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.bitwise_and_)

    def bitwise_or_(self, other: Operand) -> Self:
        """Write the bitwise or into every leaf; return self."""
        return binary_(self, other, torch.Tensor.bitwise_or_)

    def __ior__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.bitwise_or_)

    def bitwise_xor_(self, other: Operand) -> Self:
        """Write the bitwise exclusive or into every leaf; return self."""
        return binary_(self, other, torch.Tensor.bitwise_xor_)

    def __ixor__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.bitwise_xor_)

    def bitwise_left_shift_(self, other: Operand) -> Self:
        """Write the bits shifted to the left into every leaf; return self."""
        return binary_(self, other, torch.Tensor.bitwise_left_shift_)

    def __ilshift__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.bitwise_left_shift_)

    def bitwise_right_shift_(self, other: Operand) -> Self:
        """Write the bits shifted to the right into every leaf; return self."""
        return binary_(self, other, torch.Tensor.bitwise_right_shift_)

    def __irshift__(self, other: Operand) -> Self:
        return binary_(self, other, torch.Tensor.bitwise_right_shift_)

    def logical_and_(self, other: Operand) -> Self:
        """Write the logical and into every leaf; return self."""
        return binary_(self, as_truth(other), torch.Tensor.logical_and_)

    def logical_or_(self, other: Operand) -> Self:
        """Write the logical or into every leaf; return self."""
        return binary_(self, as_truth(other), torch.Tensor.logical_or_)

    def logical_xor_(self, other: Operand) -> Self:
        """Write the logical exclusive or into every leaf; return self."""
        return binary_(self, as_truth(other), torch.Tensor.logical_xor_)


class Comparisons(AbstractContainer):
    """Comparisons: containers of booleans.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.arange(3), "b": torch.ones(3)}, [3])
        >>> (td > 0)["a"]
        tensor([False,  True,  True])
    """

    __slots__ = ()

    def eq(self, other: Comparable) -> Self:
        """Return whether values are equal, leaf by leaf: `torch.eq`."""
        return compared(self, other, torch.eq)

    def __eq__(self, other: Comparable) -> Self:  # type: ignore[override]  # not a bool
        if is_comparable(other):
            return compared(self, other, torch.eq)
        return NotImplemented

    def ne(self, other: Comparable) -> Self:
        """Return whether values differ, leaf by leaf: `torch.ne`."""
        return compared(self, other, torch.ne)

    def __ne__(self, other: Comparable) -> Self:  # type: ignore[override]  # not a bool
        if is_comparable(other):
            return compared(self, other, torch.ne)
        return NotImplemented

    def lt(self, other: Comparable) -> Self:
        """Return whether values are less, leaf by leaf: `torch.lt`."""
        return compared(self, other, torch.lt)

    def __lt__(self, other: Comparable) -> Self:
        return compared(self, other, torch.lt)

    def le(self, other: Comparable) -> Self:
        """Return whether values are less or equal, leaf by leaf: `torch.le`."""
        return compared(self, other, torch.le)

    def __le__(self, other: Comparable) -> Self:
        return compared(self, other, torch.le)

    def gt(self, other: Comparable) -> Self:
        """Return whether values are greater, leaf by leaf: `torch.gt`."""
        return compared(self, other, torch.gt)

    def __gt__(self, other: Comparable) -> Self:
        return compared(self, other, torch.gt)

    def ge(self, other: Comparable) -> Self:
        """Return whether values are greater or equal, leaf by leaf: `torch.ge`."""
        return compared(self, other, torch.ge)

    def __ge__(self, other: Comparable) -> Self:
        return compared(self, other, torch.ge)


class Casts(AbstractContainer):
    """Casts of every leaf to a dtype; a leaf that has it already is shared.

    `cast_filter` is called with the path and the tensor of each leaf, and says whether it is cast.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.arange(3), "b": torch.ones(3)}, [3])
        >>> td.float()["a"].dtype, td.float()["b"] is td["b"]
        (torch.float32, True)
        >>> td.half(cast_filter=lambda path, leaf: leaf.is_floating_point())["a"].dtype
        torch.int64
    """

    __slots__ = ()

    def float(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.float32`."""
        return cast_leaves(self, torch.float32, cast_filter)

    def double(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.float64`."""
        return cast_leaves(self, torch.float64, cast_filter)

    def half(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.float16`."""
        return cast_leaves(self, torch.float16, cast_filter)

    def bfloat16(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.bfloat16`."""
        return cast_leaves(self, torch.bfloat16, cast_filter)

    def int(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int32`."""
        return cast_leaves(self, torch.int32, cast_filter)

    def long(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int64`."""
        return cast_leaves(self, torch.int64, cast_filter)

    def short(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int16`."""
        return cast_leaves(self, torch.int16, cast_filter)

    def char(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int8`."""
        return cast_leaves(self, torch.int8, cast_filter)

    def byte(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.uint8`."""
        return cast_leaves(self, torch.uint8, cast_filter)

    def bool(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.bool`."""
        return cast_leaves(self, torch.bool, cast_filter)

    def cfloat(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.complex64`."""
        return cast_leaves(self, torch.complex64, cast_filter)

    def cdouble(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.complex128`."""
        return cast_leaves(self, torch.complex128, cast_filter)

    def float16(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.float16`."""
        return cast_leaves(self, torch.float16, cast_filter)

    def float32(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.float32`."""
        return cast_leaves(self, torch.float32, cast_filter)

    def float64(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.float64`."""
        return cast_leaves(self, torch.float64, cast_filter)

    def complex32(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.complex32`."""
        return cast_leaves(self, torch.complex32, cast_filter)

    def complex64(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.complex64`."""
        return cast_leaves(self, torch.complex64, cast_filter)

    def complex128(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.complex128`."""
        return cast_leaves(self, torch.complex128, cast_filter)

    def int8(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int8`."""
        return cast_leaves(self, torch.int8, cast_filter)

    def int16(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int16`."""
        return cast_leaves(self, torch.int16, cast_filter)

    def int32(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int32`."""
        return cast_leaves(self, torch.int32, cast_filter)

    def int64(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.int64`."""
        return cast_leaves(self, torch.int64, cast_filter)

    def uint8(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.uint8`."""
        return cast_leaves(self, torch.uint8, cast_filter)

    def uint16(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.uint16`."""
        return cast_leaves(self, torch.uint16, cast_filter)

    def uint32(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.uint32`."""
        return cast_leaves(self, torch.uint32, cast_filter)

    def uint64(self, cast_filter: CastFilter | None = None) -> Self:
        """Cast every leaf to `torch.uint64`."""
        return cast_leaves(self, torch.uint64, cast_filter)
