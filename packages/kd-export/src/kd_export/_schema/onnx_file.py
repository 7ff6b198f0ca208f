"""The protobuf message that an ``.onnx`` file is: read, checked and rewritten without onnx.

The wire format is the one of the Protocol Buffers encoding guide, the numbers of the fields are
those of ``onnx.proto``. Nothing of a model is executed. A model may keep its weights in other
files. kd_export writes one such file, for weights that a message cannot hold, beside the model and
named after it; a model that names any other place is refused.

A message is read and written whole by onnx, and each library on the way makes a copy. So large
weights are written beside the model and joined to it as the file is written, and a model that is
loaded says that its weights are parts of a file: of its own. What stays of a message that is
rewritten is not copied.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

from kd_export._errors import ExportError, UntrustedArtifact
from kd_export._schema.files import check_extent, check_schema_size

SCHEMA_PROPERTY = "kd_export"
PRODUCER = "kd-export"
"""The producer that a model names: one without a schema has lost it."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_METADATA_PROPS = 14
_MOST_FIELDS = 10_000
_MOST_IN_PAIR = 16
_MOST_DIMS = 64
_MOST_WALKED = 2_000_000
_LONGEST_NAME = 1 << 10
DEEPEST = 100
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
EXTERNAL_DATA, DATA_LOCATION = 13, 14
_DIMS, _DATA_TYPE, _OPERATOR = 1, 2, 4
# Bits of one number, by the data type of a tensor.
_BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    **dict.fromkeys((21, 22, 23), 4),
    15: 128,
}
_CONTEXT_NODE = b"EPContext"


def read_onnx_schema(file: BinaryIO) -> str | None:
    """Read the schema text out of the metadata of an ``.onnx`` file; ``None`` if it has none."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        for number, start, size in _fields(file, end, most=_MOST_FIELDS):
            text = _schema_in(file, start, start + size) if number == _METADATA_PROPS else None
            if text is not None:
                return text
    except (EOFError, UnicodeDecodeError) as error:
        raise damaged(error) from error
    return None


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


def schema_field(text: str) -> bytes:
    """Build the bytes that add the schema at the end of a model: a message may grow there.

    What the numbers of entries mean is added as plain properties, too, for other tools.
    """
    check_schema_size(len(text.encode()))
    named = {SCHEMA_PROPERTY: text, **plain_properties(text)}
    return b"".join(_property(name, value) for name, value in named.items())


def _property(name: str, value: str) -> bytes:
    pair = written_field(1, name.encode()) + written_field(2, value.encode())
    return written_field(_METADATA_PROPS, pair)


def plain_properties(text: str) -> dict[str, str]:
    """Return what a schema says of the numbers of its entries, as texts by name.

    Lists are joined by commas, or are JSON if a part has a comma itself.

    >>> signal = '{"names": ["hip", "knee"], "unit": "rad", "rate": 50.0}'
    >>> plain_properties(f'{{"inputs": [{{"wire": "obs", "signal": {signal}}}], "outputs": []}}')
    {'obs.names': 'hip,knee', 'obs.unit': 'rad', 'obs.rate': '50.0'}
    """
    schema = json.loads(text)
    return {
        f"{entry['wire']}.{part}": _plain(value)
        for entry in (*schema.get("outputs", ()), *schema.get("inputs", ()))
        for part, value in entry.get("signal", {}).items()
    }


def contradiction(model: memoryview) -> tuple[str, str, str] | None:
    """Return name, text and right text of a plain property that differs from the schema."""
    pairs = _properties(model)
    text = next((value for name, value in pairs if name == SCHEMA_PROPERTY), None)
    wanted = {} if text is None else plain_properties(text)
    for name, value in pairs:
        if wanted.get(name, value) != value:
            return name, value, wanted[name]
    return None


def further_properties(model: memoryview) -> dict[str, str]:
    """Return the properties of a model that do not follow from its schema, by name."""
    found = dict(_properties(model))
    text = found.pop(SCHEMA_PROPERTY, None)
    wanted = {} if text is None else plain_properties(text)
    return {name: value for name, value in found.items() if wanted.get(name) != value}


def _properties(model: memoryview) -> list[tuple[str, str]]:
    return [
        _named_text(model[start : start + size])
        for number, start, size in fields_in(model, 0, len(model))
        if number == _METADATA_PROPS
    ]


def _named_text(field: memoryview) -> tuple[str, str]:
    """Return name and text of a property."""
    parts = {number: bytes(field[i : i + n]) for number, i, n in fields_in(field, 0, len(field))}
    name, value = (parts.get(number, b"").decode("utf-8", "replace") for number in (1, 2))
    return name, value


def _plain(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    parts = ["" if part is None else str(part) for part in value]
    return json.dumps(value) if any("," in part for part in parts) else ",".join(parts)


def damaged(error: Exception) -> ExportError:
    """Build the error of a file that is cut, or something else than a model."""
    return ExportError(f"the file is not a whole ONNX model: {error}.", hint="It may be truncated.")


def companion(name: str) -> str:
    """Return the one name that a file of weights beside a model may have.

    >>> companion("policy.onnx")
    'policy.onnx.data'
    """
    return f"{name}.data"


def weights_digest(model: bytes | memoryview, beside: bytes | memoryview = b"") -> str:
    """Compute the SHA-256 of a model, weights included, without its properties.

    The schema is one of them; the others are texts for people and tools, and compute nothing.
    """
    digest = hashlib.sha256()
    for part in without_properties(memoryview(model)):
        digest.update(part)
    digest.update(beside)
    return digest.hexdigest()


def without_properties(model: memoryview) -> Iterator[memoryview]:
    """Iterate over the fields of a model but its properties."""
    end = 0
    for number, start, size in fields_in(model, 0, len(model)):
        begin, end = end, start + size
        if number != _METADATA_PROPS:
            yield model[begin:end]


def sealed(model: memoryview, text: str) -> Parts:
    """Return the parts of a model with this schema in place of the one that it has."""
    parts: Parts = []
    end = 0
    replaced = {SCHEMA_PROPERTY, *plain_properties(text)}
    for number, start, size in fields_in(model, 0, len(model)):
        begin, end = end, start + size
        if number != _METADATA_PROPS or _named_text(model[start:end])[0] not in replaced:
            parts.append(model[begin:end])
    return [*parts, schema_field(text)]


def check_external(model: bytes | memoryview, name: str = "", size: int = 0) -> bool:
    """Refuse a model that keeps data in other files than the one beside it.

    Args:
        model: The bytes of the model.
        name: The only file that may hold weights.
        size: How many bytes that file has.

    Returns:
        Whether the model keeps weights there.

    Raises:
        UntrustedArtifact: It names another file, or the file has not the bytes of the tensors.
        ExportError: It is not a whole model.
    """
    found = False
    try:
        for walked, (kind, number, content, whole) in enumerate(_walk(memoryview(model))):
            if walked > _MOST_WALKED:
                raise EOFError("it has too many fields")
            if _is_outside(kind, number, content):
                _check_place(whole, name, size)
                found = True
    except EOFError as error:
        raise damaged(error) from error
    return found


def _walk(view: memoryview) -> Iterator[tuple[str, int, memoryview, memoryview]]:
    """Iterate over the fields of all messages that may lead to a tensor, each with its message."""
    pending = [("model", 0, len(view), 0)]
    while pending:
        kind, start, end, depth = pending.pop()
        if depth > DEEPEST:
            raise EOFError("it is nested too deeply")
        for number, begin, size in fields_in(view, start, end):
            yield kind, number, view[begin : begin + size], view[start:end]
            inner = _MESSAGES.get(kind, {}).get(number)
            if inner is not None:
                pending.append((inner, begin, begin + size, depth + 1))


def _is_outside(kind: str, number: int, content: memoryview) -> bool:
    """Decide whether a field says that data, or the program of a node, is in another file."""
    if kind == "tensor":
        return number == EXTERNAL_DATA or (number == DATA_LOCATION and any(content))
    if kind == "node" and number == _OPERATOR and content == _CONTEXT_NODE:
        raise _outside("compiled code")
    return False


def _check_place(tensor: memoryview, name: str, size: int) -> None:
    """Refuse a tensor whose data is not a part of the file beside the model, of its own length."""
    whole, place = tensor_of(tensor)
    offset, stated = (place.pop(word, b"x") for word in (b"offset", b"length"))
    fits = all(number.isdigit() and len(number) < 20 for number in (offset, stated))
    if place != {b"location": name.encode()} or not name or not fits:
        raise _outside(str(place.get(b"location", b""))[2:-1])
    check_extent(whole, int(offset), int(stated), name, size)


def tensor_of(tensor: memoryview) -> tuple[int, dict[bytes, bytes]]:
    """Return how many bytes a tensor has, 0 if that is not known, and where it says they are."""
    dims: list[int] = []
    kind, place = 0, dict[bytes, bytes]()
    for number, begin, length in fields_in(tensor, 0, len(tensor)):
        content = tensor[begin : begin + length]
        if len(place) > _MOST_IN_PAIR:
            raise _outside("a tensor of too many parts")
        if number == _DIMS:
            position = 0
            while position < length and len(dims) <= _MOST_DIMS:
                dim, position = varint(content, position)
                dims.append(dim)
        elif number == _DATA_TYPE:
            kind, _ = varint(content, 0)
        elif number == EXTERNAL_DATA:
            parts = {n: bytes(content[b : b + s]) for n, b, s in fields_in(content, 0, length)}
            place[parts.get(1, b"")] = parts.get(2, b"")
    bits = 0 if len(dims) > _MOST_DIMS else _BITS.get(kind, 0)
    return (math.prod(dims) * bits + 7) // 8, place


def _outside(what: str) -> UntrustedArtifact:
    return UntrustedArtifact(
        f"the model keeps weights or code in another file: {what[:80]}.",
        expected="all data inside the file, or in the one file beside it",
        got=what[:1000],
        hint="Ask for a file that `kd_export.save` wrote, and for the `.onnx.data` beside it.",
    )


def written_field(number: int, content: bytes | memoryview) -> bytes:
    """Write a field that holds text, bytes or another message."""
    return b"".join((written(number << 3 | _BYTES), written(len(content)), content))


def written(value: int) -> bytes:
    """Write a number."""
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


def fields_in(view: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int]]:
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
    tag, start = varint(view, position)
    number, kind = tag >> 3, tag & 7
    if kind == _VARINT:
        size = varint(view, start)[1] - start
    elif kind == _BYTES:
        size, start = varint(view, start)
    elif kind in (_FIXED64, _FIXED32):
        size = 8 if kind == _FIXED64 else 4
    else:
        raise EOFError(f"unknown wire type {kind}")
    if number == 0:
        raise EOFError("a field has no number")
    return number, start, size


def varint(view: memoryview, position: int) -> tuple[int, int]:
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


Parts = list[bytes | memoryview]
"""Bytes of a message, one behind the other."""

Rule = Callable[[str, int, int, int], Parts | None]
"""What stands in place of a field: by its message and number, where its content starts and ends.

``None``: the field stays, unless something changes in the message that it holds.
"""


def rewritten(
    view: memoryview,
    rule: Rule,
    leads: Mapping[str, Mapping[int, str]],
    kind: str = "model",
    start: int = 0,
    end: int | None = None,
    depth: int = 0,
) -> Parts | None:
    """Return the parts of a message in which something changes, ``None`` if nothing does.

    Args:
        view: The model.
        rule: What becomes of a field.
        leads: The fields to look into, by their message, and the message that each holds.
        kind: The message.
        start: Where it starts in the model.
        end: Where it ends; by default with the model.
        depth: How deep it is nested.

    Raises:
        EOFError: The message is not whole, or nested too deeply.
    """
    if depth > DEEPEST:
        raise EOFError("it is nested too deeply")
    end = len(view) if end is None else end
    parts: Parts = []
    position, changed = start, False
    for number, begin, size in fields_in(view, start, end):
        stop = begin + size
        new = rule(kind, number, begin, stop)
        inner = leads.get(kind, {}).get(number)
        if new is None and inner is not None:
            content = rewritten(view, rule, leads, inner, begin, stop, depth + 1)
            new = None if content is None else field(number, content)
        changed = changed or new is not None
        parts += [view[position:stop]] if new is None else new
        position = stop
    return parts if changed else None


def field(number: int, parts: Parts) -> Parts:
    """Return the parts of a field that holds bytes or a message of these parts."""
    return [written(number << 3 | 2) + written(sum(map(len, parts))), *parts]


LARGE = 1 << 16
"""Bytes from which on weights are moved; shapes and numbers that a runtime folds have fewer."""

_RAW_DATA = 9
_PLAIN = {1, 2, 8, 12}
"""The fields of a tensor that say what it is: sizes, dtype, name and text."""

# The fields that lead to the weights of a graph, and the message each holds.
_WEIGHT = ("graph", 5)
_TO_WEIGHTS = {
    "model": {7: "graph"},
    "graph": {1: "node"},
    "node": {5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
}


def moved_out(model: memoryview, name: str) -> bytes:
    """Return the model with its large weights as parts of a file of this name: the model's own."""

    def rule(kind: str, number: int, start: int, end: int) -> Parts | None:
        if (kind, number) != _WEIGHT:
            return None
        fields = list(fields_in(model, start, end))
        data = [(begin, size) for number, begin, size in fields if number == _RAW_DATA]
        if len(data) != 1 or {number for number, *_ in fields} - _PLAIN != {_RAW_DATA}:
            return None
        begin, size = data[0]
        if size < LARGE or size != tensor_of(model[start:end])[0]:
            return None
        place = {"location": name, "offset": str(begin), "length": str(size)}
        outside = [_pair(key, value) for key, value in place.items()]
        location = written(DATA_LOCATION << 3) + written(1)
        return field(number, [*_without(model[start:end], {_RAW_DATA}), *outside, location])

    parts = rewritten(model, rule, _TO_WEIGHTS)
    return bytes(model) if parts is None else b"".join(parts)


def moved_in(model: memoryview, weights: memoryview) -> Parts:
    """Return the parts of the model with the weights that it has in a file beside it."""

    def rule(kind: str, number: int, start: int, end: int) -> Parts | None:
        place = tensor_of(model[start:end])[1] if (kind, number) == _WEIGHT else None
        if not place:
            return None
        offset, length = int(place[b"offset"]), int(place[b"length"])
        kept = _without(model[start:end], {EXTERNAL_DATA, DATA_LOCATION})
        return field(number, [*kept, *field(_RAW_DATA, [weights[offset : offset + length]])])

    return rewritten(model, rule, _TO_WEIGHTS) or [model]


def _without(tensor: memoryview, numbers: set[int]) -> Parts:
    """Return a tensor without the fields of some numbers."""
    parts = rewritten(tensor, lambda _, number, *__: [] if number in numbers else None, {})
    return [tensor] if parts is None else parts


def _pair(key: str, value: str) -> bytes:
    content = written_field(1, key.encode()) + written_field(2, value.encode())
    return written_field(EXTERNAL_DATA, content)


# The fields that are dropped: texts of documentation and metadata of parts.
_DROPPED = {
    "model": (6,),
    "graph": (10, 16),
    "function": (8, 14),
    "node": (6, 9),
    "attribute": (13,),
    "value": (3, 4),
    "tensor": (12, 16),
}
# The fields that may lead to another such, and the message each holds.
_TO_NOTES = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 11: "value", 12: "value", 13: "value"},
    "function": {7: "node", 11: "attribute", 12: "value"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}


def stripped(model: bytes) -> bytes:
    """Return a model without documentation and without the metadata of its parts.

    The metadata of the model itself, where a schema stands, is kept.

    Raises:
        ExportError: It is not a whole model.
    """
    try:
        parts = rewritten(memoryview(model), _without_notes, _TO_NOTES)
    except EOFError as error:
        raise damaged(error) from error
    return model if parts is None else b"".join(parts)


def _without_notes(kind: str, number: int, *_: int) -> Parts | None:
    return [] if number in _DROPPED[kind] else None
