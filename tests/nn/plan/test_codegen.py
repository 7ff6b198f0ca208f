"""What the text of a plan does between its calls: arguments, and values that end."""

import weakref
from typing import cast

import pytest
import torch
from tests.nn.plans import FORMS, X, call
from torch import Tensor

from kd_nn import TensorDictModule, TensorDictSequential


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


@pytest.mark.parametrize("form", FORMS)
def test_keyword_arguments_that_are_added_in_place_are_passed(form: str) -> None:
    model = TensorDictSequential(TensorDictModule(scaled, ["x"], ["y"]))
    for _ in range(3):
        call(model, form)
    cast("dict[str, object]", model[0].method_kwargs)["by"] = 3.0
    assert torch.equal(call(model, form)["y"], 3 * X)


@pytest.mark.parametrize("out_keys", [["a", "unread"], ["a", "_"]])
@pytest.mark.parametrize("form", FORMS)
def test_value_that_nobody_reads_ends_after_its_call(form: str, out_keys: list[str]) -> None:
    unread: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        extra = x * 2
        unread.append(weakref.ref(extra))
        return x + 1, extra

    def look(x: Tensor) -> Tensor:
        alive.append(unread[-1]() is not None)
        return x

    model = TensorDictSequential(
        TensorDictModule(two, ["x"], out_keys), TensorDictModule(look, ["a"], ["y"])
    ).select_out_keys("y")
    for _ in range(3):
        call(model, form)
    assert alive[-1] is False
