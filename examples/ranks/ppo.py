"""Data-parallel PPO: each rank has carts of its own, and gradients are averaged as one container.

python examples/ranks/ppo.py
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from collections.abc import Sequence

import torch
import torch.distributed as dist
from examples.learning.cart_poles import CartPoles
from examples.learning.curves import report, told
from examples.learning.ppo import (
    CARTS,
    EPOCHS,
    MINIBATCH,
    STEPS,
    add_advantages,
    build_actor,
    build_critic,
    collect,
    loss_of,
)
from examples.ranks.shares import SHARES, Shares, run
from torch import nn

from kd_core import TensorDict, TensorDictBase

ITERATIONS = 20
KEYS = ("obs", "action", "action_log_prob", "advantage", "target")


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an actor and a critic from seed 0, on the shares of this process.

    Returns:
        Both, and the history of the iterations: `steps`, for how many steps a pole of any share
        stays up, and `loss`, that of the last minibatches.
    """
    torch.manual_seed(0)
    actor, critic = build_actor(), build_critic()
    agent = nn.ModuleList([actor, critic])
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    shares = Shares()
    carts = []
    for position in range(len(shares.numbers)):
        with shares.random(position):
            carts.append(CartPoles(CARTS))
    history: dict[str, list[float]] = {"steps": [], "loss": []}
    for _ in range(iterations):
        minibatches: list[Sequence[TensorDictBase]] = []
        episodes = TensorDict({"ended": torch.zeros((), dtype=torch.long)})
        for position, own in enumerate(carts):
            with shares.random(position):
                rollout = collect(own, actor)
                add_advantages(rollout, critic)
                mixed = torch.randperm(STEPS * CARTS)
            minibatches.append(rollout.select(*KEYS).reshape(-1)[mixed].split(MINIBATCH))
            episodes["ended"] += rollout["next", "done"].sum()
        for batches in list(zip(*minibatches, strict=True)) * EPOCHS:
            last = shares.step(
                agent, optimizer, batches, lambda batch: loss_of(batch, actor, critic)
            )
        if shares.together:
            episodes.all_reduce("sum")
        history["steps"].append((SHARES * STEPS * CARTS / episodes["ended"].clamp(min=1)).item())
        history["loss"].append(last)
    return agent, history


def main() -> None:
    """Train on the shares of this rank; rank 0 draws what became of it."""
    history = train(ITERATIONS)[1]
    if dist.get_rank() == 0:
        report("ppo_ranks", "PPO on three ranks balances poles", history, limit=("steps", 200))


if __name__ == "__main__":
    with told(__doc__, "20 s"):
        run(main)
