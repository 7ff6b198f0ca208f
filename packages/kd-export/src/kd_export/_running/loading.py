"""From a file to a session: the one way in for `open`, `verify` and `save`.

The schema is read first, from the file itself, so that a file of another kind is refused before
it is read whole. Where a digest was given, it is computed over a private copy, and that is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from kd_export._console import Row, html_table, plain_table, stage
from kd_export._errors import ExportError, UntrustedArtifact, VerifyError, brief, printable
from kd_export._running.session import Backend, Configurable, Session, backend_for
from kd_export._schema.files import Json, Number, open_regular
from kd_export._schema.schema import Entry, Schema, Step, Vector, distance, magnitude, tolerance

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
    two files of one format, and the results of tests that both store. What their names are inside
    the files is not, nor are the bounds of test inputs.

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
    return Differences(str(one), str(other), tuple(rows))


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


# What two schemas do not have in common.

_HEADER = ("differs", "name")
_ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two artefacts say differently.

    Attributes:
        what: What it is a part of: ``"input"``, ``"output"``, ``"axis"``, ``"metadata"``, ...
        name: Its wire name, or the name it has there; empty if there is only one.
        one: What the first file says, or ``None`` if it says nothing.
        other: What the second file says, or ``None`` if it says nothing.

    Example:
        >>> Difference("axis", "batch", "1..", "1..8").other
        '1..8'
    """

    what: str
    name: str
    one: str | None
    other: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Differences:
    """What two artefacts say differently; it prints as a table.

    Attributes:
        one: The path of the first file.
        other: The path of the second file.
        rows: The differences.

    Example:
        >>> row = Difference("axis", "batch", "1..", "1..8")
        >>> print(Differences("a.pt2", "b.pt2", (row,)))
        differs  name   a.pt2  b.pt2
        axis     batch  1..    1..8
    """

    one: str
    other: str
    rows: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not self.rows

    def header(self) -> Row:
        """Return the header of the table."""
        return (*_HEADER, self.one, self.other)

    def cells(self) -> list[Row]:
        """Return the rows as text."""
        return [(r.what, r.name, _shown(r.one), _shown(r.other)) for r in self.rows]

    def to_data(self) -> dict[str, Json]:
        """Return the differences as plain data, fit for JSON."""
        rows: list[Json] = [
            {"what": row.what, "name": row.name, "one": row.one, "other": row.other}
            for row in self.rows
        ]
        return {"one": self.one, "other": self.other, "same": self.same, "rows": rows}

    def _repr_html_(self) -> str:
        return html_table(self.header(), self.cells()) if self.rows else html.escape(repr(self))

    def __repr__(self) -> str:
        if self.same:
            return f"{self.one} and {self.other} do not differ"
        return plain_table(self.header(), self.cells())


def _shown(value: str | None) -> str:
    if value is None:
        return _ABSENT
    return value if len(value) <= 60 else f"{value[:57]}..."


def interface_differences(one: Schema, other: Schema) -> Iterator[Difference]:
    """Compare what two programs take and give."""
    for what, entries, others in (
        ("input", one.inputs, other.inputs),
        ("output", one.outputs, other.outputs),
    ):
        first, second = ({e.wire: e.describe() for e in part} for part in (entries, others))
        yield from _in_mappings(what, first, second)
        if list(first) != list(second) and set(first) == set(second):
            yield Difference(f"order of {what}s", "", ", ".join(first), ", ".join(second))
        known, others_known = ({e.wire: e for e in part} for part in (entries, others))
        for wire in first:
            if wire in second:
                yield from _signal_differences(known[wire], others_known[wire], what)
    axes, other_axes = ({n: str(axis) for n, axis in s.axes.items()} for s in (one, other))
    yield from _in_mappings("axis", axes, other_axes)
    yield from _in_mappings("batch dimensions", {"": one.batch_dims}, {"": other.batch_dims})
    yield from _in_mappings("next of state", one.state, other.state)
    yield from _in_mappings("start of state", one.initial, other.initial)
    yield from _in_mappings("mode", {"": one.mode}, {"": other.mode})


def _signal_differences(one: Entry, other: Entry, what: str) -> Iterator[Difference]:
    """Compare what the numbers of an entry mean: part by part, names by their place."""
    first, second = ({} if e.signal is None else e.signal.to_data() for e in (one, other))
    for part in dict.fromkeys((*first, *second)):
        told = f"{part} of {what}"
        mine, theirs = first.get(part), second.get(part)
        if mine == theirs:
            continue
        if not (isinstance(mine, list) and isinstance(theirs, list)):
            yield Difference(told, one.wire, _part(mine), _part(theirs))
            continue
        for place in range(max(len(mine), len(theirs))):
            pair = [items[place] if place < len(items) else None for items in (mine, theirs)]
            if pair[0] != pair[1]:
                yield Difference(told, f"{one.wire}[{place}]", *map(_part, pair))


def _part(value: Json) -> str | None:
    return ", ".join(map(str, value)) if isinstance(value, list) else _text(value)


def content_differences(one: Schema, other: Schema, *, digests: bool) -> Iterator[Difference]:
    """Compare all else but what follows from the example that a program was exported with.

    Args:
        one: A schema.
        other: Another one.
        digests: Whether the digests of the weights are of one kind, so that they can be compared.
    """
    metadata, other_metadata = (
        {name: json.dumps(value, sort_keys=True) for name, value in schema.metadata.items()}
        for schema in (one, other)
    )
    yield from _in_mappings("metadata", metadata, other_metadata)
    steps, others = (
        {name: f"{runs}: {reads} -> {writes}" for name, runs, reads, writes in map(Step.row, found)}
        for found in (one.steps, other.steps)
    )
    yield from _in_mappings("step", steps, others)
    made, other_made = (
        {} if s.precision is None else {"": s.precision.describe()} for s in (one, other)
    )
    yield from _in_mappings("precision", made, other_made)
    yield from _in_mappings("version", one.versions, other.versions)
    if digests:
        yield from _in_mappings("weights", {"": one.weights}, {"": other.weights})
    yield from _results(one, other)


def _in_mappings(
    what: str, one: Mapping[str, object], other: Mapping[str, object]
) -> Iterator[Difference]:
    for name in dict.fromkeys((*one, *other)):
        first, second = one.get(name), other.get(name)
        if first != second:
            yield Difference(what, name, _text(first), _text(second))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _results(one: Schema, other: Schema) -> Iterator[Difference]:
    """Compare the numbers that must come out of the same stored test."""
    if [_drawn(entry) for entry in one.inputs] != [_drawn(entry) for entry in other.inputs]:
        return
    theirs = {_test(vector): vector for vector in other.vectors}
    for vector in one.vectors:
        second = theirs.get(_test(vector))
        if second is not None:
            yield from _in_results(one, vector, second)


def _in_results(schema: Schema, one: Vector, other: Vector) -> Iterator[Difference]:
    sizes = ", ".join(f"{name}={size}" for name, size in one.sizes.items())
    for entry in schema.outputs:
        first, second = (v.outputs.get(entry.wire, ()) for v in (one, other))
        if len(first) != len(second):
            continue  # the shapes differ, which is told of the output
        far = [pair for pair in zip(first, second, strict=True) if _is_far(entry, *pair)]
        if far:
            number, theirs = max(far, key=lambda pair: distance(*pair))
            name = f"{entry.wire} at {sizes}" if sizes else entry.wire
            yield Difference("result", name, str(number), str(theirs))


def _is_far(entry: Entry, one: Number, other: Number) -> bool:
    relative, absolute = tolerance(entry.dtype)
    return distance(one, other) > absolute + relative * magnitude(other)


def _drawn(entry: Entry) -> object:
    return entry.wire, entry.dtype, entry.shape, entry.low, entry.high


def _test(vector: Vector) -> object:
    return vector.seed, *sorted(vector.sizes.items()), *sorted(vector.inputs.items())
