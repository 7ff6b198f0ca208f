from collections.abc import Callable

import pytest
import torch

from kd_core import TensorDict

Call = Callable[[TensorDict], TensorDict]


def test_integers_beside_many_leaves_that_need_gradients() -> None:
    leaves = {f"p{i}": torch.ones(2, requires_grad=True) for i in range(9)}
    td = TensorDict({**leaves, "count": torch.tensor([1, 2])}, [2])
    assert td.clone()["count"].tolist() == [1, 2]
    assert (td + 1)["count"].tolist() == [2, 3]
    (slope,) = torch.autograd.grad((td * 3)["p4"].sum(), leaves["p4"])
    assert slope.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda td: td.exp(),
        lambda td: td.clone(),
        lambda td: td * 2,
        lambda td: td + td,
        lambda td: (td * 1).mul_(3),
        lambda td: td.clone().add_(td),
    ],
    ids=["exp", "clone", "mul", "add", "mul_", "add_"],
)
def test_only_what_comes_of_leaves_that_need_gradients_needs_them(call: Call) -> None:
    leaves = {f"p{i}": torch.ones(2, requires_grad=True) for i in range(9)}
    result = call(TensorDict({**leaves, "fixed": torch.ones(2)}, [2]))
    assert result["p0"].requires_grad
    assert not result["fixed"].requires_grad
