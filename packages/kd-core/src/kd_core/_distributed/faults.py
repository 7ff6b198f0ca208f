"""Which ranks ended or hang: those that do not report that a call failed.

A backend says that a connection broke or that time is up, not which rank is the cause. So each rank
on which a call fails writes so into the store of the group, and waits a little for the others.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kd_core._torch_private import store_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GRACE: Final = 2.0
"""Seconds in which other ranks report that a call failed."""

_PAUSE: Final = 0.02
_MOST_NAMED: Final = 8


def cause_of(group: ProcessGroup, rank: int, size: int, name: str) -> str:
    """Return what is known of the ranks that made a call fail, and what to check.

    Args:
        group: the process group.
        rank: the rank of this process in it.
        size: the number of its ranks.
        name: the call.
    """
    try:
        silent = _silent(group, rank, size)
    except (RuntimeError, ValueError):
        return (
            "The store of the group does not answer: check whether the rank that holds it, most "
            "often rank 0, ended."
        )
    if not silent:
        return check_of("another rank", f"call `{name}`")
    told = named(silent[:_MOST_NAMED]) + (" and others" if len(silent) > _MOST_NAMED else "")
    return f"No report from {told}: {check_of('it', f'call `{name}`', 'check')}"


def check_of(who: str, what: str, verb: str = "Check") -> str:
    """Return what to check of ranks that may be the cause."""
    return f"{verb} whether {who} ended, or did not {what} within the timeout of the group."


def named(ranks: list[int]) -> str:
    """Return ranks in words."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _silent(group: ProcessGroup, rank: int, size: int) -> list[int]:
    """Return ranks that do not report a failure in time; at most one more than are named."""
    store = store_of(group)
    if store is None:
        return []
    keys = {other: f"kd/failed/{other}" for other in range(size)}
    store.set(keys.pop(rank), "")
    end = time.monotonic() + _GRACE
    while keys and not store.check(list(keys.values())):
        if time.monotonic() > end:
            break
        time.sleep(_PAUSE)
    found: list[int] = []
    for other, key in keys.items():
        if len(found) > _MOST_NAMED:
            break
        if not store.check([key]):
            found.append(other)
    return found
