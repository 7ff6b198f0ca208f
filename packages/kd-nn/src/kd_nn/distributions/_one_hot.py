"""Draws of one class among several, written as one-hot vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import torch
from torch import Size, Tensor
from torch.distributions import Categorical, Distribution, OneHotCategoricalStraightThrough
from torch.nn import functional

from kd_core import InvalidArgument
from kd_core.extending import public_in


@public_in("kd_nn.distributions")
class OneHotCategorical(OneHotCategoricalStraightThrough):
    """A categorical distribution whose values are one-hot vectors.

    It is that of torch, with the logits as the first argument, and with integers as values where no
    gradient flows. `rsample` is *straight-through*: the value is one-hot, its gradients are those
    of the probabilities (Bengio et al. 2013, https://arxiv.org/abs/1308.3432), which is biased.

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
        if torch.compiler.is_compiling():
            validate_args = False
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
        drawn: Tensor = super().sample(Size(sample_shape))  # type: ignore[no-untyped-call]  # by torch
        return drawn.long()

    def expand(self, batch_shape: Sequence[int], _instance: Self | None = None) -> Self:
        """Return the distribution with its batch shape expanded, without copying."""
        new: Self = self._get_checked_instance(OneHotCategorical, _instance)  # type: ignore[no-untyped-call]  # by torch
        made: Self = super().expand(Size(batch_shape), _instance=new)  # type: ignore[no-untyped-call]  # by torch
        return made


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
