"""``.c``: one C99 file and its header, for targets without a runtime: no heap, a fixed batch.

The program goes through our ONNX file, whose sizes are fixed and whose constants are folded; its
operators are written as loops (`c_operators`). Each axis has its least size, which is a batch of 1
if nothing else is said. To check a file it is compiled, warnings being errors, and called.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kd_export._backends.onnx import ArrayRunner
from kd_export._backends.onnx import backend as onnx_backend
from kd_export._errors import BackendMissing, ExportError, NotExportable, first_line, raised_as
from kd_export._running.session import C_COMPILERS, Runner, picked, require
from kd_export._schema.files import check_schema_size, foreign, identifier, unused_name
from kd_export._schema.schema import Entry, Schema, comment_lines, concrete

if TYPE_CHECKING:
    import onnx
    from torch.export import ExportedProgram

    from kd_export._backends.c_operators import Written

FLAGS = ("-std=c99", "-O2", "-Wall", "-Wextra", "-Werror")
"""What a file is compiled with: it is checked that there is nothing to warn of."""

_OWN_HEADER = "/* Written by kd-export. Do not edit."
_EXTRA = "onnx"
_SCHEMA = re.compile(rb"^/\* kd_export (\{.*\}) \*/\n?\Z", re.MULTILINE)
_RUN = re.compile(rb"^void (\w+)_run\(", re.MULTILINE)


class CBackend:
    """Write and read ``.c`` files."""

    name = "C"
    suffixes = (".c",)
    executes = True

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema from the comment at the end."""
        found = _SCHEMA.search(file.read())
        if found is None:
            raise foreign(".c")
        check_schema_size(len(found[1]))
        return Schema.from_json(found[1])

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Fix each axis at its least size, and name the arguments."""
        _compiler()
        lowered = onnx_backend.lower(program, schema)
        least = {name: axis.min for name, axis in schema.axes.items()}
        names: list[str] = []
        entries = []
        for word, part in (("in", lowered.inputs), ("out", lowered.outputs)):
            for entry in part:
                names.append(unused_name(f"{word}_{identifier(entry.wire)}", names))
                with raised_as(NotExportable, "C needs fixed shapes", "Save it as `.onnx`."):
                    shape = concrete(entry.shape, least)
                entries.append(replace(entry, name=names[-1], shape=shape))
        count = len(lowered.inputs)
        inputs = tuple(entries[:count])
        # The rows that a state starts with are alike.
        rows = {entry.wire: concrete(entry.shape[:1], {}) for entry in inputs}
        initial = {
            wire: numbers * (rows[wire][0] if isinstance(entry.shape[0], str) else 1)
            for wire, numbers in lowered.initial.items()
            if (entry := lowered.input(wire)).shape
        }
        return replace(
            lowered, inputs=inputs, outputs=tuple(entries[count:]), axes={}, initial=initial
        )

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Write the program in C, its header, and the schema in a comment."""
        prefix = identifier(path.stem)
        model = _folded(program, schema)
        from kd_export._backends.c_operators import written

        parts = written(model, prefix, [entry.name for entry in schema.inputs])
        text = _source(prefix, schema, parts)
        digest = hashlib.sha256(text.encode("ascii")).hexdigest()
        own = replace(schema, weights=digest).to_json()
        # A slash and a star may be escaped in JSON, so that no comment begins or ends in it.
        comment = own.replace("*/", "*\\/").replace("/*", "/\\u002a")
        path.write_text(f"{text}/* kd_export {comment} */\n", encoding="ascii")
        path.with_suffix(".h").write_text(_header(prefix, schema), encoding="utf-8")

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> CRunner:
        """Compile the file, and load what comes out."""
        content = file.read()
        found = _RUN.search(content)
        if found is None:
            raise ExportError(
                "the .c file has no function that ends in `_run`.",
                hint="It was changed after its export: export again.",
            )
        text = _SCHEMA.sub(b"", content)
        with tempfile.TemporaryDirectory() as folder:
            library = _compiled(content, Path(folder))
            function = getattr(library, f"{found[1].decode()}_run")
        return CRunner(function, schema, hashlib.sha256(text).hexdigest())

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Return the digest of all that was compiled but the schema."""
        assert isinstance(runner, CRunner)
        return runner.digest


backend = CBackend()


class CRunner(ArrayRunner):
    """Call a compiled function, on numpy arrays."""

    def __init__(self, function: Callable[..., object], schema: Schema, digest: str) -> None:
        self.digest = digest
        self._function = function
        self._schema = schema

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Call it on arrays in order; ``names`` picks among the outputs."""
        import numpy as np

        found = [np.empty(concrete(e.shape, {}), e.dtype) for e in self._schema.outputs]
        whole = [np.asarray(array) for array in (*arrays, *found)]
        self._function(*(ctypes.c_void_p(array.ctypes.data) for array in whole))
        return picked(self._schema, found, names)


def _compiler() -> str:
    found = next((path for path in map(shutil.which, C_COMPILERS) if path), None)
    if found is None:
        raise BackendMissing(
            "a `.c` file is compiled to be checked, and no C compiler was found.",
            expected=C_COMPILERS,
            hint="Install `gcc` or `clang`, or save it as `.onnx`.",
        )
    return found


def check_header(path: Path) -> None:
    """Refuse to replace the header that a ``.c`` file was written with.

    Raises:
        ExportError: There is one, or the path is that of one.
    """
    source = path.with_suffix(".c")
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(_OWN_HEADER)) == _OWN_HEADER.encode():
            raise ExportError(
                f"`{path}` is the header that `{source.name}` was saved with, which needs it.",
                got=str(path),
                hint="Include it in programs that call that file, and write this to another name.",
            )


def _compiled(content: bytes, folder: Path) -> ctypes.PyDLL:
    source, library = folder / "model.c", folder / "model.so"
    source.write_bytes(content)
    command = [_compiler(), *FLAGS, "-fPIC", "-shared", str(source), "-o", str(library), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["it fails"]
        raise ExportError(
            f"the .c file cannot be compiled: {lines[0].rpartition('error: ')[2]}.",
            got=done.stderr[-2000:],
            hint="It may be damaged, or the compiler may not know C99.",
        )
    # Its buffers are shared by all calls, so none may begin while one runs.
    return ctypes.PyDLL(str(library))


def _folded(program: ExportedProgram, schema: Schema) -> onnx.ModelProto:
    """Translate a program, fix its sizes, and fold what is constant then."""
    import onnx

    from kd_export._backends.onnx_operators import translated, write_model

    runtime = require("onnxruntime", _EXTRA)
    with tempfile.TemporaryDirectory() as folder:
        path, smaller = Path(folder) / "model.onnx", Path(folder) / "smaller.onnx"
        write_model(translated(program, schema), path, path.with_name("model.onnx.data"))
        model = onnx.load(str(path))
        del model.graph.value_info[:]
        for values, entries in (
            (model.graph.input, schema.inputs),
            (model.graph.output, schema.outputs),
        ):
            for value, entry in zip(values, entries, strict=True):
                dims = value.type.tensor_type.shape.dim
                for dim, size in zip(dims, concrete(entry.shape, {}), strict=True):
                    dim.dim_value = size
        onnx.save(model, str(path))
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(smaller)
        with raised_as(NotExportable, "onnxruntime cannot fold the program", "Save it as `.onnx`."):
            runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        found = onnx.load(str(smaller))
        try:
            return onnx.shape_inference.infer_shapes(found, strict_mode=True, data_prop=True)
        except Exception as error:
            raise NotExportable(
                f"C needs fixed shapes, and those of the program are not known: "
                f"{first_line(error)}.",
                hint="Save it as `.onnx`.",
            ) from error


def _parameters(schema: Schema) -> list[str]:
    from kd_export._backends.c_operators import TYPES

    ins = [f"const {TYPES[entry.dtype]} *{entry.name}" for entry in schema.inputs]
    return [*ins, *(f"{TYPES[entry.dtype]} *{entry.name}" for entry in schema.outputs)]


def _stepped(schema: Schema) -> list[str]:
    """Return the parameters of a step: all but the state."""
    states = {*schema.state, *schema.state.values()}
    entries = (*schema.inputs, *schema.outputs)
    pairs = zip(entries, _parameters(schema), strict=True)
    ins = len(schema.inputs)
    return [
        text
        for place, (entry, text) in enumerate(pairs)
        if entry.wire not in (schema.state if place < ins else states - schema.state.keys())
    ]


def _prototypes(prefix: str, schema: Schema) -> list[str]:
    from kd_export._backends.c_operators import TYPES

    lines = [f"void {prefix}_run({', '.join(_parameters(schema))});"]
    if schema.state:
        members = [
            f"  {TYPES[entry.dtype]} {entry.name}[{_count(entry)}];"
            for entry in schema.inputs
            if entry.wire in schema.state
        ]
        state = f"{prefix}_state"
        lines = [
            "typedef struct {",
            *members,
            f"}} {state};",
            "",
            *lines,
            f"void {prefix}_reset({state} *state);",
            f"void {prefix}_step({', '.join([f'{state} *state', *_stepped(schema)])});",
        ]
    return lines


def _count(entry: Entry) -> int:
    count = 1
    for size in concrete(entry.shape, {}):
        count *= size
    return count


def _header(prefix: str, schema: Schema) -> str:
    guard = f"{prefix.upper()}_H"
    told = []
    for entry in (*schema.inputs, *schema.outputs):
        first, *others = comment_lines(entry)
        told += [f" * {entry.name} is {first}, row by row", *(f" * {line}" for line in others)]
    return "\n".join(
        [
            _OWN_HEADER,
            *told,
            " * Buffers are static: call it from one thread at a time. */",
            f"#ifndef {guard}",
            f"#define {guard}",
            "",
            "#include <stdint.h>",
            "",
            "#ifdef __cplusplus",
            'extern "C" {',
            "#endif",
            "",
            *_prototypes(prefix, schema),
            "",
            "#ifdef __cplusplus",
            "}",
            "#endif",
            "",
            "#endif",
            "",
        ]
    )


def _source(prefix: str, schema: Schema, parts: Written) -> str:
    names = [entry.name for entry in schema.inputs]
    pairs = list(zip(schema.outputs, parts.outputs, strict=True))
    # What is only passed on is copied first: an output may take the place of an input.
    pairs.sort(key=lambda pair: pair[1].name not in names)
    copies = [
        f"  memcpy({entry.name}, {value.name}, sizeof({value.kind}) * {value.count});"
        for entry, value in pairs
    ]
    return "\n".join(
        [
            f"/* Written by kd-export. Do not edit. {parts.bytes:,} bytes of static buffers. */",
            "#include <math.h>",
            "#include <stdint.h>",
            "#include <string.h>",
            "",
            *_prototypes(prefix, schema),
            "",
            *parts.constants,
            *parts.buffers,
            "",
            f"void {prefix}_run({', '.join(_parameters(schema))}) {{",
            *(f"  (void){name};" for name in names),
            *parts.lines,
            *copies,
            "}",
            *_state_functions(prefix, schema),
            "",
        ]
    )


def _state_functions(prefix: str, schema: Schema) -> list[str]:
    from kd_export._backends.c_operators import literal

    if not schema.state:
        return []
    lines = ["", f"void {prefix}_reset({prefix}_state *state) {{"]
    for entry in schema.inputs:
        if entry.wire not in schema.state:
            continue
        numbers = schema.initial.get(entry.wire)
        if numbers is None:
            lines.append(f"  memset(state->{entry.name}, 0, sizeof(state->{entry.name}));")
            continue
        lines += [
            f"  state->{entry.name}[{place}] = {literal(number, entry.dtype)};"
            for place, number in enumerate(numbers)
        ]
    places = {schema.output(new).name: schema.input(old).name for old, new in schema.state.items()}
    given = [
        f"state->{entry.name}" if entry.wire in schema.state else entry.name
        for entry in schema.inputs
    ]
    given += [
        f"state->{places[entry.name]}" if entry.name in places else entry.name
        for entry in schema.outputs
    ]
    parameters = [f"{prefix}_state *state", *_stepped(schema)]
    return [
        *lines,
        "}",
        "",
        f"void {prefix}_step({', '.join(parameters)}) {{",
        f"  {prefix}_run({', '.join(given)});",
        "}",
    ]
