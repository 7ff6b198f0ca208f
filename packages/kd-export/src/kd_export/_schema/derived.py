"""Schemas of files that kd_export did not write, from what their programs take and give.

An ``.onnx`` file is read without onnx, a ``.pt2`` file without torch. Names are those of the file,
so nothing of the schema can be wrong but the sizes of the axes, which the file may not tell.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from kd_export._errors import ExportError, Key, NotExportable
from kd_export._schema.files import (
    Json,
    as_dict,
    as_int,
    as_list,
    as_str,
    contents,
    foreign,
    unused_name,
    wire_key,
    wire_name,
)
from kd_export._schema.onnx_file import PRODUCER, damaged, fields_in, varint
from kd_export._schema.schema import Axis, Entry, LinearSize, Schema
from kd_export._schema.serialized_program import SOURCE
from kd_export._schema.trust import read_program

UNKNOWN = "?"
"""A size that the file does not tell, or that no axis name stands for."""


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output as the file tells it.

    Attributes:
        name: What the file calls it.
        dtype: The dtype's name.
        shape: Numbers, names of axes, what follows from one, or ``UNKNOWN``.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


def derived_schema(
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    ranges: Mapping[str, Axis],
    versions: Mapping[str, str],
) -> Schema:
    """Build the schema; each unknown size of an input is an axis of its own, of any size.

    >>> value = Value("input.1", "float32", ("n", UNKNOWN, 3))
    >>> schema = derived_schema([value], [], {"n": Axis(1, 8)}, {})
    >>> schema.input("input.1").describe(), {n: str(axis) for n, axis in schema.axes.items()}
    ('float32 (n, size, 3)', {'n': '1..8', 'size': '0..'})
    """
    keys = _keys([value.name for value in (*inputs, *outputs)])
    known = [LinearSize.parse(size) for v in inputs for size in v.shape if isinstance(size, str)]
    axes = {size.axis: ranges.get(size.axis, Axis(0)) for size in known if size is not None}
    entries = []
    for value in inputs:
        shape = list(value.shape)
        for dim, size in enumerate(shape):
            if isinstance(size, str) and LinearSize.parse(size) is None:
                shape[dim] = unused_name("size", axes)
                axes[str(shape[dim])] = Axis(0)
        entries.append(Entry(keys[value.name], value.name, value.dtype, tuple(shape)))
    results = [Entry(keys[one.name], one.name, one.dtype, one.shape) for one in outputs]
    return Schema(tuple(entries), tuple(results), axes, versions=versions, derived=True)


def _keys(names: Sequence[str]) -> dict[str, Key]:
    """Read names as wire names, so that they are used as they are; else as keys of one part.

    >>> _keys(["input.1", "y"]), _keys(["a", "a.b"])
    ({'input.1': ('input', '1'), 'y': ('y',)}, {'a': ('a',), 'a.b': ('a.b',)})
    """
    keys = {name: wire_key(name) for name in names}
    above = {key[:length] for key in keys.values() for length in range(1, len(key))}
    fit = all(wire_name(key) == name and key not in above for name, key in keys.items())
    return keys if fit else {name: (name,) for name in names}


# The numbers of fields: of a model, a graph, a value, a type, a tensor.
_PRODUCER_NAME, _PRODUCER_VERSION, _GRAPH = 2, 3, 7
_INITIALIZER, _INPUT, _OUTPUT, _SPARSE_INITIALIZER = 5, 11, 12, 15
_NAME, _TYPE = 1, 2
_TENSOR_TYPE, _ELEMENT, _SHAPE = 1, 1, 2
_TENSOR_NAME, _SPARSE_VALUES = 8, 1
_ONNX_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
}
_MISNAMED = "None"
"""What torch called every size it did not know: sizes of this name need not be equal."""
_ANY_RANK = "..."
_MOST_FIELDS = 2_000_000
_LONGEST_NAME = 1 << 16
_LARGEST_SIZE = (1 << 63) - 1
"""A larger number is a negative one, by which some exporters say that they do not know a size."""

_Part = tuple[int, memoryview]


def derived_onnx(file: BinaryIO) -> Schema:
    """Build the schema from the inputs and outputs of a model's graph.

    Raises:
        ExportError: The model is damaged, or kd_export wrote it and its schema is missing.
        NotExportable: An input or output is not a tensor of numbers, or an input has any rank.
    """
    try:
        return _derived_from(contents(file))
    except (EOFError, UnicodeDecodeError) as error:
        raise damaged(error) from error


def _derived_from(model: memoryview) -> Schema:
    reader = _ModelReader()
    parts = list(reader.parts(model))
    told = {number: _text(part) for number, part in parts if number in (2, 3)}
    if told.get(_PRODUCER_NAME) == PRODUCER:
        raise ExportError(
            "the .onnx file was written by kd-export, and its schema is missing.",
            expected="a schema",
            hint="It may be truncated: export again. If another tool wrote it anew, seal it with "
            "`kd_export.adopt(path, like=...)`, which compares it with the file it was made of.",
        )
    weights = {_text(name) for name in reader.weight_names(parts)}
    inputs = [value for value in reader.values(parts, _INPUT) if value.name not in weights]
    outputs = list(reader.values(parts, _OUTPUT))
    if not outputs:
        raise foreign(".onnx")
    for value in inputs:
        if value.shape == (_ANY_RANK,):
            raise _refused(value.name, "has no shape", "a shape, whose sizes may be unknown")
    name = told.get(_PRODUCER_NAME, "")
    versions = {name: told.get(_PRODUCER_VERSION, "")} if name else {}
    return derived_schema(inputs, outputs, {}, versions)


class _ModelReader:
    """Read the messages of one model, up to a number of fields in all."""

    def __init__(self) -> None:
        self._left = _MOST_FIELDS

    def parts(self, message: memoryview) -> Iterator[_Part]:
        for number, start, size in fields_in(message, 0, len(message)):
            self._left -= 1
            if self._left < 0:
                raise EOFError("it has too many fields")
            yield number, message[start : start + size]

    def inside(self, parts: Sequence[_Part], *numbers: int) -> Iterator[_Part]:
        """Iterate over the fields of those numbers in the graph."""
        for number, part in parts:
            if number == _GRAPH:
                yield from (found for found in self.parts(part) if found[0] in numbers)

    def last(self, message: memoryview, number: int) -> memoryview:
        """Return the last field of a number, the one that counts; empty if it is missing."""
        found = memoryview(b"")
        for one, part in self.parts(message):
            found = part if one == number else found
        return found

    def weight_names(self, parts: Sequence[_Part]) -> Iterator[memoryview]:
        """Find the names of initializers, which older models list among the inputs too."""
        for number, part in self.inside(parts, _INITIALIZER, _SPARSE_INITIALIZER):
            tensor = self.last(part, _SPARSE_VALUES) if number == _SPARSE_INITIALIZER else part
            yield self.last(tensor, _TENSOR_NAME)

    def values(self, parts: Sequence[_Part], kind: int) -> Iterator[Value]:
        """Read the inputs, or the outputs, of the graph."""
        for _, part in self.inside(parts, kind):
            name = _text(self.last(part, _NAME))
            tensor = self.last(self.last(part, _TYPE), _TENSOR_TYPE)
            if not tensor:
                raise _refused(name, "is not a tensor", "a tensor")
            element = varint(self.last(tensor, _ELEMENT), 0)[0]
            if element not in _ONNX_DTYPES:
                raise _refused(name, f"has the data type {element}", "a tensor of numbers or bools")
            shapes = [shape for number, shape in self.parts(tensor) if number == _SHAPE]
            dims = [dim for shape in shapes for _, dim in self.parts(shape)]
            sizes = tuple(self._size(dim) for dim in dims) if shapes else (_ANY_RANK,)
            yield Value(name, _ONNX_DTYPES[element], sizes)

    def _size(self, dim: memoryview) -> int | str:
        for number, part in self.parts(dim):
            if number == 1:
                size = varint(part, 0)[0]
                return size if size <= _LARGEST_SIZE else UNKNOWN
            if number == 2 and part and _text(part) != _MISNAMED:
                return _text(part)
        return UNKNOWN


def _text(part: memoryview) -> str:
    if len(part) > _LONGEST_NAME:
        raise EOFError("a name is too long")
    return bytes(part).decode()


def _refused(name: str, fault: str, expected: str) -> NotExportable:
    return NotExportable(
        f"`{name[:200]}` of the model {fault}, and a session runs on tensors of known rank.",
        expected=expected,
        got=name[:200],
        hint="Run the file by `onnxruntime.InferenceSession`.",
    )


# The numbers that torch writes for dtypes.
_TORCH_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    34: "uint32",
    35: "uint64",
}


def derived_program(file: BinaryIO) -> Schema:
    """Build the schema from the inputs and outputs of a program's graph.

    Raises:
        UntrustedArtifact: The file holds what is not part of an exported program.
        NotExportable: An input or output is not a tensor of a known dtype.
        ExportError: The file is not a whole archive, or holds no program.
    """
    program = as_dict(read_program(file))
    module = as_dict(program["graph_module"])
    signature = as_dict(module["signature"])
    metas = as_dict(as_dict(module["graph"])["tensor_values"])
    inputs = [_value(name, metas) for name in _names(signature["input_specs"], "user_input")]
    outputs: list[Value] = []
    nodes = _names(signature["output_specs"], "user_output")
    for node, name in zip(nodes, _result_names(module, nodes), strict=True):
        found = _value(node, metas)
        unused = unused_name(name, [value.name for value in outputs])  # one may be given out twice
        outputs.append(Value(unused, found.dtype, found.shape))
    ranges = {n: _axis(as_dict(one)) for n, one in as_dict(program["range_constraints"]).items()}
    return derived_schema(inputs, outputs, ranges, {"torch": as_str(program["torch_version"])})


def _names(specs: Json, kind: str) -> list[str]:
    """List the tensors of one kind of a signature."""
    found = [as_dict(spec)[kind] for spec in as_list(specs) if kind in as_dict(spec)]
    arguments = [as_dict(as_dict(spec)["arg"]) for spec in found]
    return [as_str(as_dict(argument["as_tensor"])["name"]) for argument in arguments]


def _result_names(module: dict[str, Json], nodes: list[str]) -> list[str]:
    """Return the wire names of a result that is a dict, else the names of the nodes."""
    (call,) = as_list(module["module_call_graph"])
    signature = as_dict(call)["signature"]
    if signature is None:
        return nodes
    tree = as_dict(as_list(json.loads(as_str(as_dict(signature)["out_spec"])))[1])
    names = [wire_name(key) for key in _leaf_keys(tree, ())]
    return names if tree["type"] == "builtins.dict" and len(names) == len(nodes) else nodes


def _leaf_keys(tree: dict[str, Json], above: Key) -> Iterator[Key]:
    """Yield the place of each leaf of a tree; a place in a list is a number."""
    if tree["type"] is None:
        yield above
        return
    parts = as_list(tree["children_spec"])
    words = json.loads(as_str(tree["context"])) if tree["type"] == "builtins.dict" else None
    names = (
        [str(n) for n in range(len(parts))]
        if words is None
        else [as_str(w) for w in as_list(words)]
    )
    for name, part in zip(names, parts, strict=True):
        yield from _leaf_keys(as_dict(part), (*above, name))


def _value(name: str, metas: dict[str, Json]) -> Value:
    if name not in metas:
        raise NotExportable(
            f"`{name[:200]}` of the program is not a tensor of the graph.",
            expected="a tensor",
            got=name[:200],
            hint="The file is forged or damaged: do not use it.",
        )
    meta = as_dict(metas[name])
    dtype = as_int(meta["dtype"])
    if dtype not in _TORCH_DTYPES:
        raise NotExportable(
            f"`{name[:200]}` of the program has the dtype {dtype}, which a schema does not know.",
            expected=tuple(_TORCH_DTYPES.values()),
            got=dtype,
            hint="Run the file by `torch.export.load`.",
        )
    return Value(
        name, _TORCH_DTYPES[dtype], tuple(_size(as_dict(s)) for s in as_list(meta["sizes"]))
    )


def _axis(bounds: dict[str, Json]) -> Axis:
    low, high = bounds["min_val"], bounds["max_val"]
    return Axis(0 if low is None else max(0, as_int(low)), None if high is None else as_int(high))


def _size(size: dict[str, Json]) -> int | str:
    if "as_int" in size:
        return as_int(size["as_int"])
    text = as_str(as_dict(size["as_expr"])["expr_str"])
    found = _linear(ast.parse(text, SOURCE, mode="eval").body)
    return str(found) if found is not None and found.axis and found.factor > 0 else UNKNOWN


def _linear(node: ast.expr) -> LinearSize | None:
    """Read a checked expression as a multiple of a symbol plus a number, or as a number."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    word, first = node.func.id, node.args[0] if node.args else None
    if word == "Symbol" and isinstance(first, ast.Constant):
        return LinearSize(str(first.value))
    if word == "Integer" and first is not None:
        return LinearSize("", 0, int(ast.literal_eval(first)))
    parts = [_linear(part) for part in node.args]
    if word not in _JOINED or len(parts) != 2 or parts[0] is None or parts[1] is None:
        return None
    return _JOINED[word](parts[0], parts[1])


def _sum(one: LinearSize, other: LinearSize) -> LinearSize | None:
    if one.axis and other.axis:
        return None
    whole = one.factor + other.factor
    return LinearSize(one.axis or other.axis, whole, one.offset + other.offset)


def _product(one: LinearSize, other: LinearSize) -> LinearSize | None:
    if one.axis and other.axis:
        return None
    factor, linear = (other.offset, one) if one.axis else (one.offset, other)
    return LinearSize(linear.axis, factor * linear.factor, factor * linear.offset)


_JOINED: dict[str, Callable[[LinearSize, LinearSize], LinearSize | None]] = {
    "Add": _sum,
    "Mul": _product,
}
