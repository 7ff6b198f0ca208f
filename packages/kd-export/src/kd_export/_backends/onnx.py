"""``.onnx``: run by onnxruntime with numpy, where there is neither torch nor kd_core.

Writing needs torch and onnxscript, and imports them when called. What torch's exporter leaves to
mend: a name that is both an input and an output makes an invalid file, so an output updated in
place gets another name inside the file; the name of an inner value may be that of an input; and
the metadata of nodes, with source paths and stack traces, makes small files three times bigger.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from kd_export._errors import DtypeMismatch, ExportError, NotExportable
from kd_export._running.backend import Direct, Runner, require
from kd_export._schema.onnx_file import (
    add_schema,
    check_self_contained,
    read_onnx_schema,
    weights_digest,
)
from kd_export._schema.schema import Entry, Number, Schema, check_fit
from kd_export._schema.vectors import Drawn
from kd_export._schema.wire import unused_name

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.export import ExportedProgram

    Array = NDArray[np.generic]

_EXTRA = "onnx"


class OnnxBackend:
    """Write and read ``.onnx`` files."""

    name = "ONNX"
    suffixes = (".onnx",)
    executes = False

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema out of the model's metadata."""
        return Schema.from_json(read_onnx_schema(file))

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Name the tensors by wire name; an output that is named as an input gets a number."""
        return replace(
            _named(schema),
            versions={**schema.versions, "onnxscript": _version("onnxscript")},
        )

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Translate the program, name its tensors and axes, and write it with the schema."""
        require("onnx", _EXTRA)
        require("onnxscript", _EXTRA)
        import torch

        _refuse_complex(schema)
        try:
            with _quiet():
                # Without names: older versions take a name that a weight has too for that weight.
                translated = torch.onnx.export(program, dynamo=True, verbose=False)
        except Exception as error:
            first = str(error).strip().splitlines()[0]
            raise NotExportable(
                f"the program cannot be translated to ONNX: {first}",
                got=type(error).__name__,
                hint="Save it as `.pt2`, or replace the operator that the error above names.",
            ) from error
        assert translated is not None
        _tidy(translated.model, schema)
        with _quiet():
            translated.save(str(path), external_data=False)
        model = path.read_bytes()
        schema = replace(schema, weights=weights_digest(model))
        path.write_bytes(add_schema(model, schema.to_json()))

    def load(self, file: BinaryIO, schema: Schema) -> OnnxRunner:
        """Start an onnxruntime session on the file's bytes."""
        runtime = cast("_Runtime", require("onnxruntime", _EXTRA))
        data = file.read()
        check_self_contained(data)
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.load_model_format", "ONNX")
        try:
            session = runtime.InferenceSession(
                data,
                options,
                providers=runtime.get_available_providers(),
                enable_fallback=0,  # a second try with fewer providers prints the first error
            )
        except Exception as error:
            raise ExportError(
                f"onnxruntime cannot load the file: {error}", got=type(error).__name__
            ) from error
        parts = ((schema.inputs, session.get_inputs()), (schema.outputs, session.get_outputs()))
        named = _named(schema)
        check_fit(
            tuple(tuple(map(_described, entries)) for entries in (named.inputs, named.outputs)),
            tuple(tuple(map(_found, found, entries)) for entries, found in parts),
        )
        return OnnxRunner(session, named)

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Compute the digest of all that the file holds but the schema."""
        return weights_digest(file.read())


backend = OnnxBackend()


class OnnxRunner:
    """Run a model by onnxruntime, on numpy arrays."""

    direct: Direct | None = None

    def __init__(self, session: _Session, schema: Schema) -> None:
        self._session = session
        self._inputs = [entry.name for entry in schema.inputs]
        self._outputs = [entry.name for entry in schema.outputs]

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on arrays in order; ``names`` limits what is computed."""
        wanted = self._outputs if names is None else list(names)
        return self._session.run(wanted, dict(zip(self._inputs, arrays, strict=True)))

    def adapt(self, value: object, entry: Entry) -> object:
        """Check the dtype of an array or tensor; make it a contiguous numpy array."""
        import numpy as np

        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            value = _numpy_of(value, entry)
        if not isinstance(value, np.ndarray | np.generic):
            raise DtypeMismatch(
                f"expected an array {entry.describe()} for `{entry.wire}`, got a "
                f"{type(value).__name__}.",
                key=entry.key,
                expected=entry.dtype,
                got=type(value).__name__,
                hint="Convert it with `numpy.asarray`.",
            )
        if value.dtype.name != entry.dtype:
            raise DtypeMismatch(
                f"expected {entry.describe()} for `{entry.wire}`, got dtype {value.dtype.name}.",
                key=entry.key,
                expected=entry.dtype,
                got=value.dtype.name,
                hint=f"Convert it with `.astype('{entry.dtype}')`.",
            )
        return np.ascontiguousarray(value).reshape(value.shape)

    def restore(self, array: object, like: object) -> object:
        """Return a tensor for a tensor, an array for an array."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(like, torch.Tensor):
            return torch.from_numpy(array)
        return array

    def build(self, drawn: Drawn) -> object:
        """Build an array of drawn numbers."""
        import numpy as np

        return np.array(drawn.numbers, dtype=drawn.dtype).reshape(drawn.shape)

    def numbers(self, array: object, positions: Sequence[int]) -> list[Number]:
        """Read numbers out of an array."""
        flat = cast("Array", array).reshape(-1)
        return [cast("Number", flat[position].item()) for position in positions]


def _numpy_of(value: Tensor, entry: Entry) -> object:
    """Return the numbers of a tensor as an array; refuse one that has none, or not as numpy's."""
    try:
        return value.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        raise DtypeMismatch(
            f"expected {entry.describe()} for `{entry.wire}`, got no numpy array: {error}.",
            key=entry.key,
            expected=entry.dtype,
            got=f"{value.dtype} {value.layout} on {value.device}",
            hint=f"Give a dense tensor with data, or an array of dtype {entry.dtype}.",
        ) from error


class _Named(Protocol):
    name: str
    type: str
    shape: list[object]


class _Session(Protocol):
    def run(self, names: list[str], inputs: dict[str, object]) -> list[object]: ...
    def get_inputs(self) -> list[_Named]: ...
    def get_outputs(self) -> list[_Named]: ...


class _Options(Protocol):
    log_severity_level: int

    def add_session_config_entry(self, key: str, value: str) -> None: ...


class _Runtime(Protocol):
    def SessionOptions(self) -> _Options: ...  # noqa: N802  # onnxruntime's name
    def InferenceSession(  # noqa: N802  # onnxruntime's name
        self, data: bytes, options: _Options, *, providers: list[str], enable_fallback: int
    ) -> _Session: ...
    def get_available_providers(self) -> list[str]: ...


def _named(schema: Schema) -> Schema:
    """Return the schema with the names that the tensors have in the file."""
    names: list[str] = []
    for entry in (*schema.inputs, *schema.outputs):
        names.append(unused_name(entry.wire, names))
    entries = [
        replace(entry, name=name)
        for entry, name in zip((*schema.inputs, *schema.outputs), names, strict=True)
    ]
    count = len(schema.inputs)
    return replace(schema, inputs=tuple(entries[:count]), outputs=tuple(entries[count:]))


_TYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}
"""What onnxruntime calls otherwise than torch."""


def _described(entry: Entry) -> tuple[object, ...]:
    """Return name, dtype and dimensions of an input or output, as the schema tells them."""
    return entry.name, entry.dtype, *(s if isinstance(s, int) else None for s in entry.shape)


def _found(value: _Named, entry: Entry) -> tuple[object, ...]:
    """Return the same as the model has it; onnxruntime may not know a size that is fixed."""
    dtype = _TYPES.get(value.type, value.type.removeprefix("tensor(").removesuffix(")"))
    known = _described(entry)[2:]
    if len(value.shape) != len(known):
        return value.name, dtype, *value.shape
    sizes = (
        known_size if not isinstance(size, int) and known_size is not None else size
        for size, known_size in zip(value.shape, known, strict=True)
    )
    return value.name, dtype, *(size if isinstance(size, int) else None for size in sizes)


def _version(package: str) -> str:
    return str(getattr(require(package, _EXTRA), "__version__", "unknown"))


def _refuse_complex(schema: Schema) -> None:
    for entry in (*schema.inputs, *schema.outputs):
        if entry.dtype.startswith("complex"):
            raise NotExportable(
                f"`{entry.wire}` is {entry.dtype}, and ONNX files carry no complex numbers.",
                key=entry.key,
                got=entry.dtype,
                hint="Let the module take and give `torch.view_as_real(x)`, or save it as `.pt2`.",
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress lines of the exporter and the warnings of its parts."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _tidy(model: ir.Model, schema: Schema) -> None:
    """Drop what a file should not tell, give values and axes their names."""
    graph = model.graph
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
            _rename_axes(value.shape, axes)
        if value not in border and value.name is not None:
            value.name = unused_name(value.name, used)
            used.add(value.name)
    graph.metadata_props.clear()
    model.metadata_props.clear()


def _name_border(values: Sequence[ir.Value], entries: Sequence[Entry]) -> None:
    for value, entry in zip(values, entries, strict=True):
        value.name = entry.name


def _symbols(graph: ir.Graph, schema: Schema) -> dict[str, str]:
    """Map the symbols of the translated inputs (``s77``) to axis names."""
    return {
        str(size.value): name
        for value, entry in zip(graph.inputs, schema.inputs, strict=True)
        for size, name in zip(value.shape or (), entry.shape, strict=True)
        if isinstance(name, str) and not isinstance(size, int)
    }


def _rename_axes(shape: ir.Shape, axes: dict[str, str]) -> None:
    for dim, size in enumerate(shape):
        if not isinstance(size, int):
            shape[dim] = _renamed(str(size.value), axes)


def _renamed(expression: str, axes: dict[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda word: axes.get(word[0], word[0]), expression)


def _values(graph: ir.Graph) -> list[ir.Value]:
    """List all values of a graph: initialisers, inputs, results of nodes."""
    results = [value for node in graph for value in node.outputs]
    return [*graph.initializers.values(), *graph.inputs, *results]
