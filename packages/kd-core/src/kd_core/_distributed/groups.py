"""Process groups: ranks, devices, and errors that name the call, and the ranks that ended or hang.

A backend says that a connection broke or that time is up, not which rank is the cause. So each rank
on which a call fails writes so into the store of the group, and waits a little for the others.
"""

from __future__ import annotations

import json
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from kd_core._distributed.outlines import Outline, Row, digest_of, is_stack, outlined
from kd_core._errors import (
    CommunicationError,
    FormatError,
    InvalidArgument,
    InvalidValue,
    KdError,
    KeySetMismatch,
    ShapeMismatch,
    a_type,
)
from kd_core._keys import format_key
from kd_core._nodes import is_data, is_row_data
from kd_core._protocol import AbstractContainer, Composite
from kd_core._store.manifest import canonical
from kd_core._torch_private import store_of
from kd_core._wire import Header, container_of, header_of

if TYPE_CHECKING:
    from typing import TypeVar

    from torch.distributed import ProcessGroup

    from kd_core._keys import KeyPath
    from kd_core._types import DeviceLike

    W = TypeVar("W", bound=AbstractContainer)


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


# What a call returns that is still running.


class Handle:
    """A call on a process group that is still running.

    `wait` ends it: only then are received values written into the container. The container must not
    be written to before.
    """

    __slots__ = ("_finish", "_name", "_peer", "_team", "_works")

    def __init__(
        self,
        team: Team,
        name: str,
        works: Sequence[Work],
        finish: Callable[[], object],
        peer: int | None = None,
    ) -> None:
        self._team = team
        self._name = name
        self._peer = peer
        self._works: Sequence[Work] | None = works
        self._finish = finish

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._works is None or all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for the end of the call; a second time does nothing.

        Raises:
            CommunicationError: if it failed. Nothing has been written then.
        """
        works, self._works = self._works, None
        if works is None:
            return
        with self._team.calling(self._name, self._peer):
            for work in works:
                work.wait()
            self._finish()


# The error that says how the outlines of ranks differ.


def difference(call: str, told: Sequence[tuple[int, Sequence[Row]]]) -> KdError:
    """Return the error that names the first entry in which outlines differ.

    Args:
        call: the call that needs equal outlines.
        told: ranks and the rows of their outlines, which are not all equal.
    """
    (first, rows), *others = told
    expected = {row.path: row for row in rows}
    for rank, other in others:
        found = {row.path: row for row in other}
        for path in [*expected, *found]:
            mine, theirs = expected.get(path), found.get(path)
            if mine != theirs:
                kinds = _kinds_differ(call, path, (first, expected), (rank, found))
                return kinds or _different(call, path, (first, mine), (rank, theirs))
    raise AssertionError("the outlines are equal")


def _kinds_differ(
    call: str,
    path: KeyPath,
    mine: tuple[int, Mapping[KeyPath, Row]],
    theirs: tuple[int, Mapping[KeyPath, Row]],
) -> KdError | None:
    """Return the error for a container that is a lazy stack on one rank alone, if that is so."""
    for depth in range(len(path) + 1):
        above = path[:depth]
        stacks = [is_stack(rows, above) for _, rows in (mine, theirs)]
        if stacks[0] == stacks[1]:
            continue
        (lazy, _), (dense, rows) = (mine, theirs) if stacks[0] else (theirs, mine)
        if above and not any(each[:depth] == above and each != above for each in rows):
            return None  # it is not a container there
        what = f"entry {format_key(above)}" if above else "the container"
        return InvalidValue(
            f"`{call}` needs the same kinds of containers on all ranks: {what} is a lazy stack on "
            f"rank {lazy}, but dense on rank {dense}, as a part without rows is. Make it dense "
            "on all ranks before it is divided, with `densify(layout=torch.jagged)` or "
            "`contiguous()`."
        )
    return None


def _different(
    call: str, path: KeyPath, mine: tuple[int, Row | None], theirs: tuple[int, Row | None]
) -> KdError:
    (first, row), (rank, other) = mine, theirs
    key = f"entry {format_key(path)}"
    if row is None or other is None:
        has, lacks = (rank, first) if row is None else (first, rank)
        return KeySetMismatch(
            f"`{call}` needs the same keys on all ranks: {key} exists on rank {has}, but not on "
            f"rank {lacks}. Add it, or `select` the shared keys."
        )
    if row.dtype != other.dtype:
        return InvalidValue(
            f"`{call}` needs the same dtypes on all ranks: {key} is {row.dtype} on rank {first}, "
            f"but {other.dtype} on rank {rank}. Convert one of them."
        )
    return ShapeMismatch(
        f"`{call}` needs the same shapes on all ranks: {key} has the shape {row.shape} on rank "
        f"{first}, but {other.shape} on rank {rank}. Pad or index one of them."
    )


# Ranks agree on a call and on a schema before they exchange data.
#
# Each call starts with one message of a fixed size from each rank: a digest of the call and of the
# schema, and few bytes of content. Where digests differ, all ranks exchange what they stand for,
# and raise the same error. In a group of few ranks, content that fits travels with the digest, so
# that a small container takes one message in all: benchmarks/collectives.py.

FEW_RANKS: Final = 16
"""The largest group whose ranks gather what the others propose; larger ones reduce it."""

_CONTENT: Final = 1 << 15
"""Bytes of content that one rank receives from all others."""

_ALIGNMENT: Final = 16
"""Bytes: where the content of a dtype starts, so that it may be viewed there."""

_SLOTS: Final = 8
_LEAST: Final = -(2**63)


class Proposal(NamedTuple):
    """What a rank says about its call."""

    call: str
    """The operation, and the arguments that must be equal."""
    outline: Outline | None
    """What is compared; `None`: the rank takes what the others have."""
    content: Sequence[Tensor] | None = None
    """Flat tensors for all ranks, which travel with the proposal; `None`: they do not fit."""
    length: int = 0
    """The bytes of a message to follow; all ranks learn the largest."""
    problem: KdError | None = None
    """Why this rank cannot take part."""


class Agreement(NamedTuple):
    """What all ranks know after they agreed."""

    all_know: bool
    """Whether each rank had an outline."""
    length: int
    """The largest length."""
    contents: Tensor | None
    """The content of each rank, a row for each, if that of all ranks fits."""


def room(team: Team) -> int:
    """Return how many bytes of content travel with a proposal."""
    return _CONTENT // team.size // _ALIGNMENT * _ALIGNMENT if team.size <= FEW_RANKS else 0


def content_of(flats: Sequence[Tensor], most: int) -> Sequence[Tensor] | None:
    """Return flat tensors if they are at most so many bytes, each at an aligned place."""
    fits = most and sum(_aligned(flat.nbytes) for flat in flats) <= most
    return flats if fits else None


def shares(content: Tensor, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each flat tensor that holds values, and what contents have for it.

    Args:
        content: the bytes that travelled with a proposal, or rows of that.
        flats: flat tensors of the same sizes as those that were sent.
    """
    start = 0
    for flat in flats:
        if flat.numel():
            yield flat, content[..., start : start + flat.nbytes].view(flat.dtype)
        start += _aligned(flat.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def agree(team: Team, mine: Proposal) -> Agreement:
    """Return what all ranks know, after they agreed.

    Raises:
        KeySetMismatch: if keys differ between ranks.
        ShapeMismatch: if shapes do.
        InvalidValue: if dtypes do, or a rank cannot take part.
        InvalidArgument: if ranks are in different calls.
    """
    slots = _slots_of(mine)
    rows = None
    if team.size <= FEW_RANKS:
        told, rows = _gathered(team, slots, mine.content or ())
        most = [max(column) for column in zip(*told, strict=True)]
    else:
        proposal = torch.tensor(slots, device=team.device)
        dist.all_reduce(proposal, dist.ReduceOp.MAX, group=team.group)
        most = proposal.tolist()
    call, not_call, schema, not_schema, problem, unknown, length, large = most
    if problem or call != -not_call or (schema != -not_schema and schema != _LEAST):
        raise _explained(team, mine)
    return Agreement(not unknown, length, None if large else rows)


def _slots_of(mine: Proposal) -> list[int]:
    """Return numbers whose largest values over all ranks show whether the ranks agree."""
    call = _number_of_call(mine.call)
    schema = not_schema = _LEAST
    if mine.outline is not None:
        schema = _number(mine.outline.digest)
        not_schema = -schema
    large = mine.content is None
    flags = [mine.problem is not None, mine.outline is None, mine.length, large]
    return [call, -call, schema, not_schema, *map(int, flags)]


@lru_cache
def _number_of_call(call: str) -> int:
    return _number(digest_of(call))


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "little")


class _Slate:
    """Memory for the proposals of a group of few ranks, which all calls use.

    Attributes:
        own: the bytes of this rank: slots, and content behind them.
        every: those of all ranks, a row for each.
        told: the same memory, from which slots are read without tensors.
    """

    def __init__(self, team: Team) -> None:
        each = 8 * _SLOTS + room(team)
        self.told = bytearray(team.size * each)
        self.every = torch.frombuffer(self.told, dtype=torch.uint8).view(team.size, each)
        self.rows = list(self.every)
        self.contents = self.every[:, 8 * _SLOTS :]
        self._written = bytearray(each)
        self.own = torch.frombuffer(self._written, dtype=torch.uint8)
        self.content = self.own[8 * _SLOTS :]

    def write(self, slots: list[int], content: Sequence[Tensor]) -> None:
        """Write the proposal of this rank."""
        _SLOTS_OF_A_RANK.pack_into(self._written, 0, *slots)
        for flat, place in shares(self.content, content):
            place.copy_(flat)

    def read(self) -> list[tuple[int, ...]]:
        """Return the slots of each rank."""
        return [
            _SLOTS_OF_A_RANK.unpack_from(self.told, start)
            for start in range(0, len(self.told), len(self._written))
        ]


_SLOTS_OF_A_RANK: Final = struct.Struct(f"={_SLOTS}q")
_SLATES: Final[weakref.WeakKeyDictionary[Team, _Slate]] = weakref.WeakKeyDictionary()


def _gathered(
    team: Team, slots: list[int], content: Sequence[Tensor]
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return the slots of each rank, and their contents, until the next call."""
    slate = _SLATES.get(team)
    if slate is None:
        slate = _SLATES[team] = _Slate(team)
    slate.write(slots, content)
    if team.device.type == "cpu":
        dist.all_gather(slate.rows, slate.own, group=team.group)
    else:
        moved = slate.every.to(team.device)
        dist.all_gather(list(moved), slate.own.to(team.device), group=team.group)
        slate.every.copy_(moved)
    return slate.read(), slate.contents


def gather_texts(team: Team, text: bytes, longest: int | None = None) -> list[bytes]:
    """Return a text of each rank.

    Args:
        team: the group.
        text: that of this rank.
        longest: the bytes of the longest one, if it is known.
    """
    if longest is None:
        size = torch.tensor([len(text)], device=team.device)
        dist.all_reduce(size, dist.ReduceOp.MAX, group=team.group)
        longest = int(size)
    own = torch.zeros(8 + longest, dtype=torch.uint8, device="cpu")
    own[:8].view(torch.int64).fill_(len(text))
    own[8 : 8 + len(text)] = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[
        : len(text)
    ]
    every = [torch.empty_like(own, device=team.device) for _ in range(team.size)]
    dist.all_gather(every, own.to(team.device), group=team.group)
    return [_text_of(row.cpu()) for row in every]


def _text_of(row: Tensor) -> bytes:
    length = int(row[:8].view(torch.int64))
    return row[8 : 8 + length].numpy().tobytes()


_Told = tuple[list[str], str, "list[int] | None"]


def _row_of(path: list[str], dtype: str, shape: list[int] | None) -> Row:
    return Row(tuple(path), dtype, None if shape is None else tuple(shape))


def _explained(team: Team, mine: Proposal) -> KdError:
    """Return the error that says how ranks differ; the same one on all ranks."""
    rows = None if mine.outline is None else mine.outline.rows
    problem = None if mine.problem is None else str(mine.problem)
    texts = gather_texts(team, canonical([mine.call, problem, rows]))
    found: list[tuple[str, str | None, list[_Told] | None]] = [json.loads(text) for text in texts]
    for rank, (_, reason, _) in enumerate(found):
        if reason is not None:
            if mine.problem is not None:
                return mine.problem
            return InvalidValue(f"rank {rank} could not take part in `{mine.call}`: {reason}")
    calls = [call for call, _, _ in found]
    for rank, call in enumerate(calls):
        if call != calls[0]:
            return InvalidArgument(
                f"all ranks must make the same call, got `{calls[0]}` on rank 0 and `{call}` on "
                f"rank {rank}. Check the order of calls and their arguments."
            )
    told = [
        (rank, [_row_of(*row) for row in rows])
        for rank, (_, _, rows) in enumerate(found)
        if rows is not None
    ]
    return difference(calls[0], told)


# Containers in their wire form, between ranks.


def octets_of(flat: Tensor, team: Team) -> Tensor:
    """Return a flat tensor as bytes where the group can send them."""
    return team.message(flat).view(torch.uint8)


def text_tensor(text: bytes, team: Team) -> Tensor:
    """Return bytes as a message."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(team.device)


class Incoming:
    """Room for the buffers of a header.

    Attributes:
        messages: the tensors of bytes to receive into.
    """

    def __init__(self, text: bytes, team: Team) -> None:
        self._text = text
        self._header: Header = header_of(text)
        self._places = [
            team.place(self._header.devices[row.device]) for row in self._header.buffers
        ]
        try:
            made = [
                torch.empty(row.numel * row.dtype.itemsize, dtype=torch.uint8, device=place)
                for row, place in zip(self._header.buffers, self._places, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            total = sum(row.numel * row.dtype.itemsize for row in self._header.buffers)
            raise FormatError(f"not enough memory for {total} bytes of a container.") from error
        self.messages = [team.message(flat) for flat in made]

    def container(self) -> AbstractContainer:
        """Return the container, after all messages were received."""
        placed = [flat.to(at) for flat, at in zip(self.messages, self._places, strict=True)]
        return container_of(self._text, placed)


def moved_to(td: W, device: DeviceLike | None) -> W:
    """Return a container on a device; `None`: where it is."""
    return td if device is None else td._kd_engine.to(td, device)


def take(
    target: AbstractContainer, made: AbstractContainer, call: str, ranks: tuple[int, int]
) -> None:
    """Write a received container into one of the same schema.

    Tensors and values of rows are written in place. A value for the whole batch replaces another.

    Args:
        target: the container to write into.
        made: the container that was received.
        call: the call, for messages.
        ranks: the rank that received, and the one that sent.

    Raises:
        KeySetMismatch: if the keys differ; likewise `ShapeMismatch`, and `InvalidValue` for dtypes.
        Locked: if a value for the whole batch differs, and the container is locked.
    """
    mine, other = outlined(target), outlined(made)
    if mine.outline.digest != other.outline.digest:
        rows = mine.outline.rows, other.outline.rows
        raise difference(call, list(zip(ranks, rows, strict=True)))
    mine.check_writable()
    if mine.outline.plain:
        mine.copy(other)
        return
    others = list(_other_data(target, made, ()))
    for level, _, path in others:
        level._kd_check_unlocked(f"receive another value of {format_key(path)}")
    entries = [source._kd_entries[path[-1]] for _, source, path in others]
    for level, source, path in others:
        source._kd_set_entry(path[-1], level._kd_entries[path[-1]])
    with torch.no_grad():
        target._kd_engine.update_(target, made)
    for (level, _, path), entry in zip(others, entries, strict=True):
        level._kd_set_entry(path[-1], entry)


def _other_data(
    target: AbstractContainer, made: AbstractContainer, path: tuple[str, ...]
) -> Iterator[tuple[AbstractContainer, AbstractContainer, tuple[str, ...]]]:
    """Yield where values for a whole batch differ: the containers that hold them, and the path."""
    if isinstance(target, Composite) and isinstance(made, Composite):
        for at, pair in enumerate(zip(target._members, made._members, strict=True)):
            yield from _other_data(*pair, (*path, f"[{at}]"))
        return
    for key, value in target._kd_entries.items():
        other = made._kd_entries.get(key)
        if isinstance(value, AbstractContainer) and isinstance(other, AbstractContainer):
            yield from _other_data(value, other, (*path, key))
            continue
        if is_data(value) and not is_row_data(value) and not value._agrees(other):
            yield target, made, (*path, key)


def fill(target: AbstractContainer, made: AbstractContainer) -> None:
    """Set what was received in an empty container.

    Raises:
        Locked: if it is locked.
        InvalidValue: if what was received is of another kind.
    """
    target._kd_check_unlocked("receive entries")
    if type(made) is not type(target):
        raise InvalidValue(
            f"{a_type(target)} cannot take what {a_type(made)} holds. "
            "Receive it as a new container: pass `None`, or call `from_remote_init`."
        )
    target._kd_describe(made._kd_desc)
    for key, value in made._kd_entries.items():
        target._kd_set_entry(key, value)
