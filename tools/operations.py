"""The table of regular operations, from which `tools/generate_ops.py` writes the methods.

A row holds what cannot be derived: the text of the docstring, whether torch has a foreach kernel
and an in-place form, and the further arguments. To add a pointwise operation, add a row and run
`nox -s generate`; its tests are derived from the row.
"""

from typing import Final, NamedTuple


class Option(NamedTuple):
    """A further argument of a function: its name, type and default, as Python source.

    `keyword` says whether it is keyword-only.
    """

    name: str
    kind: str
    default: str
    keyword: bool = True


class UnaryRow(NamedTuple):
    """A function of one tensor: `torch.<name>`, and `torch.Tensor.<name>_`.

    `floats` says whether integers are promoted to floating point.
    """

    name: str
    text: str
    kernel: bool = False
    in_place: bool = True
    floats: bool = True
    operator: str | None = None
    options: tuple[Option, ...] = ()


class BinaryRow(NamedTuple):
    """A function of two operands: `torch.<name>(leaf, other)`, and the operator of Python if any.

    `exact` is the kernel for a 0-dim tensor in place of a number. `number` says what a number
    becomes where torch takes tensors only: a "tensor", that of a "float" or of its "truth". `alias`
    is what torch calls the second operand. `own` says that torch has no in-place form, so the one
    of `_leaves.writes` is called. `default` says whether the keys of two containers may differ.
    """

    name: str
    text: str
    kernel: bool = False
    exact: str | None = None
    operator: str | None = None
    in_place: bool = True
    floats: bool = False
    options: tuple[Option, ...] = ()
    number: str = ""
    alias: str = ""
    own: bool = False
    default: bool = True

    @property
    def decorator(self) -> str:
        """What stands above the methods: torch may have another name for the operand."""
        return f'\n    @also_named({self.alias}="other")' if self.alias else ""


class ReductionRow(NamedTuple):
    """A reduction to one value: `torch.<name>`, or `function` if it is given.

    `out` says whether the result may be written into another container.
    """

    name: str
    text: str
    function: str | None = None
    options: tuple[Option, ...] = ()
    out: bool = False


class CastRow(NamedTuple):
    """A cast of all leaves to one dtype: `td.<name>()` is `td.to(torch.<dtype>)`."""

    name: str
    dtype: str


_KERNEL_FLOATS: Final = {
    "acos": "the inverse cosine",
    "asin": "the inverse sine",
    "atan": "the inverse tangent",
    "cos": "the cosine",
    "cosh": "the hyperbolic cosine",
    "erf": "the error function",
    "frac": "the fractional part",
    "erfc": "the complementary error function",
    "exp": "the exponential",
    "expm1": "the exponential minus one",
    "lgamma": "the logarithm of the absolute gamma function",
    "log": "the natural logarithm",
    "log10": "the logarithm to base 10",
    "log1p": "the natural logarithm of one plus the value",
    "log2": "the logarithm to base 2",
    "reciprocal": "the reciprocal",
    "rsqrt": "the reciprocal of the square root",
    "sigmoid": "the logistic sigmoid",
    "sin": "the sine",
    "sinh": "the hyperbolic sine",
    "sqrt": "the square root",
    "tan": "the tangent",
    "tanh": "the hyperbolic tangent",
}
_LOOPED_FLOATS: Final = {
    "acosh": "the inverse hyperbolic cosine",
    "asinh": "the inverse hyperbolic sine",
    "atanh": "the inverse hyperbolic tangent",
    "deg2rad": "radians from degrees",
    "digamma": "the digamma function",
    "erfinv": "the inverse error function",
    "exp2": "the power of two",
    "rad2deg": "degrees from radians",
    "sinc": "the normalised sinc",
}
_KERNEL_SAME: Final = {
    "ceil": "the smallest integer that is not less",
    "floor": "the largest integer that is not greater",
    "sign": "the sign",
    "trunc": "the integer part",
}
_LOOPED_SAME: Final = {
    "logical_not": "the logical negation",
    "relu": "the positive part",
    "sgn": "the sign (for complex numbers the unit phase)",
    "square": "the square",
}
_TESTS: Final = {
    "isfinite": "whether a value is finite",
    "isinf": "whether a value is infinite",
    "isnan": "whether a value is NaN",
    "isneginf": "whether a value is negative infinity",
    "isposinf": "whether a value is positive infinity",
    "isreal": "whether a value is real",
    "signbit": "whether the sign bit is set",
}

_NANS: Final = tuple(
    Option(name, "float | None", "None", keyword=False) for name in ("nan", "posinf", "neginf")
)
_EPS: Final = (Option("eps", "float | None", "None", keyword=False),)
_DECIMALS: Final = (Option("decimals", "int", "0"),)

UNARY: Final = (
    UnaryRow("abs", "the absolute value", True, floats=False, operator="__abs__"),
    UnaryRow("neg", "the negative", True, floats=False, operator="__neg__"),
    UnaryRow("positive", "the value itself", False, in_place=False, operator="__pos__"),
    UnaryRow("bitwise_not", "the bitwise negation", floats=False, operator="__invert__"),
    *(UnaryRow(name, text, True) for name, text in _KERNEL_FLOATS.items()),
    *(UnaryRow(name, text) for name, text in _LOOPED_FLOATS.items()),
    UnaryRow("logit", "the log-odds", options=_EPS),
    *(UnaryRow(name, text, True, floats=False) for name, text in _KERNEL_SAME.items()),
    UnaryRow("round", "the nearest integer", True, floats=False, options=_DECIMALS),
    *(UnaryRow(name, text, floats=False) for name, text in _LOOPED_SAME.items()),
    UnaryRow("nan_to_num", "finite numbers for NaN and infinities", floats=False, options=_NANS),
    *(UnaryRow(name, text, in_place=False) for name, text in _TESTS.items()),
)

_ALPHA: Final = (Option("alpha", "float", "1", keyword=False),)
_ROUNDING: Final = (Option("rounding_mode", "str | None", "None"),)

ARITHMETIC: Final = (
    BinaryRow("add", "the sum", True, "add_tensor", "add", options=_ALPHA),
    BinaryRow("sub", "the difference", True, "sub_tensor", "sub", options=_ALPHA),
    BinaryRow("mul", "the product", True, "mul_tensor", "mul"),
    BinaryRow("div", "the quotient", True, "div_tensor", "truediv", floats=True, options=_ROUNDING),
    BinaryRow("pow", "the power", True, operator="pow", alias="exponent"),
    BinaryRow("floor_divide", "the floor of the quotient", operator="floordiv"),
    BinaryRow("remainder", "the remainder, with the sign of the divisor", operator="mod"),
    BinaryRow("fmod", "the remainder, with the sign of the dividend"),
    BinaryRow("maximum", "the larger value", True, number="tensor", own=True),
    BinaryRow("minimum", "the smaller value", True, number="tensor", own=True),
    BinaryRow("fmax", "the larger value, ignoring NaN", number="tensor", own=True),
    BinaryRow("fmin", "the smaller value, ignoring NaN", number="tensor", own=True),
    BinaryRow("atan2", "the angle of the point (other, value)", floats=True, number="float"),
    BinaryRow("copysign", "the magnitude with the sign of the operand", floats=True),
    BinaryRow("hypot", "the length of the hypotenuse", number="tensor"),
    BinaryRow("logaddexp", "the logarithm of the sum of exponentials", number="tensor", own=True),
    BinaryRow("xlogy", "the value times the logarithm of the operand", floats=True),
)

LOGIC: Final = (
    BinaryRow("bitwise_and", "the bitwise and", operator="and"),
    BinaryRow("bitwise_or", "the bitwise or", operator="or"),
    BinaryRow("bitwise_xor", "the bitwise exclusive or", operator="xor"),
    BinaryRow("bitwise_left_shift", "the bits shifted to the left", operator="lshift"),
    BinaryRow("bitwise_right_shift", "the bits shifted to the right", operator="rshift"),
    BinaryRow("logical_and", "the logical and", number="truth"),
    BinaryRow("logical_or", "the logical or", number="truth"),
    BinaryRow("logical_xor", "the logical exclusive or", number="truth"),
)

COMPARISONS: Final = (
    BinaryRow("eq", "whether values are equal", operator="eq", in_place=False, default=False),
    BinaryRow("ne", "whether values differ", operator="ne", in_place=False, default=False),
    BinaryRow("lt", "whether values are less", operator="lt", in_place=False, default=False),
    BinaryRow(
        "le", "whether values are less or equal", operator="le", in_place=False, default=False
    ),
    BinaryRow("gt", "whether values are greater", operator="gt", in_place=False, default=False),
    BinaryRow(
        "ge", "whether values are greater or equal", operator="ge", in_place=False, default=False
    ),
)

_DTYPE: Final = (Option("dtype", "torch.dtype | None", "None"),)
_CORRECTION: Final = (Option("correction", "float", "1"),)

REDUCTIONS: Final = (
    ReductionRow("sum", "the sum", options=_DTYPE),
    ReductionRow("nansum", "the sum, NaN taken as zero", options=_DTYPE),
    ReductionRow("mean", "the mean", options=_DTYPE),
    ReductionRow("nanmean", "the mean of what is not NaN", options=_DTYPE),
    ReductionRow("prod", "the product", "prod", options=_DTYPE),
    ReductionRow("var", "the variance", options=_CORRECTION),
    ReductionRow("std", "the standard deviation", options=_CORRECTION),
    ReductionRow("amin", "the smallest value"),
    ReductionRow("amax", "the largest value"),
    ReductionRow("logsumexp", "the logarithm of the sum of exponentials", "logsumexp", out=True),
    ReductionRow("norm", "the vector norm", "norm", (Option("ord", "float", "2"), *_DTYPE), True),
)

CASTS: Final = (
    CastRow("float", "float32"),
    CastRow("double", "float64"),
    CastRow("half", "float16"),
    CastRow("bfloat16", "bfloat16"),
    CastRow("int", "int32"),
    CastRow("long", "int64"),
    CastRow("short", "int16"),
    CastRow("char", "int8"),
    CastRow("byte", "uint8"),
    CastRow("bool", "bool"),
    CastRow("cfloat", "complex64"),
    CastRow("cdouble", "complex128"),
    *(
        CastRow(name, name)
        for name in (
            *("float16", "float32", "float64", "complex32", "complex64", "complex128"),
            *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        )
    ),
)
