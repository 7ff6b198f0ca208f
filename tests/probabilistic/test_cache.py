"""`cache_dist=True` is accepted, and no write is missed, whether torch counts it or not."""

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, Uniform

from kd_core import TensorDict
from kd_probabilistic import ProbabilisticTensorDictModule


def by_data(loc: nn.Parameter) -> None:
    loc.data.copy_(torch.ones(3))


def by_numpy(loc: nn.Parameter) -> None:
    loc.detach().numpy()[:] = np.ones(3)


def by_storage(loc: nn.Parameter) -> None:
    source = torch.ones(3)
    loc.untyped_storage().copy_(source.untyped_storage())


def by_swap(loc: nn.Parameter) -> None:
    torch.utils.swap_tensors(loc, nn.Parameter(torch.ones(3)))  # type: ignore[no-untyped-call]  # by torch


def by_fused_optimiser(loc: nn.Parameter) -> None:
    loc.grad = -torch.ones(3)
    torch.optim.SGD([loc], lr=1.0, fused=True).step()


@pytest.mark.parametrize("write", [by_data, by_numpy, by_storage, by_swap, by_fused_optimiser])
def test_a_distribution_is_that_of_the_parameters_of_now(
    write: Callable[[nn.Parameter], None],
) -> None:
    module = ProbabilisticTensorDictModule(
        ["logits"], ["x"], distribution_class=Categorical, cache_dist=True
    )
    logits = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]) - 1)
    if write is by_fused_optimiser:
        logits = nn.Parameter(torch.zeros(3))
    td = TensorDict(logits=logits)
    module.get_dist(td)
    module(td.copy())
    write(logits)
    assert torch.equal(module.get_dist(td).probs, torch.full((3,), 1 / 3))  # type: ignore[attr-defined]  # of this class


def test_tensors_among_the_further_arguments_are_read_anew() -> None:
    high = torch.ones(2)
    module = ProbabilisticTensorDictModule(
        ["low"],
        ["x"],
        distribution_class=Uniform,
        distribution_kwargs={"high": high},
        default_interaction_type="mean",
        cache_dist=True,
    )
    low = torch.zeros(2)
    module(low)
    high.data.fill_(3.0)
    assert cast(Tensor, module(low)).tolist() == [1.5, 1.5]


def test_the_default_dtype_of_now_is_used() -> None:
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["x"], distribution_class=Normal, cache_dist=True
    )
    td = TensorDict(loc=0.0, scale=1.0)
    assert module.get_dist(td).mean.dtype is torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        made: Tensor = module.get_dist(TensorDict(loc=0.0, scale=1.0)).mean
    finally:
        torch.set_default_dtype(before)
    assert made.dtype is torch.float64
