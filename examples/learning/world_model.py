"""A recurrent world model imagines where a pendulum swings, from actions alone.

    python examples/learning/world_model.py

One step of the model is a sequence of keyed modules that reads `obs`, `action` and `hidden` and
writes below `next`. It sees the first steps of a window; then it lives on what it imagines.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.curves import report, told
from examples.learning.pendulums import Pendulums
from torch import Tensor, nn
from torch.distributions import Normal

from kd_core import TensorDict, TensorDictBase, stack
from kd_nn import NormalParamExtractor, TensorDictModule, TensorDictModuleBase, TensorDictSequential

ITERATIONS, UPDATES = 60, 10
WINDOWS, SEEN, IMAGINED, BATCH = 1024, 4, 12, 64
HIDDEN = 64


def join(obs: Tensor, action: Tensor) -> Tensor:
    """Return what the memory reads."""
    return torch.cat((obs, action), -1)


def build_model() -> TensorDictSequential:
    """Build `obs, action, hidden -> next: hidden, loc, scale, reward`."""
    return TensorDictSequential(
        TensorDictModule(join, in_keys=["obs", "action"], out_keys=["input"]),
        TensorDictModule(
            nn.GRUCell(4, HIDDEN), in_keys=["input", "hidden"], out_keys=[("next", "hidden")]
        ),
        TensorDictModule(
            nn.Sequential(nn.Linear(HIDDEN, 6), NormalParamExtractor()),
            in_keys=[("next", "hidden")],
            out_keys=[("next", "loc"), ("next", "scale")],
        ),
        TensorDictModule(
            nn.Sequential(nn.Linear(HIDDEN, 1), nn.Flatten(-2)),
            in_keys=[("next", "hidden")],
            out_keys=[("next", "reward")],
        ),
    )


def record() -> TensorDict:
    """Return what pendulums do under random actions, of batch size `(windows, steps)`."""
    pendulums = Pendulums(WINDOWS)
    pendulums.age.zero_()
    steps = []
    for _ in range(SEEN + IMAGINED):
        step = TensorDict({"obs": pendulums.obs}, [WINDOWS])
        step["action"] = 2 * torch.rand(WINDOWS, 1) - 1
        step["next"] = pendulums.step(step["action"])
        steps.append(step)
    return stack(steps, 1)


def imagine(windows: TensorDictBase, model: TensorDictModuleBase) -> TensorDict:
    """Return what the model expects after each step, of batch size `(windows, steps)`."""
    count = len(windows)
    expected: list[TensorDict] = []
    for number, seen in enumerate(windows.select("obs", "action").unbind(1)):
        before = expected[-1] if expected else TensorDict(hidden=torch.zeros(count, HIDDEN))
        obs = seen["obs"] if number < SEEN else before["loc"]
        step = {"obs": obs, "action": seen["action"], "hidden": before["hidden"]}
        expected.append(model(TensorDict(step, [count])).nested("next", TensorDict))
    return stack(expected, 1)


def loss_of(expected: TensorDictBase, after: TensorDictBase) -> Tensor:
    """Return how little was expected of what came after, a scalar."""
    surprise = -Normal(expected["loc"], expected["scale"]).log_prob(after["obs"])
    return surprise.mean() + (expected["reward"] - after["reward"]).square().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0.

    Returns:
        The model, and the history of the iterations: `loss`, and `error`, the distance between the
        last imagined observation of a window and the true one.
    """
    torch.manual_seed(0)
    model, windows = build_model(), record()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"error": [], "loss": []}
    for _ in range(iterations):
        for _ in range(UPDATES):
            batch = windows[torch.randint(WINDOWS, (BATCH,))]
            expected = imagine(batch, model)
            loss = loss_of(expected, batch.nested("next", TensorDict))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        gap = expected[:, -1]["loc"] - batch[:, -1]["next", "obs"]
        history["error"].append(gap.norm(dim=-1).mean().item())
        history["loss"].append(loss.item())
    return model, history


if __name__ == "__main__":
    with told(__doc__, "10 s"):
        report("world_model", "A GRU imagines a pendulum", train(ITERATIONS)[1], limit=("error", 0))
