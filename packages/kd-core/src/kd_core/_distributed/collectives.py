"""Collective calls on containers: broadcast, gather, reduce, send and receive.

Knows what each call exchanges; must not know how ranks agree (`groups`) or what travels
(`outlines`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from kd_core._distributed.groups import (
    Handle,
    Incoming,
    Proposal,
    agree,
    content_of,
    fill,
    gather_texts,
    moved_to,
    octets_of,
    rank_in,
    room,
    shares,
    take,
    team_of,
    text_tensor,
)
from kd_core._distributed.outlines import (
    DATA,
    Outline,
    Outlined,
    Room,
    Row,
    digest_of,
    outlined,
    rows_of,
)
from kd_core._errors import (
    CommunicationError,
    InvalidArgument,
    InvalidValue,
    KdError,
    ShapeMismatch,
    listed,
    wrong_type,
)
from kd_core._keys import format_key, path_of
from kd_core._protocol import AbstractContainer, Composite
from kd_core._wire import MOST_BYTES, Form, Header, container_of, form_of, header_of

if TYPE_CHECKING:
    from typing import TypeVar

    from torch.distributed import ProcessGroup, ReduceOp

    from kd_core._distributed.groups import Team
    from kd_core._types import DeviceLike, Index, NestedKey

    W = TypeVar("W", bound=AbstractContainer)


# `broadcast`: the values of one rank on all ranks.


def broadcast(
    td: W | None,
    src: int,
    group: ProcessGroup | None,
    device: DeviceLike | None,
) -> W:
    """Return the container of one rank on all ranks, written into theirs where they have one."""
    team = team_of(group)
    root = rank_in(team, src, None, "src")
    call = f"broadcast(src={src})"
    with team.calling("broadcast"):
        is_root = team.rank == root
        mine, problem = _outlined_for_all(td, is_root)
        outline = mine.outline if mine else None
        own = _packed_if_small(team, mine) if is_root else Room([], [])
        content = content_of(own.flats, room(team)) if own else None
        agreed = agree(team, Proposal(call, outline, content, problem=problem))
        if is_root and mine and own:
            mine.put_back(own)
        if td is not None and mine is not None and agreed.all_know and mine.outline.plain:
            if agreed.contents is None:
                _values(team, mine, src, is_root)
            elif not is_root:
                _write(mine, agreed.contents[root])
            return td
        if td is not None and mine is not None and is_root:
            _send(team, form_of(td), src)
            return td
        made = moved_to(_received_from_root(team, src), device)
        if td is None:
            return cast("W", made)  # of the kind that `src` sent
        if mine is None:
            fill(td, made)
        else:
            take(td, made, call, (team.rank, root))
        return td


def _outlined_for_all(
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


def _received_from_root(team: Team, src: int) -> AbstractContainer:
    length = torch.zeros(1, dtype=torch.int64, device=team.device)
    dist.broadcast(length, src, group=team.group)
    text = torch.empty(int(length), dtype=torch.uint8, device=team.device)
    dist.broadcast(text, src, group=team.group)
    incoming = Incoming(text.cpu().numpy().tobytes(), team)
    _broadcast(incoming.messages, team, src)
    return incoming.container()


# `all_gather`, `gather` and `gather_and_stack`: the containers of all ranks.
#
# Ranks may have different numbers of rows, and everything that the wire form holds.


def all_gather(td: W, group: ProcessGroup | None) -> list[W]:
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
        made = [container_of(text, buffers) for text, buffers in rows]
        return cast("list[W]", made)  # of the kinds that the ranks sent


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


def gather(td: W, dst: int, group: ProcessGroup | None) -> list[W] | None:
    """Return the containers of all ranks on one rank, in the order of ranks."""
    team = team_of(group)
    target = rank_in(team, dst, None, "dst")
    with team.calling("gather"):
        form, headers = _agreed(team, f"gather(dst={dst})", td, True)
        found = _sent_to(team, target, form, headers)
        if found is None:
            return None
        own = container_of(form.header, [flat.clone() for flat in form.buffers])
        return cast("list[W]", [*found[:target], own, *found[target:]])  # as `all_gather`


def gather_and_stack(td: W, dst: int, group: ProcessGroup | None) -> W | None:
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
                row = td._kd_engine.__getitem__(td, 0) if batch[0] else td
        form, headers = _agreed(team, call, row, False, problem)
        found = _sent_to(team, target, form, headers)
        if found is None:
            return None
        if found:
            td._kd_engine.update_(td, td._kd_engine.stack(found))
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


# `all_reduce` and `reduce`: one value of all ranks for each element.

Op: TypeAlias = "str | ReduceOp | ReduceOp.RedOpType"
"""How users name a reduction."""


class Reduction(NamedTuple):
    """How values of several ranks become one."""

    name: str
    op: object
    """What torch calls it; the mean is a sum that is divided."""
    rows: Callable[[Tensor], Tensor]
    """The same over the first dimension of a tensor."""


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=rows.dtype)


_REDUCTIONS: Final = {
    "sum": Reduction("sum", dist.ReduceOp.SUM, _sum),
    "mean": Reduction("mean", dist.ReduceOp.SUM, _sum),
    "max": Reduction("max", dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
    "min": Reduction("min", dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
    "product": Reduction(
        "product", dist.ReduceOp.PRODUCT, lambda rows: rows.prod(0, dtype=rows.dtype)
    ),
}
_OPS: Final[list[tuple[object, str]]] = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "product"),
]

_NUMBERS: Final = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8,
        torch.complex64, torch.complex128,
    }
)  # fmt: skip
"""The dtypes that all backends reduce, complex ones as pairs of real numbers."""


def reduction_of(op: Op | None) -> Reduction:
    """Return a reduction by its name, or by its operation of torch; `None`: the sum.

    Raises:
        InvalidArgument: if it is neither.
        InvalidValue: if there is none.
    """
    if op is None:
        return _REDUCTIONS["sum"]
    if not isinstance(op, (str, dist.ReduceOp)):  # numbers are equal to operations of torch
        raise wrong_type("`op`", "a name or a `ReduceOp`", op)
    found = op if isinstance(op, str) else next((name for known, name in _OPS if known == op), "")
    if found not in _REDUCTIONS:
        raise InvalidValue(
            f"`op` must be one of {listed(_REDUCTIONS)}, or that of `ReduceOp`, got {op!r}."
        )
    return _REDUCTIONS[found]


def all_reduce(
    td: AbstractContainer,
    op: Op | None,
    group: ProcessGroup | None,
    async_op: bool,
    bucket_bytes: int | None,
) -> Handle | None:
    """Reduce all leaves over all ranks, in place."""
    how = reduction_of(op)

    def send(flat: Tensor, team: Team) -> Work | None:
        work: Work | None = dist.all_reduce(flat, how.op, group=team.group, async_op=True)
        return work

    return _reduce(td, how, team_of(group), None, async_op, bucket_bytes, send)


def reduce(
    td: AbstractContainer,
    dst: int,
    op: Op | None,
    group: ProcessGroup | None,
    async_op: bool,
    bucket_bytes: int | None,
) -> Handle | None:
    """Reduce all leaves over all ranks into those of one rank."""
    how, team = reduction_of(op), team_of(group)
    target = rank_in(team, dst, None, "dst")

    def send(flat: Tensor, team: Team) -> Work | None:
        work: Work | None = dist.reduce(flat, dst, how.op, group=team.group, async_op=True)
        return work

    return _reduce(td, how, team, target, async_op, bucket_bytes, send)


def _reduce(
    td: AbstractContainer,
    how: Reduction,
    team: Team,
    target: int | None,
    async_op: bool,
    bucket_bytes: int | None,
    send: Callable[[Tensor, Team], Work | None],
) -> Handle | None:
    name = "all_reduce" if target is None else "reduce"
    call = f"{name}(op={how.name})" if target is None else f"{name}(dst={target}, op={how.name})"
    if bucket_bytes is not None and bucket_bytes < 1:
        raise InvalidValue(f"`bucket_bytes` must be positive, got {bucket_bytes}.")
    with team.calling(name):
        writes = target in (None, team.rank)
        mine, problem = _prepared(td, how, writes)
        own = mine.packed() if mine else Room([], [])
        content = content_of(own.flats, room(team))
        outline = mine.outline if mine else None
        agreed = agree(team, Proposal(call, outline, content, problem=problem))
        assert mine is not None  # else the ranks have not agreed
        if agreed.contents is not None:
            if writes:
                _reduce_rows(agreed.contents, own.flats, how, team.size)
                mine.write(own)
            return Handle(team, name, [], _nothing) if async_op else None
        messages = [team.message(flat) for flat in own.flats]
        pieces = [piece for message in messages for piece in _pieces(message, bucket_bytes)]
        works = [work for piece in pieces if (work := send(piece, team)) is not None]

    def finish() -> None:
        if writes:
            for flat, message in zip(own.flats, messages, strict=True):
                _finish(flat, message, how, team.size)
            mine.write(own)

    handle = Handle(team, name, works, finish)
    if async_op:
        return handle
    handle.wait()
    return None


def _nothing() -> None: ...


def _prepared(
    td: AbstractContainer, how: Reduction, writes: bool
) -> tuple[Outlined | None, KdError | None]:
    """Return a container with its outline, and why it cannot be reduced, if it cannot."""
    try:
        mine = outlined(td)
        rows = () if mine.outline.plain else mine.outline.rows
        if any(row.dtype == DATA for row in rows):  # stays as it is on each rank
            mine = outlined(td._kd_engine.filter_non_tensor_data(td))
        _check_numbers(mine, how)
        if writes:
            mine.check_writable()
    except KdError as error:
        return None, error
    return mine, None


def _check_numbers(mine: Outlined, how: Reduction) -> None:
    if mine.outline.plain and all(_reduces(row.dtype, how) for row in mine.outline.buckets):
        return
    for row in mine.outline.rows:
        dtype = getattr(torch, row.dtype, None)
        if dtype is None or not _reduces(dtype, how):
            raise InvalidValue(
                f"entry {format_key(row.path)} is {row.dtype}, whose {how.name} over ranks is not "
                "offered. Convert it, `exclude` it, or pass another `op`."
            )


def _reduces(dtype: torch.dtype, how: Reduction) -> bool:
    if how.name == "mean":
        return dtype in _NUMBERS and (dtype.is_floating_point or dtype.is_complex)
    return dtype in _NUMBERS and (how.name == "sum" or not dtype.is_complex)


def _reduce_rows(contents: Tensor, flats: Sequence[Tensor], how: Reduction, size: int) -> None:
    """Write what the contents of all ranks reduce to into flat tensors."""
    for flat, rows in shares(contents, flats):
        _finish(flat, how.rows(rows), how, size)


def _finish(flat: Tensor, reduced: Tensor, how: Reduction, size: int) -> None:
    """Write what was reduced into a flat tensor, which may be that itself."""
    if reduced is not flat:
        flat.copy_(reduced)
    if how.name == "mean":
        flat.div_(size)


def _pieces(flat: Tensor, most: int | None) -> Sequence[Tensor]:
    if not flat.numel():
        return []
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return [flat] if most is None else torch.split(flat, max(1, most // flat.element_size()))


# `send`, `recv` and what is made of them: a container from one rank to another.
#
# A container travels as a message of 32 bytes, its header, and one message for each dtype and
# device. A header that is that of the last container under the same tag is not sent again.

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
            f"rank {peer} sent something other than a container. Use the same version of kd-core "
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
    containers: Sequence[W] | None,
    src: int,
    group: ProcessGroup | None,
    device: DeviceLike | None,
) -> W:
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
        return cast("W", moved_to(_awaited(team, root), device))  # of the kind that `src` sent


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


# Rows for each rank: padded to a number that can be divided, or balanced by weight.


Weights: TypeAlias = "NestedKey | Tensor | Sequence[float]"


def _taken(td: W, index: Index | str) -> W:
    return td._kd_engine.__getitem__(td, index)


def _rows_of(td: AbstractContainer, what: str) -> int:
    if not td._kd_desc.ndim:
        raise InvalidValue(f"`{what}` needs a batch dimension, got batch_size ().")
    return td._kd_desc.batch[0]


def pad_to_divisor(td: W, divisor: int) -> tuple[W, int]:
    """Return a container whose number of rows can be divided, and how many rows were added."""
    if type(divisor) is not int or divisor < 1:
        raise InvalidValue(f"`divisor` must be a positive integer, got {divisor!r}.")
    count = _rows_of(td, "pad_to_divisor")
    missing = -count % divisor  # none without rows: 0 can be divided
    if not missing:
        return td, 0
    return _taken(td, torch.arange(count + missing).remainder(count)), missing


def unpad(td: W, count: int) -> W:
    """Return a container without its last rows."""
    rows = _rows_of(td, "unpad")
    if type(count) is not int or not 0 <= count <= rows:
        raise InvalidValue(f"`count` must be a number of rows from 0 to {rows}, got {count!r}.")
    return _taken(td, slice(rows - count)) if count else td


def balanced_chunks(td: W, chunks: int, weights: Weights) -> tuple[list[W], Tensor]:
    """Return containers whose weights are about equal, and which row each of their rows was."""
    rows = _rows_of(td, "balanced_chunks")
    if type(chunks) is not int or not 1 <= chunks <= rows:
        raise InvalidValue(
            f"`chunks` must be an integer from 1 to the number of rows, {rows}, got {chunks!r}. "
            "Call `pad_to_divisor` first to have a row for each rank."
        )
    groups = _groups(_weights_of(td, weights, rows), chunks)
    parts = [_taken(td, torch.tensor(group)) for group in groups]
    return parts, torch.tensor([row for group in groups for row in group])


def restore_order(td: W, order: object) -> W:
    """Return the rows in the order that they had before `balanced_chunks`."""
    rows = _rows_of(td, "restore_order")
    if not isinstance(order, Tensor) or sorted(order.tolist()) != list(range(rows)):
        raise InvalidArgument(
            f"`order` must hold each number from 0 to {rows - 1} once, as `balanced_chunks` "
            "returned it. Put the rows of all chunks together first."
        )
    return _taken(td, order.argsort())


def _groups(weights: Sequence[float], count: int) -> list[list[int]]:
    """Return the rows of each group: the heaviest row goes to the lightest group, and so on."""
    groups: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, 0, position) for position in range(count)]
    for row in sorted(range(len(weights)), key=lambda row: -weights[row]):
        total, size, position = heapq.heappop(heap)
        groups[position].append(row)
        heapq.heappush(heap, (total + weights[row], size + 1, position))
    return [sorted(group) for group in groups]


def _weights_of(td: AbstractContainer, weights: Weights, rows: int) -> list[float]:
    found = _listed(td, weights)
    numbers = [each for each in found if isinstance(each, (int, float))]
    if not len(numbers) == len(found) == rows:
        raise ShapeMismatch(
            f"`weights` must be one number for each of the {rows} rows, got {len(found)} values."
        )
    if not all(math.isfinite(each) and each >= 0 for each in numbers):
        raise InvalidValue("`weights` must be finite and non-negative.")
    return numbers


def _listed(td: AbstractContainer, weights: Weights) -> list[object]:
    if isinstance(weights, Tensor):
        return list(weights.tolist()) if weights.ndim else [weights]
    if isinstance(weights, str) or (weights and isinstance(weights[0], str)):
        return _lengths(td, path_of(cast("NestedKey", weights)))
    return list(weights)


def _lengths(td: AbstractContainer, path: tuple[str, ...]) -> list[object]:
    """Return the length of each row of a ragged entry, or the values of a dense one."""
    level = td
    for key in path[:-1]:
        level = _taken(level, key)
    if isinstance(level, Composite) and level._dim == 0:
        leaves: list[object] = [_taken(member, path[-1]) for member in level._members]
    else:
        entry: object = _taken(level, path[-1])
        if isinstance(entry, Tensor) and not entry.is_nested:
            return _listed(td, entry)
        leaves = list(entry.unbind()) if isinstance(entry, Tensor) else []
    lengths: list[object] = [
        leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim
    ]
    if not leaves or len(lengths) < len(leaves):
        raise InvalidArgument(
            f"entry {format_key(path)} must be ragged, or one number for each row. Pass the "
            "weights of the rows as numbers."
        )
    return lengths
