"""`all_reduce` and `reduce`: one value of all ranks for each element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from kd_core._distributed.agreement import Proposal, agree, content_of, room, shares
from kd_core._distributed.groups import rank_in, team_of
from kd_core._distributed.handles import Handle
from kd_core._distributed.outlines import DATA, Outlined, Room, outlined
from kd_core._errors import InvalidValue, KdError, listed, wrong_type
from kd_core._keys import format_key
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, ReduceOp, Work

    from kd_core._distributed.groups import Team


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
            mine = outlined(td._kd_engine.filter_non_tensor_data(td))  # type: ignore[attr-defined]  # of a concern
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
