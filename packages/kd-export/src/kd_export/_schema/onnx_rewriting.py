"""A message of an ONNX model with other fields, and without a copy of those that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kd_export._schema.onnx_file import DEEPEST, fields_in, written

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
