"""What `forward` of a probabilistic module takes next to a container."""

import torch

from kd_core import TensorDict
from kd_probabilistic import ProbabilisticTensorDictModule


def module() -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        ["loc", "scale"], ["x"], distribution_class=torch.distributions.Normal
    )


def params() -> TensorDict:
    return TensorDict(loc=torch.zeros(2), scale=torch.ones(2))


def test_the_container_to_write_comes_by_position() -> None:
    out = TensorDict()
    assert module()(params(), out) is out
    assert torch.equal(out["x"], torch.zeros(2))
    assert "x" in module()(params(), None)


def test_a_subclass_that_draws_itself_asks_for_no_value() -> None:
    td = params()
    assert module()(td, None, _requires_sample=False) is td
    assert "x" not in td
