"""The normal distribution restricted to an interval: its interface, over `_truncated`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Size, Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from kd_core.extending import public_in
from kd_nn.distributions._interval import OnInterval
from kd_nn.distributions._truncated import REACH, Quantile, log_mass, log_part, moments

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
        y: Tensor = Quantile.apply(*given)  # type: ignore[no-untyped-call]  # by torch
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
