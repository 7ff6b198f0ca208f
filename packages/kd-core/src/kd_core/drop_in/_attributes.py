"""Attributes of containers and keyed modules that libraries use without a promise of tensordict.

Programs that do not run under the drop-in do not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from kd_core import (
    NO_DEFAULT,
    LazyStackedTensorDict,
    NestedKey,
    TensorClass,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    stack,
)

if TYPE_CHECKING:
    pass

# What only tunes speed in tensordict.
_IGNORED = ("num_threads", "checked", "call_on_unbatched", "is_shared", "is_memmap", "nested")

# Any: what is passed on unchanged to a method that checks it.


def _get(self: TensorDictBase, key: NestedKey, default: object = NO_DEFAULT, **how: Any) -> object:
    return self[key] if default is NO_DEFAULT and not how else self.get(key, default, **how)


def _set(
    self: TensorDictBase,
    key: NestedKey,
    value: object,
    *,
    inplace: bool = False,
    validated: bool = False,
    ignore_lock: bool = False,
    non_blocking: bool = False,
) -> TensorDictBase:
    return self.set(key, value, inplace=inplace, non_blocking=non_blocking)


def _get_at(self: TensorDictBase, key: Any, index: Any, default: object = NO_DEFAULT) -> object:
    return self.get_at(key, index, default)


def _set_at(
    self: TensorDictBase, key: Any, value: object, index: Any, **how: object
) -> TensorDictBase:
    return self.set_at_(key, value, index)


def _apply(
    self: TensorDictBase, fn: Callable[..., object], *others: TensorDictBase, **how: Any
) -> TensorDictBase:
    for name in _IGNORED:
        how.pop(name, None)
    if how.get("filter_empty", False) is None:
        how["filter_empty"] = False
    named = how.pop("named", False)
    if not named:
        how.pop("nested_keys", None)
        how.pop("prefix", None)
    return (self.named_apply if named else self.apply)(fn, *others, **how)


def _new_unsafe(
    cls: type[TensorDict],
    source: Any = None,
    batch_size: Sequence[int] | None = None,
    device: torch.device | None = None,
    names: Sequence[str] | None = None,
    non_blocking: bool | None = None,
    lock: bool = False,
    **entries: object,
) -> TensorDict:
    for name in _IGNORED:
        entries.pop(name, None)
    return TensorDict(source, batch_size, device, names, lock=lock, **entries)


def _from_tensordict(
    cls: type[TensorClass],
    tensordict: TensorDictBase,
    non_tensordict: Mapping[str, object] | None = None,
    safe: bool = True,
) -> TensorClass:
    return cls.from_tensordict(tensordict, non_tensordict)


def _has_names(self: TensorDictBase) -> bool:
    return any(name is not None for name in self.names)


def _stack_onto_(
    self: TensorDictBase, list_item: Sequence[TensorDictBase], dim: int
) -> TensorDictBase:
    return stack(list_item, dim, out=self)


def _has_exclusive_keys(self: LazyStackedTensorDict) -> bool:
    common = set(self.keys())
    return any(set(member.keys()) != common for member in self.tensordicts) or any(
        getattr(value, "_has_exclusive_keys", False)
        for member in self.tensordicts
        for value in member.values()
        if is_tensor_collection(value)
    )


def _sync_all(self: TensorDictBase) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def serve_containers() -> None:
    """Add the attributes of containers."""
    for name, value in {
        "_get_str": _get,
        "_get_tuple": _get,
        "_set_str": _set,
        "_set_tuple": _set,
        "_get_at_str": _get_at,
        "_get_at_tuple": _get_at,
        "_set_at_str": _set_at,
        "_set_at_tuple": _set_at,
        "_fast_apply": _apply,
        "_apply_nest": _apply,
        "_has_names": _has_names,
        "_stack_onto_": _stack_onto_,
        "_sync_all": _sync_all,
        "_get_sub_tensordict": TensorDictBase.__getitem__,
        "_has_exclusive_keys": False,
    }.items():
        setattr(TensorDictBase, name, value)
    for cls, name, value in (
        (TensorDict, "_new_unsafe", classmethod(cast("Callable[..., object]", _new_unsafe))),
        (
            TensorClass,
            "_from_tensordict",
            classmethod(cast("Callable[..., object]", _from_tensordict)),
        ),
        (LazyStackedTensorDict, "_has_exclusive_keys", property(_has_exclusive_keys)),
    ):
        setattr(cls, name, value)


def serve_modules() -> None:
    """Add the attributes of keyed modules."""
