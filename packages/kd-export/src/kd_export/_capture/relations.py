"""Relations between sizes that a captured program rests on: shown to hold, or to be tried.

A program holds what the module does at the sizes of the example. What this needs of one named
dimension torch shows by solving for it, which fails for a `min` or `max` of sizes:
`x.flatten()[:16].reshape(16)` serves any batch of rows of 96. Asked to, torch asserts such a
relation in the program instead; here it is shown, by algebra or by trying each size, and taken out.
What it needs of several dimensions, as `if batch * length > 512`, torch leaves to a guard that no
file holds. Where it is not shown, sizes are named at which the program is to be tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]  # it has no types, and torch needs it
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils._sympy.functions import Max, Min

from kd_export._schema.schema import Axis

Sizes = Mapping[sympy.Symbol, sympy.Expr]
"""What each of torch's symbols for a dynamic dimension is in terms of axes."""

_TRIED = 4096
"""How many combinations of sizes are tried at most."""
_LARGEST = 1 << 14
"""The largest product of the sizes of axes that the module is tried at."""
_STEPS = (1, 2, 3, 5, 8, 13, 21, 55, 144, 377, 1597, 6765)
_FLEXIBLE = {Min: sympy.Min, Max: sympy.Max}
"""Torch's own functions do not see which of two sums is larger."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A relation between axes that a program rests on, and that is not shown to hold.

    Attributes:
        relation: The relation, in terms of axes.
        broken_at: Sizes at which it does not hold, if some were found.
    """

    relation: str
    broken_at: Mapping[str, int] | None

    def __str__(self) -> str:
        known = f"the program is what the module does where `{self.relation}`"
        if self.broken_at is None:
            return f"{known}; no sizes are known where this is not so."
        return (
            f"{known}; it is also tried at {_listed(self.broken_at)}. If the results differ there, "
            "give the axes ranges in which the relation holds."
        )


def settle(program: ExportedProgram, sizes: Sizes, axes: Mapping[str, Axis]) -> bool:
    """Remove the assertions on sizes that hold everywhere, in place; return whether all do.

    Args:
        program: A program that was captured with deferred assertions.
        sizes: What torch's symbols are.
        axes: The range of each axis.
    """
    found = list(_asserted(program.graph, sizes))
    if not all(_holds(relation.subs(sizes), axes) for _, relation in found):
        return False
    for node, _ in found:
        program.graph.erase_node(node)
    program.graph_module.recompile()
    return True


def doubts(program: ExportedProgram, sizes: Sizes, axes: Mapping[str, Axis]) -> tuple[Doubt, ...]:
    """Return the relations between several axes that are not shown to hold.

    Args:
        program: A captured program.
        sizes: What torch's symbols are.
        axes: The range of each axis.
    """
    found: dict[str, Doubt] = {}
    for guard in _guards(program):
        if not guard.free_symbols <= sizes.keys():
            continue
        relation = guard.subs(sizes)
        if len(relation.free_symbols) > 1 and not _holds(relation, axes):
            text = str(relation)
            found[text] = Doubt(text, _broken_at(relation, axes))
    return tuple(found.values())


def _guards(program: ExportedProgram) -> Iterator[sympy.Basic]:
    """List what torch assumed of sizes while it traced."""
    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    fakes = (value for value in values if isinstance(value, torch.Tensor))
    mode = next((getattr(fake, "fake_mode", None) for fake in fakes), None)
    if mode is not None and mode.shape_env is not None:
        for guard in mode.shape_env.guards:
            yield mode.shape_env.replace(guard.expr)


def _asserted(graph: fx.Graph, sizes: Sizes) -> Iterator[tuple[fx.Node, sympy.Basic]]:
    """List the assertions on nothing but dynamic dimensions, with what they assert."""
    for node in graph.nodes:
        if node.target is not torch.ops.aten._assert_scalar.default:
            continue
        source = node.args[0]
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if isinstance(value, torch.SymBool) and value.node.expr.free_symbols <= sizes.keys():
            yield node, value.node.expr


def _holds(relation: sympy.Basic, axes: Mapping[str, Axis]) -> bool:
    """Decide whether a relation is shown to hold at every size of the axes."""
    symbols = _symbols(relation)
    above = {
        symbol: axes[symbol.name].min + sympy.Symbol(symbol.name, integer=True, nonnegative=True)
        for symbol in symbols
    }
    flexible = relation.replace(
        lambda part: type(part) in _FLEXIBLE,
        lambda part: _FLEXIBLE[type(part)](*part.args),
    )
    if sympy.simplify(flexible.subs(above, simultaneous=True)) == sympy.true:
        return True
    limits = [(axes[symbol.name].min, axes[symbol.name].max) for symbol in symbols]
    ranges = [range(low, high + 1) for low, high in limits if high is not None]
    if len(ranges) < len(symbols) or math.prod(map(len, ranges)) > _TRIED:
        return False
    return next(_breaking(relation, itertools.product(*ranges)), None) is None


def _broken_at(relation: sympy.Basic, axes: Mapping[str, Axis]) -> Mapping[str, int] | None:
    """Find sizes at which a relation does not hold, and as small as there are."""
    symbols = _symbols(relation)
    ranges = [_some(axes[symbol.name], int(_TRIED ** (1 / len(symbols)))) for symbol in symbols]
    least = next(_breaking(relation, sorted(itertools.product(*ranges), key=math.prod)), None)
    if least is None or math.prod(least) > _LARGEST:
        return None
    return {symbol.name: size for symbol, size in zip(symbols, least, strict=True)}


def _some(axis: Axis, count: int) -> list[int]:
    """Choose some sizes of an axis, the limits among them."""
    ends = [axis.min] if axis.max is None else [axis.min, axis.max]
    steps = (axis.min + step for step in _STEPS)
    return list(dict.fromkeys([*ends, *filter(axis.holds, steps)]))[:count]


def _breaking(
    relation: sympy.Basic, combinations: Iterable[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """List the sizes at which a relation does not hold."""
    symbols = _symbols(relation)
    for sizes in combinations:
        values = dict(zip(symbols, map(sympy.Integer, sizes), strict=True))
        if relation.xreplace(values) != sympy.true:  # `subs` takes a hundred times as long
            yield sizes


def _symbols(relation: sympy.Basic) -> list[sympy.Symbol]:
    """List the axes in a relation, in order of their names."""
    return sorted(relation.free_symbols, key=str)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
