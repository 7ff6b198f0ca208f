"""Private names of torch that this distribution needs, each with what does without it.

They say what a tensor is while a graph is captured or a function is mapped. Where a torch lacks
them, modules run, and what reads values in `vmap` or of fake tensors fails with torch's message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")


def _private(path: str, fallback: Found) -> Found:
    """Return what stands at a path below `torch._C`, or what serves where there is nothing."""
    found: object = torch._C
    for part in path.split("."):
        found = getattr(found, part, None)
    return fallback if found is None else found  # type: ignore[return-value]  # as the tests show


functorch_level: Callable[[], int | None] = _private("_functorch.maybe_current_level", lambda: None)
"""Return how many transformations of `torch.func` are active, None for none.

Fallback: none are.
"""

is_batched: Callable[[Tensor], bool] = _private("_functorch.is_batchedtensor", lambda value: False)
"""Return whether a tensor has a hidden dimension of `vmap`. Fallback: none has."""

_mode_of: Callable[[object], object] = _private("_get_dispatch_mode", lambda key: None)
_FAKE: object = _private("_TorchDispatchModeKey.FAKE", None)


def computes_shapes_alone() -> bool:
    """Return whether operators give fake tensors, without values. Fallback: they do not."""
    return _mode_of(_FAKE) is not None


READS_VALUES = frozenset({"GuardOnDataDependentSymNode", "DataDependentOutputException"})
"""The errors of torch for a branch on a value, by name: to import them loads the exporter.

Fallback: `unchecked` also knows them by their message.
"""
