"""Private names of torch that this distribution needs, each with what does without it.

Some say what a tensor is while a graph is captured. Where a torch lacks them, modules run, and what
reads values of fake tensors fails with torch's message. Those of `vmap` are in kd_core. Others are
the attributes of torch's distributions: where a torch has others, the constructors of torch run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

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

from kd_core.extending import maybe_current_level, private_name

_mode_of: Callable[[object], object] = private_name(
    "torch._C", "_get_dispatch_mode", lambda key: None
)
_FAKE: object = private_name("torch._C", "_TorchDispatchModeKey.FAKE", None)


def computes_shapes_alone() -> bool:
    """Return whether operators give fake tensors, without values. Fallback: they do not."""
    return _mode_of(_FAKE) is not None


READS_VALUES = frozenset({"GuardOnDataDependentSymNode", "DataDependentOutputException"})
"""The errors of torch for a branch on a value, by name: to import them loads the exporter.

Fallback: `unchecked` also knows them by their message.
"""


# How torch lays out its distributions.

_EVENT: Final = Size()


def without_checks(dist: Distribution) -> Distribution | None:
    """Return a copy that does not check values; None where it checks none, or may need to."""
    return _unchecked(dist) if dist._validate_args else None


def _unchecked(dist: Distribution) -> Distribution | None:
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


def build_normal(values: Sequence[object]) -> Normal | None:
    """Return the distribution of a location and a scale; None if they may be invalid."""
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


def build_categorical(values: Sequence[object]) -> Categorical | None:
    """Return the distribution of logits; None if they may be invalid."""
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
def builds_plainly(kind: type[Distribution]) -> bool:
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
