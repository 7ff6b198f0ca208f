"""Shapes of what a keyed module writes, without data and without computing.

The module runs under torch's fake tensor mode, on tensors that know shape, dtype and device and
hold no data. Parameters and buffers are exchanged for fake ones (batch norm counts its batches in
place), and the mode converts captured constants, so the module does not change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kd_core import TensorDict, TensorDictBase
from kd_nn._dispatch.entries import entry, has_entry
from kd_nn._keys.graph import KeyGraph
from kd_nn._torch_private import fake_tensors


def infer_shapes(module: nn.Module, sample: TensorDictBase) -> TensorDict:
    """Run a keyed module on shapes alone.

    Args:
        module: The keyed module.
        sample: What it reads; the tensors may be on the meta device, their values are not read.

    Returns:
        A container of the sample and all outputs, as tensors on the meta device.
    """
    mode = fake_tensors()
    held = next(module.parameters(), None)
    device = torch.device("cpu") if held is None else held.device

    def pretend(value: Tensor) -> Tensor:
        target = device if value.is_meta else value.device
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=target)

    with torch.no_grad(), mode:
        given = TensorDict(_mapped(sample, pretend), sample.batch_size)
        state: dict[str, Tensor] = {
            name: mode.from_tensor(value) for name, value in _state(module).items()
        }
        result = torch.func.functional_call(module, state, (given,))
    return TensorDict(_mapped(result, _to_meta), result.batch_size)


def with_shapes(graph: KeyGraph, made: TensorDictBase) -> KeyGraph:
    """Return the graph with the shapes of the entries that its steps write."""
    nodes = []
    for node in graph.nodes:
        known = [key for key in node.writes if has_entry(made, key)]
        values = {key: entry(made, key) for key in known}
        shapes = tuple((k, tuple(v.shape)) for k, v in values.items() if isinstance(v, Tensor))
        nodes.append(node._replace(shapes=shapes))
    return KeyGraph(tuple(nodes), graph.out_keys)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _mapped(container: TensorDictBase, function: Callable[[Tensor], Tensor]) -> dict[str, object]:
    mapped: dict[str, object] = {}
    for key in list(container.keys()):
        value = entry(container, key)
        if isinstance(value, TensorDictBase):
            value = TensorDict(_mapped(value, function), value.batch_size)
        mapped[str(key)] = function(value) if isinstance(value, Tensor) else value
    return mapped


def _to_meta(value: Tensor) -> Tensor:
    return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
