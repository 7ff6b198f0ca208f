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
from torch.utils import _pytree as pytree

Hidden = TypeVar("Hidden", Tensor, tuple[Tensor, Tensor])

_LAYERS = (
    ("torch._decomp.decompositions", "one_layer_lstm"),
    ("torch.export._patches", "one_layer_while_loop_lstm"),
    ("torch.export._patches", "one_layer_while_loop_gru"),
)


@contextlib.contextmanager
def mended_layers() -> Iterator[None]:
    """Patch what torch gets wrong about recurrent layers, in a block."""
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


def _mended(layer: Callable[..., tuple[Tensor, Hidden]]) -> Callable[..., tuple[Tensor, Hidden]]:
    def mended(x: Tensor, state: Hidden, *rest: object, **named: object) -> tuple[Tensor, Hidden]:
        state = pytree.tree_map(Tensor.contiguous, state)
        results, last = layer(x, state, *rest, **named)
        return results, pytree.tree_map(_like, last, state)

    return mended


def _like(last: Tensor, first: Tensor) -> Tensor:
    return last if last.dim() == first.dim() else last.squeeze(0)
