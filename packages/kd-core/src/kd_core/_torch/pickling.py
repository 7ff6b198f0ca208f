"""Containers in `torch.load(weights_only=True)`: their classes and how they are put together.

Rebuilding a container calls no code of the class that is rebuilt, so that any kind may be listed as
safe, also one which is defined later.
"""

from __future__ import annotations

import torch

from kd_core import _registry
from kd_core._batch.descriptor import restore_descriptor
from kd_core._containers.dense import restore_dense
from kd_core._containers.lazy_stack import restore_stack
from kd_core._containers.non_tensor import NonTensorData


def _allow(cls: type) -> None:
    torch.serialization.add_safe_globals([cls])


# The descriptor's is for kinds defined elsewhere, which pickle as any object does.
torch.serialization.add_safe_globals(
    [restore_dense, restore_stack, restore_descriptor, NonTensorData],
)
_registry.on_new_kind(_allow)
