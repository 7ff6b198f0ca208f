"""The key graph as a plain table."""

from typing import TYPE_CHECKING

from kd_core import NestedKey

if TYPE_CHECKING:
    from kd_nn._key_graph import KeyGraph


def dotted(key: NestedKey) -> str:
    """Return a key as text, its parts joined by dots."""
    return key if isinstance(key, str) else ".".join(dotted(part) for part in key)


def table(graph: "KeyGraph") -> str:
    """Return the steps of a key graph as an aligned table."""
    with_shapes = any(node.shapes for node in graph.nodes)
    rows = [["step", "module", "in_keys", "out_keys", "parameters"]]
    if with_shapes:
        rows[0].append("shapes")
    for node in graph.nodes:
        label = node.label if node.needed else f"({node.label})"
        row = [node.name, label, _keys(node.reads), _keys(node.writes), f"{node.parameters:,}"]
        if with_shapes:
            row.append(", ".join(str(shape) for _, shape in node.shapes))
        rows.append(row)
    widths = [max(len(row[col]) for row in rows) for col in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if col == 4 else text.ljust(width)
            for col, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _keys(keys: tuple[NestedKey, ...]) -> str:
    return ", ".join(dotted(key) for key in keys)
