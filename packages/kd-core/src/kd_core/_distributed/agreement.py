"""Ranks agree on a call and on a schema before they exchange data.

Each call starts with one message of a fixed size from each rank: a digest of the call and of the
schema, and few bytes of content. Where digests differ, all ranks exchange what they stand for, and
raise the same error. In a group of few ranks, content that fits travels with the digest, so that a
small container takes one message in all: benchmarks/collectives.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kd_core._distributed.groups import Team
from kd_core._distributed.outlines import Outline, Row, difference, digest_of
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
    content: Tensor | None = None
    """Bytes for all ranks, which travel with the proposal if they fit."""
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


def content_of(flats: Sequence[Tensor], most: int) -> Tensor | None:
    """Return flat tensors as bytes, each at an aligned place, if they are at most so many."""
    if sum(_aligned(flat.nbytes) for flat in flats) > most or not most:
        return None
    parts = []
    for flat in flats:
        octets = flat.view(torch.uint8).cpu()
        rest = _aligned(flat.nbytes) - flat.nbytes
        parts.append(torch.nn.functional.pad(octets, (0, rest)) if rest else octets)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def shares(content: Tensor, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each flat tensor that holds values, and what contents have for it.

    Args:
        content: what `content_of` returned, or rows of that.
        flats: flat tensors of the same sizes as those that it was made of.
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
        rows = _gathered(team, slots, mine.content)
        most = rows[:, : 8 * _SLOTS].view(torch.int64).max(0).values.tolist()
    else:
        proposal = torch.tensor(slots, device=team.device)
        dist.all_reduce(proposal, dist.ReduceOp.MAX, group=team.group)
        most = proposal.tolist()
    call, not_call, schema, not_schema, problem, unknown, length, large = most
    if problem or call != -not_call or (schema != -not_schema and schema != _LEAST):
        raise _explained(team, mine)
    contents = None if rows is None or large else rows[:, 8 * _SLOTS :]
    return Agreement(not unknown, length, contents)


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


def _gathered(team: Team, slots: list[int], content: Tensor | None) -> Tensor:
    """Return the proposal of each rank, a row of bytes for each."""
    start = 8 * _SLOTS
    every = torch.empty(team.size, start + room(team), dtype=torch.uint8)
    own = torch.empty(start + room(team), dtype=torch.uint8)
    own[:start].view(torch.int64).copy_(torch.tensor(slots))
    if content is not None:
        own[start : start + content.numel()].copy_(content)
    if team.device.type != "cpu":
        moved = every.to(team.device)
        dist.all_gather(list(moved), own.to(team.device), group=team.group)
        return moved.cpu()
    dist.all_gather(list(every), own, group=team.group)
    return every


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
    own = torch.zeros(8 + longest, dtype=torch.uint8)
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
