"""Rows of tables that tests record, and what prints them at the end of a run.

A test calls ``record_property(TITLE, row)`` with a dict from headers to cells. `conftest.py` prints
one table for each title, so that a lane shows its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kd_export import Report
from kd_export._console import plain_table

Cells = dict[str, str]
Record = Callable[[str, object], None]
POLICIES = "beside each framework's own predict: largest difference by batch"
REDUCTIONS = "files of fewer bits"


def beside_oracle(framework: str, case: str, report: Report) -> Cells:
    """Return how far a policy's file is from its oracle, by batch."""
    rows = [row for row in report.rows if "beside the oracle" in row.note]
    by_batch: dict[int, float] = {}
    for row in rows:
        batch = row.sizes["batch"]
        by_batch[batch] = max(row.difference, by_batch.get(batch, 0.0))
    assert set(by_batch) == {1, 3, 64}
    differences = {f"batch {batch}": f"{most:.2g}" for batch, most in sorted(by_batch.items())}
    return {"framework": framework, "kind": case, **differences}


def reduced(suffix: str, report: Report) -> Cells:
    """Return what a file of fewer bits costs and brings, beside the float file."""
    found = report.reduction
    assert found is not None
    last = found.latencies[-1]
    floats = [one for one in found.outputs if one.agreement is None]
    shares = [one.agreement for one in found.outputs if one.agreement is not None]
    return {
        "format": suffix,
        "precision": found.name,
        "max": f"{max(one.max for one in floats):.2g}",
        "rms": f"{max(one.rms for one in floats):.2g}",
        "equal integers": f"{min(shares):.1%}" if shares else "",
        "bytes": f"{found.bytes:,}",
        "float": f"{found.other_bytes:,}",
        "us": f"{last.seconds * 1e6:,.0f}",
        "float us": f"{last.other * 1e6:,.0f}",
    }


def recorded(reports: list[pytest.TestReport]) -> Iterator[tuple[str, str]]:
    """Iterate over the titles of all recorded tables, each with its table as text."""
    tables: dict[str, list[Cells]] = {}
    for report in reports:
        for title, row in report.user_properties:
            if isinstance(row, dict):
                tables.setdefault(title, []).append(row)
    for title, rows in tables.items():
        header = tuple(rows[0])
        yield title, plain_table(header, [tuple(row[name] for name in header) for row in rows])
