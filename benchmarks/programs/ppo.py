"""`examples.learning.ppo` by hand: plain dicts of tensors, plain modules, the same numbers."""

import torch
from examples.learning.cart_poles import CartPoles
from examples.learning.ppo import (
    CARTS,
    CLIP,
    DISCOUNT,
    ENTROPY_WEIGHT,
    EPOCHS,
    MINIBATCH,
    STEPS,
    TRACE,
    VALUE_WEIGHT,
    network,
)
from torch import Tensor, nn
from torch.distributions import Categorical


def stack(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the entries of several dicts."""
    return {key: torch.stack([step[key] for step in steps]) for key in steps[0]}


@torch.no_grad()
def collect(carts: CartPoles, actor: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a rollout of all carts, and what followed each step."""
    steps, following = [], []
    for _ in range(STEPS):
        obs = carts.state
        policy = Categorical(logits=actor(obs))
        action = policy.sample()
        log_prob = policy.log_prob(action)
        steps.append({"obs": obs, "action": action, "action_log_prob": log_prob})
        following.append(carts.step(action))
    return stack(steps), stack(following)


@torch.no_grad()
def add_advantages(
    rollout: dict[str, Tensor], following: dict[str, Tensor], critic: nn.Module
) -> None:
    """Write `advantage` and `target` into a rollout."""
    value = critic(rollout["obs"])
    next_value = critic(following["obs"])
    going_on = (~following["done"]).float()
    standing = (~following["fell"]).float()
    later = DISCOUNT * standing * next_value
    surprise = following["reward"] + later - value
    advantages = [torch.zeros(CARTS)]
    for now, goes_on in zip(reversed(surprise.unbind()), reversed(going_on.unbind()), strict=True):
        advantages.append(now + DISCOUNT * TRACE * goes_on * advantages[-1])
    rollout["advantage"] = torch.stack(advantages[:0:-1])
    rollout["target"] = rollout["advantage"] + value


def loss_of(batch: dict[str, Tensor], actor: nn.Module, critic: nn.Module) -> Tensor:
    """Return the clipped loss of a minibatch, a scalar."""
    policy = Categorical(logits=actor(batch["obs"]))
    ratio = (policy.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    error = (critic(batch["obs"]) - batch["target"]).square().mean()
    return VALUE_WEIGHT * error - gain - ENTROPY_WEIGHT * policy.entropy().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an actor and a critic from seed 0; return both and the history."""
    torch.manual_seed(0)
    actor, critic = network(2), nn.Sequential(network(1), nn.Flatten(-2))
    agent = nn.ModuleList([actor, critic])
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    carts = CartPoles(CARTS)
    history: dict[str, list[float]] = {"steps": [], "loss": []}
    for _ in range(iterations):
        rollout, following = collect(carts, actor)
        add_advantages(rollout, following, critic)
        rows = {key: entry.flatten(0, 1) for key, entry in rollout.items()}
        for _ in range(EPOCHS):
            order = torch.randperm(STEPS * CARTS)
            shuffled = {key: entry[order].split(MINIBATCH) for key, entry in rows.items()}
            for parts in zip(*shuffled.values(), strict=True):
                loss = loss_of(dict(zip(shuffled, parts, strict=True)), actor, critic)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        episodes = following["done"].sum().clamp(min=1)
        history["steps"].append((STEPS * CARTS / episodes).item())
        history["loss"].append(loss.item())
    return agent, history
