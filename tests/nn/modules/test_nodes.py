import torch
from torch import nn

from kd_core import NestedKey
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


def test_a_sequence_asks_a_class_that_computes_its_keys() -> None:
    class Renamed(TensorDictModule):
        @property
        def in_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
            return ["other"]

    model = TensorDictSequential(Renamed(torch.neg, ["x"], ["y"]))
    assert model.key_graph().nodes[0].reads == ("other",)


def test_equal_steps_of_two_sequences_keep_their_own_selection() -> None:
    def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x

    steps = [TensorDictModule(pair, ["x"], ["y", "z"]) for _ in range(2)]
    first, second = (TensorDictSequential(step) for step in steps)
    steps[0].select_out_keys("z")
    assert first.out_keys == ["z"]
    assert second.out_keys == ["y", "z"]
