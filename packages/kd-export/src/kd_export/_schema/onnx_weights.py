"""Moving the weights of an ONNX model out of its message, or into it, without a copy of them.

A message is read and written whole, and each library on the way makes a copy. So large weights are
written beside the model and joined to it as the file is written, and a model that is loaded says
that its weights are parts of a file: of its own.
"""

from __future__ import annotations

from kd_export._schema.onnx_file import (
    DATA_LOCATION,
    EXTERNAL_DATA,
    fields_in,
    tensor_of,
    written,
    written_field,
)
from kd_export._schema.onnx_rewriting import Parts, field, rewritten

LARGE = 1 << 16
"""Bytes from which on weights are moved; shapes and numbers that a runtime folds have fewer."""

_RAW_DATA = 9
_PLAIN = {1, 2, 8, 12}
"""The fields of a tensor that say what it is: sizes, dtype, name and text."""

# The fields that lead to the weights of a graph, and the message each holds.
_WEIGHT = ("graph", 5)
_LEADS = {
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

    parts = rewritten(model, rule, _LEADS)
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

    return rewritten(model, rule, _LEADS) or [model]


def _without(tensor: memoryview, numbers: set[int]) -> Parts:
    """Return a tensor without the fields of some numbers."""
    parts = rewritten(tensor, lambda _, number, *__: [] if number in numbers else None, {})
    return [tensor] if parts is None else parts


def _pair(key: str, value: str) -> bytes:
    content = written_field(1, key.encode()) + written_field(2, value.encode())
    return written_field(EXTERNAL_DATA, content)
