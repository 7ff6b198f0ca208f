"""Ranks agree on a call and on a schema before they exchange data.

Each call starts with one message of a fixed size from each rank: a digest of the call and of the
schema, and few bytes of content. Where digests differ, all ranks exchange what they stand for, and
raise the same error. In a group of few ranks, content that fits travels with the digest, so that a
small container takes one message in all: benchmarks/collectives.py.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kd_core._distributed.differences import difference
from kd_core._distributed.groups import Team
from kd_core._distributed.outlines import Outline, Row, digest_of
from kd_core._errors import InvalidArgument, InvalidValue, KdError
from kd_core._store.canonical import canonical

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
