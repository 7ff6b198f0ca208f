"""DQN (Mnih et al. 2015) learns to balance poles from a replay buffer.

    python examples/learning/dqn.py

The buffer is one container of batch size `(SIZE,)`: steps are written at an index of it, and a
minibatch is read at another. The target network is a second set of parameters of the same module.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.cart_poles import CartPoles
from examples.learning.curves import report, told
from torch import Tensor, nn

from kd_core import TensorDict, TensorDictBase
from kd_nn import TensorDictModule, TensorDictModuleBase

ITERATIONS, STEPS = 60, 128
CARTS, SIZE, BATCH = 16, 8192, 128
DISCOUNT, FOLLOW, EXPLORED = 0.99, 32, 30
"""The target follows every so many steps; exploration ends after so many iterations."""


def network() -> nn.Sequential:
    """Build the network that values both actions."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def build_critic() -> TensorDictModule:
    """Build `obs -> values`."""
    return TensorDictModule(network(), in_keys=["obs"], out_keys=["values"])


def new_buffer() -> TensorDict:
    """Return a buffer of zeros."""
    after = {
        "obs": torch.zeros(SIZE, 4),
        "reward": torch.zeros(SIZE),
        "fell": torch.zeros(SIZE, dtype=torch.bool),
        "done": torch.zeros(SIZE, dtype=torch.bool),
    }
    action = torch.zeros(SIZE, dtype=torch.int64)
    return TensorDict({"obs": torch.zeros(SIZE, 4), "action": action, "next": after}, [SIZE])


@torch.no_grad()
def play(carts: CartPoles, critic: TensorDictModuleBase, explored: float) -> TensorDict:
    """Return one step of all carts, of which some explore."""
    step = TensorDict({"obs": carts.state}, [CARTS])
    best = critic(step)["values"].argmax(-1)
    explores = torch.rand(CARTS) < explored
    action = torch.where(explores, torch.randint(2, (CARTS,)), best)
    return TensorDict({"obs": step["obs"], "action": action, "next": carts.step(action)}, [CARTS])


def loss_of(batch: TensorDictBase, critic: TensorDictModuleBase, target: TensorDict) -> Tensor:
    """Return the error of the values of a minibatch, a scalar."""
    with torch.no_grad(), target.to_module(critic):
        following = critic(batch.nested("next", TensorDict))["values"].amax(-1)
    wanted = batch["next", "reward"] + DISCOUNT * (~batch["next", "fell"]).float() * following
    found = critic(batch)["values"].gather(-1, batch["action"][:, None]).squeeze(-1)
    return nn.functional.smooth_l1_loss(found, wanted)


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a critic from seed 0.

    Returns:
        The critic, and the history of the iterations: `steps`, for how many steps a pole stays up,
        and `loss`, that of the last minibatch.
    """
    torch.manual_seed(0)
    critic = build_critic()
    params = TensorDict.from_module(critic)
    target = params.data.clone()
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    carts, buffer, count = CartPoles(CARTS), new_buffer(), 0
    history: dict[str, list[float]] = {"steps": [], "loss": []}
    for iteration in range(iterations):
        ended = torch.zeros(())
        for _ in range(STEPS):
            step = play(carts, critic, max(0.05, 1 - iteration / EXPLORED))
            ended += step["next", "done"].sum()
            buffer[(torch.arange(CARTS) + count) % SIZE] = step
            count += CARTS
            batch = buffer[torch.randint(min(count, SIZE), (BATCH,))]
            loss = loss_of(batch, critic, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if count // CARTS % FOLLOW == 0:
                target.update_(params.data)
        history["steps"].append((STEPS * CARTS / ended.clamp(min=1)).item())
        history["loss"].append(loss.item())
    return critic, history


if __name__ == "__main__":
    with told(__doc__, "15 s"):
        report("dqn", "DQN balances a pole", train(ITERATIONS)[1], limit=("steps", 200))
