"""A normal variable squashed into an interval by the hyperbolic tangent.

A value at an end of the interval, which rounding produces easily, has no finite inverse. Values are
therefore kept one rounding unit away from the ends, in draws and in `log_prob` alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Size, Tensor
from torch.distributions import Normal, constraints, kl_divergence, register_kl
from torch.nn import functional

from kd_core.extending import is_eager, public_in
from kd_nn.distributions._interval import OnInterval

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
        inner: Tensor = self._normal().log_prob(x)  # type: ignore[no-untyped-call]  # by torch
        # log(1 - tanh(x)^2), which rounds to log(0) where it is computed so
        slope = 2 * (_LOG_2 - x - functional.softplus(-2 * x))
        density = inner - slope - self._ends()[1].log()
        return torch.where((value < self.low) | (value > self.high), -torch.inf, density)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of a smaller value."""
        if self._validate_args:
            self._validate_sample(value)
        inner: Tensor = self._normal().cdf(self._stretch(value))  # type: ignore[no-untyped-call]  # by torch
        inner = torch.where(value <= self.low, 0.0, inner)
        return torch.where(value >= self.high, 1.0, inner)

    def icdf(self, value: Tensor) -> Tensor:
        """Return the point below which a value lies with the given probability."""
        inner: Tensor = self._normal().icdf(value)  # type: ignore[no-untyped-call]  # by torch
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


register_kl(TanhNormal, TanhNormal)(_kl_on_one_interval)  # type: ignore[no-untyped-call]  # by torch
