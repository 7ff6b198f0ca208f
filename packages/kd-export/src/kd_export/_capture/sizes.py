"""Sizes of a program: which are dynamic, what it needs of them, and where it may change.

`Dim.AUTO` freezes a dimension without a word, and an example with one row makes a named dimension
an error. So every dynamic dimension is named here, and every example is brought to at least two
rows (and to a number of rows that no weight or other dimension has, lest the two be confused).

A program holds what the module does at the sizes of the example. What this needs of one named
dimension torch shows by solving for it, which fails for a `min` or `max` of sizes:
`x.flatten()[:16].reshape(16)` serves any batch of rows of 96. Asked to, torch asserts such a
relation in the program instead; here it is shown, by algebra or by trying each size, and taken out.
What it needs of several dimensions, as `if batch * length > 512`, torch leaves to a guard that no
file holds. Where it is not shown, sizes are named at which the program is to be tried.

A mask of a sliding window does nothing while a sequence is shorter than the window, a table of
positions ends, a bucket is full: no trial at a few small sizes sees that. The program holds those
numbers, as a constant that positions or sizes are compared with or computed by. They are collected
here, axis by axis, and the sizes around each are tried.

A *position* is a value that depends on a size and not on what the module is given: a size, what
`arange` and the like make of it, and what is computed of that; also what counts along a dynamic
dimension, such as `cumsum` of a mask.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard, TypeVar

import sympy
import torch
from torch import Tensor, fx
from torch.export import Dim, ExportedProgram

from kd_export._errors import ExportError, Key, KeyMismatch, ShapeMismatch, nearest, quoted
from kd_export._schema.files import as_key, wire_key, wire_name
from kd_export._schema.schema import Axis, LinearSize, Schema
from kd_export._torch_private import ASSERT_SCALAR, EXACT_LIMITS, argument_names, tree_leaves

BATCH = "batch"
AS_ALLOWED = "as allowed"
Range = tuple[int, int | None]
Name = TypeVar("Name")
Dynamic = None | str | Mapping[Name, Range | Mapping[int, str]]

_ROWS = (2, 3, 5, 7, 11, 13, 17, 19, 23)


@dataclass(frozen=True, slots=True)
class DynamicShapes:
    """Which dimensions of which inputs are dynamic, and within which range.

    Attributes:
        names: The axis of each dynamic dimension, or how it follows from one, by input.
        axes: The range of each axis.
    """

    names: Mapping[Key, Mapping[int, LinearSize]]
    axes: Mapping[str, Axis]

    def dims(self, key: Key) -> dict[int, Dim]:
        """Return the torch dimensions of one input."""
        return {dim: self._dim(size) for dim, size in self.names.get(key, {}).items()}

    def _dim(self, size: LinearSize) -> Dim:
        axis = self.axes[size.axis]
        dim = Dim(size.axis, min=axis.min, max=axis.max)
        dim = dim if size.factor == 1 else size.factor * dim
        return dim + size.offset if size.offset else dim

    def sizes(self, tensors: Mapping[Key, Tensor]) -> dict[str, int | None]:
        """Return the size of each axis in some tensors; ``None`` if it has none."""
        return {
            size.axis: size.axis_at(tensors[key].shape[dim])
            for key, dims in self.names.items()
            for dim, size in dims.items()
        }

    def fit(self, tensors: Mapping[Key, Tensor]) -> bool:
        """Decide whether each dynamic dimension follows from a size of its axis."""
        return None not in self.sizes(tensors).values()

    def outside(self, tensors: Mapping[Key, Tensor]) -> list[str]:
        """List the inputs whose size is not in the range of its axis, a few words each."""
        return [
            f"dimension {dim} of `{wire_name(key)}` is {tensors[key].shape[dim]}, and "
            f"`{size.axis}` is {self.axes[size.axis]}"
            for key, dims in self.names.items()
            for dim, size in dims.items()
            if (found := size.axis_at(tensors[key].shape[dim])) is None
            or not self.axes[size.axis].holds(found)
        ]


def resolve(
    dynamic: Dynamic[Name], tensors: Mapping[Key, Tensor], batch_dims: int
) -> DynamicShapes:
    """Resolve the argument ``dynamic``.

    Args:
        dynamic: ``"batch"``, ``None``, or a mapping from axis names to ranges, from keys to the
            named dimensions of an input, or both.
        tensors: The example, by key.
        batch_dims: The number of batch dimensions of the example container; 0 if there is none.
    """
    if dynamic is None:
        return DynamicShapes({}, {})
    if isinstance(dynamic, str):
        ranges, named = _sort_out({dynamic: (1, None)}, tensors)
    elif isinstance(dynamic, Mapping):
        ranges, named = _sort_out(dynamic, tensors)
    else:
        raise ExportError(
            f"expected a name, a dict or `None` for `dynamic`, got {dynamic!r}.",
            got=dynamic,
            hint="Pass `'batch'`, `{'batch': (1, 64)}` or `{'obs': {0: 'batch'}}`.",
        )
    if not named:
        if len(ranges) != 1:
            raise ExportError(
                f"ranges are given for {quoted(ranges)}, but no dimension is named so.",
                got=tuple(ranges),
                hint="Name the dimensions by key: `{'obs': {0: 'batch'}}`.",
            )
        (axis,) = ranges
        named = _leading(axis, tensors, batch_dims)
    used = {size.axis for dims in named.values() for size in dims.values()}
    if not set(ranges) <= used:
        raise ExportError(
            f"a range is given for {quoted(sorted(set(ranges) - used))}, which names no dimension.",
            expected=tuple(sorted(used)),
            got=tuple(ranges),
        )
    shapes = DynamicShapes(named, {name: ranges.get(name, Axis()) for name in sorted(used)})
    _check_least(shapes)
    return shapes


def axes_of_schema(schema: Schema) -> Dynamic[object]:
    """Return the argument ``dynamic`` that gives a program the axes of a schema."""
    found: dict[object, Range | Mapping[int, str]] = {}
    for entry in schema.inputs:
        names = {dim: size for dim, size in enumerate(entry.shape) if isinstance(size, str)}
        if names:
            found[entry.key] = names
    found |= {name: (axis.min, axis.max) for name, axis in schema.axes.items()}
    return found or None


def _check_least(shapes: DynamicShapes) -> None:
    """Check that no size that follows from an axis is negative."""
    for key, dims in shapes.names.items():
        for dim, size in dims.items():
            if size.at(shapes.axes[size.axis].min) < 0:
                least = -(size.offset // size.factor)
                raise ExportError(
                    f"dimension {dim} of `{wire_name(key)}` is `{size}`, which is negative where "
                    f"`{size.axis}` is {shapes.axes[size.axis].min}.",
                    key=key,
                    expected=f"{least}..",
                    got=str(shapes.axes[size.axis]),
                    hint=f"Pass a range for it: `{size.axis!r}: ({least}, None)`.",
                )


def _sort_out(
    dynamic: Mapping[Name, Range | Mapping[int, str]], tensors: Mapping[Key, Tensor]
) -> tuple[dict[str, Axis], dict[Key, dict[int, LinearSize]]]:
    """Split the ranges of axes from the named dimensions of inputs."""
    ranges: dict[str, Axis] = {}
    named: dict[Key, dict[int, LinearSize]] = {}
    for word, value in dynamic.items():
        if isinstance(value, Mapping):
            key = _input_key(word, tensors)
            named[key] = {
                _dim(key, dim, tensors[key]): _size(key, dim, name) for dim, name in value.items()
            }
        else:
            ranges[_axis(word)] = _range(word, value)
    return ranges, named


def _range(word: object, value: object) -> Axis:
    match value:
        case int(low), None | int() as high if low >= 0 and (high is None or high >= max(low, 2)):
            return Axis(low, high)
    shown = f"{value[0]}..{value[1]}" if _is_pair(value) else repr(value)
    raise ExportError(
        f"`{word}` cannot range over {shown}.",
        expected="(min, max)",
        got=value,
        hint="Give `(min, max)` with a max of at least 2, or `None` for no limit. Dimensions of "
        "an input are named by a dict: `{'obs': {0: 'batch'}}`.",
    )


def _is_pair(value: object) -> TypeGuard[Range]:
    return isinstance(value, tuple) and len(value) == 2


def _leading(
    axis: str, tensors: Mapping[Key, Tensor], batch_dims: int
) -> dict[Key, dict[int, LinearSize]]:
    """Name the leading dimension of all inputs, which must then be of one size."""
    sizes = {key: tensor.shape[0] for key, tensor in tensors.items() if tensor.dim()}
    if not batch_dims and len(set(sizes.values())) != 1:
        found = ", ".join(f"`{wire_name(key)}`: {size}" for key, size in sizes.items())
        raise ShapeMismatch(
            f"the inputs have no common leading size ({found or 'none has a dimension'}).",
            expected="one leading size",
            got=tuple(sizes.values()),
            hint="Name the dimensions by key, as in `dynamic={'obs': {0: 'batch'}}`, or pass "
            "`dynamic=None` for fixed shapes.",
        )
    return {key: {0: LinearSize(axis)} for key in sizes}


def _input_key(word: object, tensors: Mapping[Key, Tensor]) -> Key:
    candidates = {as_key(word)} if not isinstance(word, str) else {(word,), wire_key(word)}
    for key in tensors:
        if key in candidates:
            return key
    names = tuple(map(wire_name, tensors))
    close = nearest(wire_name(as_key(word)), names)
    raise KeyMismatch(
        f"input `{word}` of `dynamic` not found; available inputs: {quoted(names)}.",
        key=as_key(word),
        expected=names,
        got=word,
        hint=None if close is None else f"Did you mean `{close}`?",
    )


def _dim(key: Key, dim: object, tensor: Tensor) -> int:
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ShapeMismatch(
            f"`dynamic` must name dimensions from {-tensor.dim()} to {tensor.dim() - 1} of "
            f"`{wire_name(key)}`, whose shape is {tuple(tensor.shape)}, got {dim!r}.",
            key=key,
            expected=f"a dimension below {tensor.dim()}",
            got=dim,
        )
    return dim % tensor.dim()


def _axis(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ExportError(
            f"{name!r} cannot name an axis.",
            got=name,
            hint="Use a word, such as `batch`.",
        )
    return name


def _size(key: Key, dim: int, name: object) -> LinearSize:
    size = LinearSize.parse(name) if isinstance(name, str) else None
    if size is None:
        raise ExportError(
            f"{name!r} cannot name dimension {dim} of `{wire_name(key)}`.",
            key=key,
            expected="a name",
            got=name,
            hint="Use a word, such as `batch`, or a size that follows from one, such as "
            "`2*batch + 1`. Leave out dimensions that are fixed.",
        )
    _axis(size.axis)
    return size


def widen(
    tensors: Mapping[Key, Tensor], shapes: DynamicShapes, fixed_sizes: Iterable[int]
) -> dict[Key, Tensor]:
    """Extend every dynamic axis of the example to at least two entries, by repeating rows.

    Args:
        tensors: The example, by key.
        shapes: Which dimensions are dynamic.
        fixed_sizes: Sizes that a widened axis had better not take: those of the weights.
    """
    wide = dict(tensors)
    avoid = {*fixed_sizes, *(size for tensor in tensors.values() for size in tensor.shape)}
    for name, axis in shapes.axes.items():
        places = [
            (key, dim, size)
            for key, dims in shapes.names.items()
            for dim, size in dims.items()
            if size.axis == name
        ]
        sizes = {size.axis_at(wide[key].shape[dim]) for key, dim, size in places}
        (rows,) = sizes if len(sizes) == 1 else (None,)
        if rows is None:
            raise _unequal(name, wide, places)
        followers = [LinearSize(name), *(size for _, _, size in places)]
        if axis.holds(rows) and all(size.at(rows) >= 2 for size in followers):
            continue
        rows = _rows(axis, followers, avoid)
        for key, dim, size in places:
            avoid.add(size.at(rows))
            wide[key] = repeat_rows(wide[key], dim, size.at(rows))
    return wide


def _rows(axis: Axis, sizes: Sequence[LinearSize], avoid: Iterable[int]) -> int:
    """Choose a size of an axis: no dimension of it may have fewer than two entries."""
    taken = set(avoid)
    least = next(rows for rows in itertools.count(axis.min) if all(s.at(rows) >= 2 for s in sizes))
    candidates = [rows for rows in _ROWS if axis.holds(rows) and rows >= least] or [least]
    return next((r for r in candidates if not taken & {s.at(r) for s in sizes}), candidates[0])


def _unequal(
    name: str, tensors: Mapping[Key, Tensor], places: Sequence[tuple[Key, int, LinearSize]]
) -> ShapeMismatch:
    found = ", ".join(
        f"`{wire_name(key)}`[{dim}] = {tensors[key].shape[dim]}"
        + ("" if str(size) == name else f" for `{size}`")
        for key, dim, size in places
    )
    return ShapeMismatch(
        f"the axis `{name}` has different sizes in the example: {found}.",
        key=places[0][0],
        got=tuple(tensors[key].shape[dim] for key, dim, _ in places),
        hint="Give dimensions that differ different names, or say how one follows from the other, "
        f"as in `2*{name} + 1`.",
    )


def repeat_rows(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Expand one dimension to a size by repeating what is there, or with zeros if nothing is."""
    size = tensor.shape[dim]
    if size == rows:
        return tensor
    if size == 0:
        return tensor.new_zeros(*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :])
    return tensor.index_select(dim, torch.arange(rows, device=tensor.device) % size)


Sizes = Mapping[sympy.Symbol, sympy.Expr]
"""What each of torch's symbols for a dynamic dimension is in terms of axes."""

_TRIED = 4096
"""How many combinations of sizes are tried at most."""
_LARGEST = 1 << 14
"""The largest product of the sizes of axes that the module is tried at."""
_STEPS = (1, 2, 3, 5, 8, 13, 21, 55, 144, 377, 1597, 6765)


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


def narrowed_axes(
    program: ExportedProgram,
    sizes: Sizes,
    axes: Mapping[str, Axis],
    traced: Mapping[str, int | None],
) -> dict[str, Axis] | None:
    """Return the ranges around the traced sizes in which all assertions on sizes hold.

    Args:
        program: A program that was captured with deferred assertions.
        sizes: What torch's symbols are.
        axes: The range of each axis.
        traced: The sizes that the program was captured at.

    Returns:
        ``None`` if an assertion is on several axes, or a range has no end that is found.
    """
    narrower = dict(axes)
    for _, assertion in _asserted(program.graph, sizes):
        relation = assertion.subs(sizes)
        if _holds(relation, narrower):
            continue
        symbols = _axes_in(relation)
        at = traced.get(symbols[0].name) if len(symbols) == 1 else None
        if at is None:
            return None
        axis = narrower[symbols[0].name]
        least = 1 + next(
            (
                low
                for low in range(at - 1, axis.min - 1, -1)
                if not _true(relation, symbols[0], low)
            ),
            axis.min - 1,
        )
        found = Axis(least, axis.max)
        if not _holds(relation, {symbols[0].name: found}):
            tried = range(at + 1, at + _TRIED)
            broken = (high for high in tried if not _true(relation, symbols[0], high))
            end = next(broken, None)
            if end is None or end - 1 == least or not axis.holds(end - 1):
                return None
            found = Axis(least, end - 1)
        narrower[symbols[0].name] = found
    return narrower


def _true(relation: sympy.Basic, symbol: sympy.Symbol, size: int) -> bool:
    return bool(relation.xreplace({symbol: sympy.Integer(size)}) == sympy.true)


def doubts(program: ExportedProgram, sizes: Sizes, axes: Mapping[str, Axis]) -> tuple[Doubt, ...]:
    """Return the relations between several axes that are not shown to hold.

    Args:
        program: A captured program.
        sizes: What torch's symbols are.
        axes: The range of each axis.
    """
    found: dict[str, Doubt] = {}
    for guard in _assumed(program):
        if not guard.free_symbols <= sizes.keys():
            continue
        relation = guard.subs(sizes)
        if len(relation.free_symbols) > 1 and not _holds(relation, axes):
            text = str(relation)
            found[text] = Doubt(text, _broken_at(relation, axes))
    return tuple(found.values())


def _assumed(program: ExportedProgram) -> Iterator[sympy.Basic]:
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
        if node.target is not ASSERT_SCALAR:
            continue
        source = node.args[0]
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if isinstance(value, torch.SymBool) and value.node.expr.free_symbols <= sizes.keys():
            yield node, value.node.expr


def _holds(relation: sympy.Basic, axes: Mapping[str, Axis]) -> bool:
    """Decide whether a relation is shown to hold at every size of the axes."""
    symbols = _axes_in(relation)
    above = {
        symbol: axes[symbol.name].min + sympy.Symbol(symbol.name, integer=True, nonnegative=True)
        for symbol in symbols
    }
    flexible = relation.replace(
        lambda part: type(part) in EXACT_LIMITS,
        lambda part: EXACT_LIMITS[type(part)](*part.args),
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
    symbols = _axes_in(relation)
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
    symbols = _axes_in(relation)
    for sizes in combinations:
        values = dict(zip(symbols, map(sympy.Integer, sizes), strict=True))
        if relation.xreplace(values) != sympy.true:  # `subs` takes a hundred times as long
            yield sizes


def _axes_in(relation: sympy.Basic) -> list[sympy.Symbol]:
    """List the axes in a relation, in order of their names."""
    return sorted(relation.free_symbols, key=str)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


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
        return frozenset().union(*map(_symbols_of, dims))
    if value.is_floating_point() and not all(of_tensors):
        return _NONE  # data, to which a position was added
    return frozenset().union(*of_tensors)


def _operator(node: fx.Node) -> str:
    """Return the name of an operator without its namespace and overload."""
    return str(node.target).removeprefix("aten.").partition(".")[0].rstrip("_")


def _symbols_of(size: int | torch.SymInt) -> Symbols:
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
    names = argument_names(node.target)
    source = _first(node)
    if source is None or "dim" not in names:
        return
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    shape, dim = source.shape, given.get("dim", 0)
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        return
    for symbol in _symbols_of(shape[dim]):
        for name in ("start", "end", "index", "length", "k", "shifts", "size"):
            if isinstance(number := given.get(name), int):
                yield symbol, abs(number)


def _constants(
    node: fx.Node, operands: Iterable[fx.Node], held: Mapping[str, Tensor]
) -> Iterator[int]:
    """List the whole numbers that an operator is given: arguments, and small tensors."""
    names = argument_names(node.target)
    named = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    plain = [] if names else [("", arg) for arg in node.args]
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
