import torch

from kd_core import TensorDict


def test_integers_beside_many_leaves_that_need_gradients() -> None:
    leaves = {f"p{i}": torch.ones(2, requires_grad=True) for i in range(9)}
    td = TensorDict({**leaves, "count": torch.tensor([1, 2])}, [2])
    assert td.clone()["count"].tolist() == [1, 2]
    assert (td + 1)["count"].tolist() == [2, 3]
    (slope,) = torch.autograd.grad((td * 3)["p4"].sum(), leaves["p4"])
    assert slope.tolist() == [3.0, 3.0]
