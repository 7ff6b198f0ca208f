"""Check a size expression before sympy evaluates it.

The sizes in a ``.pt2`` file are sympy expressions as ``srepr`` writes them, such as
``Mul(Integer(2), Symbol('s77', positive=True, integer=True))``. torch evaluates this text as
Python code. So it may hold calls of the listed functions on numbers and symbols and nothing else,
and no power or shift whose value would not fit into memory.
"""

from __future__ import annotations

import ast
import re

from kd_export._errors import UntrustedArtifact, brief

SYMBOL = re.compile(r"[a-z]{1,4}[0-9]{1,5}")
"""A symbol of torch. The number is limited: torch counts up to it."""

_FUNCTIONS = """
Add Mul Max Min Mod Eq Ne Lt Le Gt Ge And Or Not Equality Unequality LessThan GreaterThan
StrictLessThan StrictGreaterThan FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt
FloorToInt CeilDiv FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat
TruncToInt RoundToInt ToFloat Identity
"""
_POWERS = """
Pow PowByNatural FloatPow LShift RShift
"""
_ASSUMPTIONS = """
positive negative nonnegative nonpositive nonzero zero integer finite real
"""
SOURCE = "<size expression>"
"""What the syntax trees of these texts are called; none of them is compiled."""

_FLOAT = re.compile(r"-?[0-9]{1,20}(\.[0-9]{0,40})?(e[+-]?[0-9]{1,3})?")
_LONGEST = 1 << 14
_MOST_NODES = 1000
_LARGEST = 1 << 63
_LARGEST_EXPONENT = 64


def check_expression(text: object) -> str:
    """Check that a text is plain arithmetic on sizes, and cheap to evaluate.

    >>> check_expression("Mul(Integer(2), Symbol('s0', integer=True))")
    "Mul(Integer(2), Symbol('s0', integer=True))"

    Raises:
        UntrustedArtifact: It is not.
    """
    try:
        if isinstance(text, str) and len(text) <= _LONGEST:
            tree = ast.parse(text, SOURCE, mode="eval").body
            if sum(1 for _ in ast.walk(tree)) <= _MOST_NODES and _is_size(tree, 1):
                return text
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        pass
    raise UntrustedArtifact(
        f"expected a size expression in the program, got {brief(text)}.",
        expected="arithmetic on sizes",
        got=brief(text),
        hint="The file is forged or damaged: do not use it.",
    )


def _is_size(node: ast.expr, exponent: int) -> bool:
    """Decide whether a node is arithmetic; `exponent` is the product of the powers around it."""
    if isinstance(node, ast.Name):
        return node.id in ("true", "false")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    name, arguments = node.func.id, node.args
    if name == "Symbol":
        return _is_symbol(node)
    if name == "Float":
        return _is_float(node)
    if node.keywords:
        return False
    if name in ("Integer", "Rational"):
        return len(arguments) in (1, 2) and all(_integer(item) is not None for item in arguments)
    if name in _POWERS.split():
        return _is_power(arguments, exponent)
    return name in _FUNCTIONS.split() and all(_is_size(item, exponent) for item in arguments)


def _is_power(arguments: list[ast.expr], exponent: int) -> bool:
    """Decide whether the exponent is a small integer: powers of powers multiply."""
    if len(arguments) != 2:
        return False
    base, power = arguments
    match power:
        case ast.Call(func=ast.Name(id="Integer"), args=[number], keywords=[]):
            value = _integer(number)
        case _:
            return False
    if value is None or abs(value) * exponent > _LARGEST_EXPONENT:
        return False
    return _is_size(base, max(abs(value), 1) * exponent)


def _integer(node: ast.expr) -> int | None:
    """Return the value of an integer literal of at most 64 bits."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    value = node.value if isinstance(node, ast.Constant) else None
    if type(value) is not int or value > _LARGEST:
        return None
    return sign * value


def _is_symbol(node: ast.Call) -> bool:
    match node.args:
        case [ast.Constant(value=str(name))]:
            named = SYMBOL.fullmatch(name) is not None
        case _:
            return False
    return named and all(
        word.arg in _ASSUMPTIONS.split()
        and isinstance(word.value, ast.Constant)
        and type(word.value.value) is bool
        for word in node.keywords
    )


def _is_float(node: ast.Call) -> bool:
    match node.args:
        case [ast.Constant(value=str(text))]:
            written = _FLOAT.fullmatch(text) is not None
        case _:
            return False
    return written and all(
        word.arg in ("precision", "dps") and 0 < (_integer(word.value) or 0) <= 64
        for word in node.keywords
    )
