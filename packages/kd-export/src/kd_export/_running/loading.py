"""From a file to a session: the one way in for `open`, `verify` and `save`.

The schema is read first, from the file itself, so that a file of another kind is refused before
it is read whole. Where a digest was given, it is computed over a private copy, and that is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from kd_export._console import stage
from kd_export._errors import ExportError, UntrustedArtifact, VerifyError, brief, printable
from kd_export._running.session import Backend, Configurable, Session, backend_for
from kd_export._schema.differences import (
    Differences,
    content_differences,
    interface_differences,
    property_differences,
)
from kd_export._schema.files import contents, open_regular
from kd_export._schema.onnx_file import companion, further_properties
from kd_export._schema.schema import Schema

Word = TypeVar("Word")


def open(  # noqa: A001  # `kd_export.open` reads as what it is
    path: str | Path,
    *,
    trusted: bool = False,
    sha256: str | None = None,
    threads: int | None = None,
    providers: Sequence[str] | None = None,
    robot: Mapping[Word, Sequence[str]] | None = None,
) -> Session:
    """Open an artefact of any format for running.

    A ``.pt2``, ``.aoti.pt2``, ``.pte`` or ``.c`` file is a program: opening it requires
    ``trusted=True`` or ``sha256=``. An ``.onnx`` or ``.xml`` file is data for its runtime, and
    requires neither. A ``.pt2`` or ``.onnx`` file that kd_export did not write is run by the names
    that are in it. A session can be pickled: the file is then opened again by its path, and starts
    without a state.

    Args:
        path: The file; its suffix names the format.
        trusted: Say that you trust who made the file. Forged files stay refused, as far as a
            check can tell: what an ``.aoti.pt2``, ``.pte`` or ``.c`` file computes is not checked.
        sha256: The digest of the file, in hexadecimal, checked over the bytes that are loaded.
        threads: How many threads one call of an ``.onnx`` or ``.xml`` file may use; by default
            as many as its runtime takes. One is often the quickest for a small policy.
        providers: The execution providers of onnxruntime that an ``.onnx`` file runs by, the first
            that can first, such as ``["CPUExecutionProvider"]``; by default all that there are.
        robot: What the robot calls the elements of inputs and outputs, in its own order, such as
            ``{"obs": ["hip", "knee"]}``: compared with the names in the file before it is loaded.

    Raises:
        KeyMismatch: The robot has other names, or another order; see `Schema.check_names`.
        UntrustedArtifact: Neither was given, the digest differs, or the file holds what
            kd_export never writes.
        BackendMissing: The format's packages are not installed.
        VerifyError: The weights or the graph in the file are not those that it was exported with.
        ExportError: The file is damaged, or has lost its schema.
        NotExportable: kd_export did not write the file, and it takes or gives other than tensors.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> report = kd_export.save(module, "policy.pt2", {"x": torch.zeros(1, 3)})
        >>> kd_export.open("policy.pt2", trusted=True).schema.output("y").describe()
        'float32 (batch, 2)'
    """
    path = Path(path)
    backend = _set_up(backend_for(path), threads, providers)
    with (
        open_regular(path) as file,
        _trusted(file, path, executes=backend.executes, trusted=trusted, sha256=sha256) as content,
        stage(f"load `{path.name}`"),
    ):
        if robot is not None:
            with _naming(path):
                _read_schema(backend, content, path).check_names(robot)
        session = load(backend, content, path)
        check_weights(session, backend, content, path)
        options = {
            "trusted": trusted,
            "sha256": sha256,
            "threads": threads,
            "providers": providers,
        }
        session.source = (_opened_again, (str(path.absolute()), options))
        return session


def _opened_again(path: str, options: Mapping[str, Any]) -> Session:
    """Open a file as before: what a pickled session holds."""
    return open(path, **options)


def _set_up(backend: Backend, threads: int | None, providers: Sequence[str] | None) -> Backend:
    """Return the backend with what was asked of its runtime.

    Raises:
        ExportError: It cannot be set up so.
    """
    if threads is None and providers is None:
        return backend
    number: object = threads
    if number is not None and (not isinstance(number, int) or number is True or number < 1):
        raise ExportError(
            f"`threads` must be a positive int, got {threads!r}.", expected="an int", got=threads
        )
    if not isinstance(backend, Configurable):
        name = "providers" if threads is None else "threads"
        raise ExportError(
            f"`{name}` cannot be combined with {backend.name}.",
            expected="an `.onnx` file",
            got=backend.name,
            hint="Call `torch.set_num_threads` for threads of torch."
            if name == "threads"
            else "Leave it out.",
        )
    return backend.configured(threads, providers)


def inspect(path: str | Path) -> Schema:
    """Read the schema of an artefact, executing nothing and importing no runtime.

    Of a ``.pt2`` or ``.onnx`` file that kd_export did not write, the schema is derived from the
    program, under its own names.

    Raises:
        ExportError: The file is damaged, or has lost its schema.
        NotExportable: kd_export did not write the file, and it takes or gives other than tensors.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> report = kd_export.save(module, "policy.pt2", {"x": torch.zeros(1, 3)})
        >>> [entry.wire for entry in kd_export.inspect("policy.pt2").inputs]
        ['x']
    """
    path = Path(path)
    backend = backend_for(path)
    with open_regular(path) as file:
        return _read_schema(backend, file, path)


def diff(one: str | Path, other: str | Path, *, interface: bool = False) -> Differences:
    """Compare what two artefacts say, of any formats, executing nothing.

    Compared are inputs, outputs and their order, axes, mode, metadata, versions, the weights of
    two files of one format, the results of tests that both store, and the plain properties of two
    ``.onnx`` files. What their names are inside the files is not, nor are the bounds of test
    inputs.

    Args:
        one: The first file.
        other: The second file.
        interface: Compare only what the programs take and give.

    Raises:
        ExportError: A file is damaged, or was not written by kd_export.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> example = {"x": torch.zeros(1, 3)}
        >>> report = kd_export.save(module, "one.pt2", example)
        >>> report = kd_export.save(module, "two.pt2", example, dynamic={"batch": (1, 8)})
        >>> kd_export.diff("one.pt2", "two.pt2", interface=True)
        differs  name   one.pt2  two.pt2
        axis     batch  1..      1..8
    """
    one, other = Path(one), Path(other)
    schemas = inspect(one), inspect(other)
    rows = [*interface_differences(*schemas)]
    if not interface:
        rows += content_differences(*schemas, digests=backend_for(one) is backend_for(other))
        rows += property_differences(*map(_further_properties, (one, other)))
    return Differences(str(one), str(other), tuple(rows))


def model_bytes(path: Path, schema: Schema) -> int:
    """Return the bytes of a file and of the weights beside it, its schema and tests left out."""
    beside = {".onnx": path.with_name(companion(path.name)), ".xml": path.with_suffix(".bin")}
    files = (path, beside.get(path.suffix, path))
    held = sum(one.stat().st_size for one in {*files} if one.is_file())
    return held if schema.derived else held - len(schema.to_json().encode())


def _further_properties(path: Path) -> dict[str, str] | None:
    """Return what an ``.onnx`` file tells other tools beside its schema; others tell nothing."""
    if path.suffix.lower() != ".onnx":
        return None
    with open_regular(path) as file:
        return further_properties(contents(file))


def load(backend: Backend, file: BinaryIO, path: Path) -> Session:
    """Build a session from an open file that the caller trusts, or that executes nothing."""
    schema = _read_schema(backend, file, path)
    file.seek(0)
    with _naming(path):
        return Session(schema, backend.load(file, schema, path))


def _read_schema(backend: Backend, file: BinaryIO, path: Path) -> Schema:
    if file.seek(0, os.SEEK_END) == 0:
        raise ExportError(
            f"`{path.name}` is empty.", got=0, hint="Copy it again, or export it again."
        )
    file.seek(0)
    with _naming(path):
        return backend.read_schema(file)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of the file to errors of its format, which know its content alone."""
    try:
        yield
    except ExportError as error:
        if path.name not in str(error):
            error.args = (f"`{printable(path.name)}`: {error}",)
        raise


def check_weights(session: Session, backend: Backend, file: BinaryIO, path: Path) -> None:
    """Check that the weights are those that the file was exported with, if it says so.

    Raises:
        VerifyError: They are not.
    """
    file.seek(0)
    if not session.schema.derived:
        check_digest(backend.weights(file, session.runner), session.schema, path)


def check_digest(found: str | None, schema: Schema, path: Path) -> None:
    """Compare the digest of weights with the one of the schema; ``None`` is not compared.

    Raises:
        VerifyError: It is another.
    """
    if found is not None and found != schema.weights:
        raise VerifyError(
            f"the weights or the graph in `{path.name}` are not those that it was exported with.",
            expected=schema.weights,
            got=found,
            hint="The file was changed after its export: export again.",
        )


@contextlib.contextmanager
def _trusted(
    file: BinaryIO, path: Path, *, executes: bool, trusted: bool, sha256: str | None
) -> Iterator[BinaryIO]:
    """Return the file to load: one that is trusted, has the digest given, or executes nothing."""
    if sha256 is None:
        if executes and not trusted:
            raise UntrustedArtifact(
                f"opening `{path.name}` executes the program it holds.",
                expected="trusted=True or sha256=...",
                hint="Pass `trusted=True` if you know who made it, or `sha256=` with its digest.",
            )
        yield file
        return
    if not re.fullmatch("[0-9a-fA-F]{64}", str(sha256)):
        raise UntrustedArtifact(
            f"expected 64 hexadecimal digits for `sha256`, got {brief(sha256)}.",
            expected="64 hexadecimal digits",
            got=sha256,
            hint=f"`kd-export inspect {path.name}` prints those of a file.",
        )
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(file, copy)
        copy.seek(0)
        digest = hashlib.file_digest(copy, "sha256").hexdigest()
        if digest != sha256.lower():
            raise UntrustedArtifact(
                f"the SHA-256 of `{path.name}` is not the one given.",
                expected=sha256,
                got=digest,
                hint="The file was changed since its digest was computed.",
            )
        copy.seek(0)
        yield copy
