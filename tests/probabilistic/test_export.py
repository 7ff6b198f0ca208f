"""Every distribution that can, exports by keyword in deterministic mode, checks left alone."""

from collections.abc import Callable

import pytest
import torch
from tests.probabilistic.cases import CASES, FACTORIES, LOC_SCALE, POSITIVE, REAL
from torch import Tensor, nn
from torch import distributions as d
from torch.distributions import Distribution
from torch.export import Dim, export

from kd_nn import NormalParamExtractor, TensorDictModule
from kd_probabilistic import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_interaction_type,
)


@pytest.fixture(autouse=True)
def checks_values() -> object:
    """Check values as torch does before dynamo is used."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)


@pytest.mark.parametrize(
    ("distribution", "params"),
    [*CASES.items(), *FACTORIES.items()],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_distribution_exports_by_keyword(
    distribution: Callable[..., Distribution], params: dict[str, Tensor]
) -> None:
    module = ProbabilisticTensorDictModule(
        list(params), ["x"], distribution_class=distribution, return_log_prob=False
    )
    program = export(module, (), params, strict=False)
    torch.testing.assert_close(program.module()(**params), module(**params))
    assert Distribution._validate_args is True


@pytest.mark.parametrize("strict", [False, True])
def test_actor_exports_with_a_dynamic_batch_and_its_log_prob(strict: bool) -> None:
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 6), ["x"], ["p"]),
        TensorDictModule(NormalParamExtractor(), ["p"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["a"], distribution_class=d.Normal, return_log_prob=True
        ),
    ).select_out_keys("a", "a_log_prob")
    shapes = {"x": {0: Dim("batch")}}
    program = export(actor, (), {"x": torch.randn(3, 4)}, dynamic_shapes=shapes, strict=strict)
    x = torch.randn(7, 4)
    for got, expected in zip(program.module()(x=x), actor(x=x), strict=True):
        torch.testing.assert_close(got, expected)


def test_random_draw_exports() -> None:
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["x"], distribution_class=d.Normal, default_interaction_type="random"
    )
    program = export(module, (), LOC_SCALE, strict=False)
    assert not torch.equal(program.module()(**LOC_SCALE), program.module()(**LOC_SCALE))


def test_interaction_type_around_the_export_decides() -> None:
    module = ProbabilisticTensorDictModule(["loc", "scale"], ["x"], distribution_class=d.LogNormal)
    with set_interaction_type("mode"):
        program = export(module, (), LOC_SCALE, strict=False)
    expected = (REAL - POSITIVE**2).exp()
    torch.testing.assert_close(program.module()(**LOC_SCALE), expected)


def test_values_are_checked_again_after_an_export() -> None:
    module = ProbabilisticTensorDictModule(["rate"], ["x"], distribution_class=d.Exponential)
    export(module, (), {"rate": POSITIVE}, strict=False)
    with pytest.raises(ValueError, match="Expected parameter rate"):
        module(rate=-POSITIVE)
