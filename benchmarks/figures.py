"""The figures of one run: benchmarks/figures.json, as types, and what tables show of them."""

import json
import statistics
from typing import NotRequired, TypeAlias, TypedDict

CONTENDERS = ("raw", "tensordict", "kd")


class Row(TypedDict):
    """One row of `peer.py`: its minima by contender, and their ratios."""

    area: str
    row: str
    unit: str
    results: dict[str, dict[str, float] | None]
    notes: list[str]
    td_raw: float | None
    kd_raw: float | None
    kd_td: float | None
    kd_floor: NotRequired[float | None]


class Peer(TypedDict):
    """What `peer.py --json` writes."""

    versions: dict[str, str]
    rounds: int
    rows: list[Row]
    geomeans: dict[str, list[float | None]]
    overall: list[float | None]


class Cost(TypedDict):
    """One row of `costs.py`."""

    fast: str
    slow: str
    used_in: str
    fast_ns: float
    slow_ns: float


class Checked(TypedDict):
    """One check of `costs.py`."""

    statement: str
    each: str
    rows: str
    prevents: str
    ns: float


class Costs(TypedDict):
    """What `costs.py --json` writes."""

    machine: dict[str, str | int]
    rows: list[Cost]
    checks: list[Checked]


Programs: TypeAlias = dict[str, dict[str, float]]
"""Seconds of each program by contender: what `benchmarks.programs --json` writes."""


class Figures(TypedDict):
    """All figures of one run: benchmarks/figures.json."""

    peer: Peer
    costs: Costs
    programs: Programs


class Gpu(TypedDict):
    """The last run of `benchmarks/gpu.py`: benchmarks/figures_gpu.json.

    Keys:
        card: The name of the GPU.
        versions: What it ran with.
        earlier: The rows that an earlier run on such a card gave.
        rows: By row and contender, the time in microseconds.
    """

    card: str
    versions: str
    earlier: list[str]
    rows: dict[str, dict[str, float]]


def number(value: float | None, digits: str = ".2f") -> str:
    """Return `value` for a table cell, a dash where there is none."""
    return "-" if value is None else format(value, digits)


def figure(row: Row, contender: str) -> str:
    """Return the minimum that `contender` reached in `row`, with its unit."""
    result = row["results"].get(contender)
    return f"{result['min']:.4g} {row['unit']}" if result else "missing"


def area_rows(peer: Peer) -> dict[str, list[Row]]:
    """Return the rows of each area, in the order of the benchmark."""
    areas: dict[str, list[Row]] = {}
    for row in peer["rows"]:
        areas.setdefault(row["area"], []).append(row)
    return areas


def is_slower(row: Row) -> bool:
    """Return whether kd takes more than the peer in a row, by half a percent at least."""
    return (row["kd_td"] or 0) > 1.005


def found(peer: Peer, area: str, name: str) -> Row | None:
    """Return one row, or None if this run left it out."""
    rows = (row for row in peer["rows"] if (row["area"], row["row"]) == (area, name))
    return next(rows, None)


def ratios_of(programs: Programs) -> list[float]:
    """Return the geometric means of kd/hand, kd/peer and hand/peer."""
    pairs = ("kd", "by hand"), ("kd", "peer"), ("by hand", "peer")
    return [
        statistics.geometric_mean([took[one] / took[other] for took in programs.values()])
        for one, other in pairs
    ]


def lean(peer: Peer) -> Peer:
    """Return the figures without what no page shows: medians, and notes that name local paths."""
    for row in peer["rows"]:
        row["notes"] = [note for note in row["notes"] if note.startswith("DIFF")]
        row["results"] = {
            name: result and {"min": result["min"]} for name, result in row["results"].items()
        }
    return peer


def stored(figures: Figures) -> str:
    """Return the text of figures.json, one row a line."""
    rows = figures["peer"]["rows"]
    outer: dict[str, object] = {**figures["peer"], "rows": []}
    text = json.dumps({**figures, "peer": outer}, indent=1)
    lines = ",\n".join("   " + json.dumps(row) for row in rows)
    return text.replace('"rows": []', f'"rows": [\n{lines}\n  ]', 1) + "\n"
