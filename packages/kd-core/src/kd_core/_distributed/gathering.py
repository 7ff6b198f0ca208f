"""`all_gather`, `gather` and `gather_and_stack`: the containers of all ranks.

Ranks may have different numbers of rows, and everything that the wire form holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kd_core._distributed.agreement import Proposal, agree, gather_texts, room
from kd_core._distributed.groups import rank_in, team_of
from kd_core._distributed.outlines import Outline, Row, outlined, rows_of
from kd_core._distributed.transport import Incoming, octets_of
from kd_core._errors import InvalidValue, KdError
from kd_core._protocol.primitives import AbstractContainer
from kd_core._wire.form import Form, container_of, form_of
from kd_core._wire.header import Header, header_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kd_core._distributed.groups import Team


def all_gather(td: AbstractContainer, group: ProcessGroup | None) -> list[AbstractContainer]:
    """Return the containers of all ranks on all ranks, in the order of ranks."""
    team = team_of(group)
    with team.calling("all_gather"):
        form, headers = _agreed(team, "all_gather()", td, True)
        heads = [header_of(text) for text in headers]
        found: list[list[Tensor]] = [[] for _ in heads]
        kinds = sorted({kind for head in heads for kind in _kinds_of(head)})
        received = {kind: _gathered(team, form, heads, kind) for kind in kinds}
        for head, buffers, rank in zip(heads, found, range(team.size), strict=True):
            for kind in _kinds_of(head):
                buffers.append(received[kind][rank])
        rows = zip(headers, found, strict=True)
        return [container_of(text, buffers) for text, buffers in rows]


Kind = tuple[str, str, int]
"""The dtype of a buffer, the type of its device, and how many of both precede it."""


def _kinds_of(head: Header) -> list[Kind]:
    found: list[Kind] = []
    for row in head.buffers:
        both = str(row.dtype), head.devices[row.device]
        found.append((*both, sum(kind[:2] == both for kind in found)))
    return found


def _gathered(team: Team, form: Form, heads: list[Header], kind: Kind) -> list[Tensor]:
    """Return the bytes that each rank has of a kind."""
    sizes = [_nbytes_of(head, kind) for head in heads]
    most = max(sizes)
    own = _kinds_of(heads[team.rank])
    place = team.place(kind[1])
    mine = torch.zeros(most, dtype=torch.uint8, device=place)
    if kind in own:
        octets = form.buffers[own.index(kind)].view(torch.uint8)
        mine[: octets.numel()].copy_(octets)
    message = team.message(mine)
    every = [torch.empty_like(message) for _ in sizes]
    if most:
        dist.all_gather(every, message, group=team.group)
    return [row[:size].to(place) for row, size in zip(every, sizes, strict=True)]


def _nbytes_of(head: Header, kind: Kind) -> int:
    kinds = _kinds_of(head)
    if kind not in kinds:
        return 0
    row = head.buffers[kinds.index(kind)]
    return row.numel * row.dtype.itemsize


def gather(
    td: AbstractContainer, dst: int, group: ProcessGroup | None
) -> list[AbstractContainer] | None:
    """Return the containers of all ranks on one rank, in the order of ranks."""
    team = team_of(group)
    target = rank_in(team, dst, None, "dst")
    with team.calling("gather"):
        form, headers = _agreed(team, f"gather(dst={dst})", td, True)
        found = _sent_to(team, target, form, headers)
        if found is None:
            return None
        own = container_of(form.header, [flat.clone() for flat in form.buffers])
        return [*found[:target], own, *found[target:]]


def gather_and_stack(
    td: AbstractContainer, dst: int, group: ProcessGroup | None
) -> AbstractContainer | None:
    """Write the containers of all other ranks into the rows of that of one rank."""
    team = team_of(group)
    target = rank_in(team, dst, None, "dst")
    with team.calling("gather_and_stack"):
        call = f"gather_and_stack(dst={dst})"
        row: AbstractContainer = td
        problem: KdError | None = None
        if team.rank == target:
            batch = td._kd_desc.batch
            if not batch or batch[0] != team.size - 1:
                problem = InvalidValue(
                    f"the batch size on rank `dst` must start with {team.size - 1}, a row for each "
                    f"other rank, got {tuple(batch)}."
                )
            else:
                row = td[0] if batch[0] else td  # type: ignore[index]  # of a concern
        form, headers = _agreed(team, call, row, False, problem)
        found = _sent_to(team, target, form, headers)
        if found is None:
            return None
        if found:
            td._kd_engine.update_(td, torch.stack(found))  # type: ignore[attr-defined, arg-type]  # of a concern
        return td


def _agreed(
    team: Team, call: str, td: AbstractContainer, any_length: bool, problem: KdError | None = None
) -> tuple[Form, list[bytes]]:
    """Return the wire form of a container, and the header of each rank."""
    outline, form = None, None
    if problem is None:
        try:
            form = form_of(td)
            outline = Outline(_without_length(td)) if any_length else outlined(td).outline
        except KdError as error:
            problem = error
    content = None
    if form is not None and len(form.header) + 8 <= room(team):
        size = len(form.header).to_bytes(8, "little")
        content = [torch.frombuffer(bytearray(size + form.header), dtype=torch.uint8)]
    length = len(form.header) if form else 0
    agreed = agree(team, Proposal(call, outline, content, length, problem))
    assert form is not None  # else the ranks have not agreed
    if agreed.contents is None:
        return form, gather_texts(team, form.header, agreed.length)
    rows = [row.numpy().tobytes() for row in agreed.contents]
    return form, [row[8 : 8 + int.from_bytes(row[:8], "little")] for row in rows]


def _without_length(td: AbstractContainer) -> list[Row]:
    """Return rows without the number of rows of the batch, which may differ between ranks."""
    rows = rows_of(td, members=False)
    if not td._kd_desc.ndim:
        return rows
    return [Row(path, dtype, shape and (-1, *shape[1:])) for path, dtype, shape in rows]


def _sent_to(
    team: Team, target: int, form: Form, headers: list[bytes]
) -> list[AbstractContainer] | None:
    """Send a container to one rank; return those of the other ranks there."""
    if team.rank != target:
        messages = [octets_of(flat, team) for flat in form.buffers if flat.numel()]
        to = team.global_rank(target)
        works = [dist.isend(message, to, team.group) for message in messages]
        for work in works:
            if work is not None:
                work.wait()
        return None
    incoming = {rank: Incoming(headers[rank], team) for rank in range(team.size) if rank != target}
    pending = [
        dist.irecv(message, team.global_rank(rank), team.group)
        for rank, room_of in incoming.items()
        for message in room_of.messages
        if message.numel()
    ]
    for work in pending:
        if work is not None:
            work.wait()
    return [room_of.container() for room_of in incoming.values()]
