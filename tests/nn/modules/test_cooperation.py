"""Classes of users between ours in the order of resolution get what they would from the peer."""

from typing import cast

import torch
from torch import Tensor, nn

from kd_core import TensorDict
from kd_nn import TensorDictModule, TensorDictSequential


def step() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 3), ["a"], ["b"])


class Specified(TensorDictModule):
    """A module with an attribute of its own, called as one of ours once was."""

    def __init__(self, *args: object, spec: str = "mine", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # passed on
        self.spec = spec
        self.keys_seen = kwargs


class Both(TensorDictSequential, Specified):  # type: ignore[misc]  # of `module`
    """A sequence that calls the second constructor, as libraries do."""

    def __init__(self, *modules: nn.Module, partial_tolerant: bool = False) -> None:
        self.partial_tolerant = partial_tolerant
        super(TensorDictSequential, self).__init__(
            spec="of both", module=nn.ModuleList(list(modules)), in_keys=["a"], out_keys=["b"]
        )


class Mixed(TensorDictSequential, Specified):  # type: ignore[misc]  # of `module`
    """A sequence whose constructor reaches the class between."""


def test_a_sequence_is_a_module() -> None:
    assert isinstance(TensorDictSequential(step()), TensorDictModule)


def test_a_class_between_a_sequence_and_its_base_gets_module_and_keys() -> None:
    mixed = Mixed(step())
    assert mixed.spec == "mine"
    assert mixed.keys_seen["in_keys"] == ["a"]
    assert mixed.keys_seen["out_keys"] == ["b"]
    assert isinstance(mixed.keys_seen["module"], nn.ModuleList)
    assert cast(Tensor, mixed(torch.ones(3))).shape == (3,)


def test_a_sequence_takes_its_steps_by_the_constructor_of_a_module() -> None:
    both = Both(step(), TensorDictModule(nn.Tanh(), ["b"], ["c"]), partial_tolerant=True)
    assert (both.spec, both.partial_tolerant) == ("of both", True)
    assert (both.in_keys, both.out_keys) == (["a"], ["b", "c"])
    for _ in range(3):
        result = cast(Tensor, both.select_out_keys("c")(torch.ones(3)))
        assert result.abs().max() <= 1


def test_an_attribute_of_a_user_may_be_called_spec() -> None:
    module = Specified(nn.Linear(3, 3), ["a"], ["b"], spec="s")
    for _ in range(3):
        assert cast(Tensor, module(torch.ones(3))).shape == (3,)
    assert module.spec == "s"


def test_the_container_to_write_comes_by_position() -> None:
    sequence = TensorDictSequential(step())
    out = TensorDict()
    for _ in range(3):
        assert sequence(TensorDict(a=torch.ones(3)), out) is out
    assert list(out.keys()) == ["b"]
