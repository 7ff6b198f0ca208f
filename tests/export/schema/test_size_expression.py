import pytest

from kd_export import UntrustedArtifact
from kd_export._schema.size_expression import check_expression

SYMBOL = "Symbol('s77', positive=True, integer=True)"
PLAIN = [
    SYMBOL,
    f"Mul(Integer(2), {SYMBOL})",
    f"Add(Integer(-1), FloorDiv({SYMBOL}, Integer(2)))",
    f"Pow({SYMBOL}, Integer(2))",
    f"Max(Integer(1), {SYMBOL})",
    f"LessThan({SYMBOL}, Integer(4))",
    "Float('0.5', precision=53)",
    "Rational(1, 2)",
    "true",
]


@pytest.mark.parametrize("text", PLAIN)
def test_arithmetic_passes(text: str) -> None:
    assert check_expression(text) == text


HARMFUL = [
    "__import__('os').system('true')",
    "Symbol('s77').__class__",
    "Max('__import__(\"os\")', 1)",
    "Symbol('__import__(\"os\")')",
    "Symbol('s77', cls=1)",
    "Integer('__import__(\"os\")')",
    "Float('__import__(\"os\")')",
    "eval('1')",
    "[s77]",
    "s77",
    "lambda: 1",
    "Symbol",
    "Symbol(*[1])",
    "Add(**{})",
    "(x := 1)",
    "f'{1}'",
    "Symbol('u999999999')",
    "",
    "1",
    3,
    None,
    ["Integer(1)"],
    "(" * 10_000,
]
ENDLESS = [
    "9**9**9**9",
    "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
    "Pow(Integer(9), Integer(387420489))",
    "Pow(Pow(Pow(Integer(9), Integer(60)), Integer(60)), Integer(60))",
    "Pow(Add(Integer(9), Pow(Integer(9), Integer(9))), Integer(9))",
    "LShift(Integer(1), Integer(1000000000000))",
    "PowByNatural(Integer(9), Integer(99999999))",
    "FloatPow(Float('9'), Integer(99999999))",
    "Float('1', precision=1000000000)",
    "Float('1e999999999')",
    "Integer(" + "9" * 30 + ")",
    "Add(" + "Integer(1), " * 10_000 + ")",
]


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("text", [*HARMFUL, *ENDLESS], ids=lambda text: str(text)[:40])
def test_anything_else_is_refused_at_once(text: object) -> None:
    with pytest.raises(UntrustedArtifact, match="expected a size expression in the program, got"):
        check_expression(text)
