"""What torch gets wrong about recurrent layers, mended while it captures or translates one.

Remove each part when the oldest supported torch does without it:

- torch 2.10 takes the last state of an LSTM for one of four dimensions.
- The loops that `torch.onnx` writes refuse a state that is not contiguous.
- After `torch.onnx.export`, torch 2.15 goes on to write loops in place of the layers.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

Hidden = TypeVar("Hidden", Tensor, tuple[Tensor, Tensor])

_LAYERS = (
    ("torch._decomp.decompositions", "one_layer_lstm"),
    ("torch.export._patches", "one_layer_while_loop_lstm"),
    ("torch.export._patches", "one_layer_while_loop_gru"),
)


@contextlib.contextmanager
def mended_layers(program: ExportedProgram | None = None) -> Iterator[None]:
    """Patch what torch gets wrong about recurrent layers, in a block.

    Args:
        program: A program that is translated in the block. Its layers over an axis of time of any
            length become loops.
    """
    if program is not None and any(map(_runs_over_time, program.graph.nodes)):
        with layers_as_loops(), mended_layers():
            yield
        return
    known = []
    for path, name in _LAYERS:
        with contextlib.suppress(ImportError, AttributeError):  # torch 2.10 has no loops
            module = importlib.import_module(path)
            known.append((module, name, getattr(module, name)))
    try:
        for module, name, layer in known:
            setattr(module, name, _mended(layer))
        yield
    finally:
        for module, name, layer in known:
            setattr(module, name, layer)
        for operator in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
            operator._dispatch_cache.clear()


@contextlib.contextmanager
def layers_as_loops() -> Iterator[None]:
    """Let torch capture recurrent layers as loops over time, of any length, in a block.

    torch 2.10 has no such loops: it writes one step after another, for the length of the example.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):
            patches = importlib.import_module("torch.export._patches")
            stack.enter_context(patches.register_lstm_while_loop_decomposition())
            stack.enter_context(patches.register_gru_while_loop_decomposition())
        yield


def _runs_over_time(node: Node) -> bool:
    """Return whether a node is a recurrent layer over an axis of time whose length is not fixed."""
    if node.target not in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
        return False
    value, batch_first = node.args[0].meta["val"], node.args[-1]  # type: ignore[union-attr]  # a node
    time = value.shape[1 if batch_first and value.ndim > 2 else 0]
    return not isinstance(time, int)


def _mended(layer: Callable[..., tuple[Tensor, Hidden]]) -> Callable[..., tuple[Tensor, Hidden]]:
    def mended(x: Tensor, state: Hidden, *rest: object, **named: object) -> tuple[Tensor, Hidden]:
        state = pytree.tree_map(Tensor.contiguous, state)
        results, last = layer(x, state, *rest, **named)
        return results, pytree.tree_map(_like, last, state)

    return mended


def _like(last: Tensor, first: Tensor) -> Tensor:
    return last if last.dim() == first.dim() else last.squeeze(0)
