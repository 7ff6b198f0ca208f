"""The entropy of a distribution; from draws if there is no formula."""

from __future__ import annotations

import warnings

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, Independent

from kd_core import InvalidValue
from kd_probabilistic._log_prob import log_prob_of, sum_last

DRAWS = 100
"""How many draws an entropy is estimated from if nobody says."""


class EntropyEstimateWarning(UserWarning):
    """An entropy has no formula and is estimated from draws, although nobody said from how many."""


def entropy_of(distribution: Distribution, name: str, draws: int | None) -> Tensor:
    """Compute an entropy by its formula, or else estimate it.

    The estimate is the mean of `-log_prob` over draws. Its gradients are estimated, too, with or
    without `rsample`: they are those of the score function, `-log_prob` times the gradient of
    `log_prob`, since the derivative of a draw that cannot be differentiated is missing.

    Args:
        distribution: The distribution.
        name: How a warning names it.
        draws: From how many draws; None warns and takes `DRAWS`.

    Returns:
        The entropy, shape (*batch_shape).
    """
    if draws is not None and (isinstance(draws, bool) or draws < 1):
        raise InvalidValue(f"`samples_mc` must be a positive int or None, got {draws!r}.")
    try:
        return _formula(distribution)
    except NotImplementedError:
        pass
    if draws is None:
        draws = DRAWS
        if not torch.compiler.is_compiling():
            warnings.warn(
                f"the entropy of {name} (`{type(distribution).__name__}`) has no formula and is "
                f"estimated from {draws} draws. Pass `samples_mc` to say from how many.",
                EntropyEstimateWarning,
                stacklevel=4,
            )
    score = log_prob_of(distribution, distribution.sample(Size((draws,))))
    value = score.detach()
    return -(value + value * (score - value)).mean(0)


def _formula(distribution: Distribution) -> Tensor:
    if isinstance(distribution, Independent) and not torch.compiler.is_compiling():
        return sum_last(_formula(distribution.base_dist), distribution.reinterpreted_batch_ndims)
    found: Tensor = distribution.entropy()
    return found
