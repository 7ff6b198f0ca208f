"""Containers made from things that are no mappings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kd_core._tensordict import TensorDict

if TYPE_CHECKING:
    from torch import nn

    from kd_core._base import TensorDictBase


def from_module(
    module: nn.Module, as_module: bool = False, *, lock: bool = False
) -> TensorDictBase:
    """Collect the parameters and buffers of a module: `TensorDict.from_module` as a function.

    Args:
        module: the module; it is not changed.
        as_module: return a `kd_nn.TensorDictParams`, which is an `nn.Module`; needs kd-nn.
        lock: lock the container.

    Example:
        >>> import torch
        >>> from kd_core import from_module
        >>> sorted(from_module(torch.nn.Linear(2, 3)).keys())
        ['bias', 'weight']
    """
    return TensorDict.from_module(module, as_module, lock=lock)
