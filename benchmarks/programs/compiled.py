"""Run the losses of whole programs compiled, by hand and with kd.

    python -m benchmarks.programs.compiled [--only ppo] [--backend eager] [--mode reduce-overhead]
    python -m benchmarks.programs.compiled --whole

A program runs as it is; the functions named in `STEPS` are compiled with `fullgraph=True`, so that
a graph break is an error. *first* is the CPU time of their first calls, with that of the C++
compiler, *next* the median of the calls that compiled nothing, and *graphs* how often each was
compiled. Of several `--rounds`, in turns, the least counts. inductor starts from an empty cache:
else the side whose code did not change since the last run would only load what it made then.

`--whole` trains each program with kd to its end and times nothing. Both ways exit with 1 if a
function was compiled more often than `RECOMPILED` allows. The first way also does if a history is
not that of eager code: to the bit with the backend `eager`, within `TOLERANCE` with another. One
gradient that is rounded otherwise changes all that a training to the end computes after it, so that
is told, but is no fault.
"""

import argparse
import ctypes
import importlib
import math
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

STEPS = {
    "ppo": ("loss_of",),
    "sac": ("critic_loss", "actor_loss"),
    "world_model": ("imagine", "loss_of"),
    "grpo": ("score", "loss_of"),
    "dqn": ("loss_of",),
    "vae": ("loss_of",),
    "team": ("loss_of",),
    "evolution": ("scores_of",),
    "decisions": ("loss_of",),
    "graphs": ("joined", "loss_of"),
    "bayes": ("loss_of",),
    "table": ("loss_of",),
}
# dynamo traces each turn of a loop.
SHORTER = {
    "evolution": {"STEPS": 3},
    "world_model": {"SEEN": 2, "IMAGINED": 2},
    "grpo": {"ANSWER": 3},
}
RECOMPILED = {("grpo", "score"): 4, ("team", "loss_of"): 2}
"""The graphs of functions that need several: the prompts of GRPO have several lengths, and it runs
another module without gradients, by hand too; the rows of a team hold what compiled code wrote
before, which no eager code has read."""
TOLERANCE = 1e-3
"""How far a figure of a history may be from that of eager code, relative to it."""


class Outcome(NamedTuple):
    """What the compiled functions of a program took, and what the program gave.

    Attributes:
        first: the seconds of the first calls.
        following: the sum over the functions of the median of the calls that compiled nothing, in
            seconds.
        graphs: by function, how often it was compiled.
        same: whether the history is that of eager code, within `TOLERANCE` but for `eager`.
    """

    first: float
    following: float
    graphs: dict[str, int]
    same: bool


class Timed:
    """A function that is compiled, what its first call took, and each that compiled nothing."""

    def __init__(self, function: Callable[..., object], backend: "Counting") -> None:
        self.first, self.following = 0.0, list[float]()
        self._run, self._backend = torch.compile(function, fullgraph=True, backend=backend), backend

    def __call__(self, *args: object) -> object:
        """Call the function."""
        before = self._backend.count
        start = time.process_time() + children_time()
        result = self._run(*args)
        seconds = time.process_time() + children_time() - start
        if not before:
            self.first = seconds
        elif before == self._backend.count:
            self.following.append(seconds)
        return result


def children_time() -> float:
    """Return the CPU time of the processes that this one has waited for, such as compilers."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Counting:
    """A backend that counts the graphs it is given."""

    def __init__(self, name: str, mode: str | None) -> None:
        self.count, self._name, self._mode = 0, name, mode

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """Compile a graph."""
        self.count += 1
        if self._name == "eager":
            return graph.forward
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(
            graph, inputs, config_patches=list_mode_options(self._mode) if self._mode else None
        )


@contextmanager
def replaced(module: ModuleType, names: dict[str, Any]) -> Iterator[None]:
    """Give names of a module other values for a while."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def outcome(
    module: ModuleType,
    name: str,
    backend: str = "eager",
    mode: str | None = None,
    iterations: int = 1,
) -> Outcome:
    """Run a program in eager code, and compiled.

    Args:
        module: the example, or its twin.
        name: the name of the program.
        backend: `eager` or `inductor`.
        mode: a mode of `torch.compile`.
        iterations: how many iterations of its training.
    """
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    backends = {step: Counting(backend, mode) for step in STEPS[name]}
    calls = {step: Timed(getattr(module, step), each) for step, each in backends.items()}
    with replaced(module, dict(SHORTER.get(name, {}))):
        _, expected = module.train(iterations)
        with replaced(module, dict(calls)), fresh_cache():
            _, history = module.train(iterations)
    return Outcome(
        sum(call.first for call in calls.values()),
        sum(statistics.median(call.following) for call in calls.values() if call.following),
        {step: each.count for step, each in backends.items()},
        history == expected if backend == "eager" else is_close(history, expected),
    )


def warm_up(backend: str) -> None:
    """Compile a function, so that no program pays for what is loaded once."""

    def halved(x: torch.Tensor) -> torch.Tensor:
        return (x / 2).sum()

    run = torch.compile(halved, backend=Counting(backend, None))
    run(torch.ones(3, requires_grad=True)).backward()


def keep_memory() -> None:
    """Have glibc keep what is freed.

    Else each call of a small program may return its memory and fault the pages in again, which
    takes as long as the rest of it, and whether it does depends on where other objects lie.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for threshold in (-1, -3):  # of trimming the heap, of allocating outside of it
            mallopt(threshold, 2**25)


def is_close(history: dict[str, list[float]], expected: dict[str, list[float]]) -> bool:
    """Return whether all figures of a history are those of another, within `TOLERANCE`."""
    return history.keys() == expected.keys() and all(
        math.isclose(figure, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE / 10)
        for name, figures in history.items()
        for figure, wanted in zip(figures, expected[name], strict=True)
    )


def fault_of(name: str, found: Outcome) -> str:
    """Return what is wrong with the outcome of a program, nothing if it is as it should be."""
    many = [step for step, count in found.graphs.items() if count > RECOMPILED.get((name, step), 1)]
    faults = [f"{step} WAS COMPILED AGAIN" for step in many]
    return ", ".join(faults if found.same else [*faults, "OTHER NUMBERS"])


def least(outcomes: list[Outcome]) -> Outcome:
    """Return the least times of several runs of a program, and the last of what else they found."""
    return outcomes[-1]._replace(
        first=min(each.first for each in outcomes),
        following=min(each.following for each in outcomes),
    )


def ratio(one: Outcome, other: Outcome) -> float:
    """Return how many times longer the further calls take; NaN if there are none."""
    return one.following / other.following if other.following else math.nan


def main() -> int:
    """Run the programs, print a table, and return 1 if one of them is not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=STEPS, action="append", help="a program")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--mode", help="of inductor, such as reduce-overhead")
    parser.add_argument("--rounds", type=int, default=1, help="how often each side runs")
    parser.add_argument("--whole", action="store_true", help="train to the end, with kd alone")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.allow_rnn = True
    keep_memory()
    warm_up(options.backend)
    failed = False
    if not options.whole:
        print(f"{'program':14}{'first':>16}{'kd/hand':>10}{'next':>16}{'kd/hand':>10}  graphs")
    for name in options.only or STEPS:
        by_hand, with_kd = (
            importlib.import_module(f"{folder}.{name}")
            for folder in ("benchmarks.programs", "examples.learning")
        )
        how = name, options.backend, options.mode
        if options.whole:
            kd = outcome(with_kd, *how, with_kd.ITERATIONS)
            times = f"{with_kd.ITERATIONS:4} iterations"
        else:
            pairs = [
                (outcome(by_hand, *how), outcome(with_kd, *how)) for _ in range(options.rounds)
            ]
            hand, kd = least([pair[0] for pair in pairs]), least([pair[1] for pair in pairs])
            times = (
                f"{hand.first:7.2f}s{kd.first:7.2f}s{kd.first / hand.first:10.2f} "
                f"{1e6 * hand.following:7.0f}u{1e6 * kd.following:7.0f}u{ratio(kd, hand):10.2f} "
            )
        graphs = ", ".join(f"{step} {count}" for step, count in kd.graphs.items())
        fault = fault_of(name, kd._replace(same=kd.same or options.whole))
        note = "" if kd.same or fault else "(rounds otherwise)"
        print(f"{name:14} {times} {graphs} {fault}{note}".rstrip(), flush=True)
        failed = failed or bool(fault)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
