"""Storing what a plan makes, in a container and one level below it: all or none.

What a step writes below `next` was a twentieth of the program "world_model" of the benchmarks, as
long as its keys were sorted by level on each call. A plan knows them beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core._containers.tensordict import TensorDict, make_dense
from kd_core._leaves.loops import all_fit, leaf_fits

if TYPE_CHECKING:
    from kd_core._base import TensorDictBase
    from kd_core._types import NestedKey


def assign_levels(td: TensorDictBase, entries: dict[str, object], levels: tuple[str, ...]) -> None:
    """Store a value at each key, as `assign` does, some of them below containers that stay.

    Args:
        td: the container that is written.
        entries: values by key.
        levels: the keys whose value is a dict of what is stored below that key.

    Raises:
        ShapeMismatch: if a value does not fit the batch size; nothing is stored then.
        Locked: if the container is locked.

    Example:
        >>> from kd_core import TensorDict
        >>> from kd_core.extending import assign_levels
        >>> td = TensorDict({"a": {"b": 0.0}})
        >>> assign_levels(td, {"a": {"c": 1.0}, "d": 2.0}, ("a",))
        >>> td.to_dict()
        {'a': {'b': tensor(0.), 'c': tensor(1.)}, 'd': tensor(2.)}
    """
    if td.__class__ is not TensorDict or is_dynamo_compiling() or not _fit(td, entries, levels):
        td.assign(_by_path(entries, levels))
        return
    own, desc = td._kd_entries, td._kd_desc
    for key, value in entries.items():
        if key not in levels:
            own[key] = cast("Tensor", value)
        elif key in own:
            cast("TensorDict", own[key])._kd_entries.update(cast("dict[str, Tensor]", value))
        else:
            own[key] = make_dense(cast("dict[str, Tensor]", value), desc, False)  # type: ignore[arg-type]  # entries
            td._kd_nested = True


def _fit(td: TensorDict, entries: dict[str, object], levels: tuple[str, ...]) -> bool:
    """Return whether nothing has to be checked any more: locks, keys, shapes, what is there."""
    own, desc = td._kd_entries, td._kd_desc
    if not desc.plain:
        return False
    for key, value in entries.items():
        if key not in levels:
            if value.__class__ is not Tensor or not leaf_fits(value, desc):
                return False
            continue
        level = own.get(key)
        if level is not None and (level.__class__ is not TensorDict or level._kd_desc is not desc):
            return False
        if not all_fit(cast("dict[str, object]", value), desc):
            return False
    return True


def _by_path(entries: dict[str, object], levels: tuple[str, ...]) -> dict[NestedKey, object]:
    flat: dict[NestedKey, object] = {}
    for key, value in entries.items():
        if key in levels:
            below = cast("dict[str, object]", value)
            flat.update({(key, name): leaf for name, leaf in below.items()})
        else:
            flat[key] = value
    return flat
