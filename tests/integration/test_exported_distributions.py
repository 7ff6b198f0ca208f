"""A policy of several distributions in every format; the lane `formats` has the runtimes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import kd_export
from kd_nn import NormalParamExtractor, TensorDictModule
from kd_probabilistic import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)

RUNTIMES = {
    ".pt2": "torch",
    ".onnx": "onnxruntime",
    ".xml": "openvino",
    ".pte": "executorch",
}


class Heads(nn.Module):
    """Parameters of a position and of a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 7)
        self.extract = NormalParamExtractor()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        move, kind = self.net(x).split([4, 3], -1)
        loc, scale = self.extract(move)
        return loc, scale, kind


def policy() -> ProbabilisticTensorDictSequential:
    torch.manual_seed(0)
    params = [("params", "move", "loc"), ("params", "move", "scale"), ("params", "kind", "logits")]
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Heads(), in_keys=["x"], out_keys=params),
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=["move", ("pick", "kind")],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"move": Normal, "kind": Categorical},
                "name_map": {"kind": ("pick", "kind")},
            },
        ),
    )


@pytest.mark.parametrize("suffix", RUNTIMES)
def test_a_composite_policy_gives_what_it_gives_eagerly(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip(RUNTIMES[suffix], reason="the lane `formats` installs it")
    module, path, example = policy(), tmp_path / f"policy{suffix}", {"x": torch.randn(2, 3)}
    kd_export.save(module, path, example, dynamic={"batch": (1, 16)}, mode="deterministic")
    assert kd_export.verify(path, module, batch_sizes=[1, 2, 7], trusted=True).ok
    session = kd_export.open(path, trusted=True)
    x = torch.randn(7, 3)
    results = session.run({"x": x})
    with torch.no_grad():
        loc, _, logits = module.eval()[0](x=x)
    torch.testing.assert_close(results["move"], loc)
    assert torch.equal(results["pick.kind"], logits.argmax(-1))
