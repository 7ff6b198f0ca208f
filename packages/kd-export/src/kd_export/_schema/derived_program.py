"""The schema of a ``.pt2`` file that kd_export did not write, read without torch."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from typing import BinaryIO

from kd_export._errors import Key, NotExportable
from kd_export._schema.derived import UNKNOWN, Value, derived_schema
from kd_export._schema.json_values import Json, as_dict, as_int, as_list, as_str
from kd_export._schema.linear_size import LinearSize
from kd_export._schema.schema import Axis, Schema
from kd_export._schema.size_expression import SOURCE
from kd_export._schema.trust import read_program
from kd_export._schema.wire import unused_name, wire_name

# The numbers that torch writes for dtypes.
_DTYPES = {
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
    names = [wire_name(key) for key in _keys(tree, ())]
    return names if tree["type"] == "builtins.dict" and len(names) == len(nodes) else nodes


def _keys(tree: dict[str, Json], above: Key) -> Iterator[Key]:
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
        yield from _keys(as_dict(part), (*above, name))


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
    if dtype not in _DTYPES:
        raise NotExportable(
            f"`{name[:200]}` of the program has the dtype {dtype}, which a schema does not know.",
            expected=tuple(_DTYPES.values()),
            got=dtype,
            hint="Run the file by `torch.export.load`.",
        )
    return Value(name, _DTYPES[dtype], tuple(_size(as_dict(s)) for s in as_list(meta["sizes"])))


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
