"""Recurrent layers: captured in the shapes that they have, and taken apart for other runtimes.

torch 2.10 takes the last state of an LSTM for one of four dimensions, and each torch captures a
layer over an axis of time for the length of the example, unless it is a loop. What is done about it
holds for one module: a mode sees the calls of its layers, and a program is taken apart by a table
of decompositions. Nothing of torch is changed for others.

Knows the arguments of `torch.lstm` and `torch.gru`; must not know keys or formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from kd_export._torch_private import (
    LOOP_LAYERS,
    STEP_LAYERS,
    Layer,
    OperatorBase,
    forget_layers,
    without_modes,
)

_CAPTURED: dict[str, Layer] = {"lstm": torch.lstm, "gru": torch.gru}
_CALLS: dict[object, str] = {layer: name for name, layer in _CAPTURED.items()}
_OPERATORS: dict[OperatorBase, str] = {
    torch.ops.aten.lstm.input: "lstm",
    torch.ops.aten.gru.input: "gru",
}


class CapturedLayers(TorchFunctionMode):
    """Captures the recurrent layers that are called in the block.

    Args:
        loops: Whether each becomes a loop over time, of any length, if this torch has such loops:
            2.10 has none.
    """

    def __init__(self, loops: bool = False) -> None:
        super().__init__()
        self._loops = loops
        forget_layers()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call a function of torch; a layer over a padded batch is called as captured."""
        name = _CALLS.get(func)
        # A packed batch has its sizes in place of the state.
        state, further = (*args, None, None, None)[1:3]
        packed = not isinstance(state if name == "lstm" else further, list | tuple)
        if name is None or packed or kwargs:
            return func(*args, **(kwargs or {}))
        layer = LOOP_LAYERS[name] if self._loops else None
        if layer is None:
            return _shaped(_CAPTURED[name], loops=False)(*args)
        with without_modes():  # else torch rewrites how the loop reads a row, and cannot save it
            return _shaped(layer, loops=True)(*args)


def taken_apart(program: ExportedProgram) -> ExportedProgram:
    """Return a program without recurrent layers, for a runtime that has none.

    Layers over an axis of time of any length become loops.
    """
    table = layer_decompositions(program)
    return program.run_decompositions(table) if table else program


def layer_decompositions(program: ExportedProgram) -> dict[OperatorBase, Callable[..., object]]:
    """Return the decompositions of the recurrent layers that a program has."""
    parts = [part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    found = [node for part in parts for node in part.graph.nodes if node.target in _OPERATORS]
    if not found:
        return {}
    forget_layers()
    loops = any(map(_runs_over_time, found)) and None not in LOOP_LAYERS.values()
    layers = LOOP_LAYERS if loops else STEP_LAYERS
    return {
        operator: _shaped(layer, loops)
        for operator, name in _OPERATORS.items()
        if (layer := layers[name]) is not None
    }


def _runs_over_time(node: fx.Node) -> bool:
    """Return whether a layer runs over an axis of time whose length is not fixed."""
    source, batch_first = node.args[0], node.args[-1]
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    time = value.shape[1 if batch_first and value.ndim > 2 else 0]
    return not isinstance(time, int)


def _shaped(layer: Layer, loops: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Return a layer whose last state has the dimensions of its first, which torch 2.10 adds to.

    A loop refuses a state that is not contiguous.
    """

    def run(
        x: Tensor, state: Tensor | Sequence[Tensor], *rest: object, **named: object
    ) -> tuple[Tensor, ...]:
        states = [state] if isinstance(state, Tensor) else [*state]
        if loops:
            states = [one.contiguous() for one in states]
        results, *last = layer(
            x, states[0] if isinstance(state, Tensor) else states, *rest, **named
        )
        pairs = zip(last, states, strict=True)
        return results, *(y if y.dim() == x.dim() else y.reshape(x.shape) for y, x in pairs)

    return run
