"""Time whole programs on three contenders: by hand, with the peer, with kd.

    python -m benchmarks.programs [--only ppo] [--rounds 5] [--json PROGRAMS.json]

kd runs a program of `examples/learning`, hand-written code its twin in `benchmarks/programs`, and
the peer the text of the example with other import lines and plain access to nested entries. All run
in one process, one thread, in turns; a figure is the minimum of the CPU time over the rounds. A
program counts only if all losses and parameters are equal.
"""

import argparse
import importlib
import json
import re
import time
import warnings
from collections.abc import Callable, Mapping
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
}
PEER_MODULES = {
    "kd_core": "tensordict",
    "kd_nn": "tensordict.nn",
    "kd_probabilistic": "tensordict.nn",
}


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


def run(train: Train, iterations: int) -> Run:
    """Run a program once."""
    start = time.process_time()
    agent, history = train(iterations)
    seconds = time.process_time() - start
    return Run(seconds, history["loss"], [p.detach() for p in agent.parameters()])


def is_equal(run: Run, other: Run) -> bool:
    """Return whether two runs gave the same losses and parameters, up to rounding."""
    return torch.allclose(torch.tensor(run.losses), torch.tensor(other.losses), rtol=1e-4) and all(
        torch.allclose(mine, its, rtol=1e-3, atol=1e-5)
        for mine, its in zip(run.parameters, other.parameters, strict=True)
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


def main() -> None:
    """Time the programs, print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PROGRAMS, help="one program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seconds = {}
    print(f"{'program':14}{'by hand':>10}{'peer':>10}{'kd':>10}{'kd/hand':>10}{'kd/peer':>10}")
    for name in [options.only] if options.only else PROGRAMS:
        took = seconds[name] = measure(name, options.rounds)
        by_hand, peer, kd = took.values()
        ratios = f"{kd / by_hand:10.3f}{kd / peer:10.3f}"
        print(f"{name:14}{by_hand:9.3f}s{peer:9.3f}s{kd:9.3f}s{ratios}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(seconds, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
