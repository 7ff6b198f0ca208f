"""What a module writes follows the distribution: moments, densities and gradients of draws."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.probabilistic.cases import CASES, EVERY, SETTINGS, build
from torch import Tensor
from torch import distributions as d
from torch.distributions import Distribution, biject_to

from kd_core import TensorDict
from kd_nn import Delta, TanhNormal, TruncatedNormal
from kd_probabilistic import EstimateNotOffered, InteractionType, ProbabilisticTensorDictModule
from kd_probabilistic import estimate as value_of

Kind = Callable[..., Distribution]
COUNT = 20_000


def name_of(kind: object) -> str:
    return str(getattr(kind, "__name__", ""))


def draws(kind: Kind, params: dict[str, Tensor], count: int) -> Tensor:
    """Return draws of a module, shape (count, *batch_shape, *event_shape)."""
    torch.manual_seed(0)
    module = ProbabilisticTensorDictModule(
        list(params),
        ["x"],
        distribution_class=kind,
        distribution_kwargs=SETTINGS.get(kind) if isinstance(kind, type) else None,
        default_interaction_type="random",
        num_samples=count,
    )
    return module(TensorDict(params))["x"]


def density(dist: Distribution, value: Tensor) -> Tensor:
    result: Tensor = dist.log_prob(value)
    return result


def moments(kind: Kind) -> tuple[Tensor, Tensor] | None:
    """Return mean and variance, None if one is missing or infinite."""
    dist = build(kind)
    try:
        mean, variance = value_of(dist, InteractionType.MEAN), dist.variance
    except (EstimateNotOffered, NotImplementedError):
        return None
    return (mean, variance) if bool((mean.isfinite() & variance.isfinite()).all()) else None


# Torch gives the circular variance of an angle.
KNOWN = [kind for kind in EVERY if kind is not d.VonMises and moments(kind) is not None]


@pytest.mark.filterwarnings("ignore:Singular sample detected:UserWarning")
@pytest.mark.parametrize("kind", KNOWN, ids=name_of)
def test_means_of_draws_lie_within_five_standard_errors(kind: Kind) -> None:
    known = moments(kind)
    assert known is not None
    mean, variance = known
    x = draws(kind, EVERY[kind], COUNT).double()
    error = torch.sqrt(variance.double() / COUNT)
    assert bool(((x.mean(0) - mean).abs() <= 5 * error + 1e-6).all())
    fourth = ((x - x.mean(0)) ** 4).mean(0)
    spread = torch.sqrt((fourth - variance.double() ** 2).clamp_min(0) / COUNT)
    heavy = kind in (d.FisherSnedecor, d.InverseGamma, d.LogNormal, d.Pareto, d.StudentT)
    if not heavy and kind is not d.GeneralizedPareto:  # whose fourth moment may be infinite
        assert bool(((x.var(0) - variance).abs() <= 5 * spread + 1e-6).all())


COUNTABLE = [kind for kind in EVERY if getattr(build(kind), "has_enumerate_support", False)]


@pytest.mark.parametrize("kind", COUNTABLE, ids=name_of)
def test_probabilities_sum_to_one(kind: Kind) -> None:
    params = {key: value[:1] for key, value in EVERY[kind].items()}
    if kind is d.Binomial:  # torch enumerates it for one number of trials alone
        params = {"total_count": torch.tensor(5), "probs": torch.tensor([0.2, 0.7])}
    dist = kind(**params)
    total = density(dist, dist.enumerate_support()).exp().sum(0)
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("kind", [d.Poisson, d.Geometric, d.NegativeBinomial], ids=name_of)
def test_probabilities_of_all_counts_sum_to_one(kind: Kind) -> None:
    dist = build(kind)
    counts = torch.arange(2000.0).view(-1, 1, 1).expand(-1, *dist.batch_shape)
    total = density(dist, counts).exp().sum(0)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-4, atol=0)


SCALAR: list[Kind] = [
    kind
    for kind in CASES
    # Delta has no density, and that of GeneralizedPareto fails in torch for doubles.
    if kind not in (Delta, d.GeneralizedPareto)
    and not build(kind).event_shape
    and not build(kind).support.is_discrete  # type: ignore[union-attr]  # each has one
]


@pytest.mark.parametrize("kind", SCALAR, ids=name_of)
def test_densities_integrate_to_one(kind: Kind) -> None:
    params = {key: value.double() for key, value in EVERY[kind].items()}
    dist = kind(**params, validate_args=False)
    z = torch.linspace(-14, 14, 200_001, dtype=torch.float64).view(-1, 1, 1)
    real = z.sinh().expand(-1, *dist.batch_shape).requires_grad_()
    if kind is d.VonMises:
        value, slope = math.pi * torch.tanh(real), math.pi * (1 - torch.tanh(real) ** 2)
    else:
        onto = biject_to(dist.support)
        value = onto(real)
        (slope,) = torch.autograd.grad(value.sum(), real)
    weight = density(dist, value.detach()).exp() * slope.detach().abs() * z.cosh()
    total = torch.trapezoid(weight.nan_to_num(0, 0, 0), z, dim=0)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=2e-3, atol=0)


SMOOTH: list[Kind] = [
    d.Cauchy,
    d.Exponential,
    d.Gumbel,
    d.HalfCauchy,
    d.HalfNormal,
    d.Kumaraswamy,
    d.Laplace,
    d.LogNormal,
    d.MultivariateNormal,
    d.Normal,
    d.Pareto,
    d.Uniform,
    d.Weibull,
    Delta,
    TanhNormal,
    TruncatedNormal,
]


@pytest.mark.parametrize("kind", SMOOTH, ids=name_of)
def test_gradients_of_draws_agree_with_finite_differences(kind: Kind) -> None:
    params = {key: value.double() for key, value in EVERY[kind].items()}
    for name in params:
        if name == "scale_tril":
            continue
        leaf = params[name].clone().requires_grad_()
        (slope,) = torch.autograd.grad(draws(kind, {**params, name: leaf}, 20).sum(), leaf)
        step = 1e-6
        for place in ((0, 0), (2, 1)):
            ends = []
            for sign in (1, -1):
                moved = params[name].clone()
                moved[place] += sign * step
                ends.append(draws(kind, {**params, name: moved}, 20).sum())
            numeric = (ends[0] - ends[1]) / (2 * step)
            torch.testing.assert_close(slope[place], numeric, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind", [d.Beta, d.Chi2, d.Dirichlet, d.Gamma, d.InverseGamma], ids=name_of
)
def test_gradients_of_averages_are_those_of_the_mean(kind: Kind) -> None:
    params = {key: value.clone().requires_grad_() for key, value in EVERY[kind].items()}
    if kind is d.InverseGamma:
        params = {key: (value.detach() + 6).requires_grad_() for key, value in params.items()}
    leaves = list(params.values())
    weight = torch.tensor([1.0, -2.0])
    average = (draws(kind, params, 100_000).mean(0) * weight).sum()
    exact = (kind(**params).mean * weight).sum()
    got, expected = torch.autograd.grad(average, leaves), torch.autograd.grad(exact, leaves)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.03)
