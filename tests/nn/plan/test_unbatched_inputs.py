"""A tensor that all rows share reaches every step without its wrapper, however a plan runs."""

from collections.abc import Callable

import pytest
import torch

from kd_core import TensorDict, UnbatchedTensor
from kd_nn import TensorDictModule, TensorDictSequential


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_without_batch_dimensions_is_unwrapped(compiled: bool) -> None:
    scaled = TensorDictModule(torch.mul, ["x", "scale"], ["y"])
    module: Callable[..., object] = TensorDictSequential(
        scaled, TensorDictModule(torch.add, ["y", ("n", "shift")], ["z"])
    )
    if compiled:
        torch._dynamo.reset()
        module = torch.compile(module, backend="eager", fullgraph=True)
    x, scale = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, 2.0, 3.0])
    shift = UnbatchedTensor(torch.ones(3))
    for _ in range(4):
        td = TensorDict({"x": x, "scale": UnbatchedTensor(scale), "n": {"shift": shift}}, [2])
        module(td)
        assert torch.equal(td["z"], x * scale + 1)


def test_what_a_step_makes_of_it_alone_has_no_batch_dimensions_either() -> None:
    module = TensorDictSequential(
        TensorDictModule(torch.nn.Linear(3, 5), ["scale"], ["h"]),
        TensorDictModule(torch.neg, ["h"], ["y"]),
    )
    for _ in range(4):
        td = TensorDict({"scale": UnbatchedTensor(torch.ones(3))}, [2])
        module(td)
        assert td[0]["y"].shape == (5,)
        assert torch.equal(td["y"], -td["h"])
