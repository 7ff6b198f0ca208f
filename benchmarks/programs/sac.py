"""`examples.learning.sac` by hand: plain dicts of tensors, plain modules, the same numbers."""

import copy
import math

import torch
from examples.learning.pendulums import Pendulums
from examples.learning.sac import (
    BATCH,
    COUNT,
    DISCOUNT,
    FOLLOW,
    STEPS,
    TEMPERATURE,
    critic_network,
    policy_network,
    squashed_normal,
    update,
)
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn.functional import softplus

SCALE_BIAS = math.log(math.expm1(1 - 0.01))


class Actor(nn.Module):
    """A network that draws an action."""

    def __init__(self) -> None:
        super().__init__()
        self.network = policy_network()

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return an action for each observation, and its log-probability."""
        loc, raw = self.network(obs).chunk(2, -1)
        scale = (softplus(raw + SCALE_BIAS) + 0.01).clamp_min(1e-4)
        policy = squashed_normal(loc, scale)
        action = policy.rsample()
        return action, policy.log_prob(action)


class Critics:
    """Two critics that run as one, on stacked parameters."""

    def __init__(self) -> None:
        self._critic = critic_network()
        copies = [copy.deepcopy(self._critic) for _ in range(2)]
        for each in copies:
            for layer in each:
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
        self.params, _ = stack_module_state(copies)
        self.targets = {name: param.detach().clone() for name, param in self.params.items()}

    def __call__(self, params: dict[str, Tensor], obs: Tensor, action: Tensor) -> Tensor:
        """Return the values of actions, shape `(2, batch)`."""
        joined = torch.cat((obs, action), -1)
        return torch.vmap(self._one, (0, None))(params, joined).squeeze(-1)

    def _one(self, params: dict[str, Tensor], joined: Tensor) -> Tensor:
        return functional_call(self._critic, params, (joined,))


def critic_loss(batch: dict[str, Tensor], actor: Actor, critics: Critics) -> Tensor:
    """Return the error of both critics, a scalar."""
    with torch.no_grad():
        action, log_prob = actor(batch["next_obs"])
        value = critics(critics.targets, batch["next_obs"], action).amin(0)
        target = batch["reward"] + DISCOUNT * (value - TEMPERATURE * log_prob)
    found = critics(critics.params, batch["obs"], batch["action"])
    return (found - target).square().mean(1).sum()


def actor_loss(batch: dict[str, Tensor], actor: Actor, critics: Critics) -> Tensor:
    """Return what the actor misses in the eyes of the critics, a scalar."""
    action, log_prob = actor(batch["obs"])
    params = {name: param.detach() for name, param in critics.params.items()}
    value = critics(params, batch["obs"], action).amin(0)
    return (TEMPERATURE * log_prob - value).mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an actor and two critics from seed 0; return the actor and the history."""
    torch.manual_seed(0)
    actor, critics = Actor(), Critics()
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critics.params.values(), lr=1e-3)
    pendulums = Pendulums(COUNT)
    buffer = {
        "obs": torch.zeros(iterations * STEPS, COUNT, 3),
        "action": torch.zeros(iterations * STEPS, COUNT, 1),
        "next_obs": torch.zeros(iterations * STEPS, COUNT, 3),
        "reward": torch.zeros(iterations * STEPS, COUNT),
    }
    history: dict[str, list[float]] = {"reward": [], "loss": []}
    for step in range(iterations * STEPS):
        obs = pendulums.obs
        with torch.no_grad():
            action, _ = actor(obs)
        after = pendulums.step(action)
        taken = {
            "obs": obs,
            "action": action,
            "next_obs": after["obs"],
            "reward": after["reward"],
        }
        for key, entry in buffer.items():
            entry[step] = taken[key]
        rows, columns = torch.randint(step + 1, (BATCH,)), torch.randint(COUNT, (BATCH,))
        batch = {key: entry[rows, columns] for key, entry in buffer.items()}
        error = update(critic_optimizer, critic_loss(batch, actor, critics))
        update(actor_optimizer, actor_loss(batch, actor, critics))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(critics.targets.values()), list(critics.params.values()), FOLLOW
            )
        if (step + 1) % STEPS == 0:
            history["reward"].append(buffer["reward"][step + 1 - STEPS : step + 1].mean().item())
            history["loss"].append(error)
    return actor, history
