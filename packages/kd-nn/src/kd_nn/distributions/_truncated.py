"""The arithmetic of a normal distribution that is restricted to an interval.

Far in the tails the mass of the interval, the density and both squares underflow or overflow, so
nothing here is computed from them. Everything is taken relative to the density at the *mode*, the
point of the interval that is nearest to the location: with `m` the mode and `y` the distance from
it, both in standard deviations, the density is `exp(-m y - y^2 / 2)` up to a constant, a number
between 0 and 1 wherever the interval lies.

- The mass of an interval is a difference of Mills ratios (tail over density), or a series if the
  interval is so narrow that the difference would cancel.
- Moments are sums over fixed nodes (Gauss-Legendre), whose terms are positive. The formulas of
  textbooks subtract numbers as large as `m^2`.
- A quantile is a distance from the mode, too. If the interval holds the location, it is `erfinv`
  near the location and `ndtri` in the tails. Elsewhere it is found by Newton's method: on the mass
  if the interval is narrow, else on the logarithm of the tail, a concave function.

Formulas: N. Johnson, S. Kotz, N. Balakrishnan, Continuous Univariate Distributions, 2nd ed., 1994.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Self

import torch
from torch import Size, Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.distributions import Distribution, Normal, constraints, kl_divergence, register_kl
from torch.distributions.utils import broadcast_all
from torch.nn import functional

from kd_core import InvalidValue
from kd_core.extending import is_eager, public_in
from kd_nn._torch_private import current_jit_trace

REACH: Final = 40.0
"""How many standard deviations from the mode an interval matters: beyond, the density is zero."""

_NARROW = 0.1
"""Below this change of the log-density over an interval, its mass is computed by a series."""

_FAR = 30.0
"""From here on the Mills ratio is computed by its asymptotic series, which keeps derivatives."""

_ASYMPTOTIC = (10395.0, -945.0, 105.0, -15.0, 3.0, -1.0, 1.0)
_STEPS, _NARROW_STEPS = 4, 3
_CENTRE = 0.5
"""Up to here a quantile is computed from zero on: `erfinv` keeps its digits there."""

_HALF_ROOT = math.sqrt(math.pi / 2)
_ROOT = math.sqrt(2.0)


def log_mass(lower: Tensor, width: Tensor) -> Tensor:
    """Return the log of the integral of `exp((n^2 - x^2) / 2)` over `[lower, lower + width]`.

    Here `n` is the point of the interval that is nearest to zero.

    Args:
        lower: The lower ends, finite.
        width: The widths, non-negative and finite; the same shape.
    """
    upper = lower + width

    def around() -> Tensor:
        return _HALF_ROOT * (torch.erf(upper / _ROOT) - torch.erf(lower / _ROOT))

    def beside() -> Tensor:
        near = torch.where(lower >= 0, lower, -upper)
        return _tail_mass(near.clamp_min(0), width)

    mass = _either((lower < 0) & (upper > 0), around, beside)
    return mass.clamp_min(torch.finfo(mass.dtype).tiny).log()


def _either(mask: Tensor, one: Callable[[], Tensor], other: Callable[[], Tensor]) -> Tensor:
    """Return `one()` where a mask is true, and `other()` elsewhere.

    Each of them is most of the work, so one that is needed nowhere is left out, where values can be
    read: not in a capture, nor under a transformation; and on a GPU a read would have to wait.
    """
    if is_eager() and mask.device.type == "cpu" and current_jit_trace() is None:
        count = int(mask.sum())
        if count == mask.numel():
            return one()
        if not count:
            return other()
    return torch.where(mask, one(), other())


def _tail_mass(near: Tensor, width: Tensor) -> Tensor:
    """Return the integral of `exp(-near t - t^2 / 2)` over `[0, width]`, for `near >= 0`."""
    narrow = _is_narrow(near, width)

    def series() -> Tensor:  # it may overflow where it is not used
        return _narrow_mass(torch.where(narrow, near, 0.0), torch.where(narrow, width, 0.0))

    return _either(narrow, series, lambda: mills(near) - _mass_beyond(near, width))


def _mass_beyond(near: Tensor, width: Tensor) -> Tensor:
    """Return the integral of `exp(-near t - t^2 / 2)` from `width` on."""
    return torch.exp(-width * (near + width / 2)) * mills(near + width)


def _narrow_mass(near: Tensor, width: Tensor) -> Tensor:
    """Return the same as `_tail_mass` by a series, for narrow intervals."""
    slope = near + width / 2  # that of the log-density, at the centre
    steep, square = slope * slope, width * width
    series = ((steep - 15) * steep + 45) * steep - 15
    series = series * square / 168 + (steep - 6) * steep + 3
    series = (series * square / 80 + steep - 1) * square / 24 + 1
    return width * torch.exp(-width * (slope - width / 4) / 2) * series


def _is_narrow(near: Tensor, width: Tensor) -> Tensor:
    """Return whether the log-density hardly changes over an interval."""
    return width * (near + 1) < _NARROW


def mills(x: Tensor) -> Tensor:
    """Return the upper tail of the standard normal distribution over its density, for `x >= 0`."""
    far = x > _FAR

    def asymptotic() -> Tensor:
        inverse = 1 / torch.where(far, x, _FAR)
        square = inverse * inverse
        series = torch.full_like(square, _ASYMPTOTIC[0])
        for coefficient in _ASYMPTOTIC[1:]:
            series = series * square + coefficient
        return inverse * series

    return _either(far, asymptotic, lambda: _HALF_ROOT * torch.special.erfcx(x / _ROOT))


def log_part(mode: Tensor, y: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logs of the mass below `y`, of the mass above it, and of the density at it.

    All are relative to the density at the mode; distances are from the mode.

    Args:
        mode: The point of the interval that is nearest to zero.
        y: A point of the interval.
        low: The lower end, not positive.
        high: The upper end, not negative.
    """
    density = -y * (mode + y / 2)
    below = log_mass(mode + low, y - low) + torch.where(mode + y < 0, density, 0.0)
    above = log_mass(mode + y, high - y) + torch.where(mode + y > 0, density, 0.0)
    return below, above, density


class Quantile(torch.autograd.Function):
    """The quantile of the standard normal distribution restricted to an interval.

    It is the distance from the mode, so that it keeps its digits where the interval is narrow. The
    derivatives are those of the implicit function `cdf(mode + y) = p`. `backward` is written in
    differentiable operations, so they have derivatives again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, mode: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return the point below which the fraction `p` of the mass lies; equal shapes.

        Args:
            p: The fraction.
            mode: The point of the interval that is nearest to zero.
            low: The distance of the lower end from the mode, not positive.
            high: The distance of the upper end, not negative.
        """

        def beside() -> Tensor:
            left = high <= 0
            filled, rest = torch.where(left, 1 - p, p), torch.where(left, p, 1 - p)
            step = _tail_quantile(filled, rest, mode.abs(), high - low)
            return torch.where(left, -step, step)

        inside = (low < 0) & (high > 0)
        return _either(inside, lambda: _inner_quantile(p, low, high), beside).clamp(low, high)

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor
    ) -> None:
        """Keep the fraction, the interval and the result."""
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of `p`, of the mode and of the distances of both ends."""
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        p, mode, low, high, y = saved
        density = -y * (mode + y / 2)
        limits = torch.finfo(p.dtype)
        below, above = p.clamp_min(limits.tiny).log(), (1 - p).clamp_min(limits.tiny).log()
        logs = (
            log_mass(mode + low, high - low),
            above - low * (mode + low / 2),
            below - high * (mode + high / 2),
        )
        # Large, but finite: a gradient of zero times infinity would be NaN.
        to_p, to_low, to_high = (
            (log - density).clamp_max(math.log(limits.max) / 2).exp() for log in logs
        )
        return grad * to_p, grad * (to_low + to_high - 1), grad * to_low, grad * to_high


def _inner_quantile(p: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the quantile of an interval around zero, from zero or from the nearer tail."""
    start, end = torch.erf(lower / _ROOT), torch.erf(upper / _ROOT)
    centre = (1 - p) * start + p * end
    below = torch.special.ndtr(lower) + p * (end - start) / 2
    above = torch.special.ndtr(-upper) + (1 - p) * (end - start) / 2
    from_left = below < above
    quantile = torch.special.ndtri(torch.where(from_left, below, above))
    tail = torch.where(from_left, quantile, -quantile)
    return torch.where(centre.abs() < _CENTRE, _ROOT * torch.erfinv(centre), tail)


def _tail_quantile(filled: Tensor, rest: Tensor, near: Tensor, width: Tensor) -> Tensor:
    """Return how far from its nearer end an interval in the tail reaches a fraction of its mass.

    Args:
        filled: The fraction.
        rest: One minus the fraction, exactly.
        near: The nearer end, non-negative.
        width: The width of the interval.
    """
    mass = _tail_mass(near, width)
    narrow = _is_narrow(near, width)

    def within() -> Tensor:
        step = filled * width
        for _ in range(_NARROW_STEPS):
            excess = _narrow_mass(near, step) - filled * mass
            step = step - excess * torch.exp(step * (near + step / 2))
        return step

    def across() -> Tensor:
        return _reached(filled * mass, rest * mass + _mass_beyond(near, width), near)

    return _either(narrow, within, across)


def _reached(below: Tensor, above: Tensor, near: Tensor) -> Tensor:
    """Return how far from `near` the tail has these masses, by Newton's method on its logarithm."""
    start = mills(near)
    tiny = torch.finfo(start.dtype).tiny
    few = below < above
    gone = torch.where(few, -torch.log1p(-below / start), -(above / start).clamp_min(tiny).log())
    step = 2 * gone / (near + torch.sqrt(near * near + 2 * gone)).clamp_min(tiny)
    for _ in range(_STEPS):
        tail = mills(near + step)
        step = step + (torch.log(tail / start) - step * (near + step / 2) + gone) * tail
    return step


def moments(mode: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of the distance from the mode, and minus the mean log-density.

    The log-density is relative to that at the mode, and not normalised.

    Args:
        mode: The point of the interval that is nearest to zero.
        low: The distance of the lower end from the mode, not positive.
        high: The distance of the upper end, not negative.
    """
    # Beyond, the density is less than exp(-40) of that at the mode.
    reach = 80 / (mode.abs() + torch.sqrt(mode * mode + 80))
    first = torch.maximum(low, -reach).unsqueeze(-1)
    last = torch.minimum(high, reach).unsqueeze(-1)
    points, weights = mode.new_tensor(_POINTS), mode.new_tensor(_WEIGHTS)
    y = first + (last - first) * points
    fall = y * (mode.unsqueeze(-1) + y / 2)
    share = weights * torch.exp(-fall)
    share = share / share.sum(-1, keepdim=True)
    mean = (share * y).sum(-1)
    variance = (share * (y - mean.unsqueeze(-1)) ** 2).sum(-1)
    return mean, variance, (share * fall).sum(-1)


def _gauss_legendre(count: int) -> tuple[list[float], list[float]]:
    """Return points and weights of the Gauss-Legendre quadrature on `[0, 1]`; `count` is even."""
    points, weights = [], []
    for k in range(count // 2):
        x = math.cos(math.pi * (k + 0.75) / (count + 0.5))
        slope = 1.0
        for _ in range(5):
            before, value = 1.0, x
            for n in range(2, count + 1):
                before, value = value, ((2 * n - 1) * x * value - (n - 1) * before) / n
            slope = count * (x * value - before) / (x * x - 1)
            x -= value / slope
        points += [(1 - x) / 2, (1 + x) / 2]
        weights += [1 / ((1 - x * x) * slope * slope)] * 2
    return points, weights


_POINTS, _WEIGHTS = _gauss_legendre(40)


# Distributions of one variable on an interval: what those of this package have in common.


class OnInterval(Distribution):
    """A location, a scale and the two ends of an interval, all of the batch shape.

    A subclass names them in this order in `arg_constraints`, and defines `rsample`.

    Args:
        loc: The location.
        scale: The scale, positive.
        low: The lower end.
        high: The upper end, above `low`.
        validate_args: Whether to check values. Never while compiling or exporting.

    Raises:
        InvalidValue: If values are checked and an interval is empty.
    """

    has_rsample = True

    loc: Tensor
    scale: Tensor

    def __init__(
        self,
        loc: Tensor | float,
        scale: Tensor | float,
        low: Tensor | float,
        high: Tensor | float,
        validate_args: bool | None,
    ) -> None:
        values = broadcast_all(loc, scale, low, high)
        for name, value in zip(self.arg_constraints, values, strict=True):
            setattr(self, name, value)
        if torch.compiler.is_compiling():
            validate_args = False
        super().__init__(self.loc.shape, validate_args=validate_args)
        if self._validate_args and not bool((values[2] < values[3]).all()):
            lower, upper = list(self.arg_constraints)[2:]
            raise InvalidValue(
                f"the lower end `{lower}` of a `{type(self).__name__}` must be below the upper end "
                f"`{upper}`, got {lower}={values[2]} and {upper}={values[3]}. Give an interval "
                "that is not empty."
            )

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        """Return the interval, both ends included."""
        ends = (getattr(self, name) for name in list(self.arg_constraints)[2:])
        return constraints.interval(*ends)

    def expand(self, batch_shape: Sequence[int], _instance: Self | None = None) -> Self:
        """Return the distribution with its batch shape expanded, without copying."""
        named = next(kind for kind in type(self).__mro__ if "arg_constraints" in vars(kind))
        new: Self = Distribution._get_checked_instance(self, named, _instance)
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).expand(batch_shape))
        Distribution.__init__(new, Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw without gradients, shape (*sample_shape, *batch_shape)."""
        with torch.no_grad():
            return self.rsample(Size(sample_shape))


# The normal distribution restricted to an interval: its interface.

_LOG_ROOT = 0.9189385332046727
"""The log of the square root of 2 pi."""


@public_in("kd_nn.distributions")
class TruncatedNormal(OnInterval):
    """A normal distribution restricted to `[a, b]`.

    `loc` and `scale` are those of the normal distribution before it is restricted. All results stay
    finite and keep their digits if the interval lies far in a tail or is narrow. Samples carry
    gradients to all parameters. Derivatives of any order are right.

    Args:
        loc: Location of the normal distribution.
        scale: Its scale, positive.
        a: The lower end; may be `-inf`.
        b: The upper end, above `a`; may be `inf`.
        validate_args: Whether to check values, as in every torch distribution. Never while
            compiling or exporting.

    Raises:
        InvalidValue: If values are checked and an interval is empty.

    Example:
        >>> far = TruncatedNormal(torch.tensor(0.0), 1.0, 100.0, 200.0)
        >>> far.mean, far.stddev
        (tensor(100.0100), tensor(0.0100))
        >>> far.log_prob(torch.tensor(100.0))
        tensor(4.6053)
        >>> bool(far.support.check(far.rsample((1000,))).all())
        True
    """

    arg_constraints = {  # noqa: RUF012 - as torch declares it
        "loc": constraints.real,
        "scale": constraints.positive,
        "a": constraints.dependent,
        "b": constraints.dependent,
    }
    a: Tensor
    b: Tensor
    eps: Final = 0.0
    """How far values are kept away from the ends: they may reach them."""

    def __init__(
        self,
        loc: Tensor | float,
        scale: Tensor | float,
        a: Tensor | float,
        b: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(loc, scale, a, b, validate_args)

    @property
    def mode(self) -> Tensor:
        """The point of the interval that is nearest to `loc`."""
        return self.loc.clamp(self.a, self.b)

    @property
    def mean(self) -> Tensor:
        """The mean."""
        standard, low, high = self._interval()
        mean = self.mode + self.scale * moments(standard, low, high)[0]
        return self._narrow(mean).clamp(self.a, self.b)

    @property
    def median(self) -> Tensor:
        """The half quantile."""
        return self.icdf(torch.full_like(self.loc, 0.5))

    @property
    def variance(self) -> Tensor:
        """The variance."""
        return self._narrow(self.scale**2 * moments(*self._interval())[1])

    @property
    def auc(self) -> Tensor:
        """The probability that the unrestricted normal distribution falls into the interval."""
        standard, low, high = self._interval()
        total = log_mass(standard + low, high - low)
        return self._narrow(torch.exp(total - standard * standard / 2 - _LOG_ROOT))

    def entropy(self) -> Tensor:
        """Return the differential entropy, shape (*batch_shape)."""
        standard, low, high = self._interval()
        total = log_mass(standard + low, high - low)
        return self._narrow(moments(standard, low, high)[2] + total + self.scale.log())

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw with gradients, shape (*sample_shape, *batch_shape)."""
        shape = self._extended_shape(Size(sample_shape))
        dtype = torch.promote_types(self.loc.dtype, torch.float32)
        p = torch.rand(shape, dtype=dtype, device=self.loc.device)
        # A zero stands for the numbers that round to it, not for an end at infinity.
        return self._at(p.clamp_min(torch.finfo(dtype).eps / 4))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density, `-inf` outside of the interval."""
        if self._validate_args:
            self._validate_sample(value)
        standard, low, high = self._interval()
        y = (value.clamp(self.a, self.b) - self.mode) / self.scale
        density = -y * (standard + y / 2) - log_mass(standard + low, high - low) - self.scale.log()
        outside = (value < self.a) | (value > self.b)
        return torch.where(outside, -torch.inf, self._narrow(density))

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of a smaller value."""
        if self._validate_args:
            self._validate_sample(value)
        standard, low, high = self._interval()
        y = ((value - self.mode) / self.scale).to(low.dtype).clamp(low, high)
        below = log_part(standard, y, low, high)[0]
        inner = self._narrow(torch.exp(below - log_mass(standard + low, high - low)))
        inner = torch.where(value <= self.a, 0.0, inner)
        return torch.where(value >= self.b, 1.0, inner)

    def icdf(self, value: Tensor) -> Tensor:
        """Return the point below which a value lies with the given probability.

        NaN for what is not a probability.
        """
        found = self._at(value)
        for p, end in ((0, self.a), (1, self.b)):  # the very end, if it is finite
            found = torch.where((value == p) & end.isfinite(), end, found)
        return torch.where((value >= 0) & (value <= 1), found, torch.nan)

    def _at(self, p: Tensor) -> Tensor:
        """Return the quantile of a probability."""
        standard, low, high = self._interval()
        given = broadcast_all(p.to(low.dtype), standard, low, high)
        apply: Callable[..., Tensor] = Quantile.apply
        y = apply(*given)
        return self._narrow(self.mode + self.scale * y).clamp(self.a, self.b)

    def _narrow(self, result: Tensor) -> Tensor:
        """Convert a result to the dtype of the parameters: `_interval` widens short ones."""
        return result.to(self.loc.dtype)

    def _interval(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mode, and the distances of both ends from it, in scales from `loc`.

        Ends farther away than `REACH` are moved there; nothing depends on them. All are at least
        float32: the functions of torch that follow do not know shorter numbers.
        """
        mode = self.mode
        reach = REACH * self.scale.detach()
        # The ends are replaced before they are divided: infinite ones have no gradients.
        low = torch.maximum(self.a - mode, -reach) / self.scale
        high = torch.minimum(self.b - mode, reach) / self.scale
        wide = torch.promote_types(self.loc.dtype, torch.float32)
        return ((mode - self.loc) / self.scale).to(wide), low.to(wide), high.to(wide)


# A normal variable squashed into an interval by the hyperbolic tangent.
#
# A value at an end of the interval, which rounding produces easily, has no finite inverse. Values
# are therefore kept one rounding unit away from the ends, in draws and in `log_prob` alike.

_LOG_2: Final = math.log(2.0)


@public_in("kd_nn.distributions")
class TanhNormal(OnInterval):
    """The distribution of `low + (high - low) (tanh(x) + 1) / 2` for a normal `x`.

    It has no formula for mean, variance, mode and entropy. `deterministic_sample` is the median.
    `torch.distributions.kl_divergence` of two on the same interval is that of their normal
    variables, since a divergence does not depend on an invertible map of both.

    Args:
        loc: Location of `x`.
        scale: Scale of `x`, positive.
        low: The lower end of the values.
        high: The upper end, above `low`.
        validate_args: Whether to check values, as in every torch distribution. Never while
            compiling or exporting.

    Raises:
        InvalidValue: If values are checked and an interval is empty.

    Example:
        >>> action = TanhNormal(torch.tensor(20.0), 1.0)
        >>> value = action.rsample()
        >>> bool(value < 1), bool(action.log_prob(value).isfinite())
        (True, True)
        >>> TanhNormal(torch.tensor(0.0), 1.0, low=0.0, high=10.0).deterministic_sample
        tensor(5.)
    """

    arg_constraints = {  # noqa: RUF012 - as torch declares it
        "loc": constraints.real,
        "scale": constraints.positive,
        "low": constraints.dependent,
        "high": constraints.dependent,
    }
    low: Tensor
    high: Tensor

    def __init__(
        self,
        loc: Tensor | float,
        scale: Tensor | float,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(loc, scale, low, high, validate_args)

    @property
    def median(self) -> Tensor:
        """The median: the squashed location."""
        return self._squash(self.loc)

    @property
    def deterministic_sample(self) -> Tensor:
        """The median."""
        return self.median

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw with gradients, shape (*sample_shape, *batch_shape)."""
        return self._squash(self._normal().rsample(Size(sample_shape)))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density, `-inf` outside of the interval."""
        if self._validate_args:
            self._validate_sample(value)
        x = self._stretch(value)
        inner: Tensor = self._normal().log_prob(x)
        # log(1 - tanh(x)^2), which rounds to log(0) where it is computed so
        slope = 2 * (_LOG_2 - x - functional.softplus(-2 * x))
        density = inner - slope - self._ends()[1].log()
        return torch.where((value < self.low) | (value > self.high), -torch.inf, density)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of a smaller value."""
        if self._validate_args:
            self._validate_sample(value)
        inner: Tensor = self._normal().cdf(self._stretch(value))
        inner = torch.where(value <= self.low, 0.0, inner)
        return torch.where(value >= self.high, 1.0, inner)

    def icdf(self, value: Tensor) -> Tensor:
        """Return the point below which a value lies with the given probability."""
        inner: Tensor = self._normal().icdf(value)
        return self._squash(inner)

    def _normal(self) -> Normal:
        return Normal(self.loc, self.scale, validate_args=False)

    def _squash(self, x: Tensor) -> Tensor:
        """Map a real number into the interval."""
        largest = 1 - torch.finfo(x.dtype).eps
        unit = x.tanh().clamp(-largest, largest)
        centre, radius = self._ends()
        return torch.addcmul(centre, radius, unit).clamp(self.low, self.high)

    def _stretch(self, value: Tensor) -> Tensor:
        """Map a value of the interval to the real number that it comes from."""
        largest = 1 - torch.finfo(self.loc.dtype).eps
        centre, radius = self._ends()
        return ((value - centre) / radius).clamp(-largest, largest).atanh()

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Return the centre of the interval, near which values keep digits, and its radius."""
        return torch.lerp(self.low, self.high, 0.5), (self.high - self.low) / 2


def _kl_on_one_interval(p: TanhNormal, q: TanhNormal) -> Tensor:
    """Return the divergence of `p` from `q`, shape (*batch_shape).

    Raises:
        NotImplementedError: If their intervals differ: there is no formula. Where values cannot be
            read, in a capture or under a transformation, the result is NaN there.
    """
    same = (p.low == q.low) & (p.high == q.high)
    divergence: Tensor = kl_divergence(p._normal(), q._normal())
    if not is_eager():
        return torch.where(same, divergence, torch.nan)
    if not bool(same.all()):
        raise NotImplementedError(
            "the divergence of two `TanhNormal` has a formula only if both are on the same "
            f"interval, got low={p.low}, high={p.high} and low={q.low}, high={q.high}. Estimate it "
            "from draws: `(p.log_prob(x) - q.log_prob(x)).mean(0)`."
        )
    return divergence


register_kl(TanhNormal, TanhNormal)(_kl_on_one_interval)
