"""``.pte``: run by ExecuTorch on phones and small boards, with portable kernels.

ExecuTorch plans memory for the largest sizes, so each axis needs a maximum. Its lowering freezes
what `chunk` and `split` give at the size of the example, so they are taken apart to slices first.
The schema is what a second method of the program gives, and is read without executorch. A program
says itself where in memory its kernels write, and the runtime believes it; so a file is opened
only where it is trusted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from kd_export._errors import ExportError, NotExportable, quoted, raised_as
from kd_export._running.backend import Runner, picked, require
from kd_export._running.loading import check_digest
from kd_export._running.silence import muted
from kd_export._schema.executorch_file import (
    SCHEMA_METHOD,
    check_methods,
    read_executorch_schema,
    schema_place,
    weights_digest,
)
from kd_export._schema.schema import Entry, Schema, check_fit
from kd_export._schema.shapes import fixed

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.export import ExportedProgram

_EXTRA = "executorch"
_METHOD = "forward"
_UNKNOWN_DIGEST = "0" * 64
"""What stands for the digest until the rest of the file is known."""

_DTYPES = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    11: "bool",
    15: "bfloat16",
}
"""The dtypes of torch by their number in a file."""


class ExecuTorchBackend:
    """Write and read ``.pte`` files."""

    name = "ExecuTorch"
    suffixes = (".pte",)
    executes = True

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema out of the method that gives it."""
        return Schema.from_json(read_executorch_schema(file))

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Check that each axis has a maximum."""
        _required("executorch.exir")
        endless = [name for name, axis in schema.axes.items() if axis.max is None]
        if endless:
            ranges = {name: (axis.min, axis.max or 64) for name, axis in schema.axes.items()}
            raise NotExportable(
                f"ExecuTorch plans memory for the largest sizes, and {quoted(endless)} has none.",
                expected="a maximum for each axis",
                got={name: str(schema.axes[name]) for name in endless},
                hint=f"Pass a range to `export`, such as `dynamic={ranges}`.",
            )
        return replace(schema, versions={**schema.versions, _EXTRA: version(_EXTRA)})

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Lower the program to portable kernels, and add the schema as a method."""
        exir = cast("_Exir", _required("executorch.exir"))
        text = replace(schema, weights=_UNKNOWN_DIGEST).to_json()
        hint = "Save it as `.pt2` or `.onnx`."
        with raised_as(NotExportable, "ExecuTorch cannot express the program", hint), _quiet():
            lowered = exir.to_edge_transform_and_lower(
                _sliced(program),
                constant_methods={SCHEMA_METHOD: text},
                compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
            ).to_executorch()
        _check_kernels(lowered)
        path.write_bytes(lowered.buffer)
        with path.open("r+b") as file:
            known = replace(schema, weights=weights_digest(file)).to_json()
            file.seek(schema_place(file)[0])
            file.write(known.encode())

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> Runner:
        """Load the program, once its bytes are known to be those that were exported."""
        check_methods(file)
        check_digest(weights_digest(file), schema, path)
        runtime = cast("_Module", _required("executorch.runtime"))
        file.seek(0)
        content = file.read()
        known = schema.versions.get(_EXTRA, "unknown")
        hint = f"It was written by ExecuTorch {known}: install that version."
        with raised_as(ExportError, "ExecuTorch cannot load the file", hint):
            loaded = runtime.Runtime.get().load_program(
                content, verification=runtime.Verification.InternalConsistency
            )
            method = loaded.load_method(_METHOD)
        check_fit(_described(schema), _found(method.metadata, schema))
        return _runner(method, schema, content)

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Return ``None``: the digest is checked before the program is loaded."""
        return None


backend = ExecuTorchBackend()


def _required(module: str) -> object:
    """Import a part of executorch, which warns of itself."""
    with _quiet():
        return require(module, _EXTRA)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what executorch, and what it imports, logs and prints."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with muted():
            yield
    finally:
        logging.disable(level)


def _sliced(program: ExportedProgram) -> ExportedProgram:
    """Lower a program to core operators, with slices in place of chunks."""
    import torch

    from kd_export._running.recurrent import mended_layers

    aten = torch.ops.aten
    table: dict[torch._ops.OperatorBase, Callable[..., object]] = (
        torch.export.default_decompositions()
    )
    table |= dict.fromkeys((aten.chunk.default, aten.unsafe_chunk.default), _chunks)
    table |= dict.fromkeys((aten.split.Tensor, aten.unsafe_split.Tensor), _parts)
    table[aten.split_with_sizes.default] = _pieces
    with torch.no_grad(), mended_layers(program):
        sliced: ExportedProgram = program.run_decompositions(table)
    return sliced


def _chunks(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    return _parts(x, -(-x.shape[dim] // chunks), dim)


def _parts(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    whole = int(x.shape[dim])
    starts = range(0, whole, size)
    return _pieces(x, [min(size, whole - start) for start in starts], dim)


def _pieces(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    results, start = [], 0
    for size in sizes:
        results.append(x.narrow(dim, start, size))
        start += size
    return results


def _check_kernels(lowered: _Lowered) -> None:
    """Refuse a program that calls what the portable kernels do not have."""
    runtime = cast("_Module", _required("executorch.runtime"))
    known = runtime.Runtime.get().operator_registry.operator_names
    plans = lowered.executorch_program.execution_plan
    called = {f"{one.name}.{one.overload}".rstrip(".") for p in plans for one in p.operators}
    missing = sorted(called - set(known))
    if missing:
        raise NotExportable(
            f"ExecuTorch has no portable kernel for {quoted(missing)}.",
            expected="operators that the portable kernels serve",
            got=tuple(missing),
            hint="Replace the operator in the module, or save it as `.pt2` or `.onnx`.",
        )


def _described(schema: Schema) -> tuple[object, ...]:
    return tuple(
        (len(entries), *((entry.dtype, *fixed(entry.shape)) for entry in entries))
        for entries in (schema.inputs, schema.outputs)
    )


def _found(method: _Metadata, schema: Schema) -> tuple[object, ...]:
    """Return dtype and sizes of each input and output; a dynamic one has its largest size."""
    parts = (
        (method.num_inputs(), method.input_tensor_meta, schema.inputs),
        (method.num_outputs(), method.output_tensor_meta, schema.outputs),
    )
    return tuple(
        (count, *(_tensor(meta(i), entry) for i, entry in enumerate(entries[:count])))
        for count, meta, entries in parts
    )


def _tensor(meta: _TensorMeta, entry: Entry) -> tuple[object, ...]:
    sizes, known = meta.sizes(), fixed(entry.shape)
    if len(sizes) == len(known):
        sizes = tuple(None if k is None else s for s, k in zip(sizes, known, strict=True))
    return _DTYPES.get(meta.dtype(), str(meta.dtype())), *sizes


def _runner(method: _Method, schema: Schema, content: bytes) -> Runner:
    """Build the runner; its class needs torch, which reading a schema does not.

    It keeps the bytes of the file, which the method reads its weights from.
    """
    from kd_export._running.torch_runner import TensorRunner

    class ExecuTorchRunner(TensorRunner):
        """Execute a method on tensors in the order of the schema."""

        held = content

        def __call__(
            self, arrays: Sequence[object], names: Sequence[str] | None = None
        ) -> Sequence[object]:
            return picked(schema, method.execute(list(arrays)), names)

    return ExecuTorchRunner()


class _TensorMeta(Protocol):
    def sizes(self) -> tuple[int | None, ...]: ...
    def dtype(self) -> int: ...


class _Metadata(Protocol):
    def num_inputs(self) -> int: ...
    def num_outputs(self) -> int: ...
    def input_tensor_meta(self, index: int) -> _TensorMeta: ...
    def output_tensor_meta(self, index: int) -> _TensorMeta: ...


class _Method(Protocol):
    metadata: _Metadata

    def execute(self, inputs: list[object]) -> list[object]: ...


class _Loaded(Protocol):
    def load_method(self, name: str) -> _Method: ...


class _Registry(Protocol):
    operator_names: set[str]


class _Runtime(Protocol):
    operator_registry: _Registry

    def load_program(self, content: bytes, *, verification: object) -> _Loaded: ...


class _RuntimeClass(Protocol):
    def get(self) -> _Runtime: ...


class _Levels(Protocol):
    InternalConsistency: object


class _Module(Protocol):
    Runtime: _RuntimeClass
    Verification: _Levels


class _Operator(Protocol):
    name: str
    overload: str


class _Plan(Protocol):
    operators: list[_Operator]


class _Emitted(Protocol):
    execution_plan: list[_Plan]


class _Lowered(Protocol):
    buffer: bytes
    executorch_program: _Emitted


class _Edge(Protocol):
    def to_executorch(self) -> _Lowered: ...


class _Exir(Protocol):
    def EdgeCompileConfig(  # noqa: N802  # executorch's name
        self, *, _check_ir_validity: bool
    ) -> object: ...
    def to_edge_transform_and_lower(
        self,
        program: ExportedProgram,
        *,
        constant_methods: dict[str, object],
        compile_config: object,
    ) -> _Edge: ...
