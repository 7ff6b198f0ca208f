"""SAC in several processes: two actors collect, one keeps what they saw, a learner trains on it.

    python examples/actors/replay.py

Collectors work ahead while the learner trains, by at most `AHEAD` batches, which bounds the memory
of what is on its way. Weights go to them in bfloat16, as one array, under a version that only
grows. In one process, `train(Here, ...)` computes the same numbers.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import time
from collections import deque
from collections.abc import Callable
from typing import cast

import ray
import torch
from examples.actors.collectors import COUNT, Buffer, Collector
from examples.actors.engines import Actor, Engine, Result
from examples.learning.curves import report, told
from examples.learning.sac import Learner, build_actor
from torch import nn

from kd_core import TensorDict

ITERATIONS, STEPS, UPDATES = 60, 20, 30
COLLECTORS, AHEAD, CAPACITY, BATCH = 2, 4, 20_000, 128


def train(
    engine: Callable[..., Engine], iterations: int
) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a policy from seed 0.

    Returns:
        Policy and critics, and the history of the iterations: the mean `reward` of a collected
        step, `loss`, the error of the critics in the last update, and `age`, by how many versions
        the weights that collected were older than those of the learner.
    """
    torch.manual_seed(0)
    policy = build_actor()
    learner = Learner(policy)
    buffer = engine(Buffer, CAPACITY, COLLECTORS)
    collectors = deque(engine(Collector, seed) for seed in range(COLLECTORS))
    ahead: deque[Result] = deque()
    history: dict[str, list[float]] = {"reward": [], "loss": [], "age": []}
    for version in range(iterations):
        weights = TensorDict.from_module(policy).data.to(torch.bfloat16)
        for collector in collectors:
            collector.ask("load", version, weights)
        while len(ahead) < AHEAD:
            ahead.append(collectors[0].ask("collect", STEPS))
            collectors.rotate()
        rows = cast("TensorDict", ahead.popleft()())
        buffer.ask("add", rows)
        samples = [buffer.ask("sample", BATCH) for _ in range(UPDATES)]
        for sample in samples:
            error = learner.learn(cast("TensorDict", sample()))
        history["reward"].append(rows["next", "reward"].mean().item())
        history["loss"].append(error)
        history["age"].append(version - rows["version"].double().mean().item())
    return nn.ModuleList([policy, learner.critics]), history


def main() -> None:
    """Train with actors, and draw what became of it."""
    torch.set_num_threads(1)
    ray.init(num_cpus=COLLECTORS + 1, include_dashboard=False, log_to_driver=False)
    start = time.perf_counter()
    history = train(Actor, ITERATIONS)[1]
    seconds = time.perf_counter() - start
    print(f"{ITERATIONS * STEPS * COUNT / seconds:.0f} transitions a second")
    report("actors", "SAC with collectors in actors", history, limit=("reward", 0))


if __name__ == "__main__":
    with told(__doc__, "40 s"):
        main()
