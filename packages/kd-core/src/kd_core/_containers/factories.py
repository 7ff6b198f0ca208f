"""Functions that create a `TensorDict` from keywords or from a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kd_core._containers.tensordict import TensorDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from kd_core._base import TensorDictBase
    from kd_core._types import BatchSize, DeviceLike


def make_tensordict(
    source: Mapping[str, object] | None = None,
    batch_size: BatchSize | None = None,
    device: DeviceLike | None = None,
    *,
    auto_batch_size: bool = False,
    **entries: object,
) -> TensorDict:
    """Create a `TensorDict` from a mapping, from keywords, or from both.

    Args:
        source: nested mappings of values.
        batch_size: the leading dimensions of every entry.
        device: the device to which every entry is moved.
        auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
        **entries: more values.

    Example:
        >>> import torch
        >>> from kd_core import make_tensordict
        >>> make_tensordict(a=torch.zeros(3, 4), b=torch.ones(3), auto_batch_size=True).batch_size
        torch.Size([3])
    """
    named = cast("dict[str, Any]", entries)
    if batch_size is None and auto_batch_size:
        return TensorDict.from_dict({**(source or {}), **named}, None, device, auto_batch_size=True)
    return TensorDict(source, batch_size, device, **named)


def from_module(
    module: nn.Module,
    as_module: bool = False,
    *,
    lock: bool = False,
    use_state_dict: bool = False,
    filter_empty: bool = True,
) -> TensorDictBase:
    """Collect the parameters and buffers of a module: `TensorDict.from_module` as a function.

    Args:
        module: the module; it is not changed.
        as_module: return a `kd_nn.TensorDictParams`, which is an `nn.Module`; needs kd-nn.
        lock: lock the container.
        use_state_dict: take the entries of `module.state_dict()`.
        filter_empty: leave out modules without state.

    Example:
        >>> import torch
        >>> from kd_core import from_module
        >>> sorted(from_module(torch.nn.Linear(2, 3)).keys())
        ['bias', 'weight']
    """
    return TensorDict.from_module(
        module, as_module, lock=lock, use_state_dict=use_state_dict, filter_empty=filter_empty
    )
