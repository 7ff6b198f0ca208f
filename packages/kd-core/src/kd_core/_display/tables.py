"""A table of texts that a prompt shows as lines and a notebook as a table.

Knows rows of cells; must not know containers.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


class Table(str):
    """A table as text, which a prompt shows as it prints it.

    Attributes:
        rows: its cells; the first row is the head.
    """

    __slots__ = ("rows",)
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[str]], right: int = -1) -> Table:
        """Align cells in columns.

        Args:
            rows: the head, and the rows; each has as many cells.
            right: the column that is aligned to the right.

        Example:
            >>> Table.of([("name", "size"), ("a", "3"), ("longer", "12")])
            name    size
            a          3
            longer    12
        """
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        right %= len(widths)
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if place == right else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        made = cls("\n".join(lines))
        made.rows = tuple(map(tuple, rows))
        return made

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        head, *rows = self.rows
        lines = [_line(head, "th"), *(_line(row, "td") for row in rows)]
        return f"<table>{''.join(lines)}</table>"


def _line(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
