"""An overlay for entries that are written in compiled code.

dynamo replays a write into a dict from outside the graph and adds guards on all keys of that dict:
a function that writes one entry would be recompiled whenever an unrelated key is added or removed.
The assignment of an attribute has no such guards. So compiled code stores the new entries in an
overlay, and assigns the overlay in place of the dict. The first read in eager code moves the
entries into the dict and restores it.

Knows dicts and the one attribute that holds them; must not know containers.
"""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import TYPE_CHECKING, cast

from torch.compiler import is_dynamo_compiling

if TYPE_CHECKING:
    from typing import Protocol

    from kd_core._nodes.entry import Entry

    class Owner(Protocol):
        """The container that holds the entries."""

        _kd_entries: dict[str, Entry]


class LateEntries(MutableMapping[str, "Entry"]):
    """A dict with an overlay of later entries, which it merges when it is read in eager code."""

    __slots__ = ("below", "late", "owner")

    owner: Owner
    below: dict[str, Entry]
    late: dict[str, Entry]

    def merged(self) -> dict[str, Entry]:
        """Return the merged dict: a new one while compiling, else the original, restored."""
        if is_dynamo_compiling():
            return {**self.below, **self.late}
        below = self.below
        below.update(self.late)
        self.late = {}
        if cast(object, self.owner._kd_entries) is self:
            self.owner._kd_entries = below
        return below

    def get(self, key: str, default: object = None) -> Entry:
        """Return one entry; compiled code reads only this key."""
        if is_dynamo_compiling():
            return self.late[key] if key in self.late else self.below.get(key, default)  # type: ignore[arg-type]  # as of a dict
        return self.merged().get(key, default)  # type: ignore[arg-type]  # as of a dict

    def __getitem__(self, key: str) -> Entry:
        if is_dynamo_compiling():
            return self.late[key] if key in self.late else self.below[key]
        return self.merged()[key]

    def __contains__(self, key: object) -> bool:
        if is_dynamo_compiling():
            return key in self.late or key in self.below
        return key in self.merged()

    def __setitem__(self, key: str, value: Entry) -> None:
        self.merged()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.merged()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.merged())

    def __len__(self) -> int:
        return len(self.merged())

    def keys(self) -> KeysView[str]:
        """Return the keys of the merged dict."""
        return self.merged().keys()

    def values(self) -> ValuesView[Entry]:
        """Return the entries of the merged dict."""
        return self.merged().values()

    def items(self) -> ItemsView[str, Entry]:
        """Return the keys and entries of the merged dict."""
        return self.merged().items()

    def copy(self) -> dict[str, Entry]:
        """Return a copy of the merged dict."""
        return dict(self.merged())

    def __deepcopy__(self, memo: dict[int, object]) -> dict[str, Entry]:
        return copy.deepcopy(self.merged(), memo)


def overlay(owner: Owner, late: Mapping[str, Entry]) -> None:
    """Write entries in compiled code."""
    entries: object = owner._kd_entries
    # The slots are set one by one because calling a class is slow to trace.
    entries_with_late = object.__new__(LateEntries)
    entries_with_late.owner = owner
    if isinstance(entries, LateEntries):
        entries_with_late.below = entries.below
        entries_with_late.late = {**entries.late, **late}
    else:
        entries_with_late.below = owner._kd_entries
        entries_with_late.late = {**late}
    owner._kd_entries = entries_with_late  # type: ignore[assignment]  # behaves like a dict


def own_dict(owner: Owner) -> dict[str, Entry]:
    """Return the dict of entries; merge the overlay of compiled code into it."""
    entries: object = owner._kd_entries
    if isinstance(entries, LateEntries):
        owner._kd_entries = entries.merged()
    return owner._kd_entries
