"""A compiled sequence sees what has changed, and returns what any other call returns."""

from collections.abc import Callable
from typing import cast

import torch
from tests.nn.plans import X
from torch import Tensor

from kd_core import TensorDict
from kd_nn import TensorDictModule, TensorDictSequential


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


def test_keyword_arguments_that_are_added_in_place_are_passed() -> None:
    model = TensorDictSequential(TensorDictModule(scaled, ["x"], ["y"]))
    compiled = cast("Callable[..., Tensor]", torch.compile(model, backend="eager"))
    compiled(x=X)
    cast("dict[str, object]", model[0].method_kwargs)["by"] = 3.0
    torch.testing.assert_close(compiled(x=X), 3 * X)


def test_step_that_is_replaced_in_its_list_is_run() -> None:
    model = TensorDictSequential(TensorDictModule(torch.neg, ["x"], ["y"]))
    compiled = torch.compile(model, backend="eager")
    compiled(TensorDict(x=X))
    model.module._modules["0"] = TensorDictModule(torch.exp, ["x"], ["z"])
    assert list(compiled(TensorDict(x=X)).keys()) == ["x", "z"]


def parts(x: Tensor) -> dict[str, Tensor]:
    return {"a": x, "b": x + 1}


def test_a_nested_result_is_returned_by_a_call_of_tensors() -> None:
    model = TensorDictSequential(TensorDictModule(parts, ["x"], ["n"]))
    compiled = cast("Callable[..., TensorDict]", torch.compile(model, backend="eager"))
    made = compiled(x=X)
    assert list(made.keys()) == ["a", "b"]
    torch.testing.assert_close(made["b"], X + 1)


def test_a_step_inside_that_gets_another_module_is_traced_anew() -> None:
    torch.compiler.reset()  # other models were compiled, and they count together
    step = TensorDictModule(torch.neg, ["a"], ["b"])
    inner = TensorDictSequential(step, TensorDictModule(torch.tanh, ["b"], ["c"]))
    model = TensorDictSequential(inner, partial_tolerant=True)  # interpreted, unlike the inner one
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    on_tensors = cast("Callable[..., list[Tensor]]", compiled)
    a = torch.ones(3, 2)
    for function in (torch.exp, torch.sin):
        td = model(TensorDict(a=a, batch_size=[3]))
        assert torch.equal(compiled(TensorDict(a=a, batch_size=[3]))["c"], td["c"])
        assert torch.equal(on_tensors(a=a)[1], td["c"])
        step.module = function
