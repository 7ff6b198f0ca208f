"""A module is copied whatever its attributes hold, or the attribute that cannot be is named."""

from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from kd_export import ExportError, NotExportable, VerifyError, export, save
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


def test_an_example_of_arrays_is_taken() -> None:
    module = keyed(nn.Linear(3, 2))
    program = export(module, {"x": np.ones((3, 2), dtype=np.float32).T})
    assert program.schema.input("x").describe() == "float32 (batch, 3)"
    assert program({"x": torch.ones(5, 3)})["y"].shape == (5, 2)


def test_an_example_of_another_dtype_than_the_weights_is_named(tmp_path: Path) -> None:
    x = torch.zeros(2, 3, dtype=torch.float64)
    message = r"gives `x` as float64\. Give it in the dtype that the module computes in"
    with pytest.raises(VerifyError, match=message):
        save(keyed(nn.Linear(3, 2)), tmp_path / "m.pt2", {"x": x})
    assert save(keyed(nn.Linear(3, 2).double()), tmp_path / "m.pt2", {"x": x}).ok


def test_a_dtype_that_a_runtime_lacks_is_named(tmp_path: Path) -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    module = keyed(nn.Linear(3, 2).bfloat16())
    with pytest.raises(ExportError, match=r"`x` is bfloat16, .*`module\.float\(\)`"):
        save(module, tmp_path / "m.onnx", {"x": x})
    assert save(module, tmp_path / "m.pt2", {"x": x}).ok


class Stubborn:
    def __deepcopy__(self, memo: object) -> object:
        raise LookupError("not twice.")


def test_whatever_a_copy_raises_the_attribute_is_named() -> None:
    layer = nn.Linear(3, 2)
    layer.held = {"one": [Stubborn()]}  # type: ignore[assignment]  # any attribute
    module = TensorDictModule(layer, in_keys=["x"], out_keys=["y"])
    with pytest.raises(NotExportable) as caught:
        export(module, {"x": torch.zeros(2, 3)})
    assert "its attribute `module.held`, a dict, cannot: not twice. Delete" in str(caught.value)
