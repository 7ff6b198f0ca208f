"""Distributions of torch, with what builds them, their parameters and their estimates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from kd_nn.distributions import values_unchecked

Estimates: TypeAlias = dict[str, Callable[[Distribution], Tensor]]


@dataclass(frozen=True)
class Law:
    """A distribution: what builds it, what its parameters must be, and its estimates."""

    build: Callable[..., Distribution]
    params: dict[str, Callable[[Tensor], Tensor]]
    estimates: Estimates

    def make(self, params: dict[str, Tensor]) -> Distribution:
        """Build it; some checks of torch fail on no rows."""
        if all(value.numel() for value in params.values()):
            return self.build(**params)
        with values_unchecked():
            made = self.build(**params)
        made._validate_args = False
        return made

    def estimate(self, dist: Distribution, kind: str) -> Tensor:
        """Return the mean, mode, median or deterministic value."""
        if kind not in self.estimates:
            raise NotImplementedError(kind)
        return self.estimates[kind](dist)


def positive(x: Tensor) -> Tensor:
    """Return a positive value."""
    return x.exp() + 0.1


def independent(loc: Tensor, scale: Tensor) -> Distribution:
    """Return a normal of rows."""
    return distributions.Independent(distributions.Normal(loc, scale), 1)


def mode(dist: Distribution) -> Tensor:
    """Return the mode."""
    return dist.mode


def likelier(dist: Distribution) -> Tensor:
    """Return the mode of a coin, where torch has none for one half."""
    return (dist.mean >= 0.5).to(dist.mean)


def mean(dist: Distribution) -> Tensor:
    """Return the mean."""
    return dist.mean


def median(dist: Distribution) -> Tensor:
    """Return the half quantile."""
    return dist.icdf(torch.tensor(0.5))


def log_prob(dist: Distribution, value: Tensor) -> Tensor:
    """Return the log-probability, also of no rows, which `Independent` refuses."""
    if isinstance(dist, distributions.Independent) and not value.numel():
        each: Tensor = dist.base_dist.log_prob(value)
        return each.sum(-1)
    found: Tensor = dist.log_prob(value)
    return found


ALL: Estimates = {"mean": mean, "mode": mode, "median": median, "deterministic": mean}
MIDDLE: Estimates = {"mean": mean, "mode": mode, "deterministic": mean}
COIN: Estimates = {"mean": mean, "mode": likelier, "deterministic": likelier}
LAWS = [
    Law(distributions.Normal, {"loc": torch.neg, "scale": positive}, ALL),
    Law(distributions.Laplace, {"loc": torch.neg, "scale": positive}, ALL),
    Law(distributions.Exponential, {"rate": positive}, ALL),
    Law(distributions.Bernoulli, {"logits": torch.neg}, COIN),
    Law(distributions.Gamma, {"concentration": positive, "rate": positive}, MIDDLE),
    Law(independent, {"loc": torch.neg, "scale": positive}, MIDDLE),
    Law(
        distributions.Categorical,
        {"logits": torch.neg},
        {"mode": mode, "deterministic": mode},
    ),
]
