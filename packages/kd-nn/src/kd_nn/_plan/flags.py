"""Flags: how a cache learns that something it was made from has changed.

A cache hands a list, its flag, to all that it depends on. What changes appends to the flags that it
was handed, and forgets them. Testing an empty list is the cheapest guard there is, and one list is
enough however much the cache depends on: the rows "in_keys of 10 layers" and "10 layers". A flag
is handed over *before* anything is read, so that a change made meanwhile by another thread leaves
the cache stale, not wrong.

Flags stand in the `__dict__` of what may change. They are raised without a lock, because dynamo
traces assignments.
"""

import threading
from typing import Final, TypeAlias, cast

Flag: TypeAlias = list[bool]
"""Empty until a change."""
FLAGS: Final = "_flags"
"""The attribute that holds the flags."""
_HANDING: Final = threading.RLock()
"""Held while a flag is handed over, so that no thread drops the flag of another one.

It may be entered twice: a garbage collection meanwhile runs code of anybody.
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

    def add(self, state: dict[str, object]) -> None:
        """Add the flag to those in the `__dict__` of what may change."""
        with _HANDING:
            flags = None
            while flags is None or state.get(FLAGS) is not flags:  # they were raised meanwhile
                flags = cast("list[Flag]", state.setdefault(FLAGS, []))
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
