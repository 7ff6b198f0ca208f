"""Hooks of FSDP on keyed modules: they see the tensors that a module reads and writes.

FSDP2 casts what a module is called with, and learns from inputs and outputs when the gradients of
its parameters are needed. It finds tensors in lists, tuples and dicts alone. So in a call with a
container, its hooks get the tensors at `in_keys` and `out_keys`, as if the module took those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kd_core import LazyStackedTensorDict, NestedKey, TensorDictBase, is_tensor_collection
from kd_nn._dispatch.dispatch import keys_of
from kd_nn._dispatch.entries import write_entries

if TYPE_CHECKING:
    from typing import TypeVar

    H = TypeVar("H", bound=Callable[..., object])


Place: TypeAlias = tuple[TensorDictBase, NestedKey, Tensor]
"""A container without members, a key, and the tensor at it."""

_FSDP: Final = "torch.distributed.fsdp."


class TensorHooks(nn.Module):
    """A module that shows tensors to the hooks of FSDP, and containers to all others."""

    # The signatures are those of torch.
    def register_forward_pre_hook(
        self, hook: H, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Register a hook that runs before `forward`; see `nn.Module`."""
        before = partial(_before, hook) if with_kwargs and is_of_fsdp(hook) else hook
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
        after = hook if with_kwargs or not is_of_fsdp(hook) else partial(_after, hook)
        return super().register_forward_hook(
            after, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
        )


def is_of_fsdp(hook: object) -> bool:
    """Return whether FSDP registers a hook."""
    return str(getattr(hook, "__module__", None)).startswith(_FSDP)


class _Replaced(NamedTuple):
    """A container that takes the place of the caller's, because a hook changed tensors."""

    given: TensorDictBase
    work: TensorDictBase
    before: TensorDictBase
    """The entries of `work` before the call."""


class _Calls(threading.local):
    """The calls in this thread whose container was replaced, innermost last."""

    def __init__(self) -> None:
        self.running: list[_Replaced] = []


_CALLS: Final = _Calls()


def _before(
    hook: Callable[..., object],
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Call a hook before `forward` with the tensors that a call with a container reads."""
    if not args and is_tensor_collection(kwargs.get("tensordict")):
        kwargs = dict(kwargs)
        args = (kwargs.pop("tensordict"),)
    if not args or not is_tensor_collection(args[0]):
        return hook(module, args, kwargs)
    given, keys = args[0], keys_of(module, "in_keys")
    tensors = [tensor for _, _, tensor in _places(given, keys)]
    (changed,), _ = cast("tuple[tuple[list[Tensor]], object]", hook(module, (tensors,), {}))
    if _same(tensors, changed):
        return args, kwargs
    work = given.copy()
    _put(_places(work, keys), changed)
    _CALLS.running.append(_Replaced(given, work, work.copy()))
    return (work, *args[1:]), kwargs


def _after(
    hook: Callable[..., object], module: nn.Module, args: tuple[object, ...], output: object
) -> object:
    """Call a hook after `forward` with the tensors that a call with a container has written."""
    replaced = _ended(args[0]) if args else None
    if not is_tensor_collection(output):
        return hook(module, args, output)
    places = _places(output, keys_of(module, "out_keys"))
    tensors = [tensor for _, _, tensor in places]
    changed = cast("list[Tensor]", hook(module, (tensors,), tensors))
    if not _same(tensors, changed):
        _put(places, changed)
    if replaced is None or output is not replaced.work:
        return output
    for given, work, before in zip(*map(_parts, replaced), strict=True):
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


def _parts(tensordict: TensorDictBase) -> list[TensorDictBase]:
    """Return the members of a lazy stack, else the container."""
    if not isinstance(tensordict, LazyStackedTensorDict):
        return [tensordict]
    members = tensordict.unbind(tensordict.stack_dim)
    return [part for member in members for part in _parts(member)]


def _places(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[Place]:
    """Return where the tensors at keys are; a key that is absent has none."""
    found: list[Place] = []
    for part in _parts(tensordict):
        for key in keys:
            value: object = part.get(key, None)
            if isinstance(value, Tensor):
                found.append((part, key, value))
            elif is_tensor_collection(value):
                found += _places(value, list(value.keys()))
    return found


def _put(places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
    for (part, key, _), tensor in zip(places, tensors, strict=True):
        part.set(key, tensor)


def _same(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    return all(before is after for before, after in zip(old, new, strict=True))
