"""``.xml``: OpenVINO's own format, with its weights in a ``.bin`` file beside it.

The program goes through our ONNX file, which keeps its names; OpenVINO's own importer of exported
programs loses them. The schema is in the model's runtime information, and is read without
openvino.

openvino finds out by the content what kind of model it is given, so that a file of another format
under this name would be read by that format's rules, which name other files. It also multiplies
the sizes of a tensor without looking for an overflow. So a file is compared with what openvino
writes before openvino sees it.
"""

from __future__ import annotations

import hashlib
import html
import math
import re
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO
from xml.parsers import expat

from kd_export._backends.onnx import ArrayRunner, check_names, refuse_nan, refuse_providers
from kd_export._backends.onnx import backend as onnx
from kd_export._console import muted
from kd_export._errors import ExportError, NotExportable, UntrustedArtifact, brief, raised_as
from kd_export._running.session import WEIGHTS, Reducer, Runner, picked, require
from kd_export._schema.files import (
    check_extent,
    check_schema_size,
    foreign,
    mapped,
    open_regular,
)
from kd_export._schema.schema import Entry, Schema, check_fit, completed, described

if TYPE_CHECKING:
    import openvino
    from torch.export import ExportedProgram

    from kd_export._backends.onnx import Array

LARGEST_MODEL = 1 << 28
"""Bytes that the XML may have; weights are in another file."""

_START = re.compile(rb'<\?xml version="1\.0"\?>\s{1,2}<net ')
_SCHEMA = re.compile(rb'<kd_export value="([^"<>]*)"\s*/>')
_NUMBER = re.compile(r"\d{1,19}")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DEEPEST = 200
# Bits of one number, by the type of the elements.
_BITS = {
    **dict.fromkeys(("i4", "u4", "nf4", "f4e2m1"), 4),
    **dict.fromkeys(("boolean", "i8", "u8", "f8e4m3", "f8e5m2", "f8e8m0"), 8),
    **dict.fromkeys(("i16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("i32", "u32", "f32"), 32),
    **dict.fromkeys(("i64", "u64", "f64"), 64),
}


def read_model(file: BinaryIO) -> bytes:
    """Read the XML, if it begins as openvino begins it and declares no entities.

    Raises:
        ExportError: It is another kind of file, or too large.
    """
    file.seek(0)
    content = file.read(LARGEST_MODEL + 1)
    if len(content) > LARGEST_MODEL or b"<!" in content or not _START.match(content):
        raise ExportError(
            "the file is not an OpenVINO model, or too large for one.",
            hint="It may be damaged, or another kind of XML.",
        )
    return content


def read_openvino_schema(content: bytes) -> str:
    """Read the schema text out of the runtime information."""
    element = _SCHEMA.search(content)
    if element is None:
        raise foreign(".xml")
    check_schema_size(len(element[1]))
    try:
        return html.unescape(element[1].decode())
    except UnicodeDecodeError as error:
        raise ExportError(f"the schema in the file is not text: {error}.") from error


def with_schema(content: bytes, text: str) -> bytes:
    """Replace the schema in the runtime information."""
    check_schema_size(len(text))
    value = html.escape(text).encode()
    changed, count = _SCHEMA.subn(lambda _: b'<kd_export value="' + value + b'" />', content)
    if count != 1:
        raise ExportError(
            f"expected one place for the schema in the XML, got {count}.",
            expected=1,
            got=count,
            hint="The file is damaged, or this version of OpenVINO writes another format.",
        )
    return changed


def weights_digest(content: bytes, weights: bytes) -> str:
    """Compute the SHA-256 of model and weights, without the schema."""
    digest = hashlib.sha256(_SCHEMA.sub(b"", content))
    digest.update(weights)
    return digest.hexdigest()


def check_constants(content: bytes, name: str, size: int) -> None:
    """Refuse a model whose tensors are not parts of the file beside it.

    Args:
        content: The XML.
        name: The file that holds the weights.
        size: How many bytes that file has.

    Raises:
        UntrustedArtifact: A tensor is not a part of the file, or not of its own length.
        ExportError: It is not whole XML.
    """
    depth = 0

    def start(tag: str, attributes: Mapping[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _DEEPEST:
            raise ExportError("the XML is nested too deeply.", hint="The file is forged.")
        if tag == "data" and ("offset" in attributes or "size" in attributes):
            _check_constant(attributes, name, size)

    def end(_: str) -> None:
        nonlocal depth
        depth -= 1

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise ExportError(
            f"the file is not whole XML: {error}.", hint="It may be truncated."
        ) from error


def _check_constant(attributes: Mapping[str, str], name: str, size: int) -> None:
    shape = attributes.get("shape", "?")
    sizes = shape.split(",") if shape else []
    numbers = [attributes.get("offset", ""), attributes.get("size", ""), *map(str.strip, sizes)]
    bits = _BITS.get(attributes.get("element_type", ""), 0)
    if not bits or len(sizes) > 64 or not all(map(_NUMBER.fullmatch, numbers)):
        raise UntrustedArtifact(
            f"the model has a tensor {brief(dict(attributes))}.",
            expected="an element type, a shape, an offset and a size",
            got=brief(dict(attributes)),
            hint="The file is forged or damaged, or kd-export did not write it.",
        )
    offset, stated, *dims = map(int, numbers)
    check_extent((math.prod(dims) * bits + 7) // 8, offset, stated, name, size)


_EXTRA = "openvino"
_DTYPES = {
    "boolean": "bool",
    **{
        f"{letter}{bits}": f"{word}{bits}"
        for letter, word in (("f", "float"), ("bf", "bfloat"), ("i", "int"), ("u", "uint"))
        for bits in (8, 16, 32, 64)
    },
}
"""What openvino calls otherwise than torch."""


class OpenVinoBackend:
    """Write and read ``.xml`` files."""

    name = "OpenVINO"
    suffixes = (".xml",)
    executes = False

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def configured(self, threads: int | None, providers: Sequence[str] | None) -> OpenVinoBackend:
        """Return the same with so many threads a call."""
        refuse_providers(providers, self.name)
        return OpenVinoBackend(threads)

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema out of the runtime information."""
        return Schema.from_json(read_openvino_schema(read_model(file)))

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Name the tensors as an ONNX file does."""
        runtime = require("openvino", _EXTRA)
        versions = {"openvino": runtime.get_version()}
        check_names(schema, _NOT_XML, "XML", "`.onnx` or `.pt2`")
        lowered = onnx.lower(program, schema)
        return replace(lowered, versions={**lowered.versions, **versions})

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Convert our ONNX file, and write it with the schema; weights keep their precision."""
        runtime = require("openvino", _EXTRA)
        require("onnx", "onnx")
        require("onnxscript", "onnx")
        from kd_export._backends.onnx_operators import translated, write_model

        with tempfile.TemporaryDirectory() as folder:
            source, data = Path(folder) / "model.onnx", Path(folder) / "model.onnx.data"
            write_model(translated(program, schema), source, data)
            hint = "Save it as `.onnx` or `.pt2`."
            with raised_as(NotExportable, "OpenVINO cannot convert the program", hint):
                model = runtime.convert_model(str(source), share_weights=False)
        _write(runtime, model, schema, path)

    def seal(self, source: Path, schema: Schema, target: Path) -> None:
        """Write a model with another schema, and its digest."""
        runtime = require("openvino", _EXTRA)
        with open_regular(source) as file:
            content, weights = read_model(file), _beside(source)
        check_constants(content, _weights_of(source).name, len(weights))
        with raised_as(ExportError, "OpenVINO cannot load the file", "The file may be damaged."):
            model = runtime.Core().read_model(content, weights)
        _write(runtime, model, schema, target)

    def reducer(
        self, source: Path, precision: str, samples: Sequence[Mapping[str, object]]
    ) -> Reducer:
        """Return what writes a float file with fewer bits."""
        return OpenVinoReducer(source, precision, samples)

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> OpenVinoRunner:
        """Compile the model for the CPU, in the precision of its dtypes."""
        runtime = require("openvino", _EXTRA)
        content, weights = read_model(file), _beside(path)
        check_constants(content, _weights_of(path).name, len(weights))
        core = runtime.Core()
        known = schema.versions.get("openvino", "unknown")
        hint = f"The file may be damaged, or made by another version of OpenVINO ({known})."
        with raised_as(ExportError, "OpenVINO cannot load the file", hint):
            model = core.read_model(content, weights)
            settings = {"INFERENCE_PRECISION_HINT": "f32"}
            if self._threads is not None:
                settings["INFERENCE_NUM_THREADS"] = str(self._threads)
            compiled = core.compile_model(model, "CPU", settings)
        parts = ((schema.inputs, compiled.inputs), (schema.outputs, compiled.outputs))
        check_fit(
            tuple((len(entries), *map(described, entries)) for entries, _ in parts),
            tuple((len(ports), *map(_found, ports, entries)) for entries, ports in parts),
        )
        return OpenVinoRunner(compiled, schema, weights_digest(content, weights))

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Return the digest of all that was loaded but the schema."""
        assert isinstance(runner, OpenVinoRunner)
        return runner.digest


backend = OpenVinoBackend()


def _write(runtime: ModuleType, model: openvino.Model, schema: Schema, path: Path) -> None:
    """Write a model with its schema; weights keep their precision."""
    # Only a mark: openvino escapes less than `with_schema`, whose text replaces it.
    model.set_rt_info("schema", ["kd_export"])
    runtime.save_model(model, str(path), compress_to_fp16=False)
    content = path.read_bytes()
    schema = replace(schema, weights=weights_digest(content, _beside(path)))
    path.write_bytes(with_schema(content, schema.to_json()))


class OpenVinoRunner(ArrayRunner):
    """Run a compiled model, on numpy arrays.

    OpenVINO makes numbers of NaN, such as 0 by a ReLU and a bound by a clip, so NaN is refused.
    """

    def __init__(self, compiled: openvino.CompiledModel, schema: Schema, digest: str) -> None:
        self.digest = digest
        self._request = compiled.create_infer_request()
        self._one_at_a_time = threading.Lock()
        self._inputs = [entry.name for entry in schema.inputs]
        self._schema = schema

    def adapt(self, value: object, entry: Entry) -> Array:
        """Check the dtype of an array or tensor, and that it holds no NaN."""
        array = super().adapt(value, entry)
        refuse_nan(array, entry, "OpenVINO")
        return array

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on arrays in order; ``names`` picks among the outputs."""
        with self._one_at_a_time:
            results = self._request.infer(dict(zip(self._inputs, arrays, strict=True)))
            found = [results[position].copy() for position in range(len(self._schema.outputs))]
        return picked(self._schema, found, names)


def _weights_of(path: Path) -> Path:
    return path.with_suffix(".bin")


def _beside(path: Path) -> bytes:
    """Read the file of weights; a model without weights may have none."""
    return bytes(mapped(_weights_of(path)))


def _found(port: openvino.ConstOutput, entry: Entry) -> tuple[object, ...]:
    """Return name, dtype and sizes of an input or output, which may have other names beside."""
    names = port.get_names()
    name = entry.name if entry.name in names else str(sorted(names))
    kind = port.get_element_type().get_type_name()
    sizes = [size.get_length() if size.is_static else None for size in port.get_partial_shape()]
    return completed(name, _DTYPES.get(kind, kind), sizes, entry)


# An OpenVINO model of fewer bits, by nncf.
#
# Knows models of OpenVINO and their layers; must not know keys, rows or budgets.
#
# In ``fp16`` the weights are stored in 16 bits and computed with in 32, as OpenVINO itself does.

_QUANTIZER = "nncf"
_DENSE = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData")
_ON_THE_WAY = ("Convert", "Transpose", "Reshape", "Multiply", "Subtract")
"""Operators between a layer and the constant that holds its weights."""
_ALL = "weights"
"""The one layer of a model whose weights are all stored alike."""


class OpenVinoReducer:
    """A float model whose layers can be written with fewer bits.

    Args:
        source: The file.
        precision: ``"fp16"``, ``"int8"`` or ``"int8-weights"``.
        samples: Inputs to calibrate with, by name; ``int8`` needs some.
    """

    def __init__(
        self, source: Path, precision: str, samples: Sequence[Mapping[str, object]]
    ) -> None:
        self._openvino = require("openvino", "openvino")
        self._tool = require("nncf", _QUANTIZER) if precision != "fp16" else None
        self._source = source
        self._precision = precision
        self._samples = samples
        self._nodes = dict(_weighted(self._read())) if precision != "fp16" else {}
        self.layers = tuple(dict.fromkeys(self._nodes.values())) or (
            (_ALL,) if precision == "fp16" else ()
        )

    def _read(self) -> openvino.Model:
        return self._openvino.Core().read_model(str(self._source))

    def write(self, target: Path, kept: Collection[str]) -> None:
        """Write the model; the layers of these names stay float."""
        model = self._read()
        hint = "Leave `precision` out, or take another one."
        with raised_as(NotExportable, f"nncf cannot write {self._precision}", hint), muted("nncf"):
            if self._tool is not None:
                names = [name for name, layer in self._nodes.items() if layer in kept]
                scope = self._tool.IgnoredScope(names=names, validate=False)
                if len(names) < len(self._nodes):
                    model = self._reduced(self._tool, model, scope)
        self._openvino.save_model(model, str(target), compress_to_fp16=self._tool is None)

    def _reduced(self, nncf: ModuleType, model: openvino.Model, scope: object) -> openvino.Model:
        if self._precision == WEIGHTS:
            mode = nncf.CompressWeightsMode.INT8_SYM
            return nncf.compress_weights(model, mode=mode, ignored_scope=scope)
        # Processors without VNNI add products in 16 bits: half of the range is left to them.
        fix = nncf.quantization.advanced_parameters.OverflowFix.ENABLE
        return nncf.quantize(
            model,
            nncf.Dataset(list(self._samples)),
            subset_size=max(len(self._samples), 1),
            ignored_scope=scope,
            advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
        )


def _weighted(model: openvino.Model) -> Iterator[tuple[str, str]]:
    """Iterate over the layers with weights: the name of the operator, and of the layer."""
    for node in model.get_ordered_ops():
        if node.get_type_name() not in _DENSE:
            continue
        weights = node.input_value(1).get_node()
        while weights.get_type_name() in _ON_THE_WAY:
            weights = weights.input_value(0).get_node()
        if weights.get_type_name() == "Constant":
            name = node.get_friendly_name()
            yield name, name.partition("/")[0]
