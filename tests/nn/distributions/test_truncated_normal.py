import math

import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kd_nn import TruncatedNormal

INF = math.inf
Case = tuple[float, float, float, float]
CASES: list[Case] = [
    (0.0, 1.0, -1.0, 1.0),
    (0.0, 1.0, -INF, INF),
    (0.0, 1.0, 3.0, INF),
    (0.0, 1.0, -INF, -3.0),
    (1.0, 2.0, -30.0, -20.0),
    (0.0, 1.0, 10.0, 11.0),
    (0.0, 1.0, 35.0, INF),
    (0.5, 0.1, -1.0, 1.0),
    (0.0, 1.0, -50.0, 3.0),
    (0.0, 1.0, -1.0, -0.5),
]
TAILS: list[Case] = [
    (0.0, 1.0, 100.0, 101.0),
    (0.0, 1.0, -INF, -100.0),
    (0.0, 1.0, 1e4, INF),
    (5.0, 1e-3, -1.0, 1.0),
    (0.0, 1e-6, 1.0, 2.0),
    (0.0, 1.0, -1e-4, 1e-4),
    (0.5, 3.0, 0.4, 0.4001),
]
NARROW: list[Case] = [
    (0.0, 1e6, -1e-3, 1e-3),
    (0.0, 1.0, -1e-6, 1e-6),
    (1.0, 1e6, 37.0, 39.0),
    (-3.0, 1e5, -100.0, -90.0),
    (3.0, 50.0, -2e-4, 1e-4),
    (1e-5, 1.0, -1e-6, 1e-6),
]
P = torch.linspace(0.001, 0.999, 21, dtype=torch.float64)


def dist(case: Case, dtype: torch.dtype = torch.float64) -> TruncatedNormal:
    loc, scale, a, b = (torch.tensor(number, dtype=dtype) for number in case)
    return TruncatedNormal(loc, scale, a, b)


def params(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loc, scale, a, b = (
        torch.tensor([number], dtype=torch.float64, requires_grad=True) for number in case
    )
    return loc, scale, a, b


def scipys(case: Case) -> scipy.stats.rv_continuous:
    loc, scale, a, b = case
    return scipy.stats.truncnorm((a - loc) / scale, (b - loc) / scale, loc, scale)


def tensor(array: object) -> Tensor:
    return torch.as_tensor(array, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_density_and_quantiles_agree_with_scipy(case: Case) -> None:
    ours, theirs = dist(case), scipys(case)
    x = tensor(theirs.ppf(P.numpy()))
    torch.testing.assert_close(ours.icdf(P), x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.cdf(x), P, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        ours.log_prob(x), tensor(theirs.logpdf(x.numpy())), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("case", CASES)
def test_moments_agree_with_scipy(case: Case) -> None:
    ours, theirs = dist(case), scipys(case)
    # The variance of SciPy cancels in the tail.
    torch.testing.assert_close(ours.mean, tensor(theirs.mean()), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ours.stddev, tensor(theirs.std()), rtol=1e-7, atol=0)
    torch.testing.assert_close(ours.median, tensor(theirs.median()), rtol=1e-12, atol=1e-12)
    loc, scale, a, b = case
    assert ours.mode.item() == min(max(loc, a), b)
    whole = scipy.stats.norm(loc, scale)
    mass = whole.cdf(b) - whole.cdf(a) if a < loc else whole.sf(a) - whole.sf(b)
    torch.testing.assert_close(ours.auc, tensor(mass), rtol=1e-10, atol=0)


def numeric(case: Case) -> tuple[float, float, float]:
    """Integrate numerically, relative to the mode and in its own width: mean, std, entropy."""
    loc, scale, a, b = case
    mode = min(max(loc, a), b)
    steep = abs(mode - loc) / scale
    width = scale / max(steep, 1)
    low, high = max((a - mode) / width, -40), min((b - mode) / width, 40)
    unit = width / scale
    m = (mode - loc) / scale

    t = torch.linspace(low, high, 200_001, dtype=torch.float64)
    weight = torch.exp(-t * unit * (m + t * unit / 2))

    def integral(power: int) -> float:
        return float(scipy.integrate.simpson((weight * t**power).numpy(), x=t.numpy()))

    mass = integral(0)
    mean = integral(1) / mass
    variance = integral(2) / mass - mean**2
    fall = m * unit * mean + unit**2 * (variance + mean**2) / 2
    return mode + width * mean, width * math.sqrt(variance), fall + math.log(mass * width)


@pytest.mark.parametrize("case", [*CASES, *TAILS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_moments_agree_with_numeric_integrals(case: Case, dtype: torch.dtype) -> None:
    ours = dist(case, dtype)
    loc, scale, a, b = (p.double().item() for p in (ours.loc, ours.scale, ours.a, ours.b))
    mean, deviation, entropy = numeric((loc, scale, a, b))
    fine = dtype is torch.float64
    rel, near = (1e-7, 1e-9) if fine else (1e-5, 1e-6)
    assert ours.mean.item() == pytest.approx(mean, rel=rel, abs=near)
    assert ours.stddev.item() == pytest.approx(deviation, rel=rel, abs=near)
    assert ours.entropy().item() == pytest.approx(entropy, rel=rel, abs=near)


@pytest.mark.parametrize("case", [*CASES, *TAILS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_is_nan_and_draws_stay_inside(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = dist(case, dtype)
    given = [p.requires_grad_() for p in (ours.loc, ours.scale)]
    x = ours.rsample((500,))
    assert bool(((x >= ours.a) & (x <= ours.b)).all())
    results = (x, ours.log_prob(x.detach()), ours.mean, ours.stddev, ours.entropy())
    for result in results:
        assert bool(result.isfinite().all())
        slopes = torch.autograd.grad(result.sum(), given, retain_graph=True, materialize_grads=True)
        assert all(bool(slope.isfinite().all()) for slope in slopes)
    ends = torch.tensor([0.0, 1.0], dtype=dtype)
    assert ours.icdf(ends).isfinite().all()
    assert ours.cdf(torch.stack([ours.a, ours.b])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("case", [*CASES, *TAILS[:2]])
@pytest.mark.parametrize("name", ["icdf", "cdf", "log_prob", "mean", "variance", "entropy", "auc"])
def test_gradients_agree_with_finite_differences(case: Case, name: str) -> None:
    numbers = params(case)
    finite = [number for number in numbers if number.isfinite()]
    point = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    value = point if name == "icdf" else dist(case).icdf(point).detach()

    def compute(*_: Tensor) -> Tensor:
        found = getattr(TruncatedNormal(*numbers), name)
        result: Tensor = (
            found if isinstance(found, Tensor) else found(*[value][: name != "entropy"])
        )
        return result

    inputs = (*finite, point) if name == "icdf" else finite
    assert torch.autograd.gradcheck(compute, inputs, eps=1e-7, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES[:5])
def test_draws_have_second_derivatives(case: Case) -> None:
    numbers = params(case)
    finite = [number for number in numbers if number.isfinite()]
    point = torch.tensor([0.3], dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda *_: TruncatedNormal(*numbers).icdf(point), finite, eps=1e-6, atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("case", CASES)
def test_density_integrates_to_one(case: Case) -> None:
    ours = dist(case)
    x = ours.icdf(torch.linspace(1e-9, 1 - 1e-9, 40_001, dtype=torch.float64))
    mass = torch.trapezoid(ours.log_prob(x).exp(), x)
    assert mass.item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_moments_of_draws_lie_within_five_standard_errors(case: Case) -> None:
    torch.manual_seed(0)
    ours, count = dist(case), 20_000
    x = ours.sample((count,))
    assert abs(x.mean() - ours.mean) < 5 * ours.stddev / math.sqrt(count)
    fourth = ((x - x.mean()) ** 4).mean()
    error = torch.sqrt((fourth - ours.variance**2).clamp_min(0) / count)
    assert abs(x.var() - ours.variance) < 5 * error
    assert not x.requires_grad


def test_random_intervals_hold_quantiles_and_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(4, 3000, generator=generator, dtype=torch.float64)
    loc, a = draw[0] * 20, draw[1] * 20
    scale, width = draw[2].exp(), draw[3].mul(2).exp()
    ours = TruncatedNormal(loc, scale, a, a + width)
    p = torch.rand(3000, generator=generator, dtype=torch.float64)
    x = ours.icdf(p)
    error = 1e-13 * x.abs() * ours.log_prob(x).exp()  # of the rounding of x
    assert bool(((ours.cdf(x) - p).abs() < 1e-9 + 10 * error).all())
    assert bool((ours.stddev > 0).all())
    assert bool((ours.stddev <= scale * (1 + 1e-9)).all())
    assert bool(((ours.mean >= a) & (ours.mean <= a + width)).all())


@pytest.mark.parametrize("case", NARROW)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_quantiles_keep_their_digits_in_narrow_intervals(case: Case, dtype: torch.dtype) -> None:
    ours = dist(case, dtype)
    whole = (ours.b - ours.a).double()
    place = (ours.icdf(P.to(dtype)).double() - ours.a) / whole  # the density is flat there
    grain = (torch.finfo(dtype).eps * torch.maximum(ours.a.abs(), ours.b.abs()) / whole).item()
    torch.testing.assert_close(place, P, rtol=0, atol=2e-4 + 2 * grain)
    fine = torch.finfo(dtype).eps * 10 + 2 * grain
    torch.testing.assert_close(ours.cdf(ours.icdf(P.to(dtype))).double(), P, rtol=0, atol=fine)


@pytest.mark.parametrize("case", NARROW)
def test_gradients_of_quantiles_in_narrow_intervals(case: Case) -> None:
    numbers = params(case)
    point = torch.tensor([0.3], dtype=torch.float64)
    _, _, a, b = numbers
    slopes = torch.autograd.grad(TruncatedNormal(*numbers).icdf(point), [a, b])
    torch.testing.assert_close(slopes[0], 1 - point, rtol=0, atol=2e-4)
    torch.testing.assert_close(slopes[1], point, rtol=0, atol=2e-4)


def test_a_location_farther_than_squares_reach_gives_finite_draws() -> None:
    ours = TruncatedNormal(torch.zeros(()), 1e-30, 5.0, 6.0)
    assert ours.median == 5
    assert TruncatedNormal(torch.zeros(()), 1e-30, -6.0, -5.0).median == -5


@pytest.mark.parametrize("case", [*CASES, *TAILS, *NARROW])
def test_gradients_of_extreme_quantiles_are_finite(case: Case) -> None:
    loc, scale, a, b = (torch.tensor(number, requires_grad=True) for number in case)
    p = torch.tensor([0.0, 2**-24, 0.5, 1 - 2**-24, 1.0])
    slopes = torch.autograd.grad(TruncatedNormal(loc, scale, a, b).icdf(p).sum(), [loc, scale])
    assert all(bool(slope.isfinite()) for slope in slopes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_of_the_generator_is_no_draw_from_infinity(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.zeros(shape, **options))
    ours = dist((0.0, 1.0, -INF, 3.0), dtype)
    assert -6 < ours.sample() < -5


def test_draws_of_short_numbers_reach_into_the_tail() -> None:
    torch.manual_seed(0)
    draws = dist((0.0, 1.0, 0.0, INF), torch.bfloat16).sample((20_000,))
    assert 3.5 < draws.max() < 5.5  # eight bits of a probability reach 2.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_numbers_are_widened_inside(dtype: torch.dtype) -> None:
    short = dist((0.0, 1.0, 1.0, 4.0), dtype)
    x = short.rsample((50,))
    results = (x, short.log_prob(x), short.cdf(x), short.mean, short.stddev, short.entropy())
    assert {result.dtype for result in results} == {dtype}
    assert all(bool(result.isfinite().all()) for result in results)
    exact = dist((0.0, 1.0, 1.0, 4.0))
    torch.testing.assert_close(short.mean.double(), exact.mean, rtol=1e-2, atol=0)
    torch.testing.assert_close(
        short.log_prob(x).double(), exact.log_prob(x.double()), rtol=0.05, atol=0.05
    )


def test_values_outside_have_no_density() -> None:
    ours = TruncatedNormal(0.0, 1.0, -1.0, 1.0, validate_args=False)
    x = torch.tensor([-2.0, 2.0])
    assert ours.log_prob(x).tolist() == [-INF, -INF]
    assert ours.cdf(x).tolist() == [0.0, 1.0]
    assert ours.icdf(torch.tensor([-0.1, 1.1])).isnan().all()


def test_values_are_validated_as_in_torch() -> None:
    with pytest.raises(ValueError, match="Expected parameter scale"):
        TruncatedNormal(0.0, -1.0, 0.0, 1.0, validate_args=True)
    with pytest.raises(ValueError, match="`a` of a `TruncatedNormal` must be below the upper end"):
        TruncatedNormal(0.0, 1.0, 1.0, 1.0, validate_args=True)
    with pytest.raises(ValueError, match="within the support"):
        TruncatedNormal(0.0, 1.0, 0.0, 1.0, validate_args=True).log_prob(torch.tensor(2.0))


def test_expand_and_broadcast() -> None:
    ours = TruncatedNormal(torch.zeros(3, 1), torch.ones(2), -1.0, 2.0)
    assert ours.batch_shape == (3, 2)
    wide = ours.expand((4, 3, 2))
    assert wide.sample((5,)).shape == (5, 4, 3, 2)
    assert torch.equal(wide.mean[2], ours.mean)


class Draw(torch.nn.Module):
    def forward(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        ours = TruncatedNormal(loc, scale, -1.0, 2.0)
        x = ours.rsample()
        return x, ours.log_prob(x), ours.mean, ours.stddev


# dynamo makes an instance of every autograd function that it traces, and is warned by torch.
TRACED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@TRACED
@pytest.mark.parametrize("strict", [False, True])
def test_draws_export(strict: bool) -> None:
    args = (torch.tensor([0.0, 40.0]), torch.ones(2))
    program = torch.export.export(Draw(), args, strict=strict)
    for got, expected in zip(program.module()(*args)[2:], Draw()(*args)[2:], strict=True):
        torch.testing.assert_close(got, expected)


@TRACED
def test_compiled_draws_carry_gradients() -> None:
    loc = torch.tensor([0.0, 40.0], requires_grad=True)
    compiled = torch.compile(Draw(), fullgraph=True, backend="aot_eager")
    slopes: list[Tensor] = []
    for module in (Draw(), compiled):
        torch.manual_seed(0)
        slopes += torch.autograd.grad(module(loc, torch.ones(2))[0].sum(), loc)
    torch.testing.assert_close(*slopes)


def test_vmap_over_parameters() -> None:
    def slope(loc: Tensor, point: Tensor) -> Tensor:
        return TruncatedNormal(loc, 1.0, -1.0, 2.0, validate_args=False).icdf(point)

    loc, point = torch.tensor([0.0, 5.0]), torch.tensor([0.2, 0.7])
    got = torch.vmap(torch.func.grad(slope))(loc, point)
    expected = [torch.func.grad(slope)(*pair) for pair in zip(loc, point, strict=True)]
    torch.testing.assert_close(got, torch.stack(expected))


def test_each_element_is_computed_as_if_alone() -> None:
    def compute(loc: Tensor, scale: Tensor, a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        ours = TruncatedNormal(loc, scale, a, b, validate_args=False)
        x = ours.icdf(p)
        return x, ours.log_prob(x), ours.cdf(x), ours.mean

    cases = torch.tensor([*CASES, *TAILS, *NARROW], dtype=torch.float64)
    p = torch.linspace(0.1, 0.9, len(cases), dtype=torch.float64)
    numbers = torch.cat((cases, p.unsqueeze(-1)), -1)
    together = compute(*numbers.unbind(-1))
    singly = [compute(*one) for one in numbers]
    for whole, parts, mapped in zip(
        together, zip(*singly, strict=True), torch.vmap(compute)(*numbers.unbind(-1)), strict=True
    ):
        torch.testing.assert_close(torch.stack(parts), whole, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(mapped, whole, rtol=1e-12, atol=1e-14)


def test_a_trace_fits_other_intervals() -> None:
    def scores(loc: Tensor) -> Tensor:
        return TruncatedNormal(loc, 1.0, -1.0, 1.0, validate_args=False).log_prob(torch.zeros(2))

    traced = make_fx(scores)(torch.zeros(2))
    elsewhere = torch.tensor([0.5, 40.0])
    torch.testing.assert_close(traced(elsewhere), scores(elsewhere))


@pytest.mark.parametrize("interval", [(-1.0, 1.0), (5.0, 9.0), (-40.0, -38.0)])
def test_quantiles_of_zero_and_one_are_the_ends(interval: tuple[float, float]) -> None:
    low, high = torch.tensor(interval).unbind()
    dist = TruncatedNormal(torch.zeros(()), 1.0, low.requires_grad_(), high.requires_grad_())
    ends = dist.icdf(torch.tensor([0.0, 1.0]))
    assert tuple(ends.tolist()) == interval
    assert torch.autograd.grad(ends[0], low)[0] == 1
    assert TruncatedNormal.eps == 0
