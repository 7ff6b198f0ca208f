"""The tensors that a user gives: an example, vectors to test on, what a state starts with.

Knows keys and the schema; must not know modules or programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kd_core import TensorDictBase
from kd_export._capture.flat_module import Example, Word, holds, leaves
from kd_export._errors import (
    DtypeMismatch,
    ExportError,
    Key,
    KeyMismatch,
    ShapeMismatch,
    kind_of,
    nearest,
    quoted,
)
from kd_export._running.torch_runner import build_tensor, numbers_of
from kd_export._schema.files import Number, as_key, check_mapping, unnest, wire_key, wire_name
from kd_export._schema.schema import (
    MOST_STORED,
    Entry,
    First,
    Schema,
    Vector,
    concrete,
    draw,
    find_entry,
)


def read_example(example: Example[Word], in_keys: Sequence[Key]) -> dict[Key, Tensor]:
    """Read the module's inputs from a container, a nested or a flat dictionary, or a schema.

    Where the module reads a container, all that the example has in it are inputs.
    """
    entries: dict[Key, object]
    if isinstance(example, Schema):
        entries = _drawn_entries(example)
    elif isinstance(example, TensorDictBase):
        entries = {key: example.get(key) for key in in_keys if key in example.keys(True)}
    elif isinstance(example, Mapping):
        entries = {}
        for word, value in example.items():
            if isinstance(value, Mapping):
                entries.update(unnest(value, as_key(word)))
            else:
                key = as_key(word)
                entries[wire_key(key[0]) if key not in in_keys and len(key) == 1 else key] = value
    else:
        raise DtypeMismatch(
            f"expected a container or a mapping of tensors, got {kind_of(example)}.",
            expected="a container or a mapping of tensors",
            got=type(example).__name__,
            hint=f"Pass a dict with {quoted(map(wire_name, in_keys))}.",
        )
    found: dict[Key, object] = {}
    for key in in_keys:
        value = entries.get(key)
        if isinstance(value, TensorDictBase):
            inside = leaves(value, key)
        else:
            inside = {path: leaf for path, leaf in entries.items() if holds(key, path)}
        if not inside:
            raise _not_in_example(key, in_keys, entries)
        found.update(inside)
    return {key: _tensor(key, value) for key, value in found.items()}


def _not_in_example(key: Key, in_keys: Sequence[Key], entries: Iterable[Key]) -> KeyMismatch:
    given = [wire_name(path) for path in entries]
    close = nearest(wire_name(key), given)
    return KeyMismatch(
        f"`{wire_name(key)}` not found in the example; available keys: {quoted(given)}.",
        key=key,
        expected=tuple(map(wire_name, in_keys)),
        hint="Give it a value there. If the module can do without it, leave it out of its "
        "`in_keys`."
        if close is None
        else f"Did you mean `{close}`?",
    )


def _drawn_entries(schema: Schema) -> dict[Key, object]:
    """Build inputs as a schema describes them: those of a stored test, or drawn ones."""
    sizes = {
        name: max(axis.min, 3 if axis.max is None else min(3, axis.max))
        for name, axis in schema.axes.items()
    }
    drawn = draw(schema, schema.vectors[-1] if schema.vectors else Vector(sizes, 0, {}))
    keys = [entry.key for entry in schema.inputs]
    return dict(zip(keys, map(build_tensor, drawn), strict=True))


def read_vectors(vectors: Sequence[Example[Word]], schema: Schema) -> list[list[Tensor]]:
    """Read inputs to test a program on, in the order of its inputs.

    Raises:
        KeyMismatch: An input is missing.
        DtypeMismatch: An input is not of the dtype of the schema.
    """
    keys = [entry.key for entry in schema.inputs]
    read = [list(read_example(vector, keys).values()) for vector in vectors]
    for tensors in read:
        for entry, tensor in zip(schema.inputs, tensors, strict=True):
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype != entry.dtype:
                raise DtypeMismatch(
                    f"expected {entry.describe()} for `{entry.wire}` of a vector, got {dtype}.",
                    key=entry.key,
                    expected=entry.dtype,
                    got=dtype,
                )
    return read


def _tensor(key: Key, value: object) -> Tensor:
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError) as error:  # of objects or of words
            raise DtypeMismatch(
                f"expected numbers for `{wire_name(key)}` of the example, got {kind_of(value)} of "
                f"{getattr(value, 'dtype', 'others')}.",
                key=key,
                expected="numbers",
                got=type(value).__name__,
            ) from error
    if not isinstance(value, Tensor):
        raise DtypeMismatch(
            f"expected a tensor for `{wire_name(key)}` of the example, got {kind_of(value)}.",
            key=key,
            expected="Tensor",
            got=type(value).__name__,
            hint=_tensor_hint(value),
        )
    if value.is_meta:
        raise DtypeMismatch(
            f"`{wire_name(key)}` of the example is on the meta device and has no values.",
            key=key,
            expected="a tensor with values",
            got="meta",
            hint="Give values that the module meets, as in `torch.randn_like(x, device='cpu')`.",
        )
    return value.detach().cpu().contiguous()


def _tensor_hint(value: object) -> str:
    if isinstance(value, list | tuple) and _is_numbers(value):
        return "Convert it with `torch.tensor`."
    if isinstance(value, list | tuple) or dataclasses.is_dataclass(value):
        return "Give each of its tensors under a key of its own, or in a nested dict."
    return "Only tensors can be inputs of a file; set other values in the module."


def _is_numbers(value: list[object] | tuple[object, ...]) -> bool:
    """Return whether there are numbers and nothing else in a list and the lists in it."""
    return bool(value) and all(
        _is_numbers(each) if isinstance(each, list | tuple) else isinstance(each, (int, float))
        for each in value
    )


def bounds(tensor: Tensor) -> tuple[Number, Number]:
    """Compute the range that test inputs are drawn from: as wide as the example's numbers spread.

    Numbers that are drawn evenly from it have the mean and the deviation of the example, as far as
    its own range allows. A few far numbers do not widen it; the example is tried as it is, too.
    """
    if tensor.dtype is torch.bool or tensor.is_complex():
        return 0, 1
    values = tensor[torch.isfinite(tensor)] if tensor.is_floating_point() else tensor.flatten()
    if not values.numel():
        return 0, 1
    low, high = values.min().item(), values.max().item()
    if not tensor.is_floating_point():
        return low, high
    if low == high:
        return low - 1, high + 1
    deviation, mean = torch.std_mean(values.double(), correction=0)
    reach = 3**0.5 * float(deviation)
    return max(low, float(mean) - reach), min(high, float(mean) + reach)


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
        found[entry.wire] = _initial_numbers(entry, value)
    return found


def _initial_numbers(entry: Entry, value: object) -> tuple[Number, ...]:
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
    tensor = _initial_tensor(entry, value)
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


def _initial_tensor(entry: Entry, value: object) -> Tensor:
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
