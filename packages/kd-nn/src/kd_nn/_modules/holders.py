"""The modules of torch that hold the steps of a sequence, in a form that announces its edits.

`model.module` may be edited like any `nn.ModuleList`. Each edit raises flags, so that reading the
keys of a sequence compares no steps: the row "in_keys of 10 layers". `_modules` stays a plain dict,
as dynamo expects. Copies and pickles hold the class of torch: they load without this library, and
the sequence that gets one turns it into one of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, SupportsIndex

from torch import nn

from kd_nn._plan.invalidation import Flagged
from kd_nn._torch_private import REGISTRATION_HOOKS


class _Holder(Flagged):
    """What both kinds share; members that are assigned or deleted as attributes are seen there."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a member, or replace one."""
        try:
            super().add_module(name, module)
        finally:
            self._kd_flag_change()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Return how to copy or pickle it: as the class of torch."""
        plain = _PLAIN.get(type(self))
        if plain is None:  # a class that FSDP made, say
            return super().__reduce_ex__(protocol)
        return plain, (), self.__getstate__()

    def _get_name(self) -> str:
        return _PLAIN.get(type(self), type(self)).__name__


class StepModuleList(_Holder, nn.ModuleList):
    """An `nn.ModuleList` that raises flags when a member is added, replaced, moved or removed."""

    _kd_changes_by_assignment = True
    _kd_announces_members = True

    def insert(self, index: int, module: nn.Module) -> None:
        """Insert a member before a place."""
        try:
            super().insert(index, module)
        finally:
            self._kd_flag_change()


class StepModuleDict(_Holder, nn.ModuleDict):
    """An `nn.ModuleDict` that raises flags when a member is added, replaced, moved or removed."""

    _kd_changes_by_assignment = True
    _kd_announces_members = True

    def __delitem__(self, key: str) -> None:
        """Remove a member."""
        try:
            super().__delitem__(key)
        finally:
            self._kd_flag_change()

    def clear(self) -> None:
        """Remove all members."""
        super().clear()
        self._kd_flag_change()


_PLAIN: Final[dict[type, type[nn.Module]]] = {
    StepModuleList: nn.ModuleList,
    StepModuleDict: nn.ModuleDict,
}
_ANNOUNCING: Final[dict[type, type]] = {plain: kind for kind, plain in _PLAIN.items()}


def hold(steps: Iterable[nn.Module]) -> StepModuleList:
    """Return a list of steps, which are known to be modules: torch would check each again."""
    if REGISTRATION_HOOKS:
        return StepModuleList(steps)
    held = StepModuleList()
    held._modules.update({str(idx): step for idx, step in enumerate(steps)})
    return held


def adopt(holder: nn.Module | None) -> None:
    """Convert a list or dict of torch, in a new copy, to one that announces its edits."""
    if type(holder) in _ANNOUNCING:
        holder.__class__ = _ANNOUNCING[type(holder)]
