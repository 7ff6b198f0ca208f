"""``.tflite``: run by LiteRT on phones and small boards, with numpy.

The runtime resizes the inputs of a program without looking whether it serves the size, and then
gives wrong numbers. So a file has one signature for each size that its axes allow, all of which
share their weights, and no other size is run.

The schema is in a zip archive behind the model, as LiteRT packs what belongs to one; `unzip` shows
it. The runtime believes what a model says of its own memory, so a file is opened only where it is
trusted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import math
import os
import re
import threading
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

from kd_export._backends.onnx import ArrayRunner, refuse_nan, refuse_providers
from kd_export._console import muted_tool
from kd_export._errors import ExportError, NotExportable, first_line, quoted, raised_as
from kd_export._running.loading import check_digest
from kd_export._running.session import WEIGHTS, Reducer, Runner, picked, require
from kd_export._schema.files import SCHEMA_FILE, check_schema_size, foreign, open_regular, open_zip
from kd_export._schema.schema import Entry, LinearSize, Schema, check_fit, known_size

if TYPE_CHECKING:
    from ai_edge_litert.interpreter import SignatureRunner
    from ai_edge_quantizer.qtyping import ModelT, OperatorT, SubGraphT
    from ai_edge_quantizer.recipe_manager import RecipeManager
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from kd_export._backends.onnx import Array
    from kd_export._torch_private import OperatorBase, OpOverload

MOST_SIZES = 64
"""How many signatures a file has at most."""

_EXTRA = "litert"
_IDENTIFIER, _IDENTIFIER_AT = b"TFL3", 4
_CHUNK = 1 << 20


def all_sizes(schema: Schema) -> list[dict[str, int]]:
    """List the sizes that the axes of a schema allow, all of which have a maximum."""
    ranges = [range(axis.min, (axis.max or 0) + 1) for axis in schema.axes.values()]
    return [dict(zip(schema.axes, sizes, strict=True)) for sizes in itertools.product(*ranges)]


def model_of(file: BinaryIO) -> bytes:
    """Read the model of a file, without the archive behind it."""
    end = _schema_entry(file).header_offset
    file.seek(0)
    return file.read(end)


def write_file(model: bytes, schema: Schema, path: Path) -> None:
    """Write a model and its schema, with its digest."""
    text = replace(schema, weights=hashlib.sha256(model).hexdigest()).to_json()
    path.write_bytes(model)
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(zipfile.ZipInfo(SCHEMA_FILE), text)


def _schema_entry(file: BinaryIO) -> zipfile.ZipInfo:
    """Find the one entry of the archive behind a model.

    Raises:
        ExportError: It is not a whole model of ours.
    """
    file.seek(_IDENTIFIER_AT)
    if file.read(len(_IDENTIFIER)) != _IDENTIFIER:
        raise ExportError("the file is not a LiteRT model.", hint="It may be damaged.")
    size = file.seek(0, os.SEEK_END)
    tail = min(size, 22)
    file.seek(size - tail)
    if file.read(4) != b"PK\5\6":
        raise foreign(".tflite")
    with open_zip(file) as archive:
        entries = archive.infolist()
    if [entry.filename for entry in entries] != [SCHEMA_FILE]:
        raise foreign(".tflite")
    check_schema_size(entries[0].file_size)
    return entries[0]


class LiteRtBackend:
    """Write and read ``.tflite`` files."""

    name = "LiteRT"
    suffixes = (".tflite",)
    executes = True

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def configured(self, threads: int | None, providers: Sequence[str] | None) -> LiteRtBackend:
        """Return the same with so many threads a call."""
        refuse_providers(providers, self.name)
        return LiteRtBackend(threads)

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema out of the archive behind the model."""
        entry = _schema_entry(file)
        with open_zip(file) as archive:
            return Schema.from_json(archive.read(entry).decode())

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Check that the sizes can be listed; name the outputs as they are in the file."""
        _converter()
        endless = [name for name, axis in schema.axes.items() if axis.max is None]
        count = math.prod((a.max or a.min) - a.min + 1 for a in schema.axes.values())
        if endless or count > MOST_SIZES:
            ranges = {name: (axis.min, axis.min + 7) for name, axis in schema.axes.items()}
            told = (
                f"{quoted(endless)} has no maximum"
                if endless
                else f"the ranges allow {count:,} of them"
            )
            raise NotExportable(
                f"LiteRT has a signature for each allowed size, and {told}.",
                expected=f"at most {MOST_SIZES} sizes",
                got={name: str(axis) for name, axis in schema.axes.items()},
                hint=f"Pass ranges to `export`, such as `dynamic={ranges}`.",
            )
        names = ("litert-torch", "ai-edge-litert")
        return replace(schema, versions={**schema.versions, **{n: version(n) for n in names}})

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Convert the program at each of its sizes, and write the model with the schema."""
        converter = _converter()
        hint = "Save it as `.pt2` or `.onnx`."
        with (
            raised_as(NotExportable, "LiteRT cannot express the program", hint, _reason),
            muted_tool(),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            for sizes in all_sizes(schema):
                module, inputs = _at(program, schema, sizes)
                converter = converter.signature(signature_of(sizes), module, sample_kwargs=inputs)
            model = converter.convert(enable_x64=True).model_content()
        write_file(model, schema, path)

    def seal(self, source: Path, schema: Schema, target: Path) -> None:
        """Write a model with another schema, and its digest."""
        if zipfile.is_zipfile(source):
            with open_regular(source) as file:
                write_file(model_of(file), schema, target)
        else:
            write_file(source.read_bytes(), schema, target)

    def reducer(
        self, source: Path, precision: str, samples: Sequence[Mapping[str, object]]
    ) -> Reducer:
        """Return what writes a float file with fewer bits."""
        with open_regular(source) as file:
            return LiteRtReducer(model_of(file), self.read_schema(file), precision, samples)

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> Runner:
        """Load the model, once its bytes are known to be those that were written."""
        model = model_of(file)
        check_digest(hashlib.sha256(model).hexdigest(), schema, path)
        with muted_tool():
            runtime = require("ai_edge_litert.interpreter", _EXTRA)
        with raised_as(ExportError, "LiteRT cannot load the file", "The file may be damaged."):
            interpreter = runtime.Interpreter(model_content=model, num_threads=self._threads)
            found = interpreter.get_signature_list()
            sizes = all_sizes(schema)
            check_fit(sorted(map(signature_of, sizes)), sorted(found))
            runners: dict[tuple[int | None, ...], SignatureRunner] = {
                tuple(one.values()): interpreter.get_signature_runner(signature_of(one))
                for one in sizes
            }
        for one in sizes:
            check_fit(_described(schema, one), _found(runners[tuple(one.values())]))
        return LiteRtRunner(interpreter, runners, schema)

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Return ``None``: the digest is checked before the model is loaded."""
        return None


backend = LiteRtBackend()


def _converter() -> ModuleType:
    with muted_tool():
        return require("litert_torch", _EXTRA)


_PLACE = re.compile(r".*?\S:\d+:\d+: error: ")
"""Where the converter saw an error, in a file of the machine that it runs on."""
_ILLEGAL = re.compile(r"failed to legalize operation '(?:tfl\.)?([\w.]+)'.*? : (\(.*\)) -> ")


def _reason(error: BaseException) -> str:
    """Return what the converter says, without the path of a file.

    >>> _reason(RuntimeError("Failed: /a.py:3:0: error: rank 9 is too high"))
    'rank 9 is too high'
    >>> told = "error: failed to legalize operation 'tfl.sqrt' that was marked illegal"
    >>> _reason(RuntimeError(f'/a.py:3:0: {told}: %1 = "tfl.sqrt"(%0) : (tensor<2xf64>) -> 9'))
    'it has no operator `sqrt` of `(tensor<2xf64>)`'
    """
    told = _PLACE.sub("", first_line(error), count=1)
    illegal = _ILLEGAL.match(told)
    return told if illegal is None else f"it has no operator `{illegal[1]}` of `{illegal[2]}`"


def _at(
    program: ExportedProgram, schema: Schema, sizes: Sizes
) -> tuple[nn.Module, dict[str, object]]:
    """Return a module that is the program at some sizes, and inputs of these."""
    import torch

    from kd_export._running.recurrent import layer_decompositions

    inputs: dict[str, object] = {
        entry.name: torch.zeros(
            [known_size(size, sizes) or 0 for size in entry.shape],
            dtype=getattr(torch, entry.dtype),
        )
        for entry in schema.inputs
    }
    module = program.module()
    # Layers become loops over time, unless its length is known: as it is at fixed sizes.
    if layer_decompositions(program) or _limits_of_doubles(program):
        fixed = torch.export.export(module, (), inputs)
        table = {**layer_decompositions(fixed), **_limits_of_doubles(fixed)}
        with torch.no_grad():
            module = fixed.run_decompositions(table).module()
    return module, inputs


def _limits_of_doubles(
    program: ExportedProgram,
) -> dict[OperatorBase, Callable[..., object]]:
    """Return decompositions of the limits that a program sets to float64, which LiteRT refuses.

    It computes sums and products of float64 in float32 by itself. Rounding keeps the order of
    numbers, so that a limit after it is the rounded limit.
    """
    import torch
    from torch import fx

    aten = torch.ops.aten
    operators: tuple[OpOverload[..., Tensor], ...] = (
        *(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default),
        *(aten.maximum.default, aten.minimum.default, aten.relu.default),
    )
    graphs = [part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    used = {
        node.target
        for part in graphs
        for node in part.graph.nodes
        if getattr(node.meta.get("val"), "dtype", None) is torch.float64
    }
    return {
        operator: functools.partial(_in_single, operator)
        for operator in operators
        if operator in used
    }


def _in_single(operator: Callable[..., Tensor], *args: object, **kwargs: object) -> object:
    import torch

    def single(value: object) -> object:
        return value.float() if isinstance(value, torch.Tensor) else value

    first = args[0]
    if not isinstance(first, torch.Tensor) or first.dtype is not torch.float64:
        return NotImplemented
    named = {name: single(value) for name, value in kwargs.items()}
    return operator(*map(single, args), **named).double()


def _described(schema: Schema, sizes: Sizes) -> tuple[object, ...]:
    """Return dtype and sizes of inputs and outputs, as the schema tells them."""
    return tuple(
        {
            name: (entry.dtype, *(known_size(size, sizes) for size in entry.shape))
            for entry, name in entries
        }
        for entries in (
            [(entry, entry.name) for entry in schema.inputs],
            [(entry, entry.wire) for entry in schema.outputs],
        )
    )


def _found(runner: SignatureRunner) -> tuple[object, ...]:
    import numpy as np

    return tuple(
        {
            name: (np.dtype(one["dtype"]).name, *map(int, one["shape"]))
            for name, one in details.items()
        }
        for details in (runner.get_input_details(), runner.get_output_details())
    )


class LiteRtRunner(ArrayRunner):
    """Run a model by the signature of the sizes that it is given, on numpy arrays.

    LiteRT makes numbers of NaN, such as -1 by an ELU, so NaN is refused.
    """

    def __init__(
        self,
        interpreter: object,
        runners: Mapping[tuple[int | None, ...], SignatureRunner],
        schema: Schema,
    ) -> None:
        self._interpreter = interpreter  # the runners borrow its memory
        self._runners = runners
        self._schema = schema
        self._inputs = [entry.name for entry in schema.inputs]
        places = {
            linear.axis: (place, dim, linear)
            for place, entry in enumerate(schema.inputs)
            for dim, size in enumerate(entry.shape)
            if isinstance(size, str) and (linear := LinearSize.parse(size)) is not None
        }
        self._places = [places[axis] for axis in schema.axes]
        self._one_at_a_time = threading.Lock()  # calls share the interpreter's buffers

    def adapt(self, value: object, entry: Entry) -> Array:
        """Check the dtype of an array or tensor, and that it holds no NaN."""
        array = super().adapt(value, entry)
        refuse_nan(array, entry, "LiteRT")
        return array

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on arrays in order; ``names`` picks among the outputs."""
        import numpy as np

        sizes = tuple(
            linear.axis_at(np.asarray(arrays[place]).shape[dim])
            for place, dim, linear in self._places
        )
        run = self._runners.get(sizes)
        if run is None:
            raise ExportError(
                f"the file has no signature for the sizes {sizes}.",
                expected=tuple(self._runners),
                got=sizes,
                hint="Export it with ranges that hold them.",
            )
        with self._one_at_a_time:
            results = run(**dict(zip(self._inputs, arrays, strict=True)))
        found = [results[entry.wire] for entry in self._schema.outputs]
        return picked(self._schema, found, names)


# A LiteRT model of fewer bits, by the quantizer of LiteRT.
#
# Knows models, their signatures and layers; must not know keys, rows or budgets.
#
# The signatures of a file share their weights, and in ``int8`` the biases too, whose scale follows
# from that of what goes in. So between which numbers values lie is found at the largest sizes and
# holds for all signatures.

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
            self._tool = require("ai_edge_quantizer.quantizer", _EXTRA)
            self._types = require("ai_edge_quantizer.qtyping", _EXTRA)
            self._recipes = require("ai_edge_quantizer.recipe_manager", _EXTRA)
            utils = require("ai_edge_quantizer.utils.tfl_flatbuffer_utils", _EXTRA)
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

    def _recipe(self, layers: Sequence[str]) -> RecipeManager:
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
        tool = require("ai_edge_quantizer.calibrator", _EXTRA)
        made = tool.Calibrator(self._model, num_threads=1, qsv_update_func=_joined)
        made.calibrate(by_name, self._recipe(self.layers))
        return dict(self._shared(made.get_model_qsvs()))

    def _shared(self, found: Mapping[str, Mapping[str, Array]]) -> Iterator[tuple[str, object]]:
        """Set the same ranges for the values of each place in the signatures."""
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


def _graph(model: ModelT, part: SubGraphT, utils: ModuleType) -> list[_Operator]:
    found = []
    for operator in part.operators:
        code = model.operatorCodes[operator.opcodeIndex].builtinCode
        kind = str(getattr(utils.TFL_OP_CODE_TO_NAME.get(code), "value", code))
        places = [place for place in (*operator.inputs, *operator.outputs) if place >= 0]
        tensors = [utils.get_tensor_name(part.tensors[place]) for place in places]
        scope = utils.get_op_scope(operator, part.tensors)
        found.append(_Operator(kind, _layer(model, part, operator, kind, utils), scope, tensors))
    return found


def _layer(
    model: ModelT, part: SubGraphT, operator: OperatorT, kind: str, utils: ModuleType
) -> str:
    """Name a layer by the module that its weights are of; an empty name if it has none."""
    place = _WEIGHTED.get(kind)
    if place is None or place >= len(operator.inputs):
        return ""
    weights = part.tensors[operator.inputs[place]]
    data = model.buffers[weights.buffer].data
    if data is None or len(data) < _LEAST_BYTES:
        return ""
    name = _NUMBER.sub("", utils.get_tensor_name(weights))
    modules = [step.rpartition(".")[2].partition("_")[2] for step in name.split("/")]
    path = ".".join(step for step in modules if step)
    for _ in range(2):  # of the flat module, and of a keyed one
        path = path.removeprefix("module").lstrip(".")
    return path or name


def _signature(schema: Schema, sample: Mapping[str, object]) -> str:
    """Return the name of the signature that serves a sample."""
    import numpy as np

    sizes = {
        linear.axis: linear.axis_at(np.asarray(sample[entry.name]).shape[dim]) or 0
        for entry in schema.inputs
        for dim, size in enumerate(entry.shape)
        if isinstance(size, str) and (linear := LinearSize.parse(size)) is not None
    }
    return signature_of({axis: sizes[axis] for axis in schema.axes})


def _joined(one: Mapping[str, Array], other: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the range that holds two; by default it would be an average over time."""
    import numpy as np

    if not (one and other):
        return one or other
    low, high = np.minimum(one["min"], other["min"]), np.maximum(one["max"], other["max"])
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
