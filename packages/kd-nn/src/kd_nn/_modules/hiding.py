"""Calls of modules whose `forward` writes all of its outputs, whatever is selected.

The classes of this library write what is selected. A class of the user need not know of
`select_out_keys`: what its `forward` wrote to hidden keys is taken back after the call.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TypeAlias, cast

from torch import nn

from kd_core import (
    NestedKey,
    TensorClass,
    TensorDictBase,
    unravel_key,
    unravel_key_to_tuple,
)
from kd_nn._dispatch.dispatch import keys_of
from kd_nn._dispatch.entries import has_entry, parts_of
from kd_nn._keys.specs import DISCARD, Keys, overlaps
from kd_nn._plan.invalidation import Flagged

Before: TypeAlias = list[tuple[TensorDictBase, dict[NestedKey, object]]]


def call_as_selected(
    module: Flagged,
    call: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Call a module; entries at keys that are not selected are afterwards as they were before.

    Args:
        module: A keyed module.
        call: Calls it.
        args: What the module is called with: a container first, or tensors.
        kwargs: The keyword arguments.

    Returns:
        What the call returned; a container that the module made has no entry at a hidden key that
        was not in the input.
    """
    selected = module.__dict__.get("_kd_selected")
    if selected is None or module._kd_changes_by_assignment:
        return call(*args, **kwargs)
    given = args[0] if args else kwargs.get("tensordict")
    if not isinstance(given, TensorDictBase):
        return call(*args, **kwargs)
    hidden = _hidden(module, selected)
    before: Before = [(part, _present(part, hidden)) for part in parts_of(given)]
    result = call(*args, **kwargs)
    if result is given or result is None:
        for part, entries in before:
            _restore(part, hidden, entries)
    elif isinstance(result, TensorDictBase) and not any(
        result is value for value in kwargs.values()
    ):
        kept = {key for _, entries in before for key in entries}
        for part in parts_of(result):
            _take_back(part, hidden, kept)
    return result


def without_hidden(
    module: nn.Module, made: TensorDictBase, given: TensorDictBase
) -> TensorDictBase:
    """Return a container without entries at hidden keys that were not in the one given.

    Args:
        module: The keyed module that made it of the one given.
        made: The container; it is not changed.
        given: The input of the module.
    """
    selected = module.__dict__.get("_kd_selected")
    if selected is None:
        return made
    hidden, result = _hidden(module, selected), made.copy()
    kept = {key for part in parts_of(given) for key in _present(part, hidden)}
    for part in parts_of(result):
        _take_back(part, hidden, kept)
    return result


def _hidden(module: nn.Module, selected: Keys) -> Keys:
    """Return the keys that are not selected, less those that a selected one holds or is in."""
    source = keys_of(module, "out_keys_source")
    return tuple(key for key in source if key != DISCARD and not overlaps(key, selected))


def _present(tensordict: TensorDictBase, keys: Keys) -> dict[NestedKey, object]:
    """Return the entries at those of the keys, and of the levels above them, that are there."""
    levels = {level for key in keys for level in _levels(key)}
    return {key: tensordict.get(key) for key in levels if has_entry(tensordict, key)}


def _restore(tensordict: TensorDictBase, keys: Keys, before: dict[NestedKey, object]) -> None:
    for key in keys:
        if key in before and tensordict.get(key) is not before[key]:
            tensordict.set(key, before[key])
    _take_back(tensordict, keys, before)


def _take_back(tensordict: TensorDictBase, keys: Keys, before: Container[NestedKey]) -> None:
    """Remove the entries at keys that were not there, and the levels that were made for them."""
    for key in keys:
        for level in _levels(key):  # a level that the module made goes with its last entry
            if level in before or not _is_left(tensordict, level, key):
                break
            _remove(tensordict, level)


def _levels(key: NestedKey) -> list[NestedKey]:
    """Return a key and the keys of the containers that it is in, innermost first."""
    parts = unravel_key_to_tuple(key)
    return [unravel_key(parts[:end]) for end in range(len(parts), 0, -1)]


def _is_left(tensordict: TensorDictBase, level: NestedKey, key: NestedKey) -> bool:
    """Return whether there is something to remove: the entry itself, or an empty level above."""
    if not has_entry(tensordict, level):
        return False
    found: object = tensordict.get(level)
    return level == key or (isinstance(found, TensorDictBase) and not list(found.keys()))


def _remove(tensordict: TensorDictBase, key: NestedKey) -> None:
    *above, name = unravel_key_to_tuple(key)
    holder = cast("TensorDictBase", tensordict.get(tuple(above)) if above else tensordict)
    if isinstance(holder, TensorClass):
        holder.set(name, None)
    else:
        del holder[name]
