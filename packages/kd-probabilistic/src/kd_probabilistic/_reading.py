"""Whether the values of tensors can be read: not while a graph is captured, nor inside `vmap`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributions import Distribution

from kd_core import TensorDictBase

functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""Returns how many transformations of `torch.func` are active, None for none."""

_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor


def must_not_look(values: Sequence[object]) -> bool:
    """Return whether values cannot be read: while capturing, or under `vmap`."""
    if torch.compiler.is_compiling():
        # dynamo has disabled checks already, and cannot trace the change.
        return not torch.compiler.is_dynamo_compiling()
    if functorch_level() is None:
        return False
    return any(_holds_batched(value) for value in values)


def _holds_batched(value: object) -> bool:
    """Return whether a tensor, or one in a container, has a hidden dimension of `vmap`."""
    if isinstance(value, TensorDictBase):
        return any(_is_batched(leaf) for leaf in value.values(True, True))
    return isinstance(value, Tensor) and _is_batched(value)


@contextmanager
def unchecked() -> Iterator[None]:
    """Disable torch's default of checking values, also for distributions inside others."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
