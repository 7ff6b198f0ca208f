"""Time whole programs on three contenders: by hand, with the peer, with kd.

    python -m benchmarks.programs [--only ppo] [--rounds 5] [--json PROGRAMS.json]
    python -m benchmarks.programs --against COMMIT [--only ppo] [--rounds 5]

kd runs a program of `examples/learning`, hand-written code its twin in `benchmarks/programs`, and
the peer the text of the example with other import lines and plain access to nested entries. All run
in one process, one thread, in turns; a figure is the minimum of the CPU time over the rounds, that
of workers included. A program counts only if all losses and parameters are equal.

Two more figures are taken once. *own* is the share of the time of a profile that is spent in the
functions of the library and in what they call of Python, which is an upper limit: a profile charges
for each call. *allocated* is how many tensors are given memory of their own.

`--against` runs the programs on the packages of this tree and on those of a commit, such as the
last release, each in a process of its own, in turns. It fails if one takes 3 % more.
"""

import argparse
import cProfile
import importlib
import json
import os
import pstats
import re
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

Train = Callable[[int], tuple[nn.Module, dict[str, list[float]]]]

# How many iterations are timed: about a second each.
PROGRAMS = {
    "ppo": 3,
    "sac": 3,
    "world_model": 5,
    "grpo": 20,
    "dqn": 2,
    "vae": 5,
    "team": 12,
    "evolution": 3,
    "decisions": 5,
    "graphs": 15,
    "bayes": 10,
    "table": 3,
}
PEER_MODULES = {
    "kd_core": "tensordict",
    "kd_nn": "tensordict.nn",
    "kd_probabilistic": "tensordict.nn",
}
ROOT = Path(__file__).resolve().parents[2]
SLOWER = 1.03
"""How much longer than at another commit a program may take."""


class Run(NamedTuple):
    """What a contender took, in seconds, and what it gave."""

    seconds: float
    losses: list[float]
    parameters: list[torch.Tensor]


def peer_source(name: str) -> str:
    """Return the text of an example whose imports name the peer, which has no `nested`."""
    path = Path(importlib.import_module(f"examples.learning.{name}").__file__ or "")
    source = re.sub(
        r"^from (kd_\w+) import",
        lambda line: f"from {PEER_MODULES[line[1]]} import",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    return re.sub(r"\.nested\((\"\w+\"), TensorDict\)", r"[\1]", source)


def with_peer(name: str) -> Train:
    """Return `train` of an example on the peer."""
    module = ModuleType(f"peer_{name}")
    module.__file__ = importlib.import_module(f"examples.learning.{name}").__file__
    exec(compile(peer_source(name), f"peer_{name}.py", "exec"), vars(module))
    train: Train = module.train
    return train


def contenders(name: str) -> dict[str, Train]:
    """Return the three ways to run a program."""
    return {
        "by hand": importlib.import_module(f"benchmarks.programs.{name}").train,
        "peer": with_peer(name),
        "kd": importlib.import_module(f"examples.learning.{name}").train,
    }


def cpu_time() -> float:
    """Return the CPU time of this process, and of workers that have ended."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in spent)


def run(train: Train, iterations: int) -> Run:
    """Run a program once."""
    start = cpu_time()
    agent, history = train(iterations)
    seconds = cpu_time() - start
    return Run(seconds, history["loss"], [p.detach() for p in agent.parameters()])


def is_equal(run: Run, other: Run) -> bool:
    """Return whether two runs gave the same losses and parameters, up to rounding."""
    # The peer lists the module of an ensemble before the parameters of its copies.
    ours = run.parameters[-len(other.parameters) :]
    return torch.allclose(torch.tensor(run.losses), torch.tensor(other.losses), rtol=1e-4) and all(
        torch.allclose(mine, its, rtol=1e-3, atol=1e-5)
        for mine, its in zip(ours, other.parameters, strict=True)
    )


def measure(name: str, rounds: int) -> Mapping[str, float]:
    """Return the seconds of each contender.

    Raises:
        RuntimeError: if a contender computes other numbers.
    """
    trains = contenders(name)
    best: dict[str, Run] = {}
    order = list(trains)
    for _ in range(rounds):
        for contender in order:
            result = run(trains[contender], PROGRAMS[name])
            best[contender] = min(best.get(contender, result), result, key=lambda run: run.seconds)
        order.append(order.pop(0))
    for contender in order:
        if not is_equal(best[contender], best["by hand"]):
            raise RuntimeError(f"`{contender}` computes other numbers than by hand in `{name}`")
    return {contender: best[contender].seconds for contender in trains}


def own_share(train: Train, iterations: int, packages: tuple[str, ...]) -> float:
    """Return the share of the time that is spent in packages and in what they call of Python."""
    train(1)
    profile = cProfile.Profile()
    profile.runcall(train, iterations)
    # Of a function: its own time, and by caller the part of it.
    entries = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]  # not in typeshed
    own = 0.0
    for (path, _, name), (_, _, seconds, _, callers) in entries:
        if is_of(path, packages):
            own += seconds
        elif path == "~" and "torch" not in name:
            own += sum(part[2] for caller, part in callers.items() if is_of(caller[0], packages))
    return own / sum(seconds for _, (_, _, seconds, _, _) in entries)


def is_of(path: str, packages: tuple[str, ...]) -> bool:
    """Return whether a file, or code that was generated, belongs to packages."""
    return any(f"/{name}/" in path or path.startswith(f"<{name} ") for name in packages)


def allocated(train: Train) -> int:
    """Return how many times tensors are given memory in an iteration."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        train(1)
    return sum(
        event.name == "[memory]" and event.cpu_memory_usage > 0 for event in profile.events() or ()
    )


def details(name: str) -> dict[str, float]:
    """Return the share of each library in its profile, and how often memory is allocated."""
    trains = contenders(name)
    return {
        "peer own": own_share(trains["peer"], PROGRAMS[name], ("tensordict",)),
        "kd own": own_share(trains["kd"], PROGRAMS[name], ("kd_core", "kd_nn", "kd_probabilistic")),
        **{f"{who} allocated": float(allocated(train)) for who, train in trains.items()},
    }


def report(names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Time programs, print a table and return its figures."""
    found = {}
    heads = ("by hand", "peer", "kd", "kd/hand", "kd/peer", "peer own", "kd own", "allocated")
    print(f"{'program':14}" + "".join(f"{head:>10}" for head in heads))
    for name in names:
        took = dict(measure(name, rounds))
        more = details(name)
        found[name] = took | more
        ratios = took["kd"] / took["by hand"], took["kd"] / took["peer"]
        cells = [f"{seconds:9.3f}s" for seconds in took.values()]
        cells += [f"{ratio:10.3f}" for ratio in ratios]
        cells += [f"{more[key]:10.1%}" for key in ("peer own", "kd own")]
        cells.append(f"{more['kd allocated'] / more['by hand allocated']:10.3f}")
        print(f"{name:14}" + "".join(cells), flush=True)
    return found


class Worker:
    """A process that runs programs on the packages of a tree."""

    def __init__(self, tree: Path) -> None:
        paths = [*(tree / "packages").glob("*/src"), ROOT]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.programs", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        )

    def seconds(self, name: str) -> float:
        """Run a program once; return its CPU time, or NaN if its text does not run there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve() -> None:
    """Run the programs that are named on the standard input; print the CPU time of each."""
    for line in sys.stdin:
        name = line.strip()
        try:
            train = importlib.import_module(f"examples.learning.{name}").train
            seconds = run(train, PROGRAMS[name]).seconds
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            seconds = float("nan")
        print(seconds, flush=True)


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Yield a folder with the packages of a commit."""
    packed = subprocess.run(
        ["git", "archive", commit, "packages"], cwd=ROOT, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def slower_than(commit: str, names: list[str], rounds: int) -> list[str]:
    """Return the programs that take longer than at a commit, measured in turns; print a table."""
    print(f"{'program':14}{'before':>10}{'now':>10}{'now/before':>12}")
    slower = []
    with tree_of(commit) as tree:
        old, new = workers = Worker(tree), Worker(ROOT)
        for name in names:
            for worker in workers:
                worker.seconds(name)  # imports, and what is made once
            ratio, before, now = compared(old, new, name, rounds)
            if ratio > SLOWER:  # once more: machines are shared
                ratio, before, now = compared(old, new, name, 2 * rounds)
            print(f"{name:14}{before:9.3f}s{now:9.3f}s{ratio:12.3f}", flush=True)
            if ratio > SLOWER:
                slower.append(name)
        for worker in workers:
            worker.close()
    return slower


def compared(before: Worker, now: Worker, name: str, rounds: int) -> tuple[float, float, float]:
    """Return the median of now/before over the rounds, and the minima of both."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            late = now.seconds(name)
            pairs.append((before.seconds(name), late))
        else:
            pairs.append((before.seconds(name), now.seconds(name)))
    ratio = statistics.median(late / early for early, late in pairs)
    return ratio, min(early for early, _ in pairs), min(late for _, late in pairs)


def main() -> None:
    """Time the programs, print a table, and write it where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PROGRAMS, action="append", help="a program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = options.only or list(PROGRAMS)
    if options.serve:
        serve()
    elif options.against is not None:
        slower = slower_than(options.against, names, options.rounds)
        sys.exit(f"slower than {options.against}: {', '.join(slower)}" if slower else 0)
    else:
        found = report(names, options.rounds)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
