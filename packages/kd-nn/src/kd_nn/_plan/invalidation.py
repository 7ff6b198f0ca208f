"""Keyed modules that invalidate what was derived from them.

A plan, and the resolved graph of a sequence, are caches of how a module runs. Comparing all that
they were made from on each call would cost more than they save. So a change of the module raises
the flag of every cache that depends on it.

What counts as a change is decided by exclusion: every assignment and every deletion of an
attribute, except

- one that leaves the very object in place that was there before,
- a mark of torch's own (`MARKS`), and
- `training` of the classes of this library: they do not read it, and what they wrap reads it when
  it runs. The keys of any other class may depend on it.

What a class of the user computes (`in_keys` as a property, say) may change without an assignment,
so whoever depends on it compares it. Functions assigned on a class are compared with those that it
defined. A list of steps raises its flags whenever it is edited, but for a direct write into its
`_modules`, as in some tools of torch. Whoever runs a module compares the steps, too, and
`raise_if_written` then raises the flags. A dict that raises flags cannot stand there: dynamo would
give parameters other names in exported graphs.
Not seen is what writes past the attributes, such as `module.__dict__["in_keys"] = ...`, and a
property of keys that is assigned on a class after the class was made.

A cache hands a list, its flag, to all that it depends on. What changes appends to the flags that it
was handed, and forgets them. Testing an empty list is the cheapest guard there is, and one list is
enough however much the cache depends on: the rows "in_keys of 10 layers" and "10 layers". A flag
is handed over *before* anything is read, so that a change made meanwhile by another thread leaves
the cache stale, not wrong. Flags stand in the `__dict__` of what may change. They are raised
without a lock, because dynamo traces assignments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Self, TypeAlias

from torch import nn
from torch.compiler import is_dynamo_compiling

from kd_core.extending import assume_constant_result
from kd_nn._torch_private import CALLS, MARKS

Flag: TypeAlias = list[bool]
"""Empty until a change."""
Check: TypeAlias = Callable[[nn.Module, str, object], object]
"""Returns the value of a setting as it is stored, or raises: of module, name and value."""
FLAGS: Final = "_kd_flags"
"""The attribute that holds the flags."""
_HANDING: Final = threading.RLock()
"""Held while a flag is handed over, so that no thread drops the flag of another one.

It may be entered twice: a garbage collection in between may run any code.
"""
_MANY: Final = 16
"""From so many flags on, those that were raised are dropped each time their number has doubled."""


class Dependency:
    """What a cache depends on; the cache holds it, and it ends with the cache.

    Attributes:
        changed: The flag: it gets an element with each change.
    """

    __slots__ = ("changed",)

    def __init__(self) -> None:
        self.changed: Flag = []

    def __del__(self) -> None:
        self.changed.append(True)  # what was raised is dropped in the end

    def add(self, state: dict[str, Any]) -> None:
        """Add the flag to those in the `__dict__` of what may change."""
        with _HANDING:
            flags: list[Flag] | None = None
            while flags is None or state.get(FLAGS) is not flags:  # they were raised meanwhile
                flags = state.setdefault(FLAGS, [])
                count = len(flags)
                if count >= _MANY and not count & (count - 1):
                    # A new list, since another thread may be raising the flags of this one.
                    flags = state[FLAGS] = [flag for flag in flags if not flag]
                flags.append(self.changed)


def raise_flags(state: dict[str, object]) -> None:
    """Raise and forget the flags in a `__dict__`."""
    flags = state.pop(FLAGS, None)
    if isinstance(flags, list):
        for flag in flags:
            flag.append(True)


_SEEN: Final = "_kd_seen"
"""The attribute of a list of steps that holds its members, as they were when last looked at."""
CHANGED_IN_TRACE: Final = "_kd_changed_in_trace"
"""The attribute of a module that compiled code changes: compiled code has no plan of it then."""
_NEVER_COPIED = (
    CHANGED_IN_TRACE,
    FLAGS,
    _SEEN,
    "_kd_plan",
    "_kd_plans_made",
    "_kd_resolved",
    "_kd_traced",
    "_kd_traced_first",
    "_kd_traced_first_made",
    "_kd_traced_made",
)
"""What belongs to one object alone: its flags, and what was derived from it."""
_ABSENT = object()
_DERIVED: Final = frozenset(
    {FLAGS, _SEEN, "_kd_plan", "_kd_resolved", "_kd_traced", "_kd_traced_first"}
)
"""What a change invalidates."""
RUNNING: Final = (
    "forward",
    "_kd_forward_values",
    "_kd_forward_fed",
    "_kd_call_wrapped",
    "_kd_split_outputs",
    *CALLS,
)
"""What a class may define to say how its modules run."""


def depend_on(module: nn.Module) -> Dependency:
    """Return what a cache depends on that is derived from a module and the keyed modules inside."""
    found = Dependency()
    seen = {id(module)}
    rest = [module]  # in one loop, since `modules()` of torch makes names, too
    for member in rest:
        state = member.__dict__
        if isinstance(member, Flagged):
            if member._kd_announces_members:
                raise_if_written(member)
            found.add(state)
        members = state["_modules"]
        for inside in [*members.values()] if members else ():  # another thread may write it
            if inside is not None and id(inside) not in seen:
                seen.add(id(inside))
                rest.append(inside)
    return found


def raise_if_written(holder: nn.Module) -> None:
    """Raise the flags of a list of steps if its `_modules` was written directly."""
    state = holder.__dict__
    members = [*holder._modules.values()]
    seen = state.get(_SEEN)
    if seen != members:
        state[_SEEN] = members
        if seen is not None:  # None after an announced edit, which raised them
            raise_flags(state)


def lists_in(module: nn.Module) -> Iterator[Flagged]:
    """Yield the lists of steps in a module that announce their edits."""
    for member in module.modules():
        if isinstance(member, Flagged) and member._kd_announces_members:
            yield member


class Flagged(nn.Module):
    """A module that raises its flags whenever an attribute is assigned or deleted."""

    _kd_changes_by_assignment: ClassVar[bool] = False
    """Whether keys and settings change only when an attribute other than `training` is assigned.

    True for the classes of this library. A class of the user may compute them from anything, so
    what depends on it compares them.
    """

    _kd_announces_members: ClassVar[bool] = False
    """Whether it is a list of steps that raises its flags whenever a member is another one."""

    _kd_defined: ClassVar[Mapping[str, object]] = {}
    """The functions among `RUNNING` that the class defined when it was made."""

    _kd_found: ClassVar[Sequence[tuple[str, object]]] = ()
    """What the names of `RUNNING` meant in the class when it was made."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Record the functions that the class defines; expect it to compute its keys."""
        super().__init_subclass__(**kwargs)
        cls._kd_changes_by_assignment = cls.__dict__.get("_kd_changes_by_assignment", False)
        cls._kd_defined = {name: cls.__dict__[name] for name in RUNNING if name in cls.__dict__}
        cls._kd_found = [(name, getattr(cls, name, None)) for name in RUNNING]

    _kd_checks: ClassVar[Mapping[str, Check]] = {}
    """The check of each setting, by name."""

    def __setattr__(self, name: str, value: object) -> None:
        """Assign, and invalidate what was derived from the module.

        A setting is checked first, and nothing changes if it is refused.
        """
        check = self._kd_checks.get(name)
        if check is not None:
            value = check(self, name, value)
        state = self.__dict__
        is_same = state.get(name, _ABSENT) is value
        super().__setattr__(name, value)  # type: ignore[arg-type]  # torch types modules only
        if is_same:
            return
        if is_dynamo_compiling():
            if not self._kd_is_harmless(name):
                self._kd_note_traced_change()
                _invalidate(state)
        elif not (state.keys().isdisjoint(_DERIVED) or self._kd_is_harmless(name)):
            _invalidate(state)  # while it is built, nothing was derived
        if name == "__dict__":  # the new one may hold copies of the old one's caches
            _invalidate(self.__dict__)

    def _kd_is_harmless(self, name: str) -> bool:
        """Return whether an attribute changes nothing that is derived from the module."""
        return name in MARKS or (name == "training" and self._kd_changes_by_assignment)

    def __delattr__(self, name: str) -> None:
        """Delete, and invalidate what was derived from the module."""
        super().__delattr__(name)
        self._kd_flag_change()

    def __getstate__(self) -> dict[str, object]:
        """Return the state to copy or pickle, without anything derived from the module."""
        state: dict[str, object] = super().__getstate__()  # type: ignore[no-untyped-call]  # by torch
        state = {name: value for name, value in state.items() if name not in _NEVER_COPIED}
        state["_modules"] = dict(self._modules)  # not shared: a copy may be given other members
        return state

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # by torch
        for name in _NEVER_COPIED:
            replica.__dict__.pop(name, None)
        return replica

    def _kd_flag_change(self) -> None:
        """Invalidate what was derived from the module."""
        if is_dynamo_compiling():
            self._kd_note_traced_change()
        _invalidate(self.__dict__)

    @assume_constant_result
    def _kd_note_traced_change(self) -> None:
        """Note that compiled code changes the module, so that plans are made of no later call.

        dynamo runs it as it is, and makes the change itself only once all is traced.
        """
        self.__dict__[CHANGED_IN_TRACE] = True


def running_classes(kind: type) -> list[type[Flagged]]:
    """Return the classes in which Python looks for `forward`, up to the one that defines it."""
    found: list[type[Flagged]] = []
    for base in kind.__mro__:
        if issubclass(base, Flagged):
            found.append(base)
            if "forward" in base._kd_defined:
                break
    return found


def is_patched(kind: type) -> bool:
    """Return whether how modules of a class run was assigned on the class after it was made."""
    if not issubclass(kind, Flagged):
        return False
    for name, function in kind._kd_found:  # a generator would cost more than what it tests
        if getattr(kind, name, None) is not function:
            return True
    return False


def _invalidate(state: dict[str, object]) -> None:
    state.pop(_SEEN, None)
    raise_flags(state)
    state.pop("_kd_plan", None)
    state.pop("_kd_resolved", None)
    state.pop("_kd_traced", None)
    state.pop("_kd_traced_first", None)
