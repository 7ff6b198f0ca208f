"""Turn the figures of `peer.py` into docs/benchmarks.md: means against goals, then every row.

    python benchmarks/render.py FIGURES.json docs/benchmarks.md

Only ratios are judged: absolute times move with the machine. `raw` is a hand-written loop over
plain dicts doing the same torch operations; `peer` is the library that this one is measured with.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple, TypedDict


class Goal(NamedTuple):
    """The geometric means an area is held to; `None` where there is nothing to compare."""

    kd_raw: float | None
    kd_peer: float | None


GOALS = {
    "construct": Goal(1.7, 0.35),
    "access": Goal(1.1, 0.25),
    "keys": Goal(2.2, 0.20),
    "index": Goal(1.2, 0.50),
    "shape": Goal(1.25, 0.33),
    "combine": Goal(1.4, 0.35),
    "math": Goal(0.85, 0.42),
    "move": Goal(1.0, 0.45),
    "lock": Goal(0.8, 0.5),
    "functional": Goal(0.55, 0.42),
    "nn": Goal(0.90, 0.33),
    "compile": Goal(1.08, 0.60),
    "export": Goal(0.95, 0.6),
    "io": Goal(0.9, 0.40),
    "import": Goal(None, 0.035),
    "memory": Goal(1.45, 0.80),
    "scale": Goal(1.0, 0.60),
}
ALL_AREAS = Goal(1.05, 0.40)
CONTENDERS = ("raw", "tensordict", "kd")

HEAD = """\
# Benchmarks

Written by `nox -s bench`; never edited by hand. The same work by three contenders in one process,
one torch thread, in interleaved rounds: *raw*, a hand-written loop over plain dicts that does the
same torch operations; *peer*, the library `tensordict`; and *kd*. A figure is the minimum over the
rounds. Judge by the ratios: absolute times move with the machine. A row that a contender lacks says
*missing*; a result that differs from the peer's is marked DIFF.

{versions}

## Geometric means against the goals

A ratio below 1 is faster (or smaller) than what stands after the stroke. Rows where raw takes less
than 50 ns do no work to speak of and count in kd/peer only. In the last line areas count alike.

| area | rows | peer/raw | kd/raw | goal | kd/peer | goal | |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |
"""


class Row(TypedDict):
    """One line of `peer.py`: its figures by contender, and the ratios of their minima."""

    area: str
    row: str
    unit: str
    results: dict[str, dict[str, float] | None]
    notes: list[str]
    td_raw: float | None
    kd_raw: float | None
    kd_td: float | None


class Figures(TypedDict):
    """What `peer.py --json` writes."""

    versions: dict[str, str]
    rounds: int
    rows: list[Row]
    geomeans: dict[str, list[float | None]]
    overall: list[float | None]


def number(value: float | None, digits: str = ".2f") -> str:
    """Return `value` for a table cell, a dash where there is none."""
    return "-" if value is None else format(value, digits)


def verdict(means: list[float | None], goal: Goal) -> str:
    """Say whether both means hold their goals, or that one of them could not be taken."""
    pairs = [
        (mean, limit) for mean, limit in zip(means[1:], goal, strict=True) if limit is not None
    ]
    if any(mean is None for mean, _ in pairs):
        return "not measured"
    return "held" if all(mean is not None and mean <= limit for mean, limit in pairs) else "missed"


def mean_line(name: str, count: int, means: list[float | None], goal: Goal) -> str:
    """Return the line of one area in the table of means."""
    cells = [
        name,
        str(count),
        number(means[0]),
        number(means[1]),
        number(goal.kd_raw, "g"),
        number(means[2]),
        number(goal.kd_peer, "g"),
        verdict(means, goal),
    ]
    return "| " + " | ".join(cells) + " |"


def figure(row: Row, contender: str) -> str:
    """Return the minimum that `contender` reached in `row`, with its unit."""
    result = row["results"].get(contender)
    return f"{result['min']:.4g} {row['unit']}" if result else "missing"


def row_line(row: Row) -> str:
    """Return the line of one row in the table of its area."""
    # A row's name is shown as code, in which only the stroke of a table needs care.
    cells = ["`" + row["row"].replace("|", "\\|") + "`"]
    cells += [figure(row, contender) for contender in CONTENDERS]
    cells += [number(row["td_raw"]), number(row["kd_raw"]), number(row["kd_td"])]
    # Only a difference in results is worth a reader's while; why a row is missing is not.
    cells.append("DIFF" if any(note.startswith("DIFF") for note in row["notes"]) else "")
    return "| " + " | ".join(cells) + " |"


def render(figures: Figures) -> str:
    """Return the whole page."""
    names = figures["versions"] | {"rounds": str(figures["rounds"])}
    versions = ", ".join(f"{name} {value}" for name, value in names.items())
    areas = {
        area: [r for r in figures["rows"] if r["area"] == area] for area in figures["geomeans"]
    }
    lines = [
        mean_line(area, len(rows), figures["geomeans"][area], GOALS[area])
        for area, rows in areas.items()
    ]
    lines.append(mean_line("**all**", len(figures["rows"]), figures["overall"], ALL_AREAS))
    for area, rows in areas.items():
        lines += ["", f"## {area}", ""]
        lines.append("| row | raw | peer | kd | peer/raw | kd/raw | kd/peer | |")
        lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
        lines += [row_line(row) for row in rows]
    return HEAD.format(versions=f"*{versions}*") + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, page = map(Path, sys.argv[1:])
    page.write_text(render(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {page}")
