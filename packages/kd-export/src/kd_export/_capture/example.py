"""What a program is made from: the part of the module that is wanted, and the example's tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType

import torch
from torch import Tensor, nn

from kd_core import KdError, TensorDictBase
from kd_export._capture.foreign import converted, is_foreign
from kd_export._capture.signature import Example, Word, leaves
from kd_export._errors import (
    DtypeMismatch,
    Key,
    KeyMismatch,
    NotExportable,
    kind_of,
    nearest,
    quoted,
)
from kd_export._running.torch_runner import build_tensor
from kd_export._schema.json_values import Number
from kd_export._schema.schema import Schema, Vector
from kd_export._schema.vectors import draw
from kd_export._schema.wire import as_key, unnest, wire_key, wire_name


def prepare(
    module: nn.Module,
    inputs: Sequence[object] | None,
    outputs: Sequence[object] | None,
    *,
    shared: bool = False,
) -> tuple[nn.Module, list[Key], list[Key]]:
    """Copy the module, in eval mode, reduced to the steps that the keys asked for need.

    Args:
        module: The module.
        inputs: The keys to be inputs; by default all.
        outputs: The keys to be outputs; by default all.
        shared: Whether parameters keep their memory: the copy must not outlive the call.
    """
    if isinstance(module, type):
        raise NotExportable(
            f"expected a keyed module, got the class `{module.__name__}`.",
            expected="a keyed module",
            got=module.__name__,
            hint="Pass an instance of it.",
        )
    if not hasattr(module, "in_keys") or not hasattr(module, "out_keys"):
        raise NotExportable(
            f"`{type(module).__name__}` has no `in_keys` and `out_keys`.",
            expected="a keyed module",
            got=type(module).__name__,
            hint="Wrap it: `TensorDictModule(module, in_keys=[...], out_keys=[...])`.",
        )
    if is_foreign(module):
        module = converted(module)
    for name, asked in (("inputs", inputs), ("outputs", outputs)):
        _check_list(name, asked)
    select = getattr(module, "select_subsequence", None)
    if (inputs is not None or outputs is not None) and select is not None:
        wanted_in = _holding(inputs, _keys(module, "in_keys"))
        wanted_out = _holding(outputs, _keys(module, "out_keys"))
        try:
            module = select(in_keys=wanted_in, out_keys=wanted_out)
        except (KdError, KeyError, ValueError) as error:
            raise KeyMismatch(f"no part of the module fits the keys asked for: {error}") from error
    chosen_in = _chosen(inputs, _keys(module, "in_keys"), "input", all_needed=True)
    chosen_out = _chosen(outputs, _keys(module, "out_keys"), "output", all_needed=False)
    _refuse_lazy(module)
    known = detached(module) | (_shared(module) if shared else {})
    try:
        frozen = copy.deepcopy(module, known).cpu().eval()
    except Exception as error:  # whatever a `__deepcopy__` or a `__reduce__` raises
        raise _not_copied(module, error) from error
    return frozen, chosen_in, list(dict.fromkeys(chosen_out))


def _check_list(name: str, asked: object) -> None:
    """Check that an argument names keys, one or more of them, or none by being left out."""
    if asked is not None and (
        isinstance(asked, str) or not isinstance(asked, Sequence) or not asked
    ):
        raise KeyMismatch(
            f"expected a list of keys for `{name}`, got {asked!r}.",
            expected="a list of keys",
            got=asked,
            hint=f"Pass a list, such as `{name}=['{asked}']`."
            if isinstance(asked, str)
            else f"Pass a list, or leave `{name}` out for all.",
        )


def detached(module: nn.Module) -> dict[int, object]:
    """Return detached copies of the results of a graph that a module keeps, by their identity.

    torch refuses to deep-copy them. A policy keeps the distribution of its last call, old
    `weight_norm` its weight, which it computes anew in each call.
    """
    found: dict[int, object] = {}
    seen: set[int] = set()
    waiting: list[object] = [module]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_leaf:
                found[id(value)] = value.detach().clone()
            waiting.extend(vars(value).values())
        elif isinstance(value, TensorDictBase | Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            waiting.extend(value)
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif not isinstance(value, type | FunctionType | ModuleType):
            waiting.extend(getattr(value, "__dict__", {}).values())
    return found


def _not_copied(module: nn.Module, error: Exception) -> NotExportable:
    """Return the error for a module that cannot be copied, which names the attribute at fault."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                copy.deepcopy(value, detached(part))
            except Exception as reason:
                place = f"{path}.{name}" if path else name
                return NotExportable(
                    f"the module cannot be copied: its attribute `{place}`, {kind_of(value)}, "
                    f"cannot: {str(reason).rstrip('.')}.",
                    expected="attributes that can be copied",
                    got=kind_of(value),
                    hint=f"Delete `{place}` before the export, or give its class a `__deepcopy__`.",
                )
    return NotExportable(
        f"the module cannot be copied: {str(error).rstrip('.')}.",
        hint="Give the class of the part that is named a `__deepcopy__`.",
    )


def _shared(module: nn.Module) -> dict[int, object]:
    """Return parameters that share the memory of a module's own; buffers are copied as ever."""
    return {
        id(one): nn.Parameter(one.detach(), one.requires_grad)
        for one in module.parameters()
        if type(one) is nn.Parameter
    }


def _refuse_lazy(module: nn.Module) -> None:
    """Refuse layers that wait for a first call to learn their shape."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(value):
            raise NotExportable(
                f"`{name}` is not initialised: its layer learns its shape at the first call.",
                expected="a module that was called",
                hint="Call the module once on an example before it is exported.",
            )


def _keys(module: nn.Module, name: str) -> list[Key]:
    # A copy keeps nothing of the keys: steps that were written into `_modules` directly count.
    return [as_key(key) for key in getattr(copy.copy(module), name) if key != "_"]


def _holding(asked: Sequence[object] | None, known: list[Key]) -> list[Key]:
    """Return the keys of the module that are asked for, or that hold what is asked for."""
    if asked is None:
        return known
    keys = [as_key(key) for key in asked]
    return list(dict.fromkeys(next((k for k in known if _holds(k, key)), key) for key in keys))


def _holds(outer: Key, inner: Key) -> bool:
    """Return whether a key is another one, or that of a container with it."""
    return inner[: len(outer)] == outer


def _chosen(
    asked: Sequence[object] | None, known: list[Key], what: str, *, all_needed: bool
) -> list[Key]:
    if asked is None:
        return known
    keys = [as_key(key) for key in asked]
    wires = [wire_name(key) for key in known]
    for key in keys:
        if not any(_holds(outer, key) for outer in known):
            close = nearest(wire_name(key), wires)
            raise KeyMismatch(
                f"{what} `{wire_name(key)}` not found in the module; available {what}s: "
                f"{quoted(wires)}.",
                key=key,
                expected=tuple(wires),
                got=wire_name(key),
                hint=None if close is None else f"Did you mean `{close}`?",
            )
    missing = [outer for outer in known if not any(_holds(outer, key) for key in keys)]
    if all_needed and missing:
        raise KeyMismatch(
            f"`inputs` leaves out `{wire_name(missing[0])}`, which the module reads.",
            key=missing[0],
            expected=tuple(wires),
        )
    return keys


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
            inside = {path: leaf for path, leaf in entries.items() if _holds(key, path)}
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
    return value.detach().cpu().contiguous()


def _tensor_hint(value: object) -> str:
    if isinstance(value, list | tuple) or dataclasses.is_dataclass(value):
        return "Give each of its tensors under a key of its own, or in a nested dict."
    return "Only tensors can be inputs of a file; set other values in the module."


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
