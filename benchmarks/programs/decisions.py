"""`examples.learning.decisions` by hand: plain dicts and modules, the same numbers."""

import torch
from examples.learning.decisions import (
    BATCH,
    RUNS,
    STEPS,
    UPDATES,
    WIDTH,
    WINDOW,
    Trunk,
    skilled,
)
from examples.learning.pendulums import Pendulums
from torch import Tensor, nn


class Model(nn.Module):
    """A network for each kind of token, and a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, WIDTH)
        self.to_go, self.obs, self.action = (nn.Linear(size, WIDTH) for size in (1, 3, 1))
        self.trunk = Trunk()
        self.head = nn.Sequential(nn.Linear(WIDTH, 1), nn.Tanh())

    def forward(self, time: Tensor, to_go: Tensor, obs: Tensor, action: Tensor) -> Tensor:
        """Return what is chosen at each step."""
        features = self.trunk(
            self.time(time), self.to_go(to_go), self.obs(obs), self.action(action)
        )
        chosen: Tensor = self.head(features)
        return chosen


def record() -> dict[str, Tensor]:
    """Return what players did, entries of shape `(runs, steps, ...)`."""
    pendulums, skill, steps = Pendulums(RUNS), torch.rand(RUNS), []
    pendulums.age.zero_()
    for number in range(STEPS):
        obs = pendulums.obs
        action = skilled(obs, skill)
        reward = pendulums.step(action)["reward"]
        time = torch.full((RUNS,), number)
        steps.append({"obs": obs, "action": action, "reward": reward, "time": time})
    runs = {key: torch.stack([step[key] for step in steps], 1) for key in steps[0]}
    runs["to_go"] = runs["reward"].flip(1).cumsum(1).flip(1)[..., None] / STEPS
    return runs


def loss_of(batch: dict[str, Tensor], model: Model) -> Tensor:
    """Return how far what is chosen is from what was done, a scalar."""
    chosen = model(batch["time"], batch["to_go"], batch["obs"], batch["action"])
    return (chosen - batch["action"]).square().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0; return it and the history."""
    torch.manual_seed(0)
    model, runs = Model(), record()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history: dict[str, list[float]] = {"loss": []}
    for _ in range(iterations):
        losses = []
        for _ in range(UPDATES):
            starts = torch.randint(STEPS - WINDOW + 1, (BATCH, 1))
            rows, columns = torch.randint(RUNS, (BATCH, 1)), starts + torch.arange(WINDOW)
            loss = loss_of({key: entry[rows, columns] for key, entry in runs.items()}, model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history["loss"].append(sum(losses) / UPDATES)
    return model, history
