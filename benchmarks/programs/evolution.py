"""`examples.learning.evolution` by hand: plain dicts of parameters, the same numbers."""

import torch
from examples.learning.cart_poles import CartPoles
from examples.learning.evolution import CANDIDATES, NOISE, RATE, STEPS, network
from torch import Tensor, nn
from torch.func import functional_call


def drawn(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return noise for each candidate, half of it the other half with another sign."""
    half = {key: torch.randn(CANDIDATES // 2, *leaf.shape) for key, leaf in params.items()}
    return {key: torch.cat((leaf, -leaf)) for key, leaf in half.items()}


def scores_of(actor: nn.Module, candidates: dict[str, Tensor]) -> Tensor:
    """Return for how many steps each candidate balances its pole, `(CANDIDATES,)`."""

    def push(params: dict[str, Tensor], obs: Tensor) -> Tensor:
        return functional_call(actor, params, (obs,))

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
    """Train an actor from seed 0; return it and the history."""
    torch.manual_seed(0)
    actor = network()
    params = {key: leaf.detach().clone() for key, leaf in actor.named_parameters()}
    history: dict[str, list[float]] = {"steps": [], "loss": []}
    for _ in range(iterations):
        noise = drawn(params)
        scores = scores_of(actor, {key: params[key] + noise[key] * NOISE for key in params})
        weights = (scores - scores.mean()) / (scores.std() + 1e-8) / (CANDIDATES * NOISE)
        for key, leaf in params.items():
            leaf += torch.tensordot(weights, noise[key], 1) * RATE
        history["steps"].append(scores.mean().item())
        history["loss"].append(-scores.max().item())
    actor.load_state_dict(params)
    return actor, history
