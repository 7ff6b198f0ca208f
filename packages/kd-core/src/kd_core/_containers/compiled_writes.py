"""Entries that compiled code wrote, laid over the dict they belong in.

dynamo replays a write into a dict from outside the graph by way of all keys of that dict, and so
guards them all: a function that writes one entry would be compiled anew whenever an unrelated key
comes or goes. It replays the assignment of an attribute without looking at what was there before.
So compiled code lays what it writes over the dict, and assigns that in its place. The first look
at it after the call, from outside, moves the entries into the dict and puts the dict back.

Knows dicts and the one attribute that holds them; must not know containers.
"""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import TYPE_CHECKING, Protocol, cast

from torch.compiler import is_dynamo_compiling

if TYPE_CHECKING:
    from kd_core._entry import Entry


class Owner(Protocol):
    """What holds the entries."""

    _entries: dict[str, Entry]


class LateEntries(MutableMapping[str, "Entry"]):
    """A dict with later entries over it; looks like the dict that it becomes when looked at."""

    __slots__ = ("below", "late", "owner")

    owner: Owner
    below: dict[str, Entry]
    late: dict[str, Entry]

    def whole(self) -> dict[str, Entry]:
        """The dict: a new one while compiling, else the one below, which is put back."""
        if is_dynamo_compiling():
            return {**self.below, **self.late}
        below = self.below
        below.update(self.late)
        self.late = {}
        if cast(object, self.owner._entries) is self:
            self.owner._entries = below
        return below

    def get(self, key: str, default: object = None) -> Entry:
        """Read one entry; compiled code looks at no other."""
        if is_dynamo_compiling():
            return self.late[key] if key in self.late else self.below.get(key, default)  # type: ignore[arg-type]  # as of a dict
        return self.whole().get(key, default)  # type: ignore[arg-type]  # as of a dict

    def __getitem__(self, key: str) -> Entry:
        if is_dynamo_compiling():
            return self.late[key] if key in self.late else self.below[key]
        return self.whole()[key]

    def __contains__(self, key: object) -> bool:
        if is_dynamo_compiling():
            return key in self.late or key in self.below
        return key in self.whole()

    def __setitem__(self, key: str, value: Entry) -> None:
        self.whole()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.whole()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return len(self.whole())

    def keys(self) -> KeysView[str]:
        """The keys of the whole."""
        return self.whole().keys()

    def values(self) -> ValuesView[Entry]:
        """The entries of the whole."""
        return self.whole().values()

    def items(self) -> ItemsView[str, Entry]:
        """Keys and entries of the whole."""
        return self.whole().items()

    def copy(self) -> dict[str, Entry]:
        """A dict of its own."""
        return dict(self.whole())

    def __deepcopy__(self, memo: dict[int, object]) -> dict[str, Entry]:
        return copy.deepcopy(self.whole(), memo)


def lay_over(owner: Owner, late: Mapping[str, Entry]) -> None:
    """Write entries in compiled code."""
    entries: object = owner._entries
    # Slots written one by one: the call of a class takes twice as long to trace.
    whole = object.__new__(LateEntries)
    whole.owner = owner
    if isinstance(entries, LateEntries):
        whole.below = entries.below
        whole.late = {**entries.late, **late}
    else:
        whole.below = owner._entries
        whole.late = {**late}
    owner._entries = whole  # type: ignore[assignment]  # looks like the dict that it becomes


def own_dict(owner: Owner) -> dict[str, Entry]:
    """The dict of entries, in place of what compiled code laid over it."""
    entries: object = owner._entries
    if isinstance(entries, LateEntries):
        owner._entries = entries.whole()
    return owner._entries
