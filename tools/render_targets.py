"""Write the page "Targets": trained policies and architectures in every format.

    python tools/render_targets.py [--targets .pt2 .onnx ...] [--left] [--seconds 300] [NAME ...]

Each is exported and verified in each format by `kd_export.diagnose`: a policy beside its
framework's own `predict`, an architecture beside the module. It needs the packages of the lanes
`policies` and `models`, and of the formats; what cannot be imported is left as it was, so that
formats whose packages clash are run in turn, each where it is installed. A worker does the work,
so that a crash or a hang costs one cell.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from tests.models.architectures import Case
    from tests.models.libraries import Library

    from kd_export.policies import Policy

ROOT = Path(__file__).parent.parent
PAGE = Path("docs/reference/targets.md")
START, END = "<!-- {}: start -->\n", "<!-- {}: end -->\n"
BAR = r"\|"
TARGETS = (".pt2", ".onnx", ".c", ".xml", ".pte", ".tflite", ".aoti.pt2")
POLICIES = {
    "stable_baselines3": (
        *("ppo box normalised", "ppo discrete", "ppo multi normalised", "ppo images last"),
        *("ppo dict normalised", "ppo gsde squashed", "sac normalised", "dqn box"),
        *("recurrent box", "recurrent images"),
    ),
    "rsl_rl": ("mlp gaussian", "mlp beta", "lstm", "images"),
    "skrl": ("gaussian clipped", "multi-categorical", "gru"),
    "rl_games": ("continuous", "multi-discrete", "lstm"),
    "tianshou": ("ppo tanh", "sac"),
    "torchrl": ("tanh normal", "one hot", "lstm", "transforms"),
}
"""26 cases of `tests/policies` that cover each framework and each kind once or more."""
MISSING = ""
"""The verdict where something is not installed."""
IN_OTHER_TABLE = ("PPO", "SAC", "DQN", "RecurrentPPO")
"""Policies among the architectures, which the table of policies has whole."""


class Cell(NamedTuple):
    """What became of a subject in a format: a difference, or a refusal in words."""

    subject: str
    target: str
    verdict: str
    message: str


def subjects(kind: str) -> list[str]:
    """Return the names of the policies or of the architectures."""
    if kind == "policies":
        return [f"{framework}: {case}" for framework, cases in POLICIES.items() for case in cases]
    return sorted(case.name for case in architectures() if case.name not in IN_OTHER_TABLE)


def architectures() -> list[Case | Library]:
    """Return the architectures, none where their libraries are not installed."""
    try:
        from tests.models.architectures import CASES
        from tests.models.libraries import LIBRARIES
    except pytest.skip.Exception:
        return []
    return [*CASES, *LIBRARIES]


def policy_of(framework: str, case: str) -> Policy:
    """Return a policy of the tests."""
    module = importlib.import_module(f"tests.policies.test_{framework}")
    if framework == "stable_baselines3":
        found: Policy = module.from_sb3(module.model_of(case))
    else:
        found = module.CASES[case]()
    return found


def tried(subject: str, target: str) -> Cell:
    """Export a subject in one format, at sizes that the format allows."""
    import torch

    import kd_export

    torch.manual_seed(0)
    framework, _, name = subject.rpartition(": ")
    if framework:
        policy, most = policy_of(framework, name), {".pte": 64, ".tflite": 3}.get(target)
        ranges = {"batch": (1, most)}
        found = kd_export.diagnose(policy, targets=[target], dynamic=ranges)
    else:
        (case,) = [case for case in architectures() if case.name == name]
        shapes = dict(case.shapes)
        if target == ".pte":
            named = {
                axis for dims in shapes.values() if isinstance(dims, dict) for axis in dims.values()
            }
            shapes |= {axis: (1, 32) for axis in named if axis not in shapes}
        dynamic = None if target in (".c", ".tflite") else shapes
        found = kd_export.diagnose(case.module(), case.example, targets=[target], dynamic=dynamic)
    (row,) = found.rows
    if row.ok:
        return Cell(subject, target, row.message.removeprefix("largest difference "), "")
    if isinstance(row.error, kd_export.BackendMissing):
        return Cell(subject, target, MISSING, row.message)
    told = row.message.partition("\n")[0]
    if isinstance(row.error, kd_export.VerifyError) and isinstance(row.error.got, float):
        told += f" The largest difference is {row.error.got:.3g}."
    return Cell(subject, target, "refused", told)


def work(pipe: Connection) -> None:
    """Answer with a cell for each subject and format that comes in."""
    warnings.simplefilter("ignore")
    while True:
        subject, target = pipe.recv()
        try:
            pipe.send(tried(subject, target))
        except (ImportError, pytest.skip.Exception) as error:
            pipe.send(Cell(subject, target, MISSING, str(error)))
        except Exception as error:  # whatever it is, it is no refusal of ours
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            pipe.send(Cell(subject, target, "fails", said))


class Worker:
    """A process that is replaced when it crashes, or takes too long for one cell."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.process: multiprocessing.context.SpawnProcess | None = None

    def ask(self, subject: str, target: str) -> Cell:
        """Return what became of a subject in a format."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send((subject, target))
        try:
            if self.pipe.poll(self.seconds):
                cell: Cell = self.pipe.recv()
                return cell
            verdict, message = "fails", f"not done in {self.seconds:g} s"
        except EOFError:
            verdict, message = "fails", "the process crashes"
        self.process.kill()
        self.process.join()
        self.process = None
        return Cell(subject, target, verdict, message)


def line(cells: Sequence[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def rows_of(page: str, table: str) -> dict[str, list[str]]:
    """Return the rows of a table of the page, by their first cell."""
    part = page.partition(START.format(table))[2].partition(END.format(table))[0]
    lines = [row[2:-2].split(" | ") for row in part.splitlines() if row.startswith("| ")]
    cells = [[cell.replace(BAR, "|") for cell in row] for row in lines[2:]]
    return {name: rest for name, *rest in cells}


def has_number(page: str, kind: str, subject: str, target: str) -> bool:
    """Decide whether a cell holds a difference."""
    row = rows_of(page, kind).get(subject)
    return row is not None and row[TARGETS.index(target)][:1].isdigit()


def placed(page: str, table: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the page with another content of a table."""
    head, start, rest = page.partition(START.format(table))
    _, end, tail = rest.partition(END.format(table))
    lines = [line(header), line(["---"] * len(header)), *map(line, rows)]
    return "\n".join([head + start, *lines, "", end + tail])


def rendered(page: str, kind: str, cell: Cell) -> str:
    """Return the page with one more cell, and what was said of a refusal below."""
    known = rows_of(page, kind)
    row = known.setdefault(cell.subject, [""] * len(TARGETS))
    row[TARGETS.index(cell.target)] = cell.verdict
    page = placed(page, kind, (kind, *TARGETS), [(name, *known[name]) for name in known])
    key = f"{cell.subject} in `{cell.target}`"
    said = rows_of(page, "refusals")
    said.pop(key, None)
    if cell.message:
        said[key] = [cell.message]
    return placed(
        page, "refusals", ("refused", "what kd_export says"), [(k, *said[k]) for k in sorted(said)]
    )


def main() -> None:
    """Try the subjects and write the page, cell by cell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--left", action="store_true", help="those that have no number yet")
    parser.add_argument("--seconds", type=float, default=300)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    worker = Worker(given.seconds)
    path = ROOT / PAGE
    for target in given.targets:
        for kind in ("policies", "architectures"):
            for subject in subjects(kind):
                if given.names and not any(name in subject for name in given.names):
                    continue
                if given.left and has_number(path.read_text("utf-8"), kind, subject, target):
                    continue
                cell = worker.ask(subject, target)
                print(*cell, sep="\t", flush=True)
                if cell.verdict == MISSING:
                    continue
                path.write_text(rendered(path.read_text("utf-8"), kind, cell), "utf-8")


if __name__ == "__main__":
    main()
