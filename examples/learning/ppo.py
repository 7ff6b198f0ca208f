"""PPO with generalised advantages (Schulman et al. 2017, 2016) learns to balance poles.

    python examples/learning/ppo.py

Rollouts are containers of batch size `(steps, carts)`; the values and the advantages are further
keys of the same container, and a minibatch is an index of it.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.cart_poles import CartPoles
from examples.learning.curves import report, told
from torch import Tensor, nn
from torch.distributions import Categorical

from kd_core import TensorDict, TensorDictBase, stack
from kd_nn import TensorDictModule, TensorDictModuleBase
from kd_probabilistic import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_interaction_type,
)

ITERATIONS = 40
STEPS, CARTS = 128, 16
EPOCHS, MINIBATCH = 4, 512
DISCOUNT, TRACE = 0.99, 0.95
CLIP, ENTROPY_WEIGHT, VALUE_WEIGHT = 0.2, 0.01, 0.5


def network(outputs: int) -> nn.Sequential:
    """Build the network of the actor or of the critic."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def build_actor() -> ProbabilisticTensorDictSequential:
    """Build `obs -> logits -> action, action_log_prob`."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network(2), in_keys=["obs"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=Categorical,
            return_log_prob=True,
        ),
    )


def build_critic() -> TensorDictModule:
    """Build `obs -> value`."""
    return TensorDictModule(
        nn.Sequential(network(1), nn.Flatten(-2)), in_keys=["obs"], out_keys=["value"]
    )


@torch.no_grad()
def collect(carts: CartPoles, actor: TensorDictModuleBase) -> TensorDict:
    """Return a rollout of all carts, of batch size `(STEPS, CARTS)`."""
    steps = []
    with set_interaction_type(InteractionType.RANDOM):
        for _ in range(STEPS):
            step = actor(TensorDict({"obs": carts.state}, [CARTS]))
            step["next"] = carts.step(step["action"])
            steps.append(step)
    return stack(steps)


@torch.no_grad()
def add_advantages(rollout: TensorDictBase, critic: TensorDictModuleBase) -> None:
    """Write `advantage` and `target` into a rollout."""
    critic(rollout)
    critic(rollout["next"])
    going_on = (~rollout["next", "done"]).float()
    standing = (~rollout["next", "fell"]).float()
    later = DISCOUNT * standing * rollout["next", "value"]
    surprise = rollout["next", "reward"] + later - rollout["value"]
    advantages = [torch.zeros(CARTS)]
    for now, goes_on in zip(reversed(surprise.unbind()), reversed(going_on.unbind()), strict=True):
        advantages.append(now + DISCOUNT * TRACE * goes_on * advantages[-1])
    rollout["advantage"] = torch.stack(advantages[:0:-1])
    rollout["target"] = rollout["advantage"] + rollout["value"]


def loss_of(
    batch: TensorDictBase, actor: ProbabilisticTensorDictSequential, critic: TensorDictModuleBase
) -> Tensor:
    """Return the clipped loss of a minibatch, a scalar."""
    policy = actor.get_dist(batch)
    ratio = (policy.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    error = (critic(batch)["value"] - batch["target"]).square().mean()
    return VALUE_WEIGHT * error - gain - ENTROPY_WEIGHT * policy.entropy().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an actor and a critic from seed 0.

    Returns:
        Both, and the history of the iterations: `steps`, for how many steps a pole stays up, and
        `loss`, that of the last minibatch.
    """
    torch.manual_seed(0)
    actor, critic = build_actor(), build_critic()
    agent = nn.ModuleList([actor, critic])
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    carts = CartPoles(CARTS)
    history: dict[str, list[float]] = {"steps": [], "loss": []}
    for _ in range(iterations):
        rollout = collect(carts, actor)
        add_advantages(rollout, critic)
        rows = rollout.select("obs", "action", "action_log_prob", "advantage", "target").reshape(-1)
        for _ in range(EPOCHS):
            for batch in rows[torch.randperm(len(rows))].split(MINIBATCH):
                loss = loss_of(batch, actor, critic)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        episodes = rollout["next", "done"].sum().clamp(min=1)
        history["steps"].append((STEPS * CARTS / episodes).item())
        history["loss"].append(loss.item())
    return agent, history


if __name__ == "__main__":
    with told(__doc__, "10 s"):
        report("ppo", "PPO balances a pole", train(ITERATIONS)[1], limit=("steps", 200))
