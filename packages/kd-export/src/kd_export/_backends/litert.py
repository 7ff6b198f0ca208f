"""``.tflite``: run by LiteRT on phones and small boards, with numpy.

The runtime resizes the inputs of a program without looking whether it serves the size, and then
gives wrong numbers. So a file has one signature for each size that its axes allow, all of which
share their weights, and no other size is run.

The schema is in a zip archive behind the model, as LiteRT packs what belongs to one; `unzip` shows
it. The runtime believes what a model says of its own memory, so a file is opened only where it is
trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import os
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from kd_export._backends.litert_precision import Sizes, signature_of
from kd_export._backends.onnx import ArrayRunner, refuse_nan
from kd_export._console import muted_tool
from kd_export._errors import ExportError, NotExportable, quoted, raised_as
from kd_export._running.loading import check_digest
from kd_export._running.session import Reducer, Runner, picked, require
from kd_export._schema.files import SCHEMA_FILE, check_schema_size, foreign, open_regular, open_zip
from kd_export._schema.schema import Entry, LinearSize, Schema, check_fit, known_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from torch.export import ExportedProgram

    Array = NDArray[np.generic]

MOST_SIZES = 64
"""How many signatures a file has at most."""

_EXTRA = "litert"
_IDENTIFIER, _IDENTIFIER_AT = b"TFL3", 4
_CHUNK = 1 << 20


def all_sizes(schema: Schema) -> list[dict[str, int]]:
    """List the sizes that the axes of a schema allow, all of which have a maximum."""
    ranges = [range(axis.min, (axis.max or 0) + 1) for axis in schema.axes.values()]
    return [dict(zip(schema.axes, sizes, strict=True)) for sizes in itertools.product(*ranges)]


def model_of(file: BinaryIO) -> bytes:
    """Read the model of a file, without the archive behind it."""
    end = _schema_entry(file).header_offset
    file.seek(0)
    return file.read(end)


def write_file(model: bytes, schema: Schema, path: Path) -> None:
    """Write a model and its schema, with its digest."""
    text = replace(schema, weights=hashlib.sha256(model).hexdigest()).to_json()
    path.write_bytes(model)
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(zipfile.ZipInfo(SCHEMA_FILE), text)


def _schema_entry(file: BinaryIO) -> zipfile.ZipInfo:
    """Find the one entry of the archive behind a model.

    Raises:
        ExportError: It is not a whole model of ours.
    """
    file.seek(_IDENTIFIER_AT)
    if file.read(len(_IDENTIFIER)) != _IDENTIFIER:
        raise ExportError("the file is not a LiteRT model.", hint="It may be damaged.")
    size = file.seek(0, os.SEEK_END)
    tail = min(size, 22)
    file.seek(size - tail)
    if file.read(4) != b"PK\5\6":
        raise foreign(".tflite")
    with open_zip(file) as archive:
        entries = archive.infolist()
    if [entry.filename for entry in entries] != [SCHEMA_FILE]:
        raise foreign(".tflite")
    check_schema_size(entries[0].file_size)
    return entries[0]


class LiteRtBackend:
    """Write and read ``.tflite`` files."""

    name = "LiteRT"
    suffixes = (".tflite",)
    executes = True

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def configured(self, threads: int | None, providers: Sequence[str] | None) -> LiteRtBackend:
        """Return the same with so many threads a call."""
        if providers is not None:
            raise ExportError(
                "`providers` cannot be combined with LiteRT: they are those of onnxruntime.",
                got=providers,
                hint="Leave it out: a file runs on the CPU.",
            )
        return LiteRtBackend(threads)

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema out of the archive behind the model."""
        entry = _schema_entry(file)
        with open_zip(file) as archive:
            return Schema.from_json(archive.read(entry).decode())

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Check that the sizes can be listed; name the outputs as they are in the file."""
        _converter()
        endless = [name for name, axis in schema.axes.items() if axis.max is None]
        count = math.prod((a.max or a.min) - a.min + 1 for a in schema.axes.values())
        if endless or count > MOST_SIZES:
            ranges = {name: (axis.min, axis.min + 7) for name, axis in schema.axes.items()}
            told = (
                f"{quoted(endless)} has no maximum"
                if endless
                else f"the ranges allow {count:,} of them"
            )
            raise NotExportable(
                f"LiteRT has a signature for each allowed size, and {told}.",
                expected=f"at most {MOST_SIZES} sizes",
                got={name: str(axis) for name, axis in schema.axes.items()},
                hint=f"Pass ranges to `export`, such as `dynamic={ranges}`.",
            )
        names = ("litert-torch", "ai-edge-litert")
        return replace(schema, versions={**schema.versions, **{n: version(n) for n in names}})

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Convert the program at each of its sizes, and write the model with the schema."""
        converter: _Converter = _converter()
        hint = "Save it as `.pt2` or `.onnx`."
        with (
            raised_as(NotExportable, "LiteRT cannot express the program", hint),
            muted_tool(),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            for sizes in all_sizes(schema):
                module, inputs = _at(program, schema, sizes)
                converter = converter.signature(signature_of(sizes), module, sample_kwargs=inputs)
            model = converter.convert(enable_x64=True).model_content()
        write_file(model, schema, path)

    def seal(self, source: Path, schema: Schema, target: Path) -> None:
        """Write a model with another schema, and its digest."""
        if zipfile.is_zipfile(source):
            with open_regular(source) as file:
                write_file(model_of(file), schema, target)
        else:
            write_file(source.read_bytes(), schema, target)

    def reducer(
        self, source: Path, precision: str, samples: Sequence[Mapping[str, object]]
    ) -> Reducer:
        """Return what writes a float file with fewer bits."""
        from kd_export._backends.litert_precision import LiteRtReducer

        with open_regular(source) as file:
            return LiteRtReducer(model_of(file), self.read_schema(file), precision, samples)

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> Runner:
        """Load the model, once its bytes are known to be those that were written."""
        model = model_of(file)
        check_digest(hashlib.sha256(model).hexdigest(), schema, path)
        with muted_tool():
            runtime = cast("_Runtime", require("ai_edge_litert.interpreter", _EXTRA))
        with raised_as(ExportError, "LiteRT cannot load the file", "The file may be damaged."):
            interpreter = runtime.Interpreter(model_content=model, num_threads=self._threads)
            found = interpreter.get_signature_list()
            sizes = all_sizes(schema)
            check_fit(sorted(map(signature_of, sizes)), sorted(found))
            runners = {
                tuple(one.values()): interpreter.get_signature_runner(signature_of(one))
                for one in sizes
            }
        for one in sizes:
            check_fit(_described(schema, one), _found(runners[tuple(one.values())]))
        return LiteRtRunner(interpreter, runners, schema)

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Return ``None``: the digest is checked before the model is loaded."""
        return None


backend = LiteRtBackend()


def _converter() -> _Converter:
    with muted_tool():
        return cast("_Converter", require("litert_torch", _EXTRA))


def _at(
    program: ExportedProgram, schema: Schema, sizes: Sizes
) -> tuple[nn.Module, dict[str, object]]:
    """Return a module that is the program at some sizes, and inputs of these."""
    import torch

    from kd_export._running.recurrent import layer_decompositions

    inputs: dict[str, object] = {
        entry.name: torch.zeros(
            [known_size(size, sizes) or 0 for size in entry.shape],
            dtype=getattr(torch, entry.dtype),
        )
        for entry in schema.inputs
    }
    module = program.module()
    if layer_decompositions(program):  # loops over time, unless its length is known
        fixed = torch.export.export(module, (), inputs)
        with torch.no_grad():
            module = fixed.run_decompositions(layer_decompositions(fixed)).module()
    return module, inputs


def _described(schema: Schema, sizes: Sizes) -> tuple[object, ...]:
    """Return dtype and sizes of inputs and outputs, as the schema tells them."""
    return tuple(
        {
            name: (entry.dtype, *(known_size(size, sizes) for size in entry.shape))
            for entry, name in entries
        }
        for entries in (
            [(entry, entry.name) for entry in schema.inputs],
            [(entry, entry.wire) for entry in schema.outputs],
        )
    )


def _found(runner: _SignatureRunner) -> tuple[object, ...]:
    import numpy as np

    return tuple(
        {
            name: (
                np.dtype(cast("type", one["dtype"])).name,
                *map(int, cast("Array", one["shape"])),
            )
            for name, one in details.items()
        }
        for details in (runner.get_input_details(), runner.get_output_details())
    )


class LiteRtRunner(ArrayRunner):
    """Run a model by the signature of the sizes that it is given, on numpy arrays.

    LiteRT makes numbers of NaN, such as -1 by an ELU, so NaN is refused.
    """

    def __init__(
        self,
        interpreter: object,
        runners: Mapping[tuple[int, ...], _SignatureRunner],
        schema: Schema,
    ) -> None:
        self._interpreter = interpreter  # the runners borrow its memory
        self._runners = runners
        self._schema = schema
        self._inputs = [entry.name for entry in schema.inputs]
        places = {
            linear.axis: (place, dim, linear)
            for place, entry in enumerate(schema.inputs)
            for dim, size in enumerate(entry.shape)
            if isinstance(size, str) and (linear := LinearSize.parse(size)) is not None
        }
        self._places = [places[axis] for axis in schema.axes]
        self._one_at_a_time = threading.Lock()  # calls share the interpreter's buffers

    def adapt(self, value: object, entry: Entry) -> object:
        """Check the dtype of an array or tensor, and that it holds no NaN."""
        array = super().adapt(value, entry)
        refuse_nan(array, entry, "LiteRT")
        return array

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on arrays in order; ``names`` picks among the outputs."""
        sizes = tuple(
            linear.axis_at(cast("Array", arrays[place]).shape[dim])
            for place, dim, linear in self._places
        )
        run = self._runners.get(cast("tuple[int, ...]", sizes))
        if run is None:
            raise ExportError(
                f"the file has no signature for the sizes {sizes}.",
                expected=tuple(self._runners),
                got=sizes,
                hint="Export it with ranges that hold them.",
            )
        with self._one_at_a_time:
            results = run(**dict(zip(self._inputs, arrays, strict=True)))
        found = [results[entry.wire] for entry in self._schema.outputs]
        return picked(self._schema, found, names)


class _SignatureRunner(Protocol):
    def __call__(self, **inputs: object) -> Mapping[str, object]: ...
    def get_input_details(self) -> Mapping[str, Mapping[str, object]]: ...
    def get_output_details(self) -> Mapping[str, Mapping[str, object]]: ...


class _Interpreter(Protocol):
    def get_signature_list(self) -> Mapping[str, object]: ...
    def get_signature_runner(self, name: str) -> _SignatureRunner: ...


class _Runtime(Protocol):
    Interpreter: Callable[..., _Interpreter]


class _Model(Protocol):
    def model_content(self) -> bytes: ...


class _Converter(Protocol):
    def signature(
        self, name: str, module: nn.Module, *, sample_kwargs: dict[str, object]
    ) -> _Converter: ...
    def convert(self, *, enable_x64: bool) -> _Model: ...
