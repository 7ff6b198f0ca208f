"""The parameters of several modules, stacked."""

import pytest
import torch
from tests.core.kinds import inner
from torch import nn

from kd_core import InvalidValue, KeySetMismatch, TensorDict


def test_modules_are_stacked_as_leaves_of_autograd() -> None:
    nets = [nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)) for _ in range(3)]
    td = TensorDict.from_modules(*nets)
    weight = td["0", "weight"]
    assert weight.shape == (3, 1, 2)
    assert weight.is_leaf
    assert weight.requires_grad
    assert not td["1", "running_mean"].requires_grad
    assert not torch.equal(weight[0], weight[1])
    lazy = TensorDict.from_modules(*nets, lazy_stack=True)
    assert lazy[1]["0", "weight"] is nets[1][0].weight
    with pytest.raises(KeySetMismatch, match="same structure"):
        TensorDict.from_modules(nets[0], nn.Linear(2, 1))
    with pytest.raises(InvalidValue, match="at least one module"):
        TensorDict.from_modules()


def test_shared_tensors_are_expanded_on_request() -> None:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    second.weight = first.weight
    td = TensorDict.from_modules(first, second, expand_identical=True)
    assert td["weight"].stride(0) == 0
    assert td["bias"].stride(0) != 0


def test_modules_without_state_and_state_dicts() -> None:
    linear = nn.Linear(2, 1)
    net = nn.Sequential(linear, nn.ReLU())
    assert "1" not in TensorDict.from_module(net)
    kept = TensorDict.from_module(net, filter_empty=False)
    assert inner(kept, "1").is_empty()
    with kept.data.to_module(net):
        net(torch.zeros(1, 2))
    state = TensorDict.from_module(net, use_state_dict=True)
    assert state["0", "weight"].data_ptr() == linear.weight.data_ptr()
    assert not state["0", "weight"].requires_grad
    state.mul_(0)
    assert not linear.weight.any()
