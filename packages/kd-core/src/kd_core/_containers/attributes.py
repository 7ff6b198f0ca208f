"""What each leaf of a container is, as a container of typed records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._containers.non_tensor import NonTensorData
from kd_core._containers.tensorclass import TensorClass
from kd_core._containers.tensordict import make_dense
from kd_core._errors import InvalidArgument, listed
from kd_core._nodes import registry
from kd_core._nodes.entry import Entry, Node, tensor_of
from kd_core._protocol.primitives import AbstractContainer

_READ: Final[dict[str, Callable[[Tensor], object]]] = {
    "device": lambda leaf: leaf.device,
    "dtype": lambda leaf: leaf.dtype,
    "shape": lambda leaf: NonTensorData(leaf.shape),  # it would become a tensor of numbers
}


class TensorAttrs(TensorClass):
    """The device, dtype and shape of one tensor, as `TensorDict.attrs` returns them.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> TensorDict({"a": torch.ones(3, 2)}, [3]).attrs()["a"].tgt_shape
        torch.Size([3, 2])
    """

    tgt_device: Any = None
    tgt_dtype: Any = None
    tgt_shape: Any = None


def attributes_of(td: Node, fields: tuple[str, ...]) -> Node:
    """Return a container without batch that has these attributes of each leaf."""
    unknown = [field for field in fields if field not in _READ]
    if unknown:
        raise InvalidArgument(f"`fields` may hold {listed(_READ)}, got `{unknown[0]}`.")
    entries: dict[str, Entry] = {}
    for key, entry in cast("AbstractContainer", td)._kd_entries.items():
        leaf = tensor_of(entry)
        if leaf is not None:
            entries[key] = _attributes(leaf, fields)
        elif isinstance(entry, AbstractContainer):
            entries[key] = attributes_of(entry, fields)
        else:
            entries[key] = cast("Node", entry)._kd_with_descriptor(describe(()))
    return make_dense(entries, describe(()))


def _attributes(leaf: Tensor, fields: tuple[str, ...]) -> TensorAttrs:
    device, dtype, shape = (read(leaf) if name in fields else None for name, read in _READ.items())
    return TensorAttrs(tgt_device=device, tgt_dtype=dtype, tgt_shape=shape, batch_size=[])


registry.register("attributes_of", attributes_of)
