"""Every distribution that can, exports by keyword in deterministic mode, checks left alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as d
from torch.distributions import Distribution
from torch.export import Dim, export

from kd_nn import Delta, NormalParamExtractor, TensorDictModule
from kd_probabilistic import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_interaction_type,
)

POSITIVE = torch.tensor([[0.5, 1.5], [2.0, 0.75], [1.25, 3.0]])
REAL = torch.tensor([[0.5, -1.5], [2.0, 0.0], [-1.25, 3.0]])
UNIT = torch.tensor([[0.5, 0.25], [0.125, 0.75], [0.9, 0.6]])
SQUARE = torch.eye(2).expand(3, 2, 2).contiguous()

LOC_SCALE = {"loc": REAL, "scale": POSITIVE}
CASES: dict[type[Distribution], dict[str, Tensor]] = {
    Delta: {"param": REAL},
    d.Bernoulli: {"probs": UNIT},
    d.Beta: {"concentration1": POSITIVE, "concentration0": POSITIVE},
    d.Binomial: {"total_count": torch.full((3, 2), 5.0), "probs": UNIT},
    d.Categorical: {"logits": REAL},
    d.Cauchy: LOC_SCALE,
    d.Chi2: {"df": POSITIVE},
    d.ContinuousBernoulli: {"probs": UNIT},
    d.Dirichlet: {"concentration": POSITIVE},
    d.Exponential: {"rate": POSITIVE},
    d.FisherSnedecor: {"df1": POSITIVE, "df2": POSITIVE},
    d.Gamma: {"concentration": POSITIVE, "rate": POSITIVE},
    d.Geometric: {"probs": UNIT},
    d.Gumbel: LOC_SCALE,
    d.HalfCauchy: {"scale": POSITIVE},
    d.HalfNormal: {"scale": POSITIVE},
    d.InverseGamma: {"concentration": POSITIVE, "rate": POSITIVE},
    d.Kumaraswamy: {"concentration1": POSITIVE, "concentration0": POSITIVE},
    d.Laplace: LOC_SCALE,
    d.LogNormal: LOC_SCALE,
    d.LogisticNormal: LOC_SCALE,
    d.LowRankMultivariateNormal: {
        "loc": REAL,
        "cov_factor": POSITIVE.unsqueeze(-1),
        "cov_diag": POSITIVE,
    },
    d.Multinomial: {"logits": REAL},
    d.MultivariateNormal: {"loc": REAL, "scale_tril": SQUARE},
    d.NegativeBinomial: {"total_count": POSITIVE, "probs": UNIT},
    d.Normal: LOC_SCALE,
    d.OneHotCategorical: {"logits": REAL},
    d.OneHotCategoricalStraightThrough: {"logits": REAL},
    d.Pareto: {"scale": POSITIVE, "alpha": POSITIVE},
    d.Poisson: {"rate": POSITIVE},
    d.RelaxedBernoulli: {"temperature": torch.tensor(0.5), "logits": REAL},
    d.RelaxedOneHotCategorical: {"temperature": torch.tensor(0.5), "logits": REAL},
    d.StudentT: {"df": POSITIVE, **LOC_SCALE},
    d.Uniform: {"low": REAL, "high": REAL + POSITIVE},
    d.VonMises: {"loc": REAL, "concentration": POSITIVE},
    d.Weibull: {"scale": POSITIVE, "concentration": POSITIVE},
}


def vector(loc: Tensor, scale: Tensor) -> Distribution:
    return d.Independent(d.Normal(loc, scale), 1)


def squashed(loc: Tensor, scale: Tensor) -> Distribution:
    return d.TransformedDistribution(d.Normal(loc, scale), [d.TanhTransform()])


def mixture(logits: Tensor, loc: Tensor, scale: Tensor) -> Distribution:
    return d.MixtureSameFamily(d.Categorical(logits=logits), d.Normal(loc, scale))


FACTORIES: dict[Callable[..., Distribution], dict[str, Tensor]] = {
    vector: LOC_SCALE,
    squashed: LOC_SCALE,
    mixture: {"logits": REAL, **LOC_SCALE},
}


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
