"""C99 of an ONNX graph whose shapes are all known: a function, its constants, no heap.

Knows operators and C; must not know keys, files or schemas. An operator that is not here is
refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

from kd_export._errors import NotExportable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.generic]

TYPES = {
    "float32": "float",
    "float64": "double",
    "int64": "int64_t",
    "int32": "int32_t",
    "uint8": "uint8_t",
    "int8": "int8_t",
    "bool": "uint8_t",
}
"""The types of C by those of elements."""
_WIDTH = 8
"""How many numbers a line of a constant holds."""


@dataclass(frozen=True)
class Value:
    """A tensor in C: an array, or a part of what is passed in.

    Attributes:
        name: The expression that is indexed.
        dtype: The type of its elements, as numpy calls it.
        shape: Its sizes.
        known: Its numbers, if it is a constant.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    known: Array | None = None

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """The type of C."""
        return TYPES[self.dtype]


@dataclass
class Written:
    """The parts of a function in C.

    Attributes:
        constants: Definitions of arrays that do not change.
        buffers: Definitions of arrays for values on the way.
        lines: The statements.
        outputs: What the graph gives, in its order.
        bytes: How much memory the buffers take.
    """

    constants: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    bytes: int = 0


def written(model: onnx.ModelProto, prefix: str, inputs: Sequence[str]) -> Written:
    """Write the statements of a graph.

    Args:
        model: The graph; all shapes are known.
        prefix: What the names of arrays start with.
        inputs: What its inputs are called in C.

    Raises:
        NotExportable: It has an operator or a type that is not known here.
    """
    return _Writer(model, prefix, inputs).result


class _Writer:
    def __init__(self, model: onnx.ModelProto, prefix: str, inputs: Sequence[str]) -> None:
        self.result = Written()
        self._prefix = prefix
        self._values: dict[str, Value] = {}
        graph = model.graph
        self._shapes = {
            value.name: _typed(value)
            for value in (*graph.value_info, *graph.input, *graph.output)
            if value.type.HasField("tensor_type")
        }
        for value, name in zip(graph.input, inputs, strict=True):
            dtype, shape = self._typed(value.name)
            self._values[value.name] = Value(name, dtype, shape)
        for one in graph.initializer:
            self._constant(one.name, numpy_helper.to_array(one))
        for node in graph.node:
            self._node(node)
        self.result.outputs = [self._values[value.name] for value in graph.output]

    def _typed(self, name: str) -> tuple[str, tuple[int, ...]]:
        dtype, shape = self._shapes.get(name, ("", None))
        if shape is None:
            raise NotExportable(
                f"C needs fixed shapes, and that of `{name}` is not known.",
                got=name,
                hint="Save it as `.onnx`.",
            )
        if dtype not in TYPES:
            raise NotExportable(
                f"`{name}` is {dtype}, which C99 does not have.",
                expected=tuple(TYPES),
                got=dtype,
                hint="Compute in float32, or save it as `.onnx`.",
            )
        return dtype, shape

    def _constant(self, name: str, array: Array) -> None:
        dtype = array.dtype.name
        if dtype not in TYPES:
            raise NotExportable(
                f"the constant `{name}` is {dtype}, which C99 does not have.",
                expected=tuple(TYPES),
                got=dtype,
            )
        label = f"{self._prefix}_c{len(self._values)}"
        self._values[name] = Value(label, dtype, array.shape, array)

    def _node(self, node: onnx.NodeProto) -> None:
        write = _OPERATORS.get(node.op_type)
        if node.domain not in ("", "ai.onnx") or write is None:
            raise NotExportable(
                f"C has no operator `{node.op_type}` (`{node.name}`).",
                expected=tuple(sorted(_OPERATORS)),
                got=node.op_type,
                hint="Replace that operator in the module, or save it as `.onnx`.",
            )
        attributes = {one.name: _attribute(one) for one in node.attribute}
        inputs = [self._values[name] if name else None for name in node.input]
        outs = []
        for name in node.output:
            dtype, shape = self._typed(name) if name else ("float32", (0,))
            outs.append(self._buffer(name, dtype, shape))
        given = [one for one in inputs if one is not None]
        call = Call(node.op_type, inputs, outs, attributes)
        body = write(call)
        for one in given:
            self._define(one, body)
        for out in outs:
            if not any(out.name in line for line in body):
                continue  # an output that is left out
            kind, count = out.kind, max(out.count, 1)
            self.result.buffers.append(f"static {kind} {out.name}[{count}];")
            self.result.bytes += count * np.dtype(out.dtype).itemsize
        self.result.lines += [f"  /* {node.op_type} */", *(f"  {line}" for line in body)]

    def _buffer(self, name: str, dtype: str, shape: tuple[int, ...]) -> Value:
        value = Value(f"{self._prefix}_t{len(self._values)}", dtype, shape)
        self._values[name] = value
        return value

    def _define(self, value: Value, body: Sequence[str]) -> None:
        """Write a constant that a statement uses, once."""
        head = f"static const {value.kind} {value.name}["
        used = any(re.search(rf"\b{value.name}\b", line) for line in body)
        if (
            value.known is None
            or not used
            or any(c.startswith(head) for c in self.result.constants)
        ):
            return
        numbers = [literal(x, value.dtype) for x in value.known.reshape(-1).tolist()] or ["0"]
        rows = [
            f"  {', '.join(numbers[at : at + _WIDTH])}," for at in range(0, len(numbers), _WIDTH)
        ]
        self.result.constants += [f"{head}{len(numbers)}] = {{", *rows, "};"]


def _typed(value: onnx.ValueInfoProto) -> tuple[str, tuple[int, ...] | None]:
    tensor = value.type.tensor_type
    dims = [one.dim_value if one.HasField("dim_value") else None for one in tensor.shape.dim]
    name = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
    known = [dim for dim in dims if dim is not None]
    return name, tuple(known) if len(known) == len(dims) and tensor.HasField("shape") else None


def _attribute(attribute: onnx.AttributeProto) -> object:
    if attribute.type == onnx.AttributeProto.INTS:
        return list(attribute.ints)
    value = helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return value.decode() if isinstance(value, bytes) else value


def literal(number: float, dtype: str) -> str:
    """Write a number in C.

    >>> literal(0.1, "float32"), literal(-math.inf, "float64"), literal(3, "int64")
    ('0.1f', '-INFINITY', 'INT64_C(3)')
    """
    if dtype in ("float32", "float64"):
        if math.isnan(number):
            return "NAN"
        if math.isinf(number):
            return "INFINITY" if number > 0 else "-INFINITY"
        text = f"{number:.9g}" if dtype == "float32" else f"{number:.17g}"
        text += "" if "." in text or "e" in text else ".0"
        return f"{text}f" if dtype == "float32" else text
    if dtype == "int64":
        return f"INT64_C({number})" if number > -(1 << 63) else "INT64_MIN"
    return str(int(number))


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        operator: Its name.
        inputs: What it reads; ``None`` where an optional one is left out.
        outputs: What it writes.
        attributes: Its settings.
    """

    operator: str
    inputs: Sequence[Value | None]
    outputs: Sequence[Value]
    attributes: dict[str, object]

    @property
    def out(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def get(self, place: int) -> Value:
        """Return an input that must be there."""
        value = self.inputs[place]
        assert value is not None
        return value

    def maybe(self, place: int) -> Value | None:
        """Return an input that may be left out."""
        return self.inputs[place] if place < len(self.inputs) else None

    def number(self, name: str, default: float) -> float:
        """Return a setting that is a number."""
        value = self.attributes.get(name, default)
        assert isinstance(value, int | float)
        return value

    def whole(self, name: str, default: int) -> int:
        """Return a setting that is a whole number."""
        return int(self.number(name, default))

    def known(self, place: int) -> list[int]:
        """Return the whole numbers of an input that is a constant.

        Raises:
            NotExportable: It is computed.
        """
        value = self.get(place)
        if value.known is None:
            raise NotExportable(
                f"C needs the constant settings of `{self.operator}`, and `{value.name}` is "
                "computed.",
                got=self.operator,
                hint="Save it as `.onnx`.",
            )
        return [int(one) for one in value.known.reshape(-1).tolist()]


Lines = list[str]
Write = Callable[[Call], Lines]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _loops(shape: Sequence[int], body: Callable[[list[str]], Lines]) -> Lines:
    """Write loops over all places of a shape; a size of 1 has none."""
    names, lines = [], []
    for dim, size in enumerate(shape):
        names.append("0" if size == 1 else f"i{dim}")
        if size != 1:
            lines.append(f"for (int i{dim} = 0; i{dim} < {size}; ++i{dim})")
    inner = body(names)
    block = [*(f"  {line}" for line in inner)]
    return [*lines, "{", *block, "}"]


def _at(value: Value, names: Sequence[str], rank: int) -> str:
    """Return the place in a value that is broadcast to a rank."""
    lead = rank - len(value.shape)
    terms = [
        name if stride == 1 else f"{name} * {stride}"
        for name, stride, size in zip(names[lead:], _strides(value.shape), value.shape, strict=True)
        if size != 1 and name != "0"
    ]
    return f"{value.name}[{' + '.join(terms) or '0'}]"


def _pointwise(expression: Callable[[Call, Sequence[str]], str]) -> Write:
    def write(call: Call) -> Lines:
        out = call.out
        given = [one for one in call.inputs if one is not None]

        def body(names: list[str]) -> Lines:
            rank = len(out.shape)
            found = expression(call, [_at(one, names, rank) for one in given])
            return [f"{_at(out, names, rank)} = ({out.kind})({found});"]

        return _loops(out.shape, body)

    return write


def _function(name: str) -> Callable[[Call, Sequence[str]], str]:
    """Call a function of `math.h` in the type of the result."""
    return lambda call, x: f"{name}{_suffix(call)}({', '.join(x)})"


def _suffix(call: Call) -> str:
    return "f" if call.get(0).dtype == "float32" else ""


def _one(call: Call) -> str:
    return literal(1.0, call.get(0).dtype)


def _infix(sign: str) -> Callable[[Call, Sequence[str]], str]:
    return lambda call, x: f"{x[0]} {sign} {x[1]}"


def _lit(call: Call, name: str, default: float) -> str:
    return literal(float(np.float32(call.number(name, default))), call.get(0).dtype)


def _clip(call: Call, x: Sequence[str]) -> str:
    rest = list(x[1:])
    low = rest.pop(0) if call.maybe(1) is not None else None
    high = rest.pop(0) if call.maybe(2) is not None else None
    text = x[0]
    if low is not None:
        text = f"({text} < {low} ? {low} : {text})"
    if high is not None:
        # A NaN stays, as it compares with nothing.
        text = f"({text} > {high} ? {high} : {text})"
    return text


def _least_or_most(sign: str) -> Callable[[Call, Sequence[str]], str]:
    def expression(call: Call, x: Sequence[str]) -> str:
        text = x[0]
        for one in x[1:]:
            text = f"({text} {sign} {one} || {text} != {text} ? {text} : {one})"
        return text

    return expression


def _cast(call: Call, x: Sequence[str]) -> str:
    return f"{x[0]} != 0" if call.out.dtype == "bool" else x[0]


def _copy(call: Call) -> Lines:
    value, out = call.get(0), call.out
    return [f"memcpy({out.name}, {value.name}, sizeof({out.kind}) * {out.count});"]


def _gemm(call: Call) -> Lines:
    a, b, c, out = call.get(0), call.get(1), call.maybe(2), call.out
    rows, columns = out.shape
    left, right = call.whole("transA", 0), call.whole("transB", 0)
    inner = a.shape[0] if left else a.shape[1]
    alpha, beta = _lit(call, "alpha", 1.0), _lit(call, "beta", 1.0)
    one = f"{a.name}[{f'k * {rows} + i' if left else f'i * {inner} + k'}]"
    other = f"{b.name}[{f'j * {inner} + k' if right else f'k * {columns} + j'}]"
    added = "" if c is None else f" + {beta} * {_at(c, ['i', 'j'], 2)}"
    return [
        f"for (int i = 0; i < {rows}; ++i)",
        f"  for (int j = 0; j < {columns}; ++j) {{",
        f"    {out.kind} sum = 0;",
        f"    for (int k = 0; k < {inner}; ++k) sum += {one} * {other};",
        f"    {out.name}[i * {columns} + j] = {alpha} * sum{added};",
        "  }",
    ]


def _matmul(call: Call) -> Lines:
    a, b, out = call.get(0), call.get(1), call.out
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise NotExportable(
            "C multiplies matrices, and `MatMul` has a vector.", got=(a.shape, b.shape)
        )
    rank, inner = len(out.shape), a.shape[-1]

    def body(names: list[str]) -> Lines:
        left, right = [*names[:-1], "k"], [*names[:-2], "k", names[-1]]
        return [
            f"{out.kind} sum = 0;",
            f"for (int k = 0; k < {inner}; ++k) "
            f"sum += {_at(a, left, rank)} * {_at(b, right, rank)};",
            f"{_at(out, names, rank)} = sum;",
        ]

    return _loops(out.shape, body)


def _axis_of(call: Call, default: int, rank: int) -> int:
    return call.whole("axis", default) % max(rank, 1)


def _softmax(call: Call) -> Lines:
    x, out = call.get(0), call.out
    axis = _axis_of(call, -1, len(x.shape))
    size, step = x.shape[axis], math.prod(x.shape[axis + 1 :])
    blocks, f = math.prod(x.shape[:axis]), _suffix(call)
    put = f"exp{f}(p[k * {step}] - most) / sum"
    if call.operator == "LogSoftmax":
        put = f"p[k * {step}] - most - log{f}(sum)"
    return [
        f"for (int i = 0; i < {blocks}; ++i)",
        f"  for (int j = 0; j < {step}; ++j) {{",
        f"    const {x.kind} *p = {x.name} + i * {size * step} + j;",
        f"    {x.kind} most = p[0], sum = 0;",
        f"    for (int k = 1; k < {size}; ++k) if (p[k * {step}] > most) most = p[k * {step}];",
        f"    for (int k = 0; k < {size}; ++k) sum += exp{f}(p[k * {step}] - most);",
        f"    for (int k = 0; k < {size}; ++k)",
        f"      {out.name}[i * {size * step} + j + k * {step}] = {put};",
        "  }",
    ]


def _argmax(call: Call) -> Lines:
    x, out = call.get(0), call.out
    axis = _axis_of(call, 0, len(x.shape))
    size, step = x.shape[axis], math.prod(x.shape[axis + 1 :])
    sign = ">=" if call.whole("select_last_index", 0) else ">"
    sign = sign.replace(">", "<") if call.operator == "ArgMin" else sign
    return [
        f"for (int i = 0; i < {math.prod(x.shape[:axis])}; ++i)",
        f"  for (int j = 0; j < {step}; ++j) {{",
        f"    const {x.kind} *p = {x.name} + i * {size * step} + j;",
        "    int best = 0;",
        f"    for (int k = 1; k < {size}; ++k)",
        f"      if (p[k * {step}] {sign} p[best * {step}]) best = k;",
        f"    {out.name}[i * {step} + j] = best;",
        "  }",
    ]


def _reduce(call: Call) -> Lines:
    x, out = call.get(0), call.out
    rank = len(x.shape)
    listed = call.known(1) if call.maybe(1) is not None else call.attributes.get("axes")
    axes = [int(a) % rank for a in listed] if isinstance(listed, list) else []
    axes = axes or list(range(rank))
    strides = _strides(x.shape)
    stayed = [dim for dim in range(rank) if dim not in axes]
    many = math.prod(x.shape[dim] for dim in axes)
    lines = []
    for dim in stayed:
        lines.append(f"for (int i{dim} = 0; i{dim} < {x.shape[dim]}; ++i{dim})")
    own = _strides([x.shape[dim] for dim in stayed])
    place = " + ".join(f"i{dim} * {step}" for dim, step in zip(stayed, own, strict=True)) or "0"
    source = " + ".join(f"i{dim} * {strides[dim]}" for dim in range(rank)) or "0"
    inner = [f"for (int i{d} = 0; i{d} < {x.shape[d]}; ++i{d})" for d in axes]
    one = f"{x.name}[{source}]"
    start, step = {
        "ReduceSum": ("0", f"found += {one};"),
        "ReduceMean": ("0", f"found += {one};"),
        "ReduceProd": ("1", f"found *= {one};"),
        "ReduceMax": ("-INFINITY", f"if ({one} > found) found = {one};"),
        "ReduceMin": ("INFINITY", f"if ({one} < found) found = {one};"),
        "ReduceSumSquare": ("0", f"found += {one} * {one};"),
        "ReduceL1": ("0", f"found += {one} < 0 ? -{one} : {one};"),
        "ReduceL2": ("0", f"found += {one} * {one};"),
        "ReduceLogSumExp": ("0", f"found += exp{_suffix(call)}({one} - most);"),
    }[call.operator]
    if "INFINITY" in start and "float" not in x.dtype:
        raise NotExportable(f"C has `{call.operator}` of floats alone.", got=x.dtype)
    last, first = "found", list[str]()
    if call.operator == "ReduceMean":
        last = f"found / {many}"
    elif call.operator == "ReduceL2":
        last = f"sqrt{_suffix(call)}(found)"
    elif call.operator == "ReduceLogSumExp":
        last = f"most + log{_suffix(call)}(found)"
        first = [
            f"  {out.kind} most = -INFINITY;",
            *(f"  {line}" for line in inner),
            f"    if ({one} > most) most = {one};",
            "  if (most == INFINITY || most == -INFINITY) most = 0;",
        ]
    return [
        *lines,
        "{",
        *first,
        f"  {out.kind} found = {start};",
        *(f"  {line}" for line in inner),
        f"    {step}",
        f"  {out.name}[{place}] = {last};",
        "}",
    ]


def _layer_norm(call: Call) -> Lines:
    shape = call.get(0).shape
    axis = _axis_of(call, -1, len(shape))
    return _normalised(call, math.prod(shape[:axis]), math.prod(shape[axis:]), "k")


def _instance_norm(call: Call) -> Lines:
    shape = call.get(0).shape
    return _normalised(call, math.prod(shape[:2]), math.prod(shape[2:]), f"i % {shape[1]}")


def _normalised(call: Call, rows: int, size: int, place: str) -> Lines:
    """Write each row less its mean, by its deviation; scale and bias are at a place."""
    x, scale, bias, out, f = call.get(0), call.get(1), call.maybe(2), call.out, _suffix(call)
    added = "" if bias is None else f" + {bias.name}[{place}]"
    return [
        f"for (int i = 0; i < {rows}; ++i) {{",
        f"  const {x.kind} *p = {x.name} + i * {size};",
        f"  {x.kind} mean = 0, spread = 0;",
        f"  for (int k = 0; k < {size}; ++k) mean += p[k];",
        f"  mean /= {size};",
        f"  for (int k = 0; k < {size}; ++k) spread += (p[k] - mean) * (p[k] - mean);",
        f"  spread = {_one(call)} / sqrt{f}(spread / {size} + {_lit(call, 'epsilon', 1e-5)});",
        f"  for (int k = 0; k < {size}; ++k)",
        f"    {out.name}[i * {size} + k] = (p[k] - mean) * spread * {scale.name}[{place}]{added};",
        "}",
    ]


def _batch_norm(call: Call) -> Lines:
    x, out, f = call.get(0), call.out, _suffix(call)
    scale, bias, mean, spread = (call.get(place).name for place in (1, 2, 3, 4))
    inner, channels = math.prod(x.shape[2:]), x.shape[1]
    return [
        f"for (int i = 0; i < {x.count}; ++i) {{",
        f"  const int k = i / {inner} % {channels};",
        f"  {out.name}[i] = ({x.name}[i] - {mean}[k]) /",
        f"    sqrt{f}({spread}[k] + {_lit(call, 'epsilon', 1e-5)}) * {scale}[k] + {bias}[k];",
        "}",
    ]


def _concat(call: Call) -> Lines:
    out = call.out
    axis = _axis_of(call, 0, len(out.shape))
    step, lines, start = math.prod(out.shape[axis:]), list[str](), 0
    for value in call.inputs:
        if value is None or not value.count:
            continue
        part = math.prod(value.shape[axis:])
        target, source = f"{out.name} + i * {step} + {start}", f"{value.name} + i * {part}"
        lines += _blocks(out, math.prod(out.shape[:axis]), target, source, part)
        start += part
    return lines


def _blocks(out: Value, blocks: int, target: str, source: str, part: int) -> Lines:
    """Copy as many blocks, each of so many numbers, from places to places."""
    return [
        f"for (int i = 0; i < {blocks}; ++i)",
        f"  memcpy({target}, {source}, sizeof({out.kind}) * {part});",
    ]


def _split(call: Call) -> Lines:
    x = call.get(0)
    axis = _axis_of(call, 0, len(x.shape))
    step, start, lines = math.prod(x.shape[axis:]), 0, list[str]()
    for out in call.outputs:
        part = math.prod(out.shape[axis:])
        target, source = f"{out.name} + i * {part}", f"{x.name} + i * {step} + {start}"
        lines += _blocks(out, math.prod(x.shape[:axis]), target, source, part)
        start += part
    return lines


def _slice(call: Call) -> Lines:
    x, out = call.get(0), call.out
    rank = len(x.shape)
    starts, ends = call.known(1), call.known(2)
    axes = call.known(3) if call.maybe(3) is not None else list(range(len(starts)))
    steps = call.known(4) if call.maybe(4) is not None else [1] * len(starts)
    first, by = [0] * rank, [1] * rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        chosen = range(x.shape[axis])[slice(start, None if end < -(1 << 40) else end, step)]
        first[axis], by[axis] = (chosen.start, step)
    strides = _strides(x.shape)

    def body(names: list[str]) -> Lines:
        terms = [
            f"({begin} + {name} * {step}) * {stride}"
            for begin, name, step, stride in zip(first, names, by, strides, strict=True)
        ]
        return [f"{_at(out, names, rank)} = {x.name}[{' + '.join(terms) or '0'}];"]

    return _loops(out.shape, body)


def _transpose(call: Call) -> Lines:
    x, out = call.get(0), call.out
    rank = len(x.shape)
    given = call.attributes.get("perm")
    order = [int(a) for a in given] if isinstance(given, list) else list(range(rank))[::-1]
    strides = _strides(x.shape)

    def body(names: list[str]) -> Lines:
        terms = [f"{name} * {strides[dim]}" for name, dim in zip(names, order, strict=True)]
        return [f"{_at(out, names, rank)} = {x.name}[{' + '.join(terms) or '0'}];"]

    return _loops(out.shape, body)


def _gather(call: Call) -> Lines:
    x, at, out = call.get(0), call.get(1), call.out
    axis = _axis_of(call, 0, len(x.shape))
    size, step = x.shape[axis], math.prod(x.shape[axis + 1 :])
    return [
        f"for (int i = 0; i < {math.prod(x.shape[:axis])}; ++i)",
        f"  for (int k = 0; k < {at.count}; ++k) {{",
        f"    int64_t place = (int64_t){at.name}[k];",
        f"    if (place < 0) place += {size};",
        f"    if (place < 0 || place >= {size}) place = 0;",
        f"    memcpy({out.name} + (i * {at.count} + k) * {step}, "
        f"{x.name} + (i * {size} + place) * {step}, sizeof({out.kind}) * {step});",
        "  }",
    ]


def _gather_nd(call: Call) -> Lines:
    x, places, out = call.get(0), call.get(1), call.out
    if call.whole("batch_dims", 0):
        raise NotExportable("C has no `GatherND` by batches.", got=call.operator)
    depth = places.shape[-1]
    part, strides = math.prod(x.shape[depth:]), _strides(x.shape)
    lines = [
        f"for (int i = 0; i < {math.prod(places.shape[:-1])}; ++i) {{",
        f"  const {places.kind} *p = {places.name} + i * {depth};",
        "  int at = 0;",
    ]
    for dim in range(depth):
        size = x.shape[dim]
        lines.append(
            f"  at += (int)(p[{dim}] < 0 ? p[{dim}] + {size} : p[{dim}]) * {strides[dim]};"
        )
    copied = f"memcpy({out.name} + i * {part}, {x.name} + at, sizeof({out.kind}) * {part});"
    return [*lines, f"  {copied}", "}"]


def _cumsum(call: Call) -> Lines:
    x, out = call.get(0), call.out
    if call.whole("exclusive", 0) or call.whole("reverse", 0):
        raise NotExportable("C has no `CumSum` that is exclusive or in reverse.", got=call.operator)
    axis = call.known(1)[0] % len(x.shape)
    size, step = x.shape[axis], math.prod(x.shape[axis + 1 :])
    return [
        f"for (int i = 0; i < {math.prod(x.shape[:axis])}; ++i)",
        f"  for (int j = 0; j < {step}; ++j) {{",
        f"    {out.kind} found = 0;",
        f"    for (int k = 0; k < {size}; ++k) {{",
        f"      const int at = (i * {size} + k) * {step} + j;",
        f"      found += {x.name}[at];",
        f"      {out.name}[at] = found;",
        "    }",
        "  }",
    ]


@dataclass(frozen=True)
class Windows:
    """Where a kernel stands over an image, in two dimensions; with one, the first has size 1.

    Attributes:
        sizes: The height and the width of the input.
        outs: Those of the output.
        kernel: Those of the kernel.
        strides: By how much it moves.
        dilations: How far its numbers are apart.
        pads: What is added before the input.
    """

    sizes: tuple[int, ...]
    outs: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]

    @classmethod
    def of(cls, call: Call, kernel: Sequence[int]) -> Windows:
        """Read the settings of a convolution or a pooling.

        Raises:
            NotExportable: It is over more than two dimensions, or its padding is not told.
        """
        shape = call.get(0).shape
        dims = len(shape) - 2
        if dims not in (1, 2) or call.attributes.get("auto_pad", "NOTSET") != "NOTSET":
            raise NotExportable(f"C has no `{call.operator}` over {dims} dimensions.", got=shape)

        def flat(given: object, lacking: int) -> tuple[int, ...]:
            listed = [int(one) for one in given] if isinstance(given, list | tuple) else []
            found = (listed or [lacking] * dims)[:dims]
            return (lacking, *found) if dims == 1 else tuple(found)

        settings = call.attributes
        return cls(
            flat(shape[2:], 1),
            flat(call.out.shape[2:], 1),
            flat(tuple(kernel), 1),
            flat(settings.get("strides"), 1),
            flat(settings.get("dilations"), 1),
            flat(settings.get("pads"), 0),
        )

    def place(self, indent: str) -> Lines:
        """Write the place in the input that the kernel's `a` and `b` are at, for `r` and `q`."""
        return [
            f"{indent}const int y = r * {self.strides[0]} + a * {self.dilations[0]} - "
            f"{self.pads[0]};",
            f"{indent}const int z = q * {self.strides[1]} + b * {self.dilations[1]} - "
            f"{self.pads[1]};",
        ]

    @property
    def inside(self) -> str:
        """The condition that this place is in the input."""
        return f"y >= 0 && y < {self.sizes[0]} && z >= 0 && z < {self.sizes[1]}"


def _conv(call: Call) -> Lines:
    x, w, bias, out = call.get(0), call.get(1), call.maybe(2), call.out
    windows = Windows.of(call, w.shape[2:])
    (h, wide), (oh, ow), (kh, kw) = windows.sizes, windows.outs, windows.kernel
    outs, ins, group = w.shape[0], w.shape[1], call.whole("group", 1)
    start = "0" if bias is None else f"{bias.name}[o]"
    return [
        f"for (int n = 0; n < {x.shape[0]}; ++n)",
        f"  for (int o = 0; o < {outs}; ++o)",
        f"    for (int r = 0; r < {oh}; ++r)",
        f"      for (int q = 0; q < {ow}; ++q) {{",
        f"        {out.kind} sum = {start};",
        f"        for (int c = 0; c < {ins}; ++c)",
        f"          for (int a = 0; a < {kh}; ++a)",
        f"            for (int b = 0; b < {kw}; ++b) {{",
        *windows.place(" " * 14),
        f"              const int ch = (o / {outs // group}) * {ins} + c;",
        f"              if ({windows.inside})",
        f"                sum += {x.name}[((n * {x.shape[1]} + ch) * {h} + y) * {wide} + z] *",
        f"                       {w.name}[((o * {ins} + c) * {kh} + a) * {kw} + b];",
        "            }",
        f"        {out.name}[((n * {outs} + o) * {oh} + r) * {ow} + q] = sum;",
        "      }",
    ]


def _pool(call: Call) -> Lines:
    x, out = call.get(0), call.out
    if len(call.outputs) > 1:
        raise NotExportable(f"C has no `{call.operator}` that gives places.", got=call.operator)
    kernel = call.attributes["kernel_shape"]
    assert isinstance(kernel, list)
    windows = Windows.of(call, kernel)
    (h, wide), (oh, ow), (kh, kw) = windows.sizes, windows.outs, windows.kernel
    most = call.operator == "MaxPool"
    if not most and call.whole("count_include_pad", 0) and call.whole("ceil_mode", 0):
        raise NotExportable("C has no `AveragePool` that counts padding and rounds up.", got="both")
    counted = f"{kh * kw}" if call.whole("count_include_pad", 0) else "count"
    one = f"{x.name}[(i * {h} + y) * {wide} + z]"
    if most:
        start, step = "-INFINITY", f"if ({one} > found || {one} != {one}) found = {one};"
    else:
        start, step = "0", f"found += {one};"
    if "float" not in x.dtype:
        raise NotExportable(f"C has `{call.operator}` of floats alone.", got=x.dtype)
    return [
        f"for (int i = 0; i < {math.prod(x.shape[:2])}; ++i)",
        f"  for (int r = 0; r < {oh}; ++r)",
        f"    for (int q = 0; q < {ow}; ++q) {{",
        f"      {out.kind} found = {start};",
        "      int count = 0;",
        f"      for (int a = 0; a < {kh}; ++a)",
        f"        for (int b = 0; b < {kw}; ++b) {{",
        *windows.place(" " * 10),
        f"          if ({windows.inside}) {{",
        "            ++count;",
        f"            {step}",
        "          }",
        "        }",
        "      (void)count;",
        f"      {out.name}[(i * {oh} + r) * {ow} + q] = found{'' if most else f' / {counted}'};",
        "    }",
    ]


def _recurrent(call: Call) -> Lines:
    """Write an LSTM or a GRU over its steps, in one direction."""
    x, w, r, b = call.get(0), call.get(1), call.get(2), call.maybe(3)
    lstm = call.operator == "LSTM"
    steps, rows, ins = x.shape
    size, gates = r.shape[2], 4 if lstm else 3
    rest = [call.maybe(place) for place in (4, 7)]
    plain = call.attributes.get("direction", "forward") == "forward"
    plain = plain and not {"activations", "clip"} & call.attributes.keys()
    if not plain or call.whole("layout", 0) or any(one is not None for one in rest):
        raise NotExportable(
            f"C has `{call.operator}` in one direction, without lengths and peepholes.",
            got=call.operator,
            hint="Use a cell, or save it as `.onnx`.",
        )
    if not lstm and not call.whole("linear_before_reset", 0):
        raise NotExportable("C has `GRU` as torch computes it.", got="linear_before_reset=0")
    h0, c0 = call.maybe(5), call.maybe(6)
    kind, f, one = x.kind, _suffix(call), _one(call)

    def sigmoid(text: str) -> str:
        return f"{one} / ({one} + exp{f}(-({text})))"

    def bias(half: int) -> str:
        return "0" if b is None else f"{b.name}[{half * gates * size} + g * {size} + j]"

    def start(value: Value | None) -> str:
        return "0" if value is None else f"{value.name}[n * {size} + j]"

    gate = [
        f"{kind} a[{gates}], u[{gates}];",
        f"for (int g = 0; g < {gates}; ++g) {{",
        f"  a[g] = {bias(0)};",
        f"  u[g] = {bias(1)};",
        f"  const {kind} *p = {x.name} + (t * {rows} + n) * {ins};",
        f"  const {kind} *v = {w.name} + (g * {size} + j) * {ins};",
        f"  const {kind} *q = {r.name} + (g * {size} + j) * {size};",
        f"  for (int k = 0; k < {ins}; ++k) a[g] += p[k] * v[k];",
        f"  for (int k = 0; k < {size}; ++k) u[g] += h[k] * q[k];",
        "}",
    ]
    if lstm:  # in the order input, output, forget, cell
        gate += [
            f"const {kind} kept = {sigmoid('a[2] + u[2]')} * c[j];",
            f"c[j] = kept + {sigmoid('a[0] + u[0]')} * tanh{f}(a[3] + u[3]);",
            f"next[j] = {sigmoid('a[1] + u[1]')} * tanh{f}(c[j]);",
        ]
    else:  # in the order update, reset, hidden
        gate += [
            f"const {kind} z = {sigmoid('a[0] + u[0]')};",
            f"const {kind} s = {sigmoid('a[1] + u[1]')};",
            f"next[j] = ({one} - z) * tanh{f}(a[2] + s * u[2]) + z * h[j];",
        ]
    whole, last = call.outputs[0], call.outputs[1:]
    ends = [
        f"  memcpy({out.name} + n * {size}, {held}, sizeof(h));"
        for out, held in zip(last, ("h", "c"), strict=False)
        if out.count
    ]
    return [
        f"for (int n = 0; n < {rows}; ++n) {{",
        f"  {kind} h[{size}], next[{size}]{f', c[{size}]' if lstm else ''};",
        f"  for (int j = 0; j < {size}; ++j) h[j] = {start(h0)};",
        *([f"  for (int j = 0; j < {size}; ++j) c[j] = {start(c0)};"] if lstm else []),
        f"  for (int t = 0; t < {steps}; ++t) {{",
        f"    for (int j = 0; j < {size}; ++j) {{",
        *(f"      {line}" for line in gate),
        "    }",
        "    memcpy(h, next, sizeof(h));",
        *(
            [f"    memcpy({whole.name} + (t * {rows} + n) * {size}, h, sizeof(h));"]
            if whole.count
            else []
        ),
        "  }",
        *ends,
        "}",
    ]


def _elu(call: Call, x: Sequence[str]) -> str:
    alpha = _lit(call, "alpha", 1.0)
    return f"{x[0]} > 0 ? {x[0]} : {alpha} * expm1{_suffix(call)}({x[0]})"


def _selu(call: Call, x: Sequence[str]) -> str:
    alpha, gamma = _lit(call, "alpha", 1.67326319), _lit(call, "gamma", 1.05070102)
    return f"{gamma} * ({x[0]} > 0 ? {x[0]} : {alpha} * expm1{_suffix(call)}({x[0]}))"


def _softplus(call: Call, x: Sequence[str]) -> str:
    f, v = _suffix(call), x[0]
    return f"({v} > 0 ? {v} : 0) + log1p{f}(exp{f}(-fabs{f}({v})))"


def _sigmoid(call: Call, x: Sequence[str]) -> str:
    return f"{_one(call)} / ({_one(call)} + exp{_suffix(call)}(-{x[0]}))"


def _gelu(call: Call, x: Sequence[str]) -> str:
    f, v, kind = _suffix(call), x[0], call.get(0).dtype
    half, one = literal(0.5, kind), _one(call)
    if call.attributes.get("approximate") == "tanh":
        a, b = literal(0.7978845608028654, kind), literal(0.044715, kind)
        return f"{half} * {v} * ({one} + tanh{f}({a} * ({v} + {b} * {v} * {v} * {v})))"
    return f"{half} * {v} * ({one} + erf{f}({v} * {literal(0.7071067811865476, kind)}))"


_OPERATORS: dict[str, Write] = {
    **{
        name: _pointwise(_infix(sign))
        for name, sign in (
            ("Add", "+"),
            ("Sub", "-"),
            ("Mul", "*"),
            ("Div", "/"),
            ("Equal", "=="),
            ("Greater", ">"),
            ("Less", "<"),
            ("GreaterOrEqual", ">="),
            ("LessOrEqual", "<="),
            ("And", "&&"),
            ("Or", "||"),
        )
    },
    **{
        name: _pointwise(_function(function))
        for name, function in (
            ("Tanh", "tanh"),
            ("Exp", "exp"),
            ("Log", "log"),
            ("Sqrt", "sqrt"),
            ("Sin", "sin"),
            ("Cos", "cos"),
            ("Atan", "atan"),
            ("Erf", "erf"),
            ("Floor", "floor"),
            ("Ceil", "ceil"),
            ("Round", "rint"),
            ("Pow", "pow"),
        )
    },
    "Abs": _pointwise(lambda call, x: f"{x[0]} < 0 ? -{x[0]} : {x[0]}"),
    "Neg": _pointwise(lambda call, x: f"-{x[0]}"),
    "IsNaN": _pointwise(lambda call, x: f"{x[0]} != {x[0]}"),
    "IsInf": _pointwise(lambda call, x: f"{x[0]} == INFINITY || {x[0]} == -INFINITY"),
    "Not": _pointwise(lambda call, x: f"!{x[0]}"),
    "Sign": _pointwise(lambda call, x: f"({x[0]} > 0) - ({x[0]} < 0)"),
    "Reciprocal": _pointwise(lambda call, x: f"{_one(call)} / {x[0]}"),
    "Relu": _pointwise(lambda call, x: f"{x[0]} < 0 ? 0 : {x[0]}"),
    "LeakyRelu": _pointwise(
        lambda call, x: f"{x[0]} < 0 ? {_lit(call, 'alpha', 0.01)} * {x[0]} : {x[0]}"
    ),
    "Elu": _pointwise(_elu),
    "Selu": _pointwise(_selu),
    "Softplus": _pointwise(_softplus),
    "Softsign": _pointwise(
        lambda call, x: f"{x[0]} / ({_one(call)} + fabs{_suffix(call)}({x[0]}))"
    ),
    "Sigmoid": _pointwise(_sigmoid),
    "Gelu": _pointwise(_gelu),
    "Clip": _pointwise(_clip),
    "Min": _pointwise(_least_or_most("<")),
    "Max": _pointwise(_least_or_most(">")),
    "Where": _pointwise(lambda call, x: f"{x[0]} ? {x[1]} : {x[2]}"),
    "Cast": _pointwise(_cast),
    "Identity": _copy,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _copy),
    "Expand": _pointwise(lambda call, x: x[0]),
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Conv": _conv,
    **dict.fromkeys(("MaxPool", "AveragePool"), _pool),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    **dict.fromkeys(("ArgMax", "ArgMin"), _argmax),
    **dict.fromkeys(
        (
            "ReduceSum",
            "ReduceMean",
            "ReduceProd",
            "ReduceMax",
            "ReduceMin",
            "ReduceSumSquare",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSumExp",
        ),
        _reduce,
    ),
    "LayerNormalization": _layer_norm,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Transpose": _transpose,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "CumSum": _cumsum,
    **dict.fromkeys(("LSTM", "GRU"), _recurrent),
}
