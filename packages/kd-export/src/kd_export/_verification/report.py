"""What a comparison found, and the report of several, which prints as a table."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass

from kd_export._schema.json_values import Json
from kd_export._tables import Row, html_table, plain_table

HEADER = ("output", "sizes", "largest difference", "verdict")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output at one set of sizes.

    Attributes:
        output: The wire name.
        sizes: The size of each axis.
        difference: The largest absolute difference.
        ok: Whether every number is within the tolerance.
        note: What else there is to say, or an empty string.

    Example:
        >>> Comparison("y", {"batch": 2}, difference=0.0, ok=True).ok
        True
    """

    output: str
    sizes: Mapping[str, int]
    difference: float
    ok: bool
    note: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What a verification found; it prints as a table.

    Attributes:
        path: The file.
        rows: The comparisons made.

    Example:
        >>> print(Report("policy.onnx", (Comparison("y", {"batch": 2}, 1e-7, ok=True),)))
        policy.onnx
        output  sizes    largest difference  verdict
        y       batch=2  1e-07               ok
    """

    path: str
    rows: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether something was compared, and all of it agreed."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def largest(self) -> float:
        """The largest difference of any output."""
        return max((row.difference for row in self.rows), default=math.nan)

    def to_data(self) -> dict[str, Json]:
        """Return the report as plain data, fit for JSON."""
        rows: list[Json] = [
            {
                "output": row.output,
                "sizes": dict(row.sizes),
                "difference": row.difference if math.isfinite(row.difference) else None,
                "ok": row.ok,
                "note": row.note,
            }
            for row in self.rows
        ]
        return {"path": self.path, "ok": self.ok, "rows": rows}

    def cells(self) -> list[Row]:
        """Return the rows as text, one row for each comparison."""
        return [_cells(row) for row in self.rows]

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.path)}</p>{html_table(HEADER, self.cells())}"

    def __repr__(self) -> str:
        return f"{self.path}\n{plain_table(HEADER, self.cells())}"


def _cells(row: Comparison) -> Row:
    sizes = ", ".join(f"{name}={size}" for name, size in row.sizes.items()) or "fixed"
    verdict = "ok" if row.ok else "MISMATCH"
    return row.output, sizes, f"{row.difference:.3g}", f"{verdict} {row.note}".rstrip()
