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
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kd_core.extending import is_eager
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
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of `p`, of the mode and of the distances of both ends."""
        p, mode, low, high, y = ctx.saved_tensors  # type: ignore[attr-defined]  # of the context of a backward
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
