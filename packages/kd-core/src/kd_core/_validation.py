"""Validation of the values that are stored in a container.

A tensor that fits is stored as it is; a mapping becomes a nested container; numbers, lists of
numbers, arrays of any library and lists of tensors of one shape become tensors; a list of
containers becomes a stack; another list with an item for each row, as one of tuples, becomes
one value per row; everything else becomes non-tensor data, one value for the whole batch. Knows
tensors, numbers, arrays and the registry; must not know a container class.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._descriptor import describe
from kd_core._errors import (
    InvalidKey,
    InvalidValue,
    KeyCollision,
    ShapeMismatch,
    batch_does_not_fit,
    given_twice,
    warn_caller,
)
from kd_core._keys import format_key, is_key, path_of
from kd_core._leaves.arrays import (
    NUMBERS,
    as_array,
    columns_of_struct_array,
    holds_numbers,
    is_number,
    is_record,
    is_struct_array,
    lists_as_tensors,
    rows_of,
    shape_of_lists,
    shape_of_nothing,
    tensor_of_array,
    tensor_of_list,
    values_of_rows,
)
from kd_core._leaves.loops import entries_of, is_shapeless, leaf_fits, without_shape
from kd_core._nodes import UnbatchedView, is_data, is_node, is_row_data, is_unbatched
from kd_core._shapes import names_of, unchanged, with_names
from kd_core._switches import list_to_stack
from kd_core._unbatched import wrap_tensor

if TYPE_CHECKING:
    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry, Node
    from kd_core._shapes import Names
    from kd_core._types import Batch, NestedKey

MAX_DEPTH = 64
"""The most levels of nesting; every operation, also of torch, must work with this many."""


def as_entry(
    key: str,
    value: object,
    desc: Descriptor,
    path: tuple[str, ...] = (),
    holder: Node | None = None,
) -> Entry:
    """Check and convert a value to store under `key` in a container with descriptor `desc`.

    Args:
        key: the key.
        value: the value.
        desc: the descriptor of the container.
        path: the path of the container, for messages.
        holder: the container, if it exists: it must not contain itself.

    Raises:
        ShapeMismatch: if its shape does not start with the batch size.
        InvalidValue: if it contains the container, or has too many levels.
    """
    if isinstance(value, Tensor):
        if type(value) is not Tensor:
            if isinstance(value, UnbatchedView):
                return _node_as_entry(
                    key, wrap_tensor(value._kd_tensor, value._kd_desc), desc, path
                )
            if is_foreign_unbatched(value):
                return _node_as_entry(key, registry.foreign_node(value), desc, path)
        if desc.device is None and leaf_fits(value, desc):
            return value
        return _tensor_as_entry(key, value, desc, path)
    if type(value) is not dict and is_node(value):
        return _node_as_entry(key, value, desc, path, holder)
    if is_foreign(value):
        return _node_as_entry(key, registry.foreign_node(value), desc, path, holder)
    if isinstance(value, dict):
        made = mapping_as_entry(key, value, desc, path)
        if holder is not None:
            refuse_cycle(key, made, holder, path)
        return made
    converted = _as_tensor(key, value, desc.batch, path)
    if converted is None:
        if isinstance(value, (list, tuple)) and holds_numbers(value, empty=True):
            value = lists_as_tensors(value, max(len(desc.batch), 1))
        node = _as_stack(value)
        node = records_as_node(value) if node is None else node
        if node is not None:
            return _node_as_entry(key, node, desc, path, holder)
        if not list_to_stack():
            return registry.wrap_data(as_array(value), desc)
        rows = rows_of(value)
        if rows is not None and not desc.batch:  # a list has rows of its own, a tuple is one value
            listed = isinstance(value, list) and bool(value)
            desc = desc.with_batch(shape_of_lists(rows)) if listed else desc
        if rows is None or not desc.batch:
            return registry.wrap_data(value, desc)
        try:
            values = values_of_rows(rows, desc.batch, f"entry {format_key((*path, key))}")
        except ShapeMismatch:
            if isinstance(value, (list, tuple)):
                raise
            return registry.wrap_data(value, desc)  # an array is one value where it does not fit
        return registry.wrap_rows(values, None, desc)
    return _tensor_as_entry(key, converted, desc, path)


def is_foreign(value: object) -> bool:
    """Return whether a value is a container of the package tensordict, or data of one."""
    if type(value).__module__ == "builtins" or is_dynamo_compiling():
        return False
    library = sys.modules.get("tensordict")  # a value of it has imported it
    asked = getattr(library, "is_tensor_collection", None)
    return asked is not None and bool(asked(value))


def is_foreign_unbatched(value: Tensor) -> bool:
    """Return whether a value is a tensor of the package tensordict without batch dimensions."""
    kind = type(value)
    return kind.__name__ == "UnbatchedTensor" and kind.__module__.startswith("tensordict.")


def mapping_as_entry(
    key: str, value: Mapping[str, object], desc: Descriptor, path: tuple[str, ...] = ()
) -> Node:
    """Convert a mapping to a nested container.

    Raises:
        ShapeMismatch: if the shape of a value does not start with the batch size.
        InvalidValue: if there are more than `MAX_DEPTH` levels.
    """
    if len(path) >= MAX_DEPTH:
        raise too_deep(path)
    try:
        return registry.nest_mapping(value, desc, (*path, key))
    except RecursionError:
        if path:
            raise
        raise too_deep((key, key, key)) from None


def too_deep(path: tuple[str, ...]) -> InvalidValue:
    """Build the error for a path of too many levels."""
    return InvalidValue(
        f"containers must be nested at most {MAX_DEPTH} levels deep, got more at "
        f"{format_key(path[:3])}. Check the value for a cycle."
    )


def refuse_cycle(key: str, value: Node, holder: Node | None, path: tuple[str, ...]) -> None:
    """Refuse a container that contains the one it is stored in, or has too many levels.

    Raises:
        InvalidValue: if it is refused; the message names the key.
    """
    if is_dynamo_compiling():  # a cycle exists before tracing starts
        return
    nodes, depth = [value], len(path)
    seen: set[int] = set()
    while nodes:
        depth += 1
        if depth > MAX_DEPTH:
            raise too_deep((*path, key))
        below: list[Node] = []
        for node in nodes:  # loops: each field of a tensor class that is set comes here
            if node is holder:
                raise InvalidValue(
                    f"entry {format_key((*path, key))} would contain itself. Store "
                    "`clone(recurse=False)`, which shares the tensors."
                )
            for inner in node._kd_below():
                if id(inner) not in seen:
                    seen.add(id(inner))
                    below.append(inner)
        nodes = below


def _tensor_as_entry(key: str, value: Tensor, desc: Descriptor, path: tuple[str, ...]) -> Tensor:
    if not leaf_fits(value, desc):
        name = format_key((*path, key))
        if is_shapeless(value):
            raise without_shape(f"entry {name} of a container with batch_size {desc.batch}")
        raise batch_does_not_fit(name, desc.batch, value.shape)
    if desc.device is not None and value.device != desc.device:
        return value.to(desc.device)
    return value


def _node_as_entry(
    key: str,
    value: Node,
    desc: Descriptor,
    path: tuple[str, ...],
    holder: Node | None = None,
) -> Node:
    own = value._kd_desc
    if is_unbatched(value):
        place = desc.device
        if place is not None and value._tensor.device != place:
            value = value._kd_map_each(lambda leaf: leaf.to(place))
        return value if own is desc else value._kd_with_descriptor(desc)
    if holder is not None or value._kd_below():
        refuse_cycle(key, value, holder, path)
    if own is desc:
        return value
    if desc.named and (entries_of(value) is not None or is_data(value)):
        names = _with_missing_names(own.batch, desc.batch)
        if names is not None:
            value = value._kd_map_each(unchanged, lambda batch: with_names(batch, names))
            own = value._kd_desc
    ndim = desc.ndim
    batch, device = own.batch, own.device
    smaller = ndim > 0 and own.size[:ndim] != desc.size
    if smaller:
        one_value = is_data(value) and not is_row_data(value)  # it has whichever batch size
        if not one_value and (own.size != desc.size[: own.ndim] or is_row_data(value)):
            raise batch_does_not_fit(format_key((*path, key)), desc.batch, batch)
        batch = desc.batch  # extend it to the parent's if the leaves fit
    if desc.device is not None and device != desc.device:
        value = value._kd_map_each(lambda leaf: leaf.to(desc.device))
        device = desc.device
    if not smaller and device == own.device:  # dynamo of torch 2.10 compares no named sizes
        return value
    placed = desc if device == desc.device else describe(batch, device)  # a child may have its own
    return value._kd_with_descriptor(placed.with_batch(batch))


def _with_missing_names(batch: Batch, outer: Batch) -> Names | None:
    """Return the names of a nested batch with those that only the outer one has, if there are any.

    Where dimensions would share a name, it keeps its own.
    """
    own = names_of(batch)
    names = tuple(
        name if name is not None else above
        for name, above in zip_longest(own, names_of(outer[: len(batch)]))
    )
    real = [name for name in names if name is not None]
    return names if names != own and len({*real}) == len(real) else None


def _as_tensor(
    key: str, value: object, batch: tuple[int, ...], path: tuple[str, ...]
) -> Tensor | None:
    """Return a number, an array, or a list of numbers or tensors as a tensor; else `None`.

    Raises:
        InvalidValue: if a number is too large, or tensors are on different devices.
    """
    if isinstance(value, NUMBERS) and type(value).__module__ != "numpy":
        try:
            return torch.as_tensor(value)
        except (ValueError, RuntimeError) as error:  # an integer of more than 64 bits
            raise InvalidValue(
                f"entry {format_key((*path, key))} must be an integer that torch.int64 holds, got "
                f"{value!r}. Pass a tensor, or wrap it in `NonTensorData`."
            ) from error
    if isinstance(value, (list, tuple)) and value and holds_numbers(value):
        try:
            made = torch.as_tensor(value if list_to_stack() else as_array(value))
            if isinstance(value, tuple) and made.is_floating_point():
                return torch.as_tensor(value, dtype=torch.float64)  # as numpy has it
            if isinstance(value, tuple) and made.is_complex():
                return torch.as_tensor(value, dtype=torch.complex128)
            return made
        except (ValueError, TypeError):
            note_ragged((*path, key))
            return None
    if isinstance(value, tuple) and value and all(map(is_number, value)):  # some are of numpy
        return torch.as_tensor(sys.modules["numpy"].array(value))
    shape = shape_of_nothing(value)
    if shape is not None and (0 not in batch or shape[: len(batch)] == batch):
        return torch.empty(shape, dtype=torch.float64 if isinstance(value, tuple) else None)
    try:
        stacked = tensor_of_list(value)
    except RuntimeError as error:
        raise InvalidValue(
            f"the tensors in the list of entry {format_key((*path, key))} cannot be stacked: "
            f"{error}. Move them to one device."
        ) from error
    if stacked is not None:
        return stacked
    return tensor_of_array(value)


def note_ragged(path: tuple[str, ...]) -> None:
    """Warn that lists of numbers of different lengths do not become a tensor."""
    if not is_dynamo_compiling():
        warn_caller(
            f"entry {format_key(path)} holds lists of numbers of different lengths, which are kept "
            "as a list of tensors, not as a tensor. Pad them to one length, keep the rows as "
            "members of `lazy_stack`, or pass `NonTensorStack(*rows)` if the lists themselves are "
            "meant."
        )


def _as_stack(value: object) -> Node | None:
    """Return a list of containers of one batch size as a stack of them; `None` for other values."""
    if not isinstance(value, (list, tuple)) or not value or hasattr(value, "_fields"):
        return None
    if not all(is_node(item) and entries_of(item) is not None for item in value):
        return None
    if any(item._kd_desc.batch != value[0]._kd_desc.batch for item in value):
        return None
    stacked: Node = value[0]._kd_engine.maybe_dense_stack(value)
    return stacked


def records_as_node(value: object) -> Node | None:
    """Return an array of records as a container of its shape; `None` for other values."""
    if not is_struct_array(value) or is_record(value):
        return None
    made: Node = registry.nest_mapping(columns_of_struct_array(value), describe(value.shape), ())
    return made


def with_plain_keys(source: Mapping[str, object], path: tuple[str, ...] = ()) -> dict[str, object]:
    """Return a copy of a mapping in which every key is a plain `str`, tuples spread into levels.

    Entries under tuples come last, as programs that read keys in their order expect.

    Raises:
        InvalidKey: if a key is neither a string nor a tuple of strings.
        KeyCollision: if two keys have the same characters.
    """
    keys: Collection[object] = source
    for key in keys:
        if not is_key(key):
            remedy = " Keep the dict as one value: `NonTensorData(it)`." if type(key) is int else ""
            raise InvalidKey(
                f"a key must be a string or a tuple of strings, got {key!r} of type "
                f"`{type(key).__name__}`{f' in {format_key(path)}' if path else ''}.{remedy}"
            )
    items = sorted(source.items(), key=lambda item: isinstance(item[0], tuple))
    return spread_keys(cast("Mapping[NestedKey, object]", dict(items)))


def spread_keys(source: Mapping[NestedKey, object]) -> dict[str, object]:
    """Return a copy of a mapping in which tuple keys are spread into nested dicts.

    A tuple key that goes through a dict or container of the mapping is put into a copy of it.

    Raises:
        KeyCollision: if a key is given twice, or is a value and a container at once.
    """
    tree: dict[str, object] = {}
    for key, value in source.items():
        level = tree
        *above, last = path_of(key)
        for part in above:
            inner = level.setdefault(part, Branch())
            if type(inner) is not Branch:
                break
            level = inner
        else:
            if last not in level:
                level[last] = value
                continue
        tree = _spread(source)  # a key goes through the value of another one
        return {head: tree[head] for head in dict.fromkeys(path_of(key)[0] for key in source)}
    return tree


def _spread(source: Mapping[NestedKey, object]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key, value in sorted(source.items(), key=lambda item: isinstance(item[0], tuple)):
        _plant(tree, path_of(key), value)
    return tree


def _plant(level: dict[str, object], path: tuple[str, ...], value: object) -> None:
    """Put a value at a path of nested dicts."""
    *above, last = path
    for at, part in enumerate(above, 1):
        inner: object = level.setdefault(part, Branch())
        if isinstance(inner, Mapping) and not is_node(inner):
            inner = inner if type(inner) is Branch else spread_keys(inner)
        elif is_node(inner) and entries_of(inner) is not None:
            container: Any = inner._kd_shallow()
            level[part] = container
            if path[at:] in container._kd_engine.keys(container, True):
                raise given_twice(format_key(path))
            container._kd_engine.set(container, path[at:], value)
            return
        else:
            raise is_both(path, part, "container")
        level[part] = inner
        level = inner
    if last in level:
        raise given_twice(format_key(path))
    level[last] = value


class Branch(dict[str, object]):
    """A level that a tuple key creates, distinguished from a mapping of the user."""


def is_both(key: NestedKey, part: str, kind: str) -> KeyCollision:
    """Build the error for a name that one key makes a container and another one a value."""
    other = "value" if kind == "container" else "container"
    text = f"key {format_key(key)} makes `{part}` a {kind}, and another key makes it a {other}."
    return KeyCollision(f"{text} Rename one of them.")
