"""What the state of a recurrent module starts with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kd_export._errors import DtypeMismatch, ExportError, KeyMismatch, ShapeMismatch, quoted
from kd_export._running.torch_runner import numbers_of
from kd_export._schema.arguments import check_mapping
from kd_export._schema.json_values import Number
from kd_export._schema.schema import Entry, Schema, find_entry
from kd_export._schema.state import First
from kd_export._schema.vectors import MOST_STORED, concrete


def resolve_initial(
    schema: Schema, initial: Mapping[First, object] | None
) -> dict[str, tuple[Number, ...]]:
    """Resolve the argument ``initial`` to the numbers that a schema holds, by wire name.

    Raises:
        KeyMismatch: A key is not an input that is carried, or is named twice.
        ShapeMismatch: A value does not broadcast to the shape of the state.
        DtypeMismatch: A value is of another dtype than the state.
    """
    found: dict[str, tuple[Number, ...]] = {}
    check_mapping("initial", initial, "{'h': 0.0}", KeyMismatch)
    for word, value in (initial or {}).items():
        entry = find_entry(schema.inputs, word, "input")
        if entry.wire not in schema.state or entry.wire in found:
            raise KeyMismatch(
                f"`initial` names `{entry.wire}`, which "
                + ("it names before." if entry.wire in found else "is not carried."),
                key=entry.key,
                expected=tuple(schema.state),
                got=word,
                hint=f"`state` carries {quoted(schema.state)}: give each of them one value.",
            )
        found[entry.wire] = _numbers(entry, value)
    return found


def _numbers(entry: Entry, value: object) -> tuple[Number, ...]:
    """Return the numbers of the shape of the state whose axes have size 1."""
    shape = concrete(entry.shape, {size: 1 for size in entry.shape if isinstance(size, str)})
    if math.prod(shape) > MOST_STORED:
        raise ExportError(
            f"the initial value of `{entry.wire}` has {math.prod(shape):,} numbers, and a file "
            f"holds at most {MOST_STORED:,}.",
            key=entry.key,
            expected=MOST_STORED,
            got=math.prod(shape),
            hint="Let the module add it to a state that starts at zero.",
        )
    tensor = _tensor(entry, value)
    try:
        whole = tensor.expand(shape)
    except RuntimeError as error:
        raise ShapeMismatch(
            f"the initial value of `{entry.wire}` has shape {tuple(tensor.shape)}, which does not "
            f"broadcast to {shape}.",
            key=entry.key,
            expected=shape,
            got=tuple(tensor.shape),
            hint="Give a number, or a tensor whose dynamic dimensions have size 1.",
        ) from error
    return tuple(numbers_of(whole, range(whole.numel())))


def _tensor(entry: Entry, value: object) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    if isinstance(value, Tensor) and value.dtype is dtype and not dtype.is_complex:
        return value.detach().cpu()
    if isinstance(value, bool | int | float) and torch.can_cast(torch.tensor(value).dtype, dtype):
        return torch.tensor(value, dtype=dtype)
    got = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
    raise DtypeMismatch(
        f"the initial value of `{entry.wire}`, which is {entry.dtype}, cannot be a {got}.",
        key=entry.key,
        expected=entry.dtype,
        got=got,
        hint=f"Give a number, or a real tensor of dtype `torch.{entry.dtype}`.",
    )
