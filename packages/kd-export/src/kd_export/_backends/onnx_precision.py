"""An ONNX model of fewer bits, by the quantizers of onnxruntime.

Knows graphs, their layers and how numbers are rounded; must not know keys, rows or budgets.

In ``int8`` the layers with weights compute on integers of 8 bits (QDQ form). Activations are
unsigned, and weights use 7 of their bits: processors without VNNI add products in 16 bits, and cut
those that do not fit. In ``int8-weights`` the weights alone are rounded, by channel, and a
`DequantizeLinear` gives them back, which any runtime knows. In ``fp16`` everything is, but what
goes in and comes out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from kd_export._console import muted
from kd_export._errors import NotExportable, raised_as
from kd_export._running.session import WEIGHTS
from kd_export._schema.files import unused_name
from kd_export._schema.onnx_file import PRODUCER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.generic]

_DENSE = ("Gemm", "MatMul", "Conv", "ConvTranspose")
"""Operators that onnxruntime computes on integers."""
_FOLLOWING = ("Relu", "Clip", "MaxPool")
"""Operators that stay on integers behind one of those."""
_WEIGHTED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_DENSE, (1,)),
    "Gather": (0,),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2)),
}
"""Which inputs of an operator may be weights."""
_WITHOUT_NUMBERS = ("Constant", "Shape", "Size", "Identity", "Reshape", "Cast")
_LEAST_WEIGHTS = 16
"""How many numbers weights have at least: fewer are not worth a scale."""


class OnnxReducer:
    """A float model whose layers can be written with fewer bits.

    Args:
        source: The file.
        precision: ``"fp16"``, ``"int8"`` or ``"int8-weights"``.
        samples: Inputs to calibrate with, by name; ``int8`` needs some.
    """

    def __init__(
        self, source: Path, precision: str, samples: Sequence[Mapping[str, object]]
    ) -> None:
        self._model = onnx.load(str(source))
        del self._model.metadata_props[:]
        for place, node in enumerate(self._model.graph.node):
            node.name = node.name or f"{node.op_type}_{place}"
        self._precision = precision
        self._weights = {
            one.name: one
            for one in self._model.graph.initializer
            if one.data_type == onnx.TensorProto.FLOAT
        }
        self._nodes = dict(self._layers())
        self.layers = tuple(dict.fromkeys(self._nodes.values()))
        self._ranges = _calibrated(self._model, samples) if precision == "int8" else None

    def _layers(self) -> Iterator[tuple[str, str]]:
        """Iterate over the nodes that can be written with fewer bits: its name, its layer's."""
        for node in self._model.graph.node:
            weights = self._weights_of(node)
            if weights and (self._precision != "int8" or node.op_type in _DENSE):
                yield node.name, _layer(weights[0], node)
            elif self._precision == "fp16" and node.op_type not in _WITHOUT_NUMBERS:
                yield node.name, node.name

    def _weights_of(self, node: onnx.NodeProto) -> list[str]:
        names = [node.input[i] for i in _WEIGHTED.get(node.op_type, ()) if i < len(node.input)]
        return [name for name in names if name in self._weights and self._is_large(name)]

    def _is_large(self, name: str) -> bool:
        dims = self._weights[name].dims
        return len(dims) > 1 and int(np.prod(dims)) >= _LEAST_WEIGHTS

    def write(self, target: Path, kept: Collection[str]) -> None:
        """Write the model; the layers of these names stay float."""
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        names = [name for name, layer in self._nodes.items() if layer not in kept]
        hint = "Leave `precision` out, or take another one."
        what = f"onnxruntime cannot write the model in {self._precision}"
        with raised_as(NotExportable, what, hint), muted():
            if self._precision == "int8":
                model = self._on_integers(model, names)
            elif self._precision == WEIGHTS:
                self._round(model.graph, names)
            else:
                model = _halved(model, sorted(self._nodes.keys() - set(names)))
            del model.metadata_props[:]
            del model.graph.value_info[:]  # of other types than they were, and some of no value
            model.producer_name, model.producer_version = PRODUCER, ""
            _sort(model.graph, ir.from_proto(model))
            onnx.checker.check_model(model)
            onnx.save(model, str(target))

    def _on_integers(self, model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
        """Let the layers compute on integers, and what follows them where it can."""
        from onnxruntime.quantization import QuantType
        from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

        chosen = [*names]
        behind = {out for node in model.graph.node if node.name in chosen for out in node.output}
        for node in model.graph.node:
            if node.op_type in _FOLLOWING and node.input[0] in behind:
                chosen.append(node.name)
                behind.update(node.output)
        if not names:
            return model
        quantizer = QDQQuantizer(
            model,
            True,  # a scale for each channel
            True,  # seven bits of the weights: see above
            QuantType.QInt8,
            QuantType.QUInt8,
            self._ranges,
            chosen,
            [],
            [*_DENSE, *_FOLLOWING],
            {},
        )
        quantizer.quantize_model()
        result: onnx.ModelProto = quantizer.model.model
        return result

    def _round(self, graph: onnx.GraphProto, names: Sequence[str]) -> None:
        """Write weights as integers with a scale for each channel."""
        taken = {value for node in graph.node for value in (*node.input, *node.output)}
        taken |= {one.name for one in graph.initializer}
        widened: dict[tuple[str, int], str] = {}
        added: list[onnx.NodeProto] = []
        for node in [node for node in graph.node if node.name in names]:
            places = [i for i in _WEIGHTED[node.op_type] if i < len(node.input)]
            for place in places:
                name, axis = node.input[place], _channel(node)
                if name not in self._weights or not self._is_large(name):
                    continue
                if (name, axis) not in widened:
                    wide = unused_name(f"{name}_float", taken)
                    taken.add(wide)
                    widened[name, axis] = wide
                    added.append(self._rounded(graph, name, axis, wide, taken))
                node.input[place] = widened[name, axis]
        nodes = [*added, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        used = {value for node in graph.node for value in node.input}
        used |= {value.name for value in graph.output} | set(_inside(graph))
        weights = [one for one in graph.initializer if one.name in used]
        del graph.initializer[:]
        graph.initializer.extend(weights)

    def _rounded(
        self, graph: onnx.GraphProto, name: str, axis: int, wide: str, taken: set[str]
    ) -> onnx.NodeProto:
        values = numpy_helper.to_array(self._weights[name])
        others = tuple(dim for dim in range(values.ndim) if dim != axis % values.ndim)
        scale = np.abs(values).max(others) / 127
        scale = np.where(scale == 0, 1, scale).astype(np.float32)
        shape = [1] * values.ndim
        shape[axis] = -1
        narrow = np.clip(np.rint(values / scale.reshape(shape)), -127, 127).astype(np.int8)
        names = []
        for suffix, array in (("int8", narrow), ("scale", scale)):
            one = unused_name(f"{name}_{suffix}", taken)
            taken.add(one)
            names.append(one)
            graph.initializer.append(numpy_helper.from_array(array, one))
        where = axis % values.ndim
        return helper.make_node("DequantizeLinear", names, [wide], name=wide, axis=where)


def _layer(weight: str, node: onnx.NodeProto) -> str:
    """Name a layer by its weights, if they are a parameter, else by its node."""
    path, _, name = weight.rpartition(".")
    if not path or not name.startswith("weight"):
        return node.name
    inner = path.removeprefix("module").lstrip(".")
    return (f"{inner}.{name}" if name != "weight" else inner) or name


def _channel(node: onnx.NodeProto) -> int:
    """Return the axis of weights that has a scale for each index."""
    if node.op_type == "Gemm":
        transposed = any(one.name == "transB" and one.i for one in node.attribute)
        return 0 if transposed else 1
    return {"MatMul": -1, "Conv": 0, "Gather": 0}.get(node.op_type, 1)


def _inside(graph: onnx.GraphProto) -> Iterator[str]:
    """Iterate over the names that the graphs inside nodes use."""
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from (name for one in inner.node for name in one.input)
                yield from (value.name for value in inner.output)
                yield from _inside(inner)


def _sort(graph: onnx.GraphProto, model: ir.Model) -> None:
    """Put nodes behind those whose results they take, as ONNX asks for: quantizers append theirs.

    Args:
        graph: What is sorted, graphs inside nodes included.
        model: What it is the graph of.
    """
    model.graph.sort()
    nodes = ir.to_proto(model).graph.node
    del graph.node[:]
    graph.node.extend(nodes)


def _halved(model: onnx.ModelProto, kept: Sequence[str]) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    result: onnx.ModelProto = convert_float_to_float16(
        model, keep_io_types=True, node_block_list=[*kept]
    )
    return result


class _Samples:
    """Inputs as onnxruntime asks for them."""

    def __init__(self, samples: Sequence[Mapping[str, object]]) -> None:
        self._rest = iter(samples)

    def get_next(self) -> Mapping[str, object] | None:
        return next(self._rest, None)


def _calibrated(model: onnx.ModelProto, samples: Sequence[Mapping[str, object]]) -> object:
    """Find between which numbers the values lie that go into layers and come out of them."""
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

    what = "onnxruntime cannot calibrate the model"
    with (
        raised_as(NotExportable, what, "Leave `precision` out, or take another one."),
        tempfile.TemporaryDirectory() as folder,
        muted(),
    ):
        source = Path(folder) / "model.onnx"
        onnx.save(model, str(source))
        calibrator = create_calibrator(
            str(source),
            [*_DENSE, *_FOLLOWING],
            augmented_model_path=str(Path(folder) / "augmented.onnx"),
            calibrate_method=CalibrationMethod.MinMax,
        )
        calibrator.collect_data(_Samples(samples))
        found: object = calibrator.compute_data()
        return found
