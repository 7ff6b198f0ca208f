"""What type checkers infer for keyed modules; `assert_type` does nothing when it runs."""

import inspect
from typing import Any, assert_type

import pytest
import torch
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, TensorDictBase
from kd_nn import (
    KeyGraph,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    as_tensordict_module,
    dispatch,
)

X = torch.ones(2, 3)


class Double(TensorDictModuleBase):
    in_keys = ["x", ("a", "b")]  # noqa: RUF012  # as users write it
    out_keys = ["y"]  # noqa: RUF012  # as users write it

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("y", tensordict["x"] * 2)


class InInit(TensorDictModuleBase):
    def __init__(self) -> None:
        super().__init__()
        self.in_keys = ["x"]
        self.out_keys = ["y", ("n", "z")]


def test_call_with_a_container_gives_its_kind() -> None:
    module = TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["y"])
    assert_type(module(TensorDict(x=X)), TensorDict)
    bases: list[TensorDictBase] = [TensorDict(x=X)]
    assert_type(module(bases[0]), TensorDictBase)
    assert_type(TensorDictSequential(module)(TensorDict(x=X)), TensorDict)
    assert_type(Double()(TensorDict(x=X)), TensorDict)


def test_call_with_tensors_gives_tensors() -> None:
    module = TensorDictModule(torch.neg, in_keys=["x"], out_keys=["y"])
    assert_type(module(X), Tensor | Any)
    assert_type(module(x=X), Tensor | Any)
    assert_type(TensorDictSequential(module)(x=X), Tensor | Any)
    assert_type(Double()(x=X, a_b=X), Tensor | Any)
    assert_type(Double()(x=X, a={"b": X}), Tensor | Any)


def test_forward_of_a_dispatched_method_is_typed() -> None:
    assert_type(Double().forward(TensorDict(x=X)), TensorDict)
    assert_type(Double().forward(x=X, a_b=X), Tensor | Any)
    assert list(inspect.signature(Double()).parameters) == ["x", "a_b"]


def test_keys_and_selection() -> None:
    module = InInit()
    assert_type(module.in_keys, list[NestedKey])
    assert_type(module.out_keys, list[NestedKey])
    assert_type(module.select_out_keys("y"), InInit)
    model = TensorDictSequential(Double())
    assert_type(model.select_out_keys("y"), TensorDictSequential)
    assert_type(model[0], TensorDictModuleBase)
    assert_type(model[:1], TensorDictSequential)
    assert_type(model.select_subsequence(out_keys=["y"]), TensorDictSequential)
    assert_type(model.key_graph(), KeyGraph)


def test_decorated_function_is_a_module() -> None:
    @as_tensordict_module(["x"], ["y"])
    def negate(x: Tensor) -> Tensor:
        return -x

    assert_type(negate, TensorDictModule)


def test_what_mypy_objects_to() -> None:
    with pytest.raises(TypeError):
        TensorDictModule(Tensor.neg, ["x"], ["y"])(x=object())  # type: ignore[call-overload]  # wrong on purpose
