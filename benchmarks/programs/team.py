"""`examples.learning.team` by hand: plain dicts of tensors, plain modules, the same numbers."""

import torch
from examples.learning.meeting import Meeting
from examples.learning.team import (
    CLIP,
    DISCOUNT,
    ENTROPY_WEIGHT,
    EPOCHS,
    STEPS,
    WALKERS,
    WORLDS,
    actor_network,
    critic_network,
)
from torch import Tensor, nn
from torch.distributions import Categorical


@torch.no_grad()
def collect(actor: nn.Module) -> dict[str, Tensor]:
    """Return episodes of all teams, entries of shape `(WORLDS, STEPS, ...)`."""
    meeting, steps = Meeting(WORLDS, WALKERS), []
    for _ in range(STEPS):
        obs = meeting.obs
        policy = Categorical(logits=actor(obs))
        action = policy.sample()
        log_prob = policy.log_prob(action)
        reward = meeting.step(action)
        steps.append({"obs": obs, "action": action, "log_prob": log_prob, "reward": reward})
    return {key: torch.stack([step[key] for step in steps], 1) for key in steps[0]}


@torch.no_grad()
def add_advantages(episodes: dict[str, Tensor], critic: nn.Module) -> None:
    """Write `advantage` and `target` into episodes."""
    following, targets = torch.zeros(WORLDS), []
    for reward in reversed(episodes["reward"].unbind(1)):
        following = reward + DISCOUNT * following
        targets.append(following)
    episodes["target"] = torch.stack(targets[::-1], 1)
    advantage = episodes["target"] - critic(episodes["obs"])
    episodes["advantage"] = (advantage - advantage.mean()) / advantage.std()


def loss_of(rows: dict[str, Tensor], actor: nn.Module, critic: nn.Module) -> Tensor:
    """Return the clipped loss of steps, a scalar."""
    policy = Categorical(logits=actor(rows["obs"]))
    ratio = (policy.log_prob(rows["action"]) - rows["log_prob"]).exp()
    advantage = rows["advantage"][:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    error = (critic(rows["obs"]) - rows["target"]).square().mean()
    return error - gain - ENTROPY_WEIGHT * policy.entropy().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an actor and a critic from seed 0; return both and the history."""
    torch.manual_seed(0)
    actor, critic = actor_network(), critic_network()
    agent = nn.ModuleList([actor, critic])
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"reward": [], "loss": []}
    for _ in range(iterations):
        episodes = collect(actor)
        add_advantages(episodes, critic)
        rows = {key: entry.flatten(0, 1) for key, entry in episodes.items()}
        for _ in range(EPOCHS):
            loss = loss_of(rows, actor, critic)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history["reward"].append(episodes["reward"][:, -1].mean().item())
        history["loss"].append(loss.item())
    return agent, history
