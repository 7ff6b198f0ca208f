"""Reading the protobuf message that an ``.onnx`` file is, without onnx and without executing it.

The wire format is the one of the Protocol Buffers encoding guide, the numbers of the fields are
those of ``onnx.proto``. A model may keep its weights in other files, which onnxruntime would look
for in the working directory when it is given bytes: kd_export writes no such model and refuses it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from typing import BinaryIO

from kd_export._errors import ExportError, UntrustedArtifact
from kd_export._schema.archive import check_schema_size, foreign

SCHEMA_PROPERTY = "kd_export"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_METADATA_PROPS = 14
_MOST_FIELDS = 10_000
_MOST_IN_PAIR = 16
_MOST_WALKED = 2_000_000
_LONGEST_NAME = 1 << 10
_DEEPEST = 100
# The fields of each message that may lead to a tensor, and the message each holds.
_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "function": {7: "node", 11: "attribute"},
    "training": {1: "graph", 2: "graph"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor",
        6: "graph",
        10: "tensor",
        11: "graph",
        22: "sparse tensor",
        23: "sparse tensor",
    },
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
_EXTERNAL_DATA, _DATA_LOCATION, _OPERATOR = 13, 14, 4
_CONTEXT_NODE = b"EPContext"


def read_onnx_schema(file: BinaryIO) -> str:
    """Read the schema text out of the metadata of an ``.onnx`` file."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        for number, start, size in _fields(file, end, most=_MOST_FIELDS):
            text = _schema_in(file, start, start + size) if number == _METADATA_PROPS else None
            if text is not None:
                return text
    except (EOFError, UnicodeDecodeError) as error:
        raise ExportError(
            f"the file is not a whole ONNX model: {error}.", hint="It may be truncated."
        ) from error
    raise foreign(".onnx")


def _schema_in(file: BinaryIO, start: int, end: int) -> str | None:
    """Read a property (name: field 1, text: field 2); return its text if it is the schema."""
    file.seek(start)
    places = {
        number: (begin, size) for number, begin, size in _fields(file, end, most=_MOST_IN_PAIR)
    }
    (name, length), (text, size) = places.get(1, (start, 0)), places.get(2, (start, 0))
    file.seek(name)
    if file.read(min(length, _LONGEST_NAME)) != SCHEMA_PROPERTY.encode():
        return None
    check_schema_size(size)
    file.seek(text)
    return file.read(size).decode()


def add_schema(model: bytes, text: str) -> bytes:
    """Append the schema to a model as a property: a message may grow at its end."""
    name, content = SCHEMA_PROPERTY.encode(), text.encode()
    check_schema_size(len(content))
    pair = _field(1, name) + _field(2, content)
    return model + _field(_METADATA_PROPS, pair)


def weights_digest(model: bytes) -> str:
    """Compute the SHA-256 of a model, weights included, without its schema."""
    view, file = memoryview(model), io.BytesIO(model)
    digest = hashlib.sha256()
    end = 0
    for number, start, size in _fields_in(view, 0, len(view)):
        begin, end = end, start + size
        if number != _METADATA_PROPS or _schema_in(file, start, end) is None:
            digest.update(view[begin:end])
    return digest.hexdigest()


def check_self_contained(model: bytes) -> None:
    """Refuse a model that keeps weights in other files.

    Raises:
        UntrustedArtifact: It does.
        ExportError: It is not a whole model.
    """
    try:
        for walked, (kind, number, content) in enumerate(_walk(memoryview(model))):
            if walked > _MOST_WALKED:
                raise EOFError("it has too many fields")
            _check_inside(kind, number, content)
    except EOFError as error:
        raise ExportError(
            f"the file is not a whole ONNX model: {error}.", hint="It may be truncated."
        ) from error


def _walk(view: memoryview) -> Iterator[tuple[str, int, memoryview]]:
    """Iterate over the fields of all messages that may lead to a tensor."""
    pending = [("model", 0, len(view), 0)]
    while pending:
        kind, start, end, depth = pending.pop()
        if depth > _DEEPEST:
            raise EOFError("it is nested too deeply")
        for number, begin, size in _fields_in(view, start, end):
            yield kind, number, view[begin : begin + size]
            inner = _MESSAGES.get(kind, {}).get(number)
            if inner is not None:
                pending.append((inner, begin, begin + size, depth + 1))


def _check_inside(kind: str, number: int, content: memoryview) -> None:
    """Refuse a tensor whose data, and a node whose program, is in another file."""
    if kind == "tensor":
        outside = number == _EXTERNAL_DATA or (number == _DATA_LOCATION and any(content))
    else:
        outside = kind == "node" and number == _OPERATOR and content == _CONTEXT_NODE
    if outside:
        raise UntrustedArtifact(
            "the model keeps weights or code in another file.",
            expected="all data inside the file",
            got="external data",
            hint="Ask for a file that `kd_export.save` wrote: it holds all it needs.",
        )


def _field(number: int, content: bytes) -> bytes:
    return _written(number << 3 | _BYTES) + _written(len(content)) + content


def _written(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _fields(file: BinaryIO, end: int, *, most: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over the fields of a message in a file: number, where its bytes start, how many."""
    position = file.tell()
    for _ in range(most):
        if position >= end:
            return
        file.seek(position)
        head = memoryview(file.read(min(_HEAD, end - position)))
        number, start, size = _next(head, 0)
        start += position
        position = start + size
        if position > end:
            raise EOFError("a field reaches beyond the end")
        yield number, start, size
    raise EOFError("it has too many fields")


def _fields_in(view: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over the fields of a message in memory."""
    while position < end:
        number, start, size = _next(view, position)
        position = start + size
        if position > end:
            raise EOFError("a field reaches beyond the end")
        yield number, start, size


_HEAD = 20
"""Bytes of the longest tag and length."""


def _next(view: memoryview, position: int) -> tuple[int, int, int]:
    """Read the head of the field at a position."""
    tag, start = _varint(view, position)
    number, kind = tag >> 3, tag & 7
    if kind == _VARINT:
        size = _varint(view, start)[1] - start
    elif kind == _BYTES:
        size, start = _varint(view, start)
    elif kind in (_FIXED64, _FIXED32):
        size = 8 if kind == _FIXED64 else 4
    else:
        raise EOFError(f"unknown wire type {kind}")
    if number == 0:
        raise EOFError("a field has no number")
    return number, start, size


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """Read a number; return it and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(view):
            raise EOFError("the file ends inside a number")
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise EOFError("a number is too long")
