"""Where log-probabilities are written."""

from __future__ import annotations

from kd_core import NestedKey, unravel_key_to_tuple


def log_prob_key_of(sample_key: NestedKey) -> NestedKey:
    """Return the key of the log-probability of a sample: `_log_prob` added to the last part.

    Example:
        >>> log_prob_key_of(("agent", "action"))
        ('agent', 'action_log_prob')
        >>> log_prob_key_of("_")
        'sample_log_prob'
    """
    *holder, last = unravel_key_to_tuple(sample_key)
    name = "sample_log_prob" if last == "_" else f"{last}_log_prob"
    return (*holder, name) if holder else name
