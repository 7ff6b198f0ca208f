"""What differs between the supported versions of torch, by feature test, as long as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor


def _clone_each(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    return [leaf.clone() for leaf in leaves]


clone_all: Final[Callable[[list[Tensor]], Sequence[Tensor]]] = getattr(
    torch, "_foreach_clone", _clone_each
)
"""Clone all leaves at once, by a kernel that newer versions have."""
