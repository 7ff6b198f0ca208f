"""``.xml``: OpenVINO's own format, with its weights in a ``.bin`` file beside it.

The program goes through our ONNX file, which keeps its names; OpenVINO's own importer of exported
programs loses them. The schema is in the model's runtime information, and is read without
openvino.
"""

from __future__ import annotations

import hashlib
import html
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast
from xml.sax.saxutils import quoteattr

from kd_export._backends.onnx import LARGEST_INSIDE, ArrayRunner
from kd_export._backends.onnx import backend as onnx
from kd_export._errors import ExportError, NotExportable
from kd_export._running.backend import Runner, require
from kd_export._schema.archive import LARGEST_SCHEMA, foreign
from kd_export._schema.files import read_regular
from kd_export._schema.schema import Entry, Schema, check_fit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.export import ExportedProgram

_EXTRA = "openvino"
_LARGEST_MODEL = 1 << 28
_SCHEMA = re.compile(rb'<kd_export value="([^"<>]*)"\s*/>')


class OpenVinoBackend:
    """Write and read ``.xml`` files."""

    name = "OpenVINO"
    suffixes = (".xml",)
    executes = False

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema out of the runtime information."""
        element = _SCHEMA.search(_read(file))
        if element is None:
            raise foreign(".xml")
        if len(element[0]) > LARGEST_SCHEMA:
            raise ExportError("the schema in the file is too large.", got=len(element[0]))
        return Schema.from_json(html.unescape(element[1].decode()))

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Name the tensors as an ONNX file does."""
        runtime = cast("_OpenVino", require("openvino", _EXTRA))
        versions = {"openvino": runtime.get_version()}
        lowered = onnx.lower(program, schema)
        return replace(lowered, versions={**lowered.versions, **versions})

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Convert our ONNX file, and write it with the schema; weights keep their precision."""
        runtime = cast("_OpenVino", require("openvino", _EXTRA))
        require("onnx", "onnx")
        require("onnxscript", "onnx")
        from kd_export._backends.onnx_translation import translated, write_model

        with tempfile.TemporaryDirectory() as folder:
            source, data = Path(folder) / "model.onnx", Path(folder) / "model.onnx.data"
            write_model(translated(program, schema), source, data, LARGEST_INSIDE)
            try:
                model = runtime.convert_model(str(source), share_weights=False)
            except Exception as error:
                raise NotExportable(
                    f"OpenVINO cannot convert the program: {_first(error)}",
                    got=type(error).__name__,
                    hint="Save it as `.onnx` or `.pt2`.",
                ) from error
        model.set_rt_info(schema.to_json(), ["kd_export"])
        runtime.save_model(model, str(path), compress_to_fp16=False)
        content = path.read_bytes()
        schema = replace(schema, weights=_digest(content, _beside(path)))
        text = quoteattr(schema.to_json(), {'"': "&quot;"}).encode()
        path.write_bytes(_SCHEMA.sub(lambda _: b"<kd_export value=" + text + b" />", content))

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> OpenVinoRunner:
        """Compile the model for the CPU, in the precision of its dtypes."""
        runtime = cast("_OpenVino", require("openvino", _EXTRA))
        content, weights = _read(file), _beside(path)
        core = runtime.Core()
        try:
            model = core.read_model(content, weights)
            compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        except Exception as error:
            raise ExportError(
                f"OpenVINO cannot load the file: {_first(error)}",
                got=type(error).__name__,
                hint=f"Is `{path.with_suffix('.bin').name}` beside it whole?",
            ) from error
        parts = ((schema.inputs, compiled.inputs), (schema.outputs, compiled.outputs))
        check_fit(
            tuple(tuple(entry.name for entry in entries) for entries, _ in parts),
            tuple(tuple(_name(port, entries) for port in ports) for entries, ports in parts),
        )
        return OpenVinoRunner(compiled, schema, _digest(content, weights))

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Return the digest of all that was loaded but the schema."""
        return cast("OpenVinoRunner", runner).digest


backend = OpenVinoBackend()


class OpenVinoRunner(ArrayRunner):
    """Run a compiled model, on numpy arrays."""

    def __init__(self, compiled: _Compiled, schema: Schema, digest: str) -> None:
        self.digest = digest
        self._request = compiled.create_infer_request()
        self._inputs = [entry.name for entry in schema.inputs]
        self._outputs = [entry.name for entry in schema.outputs]

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on arrays in order; ``names`` picks among the outputs."""
        results = self._request.infer(dict(zip(self._inputs, arrays, strict=True)))
        found = [results[position].copy() for position in range(len(self._outputs))]
        if names is None:
            return found
        by_name = dict(zip(self._outputs, found, strict=True))
        return [by_name[name] for name in names]


def _read(file: BinaryIO) -> bytes:
    file.seek(0)
    content = file.read(_LARGEST_MODEL + 1)
    if len(content) > _LARGEST_MODEL or b"<!" in content or b"<net" not in content[:1000]:
        raise ExportError(
            "the file is not an OpenVINO model, or too large for one.",
            hint="It may be damaged, or another kind of XML.",
        )
    return content


def _beside(path: Path) -> bytes:
    """Read the file of weights; a model without weights may have none."""
    weights = path.with_suffix(".bin")
    return read_regular(weights) if weights.exists() else b""


def _digest(content: bytes, weights: bytes) -> str:
    """Compute the SHA-256 of model and weights, without the schema."""
    digest = hashlib.sha256(_SCHEMA.sub(b"", content))
    digest.update(weights)
    return digest.hexdigest()


def _name(port: _Port, entries: Sequence[Entry]) -> str:
    """Return the name of an input or output in the schema; it may have others beside."""
    names = port.get_names()
    known = [entry.name for entry in entries if entry.name in names]
    return known[0] if known else str(sorted(names))


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _Port(Protocol):
    def get_names(self) -> set[str]: ...


class _Request(Protocol):
    def infer(self, inputs: dict[str, object]) -> Mapping[int, NDArray[np.generic]]: ...


class _Compiled(Protocol):
    inputs: list[_Port]
    outputs: list[_Port]

    def create_infer_request(self) -> _Request: ...


class _Model(Protocol):
    def set_rt_info(self, value: str, path: list[str]) -> None: ...


class _Core(Protocol):
    def read_model(self, model: bytes, weights: bytes) -> _Model: ...
    def compile_model(self, model: _Model, device: str, config: dict[str, str]) -> _Compiled: ...


class _OpenVino(Protocol):
    def get_version(self) -> str: ...
    def convert_model(self, path: str, *, share_weights: bool) -> _Model: ...
    def save_model(self, model: _Model, path: str, *, compress_to_fp16: bool) -> None: ...
    def Core(self) -> _Core: ...  # noqa: N802  # openvino's name
