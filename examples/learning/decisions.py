"""A decision transformer (Chen et al. 2021) learns from what others did, given what they earned.

    python examples/learning/decisions.py

What was recorded is one container of batch size `(runs, steps)`; a batch of windows is an index of
it by two tensors. Each kind of token is written below `tokens` by a step of its own.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.curves import report, told
from examples.learning.pendulums import Pendulums
from torch import Tensor, nn

from kd_core import TensorDict, TensorDictBase, stack
from kd_nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential

ITERATIONS, UPDATES = 30, 10
RUNS, STEPS, WINDOW, BATCH = 256, 60, 8, 64
WIDTH, HEADS, LAYERS = 32, 2, 2


class Trunk(nn.Module):
    """A transformer whose tokens see what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3 * WINDOW))

    def forward(self, time: Tensor, to_go: Tensor, obs: Tensor, action: Tensor) -> Tensor:
        """Return features of the observations: tokens stand in the order of what happened."""
        tokens = torch.stack((to_go + time, obs + time, action + time), 2).flatten(1, 2)
        for layer in self.layers:
            tokens = layer(tokens, src_mask=self.mask)
        return tokens[:, 1::3]


def skilled(obs: Tensor, skill: Tensor) -> Tensor:
    """Return what players of different skill do, `(count, 1)`: they brake when they are upright."""
    cos, sin, speed = obs.unbind(-1)
    wanted = torch.where(cos > 0.8, -3 * sin - 2 * speed, speed.sign())
    noise = 2 * torch.rand(len(obs)) - 1
    return (skill * wanted + (1 - skill) * noise).clamp(-1, 1)[:, None]


def record() -> TensorDict:
    """Return what players did, and `to_go`, what they earned from there on."""
    pendulums, skill, steps = Pendulums(RUNS), torch.rand(RUNS), []
    pendulums.age.zero_()
    for number in range(STEPS):
        step = TensorDict({"obs": pendulums.obs}, [RUNS])
        step["action"] = skilled(step["obs"], skill)
        step["reward"] = pendulums.step(step["action"])["reward"]
        step["time"] = torch.full((RUNS,), number)
        steps.append(step)
    runs = stack(steps, 1)
    runs["to_go"] = runs["reward"].flip(1).cumsum(1).flip(1)[..., None] / STEPS
    return runs


def build_model() -> TensorDictSequential:
    """Build `time, to_go, obs, action -> tokens -> chosen`."""
    kinds = ["time", "to_go", "obs", "action"]
    networks = [nn.Embedding(STEPS, WIDTH), *(nn.Linear(size, WIDTH) for size in (1, 3, 1))]
    return TensorDictSequential(
        *(
            TensorDictModule(network, in_keys=[kind], out_keys=[("tokens", kind)])
            for kind, network in zip(kinds, networks, strict=True)
        ),
        TensorDictModule(
            Trunk(), in_keys=[("tokens", kind) for kind in kinds], out_keys=["features"]
        ),
        TensorDictModule(
            nn.Sequential(nn.Linear(WIDTH, 1), nn.Tanh()),
            in_keys=["features"],
            out_keys=["chosen"],
        ),
    )


def loss_of(batch: TensorDictBase, model: TensorDictModuleBase) -> Tensor:
    """Return how far what is chosen is from what was done, a scalar."""
    return (model(batch)["chosen"] - batch["action"]).square().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0.

    Returns:
        The model, and the history of the iterations: `loss`, the mean of its updates.
    """
    torch.manual_seed(0)
    model, runs = build_model(), record()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history: dict[str, list[float]] = {"loss": []}
    for _ in range(iterations):
        losses = []
        for _ in range(UPDATES):
            starts = torch.randint(STEPS - WINDOW + 1, (BATCH, 1))
            batch = runs[torch.randint(RUNS, (BATCH, 1)), starts + torch.arange(WINDOW)]
            loss = loss_of(batch, model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history["loss"].append(sum(losses) / UPDATES)
    return model, history


if __name__ == "__main__":
    with told(__doc__, "5 s"):
        report("decisions", "A transformer imitates players", train(ITERATIONS)[1])
