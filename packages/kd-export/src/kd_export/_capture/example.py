"""What a program is made from: the part of the module that is wanted, and the example's tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kd_core import KdError, is_tensor_collection
from kd_export._capture.signature import Example, Word
from kd_export._errors import DtypeMismatch, Key, KeyMismatch, NotExportable, nearest, quoted
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
    if not hasattr(module, "in_keys") or not hasattr(module, "out_keys"):
        raise NotExportable(
            f"`{type(module).__name__}` has no `in_keys` and `out_keys`.",
            expected="a keyed module",
            got=type(module).__name__,
            hint="Wrap it: `TensorDictModule(module, in_keys=[...], out_keys=[...])`.",
        )
    select = getattr(module, "select_subsequence", None)
    if (inputs is not None or outputs is not None) and select is not None:
        try:
            module = select(in_keys=inputs or module.in_keys, out_keys=outputs or module.out_keys)
        except (KdError, KeyError, ValueError) as error:
            raise KeyMismatch(f"no part of the module fits the keys asked for: {error}") from error
    in_keys = [as_key(key) for key in _keys(module, "in_keys")]
    out_keys = [as_key(key) for key in _keys(module, "out_keys") if key != "_"]
    chosen_in = _chosen(inputs, in_keys, "input", all_needed=True)
    chosen_out = _chosen(outputs, out_keys, "output", all_needed=False)
    _refuse_lazy(module)
    try:
        known = _copies(module) | (_shared(module) if shared else {})
        frozen = copy.deepcopy(module, known).cpu().eval()
    except (RuntimeError, TypeError) as error:
        raise NotExportable(
            f"the module cannot be copied: {error}",
            hint="Let it hold parameters and buffers only, no results of a graph or open handles.",
        ) from error
    return frozen, chosen_in, list(dict.fromkeys(chosen_out))


def _copies(module: nn.Module) -> dict[int, object]:
    """Copy the results of a graph that modules keep as attributes: torch refuses to deep-copy them.

    Old `weight_norm` keeps its weight so, and computes it anew in each call.
    """
    return {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }


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


def _keys(module: nn.Module, name: str) -> Sequence[object]:
    keys: Sequence[object] = getattr(module, name)
    return keys


def _chosen(
    asked: Sequence[object] | None, known: list[Key], what: str, *, all_needed: bool
) -> list[Key]:
    if asked is None:
        return known
    keys = [as_key(key) for key in asked]
    wires = [wire_name(key) for key in known]
    for key in keys:
        if key not in known:
            close = nearest(wire_name(key), wires)
            raise KeyMismatch(
                f"{what} `{wire_name(key)}` not found in the module; available {what}s: "
                f"{quoted(wires)}.",
                key=key,
                expected=tuple(wires),
                got=wire_name(key),
                hint=None if close is None else f"Did you mean `{close}`?",
            )
    missing = [key for key in known if key not in keys]
    if all_needed and missing:
        raise KeyMismatch(
            f"`inputs` leaves out `{wire_name(missing[0])}`, which the module reads.",
            key=missing[0],
            expected=tuple(wires),
        )
    return keys


def read_example(example: Example[Word], in_keys: Sequence[Key]) -> dict[Key, Tensor]:
    """Read the module's inputs from a container, a nested or a flat dictionary, or a schema."""
    entries: dict[Key, object]
    if isinstance(example, Schema):
        entries = _drawn_entries(example)
    elif is_tensor_collection(example):
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
            f"expected a container or a mapping of tensors, got a {type(example).__name__}.",
            expected="a container or a mapping of tensors",
            got=type(example).__name__,
        )
    for key in in_keys:
        if key not in entries:
            close = nearest(wire_name(key), map(wire_name, entries))
            raise KeyMismatch(
                f"`{wire_name(key)}` not found in the example; available keys: "
                f"{quoted(map(wire_name, entries))}.",
                key=key,
                expected=tuple(map(wire_name, in_keys)),
                hint="Give it a value there. If the module can do without it, leave it out of its "
                "`in_keys`."
                if close is None
                else f"Did you mean `{close}`?",
            )
    return {key: _tensor(key, entries[key]) for key in in_keys}


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
    if not isinstance(value, Tensor):
        raise DtypeMismatch(
            f"expected a tensor for `{wire_name(key)}` of the example, got a "
            f"{type(value).__name__}.",
            key=key,
            expected="Tensor",
            got=type(value).__name__,
            hint="Only tensors can be inputs of a file; set other values in the module.",
        )
    return value.detach().cpu().contiguous()


def bounds(tensor: Tensor) -> tuple[Number, Number]:
    """Compute the range that test inputs are drawn from: that of the example."""
    if tensor.dtype is torch.bool or tensor.is_complex():
        return 0, 1
    values = tensor[torch.isfinite(tensor)] if tensor.is_floating_point() else tensor.flatten()
    if not values.numel():
        return 0, 1
    low, high = values.min().item(), values.max().item()
    if tensor.is_floating_point() and low == high:
        return low - 1, high + 1
    return low, high
