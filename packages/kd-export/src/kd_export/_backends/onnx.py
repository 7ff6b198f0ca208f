"""``.onnx``: run by onnxruntime with numpy, where there is neither torch nor kd_core.

Writing needs torch and onnxscript (see `onnx_operators`), and imports them when called. A name
that is both an input and an output makes an invalid file, so an output updated in place gets
another name inside the file.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from kd_export._errors import (
    DtypeMismatch,
    ExportError,
    NotExportable,
    kind_of,
    nearest,
    quoted,
    raised_as,
)
from kd_export._running.session import WEIGHTS, Direct, Reducer, Runner, picked, require
from kd_export._schema.derived import derived_onnx
from kd_export._schema.files import Number, contents, mapped, unused_name
from kd_export._schema.onnx_file import (
    check_external,
    companion,
    moved_in,
    moved_out,
    read_onnx_schema,
    schema_field,
    sealed,
    weights_digest,
)
from kd_export._schema.schema import Drawn, Entry, Schema, check_fit, completed, described

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnxruntime import InferenceSession, NodeArg, SessionOptions
    from torch import Tensor
    from torch.export import ExportedProgram

    Array = NDArray[np.generic]

LARGEST_INSIDE = 3 << 29
"""Bytes of weights that the file itself holds: a protobuf message ends at 2 GiB."""

_EXTRA = "onnx"
_ROUNDS = re.compile(rb"\x22.(?:Dynamic)?Quantize(?:Linear|MatMul|LSTM)", re.DOTALL)
"""An operator that rounds to integers, as a model names it: in field 4, which is text."""
_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_ITSELF = "model"
"""What a model calls its own file."""


_SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of characters, which are not text by themselves."""


def check_names(schema: Schema, strange: re.Pattern[str], name: str, other: str) -> None:
    """Refuse names of inputs and outputs that a format cannot hold.

    Raises:
        NotExportable: One has a character that is ``strange`` to it.
    """
    for entry in (*schema.inputs, *schema.outputs):
        found = strange.search(entry.wire)
        if found is not None:
            raise NotExportable(
                f"{name} cannot hold the character {found[0]!a} in the name of an entry.",
                key=entry.key,
                expected="text",
                got=found[0],
                hint=f"Rename the key, or save it as {other}.",
            )


class OnnxBackend:
    """Write and read ``.onnx`` files."""

    name = "ONNX"
    suffixes = (".onnx",)
    executes = False
    others = ("reference", "openvino", "tract")

    def __init__(self, threads: int | None = None, providers: Sequence[str] | None = None) -> None:
        self._threads = threads
        self._providers = providers

    def configured(self, threads: int | None, providers: Sequence[str] | None) -> OnnxBackend:
        """Return the same with so many threads a call, and by these execution providers."""
        runtime = require("onnxruntime", _EXTRA)
        known = runtime.get_available_providers()
        named = [providers] if isinstance(providers, str) else providers
        for name in named or ():
            if name not in known:
                close = nearest(str(name), known)
                raise ExportError(
                    f"expected execution providers of onnxruntime, got {name!r}; available here: "
                    f"{quoted(known)}.",
                    expected=tuple(known),
                    got=name,
                    hint="Install the onnxruntime that has it."
                    if close is None
                    else f"Did you mean `{close}`?",
                )
        return OnnxBackend(threads, None if named is None else [*named])

    def opinions(self, name: str, file: BinaryIO, schema: Schema) -> Mapping[str, Runner]:
        """Load a file whose weights are inside it in another runtime."""
        model = contents(file)
        check_external(model)
        named = _named(schema)
        found = opinions(name, bytes(model), named)
        return {setting: OtherRunner(run, named) for setting, run in found.items()}

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema out of the model's metadata, or derive it from the graph."""
        text = read_onnx_schema(file)
        return derived_onnx(file) if text is None else Schema.from_json(text)

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Name the tensors by wire name; an output that is named as an input gets a number."""
        known = str(getattr(require("onnxscript", _EXTRA), "__version__", "unknown"))
        check_names(schema, _SURROGATES, "ONNX", "`.pt2`")
        return replace(_named(schema), versions={**schema.versions, "onnxscript": known})

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Translate the program, name its tensors and axes, and write it with the schema.

        Weights of 1.5 GiB and more are written to a second file, named after the first.
        """
        require("onnx", _EXTRA)
        require("onnxscript", _EXTRA)
        from kd_export._backends.onnx_operators import translated, write_model

        data = path.with_name(companion(path.name))
        write_model(translated(program, schema), path, data)
        if data.exists() and data.stat().st_size < LARGEST_INSIDE:
            model, weights = mapped(path), mapped(data)
            path.unlink()  # what is mapped stays
            data.unlink()
            with path.open("wb") as file:
                file.writelines(moved_in(model, weights))
        schema = replace(schema, weights=weights_digest(mapped(path), mapped(data)))
        with path.open("ab") as file:
            file.write(schema_field(schema.to_json()))

    def seal(self, source: Path, schema: Schema, target: Path) -> None:
        """Write a model with another schema, and its digest; weights beside it go along."""
        model, beside = mapped(source), mapped(source.with_name(companion(source.name)))
        # A model that keeps its weights beside it names that file, so it keeps its name.
        if check_external(model, companion(target.name), len(beside)):
            target.with_name(companion(target.name)).write_bytes(beside)
        else:
            beside = memoryview(b"")
        own = replace(_named(schema), weights=weights_digest(model, beside))
        with target.open("wb") as file:
            file.writelines(sealed(model, own.to_json()))

    def reducer(
        self, source: Path, precision: str, samples: Sequence[Mapping[str, object]]
    ) -> Reducer:
        """Return what writes a float file with fewer bits."""
        require("onnx", _EXTRA)
        require("onnx_ir", _EXTRA)
        require("onnxruntime", _EXTRA)
        from kd_export._backends.onnx_precision import OnnxReducer

        return OnnxReducer(source, precision, samples)

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> OnnxRunner:
        """Start an onnxruntime session on the file's bytes, and on those of the file beside it."""
        runtime = require("onnxruntime", _EXTRA)
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.load_model_format", "ONNX")
        if schema.precision is not None and schema.precision.name == WEIGHTS:
            # The weights are widened once, as the file is loaded, and not at each call.
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        model, name = contents(file), companion(path.name)
        weights = mapped(path.with_name(name))
        # What is checked is what is run: the message is a copy, only numbers are read where they
        # are, here or in the file beside it.
        beside = check_external(model, name, len(weights))
        if not beside:
            name, weights = _ITSELF, model
        message = bytes(model) if beside else moved_out(model, name)
        if check_external(message, name, len(weights)):
            options.add_external_initializers_from_files_in_memory(
                [name], [weights], [len(weights)]
            )
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        session = _started(runtime, message, options, schema, self._providers)
        digest = weights_digest(model, weights if beside else b"")
        parts = ((schema.inputs, session.get_inputs()), (schema.outputs, session.get_outputs()))
        named = _named(schema)
        if not schema.derived:
            check_fit(
                tuple((len(e), *map(described, e)) for e in (named.inputs, named.outputs)),
                tuple((len(found), *map(_found, found, e)) for e, found in parts),
            )
        return OnnxRunner(session, named, digest, rounds=_ROUNDS.search(message) is not None)

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Return the digest of all that was loaded but the schema."""
        assert isinstance(runner, OnnxRunner)
        return runner.digest


backend = OnnxBackend()


def _started(
    runtime: ModuleType,
    model: bytes,
    options: SessionOptions,
    schema: Schema,
    providers: Sequence[str] | None,
) -> InferenceSession:
    hint = "It may be damaged, or need a newer onnxruntime."
    narrow = [e for e in (*schema.inputs, *schema.outputs) if e.dtype in _NARROW]
    if narrow:
        hint = (
            f"`{narrow[0].wire}` is {narrow[0].dtype}, for which onnxruntime lacks most operators. "
            "Export the module in float32, `module.float()`, or save it as `.pt2`."
        )
    with raised_as(ExportError, "onnxruntime cannot load the file", hint):
        return runtime.InferenceSession(
            model,
            options,
            providers=runtime.get_available_providers() if providers is None else [*providers],
            enable_fallback=0,  # a second try with fewer providers prints the first error
        )


class ArrayRunner:
    """What all runners share whose arrays are numpy's."""

    direct: Direct | None = None

    def adapt(self, value: object, entry: Entry) -> Array:
        """Check the dtype of an array or tensor; make it a contiguous numpy array."""
        import numpy as np

        torch = sys.modules.get("torch")
        conversion = f".astype('{entry.dtype}')"
        if torch is not None and isinstance(value, torch.Tensor):
            value = _numpy_of(value, entry)
            conversion = f".to(torch.{entry.dtype})"
        if not isinstance(value, np.ndarray | np.generic):
            raise DtypeMismatch(
                f"expected an array {entry.describe()} for `{entry.wire}`, got {kind_of(value)}.",
                key=entry.key,
                expected=entry.dtype,
                got=type(value).__name__,
                hint="Convert it with `numpy.asarray`.",
            )
        if value.dtype.name != entry.dtype:
            raise DtypeMismatch(
                f"expected {entry.describe()} for `{entry.wire}`, got dtype {value.dtype.name}.",
                key=entry.key,
                expected=entry.dtype,
                got=value.dtype.name,
                hint=f"Convert it with `{conversion}`.",
            )
        if isinstance(value, np.ma.MaskedArray):
            raise DtypeMismatch(
                f"expected an array with all its numbers for `{entry.wire}`, got a masked array.",
                key=entry.key,
                expected=entry.dtype,
                got=type(value).__name__,
                hint="Replace the masked numbers, for example with `.filled(0)`.",
            )
        # Runtimes read bytes in the order of the machine, and bools as 0 or 1.
        native = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        if entry.dtype == "bool":
            native = native.view("uint8") != 0
        return native.reshape(value.shape)

    def restore(self, array: object, like: object) -> object:
        """Return a tensor for a tensor, an array for an array."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(like, torch.Tensor):
            return torch.from_numpy(array)
        return array

    def build(self, drawn: Drawn) -> object:
        """Build an array of drawn numbers."""
        import numpy as np

        return np.array(drawn.numbers, dtype=drawn.dtype).reshape(drawn.shape)

    def numbers(self, array: object, positions: Sequence[int]) -> list[Number]:
        """Read numbers out of an array."""
        import numpy as np

        flat = np.asarray(array).reshape(-1)
        return [flat[position].item() for position in positions]


def refuse_providers(providers: object, name: str) -> None:
    """Refuse execution providers for another runtime.

    Raises:
        ExportError: Some are given.
    """
    if providers is not None:
        raise ExportError(
            f"`providers` cannot be combined with {name}: they are those of onnxruntime.",
            got=providers,
            hint="Leave it out: a file runs on the CPU.",
        )


INTEGERS = "a program on integers"
"""What makes numbers of NaN where it is rounded."""


def refuse_nan(array: Any, entry: Entry, what: str) -> None:
    """Refuse NaN in an input of what makes numbers of it.

    Args:
        array: An array, or a tensor.
        entry: The input.
        what: The runtime, or `INTEGERS`.

    Raises:
        ExportError: The array holds NaN.
    """
    if "float" in entry.dtype and bool((array != array).any()):  # as NaN alone is
        raise ExportError(
            f"`{entry.wire}` holds NaN, which {what} takes for a number.",
            key=entry.key,
            got="NaN",
            hint="Replace it before, as by `numpy.nan_to_num`, or save the program in float as "
            "`.onnx`.",
        )


class OnnxRunner(ArrayRunner):
    """Run a model by onnxruntime, on numpy arrays.

    A model that rounds to integers makes numbers of NaN, such as the lowest that it knows, so it
    is refused there.
    """

    def __init__(
        self, session: InferenceSession, schema: Schema, digest: str, *, rounds: bool
    ) -> None:
        self.digest = digest
        self._rounds = rounds
        self._session = session
        self._inputs = [entry.name for entry in schema.inputs]
        self._outputs = [entry.name for entry in schema.outputs]

    def adapt(self, value: object, entry: Entry) -> Array:
        """Check the dtype of an array or tensor, and that it holds no NaN if that gets lost."""
        array = super().adapt(value, entry)
        if self._rounds:
            refuse_nan(array, entry, INTEGERS)
        return array

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on arrays in order; ``names`` limits what is computed."""
        wanted = self._outputs if names is None else list(names)
        inputs = dict(zip(self._inputs, arrays, strict=True))
        results: list[object] = self._session.run(wanted, inputs)
        return results


class OtherRunner(ArrayRunner):
    """Run a model by a function of another runtime, on numpy arrays."""

    def __init__(
        self, function: Callable[[Sequence[object]], Sequence[object]], schema: Schema
    ) -> None:
        self._function = function
        self._schema = schema

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on arrays in order; ``names`` picks among the outputs."""
        return picked(self._schema, self._function(arrays), names)


def _numpy_of(value: Tensor, entry: Entry) -> object:
    """Return the numbers of a tensor as an array; refuse one that has none, or not as numpy's."""
    try:
        return value.detach().cpu().resolve_neg().resolve_conj().numpy()
    except (TypeError, RuntimeError) as error:
        raise DtypeMismatch(
            f"expected {entry.describe()} for `{entry.wire}`, got what numpy cannot hold: {error}.",
            key=entry.key,
            expected=entry.dtype,
            got=f"{value.dtype} {value.layout} on {value.device}",
            hint=f"Give a dense tensor with data, or an array of dtype {entry.dtype}.",
        ) from error


def _named(schema: Schema) -> Schema:
    """Return the schema with the names that the tensors have in the file."""
    if schema.derived:
        return schema
    names: list[str] = []
    for entry in (*schema.inputs, *schema.outputs):
        names.append(unused_name(entry.wire, names))
    entries = [
        replace(entry, name=name)
        for entry, name in zip((*schema.inputs, *schema.outputs), names, strict=True)
    ]
    count = len(schema.inputs)
    return replace(schema, inputs=tuple(entries[:count]), outputs=tuple(entries[count:]))


_TYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}
"""What onnxruntime calls otherwise than torch."""


def _found(value: NodeArg, entry: Entry) -> tuple[object, ...]:
    """Return name, dtype and sizes of an input or output of the model."""
    dtype = _TYPES.get(value.type, value.type.removeprefix("tensor(").removesuffix(")"))
    return completed(value.name, dtype, value.shape, entry)


# Further runtimes that read ONNX files, for a second opinion on what a file computes.
#
# Knows how each loads a model and runs it; must not know keys, or how results are compared.

Run = Callable[[Sequence[object]], Sequence[object]]
"""Runs a model on arrays in the order of the file, and gives all outputs in theirs."""
Opinions = dict[str, Run]
"""By what was set in the runtime: nothing first, then what makes it compute as the file says."""


def _reference(model: bytes, schema: Schema) -> Opinions:
    """Use the evaluator of the package onnx itself, which computes by numpy."""
    require("onnx", "onnx")
    evaluator = require("onnx.reference", "onnx").ReferenceEvaluator(model)
    names = [entry.name for entry in schema.inputs]

    def run(arrays: Sequence[object]) -> Sequence[object]:
        results: list[object] = evaluator.run(None, dict(zip(names, arrays, strict=True)))
        return results

    return {"": run}


def _openvino(model: bytes, schema: Schema) -> Opinions:
    """Use OpenVINO, which computes in 16 bits on some processors if nothing is set."""
    core = require("openvino", "openvino").Core()

    def compiled(settings: dict[str, str]) -> Run:
        request = core.compile_model(core.read_model(model, b""), "CPU", settings)
        names = [entry.name for entry in schema.inputs]

        def run(arrays: Sequence[object]) -> Sequence[object]:
            results = request(dict(zip(names, arrays, strict=True)))
            return [results[place] for place in range(len(schema.outputs))]

        return run

    wide = {"INFERENCE_PRECISION_HINT": "f32"}
    return {"": compiled({}), "INFERENCE_PRECISION_HINT=f32": compiled(wide)}


def _tract(model: bytes, schema: Schema) -> Opinions:
    """Use tract, a runtime in Rust."""
    tract = require("tract", "tract")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model)
        runnable = tract.onnx().load(str(path)).into_model().into_runnable()

    def run(arrays: Sequence[object]) -> Sequence[object]:
        return [value.to_numpy() for value in runnable.run(list(arrays))]

    return {"": run}


RUNTIMES: dict[str, Callable[[bytes, Schema], Opinions]] = {
    "reference": _reference,
    "openvino": _openvino,
    "tract": _tract,
}


def opinions(name: str, model: bytes, schema: Schema) -> Opinions:
    """Load a model in another runtime.

    Raises:
        BackendMissing: The runtime is not installed.
        ExportError: It cannot load the model.
    """
    hint = "It may lack an operator of the model."
    with raised_as(ExportError, f"{name} cannot load the file", hint):
        return RUNTIMES[name](model, schema)
