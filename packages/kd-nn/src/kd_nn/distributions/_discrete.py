"""Distributions of certain outcomes, and of classes: `Delta`, `OneHotCategorical`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Self

import torch
from torch import Size, Tensor
from torch.distributions import (
    Categorical,
    Distribution,
    OneHotCategoricalStraightThrough,
    constraints,
)
from torch.distributions.utils import broadcast_all, clamp_probs
from torch.nn import functional

from kd_core import InvalidArgument, InvalidValue
from kd_core.extending import public_in

# The distribution of a certain outcome.
#
# It represents a deterministic output where a distribution is expected (the default of a
# probabilistic module), with the whole interface of `torch.distributions`: shapes, expansion,
# validation, cdf.


@public_in("kd_nn.distributions")
class Delta(Distribution):
    """Put all probability on one point.

    As a density it is infinite at the point and zero elsewhere, so `log_prob` is `inf` for a value
    equal to the point within the tolerances (`|value - param| <= atol + rtol * |param|` in each
    element) and `-inf` for others.

    Args:
        param: The point, shape (*batch_shape, *event_shape); a number is a tensor of shape ().
        atol: Absolute tolerance of `log_prob`.
        rtol: Relative tolerance of `log_prob`.
        batch_shape: Independent points. By default all but the last dimension of `param`.
        event_shape: Shape of one point. By default the remaining dimensions.
        validate_args: Whether to check values, as in every torch distribution. Never while
            compiling or exporting.

    Raises:
        InvalidValue: If the two shapes together are not the shape of `param`, or a tolerance is
            negative.

    Example:
        >>> point = Delta(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
        >>> point.batch_shape, point.event_shape
        (torch.Size([2]), torch.Size([2]))
        >>> point.log_prob(torch.tensor([0.0, 1.0]))
        tensor([inf, -inf])
        >>> point.sample((5,)).shape
        torch.Size([5, 2, 2])
    """

    arg_constraints = {"param": constraints.real}  # noqa: RUF012 - as torch declares it
    has_rsample = True

    def __init__(
        self,
        param: Tensor | float,
        atol: float = 1e-6,
        rtol: float = 1e-6,
        batch_shape: Sequence[int] | None = None,
        event_shape: Sequence[int] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not (atol >= 0 and rtol >= 0):  # NaN too
            raise InvalidValue(
                f"`atol` and `rtol` must be non-negative, got {atol!r} and {rtol!r}."
            )
        if not isinstance(param, Tensor):
            param = torch.as_tensor(param)
        self.param, self.atol, self.rtol = param, atol, rtol
        batch, event = _split_shape(param.shape, batch_shape, event_shape)
        if torch.compiler.is_compiling():
            validate_args = False
        super().__init__(batch, event, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """The real vectors of the event's shape."""
        rank = len(self.event_shape)
        return constraints.independent(constraints.real, rank)

    @property
    def mean(self) -> Tensor:
        """The point."""
        return self.param

    @property
    def mode(self) -> Tensor:
        """The point."""
        return self.param

    @property
    def median(self) -> Tensor:
        """The point."""
        return self.param

    @property
    def deterministic_sample(self) -> Tensor:
        """The point."""
        return self.param

    def update(self, param: Tensor) -> None:
        """Move the point, in place; tolerances and the shapes of batch and event stay.

        Args:
            param: The new point, of the shape of the old one.

        Raises:
            InvalidValue: If the shape differs; nothing changes.

        Example:
            >>> point = Delta(torch.zeros(2))
            >>> point.update(torch.ones(2))
            >>> point.mean
            tensor([1., 1.])
        """
        if param.shape != self.param.shape:
            raise InvalidValue(
                f"the new point of a `Delta` must have the shape of the old one, "
                f"{tuple(self.param.shape)}, got {tuple(param.shape)}. Build a new `Delta`."
            )
        if self._validate_args and bool(param.isnan().any()):
            raise InvalidValue(f"the new point of a `Delta` must not be NaN, got {param}.")
        self.param = param

    @property
    def variance(self) -> Tensor:
        """Zero in each element."""
        return torch.zeros_like(self.param)

    @property
    def stddev(self) -> Tensor:
        """Zero in each element."""
        return torch.zeros_like(self.param)

    def expand(self, batch_shape: Sequence[int], _instance: Self | None = None) -> Self:
        """Return the distribution with its batch shape expanded, without copying."""
        new: Self = Distribution._get_checked_instance(self, Delta, _instance)
        new.param = self.param.expand((*batch_shape, *self.event_shape))
        new.atol, new.rtol = self.atol, self.rtol
        super(Delta, new).__init__(Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return the point, shape (*sample_shape, *batch_shape, *event_shape)."""
        return self.param.expand(self._extended_shape(Size(sample_shape)))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return the point, detached, shape (*sample_shape, *batch_shape, *event_shape)."""
        return self.rsample(sample_shape).detach()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return `inf` where `value` is the point, else `-inf`, shape (*sample, *batch_shape)."""
        if self._validate_args and value.numel():  # torch cannot check the values of no rows
            self._validate_sample(value)
        value, param = broadcast_all(value, self.param)
        hit = self._over_event((value - param).abs() <= self.atol + self.rtol * param.abs())
        infinity = torch.full_like(hit, torch.inf, dtype=_floating(param))
        return torch.where(hit, infinity, -infinity)

    def cdf(self, value: Tensor) -> Tensor:
        """Return 1 where no element of `value` is below the point, else 0: (*sample, *batch)."""
        if self._validate_args and value.numel():
            self._validate_sample(value)
        return self._over_event(value >= self.param).to(_floating(self.param))

    def icdf(self, value: Tensor) -> Tensor:
        """Return the point for any probability, shape (*broadcast(value, batch), *event_shape)."""
        batch = torch.broadcast_shapes(value.shape, self.batch_shape)
        return self.param.expand((*batch, *self.event_shape))

    def entropy(self) -> Tensor:
        """Return the differential entropy, which is `-inf`, shape (*batch_shape)."""
        return self.param.new_full(self.batch_shape, -torch.inf, dtype=_floating(self.param))

    def _over_event(self, hit: Tensor) -> Tensor:
        """Reduce a truth value per element to one per event."""
        return hit.flatten(-len(self.event_shape)).all(-1) if self.event_shape else hit


def _split_shape(
    shape: Size, batch: Sequence[int] | None, event: Sequence[int] | None
) -> tuple[Size, Size]:
    """Find batch and event shape of a parameter, given one, both or none."""
    if batch is None:
        batch = shape[:-1] if event is None else shape[: len(shape) - len(event)]
    if event is None:
        event = shape[len(batch) :]
    if (*batch, *event) != tuple(shape):
        raise InvalidValue(
            f"`batch_shape` and `event_shape` together must be the shape of `param`, "
            f"{tuple(shape)}, got {tuple(batch)} and {tuple(event)}."
        )
    return Size(batch), Size(event)


def _floating(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()


# Draws of one class among several, written as one-hot vectors.


@public_in("kd_nn.distributions")
class OneHotCategorical(OneHotCategoricalStraightThrough):
    """A categorical distribution whose values are one-hot vectors.

    It is that of torch, with the logits as the first argument, and with integers as values where no
    gradient flows. `rsample` is *straight-through*: the value is one-hot, its gradients are those
    of the probabilities (Bengio et al. 2013, https://arxiv.org/abs/1308.3432), which is biased. As
    with the `OneHotCategorical` of torch, `has_rsample` is False: a keyed module draws integers.
    For one that draws with these gradients, take torch's `OneHotCategoricalStraightThrough`.

    Args:
        logits: Log-probabilities up to a constant, shape (*batch_shape, classes).
        probs: Probabilities up to a factor, the same shape; instead of `logits`.
        validate_args: Whether to check values, as in every torch distribution. Never while
            compiling or exporting.

    Raises:
        InvalidArgument: If not exactly one of `logits` and `probs` is given.

    Example:
        >>> logits = torch.tensor([0.0, 50.0, 0.0], requires_grad=True)
        >>> coin = OneHotCategorical(logits)
        >>> coin.mode
        tensor([0, 1, 0])
        >>> coin.rsample()
        tensor([0., 1., 0.], grad_fn=<AddBackward0>)
    """

    has_rsample = False  # whoever draws where it is True would get floats with biased gradients
    num_params: Final = 1
    """How many numbers a network must give for each class."""

    def __init__(
        self,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if (logits is None) == (probs is None):
            given = "neither" if logits is None else "both"
            raise InvalidArgument(
                f"expected either `logits` or `probs`, got {given}. Give one of them."
            )
        if torch.compiler.is_compiling() or not any(
            x.numel() for x in (logits, probs) if x is not None
        ):
            validate_args = False  # torch cannot check the values of no rows
        # Not by torch's constructor, which checks values whatever `validate_args` says.
        self._categorical = Categorical(probs, logits, validate_args=validate_args)
        batch, event = self._categorical.batch_shape, self._categorical.param_shape[-1:]
        Distribution.__init__(self, batch, event, validate_args=validate_args)

    @property
    def mode(self) -> Tensor:
        """The most probable class, as integers 0 and 1."""
        classes: Tensor = self._categorical.mode
        return functional.one_hot(classes, self._event_shape[-1])

    @property
    def deterministic_sample(self) -> Tensor:
        """The most probable class, as integers 0 and 1."""
        return self.mode

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw classes, as integers 0 and 1 of shape (*sample_shape, *batch_shape, classes)."""
        draw: Callable[[Size], Tensor] = super().sample
        drawn = draw(Size(sample_shape))
        return drawn.long()

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw one-hot vectors of the dtype of `probs`, with the gradients of `probs`.

        They are the most probable classes after Gumbel noise: the same draws as the relaxed ones of
        `torch.distributions.RelaxedOneHotCategorical`.
        """
        shape = self._extended_shape(Size(sample_shape))
        probs, logits = self.probs, self.logits.detach()
        noise = -(
            -clamp_probs(torch.rand(shape, dtype=probs.dtype, device=probs.device)).log()
        ).log()
        drawn = functional.one_hot((logits + noise).argmax(-1), shape[-1]).to(probs.dtype)
        return drawn + (probs - probs.detach())

    def expand(self, batch_shape: Sequence[int], _instance: Self | None = None) -> Self:
        """Return the distribution with its batch shape expanded, without copying."""
        new: Self = Distribution._get_checked_instance(self, OneHotCategorical, _instance)
        expanded: Callable[[Size, Self], Self] = super().expand
        return expanded(Size(batch_shape), new)


def rand_one_hot(values: Tensor, do_softmax: bool = True) -> Tensor:
    """Draw one-hot vectors at random.

    Args:
        values: Logits, shape (*batch, classes); or probabilities up to a factor.
        do_softmax: Whether `values` are logits.

    Returns:
        Integers 0 and 1, of the same shape, with one 1 in each vector.

    Raises:
        InvalidArgument: If `values` has no dimension.

    Example:
        >>> rand_one_hot(torch.tensor([[0.0, 99.0], [99.0, 0.0]]))
        tensor([[0, 1],
                [1, 0]])
    """
    if not values.ndim:
        raise InvalidArgument(
            "`values` must have a last dimension, that of the classes, got a 0-d tensor."
        )
    probs = values.softmax(-1) if do_softmax else values
    classes = values.shape[-1]
    drawn = torch.multinomial(probs.reshape(-1, classes), 1).view(values.shape[:-1])
    return functional.one_hot(drawn, classes)
