"""The estimates of the distributions of torch for which the general rules do not do.

A row is needed if the general rule would be undefined (torch has no formula but there is one),
wrong (torch returns NaN for what does not exist and gives no way to see it) or slow (the general
rule reads the value to see whether it is a number).

Formulas: N. Johnson, S. Kotz, N. Balakrishnan, Continuous Univariate Distributions, 2nd ed., 1994;
C. Maddison, A. Mnih, Y. W. Teh, The Concrete Distribution, 2017, https://arxiv.org/abs/1611.00712.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical

from kd_probabilistic._estimators import (
    Estimator,
    checked,
    estimate,
    not_offered,
    register_estimator,
)
from kd_probabilistic._interaction import InteractionType


def _mean(distribution: Distribution) -> Tensor:
    return distribution.mean


def _mode(distribution: Distribution) -> Tensor:
    return distribution.mode


def _checked_mean(distribution: Distribution) -> Tensor:
    """Return the mean, or refuse: where there is none, an average of draws does not converge."""
    return checked(distribution, "mean", distribution.mean)


def _finite_mean_or_mode(distribution: Distribution) -> Tensor:
    """Choose by element: the mean diverges for some parameters only."""
    mean = distribution.mean
    mode = estimate(distribution, InteractionType.MODE)
    return torch.where(mean.isfinite(), mean, mode)


def _transformed(distribution: Distribution) -> Tensor:
    """Use a formula if the class has one, else transform the value of the base distribution.

    For monotone transforms of scalars and a symmetric base this is the median.
    """
    assert isinstance(distribution, distributions.TransformedDistribution)
    for name in ("mean", "mode"):
        try:
            value: Tensor = getattr(distribution, name)
        except NotImplementedError:
            continue
        return value
    value = estimate(distribution.base_dist, InteractionType.DETERMINISTIC)
    for transform in distribution.transforms:
        value = transform(value)
    return value


def _of_base(interaction: InteractionType) -> Estimator:
    """Build an estimator that delegates to the distribution inside `Independent`."""

    def take(distribution: Distribution) -> Tensor:
        assert isinstance(distribution, distributions.Independent)
        return estimate(distribution.base_dist, interaction)

    return take


def absent(name: str) -> Estimator:
    """Build an estimator that raises, where torch returns NaN for what does not exist."""

    def refuse(distribution: Distribution) -> Tensor:
        raise not_offered(distribution, name)

    return refuse


def _location(name: str) -> Estimator:
    """Build an estimator that returns a parameter of the distribution."""

    def read(distribution: Distribution) -> Tensor:
        value: Tensor = getattr(distribution, name)
        return value

    return read


def _logit_location(distribution: Distribution) -> Tensor:
    """Return the median of `(logits + logistic noise) / temperature`; the noise is symmetric."""
    assert isinstance(distribution, LogitRelaxedBernoulli)
    return distribution.logits / distribution.temperature


def _concrete_location(distribution: Distribution) -> Tensor:
    """Return the value of a concrete variable, on the log scale, for equal noise."""
    assert isinstance(distribution, ExpRelaxedCategorical)
    return torch.log_softmax(distribution.logits / distribution.temperature, -1)


def _likelier_outcome(distribution: Distribution) -> Tensor:
    """Return the mode of a Bernoulli; 1 for probability one half, where torch returns NaN."""
    assert isinstance(distribution, distributions.Bernoulli)
    return (distribution.probs >= 0.5).to(distribution.probs)


def _kumaraswamy_mode(distribution: Distribution) -> Tensor:
    """Return the mode, an end of the interval where the density is monotone."""
    assert isinstance(distribution, distributions.Kumaraswamy)
    a, b = distribution.concentration1, distribution.concentration0
    one = torch.ones_like(a)
    inner = (a > 1) & (b > 1)
    ratio = torch.where(inner, (a - 1) / torch.where(inner, a * b - 1, one), one)
    mode = torch.where(inner, ratio ** (1 / a), torch.nan)
    mode = torch.where((a <= 1) & (b >= 1), 0.0, torch.where((a >= 1) & (b <= 1), 1.0, mode))
    return checked(distribution, "mode", torch.where((a == 1) & (b == 1), torch.nan, mode))


def _zero_where_degenerate(parameter: str, bound: float) -> Estimator:
    """Build an estimator of the mode, which is zero where the density only decreases."""

    def take(distribution: Distribution) -> Tensor:
        mode = distribution.mode
        inner = getattr(distribution, parameter) > bound
        return torch.where(inner, mode, torch.zeros_like(mode))

    return take


_FINITE_MEAN = (
    distributions.Beta,
    distributions.ContinuousBernoulli,
    distributions.Dirichlet,
    distributions.Exponential,
    distributions.Gamma,
    distributions.Gumbel,
    distributions.HalfNormal,
    distributions.Kumaraswamy,
    distributions.Laplace,
    distributions.LogNormal,
    distributions.LowRankMultivariateNormal,
    distributions.Multinomial,
    distributions.MultivariateNormal,
    distributions.Normal,
    distributions.Uniform,
    distributions.VonMises,
    distributions.Weibull,
    distributions.Wishart,
)
_FINITE_MODE = (
    distributions.Binomial,
    distributions.Categorical,
    distributions.Cauchy,
    distributions.Geometric,
    distributions.HalfCauchy,
    distributions.NegativeBinomial,
    distributions.OneHotCategorical,
    distributions.Poisson,
    distributions.StudentT,
)
_SURE_MODE = (
    *_FINITE_MODE,
    distributions.Exponential,
    distributions.Gumbel,
    distributions.HalfNormal,
    distributions.Laplace,
    distributions.LogNormal,
    distributions.LowRankMultivariateNormal,
    distributions.MultivariateNormal,
    distributions.Normal,
    distributions.VonMises,
)
_HEAVY_TAIL = (
    distributions.FisherSnedecor,
    distributions.GeneralizedPareto,
    distributions.InverseGamma,
    distributions.Pareto,
)

_ROWS: dict[InteractionType, dict[type[Distribution], Estimator]] = {
    InteractionType.DETERMINISTIC: {
        **dict.fromkeys(_FINITE_MEAN, _mean),
        **dict.fromkeys(_FINITE_MODE, _mode),
        **dict.fromkeys(_HEAVY_TAIL, _finite_mean_or_mode),
        distributions.Bernoulli: _likelier_outcome,
        distributions.Independent: _of_base(InteractionType.DETERMINISTIC),
        distributions.TransformedDistribution: _transformed,
        LogitRelaxedBernoulli: _logit_location,
        ExpRelaxedCategorical: _concrete_location,
    },
    InteractionType.MEAN: {
        **dict.fromkeys(_FINITE_MEAN, _mean),
        **dict.fromkeys(_HEAVY_TAIL, _checked_mean),
        distributions.Categorical: absent("mean"),
        distributions.Cauchy: absent("mean"),
        distributions.StudentT: _checked_mean,
        distributions.Independent: _of_base(InteractionType.MEAN),
        LogitRelaxedBernoulli: _logit_location,
    },
    InteractionType.MEDIAN: {
        distributions.Independent: _of_base(InteractionType.MEDIAN),
        distributions.LowRankMultivariateNormal: _location("loc"),
        distributions.MultivariateNormal: _location("loc"),
        distributions.StudentT: _location("loc"),
        distributions.VonMises: _location("loc"),
        LogitRelaxedBernoulli: _logit_location,
    },
    InteractionType.MODE: {
        **dict.fromkeys(_SURE_MODE, _mode),
        distributions.Bernoulli: _likelier_outcome,
        distributions.FisherSnedecor: _zero_where_degenerate("df1", 2),
        distributions.Independent: _of_base(InteractionType.MODE),
        distributions.Kumaraswamy: _kumaraswamy_mode,
        distributions.Uniform: absent("mode"),
        distributions.Weibull: _zero_where_degenerate("concentration", 1),
    },
}

for _interaction, _rows in _ROWS.items():
    for _distribution, _estimator in _rows.items():
        register_estimator(_distribution, _interaction, _estimator)
