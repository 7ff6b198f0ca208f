"""Running an exported program on tensors.

Serves the ``.pt2`` backend, and programs that were never written to a file.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from kd_export._errors import DtypeMismatch, kind_of
from kd_export._running.backend import Direct, picked
from kd_export._running.straight_line import StraightLine
from kd_export._schema.json_values import Number
from kd_export._schema.schema import Entry, Schema
from kd_export._schema.vectors import Drawn

CHUNK = 1 << 24
"""Bytes that are hashed at once: ctypes has no array of 2 GiB."""


class TensorRunner:
    """What all runners share whose arrays are tensors."""

    direct: Direct | None = None

    def adapt(self, value: object, entry: Entry) -> object:
        """Check that the value is a tensor of the dtype; make it contiguous."""
        if not isinstance(value, Tensor):
            raise DtypeMismatch(
                f"expected a tensor {entry.describe()} for `{entry.wire}`, got {kind_of(value)}.",
                key=entry.key,
                expected=entry.dtype,
                got=type(value).__name__,
                hint="Convert it with `torch.as_tensor`.",
            )
        if value.dtype is not getattr(torch, entry.dtype):
            raise DtypeMismatch(
                f"expected {entry.describe()} for `{entry.wire}`, got dtype {value.dtype}.",
                key=entry.key,
                expected=entry.dtype,
                got=str(value.dtype).removeprefix("torch."),
                hint=f"Convert it with `.to(torch.{entry.dtype})`.",
            )
        if value.layout is not torch.strided or value.is_meta:
            raise DtypeMismatch(
                f"expected a dense tensor with data, {entry.describe()}, for `{entry.wire}`, got "
                f"layout {value.layout} on {value.device}.",
                key=entry.key,
                expected="torch.strided",
                got=str(value.layout),
                hint="Convert it with `.to_dense()`, and give it data.",
            )
        return value.contiguous()

    def restore(self, array: object, like: object) -> object:
        """Return the tensor as it is."""
        return array

    def build(self, drawn: Drawn) -> object:
        """Build a tensor of drawn numbers."""
        return build_tensor(drawn)

    def numbers(self, array: object, positions: Sequence[int]) -> list[Number]:
        """Read numbers out of a tensor."""
        assert isinstance(array, Tensor)
        return numbers_of(array, positions)


class TorchRunner(TensorRunner):
    """Run a program as a straight-line function."""

    def __init__(
        self,
        lines: StraightLine,
        schema: Schema,
        held: Mapping[str, object],
        program: ExportedProgram,
    ) -> None:
        self.lines = lines
        self.held = held
        self.program = program
        self._schema = schema
        self.direct = lines.direct

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on tensors in order; ``names`` picks among the outputs."""
        return picked(self._schema, self.lines.core(*arrays), names)


def run_program(program: ExportedProgram, schema: Schema) -> TorchRunner:
    """Build a runner from an exported program."""
    signature = program.graph_signature
    bound: dict[str, object] = {}
    held = held_by(program)
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT or spec.target is None:
            continue
        value = held[spec.target]
        bound[spec.arg.name] = value.detach() if isinstance(value, Tensor) else value
    inputs = [str(name) for name in signature.user_inputs]
    lines = StraightLine(program.graph_module, bound, inputs, schema)
    return TorchRunner(lines, schema, held, program)


def held_by(program: ExportedProgram) -> dict[str, object]:
    """Return the weights, buffers and constants of a program by name."""
    return {**program.state_dict, **program.constants}


def digest_of(held: Mapping[str, object]) -> str:
    """Compute the SHA-256 of all weights: name, dtype, shape and bytes of each, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(held.items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            whole = tensor.detach().cpu().contiguous()
            for start in range(0, whole.nbytes, CHUNK):
                size = min(CHUNK, whole.nbytes - start)
                digest.update((ctypes.c_char * size).from_address(whole.data_ptr() + start))
    return digest.hexdigest()


def build_tensor(drawn: Drawn) -> Tensor:
    """Build a tensor of drawn numbers."""
    return torch.as_tensor(drawn.numbers, dtype=getattr(torch, drawn.dtype)).reshape(drawn.shape)


def numbers_of(tensor: Tensor, positions: Sequence[int]) -> list[Number]:
    """Read numbers at positions of the flattened tensor."""
    flat = tensor.detach().reshape(-1)[list(positions)]
    return [float(n.real) if flat.is_complex() else n for n in flat.tolist()]
