"""Keyed modules that invalidate what was derived from them.

A plan, and the resolved graph of a sequence, are caches of how a module runs. Comparing all that
they were made from on each call would cost more than they save. So a change of the module appends
to a list, its *change flag*, which every cache that depends on the module has kept: testing an
empty list is the cheapest guard there is.

What counts as a change is decided by exclusion: every assignment and every deletion of an
attribute, except

- one that leaves the very object in place that was there before,
- a mark of torch's own (`HARMLESS`), and
- `training` of the classes of this library: they do not read it, and what they wrap reads it when
  it runs. The keys of any other class may depend on it.

What a class of the user computes (`in_keys` as a property, say) may change without an assignment,
so whoever depends on it compares it. Functions assigned on a class are compared with those that it
defined. Not seen is what writes past the attributes, such as `module.__dict__["in_keys"] = ...`.
A cache takes the flags *before* it reads anything, so that a change made meanwhile by another
thread leaves it stale, not wrong.
"""

import threading
from collections.abc import Mapping
from typing import ClassVar, Final, Self

from torch import nn

_NEVER_COPIED = ("_changed", "_plan", "_plans_made", "_resolved")
"""What belongs to one object alone: its flag, and what was derived from it."""
_ABSENT = object()
_TAKING: Final = threading.Lock()
"""Two threads must not give one module two flags: only one of them would be raised."""
HARMLESS: Final = frozenset({"_is_torch_compile"})
"""Marks that torch puts on a module, and that nothing derived from a keyed module depends on."""
LAST_RAISED: Final[list[list[bool]]] = [[]]
"""Holds the flag that was raised last, of any module: while it stays the same, no other was.

Comparing it takes the same time for two flags as for twenty; the row "in_keys of 10 layers".
"""
RUNNING: Final = (
    "forward",
    "forward_values",
    "call_wrapped",
    "split_outputs",
    "__call__",
    "_call_impl",
    "_wrapped_call_impl",
)
"""What a class may define to say how its modules run."""


def flags_of(step: nn.Module) -> "list[list[bool]]":
    """Return the change flags of a step and of the keyed modules inside, whose keys it may take."""
    members = {step: None}
    rest = [step]  # in one loop, since `modules()` of torch makes names, too
    for member in rest:
        for inside in member._modules.values():
            if inside is not None and inside not in members:
                members[inside] = None
                rest.append(inside)
    return [member.change_flag() for member in members if isinstance(member, Flagged)]


class Flagged(nn.Module):
    """A module that raises its change flag whenever an attribute is assigned or deleted."""

    changes_by_assignment: ClassVar[bool] = False
    """Whether keys and settings change only when an attribute other than `training` is assigned.

    True for the classes of this library. A class of the user may compute them from anything, so
    what depends on it compares them.
    """

    defined: ClassVar[Mapping[str, object]] = {}
    """The functions among `RUNNING` that the class defined when it was made."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Record the functions that the class defines; expect it to compute its keys."""
        super().__init_subclass__(**kwargs)
        cls.changes_by_assignment = cls.__dict__.get("changes_by_assignment", False)
        cls.defined = {name: cls.__dict__[name] for name in RUNNING if name in cls.__dict__}

    def __setattr__(self, name: str, value: object) -> None:
        """Assign, and invalidate what was derived from the module."""
        state = self.__dict__
        is_same = state.get(name, _ABSENT) is value
        super().__setattr__(name, value)  # type: ignore[arg-type]  # torch types modules only
        is_harmless = name in HARMLESS or (name == "training" and self.changes_by_assignment)
        if is_same or is_harmless:
            return
        _raise_flag(state)
        if name == "__dict__":  # the new one may hold copies of the old one's caches
            _raise_flag(self.__dict__)

    def __delattr__(self, name: str) -> None:
        """Delete, and invalidate what was derived from the module."""
        super().__delattr__(name)
        self._flag_change()

    def __getstate__(self) -> dict[str, object]:
        """Return the state to copy or pickle, without anything derived from the module."""
        state: dict[str, object] = super().__getstate__()  # type: ignore[no-untyped-call]  # by torch
        return {name: value for name, value in state.items() if name not in _NEVER_COPIED}

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # by torch
        for name in _NEVER_COPIED:
            replica.__dict__.pop(name, None)
        return replica

    def _flag_change(self) -> None:
        """Invalidate what was derived from the module."""
        _raise_flag(self.__dict__)

    def change_flag(self) -> list[bool]:
        """Return a list that gets an element as soon as the module changes."""
        with _TAKING:
            flag: list[bool] | None = self.__dict__.get("_changed")
            if flag is None or flag:  # raised and still there, if `__dict__` was copied by hand
                flag = self.__dict__["_changed"] = []
            return flag


def running_classes(kind: type) -> list[type[Flagged]]:
    """Return the classes in which Python looks for `forward`, up to the one that defines it."""
    found: list[type[Flagged]] = []
    for base in kind.__mro__:
        if issubclass(base, Flagged):
            found.append(base)
            if "forward" in base.defined:
                break
    return found


def is_patched(kind: type) -> bool:
    """Return whether how modules of a class run was assigned on the class after it was made."""
    return any(
        base.__dict__.get(name) is not base.__dict__["defined"].get(name)
        for base in kind.__mro__
        if "defined" in base.__dict__
        for name in RUNNING
    )


def _raise_flag(state: dict[str, object]) -> None:
    flag = state.pop("_changed", None)
    if isinstance(flag, list):
        flag.append(True)
        LAST_RAISED[0] = flag
    state.pop("_plan", None)
    state.pop("_resolved", None)
