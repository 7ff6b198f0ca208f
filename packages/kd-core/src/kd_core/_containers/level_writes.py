"""Tensors that are stored at once in a container and one level below it: all or none.

The fast path of `assign` for what a step writes below `next`: a sixth of the time of one key after
the other, and a hundredth of the program "world_model" of the benchmarks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from kd_core._leaves.loops import all_fit, leaf_fits
from kd_core._nodes import registry

if TYPE_CHECKING:
    from kd_core._containers.dense import Dense

    Levels: TypeAlias = dict[str, Tensor | dict[str, Tensor]]


def assign_levels(td: Dense, entries: dict[object, object]) -> bool:
    """Store tensors by keys of one or two parts; return `False`, with nothing stored, if unsure.

    Args:
        td: a container that stores any tensor of the right shape: not locked, of no device.
        entries: the new entries.
    """
    levels = _levels_of(entries)
    if levels is None or not _fit(td, levels):
        return False
    own, desc = td._entries, td._desc
    for key, value in levels.items():
        level = None if isinstance(value, Tensor) else own.get(key)
        if isinstance(value, Tensor):
            own[key] = value
        elif level is None:
            own[key] = registry.make_dense(value, desc)
            td._nested = True
        else:
            level._entries.update(value)  # type: ignore[union-attr]  # a container, as `_fit` saw
    return True


def _levels_of(entries: dict[object, object]) -> Levels | None:
    """Return tensors by their key, those with two parts in a dict; `None` for other entries."""
    levels: Levels = {}
    for key, value in entries.items():
        if value.__class__ is not Tensor:
            return None
        if isinstance(key, str):
            if key in levels:
                return None
            levels[key] = value
        elif isinstance(key, tuple) and len(key) == 2 and key[0].__class__ is str:
            level = levels.get(key[0])
            if level is None:
                level = levels[key[0]] = {}
            elif level.__class__ is not dict:
                return None
            level[key[1]] = value
        else:
            return None
    return levels


def _fit(td: Dense, levels: Levels) -> bool:
    """Return whether nothing has to be checked any more: keys, shapes, levels that are there."""
    own, desc = td._entries, td._desc
    for key, value in levels.items():
        if isinstance(value, Tensor):
            if key.__class__ is not str or not leaf_fits(value, desc):
                return False
            continue
        level = own.get(key)
        if level is not None and (level.__class__ is not td.__class__ or level._desc is not desc):
            return False
        if not all_fit(value, desc):  # type: ignore[arg-type]  # read alone
            return False
    return True
