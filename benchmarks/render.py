"""Write docs/benchmarks.md, its plot and the table of README.md from benchmarks/figures.json.

    python -m benchmarks.render           write the pages from the stored figures
    python -m benchmarks.render PEER.json COSTS.json PROGRAMS.json
                                          store new figures first, then write
    python -m benchmarks.render --check   only compare the pages; 1 if one is stale

Every figure of the documentation comes from here, so that all of them are of one run. Only ratios
are judged: absolute times change with the machine.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.figures import (
    CONTENDERS,
    Costs,
    Figures,
    Gpu,
    Peer,
    Programs,
    Row,
    area_rows,
    figure,
    found,
    lean,
    number,
    ratios_of,
    stored,
)
from benchmarks.front import readme
from benchmarks.slower import SLOWER_HEAD, table_of_slower

ROOT = Path(__file__).resolve().parents[1]


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
PROGRAMS_BY_HAND, PROGRAMS_BY_PEER, PROGRAMS_OWN = 1.03, 0.75, 0.05
FLOOR_GOAL = 1.1


HEAD = """\
# Benchmarks

`nox -s bench` writes this page; do not edit it by hand. It runs the same work with three contenders
in one process, with one torch thread, in interleaved rounds:

- *raw*: a hand-written loop over plain dicts that calls the same torch operations; for modules
  `nn.Sequential`
- *peer*: the library `tensordict`
- *kd*
- *floor*, for rows of areas whose goal is missed: the shortest correct code for that row, a
  container and modules of its own (`benchmarks/floor.py`, `floor_modules.py`, `floor_store.py`). It
  keeps the promises that the row relies on, which raw does not: keys are strings, shapes fit the
  batch size, a write changes all leaves or none. For an import it executes
  the same modules from one piece of bytecode in memory, without files (`floor_import.py`)

A figure is the minimum over the rounds. Compare ratios: absolute times change with the machine.

*{machine}; {versions}*

![Geometric mean time of each area relative to hand-written loops](images/benchmarks.svg)

## Geometric means and goals

A ratio below 1 is faster (or smaller) than the contender after the slash. Each area has two goals,
which were set from prototypes before the code was written and do not move. *held* means that both
means are at or below their goals; *missed* means that at least one of them is above, not that kd is
slower than the peer. kd/raw leaves out rows where raw takes less than 50 ns: there is no work to
compare with. The last line counts every area once.

| area | rows | peer/raw | kd/raw | goal | kd/peer | goal | |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |
"""

DESIGNS_HEAD = """
## Designs and their rows

[The design](design.md) says how kd is fast in words. These rows show each of its points.

| design | row | kd | kd/raw | kd/peer |
| --- | --- | ---: | ---: | ---: |
"""

# A point of docs/design.md, section "What carries the speed", and the rows that show it.
DESIGNS = (
    ("shared descriptors", ("memory", "Python bytes, empty"), ("construct", "empty")),
    ("plain dict of entries", ("access", "td['a']"), ("access", "list(keys())")),
    ("one check loop", ("construct", "128 leaves"), ("construct", "nested, 3 leaves")),
    ("arguments resolved once", ("shape", "reshape"), ("shape", "unsqueeze(0)")),
    ("one index plan for all leaves", ("index", "td[0]"), ("index", "td[mask]")),
    ("foreach kernels and constants", ("math", "td + 1, 3"), ("math", "td + 1, 128")),
    ("checked before the first write", ("math", "update_, 16"), ("math", "copy_, 16")),
    ("lazy stacks", ("combine", "lazy_stack 8"), ("combine", "lazy_stack[3]")),
    ("plans", ("nn", "tutorial Sequential(x=x)"), ("nn", "10 layers, (x=x)")),
    ("parameters swapped in", ("functional", "call with params"), ("functional", "from_module")),
    (
        "one pytree node",
        ("functional", "vmap over 3 sets"),
    ),
    (
        "short traces",
        ("compile", "seq td: first call, eager backend"),
        ("compile", "seq td: per call, eager backend"),
    ),
    (
        "few guards",
        ("compile", "ops: per call, eager backend"),
    ),
    (
        "straight-line runner",
        ("export", "exported model, own runner, per call"),
    ),
    (
        "lazy imports",
        ("import", "import beyond torch, wall"),
    ),
)

PROGRAMS_HEAD = """
## Whole programs

The programs of `examples/learning`, beside the same by hand on plain dicts, and beside the same
text with the imports of the peer. All contenders compute the same losses; a figure is CPU time.

The goals are {by_hand} for kd/hand and {by_peer} for kd/peer. Hand-written code takes {mean} of the
time of the peer, {least} to {most} in single programs, because most of the time is spent in torch.
So it is the floor of kd/peer: the goal is {by_peer} or {over} times hand/peer, whichever is larger,
which is {allowed} for the mean.

*own* is the share of the time of a profile that is spent in the functions of kd and in what they
call of Python, with the share of the peer after it. A profile charges for each call, so it is an
upper limit. Its goal is {own}.

| program | by hand | peer | kd | kd/hand | kd/peer | hand/peer | | own | own, peer |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: |
"""

# Measured once, by hand: `nox -s bench` does not write these rows.
PROGRAM_PARTS = """
### Where the time of the worst goes

What runs in a step of four programs that missed their goal, in microseconds of CPU time: the
minimum of many short rounds in turns, in one process with one thread, on a busy machine. `team` is
left out: none of its parts could be told from noise.

| program | what runs | by hand | kd | what the work needs of it |
| --- | --- | ---: | ---: | --- |
| `dqn` | play: a container, forward, another | 217 | 220 | all |
| `dqn` | write 16 rows of 6 leaves | 22 | 50 | one write a leaf; checks before the first are 12 |
| `dqn` | read 128 rows of 6 leaves | 30 | 28 | all |
| `dqn` | forward with the target parameters | 52 | 81 | a `Parameter` for each of 6 tensors is 7 |
| `dqn` | forward with gradients, and the action taken | 61 | 54 | all |
| `dqn` | loss, gradients and optimizer | 636 | 676 | all but the two above |
| `evolution` | `vmap` of the identity, of 4 leaves | 47 | 78 | no tree of zeros |
| `evolution` | `vmap` of the forward with other parameters | 174 | 190 | all |
| `evolution` | one step of all candidates | 376 | 402 | all but the tree of zeros |
| `world_model` | one step of the model | 220 | 247 | all; the model alone is 172 in both |
| `world_model` | 16 steps taken apart | 24 | 51 | the entries that are read, not containers |
| `world_model` | 16 steps stacked | 109 | 115 | all |
| `decisions` | 5 leaves read at two tensors | 97 | 182 | a read a leaf, and a batch size |

Parts take longer in the running program, where other code runs between two calls: the write of
`dqn` takes 88 there, and its loss 302 (by hand 240). A tensor without gradients that takes the
place of a parameter becomes one, as in the peer, each time.
"""

GPU_HEAD = """
## On a GPU

Runs of `nox -s gpu` on one {card}, with {versions}. A figure is the time in microseconds until the
GPU is done, programs included; rows with a star are of an earlier run. The goals are {by_hand} for
kd/hand and {by_peer} for kd/peer. Between runs, figures of one contender differ by up to 20 %.

A move to the CPU of up to 256 MiB ends in pinned memory and waits once, as the peer does it. A
write in place first asks whether leaves overlap, as a GPU writes all of them at once: 53 us for 128
leaves, 103 for 128 pairs. It also asks whether each can be written, so that an error changes
nothing.

| what | by hand | peer | kd | kd/hand | kd/peer | missed |
| --- | ---: | ---: | ---: | ---: | ---: | --- |
"""
GPU_BY_HAND, GPU_BY_PEER = 1.03, 0.80

COSTS_HEAD = """
## What calls cost

Why the code prefers one call to another that does the same. `nox -s bench` times both.

| kd uses | ns | instead of | ns | where |
| --- | ---: | --- | ---: | --- |
"""

CHECKS_HEAD = """
## What correctness costs

What methods do besides their work, how long that takes, and what would go wrong without it.

| in the rows | done once for each | ns | prevents |
| --- | --- | ---: | --- |
"""

FLOORS_HEAD = """
## Floors

Where a goal is below what correct code can do, the goal of a row is 1.1 times its floor. A ratio
below 1 means that kd is faster than the shortest code. The rows above their goal follow; the table
after them says what kd does there that the floor does not.

| area | rows with a floor | kd/floor | at their goal |
| --- | ---: | ---: | ---: |
"""
ABOVE_HEAD = """
What happens once for each model has a goal of its own, which is counted in times of the peer.

| above the goal | kd | floor | kd/floor | kd/peer | own goal | |
| --- | ---: | ---: | ---: | ---: | ---: | --- |
"""
OWN_GOALS: Final = {("nn", "build 3 layers"): 2.0, ("nn", "build 10 layers"): 2.0}
"""The largest kd/peer of rows that are not called again and again."""

ROWS_NOTE = """\
*missing*: a contender does not offer the feature. *DIFF*: the result of kd is not the peer's."""


def verdict(means: list[float | None], goal: Goal) -> str:
    """Return whether both means hold their goals, or that one of them was not measured."""
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


def floor_cells(row: Row) -> list[str]:
    """Return the floor of a row, and how kd compares with it; dashes where there is none."""
    over = row.get("kd_floor")
    return ["-", "-"] if over is None else [figure(row, "floor"), number(over)]


def row_line(row: Row) -> str:
    """Return the line of one row in the table of its area."""
    # A row's name is shown as code, in which only the stroke of a table needs care.
    cells = ["`" + row["row"].replace("|", "\\|") + "`"]
    cells += [figure(row, contender) for contender in CONTENDERS]
    cells += [number(row["td_raw"]), number(row["kd_raw"]), number(row["kd_td"])]
    cells += floor_cells(row)
    # Only a difference in results is worth a reader's while; why a row is missing is not.
    cells.append("DIFF" if any(note.startswith("DIFF") for note in row["notes"]) else "")
    return "| " + " | ".join(cells) + " |"


def table_of_means(peer: Peer) -> list[str]:
    """Return the lines of the table of means."""
    counts = {area: len(rows) for area, rows in area_rows(peer).items()}
    means = peer["geomeans"]
    lines = [mean_line(area, counts[area], means[area], GOALS[area]) for area in means]
    total = sum(counts[area] for area in means)
    return [*lines, mean_line("**all**", total, peer["overall"], ALL_AREAS)]


def table_of_designs(peer: Peer) -> list[str]:
    """Return the lines of the table of designs."""
    lines = []
    for design, *names in DESIGNS:
        for area, name in names:
            row = found(peer, area, name)
            if row is not None:
                cells = [design, f"{area}: `{name}`", figure(row, "kd")]
                cells += [number(row["kd_raw"]), number(row["kd_td"])]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def table_of_costs(costs: Costs) -> list[str]:
    """Return the lines of the table of costs."""
    return [
        f"| `{row['fast']}` | {row['fast_ns']:.0f} | `{row['slow']}` | {row['slow_ns']:.0f} "
        f"| {row['used_in']} |"
        for row in costs["rows"]
    ]


def table_of_checks(costs: Costs) -> list[str]:
    """Return the lines of the table of checks."""
    return [
        f"| {row['rows']} | {row['each']}: `{row['statement']}` | {row['ns']:.0f} "
        f"| {row['prevents']} |"
        for row in costs["checks"]
    ]


def program_cells(name: str, seconds: list[str], ratios: list[float]) -> list[str]:
    """Return the cells of a program: the goal for kd/peer is not below what is done by hand."""
    by_hand, by_peer, floor = ratios
    held = by_hand <= PROGRAMS_BY_HAND and by_peer <= program_goal(floor)
    return [name, *seconds, *map(number, ratios), "held" if held else "missed"]


def program_goal(hand_by_peer: float) -> float:
    """Return the goal for kd/peer: that of all programs, or that of their floor."""
    return max(PROGRAMS_BY_PEER, FLOOR_GOAL * hand_by_peer)


def table_of_programs(programs: Programs) -> list[str]:
    """Return the lines of the table of programs."""
    rows = []
    for name, took in programs.items():
        seconds = [f"{took[who]:.3f} s" for who in ("by hand", "peer", "kd")]
        cells = program_cells(f"`{name}`", seconds, ratios_of({name: took}))
        rows.append([*cells, *(f"{took[who]:.0%}" for who in ("kd own", "peer own"))])
    rows.append([*program_cells("**geometric mean**", ["", "", ""], ratios_of(programs)), "", ""])
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def table_of_gpu(gpu: Gpu) -> list[str]:
    """Return the lines of the table of a GPU."""
    rows = []
    for name, took in gpu["rows"].items():
        ratios = {"kd/hand": took["kd"] / took["by hand"], "kd/peer": took["kd"] / took["peer"]}
        goals = {"kd/hand": GPU_BY_HAND, "kd/peer": GPU_BY_PEER}
        missed = [each for each, goal in goals.items() if round(ratios[each], 2) > goal]
        star = " \\*" if name in gpu["earlier"] else ""
        cells = [f"{took[who]:.0f}" for who in ("by hand", "peer", "kd")]
        cells += [number(ratio) for ratio in ratios.values()]
        rows.append(f"| {name}{star} | {' | '.join(cells)} | {', '.join(missed)} |")
    return rows


def programs_head(programs: Programs) -> str:
    """Return the text above the table of programs."""
    each = [ratios_of({name: took})[2] for name, took in programs.items()]
    mean = ratios_of(programs)[2]
    return PROGRAMS_HEAD.format(
        by_hand=number(PROGRAMS_BY_HAND),
        by_peer=number(PROGRAMS_BY_PEER),
        mean=number(mean),
        least=number(min(each)),
        most=number(max(each)),
        over=FLOOR_GOAL,
        own=f"{PROGRAMS_OWN:.0%}",
        allowed=number(program_goal(mean)),
    )


def table_of_floors(peer: Peer) -> list[str]:
    """Return the lines of the table of floors."""
    lines = []
    for area, rows in area_rows(peer).items():
        overs = [over for row in rows if (over := row.get("kd_floor")) is not None]
        if overs:
            held = sum(over <= FLOOR_GOAL for over in overs)
            mean = number(statistics.geometric_mean(overs))
            lines.append(f"| {area} | {len(overs)} | {mean} | {held} |")
    return lines


def table_above_floors(peer: Peer) -> list[str]:
    """Return the lines of the table of rows that miss the goal of their floor."""
    lines = []
    for area, rows in area_rows(peer).items():
        for row in rows:
            over = row.get("kd_floor")
            if over is not None and over > FLOOR_GOAL:
                cells = [f"{area}: `{row['row']}`", figure(row, "kd"), *floor_cells(row)]
                cells += [number(row["kd_td"]), *own_goal_cells(area, row)]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def own_goal_cells(area: str, row: Row) -> list[str]:
    """Return the goal that a row has beside its floor, and whether kd holds it."""
    goal, by_peer = OWN_GOALS.get((area, row["row"])), row["kd_td"]
    if goal is None or by_peer is None:
        return ["-", ""]
    return [number(goal), "held" if by_peer <= goal else "missed"]


def page(figures: Figures, gpu: Gpu | None = None) -> str:
    """Return docs/benchmarks.md; `gpu` are the figures of the last run on a GPU."""
    peer, costs = figures["peer"], figures["costs"]
    machine = "CPU {cpu}, {cores} cores, {system}".format(**costs["machine"])
    names = peer["versions"] | {"rounds": str(peer["rounds"])}
    versions = ", ".join(f"{name} {value}" for name, value in names.items())
    text = HEAD.format(machine=machine, versions=versions) + "\n".join(table_of_means(peer)) + "\n"
    programs = figures["programs"]
    text += programs_head(programs) + "\n".join(table_of_programs(programs)) + "\n"
    text += PROGRAM_PARTS
    if gpu is not None:
        head = {"by_hand": number(GPU_BY_HAND), "by_peer": number(GPU_BY_PEER)}
        text += GPU_HEAD.format(card=gpu["card"], versions=gpu["versions"], **head)
        text += "\n".join(table_of_gpu(gpu)) + "\n"
    text += DESIGNS_HEAD + "\n".join(table_of_designs(peer)) + "\n"
    floors = table_of_floors(peer)
    text += FLOORS_HEAD + "\n".join(floors) + "\n" if floors else ""
    above = table_above_floors(peer)
    text += ABOVE_HEAD + "\n".join(above) + "\n" if above else ""
    slower = table_of_slower(peer)
    text += SLOWER_HEAD + "\n".join(slower) + "\n" if slower else ""
    text += CHECKS_HEAD + "\n".join(table_of_checks(costs)) + "\n"
    text += COSTS_HEAD + "\n".join(table_of_costs(costs)) + "\n"
    lines = ["", "## All rows", "", ROWS_NOTE]
    for area, rows in area_rows(peer).items():
        lines += ["", f"### {area}", ""]
        lines.append("| row | raw | peer | kd | peer/raw | kd/raw | kd/peer | floor | kd/floor | |")
        lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
        lines += [row_line(row) for row in rows]
    return text + "\n".join(lines) + "\n"


def pages(root: Path) -> dict[Path, str]:
    """Return each page that holds figures, and what it should be."""
    source = (root / "benchmarks" / "figures.json").read_text(encoding="utf-8")
    figures: Figures = json.loads(source)
    gpu: Gpu = json.loads((root / "benchmarks" / "figures_gpu.json").read_text(encoding="utf-8"))
    front = root / "README.md"
    return {
        root / "docs" / "benchmarks.md": page(figures, gpu),
        front: readme(front.read_text(encoding="utf-8"), figures["peer"], figures["programs"]),
    }


def stale(root: Path) -> list[str]:
    """Return the pages that are not what the stored figures say."""
    return [path.name for path, text in pages(root).items() if path.read_text("utf-8") != text]


def write(root: Path) -> None:
    """Write the pages and the plot from the stored figures."""
    from benchmarks.plot import draw  # needs matplotlib, which --check does not

    for path, text in pages(root).items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(root)}")
    peer = json.loads((root / "benchmarks" / "figures.json").read_text(encoding="utf-8"))["peer"]
    picture = root / "docs" / "images" / "benchmarks.svg"
    draw(peer["geomeans"], peer["overall"], picture)
    print(f"wrote {picture.relative_to(root)}")


def main() -> None:
    """Run the command: store, write or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("new", nargs="*", type=Path, metavar="FILE", help="PEER, COSTS, PROGRAMS")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository to write into")
    options = parser.parse_args()
    if len(options.new) not in (0, 3):
        parser.error(f"expected the files PEER, COSTS and PROGRAMS, got {len(options.new)}")
    if options.check:
        old = stale(options.root)
        sys.exit(f"stale: {', '.join(old)}. Run `python -m benchmarks.render`" if old else 0)
    if options.new:
        peer, costs, programs = (json.loads(path.read_text("utf-8")) for path in options.new)
        text = stored({"peer": lean(peer), "costs": costs, "programs": programs})
        (options.root / "benchmarks" / "figures.json").write_text(text, encoding="utf-8")
    write(options.root)


if __name__ == "__main__":
    main()
