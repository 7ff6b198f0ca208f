"""Modules that say when something changes that decides how they run.

A plan, and the resolved graph of a sequence, hold only while the keys and the structure stay as
they were. Looking at all of that on each call would cost more than the plan gains. So an
assignment to an attribute that matters appends to a list, the flag, which whoever depends on the
module has kept: testing an empty list costs 5 ns.
"""

from typing import Self

from torch import nn

_DECIDES_HOW_IT_RUNS = frozenset(
    {
        "__call__",
        "__class__",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_compiled_call_impl",
        "_forward_hooks",
        "_forward_pre_hooks",
        "forward",
        "in_keys",
        "inplace",
        "method",
        "method_kwargs",
        "module",
        "out_keys",
        "partial_tolerant",
        "strict",
    }
)
_NEVER_COPIED = ("_changed", "_plan", "_plans_made", "_resolved")
"""What belongs to one object alone: the fast calls made for it."""


def flags_of(step: nn.Module) -> "list[list[bool]]":
    """Return the change flags of a step and of the keyed modules inside, whose keys it may take."""
    return [member.change_flag() for member in step.modules() if isinstance(member, Flagged)]


class Flagged(nn.Module):
    """A module that raises its flag when its keys or its structure are assigned."""

    def __setattr__(self, name: str, value: object) -> None:
        """Assign, and tell the fast calls if it matters to them."""
        super().__setattr__(name, value)  # type: ignore[arg-type]  # torch types modules only
        if name in _DECIDES_HOW_IT_RUNS:
            self._flag_change()

    def __delattr__(self, name: str) -> None:
        """Delete, and tell the fast calls if it matters to them."""
        super().__delattr__(name)
        if name in _DECIDES_HOW_IT_RUNS:
            self._flag_change()

    def __getstate__(self) -> dict[str, object]:
        """Return the state to copy or pickle, without anything made for the fast call."""
        state: dict[str, object] = super().__getstate__()  # type: ignore[no-untyped-call]  # by torch
        return {name: value for name, value in state.items() if name not in _NEVER_COPIED}

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # by torch
        for name in _NEVER_COPIED:
            replica.__dict__.pop(name, None)
        return replica

    def _flag_change(self) -> None:
        flag = self.__dict__.pop("_changed", None)
        if flag is not None:
            flag.append(True)
        self.__dict__.pop("_plan", None)
        self.__dict__.pop("_resolved", None)

    def change_flag(self) -> list[bool]:
        """Return a list that gets an element as soon as the keys or the structure change."""
        flag: list[bool] = self.__dict__.setdefault("_changed", [])
        return flag
