"""From an exported program to a tidy ONNX model.

What torch's exporter leaves to mend: the name of an inner value may be that of an input, unknown
sizes all get one name, the metadata of nodes, with source paths and stack traces, makes small
files three times bigger, and its errors hide their cause.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch
from torch import fx
from torch.export import ExportedProgram

from kd_export._backends.onnx_operators import OPERATORS
from kd_export._console import muted
from kd_export._errors import NotExportable, line_of, place_of
from kd_export._schema.onnx_file import LARGE, PRODUCER
from kd_export._schema.schema import Entry, LinearSize, Schema
from kd_export._schema.wire import unused_name

_NOISY = ("torch.onnx", "onnx_ir", "onnxscript")


def translated(program: ExportedProgram, schema: Schema) -> ir.Model:
    """Translate a program; its inputs, outputs and axes are named as the schema says.

    Raises:
        NotExportable: ONNX has no words for a part of it.
    """
    _refuse_complex(schema)
    wanted = schema.versions.get("opset")
    try:
        with muted(*_NOISY), torch.no_grad():
            # Without names: older versions take a name that a weight has too for that weight.
            # As `partial`, which has no name: torch 2.10 would match the names of parameters.
            table: dict[Callable[..., object], Callable[..., object]] = {
                operator: partial(ours) for operator, ours in OPERATORS.items()
            }
            result = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                custom_translation_table=table,
                opset_version=None if wanted is None else int(wanted),
            )
    except Exception as error:
        raise _explained(error) from error
    assert result is not None
    known = result.model.opset_imports.get("")
    if wanted is not None and known != int(wanted):
        raise NotExportable(
            f"the program cannot be written with opset {wanted}: its operators need {known}.",
            expected=int(wanted),
            got=known,
            hint="Pass a newer `opset`, or leave it out.",
        )
    _tidy(result.model, schema)
    return result.model


def write_model(model: ir.Model, path: Path, data: Path) -> None:
    """Write a model, and its weights beside it if they are large: so no copy of them is made."""
    sizes = [
        value.const_value.nbytes
        for value in model.graph.initializers.values()
        if value.const_value is not None
    ]
    beside = data.name if max(sizes, default=0) >= LARGE else None
    with muted(*_NOISY):
        ir.save(model, path, external_data=beside, size_threshold_bytes=LARGE)


def _explained(error: BaseException) -> NotExportable:
    """Name the cause, the operator and the line of the user's module."""
    chain, nodes = [error], []
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for one in chain:
        for frame, _ in traceback.walk_tb(one.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, fx.Node) and node.op == "call_function":
                nodes.append(node)
    cause = re.sub(r"\x1b\[\d*m", "", str(chain[-1])).strip() or type(chain[-1]).__name__
    where, operator = "", type(error).__name__
    if nodes:
        operator = str(nodes[-1].target)
        line = line_of(nodes[-1].meta.get("stack_trace") or "")
        where = f" `{operator}`{place_of(nodes[-1])}{line}"
    return NotExportable(
        f"ONNX cannot express{where or ' the program'}: {cause.splitlines()[0].rstrip('.')}.",
        got=operator,
        hint="Save it as `.pt2`, or replace that operator in the module.",
    )


def _refuse_complex(schema: Schema) -> None:
    for entry in (*schema.inputs, *schema.outputs):
        if entry.dtype.startswith("complex"):
            raise NotExportable(
                f"`{entry.wire}` is {entry.dtype}, and ONNX files carry no complex numbers.",
                key=entry.key,
                got=entry.dtype,
                hint="Let the module take and give `torch.view_as_real(x)`, or save it as `.pt2`.",
            )


def _tidy(model: ir.Model, schema: Schema) -> None:
    """Drop what a file should not tell, give values and axes their names."""
    graph = model.graph
    _keep_initializers(graph)
    _name_border(graph.inputs, schema.inputs)
    _name_border(graph.outputs, schema.outputs)
    axes = _symbols(graph, schema)
    border = {*graph.inputs, *graph.outputs}
    used = {entry.name for entry in (*schema.inputs, *schema.outputs)}
    for node in graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in _values(graph):
        value.metadata_props.clear()
        if value.shape is not None:
            value.shape = _renamed_shape(value.shape, axes)
        if value not in border and value.name is not None:
            value.name = unused_name(value.name, used)
            used.add(value.name)
    graph.metadata_props.clear()
    model.metadata_props.clear()
    model.producer_name = PRODUCER


def _keep_initializers(graph: ir.Graph) -> None:
    """Register the constants that lost their place to another of the same name.

    onnxscript's fusion of `Min` and `Max` names their limits after the value that they limit: of
    two that limit one value, both nodes would read the limits of the second.
    """
    known = {*graph.inputs, *graph.initializers.values()}
    for value in [value for node in graph for value in node.inputs]:
        lost = value is not None and value.producer() is None and value.const_value is not None
        if value is not None and lost and value not in known:
            value.name = unused_name(value.name or "constant", [*graph.initializers])
            graph.register_initializer(value)
            known.add(value)


def _name_border(values: Sequence[ir.Value], entries: Sequence[Entry]) -> None:
    for value, entry in zip(values, entries, strict=True):
        value.name = entry.name


def _symbols(graph: ir.Graph, schema: Schema) -> dict[str, str]:
    """Map the sizes of the translated inputs, and their symbols (``s77``), to names of axes."""
    named = {
        str(size.value): name
        for value, entry in zip(graph.inputs, schema.inputs, strict=True)
        for size, name in zip(value.shape or (), entry.shape, strict=True)
        if isinstance(name, str) and not isinstance(size, int)
    }
    solved: dict[str, str] = {}
    for text, name in named.items():
        one, other = LinearSize.parse(text), LinearSize.parse(name)
        axis = one.solve(other) if one is not None and other is not None else None
        if one is not None and axis is not None:
            solved[one.axis] = str(axis)
    return solved | named


def _renamed_shape(shape: ir.Shape, axes: dict[str, str]) -> ir.Shape:
    """Return a shape whose sizes are named after axes; several values may share the old one."""
    # A size that torch does not know stays without a name: two of one name would be equal.
    return ir.Shape(
        size if isinstance(size, int) or size.value is None else _renamed(str(size.value), axes)
        for size in shape
    )


def _renamed(expression: str, axes: dict[str, str]) -> str:
    def name(word: re.Match[str]) -> str:
        found = axes.get(word[0], word[0])
        return found if found.isidentifier() else f"({found})"

    return axes.get(expression) or re.sub(r"[A-Za-z_]\w*", name, expression)


def _values(graph: ir.Graph) -> list[ir.Value]:
    """List all values of a graph: initialisers, inputs, results of nodes."""
    results = [value for node in graph for value in node.outputs]
    return [*graph.initializers.values(), *graph.inputs, *results]
