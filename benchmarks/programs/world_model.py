"""`examples.learning.world_model` by hand: plain dicts and modules, the same numbers."""

import math

import torch
from examples.learning.pendulums import Pendulums
from examples.learning.world_model import BATCH, HIDDEN, IMAGINED, SEEN, UPDATES, WINDOWS
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import softplus

SCALE_BIAS = math.log(math.expm1(1 - 0.01))


class Model(nn.Module):
    """A memory, and what it expects."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRUCell(4, HIDDEN)
        self.obs_head = nn.Linear(HIDDEN, 6)
        self.reward_head = nn.Linear(HIDDEN, 1)

    def forward(self, obs: Tensor, action: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """Return what is expected after a step."""
        hidden = self.memory(torch.cat((obs, action), -1), hidden)
        loc, raw = self.obs_head(hidden).chunk(2, -1)
        scale = (softplus(raw + SCALE_BIAS) + 0.01).clamp_min(1e-4)
        reward = self.reward_head(hidden).flatten(-2)
        return {"hidden": hidden, "loc": loc, "scale": scale, "reward": reward}


def stack(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the entries of several dicts along the steps."""
    return {key: torch.stack([step[key] for step in steps], 1) for key in steps[0]}


def record() -> dict[str, Tensor]:
    """Return what pendulums do under random actions."""
    pendulums = Pendulums(WINDOWS)
    pendulums.age.zero_()
    steps = []
    for _ in range(SEEN + IMAGINED):
        obs, action = pendulums.obs, 2 * torch.rand(WINDOWS, 1) - 1
        after = pendulums.step(action)
        steps.append(
            {"obs": obs, "action": action, "next_obs": after["obs"], "reward": after["reward"]}
        )
    return stack(steps)


def imagine(windows: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Return what the model expects after each step."""
    expected: list[dict[str, Tensor]] = []
    steps = zip(windows["obs"].unbind(1), windows["action"].unbind(1), strict=True)
    for number, (obs, action) in enumerate(steps):
        if number >= SEEN:
            obs = expected[-1]["loc"]
        hidden = expected[-1]["hidden"] if expected else torch.zeros(len(obs), HIDDEN)
        expected.append(model(obs, action, hidden))
    return stack(expected)


def loss_of(expected: dict[str, Tensor], windows: dict[str, Tensor]) -> Tensor:
    """Return how little was expected of what came after, a scalar."""
    surprise = -Normal(expected["loc"], expected["scale"]).log_prob(windows["next_obs"])
    return surprise.mean() + (expected["reward"] - windows["reward"]).square().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0; return it and the history."""
    torch.manual_seed(0)
    model, windows = Model(), record()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"error": [], "loss": []}
    for _ in range(iterations):
        for _ in range(UPDATES):
            rows = torch.randint(WINDOWS, (BATCH,))
            batch = {key: entry[rows] for key, entry in windows.items()}
            expected = imagine(batch, model)
            loss = loss_of(expected, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        gap = expected["loc"][:, -1] - batch["next_obs"][:, -1]
        history["error"].append(gap.norm(dim=-1).mean().item())
        history["loss"].append(loss.item())
    return model, history
