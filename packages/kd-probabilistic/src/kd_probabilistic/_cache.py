"""The distribution that a module has built last, for as long as nothing that it is made of changes.

Reuse is safe only if a new distribution would be the same: so the parameters must be the same
tensors, not written to since, and gradients must be recorded as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution

from kd_core import NestedKey, TensorDictBase


class CachedDistribution:
    """A distribution with what it was built from.

    Args:
        settings: What else decides how it is built; compared by identity.
        values: Its parameters: tensors, containers or other objects.
        distribution: The distribution.
    """

    __slots__ = ("_keys", "_mode", "_settings", "_values", "_versions", "distribution")

    def __init__(
        self, settings: object, values: Sequence[object], distribution: Distribution
    ) -> None:
        self._settings = settings
        self._values = _leaves(values)
        self._keys = _keys(values)
        self._versions = _versions(self._values)
        self._mode = _mode()
        self.distribution = distribution

    def fits(self, settings: object, values: Sequence[object]) -> bool:
        """Return whether building it again would give the same."""
        leaves = _leaves(values)
        return (
            self._settings is settings
            and self._mode == _mode()
            and len(leaves) == len(self._values)
            and all(new is old for new, old in zip(leaves, self._values, strict=True))
            and self._versions is not None
            and self._versions == _versions(leaves)
            and self._keys == _keys(values)
        )


def _leaves(values: Sequence[object]) -> list[object]:
    """Return the values, and those in containers."""
    found: list[object] = []
    for value in values:
        if isinstance(value, TensorDictBase):
            found.append(value)
            found.extend(value.values(True, True))
        else:
            found.append(value)
    return found


def _keys(values: Sequence[object]) -> list[list[NestedKey]]:
    """Return the keys of the containers among the values."""
    return [list(v.keys(True, True)) for v in values if isinstance(v, TensorDictBase)]


def _versions(values: Sequence[object]) -> list[int] | None:
    """Return how often each tensor was written to, None if torch does not count it."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return [tensor._version for tensor in tensors]


def _mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), Distribution._validate_args
