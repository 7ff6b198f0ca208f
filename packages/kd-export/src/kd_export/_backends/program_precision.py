"""A captured program of fewer bits, for formats that are written of programs.

Knows programs and their layers; must not know keys, rows or budgets.

In ``int8-weights`` and ``fp16`` the weights alone are stored in fewer bits, with operators of torch
that widen them again, which any runtime of programs knows. In ``int8`` the layers compute on
integers, by the quantizer of ExecuTorch's XNNPACK, which takes them as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from kd_export._console import muted_tool
from kd_export._errors import NotExportable, raised_as
from kd_export._running.session import WEIGHTS, require
from kd_export._schema.schema import LinearSize, Schema

_LEAST_WEIGHTS = 16
"""How many numbers weights have at least: fewer are not worth a scale."""
_aten = torch.ops.aten
_DENSE: Collection[object] = (
    *(_aten.linear.default, _aten.conv1d.default, _aten.conv2d.default),
    _aten.conv_transpose2d.input,
)
"""Operators that XNNPACK computes on integers."""
_FOLLOWING: Collection[object] = (
    *(_aten.relu.default, _aten.relu_.default, _aten.hardtanh.default, _aten.hardtanh_.default),
    _aten.batch_norm.default,
)
"""Operators that become one with the layer before them."""


class ProgramReducer:
    """A program whose layers can be written with fewer bits.

    Args:
        program: The program.
        schema: What it takes and gives.
        precision: ``"fp16"``, ``"int8"`` or ``"int8-weights"``.
        samples: Inputs to calibrate with, by the names of arguments; ``int8`` needs some.
    """

    def __init__(
        self,
        program: ExportedProgram,
        schema: Schema,
        precision: str,
        samples: Sequence[Mapping[str, object]],
    ) -> None:
        self._program = program
        self._schema = schema
        self._precision = precision
        self._samples = samples
        weights = dict.fromkeys(target for _, target, _ in self._weights(program.module()))
        self._names = {target: _layer(target) for target in weights}
        self.layers = tuple(dict.fromkeys(self._names.values()))

    def program(self, kept: Collection[str]) -> ExportedProgram:
        """Return the program; the layers of these names stay float."""
        chosen = {target for target, layer in self._names.items() if layer not in kept}
        if not chosen:
            return self._program
        module: fx.GraphModule = self._program.module()
        hint = "Leave `precision` out, or take another one."
        what = f"the program cannot be written in {self._precision}"
        with raised_as(NotExportable, what, hint), muted_tool(), torch.no_grad():
            made = self._made(module, chosen)
            return torch.export.export(made, (), self._example(), dynamic_shapes=self._dimensions())

    def _made(self, module: fx.GraphModule, chosen: Collection[str]) -> nn.Module:
        if self._precision == "int8":
            return self._on_integers(module, chosen)
        self._narrow(module, chosen)
        return module

    def _weights(self, module: fx.GraphModule) -> Iterator[tuple[fx.Node, str, Tensor]]:
        """Iterate over the weights that can be written with fewer bits: node, name, value."""
        for node in module.graph.find_nodes(op="get_attr"):
            value = operator.attrgetter(str(node.target))(module)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if value.dim() < 2 or value.numel() < _LEAST_WEIGHTS:
                continue
            if self._precision == "int8" and not any(
                user.target in _DENSE and user.args[1] is node for user in node.users
            ):
                continue
            yield node, str(node.target), value

    def _narrow(self, module: fx.GraphModule, chosen: Collection[str]) -> None:
        """Store weights in fewer bits, and widen them where they are used."""
        for place, (node, target, value) in enumerate(list(self._weights(module))):
            if target not in chosen:
                continue
            narrow, scale = _rounded(value) if self._precision == WEIGHTS else (value.half(), None)
            module.register_buffer(f"_narrow_{place}", narrow)
            with module.graph.inserting_before(node):
                held = module.graph.get_attr(f"_narrow_{place}")
                wide = module.graph.call_function(_aten.to.dtype, (held, value.dtype))
                if scale is not None:
                    module.register_buffer(f"_scale_{place}", scale)
                    factor = module.graph.get_attr(f"_scale_{place}")
                    wide = module.graph.call_function(_aten.mul.Tensor, (wide, factor))
            node.replace_all_uses_with(wide)
            module.graph.erase_node(node)
        used = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
        for target in set(chosen) - used:
            owner, _, name = target.rpartition(".")
            delattr(module.get_submodule(owner), name)
        module.recompile()

    def _on_integers(self, module: fx.GraphModule, chosen: Collection[str]) -> nn.Module:
        """Let the layers compute on integers, within the ranges that samples show."""
        tool = require("torchao.quantization.pt2e.quantize_pt2e", "executorch")
        name = "executorch.backends.xnnpack.quantizer.xnnpack_quantizer"
        found = require(name, "executorch")

        def is_chosen(node: fx.Node) -> bool:
            if node.target not in _DENSE:
                return node.target in _FOLLOWING
            weight = node.args[1]
            return isinstance(weight, fx.Node) and str(weight.target) in chosen

        config = found.get_symmetric_quantization_config(is_per_channel=True)
        quantizer = found.XNNPACKQuantizer().set_global(config)
        prepared = tool.prepare_pt2e(module, quantizer.set_filter_function(is_chosen))
        for sample in self._samples:
            prepared(**{name: torch.as_tensor(array) for name, array in sample.items()})
        result: nn.Module = tool.convert_pt2e(prepared)
        return result

    def _example(self) -> dict[str, Tensor]:
        """Return inputs of the sizes that the program was captured at."""
        users = set(self._program.graph_signature.user_inputs)
        places = [n for n in self._program.graph.find_nodes(op="placeholder") if n.name in users]
        hints = [node.meta["val"] for node in places]
        return {
            entry.name: torch.zeros(
                [size if isinstance(size, int) else size.node.hint for size in value.shape],
                dtype=value.dtype,
            )
            for entry, value in zip(self._schema.inputs, hints, strict=True)
        }

    def _dimensions(self) -> dict[str, dict[int, Dim] | None] | None:
        axes = {
            name: Dim(name, min=axis.min, max=axis.max) for name, axis in self._schema.axes.items()
        }
        found: dict[str, dict[int, Dim] | None] = {}
        for entry in self._schema.inputs:
            dims = {}
            for dim, size in enumerate(entry.shape):
                linear = LinearSize.parse(size) if isinstance(size, str) else None
                if linear is not None:
                    one = axes[linear.axis]
                    one = one if linear.factor == 1 else linear.factor * one
                    dims[dim] = one + linear.offset if linear.offset else one
            found[entry.name] = dims or None
        return found if axes else None


def _layer(target: str) -> str:
    """Name a layer by its weights."""
    path, _, name = target.rpartition(".")
    inner = path.removeprefix("module").lstrip(".")
    return (f"{inner}.{name}" if name != "weight" else inner) or name


def _rounded(value: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights to 8 bits, with a scale for each index of the first dimension."""
    scale = value.abs().amax(tuple(range(1, value.dim())), keepdim=True) / 127
    scale = torch.where(scale == 0, 1, scale)
    return (value / scale).round().clamp(-127, 127).to(torch.int8), scale
