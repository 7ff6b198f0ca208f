"""Process groups: ranks, devices, and errors that name the call, and the ranks that ended or hang.

A backend says that a connection broke or that time is up, not which rank is the cause. So each rank
on which a call fails writes so into the store of the group, and waits a little for the others.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from kd_core._errors import CommunicationError, InvalidArgument, InvalidValue, KdError
from kd_core._torch_private import store_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_GRACE: Final = 2.0
"""Seconds in which other ranks report that a call failed."""

_PAUSE: Final = 0.02
_MOST_NAMED: Final = 8


class Team:
    """A process group, and what was called on it.

    Attributes:
        group: the process group.
        rank: the rank of this process in it.
        size: the number of its ranks.
        device: where messages of few bytes are.
        sent: the digest of the last header sent to each peer under a tag.
        received: the last header received from each peer under a tag.
        sending: what is being sent: a program may drop the handle of `isend`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.sent: dict[tuple[int, int], bytes] = {}
        self.received: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self.sending: list[dist.Work] = []
        self._types = {row.partition(":")[0] for row in _config_of(group).split(",")}
        on_cpu = "cpu" in self._types or not torch.cuda.is_available()
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self._calls = 0
        self._last = "none"

    def message(self, flat: Tensor) -> Tensor:
        """Return a tensor where the group can send it."""
        return flat if flat.device.type in self._types else flat.to(self.device)

    def place(self, device_type: str) -> torch.device:
        """Return the device for what other ranks have on a type of device."""
        return self.device if device_type not in self._types else torch.device(device_type)

    def global_rank(self, rank: int) -> int:
        """Return the rank in the default group of a rank of this group."""
        return dist.get_global_rank(self.group, rank)

    @contextmanager
    def calling(self, name: str, peer: int | None = None) -> Iterator[None]:
        """Name a call in errors of the backend, and the ranks that are the cause.

        Args:
            name: the call.
            peer: the only other rank that takes part; `None`: all do.
        """
        self._calls += 1
        try:
            yield
        except KdError:
            raise
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            cause = (
                cause_of(self.group, self.rank, self.size, name)
                if peer is None
                else check_of(f"rank {peer}", "answer")
            )
            raise CommunicationError(
                f"`{name}` failed on rank {self.rank} of {self.size}, in call {self._calls} on "
                f"this group (the last one that succeeded: {self._last}): "
                f"{reason.rstrip(' .')}. {cause}"
            ) from error
        self._last = f"call {self._calls}, `{name}`"


def _config_of(group: ProcessGroup) -> str:
    return str(dist.get_backend_config(group))


_TEAMS: Final[weakref.WeakKeyDictionary[ProcessGroup, Team]] = weakref.WeakKeyDictionary()


def team_of(group: ProcessGroup | None) -> Team:
    """Return what is known of a group; `None`: the default group.

    Raises:
        InvalidValue: if there is no default group, or this process is not in the group.
    """
    if not dist.is_initialized():
        raise InvalidValue(
            "the default process group does not exist. Call "
            "`torch.distributed.init_process_group` first."
        )
    group = dist.group.WORLD if group is None else group
    known = _TEAMS.get(group) if isinstance(group, dist.ProcessGroup) else None
    if known is None:
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise InvalidValue("this process is not in `group`. Call it on the ranks of the group.")
        known = _TEAMS[group] = Team(group)
    return known


def rank_in(team: Team, rank: int | None, group_rank: int | None, what: str) -> int:
    """Return a rank of the group, given as that of the default group or of the group.

    Raises:
        InvalidArgument: if both are given, or none.
        InvalidValue: if the group does not have the rank.
    """
    if (rank is None) == (group_rank is None):
        raise InvalidArgument(f"expected one of `{what}` and `group_{what}`. Pass exactly one.")
    if rank is not None:
        try:
            group_rank = dist.get_group_rank(team.group, rank)
        except (ValueError, RuntimeError):
            group_rank = -1
    if group_rank is None or not 0 <= group_rank < team.size:
        raise InvalidValue(
            f"`{what}` must be a rank of the group, got {rank if rank is not None else group_rank} "
            f"for a group of {team.size}."
        )
    return group_rank


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
