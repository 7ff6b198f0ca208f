"""Reading the inputs of a module from a container, and writing its outputs back.

Writing is all or nothing: an output that does not fit leaves the container as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, cast

from torch import Tensor

from kd_core import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from kd_nn._errors import input_missing

Inplace: TypeAlias = "bool | Literal['empty'] | None"


def entry(tensordict: TensorDictBase, key: NestedKey) -> object:
    """Return the entry at `key`; non-tensor data is unwrapped."""
    return tensordict[cast("str", key)]


def container_of(values: Mapping[NestedKey, object], batch_size: Sequence[int] = ()) -> TensorDict:
    """Return a container of values by (nested) key."""
    tree = _tree_of(values)
    if tree is None:
        return TensorDict({}, batch_size).update(values)
    return TensorDict(tree, batch_size)


def fitted(like: TensorDictBase, key: NestedKey, value: object) -> object:
    """Return what a container like this one holds once a value is stored at a key.

    Raises:
        ShapeMismatch: If the value does not fit the batch size.
    """
    probe = like.empty()
    probe.set(key, value)
    return entry(probe, key)


def _tree_of(values: Mapping[NestedKey, object]) -> dict[str, object] | None:
    """Nest plain tensors by their keys; None for other values, or if one key holds another."""
    tree: dict[str, object] = {}
    for key, value in values.items():
        if value.__class__ is not Tensor:
            return None
        level = tree
        *above, last = (key,) if isinstance(key, str) else cast("tuple[str, ...]", key)
        for part in above:
            inner = level.setdefault(part, {})
            if type(inner) is not dict:
                return None
            level = inner
        if last in level:
            return None
        level[last] = value
    return tree


def read_entries(
    tensordict: TensorDictBase, keys: Iterable[NestedKey], who: Callable[[], str]
) -> list[object]:
    """Return the entries at `keys`.

    Args:
        tensordict: The container.
        keys: What to read.
        who: Names the reader, for the message.

    Raises:
        InputMissing: With the reader, the key and the available keys.
    """
    values: list[object] = []
    for key in keys:
        try:
            values.append(entry(tensordict, key))
        except KeyError:
            raise input_missing(key, who(), list(tensordict.keys(True))) from None
    return values


def read_optional(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[object]:
    """Return the entries at `keys`, None for missing ones."""
    present = tensordict.keys(True)
    return [entry(tensordict, key) if key in present else None for key in keys]


def write_entries(
    tensordict: TensorDictBase, keys: Sequence[NestedKey], values: Sequence[object]
) -> None:
    """Write values at keys, all or nothing."""
    tensordict.assign(dict(zip(keys, values, strict=True)))


def destination(
    tensordict: TensorDictBase, inplace: Inplace, tensordict_out: TensorDictBase | None
) -> TensorDictBase:
    """Return the container that receives the outputs.

    Args:
        tensordict: The input.
        inplace: False for a fresh container, `"empty"` for an empty one like the input.
        tensordict_out: Takes precedence over `inplace`.
    """
    if tensordict_out is not None:
        return tensordict_out
    if inplace == "empty":
        return tensordict.empty()
    return TensorDict() if inplace is False else tensordict


def parts_of(tensordict: TensorDictBase) -> list[TensorDictBase]:
    """Return a container in a list, or the members of a stack, which may have different keys."""
    if not isinstance(tensordict, LazyStackedTensorDict):
        return [tensordict]
    members = tensordict.unbind(tensordict.stack_dim)
    return [part for member in members for part in parts_of(member)]


def has_entry(tensordict: TensorDictBase, key: NestedKey) -> bool:
    """Return whether there is an entry at `key`; a field that is not set is none."""
    if isinstance(tensordict, LazyStackedTensorDict):  # to read it would stack its members
        return key in tensordict.keys(True)
    try:
        found: object = tensordict.get(key)
    except KeyError:  # it goes through a tensor
        return False
    return isinstance(found, Tensor) or (found is not None and entry(tensordict, key) is not None)
