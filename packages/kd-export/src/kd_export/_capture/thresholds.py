"""Sizes around which a program may change what it does: from the numbers that it holds.

A mask of a sliding window does nothing while a sequence is shorter than the window, a table of
positions ends, a bucket is full: no trial at a few small sizes sees that. The program holds those
numbers, as a constant that positions or sizes are compared with or computed by. They are collected
here, axis by axis, and the sizes around each are tried.

A *position* is a value that depends on a size and not on what the module is given: a size, what
`arange` and the like make of it, and what is computed of that; also what counts along a dynamic
dimension, such as `cumsum` of a mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import sympy  # type: ignore[import-untyped]  # it has no types, and torch needs it
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from kd_export._schema.schema import Axis

Symbols: TypeAlias = frozenset[sympy.Symbol]
Found: TypeAlias = Iterator[tuple[sympy.Symbol, int]]

LARGEST = 1 << 13
"""The largest constant that trials are made around."""
_MOST_NUMBERS = 16
"""How many numbers a weight or constant has at most to be taken for a threshold."""
_NONE: Symbols = frozenset()
_COUNTING = {*re.findall(r"\w+", """
    argmax argmin argsort count_nonzero cumsum max min nonzero searchsorted sort sum topk
""")}  # fmt: skip
"""Operators whose integer results count, or name places, along a dimension."""
_LOOKED_UP = {"embedding", "gather", "index", "index_select", "take_along_dim"}
"""Operators that look up rows of their first argument."""
_NOT_NUMBERS = {*re.findall(r"\w+", """
    alpha chunks correction descending device dilation dim dim0 dim1 dims dtype eps groups keepdim
    kernel_size layout memory_format normalized_shape output_size p pad padding padding_idx
    pin_memory repeats scale shape size sizes split_size stable step stride sym_size
""")}  # fmt: skip
"""Parameters of operators that say how, and not with which number."""


def thresholds(
    program: ExportedProgram,
    sizes: Mapping[sympy.Symbol, sympy.Expr],
    axes: Mapping[str, Axis],
) -> dict[str, list[int]]:
    """Return the sizes of each axis at which a program may start to do something else.

    Args:
        program: A captured program.
        sizes: What torch's symbols are, in terms of axes.
        axes: The range of each axis.
    """
    held = _held(program)
    found: dict[str, set[int]] = {name: set() for name in axes}
    for symbol, number in _numbers(program.graph_module, {}, held):
        expression = sizes.get(symbol)
        if expression is None or not 2 <= number <= LARGEST:
            continue
        (axis,) = expression.free_symbols
        factor = expression.coeff(axis)
        found[axis.name].add(int(sympy.ceiling((number - expression.subs(axis, 0)) / factor)))
    return {name: sorted(numbers) for name, numbers in found.items() if numbers}


def _held(program: ExportedProgram) -> dict[str, Tensor]:
    """Return the tensors that a program holds, by the name of their placeholder."""
    kept = {**program.state_dict, **program.constants}
    named = ((spec.arg.name, kept.get(spec.target)) for spec in program.graph_signature.input_specs)
    return {name: value for name, value in named if isinstance(value, Tensor)}


def _numbers(
    module: fx.GraphModule, given: Mapping[fx.Node, Symbols], held: Mapping[str, Tensor]
) -> Found:
    """List the numbers that positions meet in a graph, with the sizes that these depend on."""
    positions: dict[fx.Node, Symbols] = dict(given)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        leaves = tree_leaves((node.args, node.kwargs))
        operands = [arg for arg in leaves if isinstance(arg, fx.Node)]
        positions[node] = known = _position(node, value, operands, positions, held)
        yield from _in_sizes(value)
        yield from _along_dimension(node)
        around = known or frozenset().union(*(positions.get(arg, _NONE) for arg in operands))
        for number in _constants(node, operands, held) if around else ():
            yield from ((symbol, number) for symbol in around)
        parts = [arg for arg in operands if arg.op == "get_attr"]
        for part in (getattr(module, str(part.target), None) for part in parts):
            if isinstance(part, fx.GraphModule):
                passed = [arg for arg in operands if arg.op != "get_attr"]
                places = part.graph.find_nodes(op="placeholder")[-len(passed) :] if passed else []
                inner = {
                    place: positions.get(arg, _NONE)
                    for place, arg in zip(places, passed[-len(places) :], strict=False)
                }
                yield from _numbers(part, inner, {})


def _first(node: fx.Node) -> Tensor | None:
    """Return the tensor that is the first argument."""
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _position(
    node: fx.Node,
    value: object,
    operands: Iterable[fx.Node],
    positions: Mapping[fx.Node, Symbols],
    held: Mapping[str, Tensor],
) -> Symbols:
    """Return the sizes that a value depends on, if it is a position."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return frozenset(value.node.expr.free_symbols)
    if not isinstance(value, Tensor):
        values = [part for part in tree_leaves(value) if isinstance(part, Tensor)]
        value = values[-1] if values else None  # places come last
        if value is None:
            return _NONE
    tensors = [arg for arg in operands if isinstance(arg.meta.get("val"), Tensor)]
    known = frozenset().union(*(positions.get(arg, _NONE) for arg in operands))
    if not tensors:
        return known
    of_tensors = [positions.get(arg, _NONE) for arg in tensors if arg.name not in held]
    if _operator(node) in _COUNTING and not value.is_floating_point():
        dims = (size for arg in tensors for size in arg.meta["val"].shape)
        return frozenset().union(*map(_symbols, dims))
    if value.is_floating_point() and not all(of_tensors):
        return _NONE  # data, to which a position was added
    return frozenset().union(*of_tensors)


def _operator(node: fx.Node) -> str:
    """Return the name of an operator without its namespace and overload."""
    return str(node.target).removeprefix("aten.").partition(".")[0].rstrip("_")


def _symbols(size: int | torch.SymInt) -> Symbols:
    return frozenset(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else _NONE


def _in_sizes(value: object) -> Found:
    """List the numbers in the sizes of a result: `Max(1, s - 5)`, `s // 4`; not factors."""
    for part in tree_leaves(value):
        found = part.shape if isinstance(part, Tensor) else (part,)
        for size in found:
            if not isinstance(size, torch.SymInt | torch.SymBool):
                continue
            expression = size.node.expr
            factors = {
                number
                for product in expression.atoms(sympy.Mul)
                for number in product.args
                if number.is_Integer
            }
            for number in expression.atoms(sympy.Integer) - factors:
                yield from ((symbol, abs(int(number))) for symbol in expression.free_symbols)


def _along_dimension(node: fx.Node) -> Found:
    """List the bounds of slices and the like along a dynamic dimension."""
    schema = getattr(node.target, "_schema", None)
    source = _first(node)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if source is None or "dim" not in names:
        return
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    shape, dim = source.shape, given.get("dim", 0)
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        return
    for symbol in _symbols(shape[dim]):
        for name in ("start", "end", "index", "length", "k", "shifts", "size"):
            if isinstance(number := given.get(name), int):
                yield symbol, abs(number)


def _constants(
    node: fx.Node, operands: Iterable[fx.Node], held: Mapping[str, Tensor]
) -> Iterator[int]:
    """List the whole numbers that an operator is given: arguments, and small tensors."""
    schema = getattr(node.target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    named = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    plain = [("", arg) for arg in node.args] if schema is None else []
    for name, value in (*named, *plain):
        if name not in _NOT_NUMBERS:
            yield from _whole(tree_leaves(value))
    for arg in operands:
        tensor = held.get(arg.name)
        if tensor is not None and tensor.numel() <= _MOST_NUMBERS and not tensor.is_complex():
            yield from _whole(tensor.detach().flatten().tolist())
    table = _first(node) if _operator(node) in _LOOKED_UP else None
    if table is not None:
        yield from _whole(table.shape[:1])


def _whole(values: Iterable[object]) -> Iterator[int]:
    for value in values:
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            yield abs(int(value))
