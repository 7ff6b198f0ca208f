"""What a comparison found, and the report of several, which prints as a table."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass

from kd_export._schema.json_values import Json
from kd_export._tables import Row, html_table, plain_table

HEADER = ("output", "sizes", "largest difference", "tolerance", "verdict")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output at one set of sizes.

    Attributes:
        output: The wire name.
        sizes: The size of each axis.
        difference: The largest absolute difference.
        ok: Whether every number is within the tolerance.
        note: What else there is to say, or an empty string.
        rtol: The relative tolerance; ``None`` if no numbers were compared, as for ``atol``.
        atol: The absolute tolerance. A number may differ by ``atol + rtol * abs(expected)``.

    Example:
        >>> Comparison("y", {"batch": 2}, difference=0.0, ok=True).ok
        True
    """

    output: str
    sizes: Mapping[str, int]
    difference: float
    ok: bool
    note: str = ""
    rtol: float | None = None
    atol: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What a verification found; it prints as a table.

    Attributes:
        path: The file.
        rows: The comparisons made.
        notes: What else there is to say, a sentence each.

    Example:
        >>> row = Comparison("y", {"batch": 2}, 1e-7, ok=True, rtol=1e-4, atol=1e-5)
        >>> print(Report("policy.onnx", (row,)))
        policy.onnx
        output  sizes    largest difference  tolerance                       verdict
        y       batch=2  1e-07               1e-05 + 0.0001 * abs(expected)  ok
        tried batch: 2
    """

    path: str
    rows: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of each axis that were tried."""
        found: dict[str, set[int]] = {}
        for row in self.rows:
            for name, size in row.sizes.items():
                found.setdefault(name, set()).add(size)
        return {name: tuple(sorted(sizes)) for name, sizes in found.items()}

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
                "rtol": row.rtol,
                "atol": row.atol,
                "ok": row.ok,
                "note": row.note,
            }
            for row in self.rows
        ]
        sizes: Json = {name: list(tried) for name, tried in self.sizes.items()}
        notes: Json = list(self.notes)
        return {"path": self.path, "ok": self.ok, "rows": rows, "sizes": sizes, "notes": notes}

    def lines(self) -> list[str]:
        """Return what stands below the table: the sizes that were tried, and the notes."""
        sizes = [
            f"tried {name}: {', '.join(map(str, tried))}" for name, tried in self.sizes.items()
        ]
        return [*sizes, *(f"note: {note}" for note in self.notes)]

    def cells(self) -> list[Row]:
        """Return the rows as text, one row for each comparison."""
        return [_cells(row) for row in self.rows]

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self.lines())
        return f"<p>{html.escape(self.path)}</p>{html_table(HEADER, self.cells())}{lines}"

    def __repr__(self) -> str:
        return "\n".join([self.path, plain_table(HEADER, self.cells()), *self.lines()])


def _cells(row: Comparison) -> Row:
    sizes = ", ".join(f"{name}={size}" for name, size in row.sizes.items()) or "fixed"
    verdict = "ok" if row.ok else "MISMATCH"
    allowed = "" if row.rtol is None else f"{row.atol:.3g} + {row.rtol:.3g} * abs(expected)"
    return row.output, sizes, f"{row.difference:.3g}", allowed, f"{verdict} {row.note}".rstrip()
