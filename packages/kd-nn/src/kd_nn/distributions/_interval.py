"""Distributions of one variable on an interval: what those of this package have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.utils import broadcast_all

from kd_core import InvalidValue


class OnInterval(Distribution):
    """A location, a scale and the two ends of an interval, all of the batch shape.

    A subclass names them in this order in `arg_constraints`, and defines `rsample`.

    Args:
        loc: The location.
        scale: The scale, positive.
        low: The lower end.
        high: The upper end, above `low`.
        validate_args: Whether to check values. Never while compiling or exporting.

    Raises:
        InvalidValue: If values are checked and an interval is empty.
    """

    has_rsample = True

    loc: Tensor
    scale: Tensor

    def __init__(
        self,
        loc: Tensor | float,
        scale: Tensor | float,
        low: Tensor | float,
        high: Tensor | float,
        validate_args: bool | None,
    ) -> None:
        values = broadcast_all(loc, scale, low, high)
        for name, value in zip(self.arg_constraints, values, strict=True):
            setattr(self, name, value)
        if torch.compiler.is_compiling():
            validate_args = False
        super().__init__(self.loc.shape, validate_args=validate_args)
        if self._validate_args and not bool((values[2] < values[3]).all()):
            lower, upper = list(self.arg_constraints)[2:]
            raise InvalidValue(
                f"the lower end `{lower}` of a `{type(self).__name__}` must be below the upper end "
                f"`{upper}`, got {lower}={values[2]} and {upper}={values[3]}. Give an interval "
                "that is not empty."
            )

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        """Return the interval, both ends included."""
        ends = (getattr(self, name) for name in list(self.arg_constraints)[2:])
        return constraints.interval(*ends)  # type: ignore[no-untyped-call]  # by torch

    def expand(self, batch_shape: Sequence[int], _instance: Self | None = None) -> Self:
        """Return the distribution with its batch shape expanded, without copying."""
        named = next(kind for kind in type(self).__mro__ if "arg_constraints" in vars(kind))
        new: Self = self._get_checked_instance(named, _instance)  # type: ignore[no-untyped-call]  # by torch
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).expand(batch_shape))
        Distribution.__init__(new, Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw without gradients, shape (*sample_shape, *batch_shape)."""
        with torch.no_grad():
            return self.rsample(Size(sample_shape))
