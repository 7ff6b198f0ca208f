"""A LiteRT model of fewer bits, by the quantizer of LiteRT.

Knows models, their signatures and layers; must not know keys, rows or budgets.

The signatures of a file share their weights, and in ``int8`` the biases too, whose scale follows
from that of what goes in. So between which numbers values lie is found at the largest sizes and
holds for all signatures.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from kd_export._console import muted_tool
from kd_export._errors import NotExportable, raised_as
from kd_export._running.session import WEIGHTS, require
from kd_export._schema.schema import LinearSize, Schema

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

_EXTRA = "litert"
_WEIGHTED = {
    "CONV_2D": 1,
    "DEPTHWISE_CONV_2D": 1,
    "FULLY_CONNECTED": 1,
    "TRANSPOSE_CONV": 1,
    "BATCH_MATMUL": 1,
    "EMBEDDING_LOOKUP": 1,
}
"""Which input of an operator may be weights."""
_LEAST_BYTES = 64
"""How large weights are at least: fewer numbers are not worth a scale."""
_NUMBER = re.compile(r";\d*$")
"""What the converter adds to a name that is taken."""


Sizes = Mapping[str, int]


def signature_of(sizes: Sizes) -> str:
    """Return the name of the signature that serves some sizes.

    >>> signature_of({"batch": 3, "time": 8}), signature_of({})
    ('batch_3_time_8', 'main')
    """
    return "_".join(f"{axis}_{size}" for axis, size in sizes.items()) or "main"


class LiteRtReducer:
    """A float model whose layers can be written with fewer bits.

    Args:
        model: The model.
        schema: What it takes and gives.
        precision: ``"fp16"``, ``"int8"`` or ``"int8-weights"``.
        samples: Inputs to calibrate with, by name; ``int8`` needs some.
    """

    def __init__(
        self,
        model: bytes,
        schema: Schema,
        precision: str,
        samples: Sequence[Mapping[str, object]],
    ) -> None:
        with _quiet():
            self._tool = cast("_Tool", require("ai_edge_quantizer.quantizer", _EXTRA))
            self._types = cast("_Types", require("ai_edge_quantizer.qtyping", _EXTRA))
            self._recipes = cast("_Recipes", require("ai_edge_quantizer.recipe_manager", _EXTRA))
            utils = cast("_Utils", require("ai_edge_quantizer.utils.tfl_flatbuffer_utils", _EXTRA))
        self._model = model
        self._precision = precision
        read = utils.read_model(model)
        self._graphs = [_graph(read, part, utils) for part in read.subgraphs]
        self._scopes: dict[str, list[str]] = {}
        for place, operator in enumerate(self._graphs[0] if self._is_alike() else ()):
            if operator.layer:
                scopes = [graph[place].scope for graph in self._graphs]
                self._scopes.setdefault(operator.layer, []).extend(scopes)
        self.layers = tuple(self._scopes)
        self._ranges: dict[str, object] | None = None
        if precision == "int8" and self.layers:
            with _reported("calibrate"):
                self._ranges = self._calibrated(schema, samples)

    def _is_alike(self) -> bool:
        """Return whether all signatures have the same operators in the same order."""
        first = [operator.kind for operator in self._graphs[0]]
        return all([one.kind for one in graph] == first for graph in self._graphs)

    def write(self, target: Path, kept: Collection[str]) -> None:
        """Write the model; the layers of these names stay float."""
        chosen = [layer for layer in self.layers if layer not in kept]
        with _reported(f"write {self._precision}"):
            content = self._model
            if chosen:
                recipe = self._recipe(chosen).get_quantization_recipe()
                made = self._tool.Quantizer(self._model, recipe)
                done = made.quantize(self._ranges, enable_progress_report=False)
                content = bytes(done.quantized_model)
        target.write_bytes(content)

    def _recipe(self, layers: Sequence[str]) -> _Recipe:
        """Say what is done with each operator: what goes in and comes out stays float."""
        made = self._recipes.RecipeManager()
        names = self._types.TFLOperationName
        every = names.ALL_SUPPORTED
        for scope in (scope for layer in layers for scope in self._scopes[layer]):
            regex = f"^{re.escape(scope)}$"
            if self._precision == "int8":
                made.add_static_config(regex, every, activation_num_bits=8, weight_num_bits=8)
            elif self._precision == WEIGHTS:
                made.add_weight_only_config(regex, every, num_bits=8)
            else:
                made.add_weight_only_config(
                    regex, every, num_bits=16, algorithm_key="float_casting"
                )
        for border in (names.INPUT, names.OUTPUT):
            made.add_quantization_config(".*", border, algorithm_key="no_quantize")
        return made

    def _calibrated(
        self, schema: Schema, samples: Sequence[Mapping[str, object]]
    ) -> dict[str, object]:
        """Find between which numbers the values lie, in all samples and for all signatures."""
        by_name: dict[str, list[Mapping[str, object]]] = {}
        for sample in samples:
            by_name.setdefault(_signature(schema, sample), []).append(sample)
        tool = cast("_Calibrating", require("ai_edge_quantizer.calibrator", _EXTRA))
        made = tool.Calibrator(self._model, num_threads=1, qsv_update_func=_joined)
        made.calibrate(by_name, self._recipe(self.layers))
        return dict(self._shared(made.get_model_qsvs()))

    def _shared(self, found: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, object]]:
        """Give the values of each place in the signatures the same ranges."""
        places: dict[int, list[str]] = {}
        for graph in self._graphs:
            tensors = [name for operator in graph for name in operator.tensors]
            for place, name in enumerate(tensors):
                places.setdefault(place, []).append(name)
        for names in places.values():
            known = [found[name] for name in names if name in found]
            if not known:
                continue
            joined = functools.reduce(_joined, known)
            for name in names:
                yield name, joined


class _Operator:
    """An operator of a signature: its kind, its layer, the scope it is found by, its tensors."""

    def __init__(self, kind: str, layer: str, scope: str, tensors: Sequence[str]) -> None:
        self.kind = kind
        self.layer = layer
        self.scope = scope
        self.tensors = tensors


def _graph(model: _Read, part: _Part, utils: _Utils) -> list[_Operator]:
    found = []
    for operator in part.operators:
        code = model.operatorCodes[operator.opcodeIndex].builtinCode
        kind = str(getattr(utils.TFL_OP_CODE_TO_NAME.get(code), "value", code))
        places = [place for place in (*operator.inputs, *operator.outputs) if place >= 0]
        tensors = [utils.get_tensor_name(part.tensors[place]) for place in places]
        scope = utils.get_op_scope(operator, part.tensors)
        found.append(_Operator(kind, _layer(model, part, operator, kind, utils), scope, tensors))
    return found


def _layer(model: _Read, part: _Part, operator: _Node, kind: str, utils: _Utils) -> str:
    """Name a layer by the module that its weights are of; an empty name if it has none."""
    place = _WEIGHTED.get(kind)
    if place is None or place >= len(operator.inputs):
        return ""
    weights = part.tensors[operator.inputs[place]]
    data = model.buffers[weights.buffer].data
    if data is None or len(cast("Sequence[int]", data)) < _LEAST_BYTES:
        return ""
    name = _NUMBER.sub("", utils.get_tensor_name(weights))
    modules = [step.rpartition(".")[2].partition("_")[2] for step in name.split("/")]
    path = ".".join(step for step in modules if step)
    for _ in range(2):  # of the flat module, and of a keyed one
        path = path.removeprefix("module").lstrip(".")
    return path or name


def _signature(schema: Schema, sample: Mapping[str, object]) -> str:
    """Return the name of the signature that serves a sample."""
    sizes = {
        linear.axis: linear.axis_at(cast("_Shaped", sample[entry.name]).shape[dim]) or 0
        for entry in schema.inputs
        for dim, size in enumerate(entry.shape)
        if isinstance(size, str) and (linear := LinearSize.parse(size)) is not None
    }
    return signature_of({axis: sizes[axis] for axis in schema.axes})


def _joined(one: Mapping[str, object], other: Mapping[str, object]) -> Mapping[str, object]:
    """Return the range that holds two; by default it would be an average over time."""
    import numpy as np

    if not (one and other):
        return one or other
    low = np.minimum(cast("Array", one["min"]), cast("Array", other["min"]))
    high = np.maximum(cast("Array", one["max"]), cast("Array", other["max"]))
    return {**one, "min": low, "max": high}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with muted_tool(), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    hint = "Leave `precision` out, or take another one."
    with raised_as(NotExportable, f"LiteRT's quantizer cannot {what}", hint), _quiet():
        yield


class _Shaped(Protocol):
    shape: Sequence[int]


class _Code(Protocol):
    builtinCode: int  # noqa: N815  # the flatbuffer's name


class _Buffer(Protocol):
    data: object


class _Tensor(Protocol):
    buffer: int


class _Node(Protocol):
    opcodeIndex: int  # noqa: N815  # the flatbuffer's name
    inputs: Sequence[int]
    outputs: Sequence[int]


class _Part(Protocol):
    operators: Sequence[_Node]
    tensors: Sequence[_Tensor]


class _Read(Protocol):
    subgraphs: Sequence[_Part]
    operatorCodes: Sequence[_Code]  # noqa: N815  # the flatbuffer's name
    buffers: Sequence[_Buffer]


class _Utils(Protocol):
    TFL_OP_CODE_TO_NAME: Mapping[int, object]

    def read_model(self, model: bytes) -> _Read: ...
    def get_tensor_name(self, tensor: _Tensor) -> str: ...
    def get_op_scope(self, operator: _Node, tensors: Sequence[_Tensor]) -> str: ...


class _Names(Protocol):
    ALL_SUPPORTED: object
    INPUT: object
    OUTPUT: object


class _Types(Protocol):
    TFLOperationName: _Names


class _Result(Protocol):
    quantized_model: bytes


class _Recipe(Protocol):
    def add_quantization_config(self, regex: str, name: object, *, algorithm_key: str) -> None: ...
    def add_static_config(
        self, regex: str, name: object, *, activation_num_bits: int, weight_num_bits: int
    ) -> None: ...
    def add_weight_only_config(
        self, regex: str, name: object, *, num_bits: int, algorithm_key: str = ...
    ) -> None: ...
    def get_quantization_recipe(self) -> object: ...


class _Recipes(Protocol):
    RecipeManager: Callable[[], _Recipe]


class _Calibrator(Protocol):
    def calibrate(self, data: Mapping[str, object], recipe: _Recipe) -> None: ...
    def get_model_qsvs(self) -> Mapping[str, Mapping[str, object]]: ...


class _Calibrating(Protocol):
    Calibrator: Callable[..., _Calibrator]


class _Quantizer(Protocol):
    def quantize(
        self, ranges: Mapping[str, object] | None, *, enable_progress_report: bool
    ) -> _Result: ...


class _Tool(Protocol):
    Quantizer: Callable[[bytes, object], _Quantizer]
