"""Moving the weights of an ONNX model out of its message, or into it, without a copy of them.

A message is read and written whole, and each library on the way makes a copy. So large weights are
written beside the model and joined to it as the file is written, and a model that is loaded says
that its weights are parts of a file: of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from kd_export._schema.onnx_file import (
    DATA_LOCATION,
    EXTERNAL_DATA,
    fields_in,
    tensor_of,
    written,
    written_field,
)

Parts = list[bytes | memoryview]
Change = Callable[[memoryview, int, int], Parts | None]
"""What replaces a tensor, which is these bytes of the model; `None`: it stays."""

LARGE = 1 << 16
"""Bytes from which on weights are moved; shapes and numbers that a runtime folds have fewer."""

_RAW_DATA = 9
_PLAIN = {1, 2, 8, 12}
"""The fields of a tensor that say what it is: sizes, dtype, name and text."""

# The fields that lead to the weights of a graph, and the message each holds.
_LEADS = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
}


def moved_out(model: memoryview, name: str) -> bytes:
    """Return the model with its large weights as parts of a file of this name: the model's own."""

    def change(view: memoryview, start: int, end: int) -> Parts | None:
        fields = list(fields_in(view, start, end))
        data = [(begin, size) for number, begin, size in fields if number == _RAW_DATA]
        if len(data) != 1 or {number for number, *_ in fields} - _PLAIN != {_RAW_DATA}:
            return None
        begin, size = data[0]
        if size < LARGE or size != tensor_of(view[start:end])[0]:
            return None
        place = {"location": name, "offset": str(begin), "length": str(size)}
        return [
            *_without(view, start, end, {_RAW_DATA}),
            *(_pair(key, value) for key, value in place.items()),
            written(DATA_LOCATION << 3) + written(1),
        ]

    parts = _rewritten(model, "model", 0, len(model), change)
    return bytes(model) if parts is None else b"".join(parts)


def moved_in(model: memoryview, weights: memoryview) -> Parts:
    """Return the parts of the model with the weights that it has in a file beside it."""

    def change(view: memoryview, start: int, end: int) -> Parts | None:
        _, place = tensor_of(view[start:end])
        if not place:
            return None
        offset, length = int(place[b"offset"]), int(place[b"length"])
        kept = _without(view, start, end, {EXTERNAL_DATA, DATA_LOCATION})
        return [*kept, *_field(_RAW_DATA, [weights[offset : offset + length]])]

    return _rewritten(model, "model", 0, len(model), change) or [model]


def _rewritten(view: memoryview, kind: str, start: int, end: int, change: Change) -> Parts | None:
    """Return the parts of a message in which tensors were changed, or `None` if none was."""
    if kind == "tensor":
        return change(view, start, end)
    parts: Parts = []
    position, changed = start, False
    for number, begin, size in fields_in(view, start, end):
        inner = _LEADS[kind].get(number)
        new = None if inner is None else _rewritten(view, inner, begin, begin + size, change)
        changed = changed or new is not None
        parts += [view[position : begin + size]] if new is None else _field(number, new)
        position = begin + size
    return parts if changed else None


def _without(view: memoryview, start: int, end: int, numbers: set[int]) -> Parts:
    """Return the fields of a message but those of some numbers."""
    parts: Parts = []
    position = start
    for number, begin, size in fields_in(view, start, end):
        if number not in numbers:
            parts.append(view[position : begin + size])
        position = begin + size
    return parts


def _field(number: int, parts: Parts) -> Parts:
    """Return the parts of a field that holds a message of these parts."""
    return [written(number << 3 | 2) + written(sum(map(len, parts))), *parts]


def _pair(key: str, value: str) -> bytes:
    content = written_field(1, key.encode()) + written_field(2, value.encode())
    return written_field(EXTERNAL_DATA, content)
