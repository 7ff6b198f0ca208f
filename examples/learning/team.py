"""A team of agents with one critic (as in MAPPO, Yu et al. 2022) learns to meet.

    python examples/learning/team.py

What belongs to one agent stands below the key `agents`, whose batch size is `(worlds, steps,
agents)`; rewards and values are those of the team.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.curves import report, told
from examples.learning.meeting import Meeting
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

ITERATIONS, WORLDS, WALKERS, STEPS = 60, 32, 4, 25
EPOCHS, CLIP, DISCOUNT, ENTROPY_WEIGHT = 4, 0.2, 0.95, 0.01


def actor_network() -> nn.Sequential:
    """Build the network that all agents share."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 5))


def critic_network() -> nn.Sequential:
    """Build the network that sees all agents of a team."""
    return nn.Sequential(
        nn.Flatten(-2), nn.Linear(4 * WALKERS, 64), nn.Tanh(), nn.Linear(64, 1), nn.Flatten(-2)
    )


def build_actor() -> ProbabilisticTensorDictSequential:
    """Build `agents: obs -> logits -> action, action_log_prob`."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            actor_network(), in_keys=[("agents", "obs")], out_keys=[("agents", "logits")]
        ),
        ProbabilisticTensorDictModule(
            in_keys={"logits": ("agents", "logits")},
            out_keys=[("agents", "action")],
            distribution_class=Categorical,
            return_log_prob=True,
            log_prob_key=("agents", "log_prob"),
        ),
    )


def build_critic() -> TensorDictModule:
    """Build `agents: obs -> value`."""
    return TensorDictModule(critic_network(), in_keys=[("agents", "obs")], out_keys=["value"])


@torch.no_grad()
def collect(actor: TensorDictModuleBase) -> TensorDict:
    """Return episodes of all teams, of batch size `(WORLDS, STEPS)`."""
    meeting, steps = Meeting(WORLDS, WALKERS), []
    with set_interaction_type(InteractionType.RANDOM):
        for _ in range(STEPS):
            agents = TensorDict({"obs": meeting.obs}, [WORLDS, WALKERS])
            step = actor(TensorDict({"agents": agents}, [WORLDS]))
            step["reward"] = meeting.step(step["agents", "action"])
            steps.append(step)
    return stack(steps, 1)


@torch.no_grad()
def add_advantages(episodes: TensorDictBase, critic: TensorDictModuleBase) -> None:
    """Write `advantage` and `target` into episodes."""
    following, targets = torch.zeros(WORLDS), []
    for reward in reversed(episodes["reward"].unbind(1)):
        following = reward + DISCOUNT * following
        targets.append(following)
    episodes["target"] = torch.stack(targets[::-1], 1)
    advantage = episodes["target"] - critic(episodes)["value"]
    episodes["advantage"] = (advantage - advantage.mean()) / advantage.std()


def loss_of(
    rows: TensorDictBase, actor: ProbabilisticTensorDictSequential, critic: TensorDictModuleBase
) -> Tensor:
    """Return the clipped loss of steps, a scalar."""
    policy = actor.get_dist(rows)
    ratio = (policy.log_prob(rows["agents", "action"]) - rows["agents", "log_prob"]).exp()
    advantage = rows["advantage"][:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    error = (critic(rows)["value"] - rows["target"]).square().mean()
    return error - gain - ENTROPY_WEIGHT * policy.entropy().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an actor and a critic from seed 0.

    Returns:
        Both, and the history of the iterations: `reward` of the last step, and `loss`.
    """
    torch.manual_seed(0)
    actor, critic = build_actor(), build_critic()
    agent = nn.ModuleList([actor, critic])
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"reward": [], "loss": []}
    for _ in range(iterations):
        episodes = collect(actor)
        add_advantages(episodes, critic)
        rows = episodes.reshape(-1)
        for _ in range(EPOCHS):
            loss = loss_of(rows, actor, critic)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history["reward"].append(episodes["reward"][:, -1].mean().item())
        history["loss"].append(loss.item())
    return agent, history


if __name__ == "__main__":
    with told(__doc__, "5 s"):
        report("team", "A team learns to meet", train(ITERATIONS)[1], limit=("reward", 0))
