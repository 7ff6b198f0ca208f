"""Whether a module can be exported, format by format, and what stands in the way."""

from __future__ import annotations

import html
from dataclasses import dataclass

from kd_export._errors import ExportError
from kd_export._schema.json_values import Json
from kd_export._tables import Row, html_table, plain_table

HEADER = ("format", "verdict", "what there is to say")


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a module works in one format.

    Attributes:
        target: The suffix of the format, or ``"export"`` if no format was reached.
        message: The largest difference from the module, or what stands in the way.
        error: The error, whose ``key`` and ``hint`` a program may read; ``None`` if all is well.

    Example:
        >>> Finding(".onnx", "largest difference 1e-07").ok
        True
    """

    target: str
    message: str
    error: ExportError | None = None

    @property
    def ok(self) -> bool:
        """Whether the module was written in this format and verified."""
        return self.error is None


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """Whether a module works in each format; it prints as a table.

    Attributes:
        rows: The findings, one for each format.
        notes: What was mended on the way, a sentence each.

    Example:
        >>> print(Diagnosis((Finding(".pt2", "largest difference 0"),)))
        format  verdict  what there is to say
        .pt2    ok       largest difference 0
    """

    rows: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every format was written and verified."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def cells(self) -> list[Row]:
        """Return the rows as text; of a message its first line."""
        return [
            (row.target, "ok" if row.ok else "REFUSED", row.message.partition("\n")[0])
            for row in self.rows
        ]

    def to_data(self) -> dict[str, Json]:
        """Return the findings as plain data, fit for JSON."""
        rows: list[Json] = [
            {"target": row.target, "ok": row.ok, "message": row.message} for row in self.rows
        ]
        return {"ok": self.ok, "rows": rows, "notes": list(self.notes)}

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in self.notes)
        return html_table(HEADER, self.cells()) + notes

    def __repr__(self) -> str:
        table = plain_table(HEADER, self.cells())
        return "\n".join([table, *(f"note: {note}" for note in self.notes)])
