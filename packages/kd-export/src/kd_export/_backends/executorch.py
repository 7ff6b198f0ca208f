"""``.pte``: run by ExecuTorch on phones and small boards, by XNNPACK or with portable kernels.

XNNPACK is a delegate: it takes parts of a program as data of its own, which ExecuTorch hands it.
A file may hold such data of XNNPACK, where its schema says so, and of no other delegate: what one
does with its data, code included, is known to it alone.

ExecuTorch plans memory for the largest sizes, so each axis needs a maximum. Its lowering freezes
what `chunk` and `split` give at the size of the example, so they are taken apart to slices first.
A program says itself where in memory its kernels write, and the runtime believes it; so a file is
opened only where it is trusted.

The schema is the text that a second method of the program, `SCHEMA_METHOD`, gives. It is read
without executorch out of the flatbuffer that the file is: the wire format is the one of the
FlatBuffers documentation on internals, the numbers of the fields are those of ExecuTorch's
``program.fbs``. Only the parts that are asked for are read, so large weights cost nothing.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

from kd_export._backends.onnx import INTEGERS, refuse_nan
from kd_export._console import muted_tool
from kd_export._errors import (
    BackendMissing,
    ExportError,
    NotExportable,
    UntrustedArtifact,
    quoted,
    raised_as,
)
from kd_export._running.loading import check_digest
from kd_export._running.session import (
    KERNELS,
    PORTABLE,
    PRECISIONS,
    XNNPACK,
    Runner,
    picked,
    require,
)
from kd_export._schema.files import check_schema_size, foreign
from kd_export._schema.schema import Entry, Schema, check_fit, fixed

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from executorch.exir.backend.partitioner import Partitioner
    from executorch.extension.pybindings.portable_lib import MethodMeta, TensorInfo
    from executorch.runtime import Method
    from torch import Tensor, fx
    from torch.export import ExportedProgram
    from torch.fx.passes.infra.pass_base import PassBase, PassResult


SCHEMA_METHOD = "kd_export"

_IDENTIFIER, _IDENTIFIER_AT = b"ET", 4
_PLANS, _DELEGATE_DATA, _SEGMENTS = 1, 3, 4
_NAME, _VALUES, _DELEGATES = 0, 2, 7
_DELEGATE_ID, _DELEGATE_PLACE, _DELEGATE_OPTIONS = 0, 1, 2
_LOCATION, _INDEX, _CONTENT = 0, 1, 0
_OFFSET, _SIZE = 0, 1
_EXTENDED_AT, _EXTENDED, _SEGMENTS_AT = 8, b"eh00", 24
_VALUE_TYPE, _VALUE, _TEXT = 0, 1, 0
_STRING = 6
_MOST_METHODS = 64
_MOST_DELEGATES = 1 << 16
_LONGEST_NAME = 1 << 10
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A flatbuffer in a file; each read is checked against its end."""

    file: BinaryIO
    end: int

    def read(self, position: int, size: int) -> bytes:
        if not (0 <= position <= self.end - size):
            raise EOFError("an offset leads beyond the end")
        self.file.seek(position)
        return self.file.read(size)

    def number(self, position: int, size: int = 4, *, signed: bool = False) -> int:
        return int.from_bytes(self.read(position, size), "little", signed=signed)

    def target(self, position: int) -> int:
        """Return where the table, vector or text is that an offset leads to."""
        return position + self.number(position)

    def field(self, table: int, number: int) -> int | None:
        """Return where a field of a table is, ``None`` where it has its default."""
        names = table - self.number(table, signed=True)
        place = 4 + 2 * number
        if place + 2 > self.number(names, 2):
            return None
        offset = self.number(names + place, 2)
        return table + offset if offset else None

    def tables(self, table: int, number: int, most: int) -> list[int]:
        """Return where the tables of a vector are."""
        place = self.field(table, number)
        if place is None:
            return []
        start = self.target(place)
        count = self.number(start)
        if count > most:
            raise EOFError(f"it has {count:,} parts of one kind")
        return [self.target(start + 4 + 4 * index) for index in range(count)]

    def count(self, table: int, number: int) -> int:
        """Return the length of a vector."""
        place = self.field(table, number)
        return 0 if place is None else self.number(self.target(place))

    def text(self, table: int, number: int) -> tuple[int, int]:
        """Return where the bytes of a text are, and how many."""
        place = self.field(table, number)
        if place is None:
            return 0, 0
        start = self.target(place)
        return start + 4, self.number(start)


def read_executorch_schema(file: BinaryIO) -> str:
    """Read the schema text out of a ``.pte`` file."""
    start, size = schema_place(file)
    check_schema_size(size)
    file.seek(start)
    try:
        return file.read(size).decode()
    except UnicodeDecodeError as error:
        raise _damaged(error) from error


def schema_place(file: BinaryIO) -> tuple[int, int]:
    """Return where the bytes of the schema are in a ``.pte`` file, and how many.

    Raises:
        ExportError: It is not a whole program, or carries no schema.
    """
    buffer = _Buffer(file, file.seek(0, os.SEEK_END))
    try:
        for plan in _plans(buffer):
            start, size = buffer.text(plan, _NAME)
            if buffer.read(start, min(size, _LONGEST_NAME)) != SCHEMA_METHOD.encode():
                continue
            (value,) = buffer.tables(plan, _VALUES, most=1)
            kind, place = buffer.field(value, _VALUE_TYPE), buffer.field(value, _VALUE)
            if kind is None or place is None or buffer.number(kind, 1) != _STRING:
                raise EOFError("its schema is not a text")
            start, size = buffer.text(buffer.target(place), _TEXT)
            if start + size > buffer.end:
                raise EOFError("an offset leads beyond the end")
            return start, size
    except (EOFError, ValueError) as error:
        raise _damaged(error) from error
    raise foreign(".pte")


def check_methods(file: BinaryIO, *, delegated: bool = False) -> None:
    """Refuse a program that holds more than kd_export writes.

    Args:
        file: The program.
        delegated: Whether its schema says that XNNPACK runs parts of it.

    Raises:
        UntrustedArtifact: It holds further methods, or data for a delegate that is not XNNPACK or
            that its schema does not name.
        ExportError: It is not a whole program.
    """
    buffer = _Buffer(file, file.seek(0, os.SEEK_END))
    try:
        plans = list(_plans(buffer))
        parts = [part for p in plans for part in buffer.tables(p, _DELEGATES, _MOST_DELEGATES)]
        # XNNPACK's data are in segments behind the program; data inside it belong to none.
        strange = buffer.count(buffer.target(0), _DELEGATE_DATA)
        strange += sum(not delegated or not _by_xnnpack(buffer, part) for part in parts)
    except EOFError as error:
        raise _damaged(error) from error
    if strange or len(plans) != 2:
        raise UntrustedArtifact(
            "the program holds code for another back end, or further methods.",
            expected="one method and the schema",
            got=(len(plans), strange),
            hint="Ask for a file that `kd_export.save` wrote.",
        )


_XNNPACK = "XnnpackBackend"
_XNNPACK_HEADER, _XNNPACK_MAGIC = 30, b"XH00"


def _by_xnnpack(buffer: _Buffer, part: int) -> bool:
    """Decide whether the data of a delegate are a whole program of XNNPACK, as its header says."""
    start, size = buffer.text(part, _DELEGATE_ID)
    if buffer.read(start, min(size, _LONGEST_NAME)) != _XNNPACK.encode():
        return False
    place = buffer.field(part, _DELEGATE_PLACE)
    if place is None or buffer.count(part, _DELEGATE_OPTIONS):
        return False
    place = buffer.target(place)
    location, index = buffer.field(place, _LOCATION), buffer.field(place, _INDEX)
    if location is None or buffer.number(location, 1) != 1:  # a segment
        return False
    begin, size = _segment(buffer, 0 if index is None else buffer.number(index))
    header = buffer.read(begin, min(size, _XNNPACK_HEADER))
    if len(header) < _XNNPACK_HEADER or header[4:8] != _XNNPACK_MAGIC:
        return False
    graph, length, data = (int.from_bytes(header[i : i + 4], "little") for i in (10, 14, 18))
    weights = int.from_bytes(header[22:30], "little")
    return _XNNPACK_HEADER <= graph <= graph + length <= data <= data + weights <= size


def _segment(buffer: _Buffer, index: int) -> tuple[int, int]:
    """Return where a segment of the file begins, and how long it is."""
    place = buffer.field(buffer.target(0), _SEGMENTS)
    if place is None or index >= buffer.number(buffer.target(place)):
        raise EOFError("an offset leads beyond the end")
    table = buffer.target(buffer.target(place) + 4 + 4 * index)
    offset, length = buffer.field(table, _OFFSET), buffer.field(table, _SIZE)
    begin = 0 if offset is None else buffer.number(offset, 8)
    size = 0 if length is None else buffer.number(length, 8)
    base = buffer.number(_SEGMENTS_AT, 8)
    if buffer.read(_EXTENDED_AT, 4) != _EXTENDED or base + begin + size > buffer.end:
        raise EOFError("an offset leads beyond the end")
    return base + begin, size


def weights_digest(file: BinaryIO) -> str:
    """Compute the SHA-256 of a ``.pte`` file, weights included, without its schema."""
    start, size = schema_place(file)
    end = file.seek(0, os.SEEK_END)
    digest = hashlib.sha256()
    for begin, stop in ((0, start), (start + size, end)):
        file.seek(begin)
        for position in range(begin, stop, _CHUNK):
            digest.update(file.read(min(_CHUNK, stop - position)))
    return digest.hexdigest()


def _plans(buffer: _Buffer) -> Iterator[int]:
    """Iterate over the methods of a program."""
    if buffer.read(_IDENTIFIER_AT, len(_IDENTIFIER)) != _IDENTIFIER:
        raise EOFError("it does not begin as one")
    yield from buffer.tables(buffer.target(0), _PLANS, _MOST_METHODS)


def _damaged(error: Exception) -> ExportError:
    return ExportError(
        f"the file is not a whole ExecuTorch program: {error}.", hint="It may be truncated."
    )


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
    precisions = PRECISIONS

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema out of the method that gives it."""
        return Schema.from_json(read_executorch_schema(file))

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Check that each axis has a maximum; choose what runs the program."""
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
        asked = schema.versions.get(KERNELS)
        if asked == XNNPACK and not _has_xnnpack():
            raise BackendMissing(
                "the installed ExecuTorch is built without XNNPACK.",
                expected=_XNNPACK,
                hint=f"Pass `{KERNELS}='{PORTABLE}'`.",
            )
        kernels = asked or (XNNPACK if _has_xnnpack() else PORTABLE)
        versions = {**schema.versions, _EXTRA: version(_EXTRA), KERNELS: kernels}
        return replace(schema, versions=versions)

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Lower the program, and add the schema as a method."""
        exir = _required("executorch.exir")
        text = replace(schema, weights=_UNKNOWN_DIGEST).to_json()
        delegated = schema.versions[KERNELS] == XNNPACK
        hint = f"Pass `{KERNELS}='{PORTABLE}'`, or s" if delegated else "S"
        hint += "ave it as `.pt2` or `.onnx`."
        with raised_as(NotExportable, "ExecuTorch cannot express the program", hint), muted_tool():
            parts = [_partitioner()] if delegated else []
            sliced = _sliced(program, parts)
            planned = _planned(sliced.range_constraints)
            lowered = exir.to_edge_transform_and_lower(
                sliced,
                partitioner=parts,
                constant_methods={SCHEMA_METHOD: text},
                compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
            ).to_executorch(exir.ExecutorchBackendConfig(sym_shape_eval_pass=planned))
        _check_kernels(lowered)
        path.write_bytes(lowered.buffer)
        with path.open("r+b") as file:
            known = replace(schema, weights=weights_digest(file)).to_json()
            file.seek(schema_place(file)[0])
            file.write(known.encode())

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> Runner:
        """Load the program, once its bytes are known to be those that were exported."""
        check_methods(file, delegated=schema.versions.get(KERNELS) == XNNPACK)
        check_digest(weights_digest(file), schema, path)
        runtime = _required("executorch.runtime")
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


def _partitioner() -> Partitioner:
    """Return what chooses the parts of a program that XNNPACK runs."""
    module = _required("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    return module.XnnpackPartitioner()


def _has_xnnpack() -> bool:
    runtime = _required("executorch.runtime")
    return _XNNPACK in runtime.Runtime.get().backend_registry.registered_backend_names


def _required(module: str) -> ModuleType:
    """Import a part of executorch, which warns of itself."""
    with muted_tool():
        return require(module, _EXTRA)


def _sliced(program: ExportedProgram, delegates: Sequence[Partitioner]) -> ExportedProgram:
    """Lower a program to core operators and those of delegates, with slices in place of chunks."""
    import torch

    from kd_export._running.recurrent import layer_decompositions

    aten = torch.ops.aten
    table = torch.export.default_decompositions()
    for delegate in delegates:
        for operator in delegate.ops_to_not_decompose(program)[0]:
            table.pop(operator, None)
        table.update({aten.gelu.default: _gelu, aten.prelu.default: _prelu})
    # Not by `|=`, which writes to a part of this table that torch does not look at.
    table.update(dict.fromkeys((aten.chunk.default, aten.unsafe_chunk.default), _chunks))
    table.update(dict.fromkeys((aten.split.Tensor, aten.unsafe_split.Tensor), _parts))
    table[aten.split_with_sizes.default] = _pieces
    table.update(layer_decompositions(program))
    with torch.no_grad():
        sliced: ExportedProgram = program.run_decompositions(table)
    return sliced


def _planned(ranges: Mapping[object, object]) -> PassBase:
    """Return the pass that sets the largest sizes, for which memory is planned.

    What ran before it may have narrowed the ranges that the symbols of sizes carry, such as by the
    question whether a batch has the size of its maximum.
    """
    import torch
    from torch.fx.passes.infra.pass_base import PassBase

    from kd_export._torch_private import set_ranges

    passes = _required("executorch.exir.passes.sym_shape_eval_pass")
    plan: PassBase = passes.ConstraintBasedSymShapeEvalPass()

    class Planned(PassBase):
        def call(self, graph_module: fx.GraphModule) -> PassResult | None:
            for node in graph_module.graph.nodes:
                value = node.meta.get("val")
                sizes: Iterable[object] = value.shape if isinstance(value, torch.Tensor) else ()
                for size in sizes:
                    if isinstance(size, torch.SymInt):
                        set_ranges(size, ranges)
            return plan(graph_module)

    return Planned()


def _chunks(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    return _parts(x, -(-x.shape[dim] // chunks), dim)


def _parts(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    whole = int(x.shape[dim])
    starts = range(0, whole, size)
    return _pieces(x, [min(size, whole - start) for start in starts], dim)


def _gelu(x: Tensor, *, approximate: str = "none") -> object:
    """Take the approximation by tanh apart: XNNPACK computes GELU itself in its place."""
    if approximate != "tanh":
        return NotImplemented
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())


def _prelu(x: Tensor, weight: Tensor) -> object:
    """Take PReLU apart, which XNNPACK has for images only."""
    if x.dim() == 4:
        return NotImplemented
    import torch

    slopes = weight.reshape(-1, *[1] * (x.dim() - 2)) if weight.numel() > 1 else weight
    return torch.where(x > 0, x, slopes * x)


def _pieces(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    results, start = [], 0
    for size in sizes:
        results.append(x.narrow(dim, start, size))
        start += size
    return results


def _check_kernels(lowered: ExecutorchProgramManager) -> None:
    """Refuse a program that calls what the portable kernels do not have."""
    runtime = _required("executorch.runtime")
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


def _found(method: MethodMeta, schema: Schema) -> tuple[object, ...]:
    """Return dtype and sizes of each input and output; a dynamic one has its largest size."""
    parts = (
        (method.num_inputs(), method.input_tensor_meta, schema.inputs),
        (method.num_outputs(), method.output_tensor_meta, schema.outputs),
    )
    return tuple(
        (count, *(_tensor(meta(i), entry) for i, entry in enumerate(entries[:count])))
        for count, meta, entries in parts
    )


def _tensor(meta: TensorInfo, entry: Entry) -> tuple[object, ...]:
    sizes, known = meta.sizes(), fixed(entry.shape)
    if len(sizes) == len(known):
        sizes = tuple(None if k is None else s for s, k in zip(sizes, known, strict=True))
    return _DTYPES.get(meta.dtype(), str(meta.dtype())), *sizes


def _runner(method: Method, schema: Schema, content: bytes) -> Runner:
    """Build the runner; its class needs torch, which reading a schema does not.

    A program on integers makes numbers of NaN, so that is refused there. The runner keeps the bytes
    of the file, which the method reads its weights from.
    """
    import torch

    from kd_export._running.torch_runner import TensorRunner

    class ExecuTorchRunner(TensorRunner):
        """Execute a method on tensors in the order of the schema."""

        held = content

        def adapt(self, value: object, entry: Entry) -> Tensor:
            tensor = super().adapt(value, entry)
            if schema.precision is not None and schema.precision.loses_nan:
                refuse_nan(tensor, entry, INTEGERS)
            return tensor

        def __call__(
            self, arrays: Sequence[object], names: Sequence[str] | None = None
        ) -> Sequence[object]:
            # The runtime takes tensors of that very class: no parameters.
            tensors = map(torch.as_tensor, arrays)
            plain = [tensor.detach().as_subclass(torch.Tensor) for tensor in tensors]
            return picked(schema, method.execute(plain), names)

    return ExecuTorchRunner()
