"""How the value of each interaction type is computed for each distribution.

An entry of the registry belongs to a distribution class and an interaction type; a subclass
inherits it. An entry is needed if the general rule would be wrong (torch returns NaN if an estimate
does not exist), undefined (torch has no formula but there is one) or slow (the general rule checks
that the values are finite). The general rules are defined here too.

Formulas: N. Johnson, S. Kotz, N. Balakrishnan, Continuous Univariate Distributions, 2nd ed., 1994;
C. Maddison, A. Mnih, Y. W. Teh, The Concrete Distribution, 2017, https://arxiv.org/abs/1611.00712.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical

from kd_core import InvalidArgument, KdError
from kd_probabilistic._interaction import InteractionType, as_interaction_type

Estimator: TypeAlias = Callable[[Distribution], Tensor]

KEPT = 256
"""How many classes the cache of each interaction type holds."""


class EstimateNotOffered(KdError, NotImplementedError):
    """A distribution does not offer an estimate; the message lists those that it offers."""


def register_estimator(
    distribution: type[Distribution], interaction: InteractionType | str, estimator: Estimator
) -> None:
    """Register how an estimate is computed for a class of distributions and its subclasses.

    Args:
        distribution: The class.
        interaction: An interaction type other than RANDOM, which uses `rsample` or `sample`.
        estimator: A function from the distribution to a value, shape (*batch_shape, *event_shape).

    Raises:
        InvalidArgument: If the interaction type is RANDOM.

    Example:
        >>> class Coin(distributions.Bernoulli):
        ...     pass
        >>> register_estimator(Coin, "deterministic", lambda coin: coin.probs)
        >>> estimate(Coin(torch.tensor(0.3)), InteractionType.DETERMINISTIC)
        tensor(0.3000)
    """
    member = as_interaction_type(interaction)
    if member is InteractionType.RANDOM:
        raise InvalidArgument(
            "`interaction` cannot be RANDOM, which uses `rsample` or `sample`. Override these in "
            "the distribution."
        )
    _REGISTRY[member][distribution] = estimator
    _RESOLVED[member].clear()


def estimate(distribution: Distribution, interaction: InteractionType) -> Tensor:
    """Compute the mode, median, mean or deterministic value of a distribution.

    Args:
        distribution: The distribution.
        interaction: An interaction type other than RANDOM.

    Returns:
        A value of shape (*batch_shape, *event_shape).

    Raises:
        EstimateNotOffered: If the distribution does not offer this value.

    Example:
        >>> estimate(distributions.Cauchy(0.0, 1.0), InteractionType.DETERMINISTIC)
        tensor(0.)
    """
    kind = type(distribution)
    found = _RESOLVED[interaction].get(kind)
    if found is None:
        found = _resolve(kind, interaction)
    return found(distribution)


def draw(distribution: Distribution, sample_shape: torch.Size) -> Tensor:
    """Draw at random, with gradients if the distribution supports them."""
    if distribution.has_rsample:
        return distribution.rsample(sample_shape)
    return distribution.sample(sample_shape)


def mean_or_empirical(distribution: Distribution, count: int) -> Tensor:
    """Return the mean, or the mean of `count` draws if there is no closed form."""
    try:
        return estimate(distribution, InteractionType.MEAN)
    except EstimateNotOffered as error:
        if _row(type(distribution), InteractionType.MEAN) is not None:
            raise
        if count < 1:
            raise EstimateNotOffered(
                f"{error} Or set `n_empirical_estimate` to the number of draws to average."
            ) from None
    return draw(distribution, torch.Size((count,))).mean(0)


def _resolve(kind: type[Distribution], interaction: InteractionType) -> Estimator:
    """Find the estimator of a class: its own method, the nearest entry, else the general rule."""
    if interaction is InteractionType.DETERMINISTIC and hasattr(kind, "deterministic_sample"):
        found: Estimator = _own_deterministic_sample
    else:
        found = _row(kind, interaction) or _GENERAL[interaction]
    if not torch.compiler.is_compiling():
        resolved = _RESOLVED[interaction]
        if len(resolved) >= KEPT:  # a program may define ever new classes
            resolved.clear()
        resolved[kind] = found
    return found


def _row(kind: type[Distribution], interaction: InteractionType) -> Estimator | None:
    """Find the entry of a class or of its nearest base."""
    rows = _REGISTRY[interaction]
    for base in kind.__mro__:
        if base in rows:
            return rows[base]
    return None


def _own_deterministic_sample(distribution: Distribution) -> Tensor:
    value = getattr(distribution, "deterministic_sample")  # noqa: B009 - not an attribute of the base
    result: Tensor = value() if callable(value) else value
    return result


def _mean(distribution: Distribution) -> Tensor:
    return distribution.mean


def _mode(distribution: Distribution) -> Tensor:
    return distribution.mode


def _try(distribution: Distribution, name: str) -> Tensor | None:
    """Return an estimate of torch, or None if it has none."""
    try:
        value: Tensor = getattr(distribution, name)
    except (NotImplementedError, AttributeError):
        return None
    return value


def _general_mode(distribution: Distribution) -> Tensor:
    value = _try(distribution, "mode")
    if value is None:
        raise _not_offered(distribution, "mode")
    return value


def _general_mean(distribution: Distribution) -> Tensor:
    value = _try(distribution, "mean")
    if value is None:
        raise _not_offered(distribution, "mean")
    return value


def _general_median(distribution: Distribution) -> Tensor:
    """Return the median that the class declares, else the half quantile."""
    value = _try(distribution, "median")
    if value is None:
        value = _half_quantile(distribution)
    if value is None:
        raise _not_offered(distribution, "median")
    return value


def _half_quantile(distribution: Distribution) -> Tensor | None:
    """Return the inverse cdf at one half, if events are scalars and there is a formula."""
    if distribution.event_shape:
        return None
    try:
        value: Tensor = distribution.icdf(torch.tensor(0.5))
    except NotImplementedError:
        return None
    return value.expand(distribution.batch_shape)


def _general_deterministic(distribution: Distribution) -> Tensor:
    """Compute the mode of a discrete distribution, else the mean; the value is always finite."""
    order = [_mean_or_none, _mode_or_none, _median_or_none]
    if _is_discrete(distribution):
        order = [_mode_or_none, _mean_or_none]
    for take in order:
        value = take(distribution)
        if value is not None and (torch.compiler.is_compiling() or bool(value.isfinite().all())):
            return value
    raise _not_offered(distribution, "finite deterministic value")


def _mean_or_none(distribution: Distribution) -> Tensor | None:
    return _try(distribution, "mean")


def _mode_or_none(distribution: Distribution) -> Tensor | None:
    return _try(distribution, "mode")


def _median_or_none(distribution: Distribution) -> Tensor | None:
    try:
        return estimate(distribution, InteractionType.MEDIAN)
    except EstimateNotOffered:
        return None


def _is_discrete(distribution: Distribution) -> bool:
    try:
        support = distribution.support
    except NotImplementedError:
        return False
    return bool(getattr(support, "is_discrete", False))


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
    for take in (_mean_or_none, _mode_or_none):
        value = take(distribution)
        if value is not None:
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


def _absent(name: str) -> Estimator:
    """Build an estimator that raises, where torch returns NaN for what does not exist."""

    def refuse(distribution: Distribution) -> Tensor:
        raise _not_offered(distribution, name)

    return refuse


def _not_offered(distribution: Distribution, name: str) -> EstimateNotOffered:
    """Build the error with the estimates that the distribution offers."""
    offers = ["random"]
    for member in (InteractionType.MODE, InteractionType.MEDIAN, InteractionType.MEAN):
        if member.value != name and _offers(distribution, member):
            offers.append(member.value)
    listed = ", ".join(f"`{offer}`" for offer in sorted(offers))
    return EstimateNotOffered(
        f"`{type(distribution).__name__}` has no {name}; available: {listed}. Choose one "
        "with `set_interaction_type` or `default_interaction_type`, or add one with "
        "`register_estimator`."
    )


def _offers(distribution: Distribution, interaction: InteractionType) -> bool:
    row = _row(type(distribution), interaction)
    if row is not None:
        return not row.__qualname__.startswith("_absent")
    if interaction is InteractionType.MEDIAN:
        return _try(distribution, "median") is not None or _half_quantile(distribution) is not None
    return _try(distribution, interaction.value) is not None


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
_HEAVY_TAIL = (
    distributions.FisherSnedecor,
    distributions.GeneralizedPareto,
    distributions.InverseGamma,
    distributions.Pareto,
)

_REGISTRY: dict[InteractionType, dict[type[Distribution], Estimator]] = {
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
        distributions.Categorical: _absent("mean"),
        distributions.Cauchy: _absent("mean"),
        distributions.Independent: _of_base(InteractionType.MEAN),
        LogitRelaxedBernoulli: _logit_location,
    },
    InteractionType.MEDIAN: {
        distributions.Independent: _of_base(InteractionType.MEDIAN),
        distributions.StudentT: _location("loc"),
        LogitRelaxedBernoulli: _logit_location,
    },
    InteractionType.MODE: {
        distributions.Bernoulli: _likelier_outcome,
        distributions.FisherSnedecor: _zero_where_degenerate("df1", 2),
        distributions.Independent: _of_base(InteractionType.MODE),
        distributions.Uniform: _absent("mode"),
        distributions.Weibull: _zero_where_degenerate("concentration", 1),
    },
}
_GENERAL: dict[InteractionType, Estimator] = {
    InteractionType.DETERMINISTIC: _general_deterministic,
    InteractionType.MEAN: _general_mean,
    InteractionType.MEDIAN: _general_median,
    InteractionType.MODE: _general_mode,
}
_RESOLVED: dict[InteractionType, dict[type[Distribution], Estimator]] = {
    member: {} for member in _REGISTRY
}
