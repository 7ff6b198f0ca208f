"""One distribution: built from its parameters, scored, and its value for each interaction type.

Knows the attributes of torch's distributions; must not know keyed modules.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor, distributions
from torch.compiler import is_compiling
from torch.distributions import (
    Categorical,
    ContinuousBernoulli,
    Distribution,
    Independent,
    Normal,
)
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical

from kd_core import InvalidArgument, KdError, nearest_key
from kd_core.extending import (
    assume_constant_result,
    public_in,
    signature_of,
)
from kd_nn.distributions import values_unchecked
from kd_probabilistic._interaction import (
    InteractionType,
    as_interaction_type,
    can_read,
    must_not_look,
)
from kd_probabilistic._torch_private import (
    build_categorical,
    build_normal,
    builds_plainly,
    without_checks,
)

# Building a distribution from its parameters.
#
# Values are checked exactly when torch would check them, but never while a graph is captured, nor
# inside `vmap`: a check is a Python branch on data, which neither can trace.
#
# Most of the time that a constructor of torch takes is spent on checks; a reduction or two shows
# that valid parameters are valid. A value that was drawn is in the support, and a finite
# log-probability shows it. Where this is not shown, torch's own checks run, and raise as usual.

_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@public_in("kd_probabilistic._pickled")
class Construction:
    """Calls a distribution class with named parameters and fixed settings.

    Args:
        distribution: The class, or a callable that returns a distribution.
        names: The argument that each parameter is passed as.
        settings: Further keyword arguments.

    Raises:
        InvalidArgument: If `distribution` is not callable, or an argument is given twice; in a
            call, if the arguments are not those that it takes.
    """

    __slots__ = ("_quick", "_unchecked", "distribution", "names", "settings")

    def __init__(
        self,
        distribution: Callable[..., Distribution],
        names: Sequence[str],
        settings: Mapping[str, object],
    ) -> None:
        if not callable(distribution):
            raise InvalidArgument(
                "`distribution_class` must be a distribution class or a callable that returns a "
                f"distribution, got {distribution!r}. Pass the class, such as `Normal`: its "
                "arguments are read from the container."
            )
        twice = [name for name in names if name in settings]
        if twice:
            raise InvalidArgument(
                f"the argument `{twice[0]}` of `{name_of(distribution)}` is given by `in_keys` and "
                "by `distribution_kwargs`. Give it once."
            )
        self.distribution = distribution
        self.names = tuple(names)
        self.settings = dict(settings)
        # dynamo cannot trace a change of torch's default, so each class gets the argument; except
        # one that checks for any value which is not None.
        told = distribution is not ContinuousBernoulli and _accepts(distribution, "validate_args")
        self._unchecked: dict[str, object] = {"validate_args": False} if told else {}
        self._quick = builder_of(distribution, self.names)

    def __call__(self, values: Sequence[object]) -> Distribution:
        """Build the distribution of one value per name."""
        if self._quick is not None and not self.settings and not is_compiling():
            quick = self._quick(values)
            if quick is not None:
                return quick
        if _are_empty(values):
            with values_unchecked():
                return self._built(values, {**self.settings, **self._unchecked})
        settings = self.settings
        if torch.compiler.is_dynamo_compiling():
            settings = {**settings, **self._unchecked}
        elif "validate_args" in settings and must_not_look(values):
            settings = {name: value for name, value in settings.items() if name != "validate_args"}
        return self._built(values, settings)

    def _built(self, values: Sequence[object], settings: Mapping[str, object]) -> Distribution:
        try:
            found = self.distribution(**dict(zip(self.names, values, strict=True)), **settings)
        except TypeError:
            if not is_compiling():
                _check_arguments(self.distribution, self.names, tuple(self.settings))
            raise
        if not isinstance(found, Distribution):
            raise InvalidArgument(
                f"`{name_of(self.distribution)}` must return a `torch.distributions.Distribution`, "
                f"got {type(found).__name__}."
            )
        return found


def _are_empty(values: Sequence[object]) -> bool:
    """Return whether a value is empty, where some checks of torch fail."""
    if is_compiling():
        return False
    for value in values:  # a generator takes as long as all that it asks
        if isinstance(value, Tensor) and not value.numel():
            return True
    return False


def name_of(distribution: Callable[..., object]) -> str:
    """Return the name of a distribution class for messages."""
    while isinstance(distribution, functools.partial):
        distribution = distribution.func
    return getattr(distribution, "__name__", type(distribution).__name__)


# dynamo cannot trace a signature; and what a class takes does not change.
@assume_constant_result
def _check_arguments(
    function: Callable[..., object], names: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    """Raise unless a callable takes these arguments and requires no others."""
    taken = _signature(function)
    if taken is None:
        return
    known = [name for name, _ in taken.named]
    given = [*names, *settings]
    unknown = [] if taken.open_ended else [name for name in given if name not in known]
    if unknown:
        near = nearest_key(unknown[0], known)
        hint = "" if near is None else f" Did you mean `{near}`?"
        raise InvalidArgument(
            f"`{name_of(function)}` has no argument `{unknown[0]}`; it takes {_listed(known)}."
            f"{hint} The last part of a key names the argument; for other keys give a mapping "
            "`{argument: key}`."
        )
    needed = [name for name, required in taken.named if required and name not in given]
    if needed:
        raise InvalidArgument(
            f"`{name_of(function)}` also requires {_listed(needed)}, got {_listed(given)}. Add "
            "parameters (`in_keys` of a module, entries of a composite), or fixed values "
            "(`distribution_kwargs`, `extra_kwargs`)."
        )


class _Signature:
    """The arguments of a callable, with whether each is required, and whether it takes others."""

    __slots__ = ("named", "open_ended")

    def __init__(self, named: tuple[tuple[str, bool], ...], open_ended: bool) -> None:
        self.named, self.open_ended = named, open_ended


def _signature(function: Callable[..., object]) -> _Signature | None:
    """Return the arguments of a callable, None if they are unknown."""
    try:
        return _inspected(function)
    except TypeError:  # not hashable
        return _inspected.__wrapped__(function)


@functools.lru_cache(maxsize=256)
def _inspected(function: Callable[..., object]) -> _Signature | None:
    try:
        parameters = signature_of(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = tuple((p.name, p.default is p.empty) for p in parameters if p.kind in _NAMED)
    return _Signature(named, any(p.kind is p.VAR_KEYWORD for p in parameters))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


@assume_constant_result
def _accepts(function: Callable[..., object], name: str) -> bool:
    """Return whether a callable has an argument of this name."""
    taken = _signature(function)
    return taken is not None and any(name == known for known, _ in taken.named)


Builder: TypeAlias = Callable[[Sequence[object]], Distribution | None]
"""Builds a distribution; returns None if the values may be invalid, or are unusual."""


def builder_of(distribution: object, names: tuple[str, ...]) -> Builder | None:
    """Return what builds a distribution of these arguments, None if only its constructor does."""
    if torch.compiler.is_dynamo_compiling():  # where the constructor is called anyway
        return None
    if distribution is Normal and names == ("loc", "scale"):
        return build_normal if builds_plainly(Normal) else None
    if distribution is Categorical and names == ("logits",):
        return build_categorical if builds_plainly(Categorical) else None
    return None


def log_prob_of_draw(dist: Distribution, value: Tensor) -> Tensor:
    """Return the log-probability of a value that was drawn from this distribution."""
    if not is_compiling():
        unchecked = without_checks(dist)
        if unchecked is not None:
            found = log_prob_of(unchecked, value)
            if math.isfinite(found.detach().sum().item()):
                return found
    return log_prob_of(dist, value)


def log_prob_of(dist: Distribution, value: Tensor) -> Tensor:
    """Return the log-probability of a value, as a tensor."""
    if isinstance(dist, Independent) and not is_compiling() and not value.numel():
        return sum_last(log_prob_of(dist.base_dist, value), dist.reinterpreted_batch_ndims)
    found: Tensor = dist.log_prob(value)
    return found


def sum_last(parts: Tensor, dims: int) -> Tensor:
    """Return the sum over the last dimensions, also of no rows, which `Independent` refuses."""
    return parts.sum(tuple(range(-dims, 0))) if dims else parts


# How the value of each interaction type is computed: a registry, general rules, formulas.
#
# An entry of the registry belongs to a distribution class and an interaction type; a subclass
# inherits it. A class of torch has one where the general rule would be undefined (torch has no
# formula but there is one), wrong (torch returns NaN for what does not exist and gives no way to
# see it) or slow (the general rule reads the value to see whether it is a number).
#
# Formulas: N. Johnson, S. Kotz, N. Balakrishnan, Continuous Univariate Distributions, 2nd ed.,
# 1994; C. Maddison, A. Mnih, Y. W. Teh, The Concrete Distribution, 2017,
# https://arxiv.org/abs/1611.00712.

Estimator: TypeAlias = Callable[[Distribution], Tensor]

KEPT = 256
"""How many classes the cache of each interaction type holds."""


class EstimateNotOffered(KdError, NotImplementedError, AttributeError):
    """A distribution does not offer an estimate; the message lists those that it offers.

    It is an `AttributeError`, so that `hasattr(distribution, "median")` answers.
    """


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
        >>> class Coin(torch.distributions.Bernoulli):
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
        >>> estimate(torch.distributions.Cauchy(0.0, 1.0), InteractionType.DETERMINISTIC)
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


def scored_draw(
    distribution: Distribution,
) -> Callable[[torch.Size], tuple[Tensor, Tensor]] | None:
    """Return what draws at random and computes the log-probability at once; `None` if nothing does.

    A distribution that knows what it drew before it rounded, as one behind a `tanh`, is exact so.
    """
    name = "rsample_and_log_prob" if distribution.has_rsample else "sample_and_log_prob"
    found: Callable[[torch.Size], tuple[Tensor, Tensor]] | None = (
        getattr(distribution, name) if hasattr(type(distribution), name) else None
    )
    return found


def mean_or_empirical(distribution: Distribution, count: int) -> Tensor:
    """Return the mean, or the mean of `count` draws if there is no closed form."""
    try:
        return estimate(distribution, InteractionType.MEAN)
    except EstimateNotOffered:
        if _has_mean_formula(distribution):  # there is no mean
            raise
    return draw(distribution, torch.Size((count,))).mean(0)


def _has_mean_formula(distribution: Distribution) -> bool:
    if isinstance(distribution, Independent):
        return _has_mean_formula(distribution.base_dist)
    known = _row(type(distribution), InteractionType.MEAN) is not None
    return known or _try(distribution, "mean") is not None


def _resolve(kind: type[Distribution], interaction: InteractionType) -> Estimator:
    """Find the estimator of a class: its own method, the nearest entry, else the general rule."""
    if interaction is InteractionType.DETERMINISTIC and hasattr(kind, "deterministic_sample"):
        found: Estimator = _own_deterministic_sample
    else:
        found = _row(kind, interaction) or _GENERAL[interaction]
    if not is_compiling():
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


def _try(distribution: Distribution, name: str) -> Tensor | None:
    """Return an estimate of torch, or None if it has none."""
    try:
        value: Tensor = getattr(distribution, name)
    except (NotImplementedError, AttributeError):
        return None
    return value


def _general_mode(distribution: Distribution) -> Tensor:
    return checked(distribution, "mode", _try(distribution, "mode"))


def _general_mean(distribution: Distribution) -> Tensor:
    return checked(distribution, "mean", _try(distribution, "mean"))


def _general_median(distribution: Distribution) -> Tensor:
    """Return the median that the class declares, else the half quantile."""
    value = _try(distribution, "median")
    if value is None:
        value = _half_quantile(distribution)
    return checked(distribution, "median", value)


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
        if value is not None and (not can_read(value) or bool(value.isfinite().all())):
            return value
    raise not_offered(distribution, "finite deterministic value")


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


def checked(distribution: Distribution, name: str, value: Tensor | None) -> Tensor:
    """Return an estimate, or raise that it does not exist.

    Where an estimate does not exist for some parameters, torch gives NaN for them. While a graph is
    captured and inside `vmap` values cannot be read, so NaN stays there.

    Args:
        distribution: The distribution.
        name: What the estimate is called.
        value: The estimate, None if the distribution has none.
    """
    if value is None:
        raise not_offered(distribution, name)
    if can_read(value) and bool(value.isnan().any()):
        raise not_offered(distribution, f"{name} for some of its parameters")
    return value


def not_offered(distribution: Distribution, name: str) -> EstimateNotOffered:
    """Build the error with the estimates that the distribution offers."""
    offers = ["random"]
    for member in (InteractionType.MODE, InteractionType.MEDIAN, InteractionType.MEAN):
        if member.value != name.split()[0] and _offers(distribution, member):
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
        return not row.__qualname__.startswith("absent")
    try:
        if interaction is InteractionType.MEDIAN and _half_quantile(distribution) is not None:
            return True
        return _try(distribution, interaction.value) is not None
    except RuntimeError:  # in which a class may say that it has none
        return False


_GENERAL: dict[InteractionType, Estimator] = {
    InteractionType.DETERMINISTIC: _general_deterministic,
    InteractionType.MEAN: _general_mean,
    InteractionType.MEDIAN: _general_median,
    InteractionType.MODE: _general_mode,
}
_REGISTRY: dict[InteractionType, dict[type[Distribution], Estimator]] = {
    member: {} for member in _GENERAL
}
_RESOLVED: dict[InteractionType, dict[type[Distribution], Estimator]] = {
    member: {} for member in _REGISTRY
}


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
