"""An OpenVINO model of fewer bits, by nncf.

Knows models of OpenVINO and their layers; must not know keys, rows or budgets.

In ``fp16`` the weights are stored in 16 bits and computed with in 32, as OpenVINO itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from kd_export._console import muted
from kd_export._errors import NotExportable, raised_as
from kd_export._running.session import WEIGHTS, require

_EXTRA = "nncf"
_DENSE = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData")
_ON_THE_WAY = ("Convert", "Transpose", "Reshape", "Multiply", "Subtract")
"""Operators between a layer and the constant that holds its weights."""
_ALL = "weights"
"""The one layer of a model whose weights are all stored alike."""


class OpenVinoReducer:
    """A float model whose layers can be written with fewer bits.

    Args:
        source: The file.
        precision: ``"fp16"``, ``"int8"`` or ``"int8-weights"``.
        samples: Inputs to calibrate with, by name; ``int8`` needs some.
    """

    def __init__(
        self, source: Path, precision: str, samples: Sequence[Mapping[str, object]]
    ) -> None:
        self._openvino = cast("_OpenVino", require("openvino", "openvino"))
        self._tool = cast("_Nncf", require("nncf", _EXTRA)) if precision != "fp16" else None
        self._source = source
        self._precision = precision
        self._samples = samples
        self._nodes = dict(_weighted(self._read())) if precision != "fp16" else {}
        self.layers = tuple(dict.fromkeys(self._nodes.values())) or (
            (_ALL,) if precision == "fp16" else ()
        )

    def _read(self) -> _Model:
        return self._openvino.Core().read_model(str(self._source))

    def write(self, target: Path, kept: Collection[str]) -> None:
        """Write the model; the layers of these names stay float."""
        model = self._read()
        hint = "Leave `precision` out, or take another one."
        with raised_as(NotExportable, f"nncf cannot write {self._precision}", hint), muted("nncf"):
            if self._tool is not None:
                names = [name for name, layer in self._nodes.items() if layer in kept]
                scope = self._tool.IgnoredScope(names=names, validate=False)
                if len(names) < len(self._nodes):
                    model = self._reduced(self._tool, model, scope)
        self._openvino.save_model(model, str(target), compress_to_fp16=self._tool is None)

    def _reduced(self, nncf: _Nncf, model: _Model, scope: object) -> _Model:
        if self._precision == WEIGHTS:
            mode = nncf.CompressWeightsMode.INT8_SYM
            return nncf.compress_weights(model, mode=mode, ignored_scope=scope)
        # Processors without VNNI add products in 16 bits: half of the range is left to them.
        fix = nncf.quantization.advanced_parameters.OverflowFix.ENABLE
        return nncf.quantize(
            model,
            nncf.Dataset(list(self._samples)),
            subset_size=max(len(self._samples), 1),
            ignored_scope=scope,
            advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
        )


def _weighted(model: _Model) -> Iterator[tuple[str, str]]:
    """Iterate over the layers with weights: the name of the operator, and of the layer."""
    for node in model.get_ordered_ops():
        if node.get_type_name() not in _DENSE:
            continue
        weights = node.input_value(1).get_node()
        while weights.get_type_name() in _ON_THE_WAY:
            weights = weights.input_value(0).get_node()
        if weights.get_type_name() == "Constant":
            name = node.get_friendly_name()
            yield name, name.partition("/")[0]


class _Output(Protocol):
    def get_node(self) -> _Node: ...


class _Node(Protocol):
    def get_type_name(self) -> str: ...
    def get_friendly_name(self) -> str: ...
    def input_value(self, place: int) -> _Output: ...


class _Model(Protocol):
    def get_ordered_ops(self) -> Iterable[_Node]: ...


class _Core(Protocol):
    def read_model(self, path: str) -> _Model: ...


class _OpenVino(Protocol):
    def Core(self) -> _Core: ...  # noqa: N802  # openvino's name
    def save_model(self, model: _Model, path: str, *, compress_to_fp16: bool) -> None: ...


class _Modes(Protocol):
    INT8_SYM: object


class _Fixes(Protocol):
    ENABLE: object


class _Advanced(Protocol):
    OverflowFix: _Fixes


class _Quantization(Protocol):
    advanced_parameters: _Advanced


class _Nncf(Protocol):
    CompressWeightsMode: _Modes
    IgnoredScope: Callable[..., object]
    Dataset: Callable[[list[Mapping[str, object]]], object]
    AdvancedQuantizationParameters: Callable[..., object]
    quantize: Callable[..., _Model]
    compress_weights: Callable[..., _Model]
    quantization: _Quantization
