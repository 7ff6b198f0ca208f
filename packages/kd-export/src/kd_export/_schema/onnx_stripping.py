"""An ONNX model without what only helps the people who made it.

Exporters write source paths, stack traces and texts of documentation into a model. No runtime
reads them.
"""

from __future__ import annotations

from kd_export._errors import ExportError
from kd_export._schema.onnx_file import fields_in, written_field

_DEEPEST = 100
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
_LEADS = {
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
        return bytes(_without(memoryview(model), "model", 0))
    except EOFError as error:
        raise ExportError(
            f"the file is not a whole ONNX model: {error}.", hint="It may be truncated."
        ) from error


def _without(message: memoryview, kind: str, depth: int) -> bytes | memoryview:
    """Return a message without what is dropped: itself where that is nothing."""
    if depth > _DEEPEST:
        raise EOFError("it is nested too deeply")
    dropped, leads = _DROPPED[kind], _LEADS.get(kind, {})
    parts: list[bytes | memoryview] = []
    end, changed = 0, False
    for number, start, size in fields_in(message, 0, len(message)):
        begin, end = end, start + size
        if number in dropped:
            changed = True
            continue
        whole, part = message[begin:end], message[start:end]
        kept = _without(part, leads[number], depth + 1) if number in leads else part
        changed = changed or kept is not part
        parts.append(whole if kept is part else written_field(number, kept))
    return b"".join(parts) if changed else message
