import torch
from torch import nn

from kd_nn import TensorDictModule, TensorDictSequential


def test_counts_of_parameters_are_those_of_this_moment() -> None:
    linear = nn.LazyLinear(4)
    model = TensorDictSequential(TensorDictModule(linear, ["x"], ["y"]))
    assert model.key_graph().nodes[0].parameters == 0
    model(torch.ones(2, 3))
    assert model.key_graph().nodes[0].parameters == 16
    linear.register_parameter("bias", None)
    assert model.key_graph().nodes[0].parameters == 12


def test_labels_are_those_of_this_moment() -> None:
    inner = TensorDictModule(nn.ReLU(), ["x"], ["y"])
    model = TensorDictSequential(inner)
    inner.module = nn.Tanh()
    assert [node.label for node in model.key_graph().nodes] == ["Tanh"]
