"""Building a distribution from its parameters.

Values are checked exactly when torch would check them, but never while a graph is captured, nor
inside `vmap`: a check is a Python branch on data, which neither can trace.

Most of the time that a constructor of torch takes is spent on checks; a reduction or two shows that
valid parameters are valid. A value that was drawn is in the support, and a finite log-probability
shows it. Where this is not shown, torch's own checks run, and raise as usual.

Knows the attributes of torch's distributions; must not know keyed modules.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, TypeAlias

import torch
from torch import Size, Tensor
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    ContinuousBernoulli,
    Distribution,
    ExpTransform,
    Independent,
    Laplace,
    Normal,
    SigmoidTransform,
    TanhTransform,
    TransformedDistribution,
)

from kd_core import InvalidArgument, nearest_key
from kd_core.extending import (
    assume_constant_result,
    maybe_current_level,
    public_in,
    signature_of,
)
from kd_nn.distributions import values_unchecked
from kd_probabilistic._interaction import must_not_look

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
        if self._quick is not None and not self.settings and not torch.compiler.is_compiling():
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
            if not torch.compiler.is_compiling():
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
    return not torch.compiler.is_compiling() and any(
        isinstance(value, Tensor) and not value.numel() for value in values
    )


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

_EVENT: Final = Size()


def builder_of(distribution: object, names: tuple[str, ...]) -> Builder | None:
    """Return what builds a distribution of these arguments, None if only its constructor does."""
    if torch.compiler.is_dynamo_compiling():  # where the constructor is called anyway
        return None
    if distribution is Normal and names == ("loc", "scale"):
        return _normal if _is_plain(Normal) else None
    if distribution is Categorical and names == ("logits",):
        return _categorical if _is_plain(Categorical) else None
    return None


def log_prob_of_draw(dist: Distribution, value: Tensor) -> Tensor:
    """Return the log-probability of a value that was drawn from this distribution."""
    if not torch.compiler.is_compiling() and dist._validate_args:
        unchecked = _unchecked(dist)
        if unchecked is not None:
            found = log_prob_of(unchecked, value)
            if math.isfinite(found.detach().sum().item()):
                return found
    return log_prob_of(dist, value)


def _unchecked(dist: Distribution) -> Distribution | None:
    """Return a copy that does not check values, None for classes that may need it."""
    kind = type(dist)
    if kind not in _DRAWS_FIT:
        return None
    made = object.__new__(kind)
    parts = vars(made)
    parts.update(vars(dist))
    parts["_validate_args"] = False
    if "base_dist" in parts:
        parts["base_dist"] = base = _unchecked(parts["base_dist"])
        if base is None or not all(type(each) in _MAPS for each in parts.get("transforms", ())):
            return None
    return made


_DRAWS_FIT: Final = frozenset(
    {Bernoulli, Categorical, Independent, Laplace, Normal, TransformedDistribution}
)
"""Distributions that draw from their support; a draw that is not a number has no probability."""

_MAPS: Final = frozenset({AffineTransform, ExpTransform, SigmoidTransform, TanhTransform})
"""Transforms that map into their codomain."""


def _normal(values: Sequence[object]) -> Normal | None:
    loc, scale = values
    if loc.__class__ is not Tensor or scale.__class__ is not Tensor:
        return None
    assert isinstance(loc, Tensor)
    assert isinstance(scale, Tensor)
    shape = loc.shape
    if shape != scale.shape or maybe_current_level() is not None or Normal.__init__ is not _NORMAL:
        return None
    if Distribution._validate_args and not _surely_valid(loc, scale):
        return None
    normal = object.__new__(Normal)
    normal.loc, normal.scale = loc, scale
    normal._batch_shape, normal._event_shape = shape, _EVENT
    return normal


def _surely_valid(loc: Tensor, scale: Tensor) -> bool:
    """Return whether no location is NaN and all scales are positive; False if it is unknown.

    The minimum of a NaN is NaN, and so is the sum, which is also NaN for opposite infinities.
    """
    if not loc.numel() or scale.is_complex() or not scale.min().item() > 0:
        return False
    total = loc.sum().item()
    return total == total


def _categorical(values: Sequence[object]) -> Categorical | None:
    (given,) = values
    if given.__class__ is not Tensor or maybe_current_level() is not None:
        return None
    assert isinstance(given, Tensor)
    if not given.is_floating_point() or not given.ndim or not given.numel():
        return None
    if Categorical.__init__ is not _CATEGORICAL:
        return None
    logits = given - given.logsumexp(dim=-1, keepdim=True)
    if Distribution._validate_args and math.isnan(logits.detach().sum().item()):
        return None
    made = object.__new__(Categorical)
    vars(made)["logits"] = made._param = logits  # as where torch has computed it
    *batch, made._num_events = logits.shape
    made._batch_shape, made._event_shape = Size(batch), _EVENT
    return made


@cache
def _is_plain(kind: type[Distribution]) -> bool:
    """Return whether an instance by the installed torch has exactly the attributes set here."""
    # Whatever mode is on: without checks nothing reads the values.
    if kind is Normal:
        made: Distribution = Normal(torch.zeros(1), torch.ones(1), validate_args=False)
        names = {"loc", "scale"}
    else:
        made = Categorical(logits=torch.zeros(1), validate_args=False)
        names = {"logits", "_param", "_num_events"}
    return vars(made).keys() == {*names, "_batch_shape", "_event_shape", "_validate_args"}


_NORMAL: Final = Normal.__init__
_CATEGORICAL: Final = Categorical.__init__


def log_prob_of(dist: Distribution, value: Tensor) -> Tensor:
    """Return the log-probability of a value, as a tensor."""
    if isinstance(dist, Independent) and not torch.compiler.is_compiling() and not value.numel():
        return sum_last(log_prob_of(dist.base_dist, value), dist.reinterpreted_batch_ndims)
    found: Tensor = dist.log_prob(value)
    return found


def sum_last(parts: Tensor, dims: int) -> Tensor:
    """Return the sum over the last dimensions, also of no rows, which `Independent` refuses."""
    return parts.sum(tuple(range(-dims, 0))) if dims else parts
