"""From a keyed module and an example to a program.

The module is copied first, so that eval mode, the mode of its probabilistic parts and whatever
tracing does to a module never reach the user's own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from kd_core import KdError, TensorDictBase
from kd_export._capture.dynamic_shapes import Dynamic, DynamicShapes, Name, resolve, widen
from kd_export._capture.example import bounds, prepare, read_example
from kd_export._capture.fixups import mend
from kd_export._capture.reference import Reference, frozen_modes
from kd_export._capture.signature import Example, FlatModule, Word
from kd_export._errors import (
    ExportError,
    Key,
    NotExportable,
    Specialized,
)
from kd_export._running.torch_runner import digest_of, held_by
from kd_export._schema.schema import Entry, Schema, check_json
from kd_export._schema.wire import wire_name

_PREFIX = "module."
_NOISY = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor", "torch._dynamo")


def capture(
    module: nn.Module,
    example: Example[Word],
    *,
    inputs: Sequence[object] | None,
    outputs: Sequence[object] | None,
    dynamic: Dynamic[Name],
    mode: str | None,
    strict: bool,
    metadata: Mapping[str, object] | None,
) -> tuple[Schema, ExportedProgram, tuple[str, ...], Reference, tuple[Tensor, ...]]:
    """Return what a `KeyedProgram` is made of."""
    stored = check_json(dict(metadata or {}))
    assert isinstance(stored, dict)
    frozen, in_keys, out_keys = prepare(module, inputs, outputs)
    tensors = read_example(example, in_keys)
    # Without a container nobody said that results have a batch size too: then there is none.
    batch_dims = len(example.batch_size) if isinstance(example, TensorDictBase) else 0
    shapes = resolve(dynamic, tensors, batch_dims)
    given = tensors
    tensors = widen(tensors, shapes, {size for w in frozen.parameters() for size in w.shape})
    flat = FlatModule(frozen, in_keys, out_keys, batch_dims=batch_dims)
    with frozen_modes(frozen, mode):
        program = _trace(flat, tensors, shapes, strict)
    wires = tuple(map(wire_name, out_keys))
    diagnostics = mend(program, wires, mode)
    names = _axis_names(program, flat, shapes)
    schema = Schema(
        inputs=tuple(_input(flat, key, tensors[key], shapes) for key in in_keys),
        outputs=tuple(_outputs(program, out_keys, names)),
        axes=shapes.axes,
        batch_dims=batch_dims,
        mode=mode,
        metadata=stored,
        versions={"kd-export": version("kd-export"), "torch": torch.__version__},
        weights=digest_of(held_by(program)),
    )
    sample = given if shapes.hold(given) else tensors
    return schema, program, tuple(diagnostics), Reference(flat, mode), tuple(sample.values())


def _trace(
    flat: FlatModule, tensors: Mapping[Key, Tensor], shapes: DynamicShapes, strict: bool
) -> ExportedProgram:
    """Run `torch.export.export`, and explain its errors in the words of keys."""
    arguments = flat.arguments
    kwargs = {arguments[key]: tensor for key, tensor in tensors.items()}
    dims = {arguments[key]: shapes.dims(key) or None for key in tensors}
    try:
        with warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            if strict:  # dynamo cannot follow what a module caches on its first call
                flat.run([tensor.clone() for tensor in tensors.values()])
            program = torch.export.export(
                flat, (), kwargs, dynamic_shapes=dims if shapes.axes else None, strict=strict
            )
    except (ExportError, KdError):
        raise
    except Exception as error:
        raise _explained(error, flat, shapes) from error
    _check_dynamic(program, flat, shapes)
    _own_names(program)
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing graphs and traces of an error that is explained anyway."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            yield
        sys.stderr.write(printed.getvalue())  # by the user's module, as all is well
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _own_names(program: ExportedProgram) -> None:
    """Rename weights to the names in the user's module, without the wrapper around it."""
    for spec in program.graph_signature.input_specs:
        if spec.target is not None:
            spec.target = spec.target.removeprefix(_PREFIX)
    for held in (program.state_dict, program.constants):
        for name in list(held):
            held[name.removeprefix(_PREFIX)] = held.pop(name)


def _explained(error: Exception, flat: FlatModule, shapes: DynamicShapes) -> ExportError:
    text = str(error)
    frozen = re.search(r"specialized it to be a constant \((\d+)\)", text)
    unequal = "Constraints violated" in text or frozen is not None
    if shapes.axes and unequal:
        return _specialized(text, flat, shapes, None if frozen is None else int(frozen[1]))
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    place = _place(text)
    if "data-dependent" in text.lower():
        return NotExportable(
            f"`{type(flat.module).__name__}` decides by the values of a tensor{place}, which a "
            "program of one graph cannot do.",
            got=first.strip(),
            hint="Compute both ways and choose with `torch.where`, or use `torch.cond`.",
        )
    return NotExportable(
        f"`{type(flat.module).__name__}` cannot be captured{place}: {first.strip().rstrip('.')}.",
        got=type(error).__name__,
        hint="The error above this one shows the place in the module.",
    )


def _place(text: str) -> str:
    """Return where in the user's code torch says that it happened: the innermost line it names."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\n\s+(\S.*)', text)
    if not found:
        return ""
    file, line, function, code = found[-1]
    return f" at `{code.strip()}` (`{function}`, {Path(file).name}:{line})"


def _specialized(
    text: str, flat: FlatModule, shapes: DynamicShapes, size: int | None
) -> Specialized:
    """Name the key, dimension and axis of a dimension that did not stay dynamic."""
    key, dim = next((k, d) for k, dims in shapes.names.items() for d in dims)
    for candidate in flat.inputs:
        found = re.search(
            rf"\b{re.escape(flat.arguments[candidate])}'?\]?\.(?:size\(\)|shape)\[(\d+)\]", text
        )
        if found is not None:
            key, dim = candidate, int(found[1])
            break
    axis = shapes.names.get(key, {}).get(dim, "")
    fixed = "only some of its sizes" if size is None else f"the size {size}"
    return Specialized(
        f"the module allows {fixed} of dimension {dim} of `{wire_name(key)}` (axis `{axis}`).",
        key=key,
        expected=str(shapes.axes.get(axis, "dynamic")),
        got=size,
        hint="Keep the module from turning it into a number (`int(x.shape[0])`, a fixed `view`), "
        "give the axis a range it can serve, or fix the shape with `dynamic=None`.",
    )


def _check_dynamic(program: ExportedProgram, flat: FlatModule, shapes: DynamicShapes) -> None:
    """Check that each dimension asked to be dynamic is."""
    for key, value in zip(flat.inputs, _input_values(program), strict=True):
        for dim in shapes.names.get(key, {}):
            if not isinstance(value.shape[dim], torch.SymInt):
                raise _specialized("", flat, shapes, int(value.shape[dim]))


def _input_values(program: ExportedProgram) -> list[Tensor]:
    users = set(program.graph_signature.user_inputs)
    return [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in users
    ]


def _axis_names(
    program: ExportedProgram, flat: FlatModule, shapes: DynamicShapes
) -> dict[str, str]:
    """Map torch's symbols (``s77``) to axis names."""
    return {
        str(value.shape[dim]): name
        for key, value in zip(flat.inputs, _input_values(program), strict=True)
        for dim, name in shapes.names.get(key, {}).items()
    }


def _input(flat: FlatModule, key: Key, tensor: Tensor, shapes: DynamicShapes) -> Entry:
    names = shapes.names.get(key, {})
    low, high = bounds(tensor)
    return Entry(
        key=key,
        name=flat.arguments[key],
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(names.get(dim, size) for dim, size in enumerate(tensor.shape)),
        low=low,
        high=high,
    )


def _outputs(
    program: ExportedProgram, keys: Sequence[Key], names: Mapping[str, str]
) -> Iterator[Entry]:
    nodes = {node.name: node for node in program.graph.nodes}
    for key, name in zip(keys, program.graph_signature.user_outputs, strict=True):
        value = nodes[str(name)].meta["val"]
        yield Entry(
            key=key,
            name=wire_name(key),
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(_size(size, names) for size in value.shape),
        )


def _size(size: int | torch.SymInt, names: Mapping[str, str]) -> int | str:
    if not isinstance(size, torch.SymInt):
        return size
    return re.sub(r"[A-Za-z_]\w*", lambda word: names.get(word[0], word[0]), str(size))
