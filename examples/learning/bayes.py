"""An ensemble of networks as a Bayesian regression (Pearce et al. 2020) knows what it was shown.

    python examples/learning/bayes.py

All members run as one module. Each is held by a prior to where it began: their parameters are a
container, and so is the distance to it.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.curves import report, told
from torch import Tensor, nn
from torch.distributions import Normal

from kd_core import TensorDict, TensorDictBase
from kd_nn import EnsembleModule, NormalParamExtractor, TensorDictModule, TensorDictSequential

ITERATIONS, UPDATES = 40, 20
ROWS, BATCH = 1024, 64
MEMBERS, WIDTH, PRIOR = 8, 32, 1e-3


def network() -> nn.Sequential:
    """Build the network of a member: mean and raw scale of what is measured."""
    return nn.Sequential(
        nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
    )


def build_members() -> EnsembleModule:
    """Build `x -> raw -> loc, scale` for all members, of shape `(MEMBERS, batch, 1)`."""
    member = TensorDictSequential(
        TensorDictModule(network(), in_keys=["x"], out_keys=["raw"]),
        TensorDictModule(NormalParamExtractor(), in_keys=["raw"], out_keys=["loc", "scale"]),
    )
    return EnsembleModule(member, num_copies=MEMBERS)


def measured() -> TensorDict:
    """Return points of a wave, measured where it is low or high but not between, with noise."""
    side = torch.randint(2, (ROWS, 1)) * 2 - 1
    x = side * (1 + 2 * torch.rand(ROWS, 1))
    noise = torch.randn(ROWS, 1) * (0.05 + 0.1 * (x > 0))
    return TensorDict({"x": x, "y": torch.sin(2 * x) + noise}, [ROWS])


def loss_of(
    batch: TensorDictBase, members: EnsembleModule, params: TensorDict, began: TensorDict
) -> Tensor:
    """Return the surprise of all members and how far they are from where they began, a scalar."""
    found = members(batch.select("x"))
    surprise = -Normal(found["loc"], found["scale"]).log_prob(batch["y"]).mean((1, 2)).sum()
    apart = (params - began).pow(2)
    return surprise + PRIOR * sum(leaf.sum() for leaf in apart.values(True, True))


@torch.no_grad()
def doubt_of(members: EnsembleModule) -> float:
    """Return how much more members differ where nothing was measured than where it was."""
    found = members(TensorDict({"x": torch.linspace(-3, 3, 61)[:, None]}, [61]))
    doubt = found["loc"].std(0).squeeze(-1)
    return (doubt[21:40].mean() / torch.cat((doubt[:21], doubt[40:])).mean()).item()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an ensemble from seed 0.

    Returns:
        The ensemble, and the history of the iterations: `doubt`, how many times more members differ
        where nothing was measured, and `loss` of the last batch.
    """
    torch.manual_seed(0)
    members, rows = build_members(), measured()
    params = TensorDict.from_module(members)
    began = params.data.clone()
    optimizer = torch.optim.Adam(members.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"doubt": [], "loss": []}
    for _ in range(iterations):
        for _ in range(UPDATES):
            batch = rows[torch.randint(ROWS, (BATCH,))]
            loss = loss_of(batch, members, params, began)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history["doubt"].append(doubt_of(members))
        history["loss"].append(loss.item())
    return members, history


if __name__ == "__main__":
    with told(__doc__, "5 s"):
        report("bayes", "An ensemble doubts what it was not shown", train(ITERATIONS)[1])
