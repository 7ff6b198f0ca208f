"""Whether the values of tensors can be read: not in a capture, in `vmap`, or of fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kd_core import KdError, TensorDictBase
from kd_core.extending import is_batchedtensor, maybe_current_level
from kd_nn.distributions import values_unchecked
from kd_probabilistic._torch_private import READS_VALUES, computes_shapes_alone


def must_not_look(values: Sequence[object]) -> bool:
    """Return whether values cannot be read: in a capture, under `vmap`, or of fake tensors."""
    if torch.compiler.is_compiling():
        # dynamo has disabled checks already, and cannot trace the change.
        return not torch.compiler.is_dynamo_compiling()
    if computes_shapes_alone():
        return True
    if maybe_current_level() is None:
        return False
    return any(_holds_batched(value) for value in values)


def can_read(value: Tensor) -> bool:
    """Return whether the values of a tensor can be read: dynamo cannot either."""
    return not torch.compiler.is_compiling() and not must_not_look([value])


def _holds_batched(value: object) -> bool:
    """Return whether a tensor, or one in a container, has a hidden dimension of `vmap`."""
    if isinstance(value, TensorDictBase):
        return any(is_batchedtensor(leaf) for leaf in value.values(True, True))
    return isinstance(value, Tensor) and is_batchedtensor(value)


class NotTraceable(KdError, NotImplementedError):
    """A distribution reads values of tensors where that is impossible: in an export or `vmap`."""


@contextmanager
def unchecked(owner: str) -> Iterator[None]:
    """Disable torch's default of checking values, also for distributions inside others.

    Other threads keep it.

    Args:
        owner: How messages name the module.

    Raises:
        NotTraceable: If values are read all the same.
    """
    with values_unchecked():
        try:
            yield
        except Exception as error:
            if type(error).__name__ in READS_VALUES or "data-dependent control" in str(error):
                raise NotTraceable(
                    f"`{owner}` reads values of tensors while it is computed, so it can neither be "
                    "exported nor mapped in this mode. Take another value, such as the "
                    "deterministic one, or another distribution."
                ) from error
            raise
