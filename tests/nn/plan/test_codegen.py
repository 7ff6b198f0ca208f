"""What the text of a plan does between its calls: arguments, and values that end."""

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
