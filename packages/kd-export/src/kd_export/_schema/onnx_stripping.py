"""An ONNX model without what only helps the people who made it.

Exporters write source paths, stack traces and texts of documentation into a model. No runtime
reads them.
"""

from __future__ import annotations

from kd_export._schema.onnx_file import damaged
from kd_export._schema.onnx_rewriting import Parts, rewritten

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
        parts = rewritten(memoryview(model), _rule, _LEADS)
    except EOFError as error:
        raise damaged(error) from error
    return model if parts is None else b"".join(parts)


def _rule(kind: str, number: int, *_: int) -> Parts | None:
    return [] if number in _DROPPED[kind] else None
