"""`examples.learning.bayes` by hand: plain dicts of stacked parameters, the same numbers."""

import copy
import math

import torch
from examples.learning.bayes import BATCH, MEMBERS, PRIOR, ROWS, UPDATES, network
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call, stack_module_state
from torch.nn.functional import softplus

SCALE_BIAS = math.log(math.expm1(1 - 0.01))


class Members(nn.Module):
    """Several networks that run as one, on stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        member = network()
        copies = [copy.deepcopy(member) for _ in range(MEMBERS)]
        for each in copies:
            for layer in each:
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
        stacked, _ = stack_module_state(copies)
        self.params = nn.ParameterList(stacked.values())
        self._names = list(stacked)
        self._member = [member.requires_grad_(False)]  # in a list, so that it is not registered

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and scale of each member, shape `(MEMBERS, batch, 1)`."""
        params = dict(zip(self._names, self.params, strict=True))
        found: tuple[Tensor, Tensor] = torch.vmap(self._one, (0, None))(params, x)
        return found

    def _one(self, params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        loc, raw = functional_call(self._member[0], params, (x,)).chunk(2, -1)
        return loc, (softplus(raw + SCALE_BIAS) + 0.01).clamp_min(1e-4)


def measured() -> dict[str, Tensor]:
    """Return points of a wave, measured where it is low or high but not between, with noise."""
    side = torch.randint(2, (ROWS, 1)) * 2 - 1
    x = side * (1 + 2 * torch.rand(ROWS, 1))
    noise = torch.randn(ROWS, 1) * (0.05 + 0.1 * (x > 0))
    return {"x": x, "y": torch.sin(2 * x) + noise}


def loss_of(batch: dict[str, Tensor], members: Members, began: list[Tensor]) -> Tensor:
    """Return the surprise of all members and how far they are from where they began, a scalar."""
    loc, scale = members(batch["x"])
    surprise = -Normal(loc, scale).log_prob(batch["y"]).mean((1, 2)).sum()
    apart = ((now - then).pow(2).sum() for now, then in zip(members.params, began, strict=True))
    return surprise + PRIOR * sum(apart)


@torch.no_grad()
def doubt_of(members: Members) -> float:
    """Return how much more members differ where nothing was measured than where it was."""
    loc, _ = members(torch.linspace(-3, 3, 61)[:, None])
    doubt = loc.std(0).squeeze(-1)
    return (doubt[21:40].mean() / torch.cat((doubt[:21], doubt[40:])).mean()).item()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an ensemble from seed 0; return it and the history."""
    torch.manual_seed(0)
    members, rows = Members(), measured()
    began = [param.detach().clone() for param in members.params]
    optimizer = torch.optim.Adam(members.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"doubt": [], "loss": []}
    for _ in range(iterations):
        for _ in range(UPDATES):
            index = torch.randint(ROWS, (BATCH,))
            loss = loss_of({key: entry[index] for key, entry in rows.items()}, members, began)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history["doubt"].append(doubt_of(members))
        history["loss"].append(loss.item())
    return members, history
