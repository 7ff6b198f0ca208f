"""Evolution strategies (Salimans et al. 2017) learn to balance poles without gradients.

    python examples/learning/evolution.py

The parameters of all candidates are one container of batch size `(CANDIDATES,)`, and `vmap` runs
the module with each row of it on a cart of its own.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.cart_poles import CartPoles
from examples.learning.curves import report, told
from torch import Tensor, nn

from kd_core import TensorDict, cat
from kd_nn import TensorDictModule

ITERATIONS, STEPS = 60, 200
CANDIDATES, NOISE, RATE = 64, 0.1, 0.1


def network() -> nn.Sequential:
    """Build the network whose sign is the direction."""
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(-2))


def build_actor() -> TensorDictModule:
    """Build `obs -> push`."""
    return TensorDictModule(network(), in_keys=["obs"], out_keys=["push"])


def drawn(params: TensorDict) -> TensorDict:
    """Return noise for each candidate, half of it the other half with another sign."""
    half = CANDIDATES // 2
    noise = params.apply(lambda leaf: torch.randn(half, *leaf.shape), batch_size=[half])
    return cat([noise, -noise])


def mixed(noise: TensorDict, weights: Tensor) -> TensorDict:
    """Return the mean of the noise of all candidates, weighted."""
    weights = weights / (CANDIDATES * NOISE)
    return noise.apply(lambda leaf: torch.tensordot(weights, leaf, 1), batch_size=[])


def scores_of(actor: TensorDictModule, candidates: TensorDict) -> Tensor:
    """Return for how many steps each candidate balances its pole, `(CANDIDATES,)`."""

    def push(params: TensorDict, obs: Tensor) -> Tensor:
        with params.to_module(actor):
            return actor(TensorDict({"obs": obs}, [1]))["push"]

    carts = CartPoles(CANDIDATES)
    scores, stands = torch.zeros(CANDIDATES), torch.ones(CANDIDATES, dtype=torch.bool)
    run = torch.vmap(push)
    for _ in range(STEPS):
        scores += stands
        after = carts.step((run(candidates, carts.state[:, None]).squeeze(-1) > 0).long())
        stands &= ~after["fell"]
    return scores


@torch.no_grad()
def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an actor from seed 0.

    Returns:
        The actor, and the history of the iterations: `steps`, how long a candidate balances its
        pole, and `loss`, minus that of the best.
    """
    torch.manual_seed(0)
    actor = build_actor()
    params = TensorDict.from_module(actor).data.clone()
    history: dict[str, list[float]] = {"steps": [], "loss": []}
    for _ in range(iterations):
        noise = drawn(params)
        scores = scores_of(actor, params.expand(CANDIDATES) + noise * NOISE)
        params += mixed(noise, (scores - scores.mean()) / (scores.std() + 1e-8)) * RATE
        history["steps"].append(scores.mean().item())
        history["loss"].append(-scores.max().item())
    TensorDict.from_module(actor).data.update_(params)
    return actor, history


if __name__ == "__main__":
    with told(__doc__, "10 s"):
        report("evolution", "Evolution balances a pole", train(ITERATIONS)[1], limit=("steps", 200))
