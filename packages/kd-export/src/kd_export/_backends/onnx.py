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
from kd_export._running.backend import Direct, require
from kd_export._schema.archive import SCHEMA_PROPERTY, read_onnx_schema
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
        inputs = [entry.wire for entry in schema.inputs]
        names = list(inputs)
        outputs = []
        for entry in schema.outputs:
            names.append(unused_name(entry.wire, names))
            outputs.append(replace(entry, name=names[-1]))
        return replace(
            schema,
            inputs=tuple(replace(e, name=n) for e, n in zip(schema.inputs, inputs, strict=True)),
            outputs=tuple(outputs),
            versions={**schema.versions, "onnxscript": _version("onnxscript")},
        )

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Translate the program, name its tensors and axes, and write it with the schema."""
        require("onnx", _EXTRA)
        require("onnxscript", _EXTRA)
        import torch

        inputs = [entry.name for entry in schema.inputs]
        outputs = [entry.name for entry in schema.outputs]
        _refuse_complex(schema)
        try:
            with _quiet():
                translated = torch.onnx.export(
                    program, dynamo=True, input_names=inputs, output_names=outputs, verbose=False
                )
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

    def load(self, data: bytes, schema: Schema) -> OnnxRunner:
        """Start an onnxruntime session on the file's bytes."""
        runtime = cast("_Runtime", require("onnxruntime", _EXTRA))
        options = runtime.SessionOptions()
        options.log_severity_level = 3
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
        names = tuple(tuple(e.name for e in part) for part in (schema.inputs, schema.outputs))
        check_fit(names, tuple(tuple(e.name for e in part) for part in _borders(session)))
        return OnnxRunner(session, schema)


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
                f"`{entry.wire}` is a {type(value).__name__}; expected is an array "
                f"{entry.describe()}.",
                key=entry.key,
                expected=entry.dtype,
                got=type(value).__name__,
                hint="Convert it with `numpy.asarray`.",
            )
        if value.dtype.name != entry.dtype:
            raise DtypeMismatch(
                f"`{entry.wire}` has dtype {value.dtype.name}; expected is {entry.describe()}.",
                key=entry.key,
                expected=entry.dtype,
                got=value.dtype.name,
                hint=f"Convert it with `.astype('{entry.dtype}')`.",
            )
        return np.ascontiguousarray(value).reshape(value.shape)

    def restore(self, array: object, like: object) -> object:
        """Give a tensor for a tensor, an array for an array."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(like, torch.Tensor):
            return torch.from_numpy(array)
        return array

    def build(self, drawn: Drawn) -> object:
        """Make an array of drawn numbers."""
        import numpy as np

        return np.array(drawn.numbers, dtype=drawn.dtype).reshape(drawn.shape)

    def numbers(self, array: object, positions: Sequence[int]) -> list[Number]:
        """Read numbers out of an array."""
        flat = cast("Array", array).reshape(-1)
        return [cast("Number", flat[position].item()) for position in positions]


def _numpy_of(value: Tensor, entry: Entry) -> object:
    """The numbers of a tensor as an array; one that has none, or not as numpy's, is refused."""
    try:
        return value.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        raise DtypeMismatch(
            f"`{entry.wire}` cannot become a numpy array: {error}; expected is {entry.describe()}.",
            key=entry.key,
            expected=entry.dtype,
            got=f"{value.dtype} {value.layout} on {value.device}",
            hint=f"Give a dense tensor with data, or an array of dtype {entry.dtype}.",
        ) from error


class _Named(Protocol):
    name: str


class _Session(Protocol):
    def run(self, names: list[str], inputs: dict[str, object]) -> list[object]: ...
    def get_inputs(self) -> list[_Named]: ...
    def get_outputs(self) -> list[_Named]: ...


class _Options(Protocol):
    log_severity_level: int


class _Runtime(Protocol):
    def SessionOptions(self) -> _Options: ...  # noqa: N802  # onnxruntime's name
    def InferenceSession(  # noqa: N802
        self, data: bytes, options: _Options, *, providers: list[str], enable_fallback: int
    ) -> _Session: ...
    def get_available_providers(self) -> list[str]: ...


def _borders(session: _Session) -> tuple[list[_Named], list[_Named]]:
    return session.get_inputs(), session.get_outputs()


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
    """Let the exporter work without its progress lines and the warnings of its parts."""
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
    """Drop what a file should not tell, give values and axes their names, add the schema."""
    graph = model.graph
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
    model.metadata_props[SCHEMA_PROPERTY] = schema.to_json()


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
