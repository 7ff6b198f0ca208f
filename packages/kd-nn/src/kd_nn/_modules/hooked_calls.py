"""Calls of the hooks of FSDP with the tensors that a call with a container reads and writes.

Knows keys and the protocol of these hooks; must not know how a hook is registered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias, cast

from torch import Tensor, nn

from kd_core import NestedKey, TensorDictBase
from kd_nn._dispatch.dispatch import keys_of
from kd_nn._dispatch.entries import parts_of, write_entries

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
