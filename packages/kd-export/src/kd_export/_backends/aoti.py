"""``.aoti.pt2``: machine code made by AOTInductor, with the schema as an extra file.

Such a file runs in Python and, without it, in C++. Its code checks nothing: inputs in another
order, of another dtype or size, or strided give wrong numbers without a word. So it is called
through the checks of a session alone. Writing needs a C++ compiler.

torch would also load exported programs and weights from such an archive, and unpack files wherever
their names lead; so one that holds more than compiled code is refused before torch opens it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kd_export._console import muted
from kd_export._errors import BackendMissing, ExportError, NotExportable, raised_as
from kd_export._running.loading import check_digest
from kd_export._running.session import COMPILERS, Runner, picked
from kd_export._schema.files import (
    FORMAT_FILES,
    SCHEMA_FILE,
    copy_member,
    foreign,
    members,
    open_zip,
    read_zip_schema,
)
from kd_export._schema.schema import Schema

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_CHUNK = 1 << 20
_FOLDER = "model"
_KNOWN = re.compile(rf"data/aotinductor/model/[\w.-]+|{FORMAT_FILES}")


class AotiBackend:
    """Write and read ``.aoti.pt2`` files."""

    name = "AOTInductor"
    suffixes = (".aoti.pt2",)
    executes = True

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema as a file of the zip archive."""
        text = read_zip_schema(file)
        if text is None:
            raise foreign(".aoti.pt2")
        return Schema.from_json(text)

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Check that there is a compiler."""
        if not any(map(shutil.which, COMPILERS)):
            raise BackendMissing(
                "AOTInductor needs a C++ compiler, which was not found.",
                expected=COMPILERS,
                hint="Install `g++`, or save it as `.pt2`.",
            )
        return schema

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Compile the program, and add the schema to the archive."""
        import torch
        from torch._inductor import aoti_compile_and_package

        from kd_export._running.recurrent import taken_apart
        from kd_export._torch_private import without_line_tables

        # The archive must not have the second suffix: torch compares the first.
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "model.pt2"
            hint = "Save it as `.pt2`. The error above this one has the compiler's words."
            with (
                raised_as(NotExportable, "AOTInductor cannot compile the program", hint),
                torch.no_grad(),
                muted(),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                aoti_compile_and_package(
                    taken_apart(program),
                    package_path=str(package),
                    inductor_configs=without_line_tables(),
                )
            copy_without_sources(package, path)
        with path.open("rb") as file:
            schema = replace(schema, weights=_digest(file))
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(f"{_FOLDER}/extra/{SCHEMA_FILE}", schema.to_json())

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> Runner:
        """Load the machine code from a private copy, once it is checked."""
        from torch._inductor import aoti_load_package

        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "model.pt2"
            with package.open("wb") as copy:
                shutil.copyfileobj(file, copy, _CHUNK)
            with package.open("rb") as copy:
                check_digest(_digest(copy), schema, path)
            hint = (
                "It runs on the kind of machine, and with the torch "
                f"({schema.versions.get('torch', 'unknown')}), that it was made with."
            )
            with raised_as(ExportError, "torch cannot load the compiled program", hint):
                model = aoti_load_package(str(package))
        return _runner(model, schema)

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Return ``None``: the digest is checked before the code is loaded."""
        return None


backend = AotiBackend()


def _runner(model: Callable[..., object], schema: Schema) -> Runner:
    """Build the runner; its class needs torch, which reading a schema does not."""
    from kd_export._running.torch_runner import TensorRunner

    class AotiRunner(TensorRunner):
        """Call compiled code with the tensors in the order of the program."""

        def __call__(
            self, arrays: Sequence[object], names: Sequence[str] | None = None
        ) -> Sequence[object]:
            inputs = {e.name: array for e, array in zip(schema.inputs, arrays, strict=True)}
            results = model(**inputs)
            assert isinstance(results, dict)
            return picked(schema, [results[entry.wire] for entry in schema.outputs], names)

    return AotiRunner()


def copy_without_sources(package: Path, path: Path) -> None:
    """Copy an archive but for what the C++ sources hold: paths of this machine, and nothing to run.

    They keep their names, by which torch 2.10 finds the files beside them.
    """
    with package.open("rb") as file, open_zip(file) as source, zipfile.ZipFile(path, "w") as target:
        for name, info in members(source, _KNOWN).items():
            if name.endswith(".cpp"):
                target.writestr(f"{_FOLDER}/{name}", b"")
            else:
                copy_member(source, info, target, f"{_FOLDER}/{name}")


def _digest(file: BinaryIO) -> str:
    """Compute the SHA-256 of names and contents of all files in the archive but the schema.

    Raises:
        UntrustedArtifact: It holds what is not part of a compiled program.
    """
    digest = hashlib.sha256()
    with open_zip(file) as archive:
        for part in _parts(archive):
            digest.update(part)
    return digest.hexdigest()


def _parts(archive: zipfile.ZipFile) -> Iterator[bytes]:
    """Iterate over what the digest is of, in parts of bounded size."""
    for name, info in members(archive, _KNOWN).items():
        if name == f"extra/{SCHEMA_FILE}":
            continue
        yield f"{info.filename} {info.file_size}\n".encode()
        with archive.open(info) as content:
            while part := content.read(_CHUNK):
                yield part
