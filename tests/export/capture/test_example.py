"""A module is copied whatever its attributes hold, or the attribute that cannot be is named."""

from threading import Lock

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from kd_export import NotExportable, export
from kd_nn import TensorDictModule


class Actor(nn.Module):
    """A policy as frameworks write it: it keeps the distribution of its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.dist: Normal | None = None
        self.log: dict[str, list[Tensor]] = {"losses": []}

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.net(x)
        if self.training:
            self.dist = Normal(mean, mean.exp())
            self.log["losses"].append(mean.sum())
        return mean


def keyed(module: nn.Module) -> TensorDictModule:
    return TensorDictModule(module, in_keys=["x"], out_keys=["y"])


def test_a_policy_that_keeps_its_last_distribution_is_exported() -> None:
    actor = Actor()
    loss = actor(torch.randn(4, 3)).sum()
    kept = actor.dist
    assert kept is not None
    program = export(keyed(actor), {"x": torch.zeros(2, 3)})
    x = torch.randn(5, 3)
    torch.testing.assert_close(program({"x": x})["y"], actor.net(x).detach())
    assert actor.dist is kept
    assert kept.loc.grad_fn is not None
    loss.backward()  # the graph of the original is whole


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    module[1].guard = Lock()  # type: ignore[assignment]  # what torch does not expect is the point
    with pytest.raises(NotExportable, match=r"attribute `module\.1\.guard`, a lock, cannot"):
        export(keyed(module), {"x": torch.zeros(2, 3)})
