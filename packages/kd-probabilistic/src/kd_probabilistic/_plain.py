"""Distributions of torch without their checks, where something shorter shows that they would pass.

Most of the time that a constructor of torch takes is spent on checks; a reduction or two shows that
valid parameters are valid. A value that was drawn is in the support, and a finite log-probability
shows it. Where this is not shown, torch's own checks run, and raise as usual.
Knows the attributes of torch's distributions; must not know keyed modules.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, TypeAlias

import torch
from torch import Size, Tensor
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    Distribution,
    ExpTransform,
    Independent,
    Laplace,
    Normal,
    SigmoidTransform,
    TanhTransform,
    TransformedDistribution,
)

from kd_probabilistic._log_prob import log_prob_of
from kd_probabilistic._reading import functorch_level

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
    if shape != scale.shape or functorch_level() is not None or Normal.__init__ is not _NORMAL:
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
    if given.__class__ is not Tensor or functorch_level() is not None:
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
