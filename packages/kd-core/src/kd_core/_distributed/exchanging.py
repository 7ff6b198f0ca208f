"""`send`, `recv` and what is made of them: a container from one rank to another.

A container travels as a message of 32 bytes, its header, and one message for each dtype and device.
A header that is that of the last container under the same tag is not sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from kd_core._distributed.agreement import Proposal, agree
from kd_core._distributed.broadcasting import broadcast
from kd_core._distributed.groups import rank_in, team_of
from kd_core._distributed.handles import Handle
from kd_core._distributed.outlines import Outline, digest_of
from kd_core._distributed.transport import Incoming, moved_to, octets_of, take, text_tensor
from kd_core._errors import CommunicationError, InvalidArgument, InvalidValue, KdError
from kd_core._protocol.primitives import AbstractContainer
from kd_core._wire.form import Form, form_of
from kd_core._wire.header import MOST_BYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kd_core._distributed.groups import Team
    from kd_core._types import DeviceLike

_MAGIC: Final = 0x6B64_0001
"""The first number of each container that is sent: the protocol and its version."""

_DIGEST: Final = 16
"""Bytes of the digest that stands for a header."""


def isend(
    td: AbstractContainer,
    dst: int | None,
    group: ProcessGroup | None,
    group_dst: int | None,
    tag: int,
    name: str = "isend",
) -> Handle:
    """Start to send a container to a rank."""
    team = team_of(group)
    peer = _other(team, rank_in(team, dst, group_dst, "dst"), "dst")
    with team.calling(name, peer):
        return Handle(team, name, _posted(team, peer, form_of(td), tag), _nothing, peer)


def _nothing() -> None: ...


def _other(team: Team, rank: int, what: str) -> int:
    if rank == team.rank:
        raise InvalidValue(f"`{what}` must be another rank, got the rank of this process.")
    return rank


def _posted(team: Team, peer: int, form: Form, tag: int) -> list[Work]:
    """Send all messages of a container, without waiting."""
    digest = digest_of(form.header.decode("ascii"))[:_DIGEST]
    known = team.sent.get((peer, tag)) == digest
    start = torch.empty(4, dtype=torch.int64, device="cpu")
    start[:2] = torch.tensor([_MAGIC, 0 if known else len(form.header)])
    start[2:] = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    messages = [start.to(team.device)]
    if not known:
        messages.append(text_tensor(form.header, team))
    messages += [octets_of(flat, team) for flat in form.buffers if flat.numel()]
    to = team.global_rank(peer)
    begun = [dist.isend(message, to, team.group, tag) for message in messages]
    works = [work for work in begun if work is not None]
    team.sending = [work for work in team.sending if not work.is_completed()] + works
    team.sent[peer, tag] = digest
    return works


def irecv(
    td: AbstractContainer,
    src: int | None,
    group: ProcessGroup | None,
    group_src: int | None,
    tag: int,
    name: str = "irecv",
) -> Handle:
    """Start to receive the values of a container from a rank."""
    team = team_of(group)
    peer = _other(team, rank_in(team, src, group_src, "src"), "src")
    with team.calling(name, peer):
        start, works = _expected(team, peer, tag)

    def finish() -> None:
        made = _received(team, peer, start, tag)
        take(td, made, f"{name}(src={peer})", (team.rank, peer))

    return Handle(team, name, works, finish, peer)


def _expected(team: Team, peer: int, tag: int) -> tuple[Tensor, list[Work]]:
    """Receive the first message of a container, without waiting."""
    start = torch.zeros(4, dtype=torch.int64, device=team.device)
    work = dist.irecv(start, team.global_rank(peer), team.group, tag)
    return start, [] if work is None else [work]


def _received(team: Team, peer: int, start: Tensor, tag: int) -> AbstractContainer:
    """Receive a container, after its first message."""
    at = team.global_rank(peer)
    magic, length, *_ = start.tolist()
    digest = start[2:].cpu().view(torch.uint8).numpy().tobytes()
    if magic != _MAGIC or not 0 <= length <= MOST_BYTES:
        raise CommunicationError(
            f"rank {peer} sent something else than a container. Use the same version of kd-core "
            "on all ranks, and other tags for messages of your own."
        )
    known = team.received.get((peer, tag))
    if length:
        text = torch.empty(length, dtype=torch.uint8, device=team.device)
        dist.recv(text, at, team.group, tag)
        known = digest, text.cpu().numpy().tobytes()
    if known is None or known[0] != digest:
        raise CommunicationError(
            f"rank {peer} left out a header that this rank did not receive: an earlier call "
            "failed. Build a new group."
        )
    team.received[peer, tag] = known
    incoming = Incoming(known[1], team)
    for message in incoming.messages:
        if message.numel():
            dist.recv(message, at, team.group, tag)
    return incoming.container()


def init_remote(
    td: AbstractContainer, dst: int | None, group: ProcessGroup | None, use_broadcast: bool
) -> None:
    """Send a container to a rank that does not have it, or to all ranks."""
    if use_broadcast == (dst is not None):
        raise InvalidArgument("expected one of `dst` and `use_broadcast=True`. Pass exactly one.")
    if use_broadcast:
        broadcast(td, dist.get_rank(), group, None)
    else:
        isend(td, dst, group, None, 0, "init_remote").wait()


def from_remote_init(
    src: int, group: ProcessGroup | None, device: DeviceLike | None, use_broadcast: bool
) -> AbstractContainer:
    """Return a new container, received from a rank."""
    if use_broadcast:
        return broadcast(None, src, group, device)
    team = team_of(group)
    peer = _other(team, rank_in(team, src, None, "src"), "src")
    with team.calling("from_remote_init", peer):
        return moved_to(_awaited(team, peer), device)


def _awaited(team: Team, peer: int) -> AbstractContainer:
    """Receive a container."""
    start, works = _expected(team, peer, 0)
    for work in works:
        work.wait()
    return _received(team, peer, start, 0)


def scatter(
    containers: Sequence[AbstractContainer] | None,
    src: int,
    group: ProcessGroup | None,
    device: DeviceLike | None,
) -> AbstractContainer:
    """Return the container that one rank has for this one."""
    team = team_of(group)
    root = rank_in(team, src, None, "src")
    with team.calling("scatter"):
        forms, problem = _forms_of(containers, team) if team.rank == root else ([], None)
        agree(team, Proposal(f"scatter(src={src})", Outline([]), problem=problem))
        if containers is not None and team.rank == root:
            others = [rank for rank in range(team.size) if rank != root]
            works = [work for rank in others for work in _posted(team, rank, forms[rank], 0)]
            for work in works:
                work.wait()
            return moved_to(containers[root], device)
        return moved_to(_awaited(team, root), device)


def _forms_of(
    containers: Sequence[AbstractContainer] | None, team: Team
) -> tuple[list[Form], KdError | None]:
    try:
        if containers is None or len(containers) != team.size:
            found = "`None`" if containers is None else str(len(containers))
            raise InvalidArgument(
                f"`containers` must have one container for each of {team.size} ranks on rank "
                f"`src`, got {found}."
            )
        return [form_of(td) for td in containers], None
    except KdError as error:
        return [], error
