"""Calls that somebody watches: hidden outputs, and hooks that see tensors.

Knows one call of one module; must not know sequences or plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kd_core import NestedKey, TensorClass, TensorDictBase, unravel_key, unravel_key_to_tuple
from kd_nn._dispatch import has_entry, keys_of, parts_of, write_entries
from kd_nn._keys import DISCARD, Keys, overlaps
from kd_nn._plan.invalidation import Flagged

if TYPE_CHECKING:
    from typing import TypeVar

    H = TypeVar("H", bound=Callable[..., object])


# Calls of modules whose `forward` writes all of its outputs, whatever is selected.
#
# The classes of this library write what is selected. A class of the user need not know of
# `select_out_keys`: what its `forward` wrote to hidden keys is taken back after the call.

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


# Calls of the hooks of FSDP with the tensors that a call with a container reads and writes.
#
# Knows keys and the protocol of these hooks; must not know how a hook is registered.

Place: TypeAlias = tuple[TensorDictBase, NestedKey, Tensor]
"""A container without members, a key, and the tensor at it."""


class _Replaced:
    """A container that takes the place of the caller's, because a hook changed tensors.

    Attributes:
        given: the container of the caller.
        work: the one in its place.
        before: the entries of `work` before the call.
    """

    __slots__ = ("before", "given", "work")

    def __init__(self, given: TensorDictBase, work: TensorDictBase) -> None:
        self.given, self.work, self.before = given, work, work.copy()


class _Calls(threading.local):
    """The calls in this thread whose container was replaced, innermost last."""

    def __init__(self) -> None:
        self.running: list[_Replaced] = []


_CALLS: Final = _Calls()


def call_before(
    hook: Callable[..., object],
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Call a hook before `forward` with the tensors that a call with a container reads."""
    if not args and isinstance(kwargs.get("tensordict"), TensorDictBase):
        kwargs = dict(kwargs)
        args = (kwargs.pop("tensordict"),)
    if not args or not isinstance(args[0], TensorDictBase):
        return hook(module, args, kwargs)
    given, keys = args[0], keys_of(module, "in_keys")
    tensors = [tensor for _, _, tensor in _places(given, keys)]
    (changed,), _ = cast("tuple[tuple[list[Tensor]], object]", hook(module, (tensors,), {}))
    if _same(tensors, changed):
        return args, kwargs
    work = given.copy()
    _put(_places(work, keys), changed)
    _CALLS.running.append(_Replaced(given, work))
    return (work, *args[1:]), kwargs


def call_after(
    hook: Callable[..., object], module: nn.Module, args: tuple[object, ...], output: object
) -> object:
    """Call a hook after `forward` with the tensors that a call with a container has written."""
    replaced = _ended(args[0]) if args else None
    if not isinstance(output, TensorDictBase):
        return hook(module, args, output)
    places = _places(output, keys_of(module, "out_keys"))
    tensors = [tensor for _, _, tensor in places]
    changed = cast("list[Tensor]", hook(module, (tensors,), tensors))
    if not _same(tensors, changed):
        _put(places, changed)
    if replaced is None or output is not replaced.work:
        return output
    parts = map(parts_of, (replaced.given, replaced.work, replaced.before))
    for given, work, before in zip(*parts, strict=True):
        old = dict(before.items(True, True))
        new = {key: value for key, value in work.items(True, True) if value is not old.get(key)}
        write_entries(given, list(new), list(new.values()))
    return replaced.given


def _ended(work: object) -> _Replaced | None:
    """Return the call whose container this is; forget it and those inside that have failed."""
    running = _CALLS.running
    for position in reversed(range(len(running))):
        if running[position].work is work:
            found = running[position]
            del running[position:]
            return found
    return None


def _places(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[Place]:
    """Return where the tensors at keys are; a key that is absent has none."""
    found: list[Place] = []
    for part in parts_of(tensordict):
        for key in keys:
            value: object = part.get(key, None)
            if isinstance(value, Tensor):
                found.append((part, key, value))
            elif isinstance(value, TensorDictBase):
                found += _places(value, list(value.keys()))
    return found


def _put(places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
    for (part, key, _), tensor in zip(places, tensors, strict=True):
        part.set(key, tensor)


def _same(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    return all(before is after for before, after in zip(old, new, strict=True))


# Hooks of FSDP on keyed modules: they see the tensors that a module reads and writes.
#
# FSDP2 casts what a module is called with, and learns from inputs and outputs when the gradients
# of its parameters are needed. It finds tensors in lists, tuples and dicts alone. So in a call
# with a container, its hooks get the tensors at `in_keys` and `out_keys`, as if the module took
# those.

_FSDP: Final = "torch.distributed.fsdp."


class TensorHooks(nn.Module):
    """A module that shows tensors to the hooks of FSDP, and containers to all others."""

    # The signatures are those of torch.
    def register_forward_pre_hook(
        self, hook: H, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Register a hook that runs before `forward`; see `nn.Module`."""
        before: Callable[..., object] = hook
        if with_kwargs and is_of_fsdp(hook):
            before = partial(call_before, hook)
        return super().register_forward_pre_hook(before, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self,
        hook: H,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> RemovableHandle:
        """Register a hook that runs after `forward`; see `nn.Module`."""
        after: Callable[..., object] = hook
        if not with_kwargs and is_of_fsdp(hook):
            after = partial(call_after, hook)
        return super().register_forward_hook(
            after, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
        )


def is_of_fsdp(hook: object) -> bool:
    """Return whether FSDP registers a hook."""
    return str(getattr(hook, "__module__", None)).startswith(_FSDP)
