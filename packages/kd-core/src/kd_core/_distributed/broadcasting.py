"""`broadcast`: the values of one rank on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kd_core._distributed.agreement import Proposal, agree, content_of, room, shares
from kd_core._distributed.groups import rank_in, team_of
from kd_core._distributed.outlines import Outlined, Room, outlined
from kd_core._distributed.transport import (
    Incoming,
    fill,
    moved_to,
    octets_of,
    take,
    text_tensor,
)
from kd_core._errors import InvalidArgument, KdError
from kd_core._protocol.primitives import AbstractContainer
from kd_core._wire.form import Form, form_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kd_core._distributed.groups import Team
    from kd_core._types import DeviceLike


def broadcast(
    td: AbstractContainer | None,
    src: int,
    group: ProcessGroup | None,
    device: DeviceLike | None,
) -> AbstractContainer:
    """Return the container of one rank on all ranks, written into theirs where they have one."""
    team = team_of(group)
    root = rank_in(team, src, None, "src")
    call = f"broadcast(src={src})"
    with team.calling("broadcast"):
        is_root = team.rank == root
        mine, problem = _prepared(td, is_root)
        outline = mine.outline if mine else None
        own = _packed_if_small(team, mine) if is_root else Room([], [])
        content = content_of(own.flats, room(team)) if own else None
        agreed = agree(team, Proposal(call, outline, content, problem=problem))
        if is_root and mine and own:
            mine.put_back(own)
        if agreed.all_know and mine is not None and mine.outline.plain:
            if agreed.contents is None:
                _values(team, mine, src, is_root)
            elif not is_root:
                _write(mine, agreed.contents[root])
            return mine.td
        if mine is not None and is_root:
            _send(team, form_of(mine.td), src)
            return mine.td
        made = moved_to(_received(team, src), device)
        if td is None:
            return made
        if mine is None:
            fill(td, made)
        else:
            take(td, made, call, (team.rank, root))
        return td


def _prepared(
    td: AbstractContainer | None, is_root: bool
) -> tuple[Outlined | None, KdError | None]:
    """Return a container with its outline, and why it cannot take part, if it cannot."""
    try:
        if is_root and td is None:
            raise InvalidArgument("`td` must be a container on rank `src`, got `None`.")
        if td is None or not (is_root or td._kd_entries):
            return None, None
        mine = outlined(td)
        if not is_root:
            mine.check_writable()
        elif not mine.outline.plain:
            form_of(td)  # raises here what would raise after the ranks have agreed
    except KdError as error:
        return None, error
    return mine, None


def _packed_if_small(team: Team, mine: Outlined | None) -> Room | None:
    """Return the values of a container that is so small that they travel with the proposal."""
    if mine is None or not mine.outline.plain or mine.nbytes() > room(team):
        return None
    return mine.packed()


def _write(mine: Outlined, content: Tensor) -> None:
    """Write the values that travelled with the proposal."""
    own = mine.room()
    for flat, values in shares(content, own.flats):
        flat.copy_(values)
    mine.write(own)


def _values(team: Team, mine: Outlined, src: int, is_root: bool) -> None:
    """Broadcast the values of leaves that all ranks have.

    Large leaves travel one by one, from where they are. Others are one message for each dtype and
    device, which is a copy if they do not follow one another.
    """
    is_large = mine.outline.is_large
    if is_root:
        found = mine.each() if is_large else mine.views()
        if found is not None:
            _broadcast([octets_of(flat, team) for flat in found], team, src)
            return
    own = mine.packed() if is_root else mine.room()
    flats = own.each() if is_large else own.flats
    messages = [octets_of(flat, team) for flat in flats]
    _broadcast(messages, team, src)
    if is_root:
        mine.put_back(own)
        return
    for flat, message in zip(flats, messages, strict=True):
        if message.data_ptr() != flat.data_ptr():  # it was elsewhere for the group
            flat.copy_(message.view(flat.dtype))
    mine.write(own)


def _broadcast(messages: Sequence[Tensor], team: Team, src: int) -> None:
    """Broadcast several messages, which are all on their way at once."""
    works = [
        dist.broadcast(message, src, group=team.group, async_op=True)
        for message in messages
        if message.numel()
    ]
    for work in works:
        if work is not None:
            work.wait()


def _send(team: Team, form: Form, src: int) -> None:
    length = torch.tensor([len(form.header)], device=team.device)
    messages = [length, text_tensor(form.header, team)]
    _broadcast([*messages, *(octets_of(flat, team) for flat in form.buffers)], team, src)


def _received(team: Team, src: int) -> AbstractContainer:
    length = torch.zeros(1, dtype=torch.int64, device=team.device)
    dist.broadcast(length, src, group=team.group)
    text = torch.empty(int(length), dtype=torch.uint8, device=team.device)
    dist.broadcast(text, src, group=team.group)
    incoming = Incoming(text.cpu().numpy().tobytes(), team)
    _broadcast(incoming.messages, team, src)
    return incoming.container()
