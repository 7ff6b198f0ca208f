import math

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.distributions import Normal, TransformedDistribution, kl_divergence, transforms

from kd_nn import TanhNormal

GRID = [(0.0, 1.0), (0.5, 0.1), (-2.0, 0.7), (1.0, 3.0)]
P = torch.linspace(0.01, 0.99, 33, dtype=torch.float64)


def dist(loc: float, scale: float, low: float = -1.0, high: float = 1.0) -> TanhNormal:
    center, spread, start, end = torch.tensor([loc, scale, low, high], dtype=torch.float64)
    return TanhNormal(center, spread, start, end)


def log_density(dist: torch.distributions.Distribution, value: Tensor) -> Tensor:
    result: Tensor = dist.log_prob(value)
    return result


@pytest.mark.parametrize(("loc", "scale"), GRID)
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (2.0, 10.0)])
def test_it_is_the_normal_distribution_transformed(
    loc: float, scale: float, low: float, high: float
) -> None:
    ours = dist(loc, scale, low, high)
    ends = (low + high) / 2, (high - low) / 2
    theirs = TransformedDistribution(
        Normal(ours.loc, ours.scale),
        [transforms.TanhTransform(), transforms.AffineTransform(*ends)],
    )
    base = scipy.stats.norm(loc, scale)
    value = ends[0] + ends[1] * torch.tanh(torch.as_tensor(base.ppf(P.numpy())))
    torch.testing.assert_close(ours.icdf(P), value)
    inner = value[(value - ends[0]).abs() < 0.9999 * ends[1]]
    torch.testing.assert_close(ours.log_prob(inner), log_density(theirs, inner))
    torch.testing.assert_close(ours.cdf(value), P)
    assert ours.deterministic_sample == ours.median
    torch.testing.assert_close(ours.median, ours.icdf(torch.tensor(0.5, dtype=torch.float64)))


def test_values_near_the_centre_keep_their_digits() -> None:
    x = torch.tensor([1e-8, -1e-6, 1e-4, 0.01])
    ours = TanhNormal(x, 1.0)
    assert torch.equal(ours.median, x.tanh())
    torch.testing.assert_close(ours.icdf(ours.cdf(ours.median)), x.tanh(), rtol=0, atol=2e-7)


@pytest.mark.parametrize(("loc", "scale"), GRID)
def test_density_integrates_to_one(loc: float, scale: float) -> None:
    ours = dist(loc, scale)
    x = ours.icdf(torch.linspace(1e-6, 1 - 1e-6, 20_001, dtype=torch.float64))
    assert torch.trapezoid(ours.log_prob(x).exp(), x).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loc", [-30.0, 0.0, 5.0, 100.0])
def test_saturated_draws_stay_inside_with_finite_scores(loc: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    center = torch.tensor(loc, dtype=dtype, requires_grad=True)
    ours = TanhNormal(center, torch.ones((), dtype=dtype))
    x = ours.rsample((200,))
    score = ours.log_prob(x)
    assert bool((x.abs() < 1).all())
    assert score.isfinite().all()
    (slope,) = torch.autograd.grad(score.sum() + x.sum(), center)
    assert slope.isfinite()
    ends = ours.log_prob(torch.tensor([-1.0, 1.0], dtype=dtype))
    assert ends.isfinite().all()


def test_gradients_agree_with_finite_differences() -> None:
    args = [
        torch.tensor([n], dtype=torch.float64, requires_grad=True) for n in (0.3, 0.7, -2.0, 3.0)
    ]
    value = torch.tensor([0.5], dtype=torch.float64)
    for name in ("log_prob", "cdf", "icdf"):
        assert torch.autograd.gradcheck(
            lambda *a, name=name: getattr(TanhNormal(*a), name)(value), args
        )


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(0)
    ours, count = dist(0.5, 0.8, 0.0, 2.0), 20_000
    x = ours.sample((count,))
    assert scipy.stats.kstest(ours.cdf(x).numpy(), "uniform").pvalue > 1e-3
    assert not x.requires_grad


def test_what_has_no_formula_is_refused() -> None:
    ours = TanhNormal(0.0, 1.0)
    for name in ("mean", "variance", "mode"):
        with pytest.raises(NotImplementedError):
            getattr(ours, name)
    with pytest.raises(NotImplementedError):
        ours.entropy()


def test_divergence_on_one_interval_is_that_of_draws() -> None:
    torch.manual_seed(0)
    loc = torch.zeros(2, requires_grad=True)
    p = TanhNormal(loc, torch.tensor([0.5, 1.0]), -2.0, 3.0)
    q = TanhNormal(torch.tensor([0.3, 0.0]), 0.8, -2.0, 3.0)
    found = kl_divergence(p, q)
    draws = p.sample((200_000,))
    each = p.log_prob(draws) - q.log_prob(draws)
    error = each.std(0) / len(draws) ** 0.5
    assert ((found - each.mean(0)).abs() < 5 * error).all()
    assert kl_divergence(p, p).abs().max() == 0
    (gradient,) = torch.autograd.grad(found.sum(), loc)
    assert gradient[0] < 0


def test_divergence_on_different_intervals_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"same interval, got low=.*Estimate it"):
        kl_divergence(TanhNormal(torch.zeros(2), 1.0), TanhNormal(torch.zeros(2), 1.0, -2.0))


def test_divergence_where_values_cannot_be_read() -> None:
    def divergence(loc: Tensor, low: Tensor) -> Tensor:
        p = TanhNormal(loc, 1.0, low, 3.0, validate_args=False)
        q = TanhNormal(torch.zeros(()), 1.0, -2.0, 3.0, validate_args=False)
        return kl_divergence(p, q)

    loc, low = torch.tensor([1.0, 2.0]), torch.tensor([-2.0, -1.0])
    compiled = torch.compile(divergence, fullgraph=True, backend="eager")
    for mapped in (compiled(loc, low), torch.vmap(divergence)(loc, low)):
        torch.testing.assert_close(mapped, torch.tensor([0.5, math.nan]), equal_nan=True)


def test_values_are_validated_and_expanded_as_in_torch() -> None:
    with pytest.raises(ValueError, match="Expected parameter scale"):
        TanhNormal(0.0, 0.0, validate_args=True)
    with pytest.raises(ValueError, match="`low` of a `TanhNormal` must be below"):
        TanhNormal(0.0, 1.0, 1.0, -1.0, validate_args=True)
    with pytest.raises(ValueError, match="within the support"):
        TanhNormal(0.0, 1.0, validate_args=True).log_prob(torch.tensor(2.0))
    outside = TanhNormal(0.0, 1.0, validate_args=False).log_prob(torch.tensor([2.0, -2.0]))
    assert outside.tolist() == [-math.inf, -math.inf]
    wide = TanhNormal(torch.zeros(3, 1), torch.ones(2)).expand((4, 3, 2))
    assert wide.rsample((5,)).shape == (5, 4, 3, 2)


class Actor(torch.nn.Module):
    def forward(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ours = TanhNormal(loc, scale)
        x = ours.rsample()
        return x, ours.log_prob(x), ours.deterministic_sample


@pytest.mark.parametrize("strict", [False, True])
def test_draws_export(strict: bool) -> None:
    args = (torch.tensor([0.0, 4.0]), torch.ones(2))
    program = torch.export.export(Actor(), args, strict=strict)
    torch.testing.assert_close(program.module()(*args)[2], args[0].tanh())


def test_a_subclass_with_its_own_constructor_says_that_it_cannot_be_expanded() -> None:
    class Unit(TanhNormal):
        def __init__(self, loc: Tensor) -> None:
            super().__init__(loc, 1.0)

    class Renamed(TanhNormal):
        pass

    assert type(Renamed(torch.zeros(2), 1.0).expand([3, 2])) is Renamed
    with pytest.raises(NotImplementedError, match="must also define a custom"):
        Unit(torch.zeros(2)).expand([3, 2])
