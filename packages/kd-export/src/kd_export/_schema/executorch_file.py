"""Reading the flatbuffer that a ``.pte`` file is, without executorch and without executing it.

The wire format is the one of the FlatBuffers documentation on internals, the numbers of the fields
are those of ExecuTorch's ``program.fbs``. The schema is the text that the method `SCHEMA_METHOD`
gives. Only the parts that are asked for are read, so large weights cost nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from kd_export._errors import ExportError, UntrustedArtifact
from kd_export._schema.archive import check_schema_size, foreign

SCHEMA_METHOD = "kd_export"

_IDENTIFIER, _IDENTIFIER_AT = b"ET", 4
_PLANS, _DELEGATE_DATA = 1, 3
_NAME, _VALUES, _DELEGATES = 0, 2, 7
_VALUE_TYPE, _VALUE, _TEXT = 0, 1, 0
_STRING = 6
_MOST_METHODS = 64
_LONGEST_NAME = 1 << 10
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A flatbuffer in a file; each read is checked against its end."""

    file: BinaryIO
    end: int

    def read(self, position: int, size: int) -> bytes:
        if not (0 <= position <= self.end - size):
            raise EOFError("an offset leads beyond the end")
        self.file.seek(position)
        return self.file.read(size)

    def number(self, position: int, size: int = 4, *, signed: bool = False) -> int:
        return int.from_bytes(self.read(position, size), "little", signed=signed)

    def target(self, position: int) -> int:
        """Return where the table, vector or text is that an offset leads to."""
        return position + self.number(position)

    def field(self, table: int, number: int) -> int | None:
        """Return where a field of a table is, ``None`` where it has its default."""
        names = table - self.number(table, signed=True)
        place = 4 + 2 * number
        if place + 2 > self.number(names, 2):
            return None
        offset = self.number(names + place, 2)
        return table + offset if offset else None

    def tables(self, table: int, number: int, most: int) -> list[int]:
        """Return where the tables of a vector are."""
        place = self.field(table, number)
        if place is None:
            return []
        start = self.target(place)
        count = self.number(start)
        if count > most:
            raise EOFError(f"it has {count:,} parts of one kind")
        return [self.target(start + 4 + 4 * index) for index in range(count)]

    def count(self, table: int, number: int) -> int:
        """Return the length of a vector."""
        place = self.field(table, number)
        return 0 if place is None else self.number(self.target(place))

    def text(self, table: int, number: int) -> tuple[int, int]:
        """Return where the bytes of a text are, and how many."""
        place = self.field(table, number)
        if place is None:
            return 0, 0
        start = self.target(place)
        return start + 4, self.number(start)


def read_executorch_schema(file: BinaryIO) -> str:
    """Read the schema text out of a ``.pte`` file."""
    start, size = schema_place(file)
    check_schema_size(size)
    file.seek(start)
    try:
        return file.read(size).decode()
    except UnicodeDecodeError as error:
        raise _damaged(error) from error


def schema_place(file: BinaryIO) -> tuple[int, int]:
    """Return where the bytes of the schema are in a ``.pte`` file, and how many.

    Raises:
        ExportError: It is not a whole program, or carries no schema.
    """
    buffer = _Buffer(file, file.seek(0, os.SEEK_END))
    try:
        for plan in _plans(buffer):
            start, size = buffer.text(plan, _NAME)
            if buffer.read(start, min(size, _LONGEST_NAME)) != SCHEMA_METHOD.encode():
                continue
            (value,) = buffer.tables(plan, _VALUES, most=1)
            kind, place = buffer.field(value, _VALUE_TYPE), buffer.field(value, _VALUE)
            if kind is None or place is None or buffer.number(kind, 1) != _STRING:
                raise EOFError("its schema is not a text")
            start, size = buffer.text(buffer.target(place), _TEXT)
            if start + size > buffer.end:
                raise EOFError("an offset leads beyond the end")
            return start, size
    except (EOFError, ValueError) as error:
        raise _damaged(error) from error
    raise foreign(".pte")


def check_methods(file: BinaryIO) -> None:
    """Refuse a program that holds code for another back end, which kd_export never writes.

    Raises:
        UntrustedArtifact: It does.
        ExportError: It is not a whole program.
    """
    buffer = _Buffer(file, file.seek(0, os.SEEK_END))
    try:
        plans = list(_plans(buffer))
        found = sum(buffer.count(plan, _DELEGATES) for plan in plans)
        found += buffer.count(buffer.target(0), _DELEGATE_DATA)
    except EOFError as error:
        raise _damaged(error) from error
    if found or len(plans) != 2:
        raise UntrustedArtifact(
            "the program holds code for another back end, or further methods.",
            expected="one method and the schema",
            got=(len(plans), found),
            hint="Ask for a file that `kd_export.save` wrote.",
        )


def weights_digest(file: BinaryIO) -> str:
    """Compute the SHA-256 of a ``.pte`` file, weights included, without its schema."""
    start, size = schema_place(file)
    end = file.seek(0, os.SEEK_END)
    digest = hashlib.sha256()
    for begin, stop in ((0, start), (start + size, end)):
        file.seek(begin)
        for position in range(begin, stop, _CHUNK):
            digest.update(file.read(min(_CHUNK, stop - position)))
    return digest.hexdigest()


def _plans(buffer: _Buffer) -> Iterator[int]:
    """Iterate over the methods of a program."""
    if buffer.read(_IDENTIFIER_AT, len(_IDENTIFIER)) != _IDENTIFIER:
        raise EOFError("it does not begin as one")
    yield from buffer.tables(buffer.target(0), _PLANS, _MOST_METHODS)


def _damaged(error: Exception) -> ExportError:
    return ExportError(
        f"the file is not a whole ExecuTorch program: {error}.", hint="It may be truncated."
    )
