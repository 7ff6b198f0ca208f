"""Tables as plain text, for reports, pipes and files."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, ...]


def plain_table(header: Row, rows: Sequence[Row]) -> str:
    """Align a table's cells in columns.

    >>> print(plain_table(("name", "size"), [("x", "3"), ("longer", "4")]))
    name    size
    x       3
    longer  4
    """
    lines = [header, *rows] if any(header) else list(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    aligned = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in aligned)
