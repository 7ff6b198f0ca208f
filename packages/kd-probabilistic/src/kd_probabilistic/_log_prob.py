"""Log-probabilities, and where they are written."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent

from kd_core import NestedKey, unravel_key_to_tuple


def log_prob_key_of(sample_key: NestedKey) -> NestedKey:
    """Return the key of the log-probability of a sample: `_log_prob` added to the last part.

    Example:
        >>> log_prob_key_of(("agent", "action"))
        ('agent', 'action_log_prob')
        >>> log_prob_key_of("_")
        'sample_log_prob'
    """
    if unravel_key_to_tuple(sample_key)[-1] == "_":
        sample_key = (*unravel_key_to_tuple(sample_key)[:-1], "sample")
    return with_suffix(sample_key, "_log_prob")


def with_suffix(key: NestedKey, suffix: str) -> NestedKey:
    """Return a key with a suffix added to its last part.

    Example:
        >>> with_suffix(("agent", "action"), "_entropy")
        ('agent', 'action_entropy')
    """
    *holder, last = unravel_key_to_tuple(key)
    return (*holder, f"{last}{suffix}") if holder else f"{last}{suffix}"


def log_prob_of(dist: Distribution, value: Tensor) -> Tensor:
    """Return the log-probability of a value, as a tensor."""
    if isinstance(dist, Independent) and not torch.compiler.is_compiling() and not value.numel():
        return sum_last(log_prob_of(dist.base_dist, value), dist.reinterpreted_batch_ndims)
    found: Tensor = dist.log_prob(value)
    return found


def sum_last(parts: Tensor, dims: int) -> Tensor:
    """Return the sum over the last dimensions, also of no rows, which `Independent` refuses."""
    return parts.sum(tuple(range(-dims, 0))) if dims else parts
