"""The modules of torch that hold the steps of a sequence, in a form that announces each change.

`model.module` may be edited like any `nn.ModuleList`, and torch writes its `_modules` directly when
it swaps modules. So that nobody has to compare the steps, every such write raises flags. Copies and
pickles hold the plain class of torch: they load without this library, and the sequence that gets
one turns it into one of these.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, SupportsIndex

from torch import nn

from kd_nn._plan.flags import FlaggedDict
from kd_nn._plan.invalidation import Flagged


class _Holder(Flagged):
    """What both kinds share."""

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

    changes_by_assignment = True

    def __init__(self, modules: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        self.__dict__["_modules"] = FlaggedDict()
        if modules is not None:
            self.extend(modules)

    def __delitem__(self, idx: int | slice) -> None:
        """Delete members; those after them are numbered anew."""
        super().__delitem__(idx)  # assigns a new dict
        self.__dict__["_modules"] = FlaggedDict(self._modules)


class StepModuleDict(_Holder, nn.ModuleDict):
    """An `nn.ModuleDict` that raises flags when a member is added, replaced, moved or removed."""

    changes_by_assignment = True

    def __init__(self, modules: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.__dict__["_modules"] = FlaggedDict()
        if modules is not None:
            self.update(modules)


_PLAIN: Final[dict[type, type[nn.Module]]] = {
    StepModuleList: nn.ModuleList,
    StepModuleDict: nn.ModuleDict,
}
_ANNOUNCING: Final = {plain: kind for kind, plain in _PLAIN.items()}


def hold(steps: Iterable[nn.Module]) -> StepModuleList:
    """Return a list of modules; they are known to be modules."""
    held = StepModuleList()
    if nn.modules.module._global_module_registration_hooks:
        return held.extend(steps)
    dict.update(held._modules, {str(idx): step for idx, step in enumerate(steps)})
    return held


def adopt(holder: nn.Module | None) -> None:
    """Let a list or dict of torch that was just made announce each change."""
    kind = None if holder is None else _ANNOUNCING.get(type(holder))
    if kind is not None and holder is not None and "_modules" in holder.__dict__:
        holder.__class__ = kind
        holder.__dict__["_modules"] = FlaggedDict(holder._modules)
