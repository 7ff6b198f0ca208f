"""Tables as plain text, for reports, pipes and files, and as HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

from kd_export._errors import printable

Row = tuple[str, ...]


def plain_table(header: Row, rows: Sequence[Row]) -> str:
    """Align a table's cells in columns; what a terminal would obey is escaped.

    >>> print(plain_table(("name", "size"), [("x", "3"), ("longer", "4")]))
    name    size
    x       3
    longer  4
    """
    lines = [[*map(printable, line)] for line in ([header] if any(header) else []) + [*rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    aligned = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in aligned)


def html_table(header: Row, rows: Sequence[Row]) -> str:
    """Write a table as HTML.

    >>> html_table(("name",), [("<x>",)])
    '<table><tr><th>name</th></tr><tr><td>&lt;x&gt;</td></tr></table>'
    """

    def line(cells: Row, tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    head = line(header, "th") if any(header) else ""
    return f"<table>{head}{''.join(line(row, 'td') for row in rows)}</table>"
