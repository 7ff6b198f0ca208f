"""What an operation takes and returns: the operand beside each leaf, and the results in `out`.

The second operand is

- a number: for every leaf;
- a tensor: its dimensions are the *first* batch dimensions, or the last ones where it fits these
  alone; its shape is padded with ones to the rank of each leaf. One that fits neither enlarges the
  batch, if torch broadcasts both and the operation does not write in place;
- a container: leaves are matched by key. Both must have the same keys and the same batch size, or
  one of them the batch size ().

Results are written into a container that the caller passes as `out`: all of them or none.

Knows operands and results; must not know the operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.names import without_names
from kd_core._batch.shapes import broadcasts_to, check_lines_up
from kd_core._errors import InvalidArgument, ShapeMismatch, shape_text, wrap_mapping, wrong_type
from kd_core._keys import format_key
from kd_core._leaves.foreach import PLAIN, is_ragged
from kd_core._leaves.loops import all_plain, finder, name_of_leaf
from kd_core._leaves.shapeless import is_shapeless, without_shape
from kd_core._leaves.writes import Write, check_write, collect_writes, write_all
from kd_core._nodes.entry import is_unbatched
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer, engine, name_in, refuse_unbatched

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes.entry import Entry
    from kd_core._types import Batch

    W = TypeVar("W", bound=AbstractContainer)

Operand: TypeAlias = "AbstractContainer | Tensor | complex"
"""A number, a tensor that broadcasts over the batch dimensions, or a container."""

Comparable: TypeAlias = "Operand | Mapping[str, object]"
"""An operand of a comparison, which may be a mapping, too."""

# A tuple, because the guard of dynamo on a class in a set fails at once.
NUMBERS: Final = (int, float, bool, complex)
_OPERANDS: Final = (AbstractContainer, Tensor, int, float, complex)


def is_operand(value: object) -> TypeGuard[Operand]:
    """Return whether a pointwise operation takes this value."""
    return isinstance(value, _OPERANDS) or _is_array(value)


def is_comparable(value: object) -> TypeGuard[Comparable]:
    """Return whether a container is compared with this value: an operand, or a mapping."""
    return is_operand(value) or isinstance(value, Mapping)


def as_operand(value: object) -> Tensor | complex:
    """Return a number or a tensor.

    Raises:
        InvalidArgument: if the value is neither.
    """
    if isinstance(value, (Tensor, complex, float, int)):
        return value
    if _is_array(value):
        tensor = torch.as_tensor(value)
        return tensor if tensor.ndim else cast(complex, tensor.item())
    what = "a number, a tensor or a container"
    raise wrong_type("the other operand", what, value, wrap_mapping(value))


def is_plain(operand: object) -> bool:
    """Return whether an operand is a number or `None`."""
    return operand is None or operand.__class__ in NUMBERS


def is_of_rows(operand: object) -> bool:
    """Return whether an operand is a tensor with dimensions, which stand for those of the batch."""
    return isinstance(operand, Tensor) and operand.ndim > 0


def padded(td: AbstractContainer, operand: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return a tensor operand for each collected leaf; members receive their rows."""
    batch = td._kd_desc.batch
    if not operand.ndim:
        return [operand] * len(leaves)
    if is_shapeless(operand):
        raise without_shape("the other operand")
    refuse_unbatched(td, "combined with a tensor over the batch")
    if keeps_batch(td):
        return pad_to_leaves(operand, leaves, batch)
    return beside_members(td, over_batch(operand, batch))


def pad_to_leaves(operand: Tensor, leaves: Iterable[Tensor], batch: Batch) -> list[Tensor]:
    """Return a tensor over the first batch dimensions, made broadcastable to each leaf.

    Raises:
        ShapeMismatch: if its shape does not fit, or would enlarge the batch.
    """
    operand = over_batch(operand, batch)
    shape, ndim = tuple(operand.shape), operand.ndim
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        extra = leaf.ndim - ndim
        if extra not in made:
            made[extra] = operand.reshape(*shape, *(1,) * extra)
    return [made[leaf.ndim - ndim] for leaf in leaves]


def over_batch(operand: Tensor, batch: Batch) -> Tensor:
    """Return a tensor operand whose dimensions are the first batch dimensions.

    One that fits the last batch dimensions alone gets dimensions of size 1 in front.

    Raises:
        ShapeMismatch: if its shape does not fit, or fits the first and the last dimensions.
    """
    shape = tuple(operand.shape)
    missing = len(batch) - len(shape)
    if missing > 0 and broadcasts_to(shape, batch[missing:]):
        if not broadcasts_to(shape, batch[: len(shape)]):
            return operand.reshape((1,) * missing + shape)
        if any(size != 1 for size in shape):
            more = ", ".join(["None"] * missing)
            raise ShapeMismatch(
                f"a tensor of shape {shape} fits the first and the last dimensions of batch_size "
                f"{batch}, with other results. Write `x[..., {more}]` for the first, `x[{more}]` "
                "for the last."
            )
    check_lines_up(shape, batch, "a tensor")
    return operand


def widened(td: W, *operands: object) -> W | None:
    """Return a container expanded to the batch size that it has with tensors, as torch broadcasts.

    `None` if they do not fit, or do not enlarge the batch.
    """
    batch = without_names(td._kd_desc.batch)
    shapes = [operand.shape for operand in operands if isinstance(operand, Tensor)]
    try:
        wide = tuple(torch.broadcast_shapes(batch, *shapes))  # type: ignore[no-untyped-call]  # by torch
    except RuntimeError:
        return None
    return None if wide == batch else engine(td).expand(td, wide)  # type: ignore[attr-defined]  # of a concern


def check_batches(mine: Batch, theirs: Batch) -> None:
    """Refuse two containers of different batch sizes, unless one of them is ()."""
    if not mine or not theirs or (not is_compiling() and mine == theirs):
        return
    # To dynamo no symbol is equal to a named size, and that of torch 2.10 compares no named sizes.
    if without_names(mine) != without_names(theirs):
        raise ShapeMismatch(
            f"batch sizes must be equal, or one of them (), got {mine} and {theirs}. Use `expand` "
            "or `reshape` first."
        )


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "dtype")


def keeps_batch(td: AbstractContainer) -> bool:
    """Return whether the shapes of collected leaves start with the batch size."""
    if not td._kd_nested:  # only tensors: "math" in the benchmarks
        return True
    if not td._kd_owns_leaves:
        return False
    return all_plain(td._kd_entries) or all(
        keeps_batch(node) for node in td._kd_below() if isinstance(node, AbstractContainer)
    )


def beside_members(td: AbstractContainer, operand: Tensor) -> list[Tensor]:
    """Return the part of a tensor over the batch that belongs to each leaf of `_kd_collect`."""
    batch: Batch = td._kd_desc.batch
    beside: list[Tensor] = []
    rows = operand.reshape((*operand.shape, *(1,) * (len(batch) - operand.ndim)))
    _stand_beside(td, rows.expand(batch), len(batch), beside)
    return beside


def _stand_beside(td: AbstractContainer, operand: Tensor, ndim: int, beside: list[Tensor]) -> None:
    """Append a tensor over the first `ndim` dimensions for each leaf of `_kd_collect`."""
    if isinstance(td, Composite):
        over = td._dim < ndim
        rows = operand.unbind(td._dim) if over else [operand] * len(td._members)
        for member, row in zip(td._members, rows, strict=True):
            _stand_beside(member, row, ndim - over, beside)
        return
    for value in td._kd_entries.values():
        if isinstance(value, AbstractContainer):
            _stand_beside(value, operand, ndim, beside)
        elif isinstance(value, Tensor):
            beside.append(operand.reshape((*operand.shape, *(1,) * (value.ndim - ndim))))


def lift_scalars(
    td: AbstractContainer,
    leaves: list[Tensor],
    operands: Sequence[object],
    columns: Sequence[list[Tensor]] | Sequence[list[object]],
) -> list[int]:
    """Replace the scalars of members by views with the dimension that they have in the stack.

    Torch promotes a 0-d operand beside a stacked leaf by its kind alone. Beside the 0-d leaf of a
    member it would promote by dtype, because both have the same rank. Where an operand is 0-d
    beside the stacked leaf, the leaf of the member is replaced by a view of one more dimension, and
    so is each operand that has rows.

    Args:
        td: the container.
        leaves: its leaves, in the order of `_kd_collect`; changed.
        operands: the operands as given.
        columns: for each operand, its value at each leaf; changed.

    Returns:
        The positions of the leaves that were replaced.
    """
    scalars = [position for position, leaf in enumerate(leaves) if not leaf.ndim]
    if not scalars:
        return []
    alone = [_alone(td, operand, inside=False) for operand in operands]
    in_stack = isinstance(td, Composite)
    lifted = [
        position
        for position in scalars
        if any(each[position] for each in alone) or (in_stack and _are_mixed(columns, position))
    ]
    for position in lifted:
        leaves[position] = leaves[position].unsqueeze(0)
        for flags, column in zip(alone, cast("Sequence[list[object]]", columns), strict=True):
            value = column[position]
            if isinstance(value, Tensor) and not flags[position]:
                column[position] = value.unsqueeze(0)
    return lifted


def _are_mixed(columns: Sequence[Sequence[object]], position: int) -> bool:
    """Return whether a leaf has a number and a tensor beside it; torch takes both for numbers."""
    values = [column[position] for column in columns if column[position] is not None]
    return len({isinstance(value, Tensor) for value in values}) > 1


def lower_scalars(results: list[Tensor], lifted: list[int]) -> list[Tensor]:
    """Remove the dimension that `lift_scalars` added from the results."""
    for position in lifted:
        results[position] = results[position].squeeze(0)
    return results


def _alone(td: AbstractContainer, operand: object, inside: bool) -> list[bool]:
    """Return for each leaf of `_kd_collect` whether it is a member's, and its operand is 0-d."""
    if isinstance(operand, AbstractContainer) and operand._kd_desc.batch:
        operand = None  # all its leaves have rows
    if not isinstance(operand, (AbstractContainer, Tensor)) or not (inside or _has_members(td)):
        leaves: list[Tensor] = []
        td._kd_collect(leaves)
        return [False] * len(leaves)
    if isinstance(td, Composite):
        return [flag for member in td._members for flag in _alone(member, operand, inside=True)]
    flags: list[bool] = []
    for key, value in td._kd_entries.items():
        other = operand if isinstance(operand, Tensor) else operand._kd_entries.get(key)
        if isinstance(value, AbstractContainer):
            flags += _alone(value, other, inside)
        elif is_unbatched(value):
            flags.append(False)
        elif isinstance(value, Tensor):
            flags.append(inside and isinstance(other, Tensor) and not other.ndim)
    return flags


def _has_members(td: AbstractContainer) -> bool:
    return isinstance(td, Composite) or any(
        _has_members(node) for node in td._kd_below() if isinstance(node, AbstractContainer)
    )


def check_members_keep_batch(td: AbstractContainer, path: tuple[str, ...] = ()) -> None:
    """Refuse results of members whose leaves do not start with the batch size.

    Raises:
        ShapeMismatch: naming the entry.
    """
    if isinstance(td, Composite):
        for member in td._members:
            check_members_keep_batch(member, path)
        return
    batch = td._kd_desc.size  # of plain integers, as in `binary`
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            check_members_keep_batch(value, (*path, key))
        elif isinstance(value, Tensor) and value.shape[: len(batch)] != batch:
            raise ShapeMismatch(
                f"the result for entry {format_key((*path, key))} of a member must have a shape "
                f"that starts with batch_size {shape_text(batch)}, got {shape_text(value.shape)}. "
                "Expand the first container, or exchange the operands."
            )


def of_pairs(td: W, other: object, results: list[Tensor]) -> W:
    """Return the results for pairs of leaves as a container; they are ragged where `other` is."""
    mixed = isinstance(other, AbstractContainer) and other._kd_nested and keeps_batch(td)
    if mixed and not PLAIN.issuperset(map(type, results)) and any(map(is_ragged, results)):
        found = iter(results)
        return td._kd_zip_each(cast("Entry", other), lambda leaf, beside: next(found))
    return td._kd_rebuild(iter(results))


def of_members(td: W, results: list[Tensor]) -> W:
    new = td._kd_rebuild(iter(results))
    check_members_keep_batch(new)
    return new


def has_rows(td: AbstractContainer, leaf: Tensor) -> bool:
    """Return whether a leaf has the batch dimensions."""
    path = name_of_leaf(td._kd_entries, leaf) if td._kd_nested else None
    return path is None or not is_unbatched(td._kd_read(path))


def leaves_batch(td: AbstractContainer, leaf: Tensor, result: Tensor) -> ShapeMismatch:
    return ShapeMismatch(
        f"the result for {name_in(td, leaf)} must have a shape that starts with batch_size "
        f"{td._kd_desc.batch}, got {tuple(result.shape)}. Expand the first container, or exchange "
        "the operands."
    )


def written_to(out: W | None, result: W) -> W:
    """Return a result, or write it into the leaves of `out` and return that.

    Everything is checked before the first leaf is written; `out` may be locked.

    Args:
        out: a container of the keys, batch size and shapes of the result; `None`: no output.
        result: the computed result.

    Raises:
        KeySetMismatch: if the keys of `out` differ.
        ShapeMismatch: if the batch size or the shape of an entry differs.
        InvalidArgument: if a dtype cannot be cast, gradients are recorded, or one value of `out`
            that is not a tensor differs.
    """
    if out is None:
        return result
    if not isinstance(out, AbstractContainer):
        raise wrong_type("`out`", "a container", out)
    if out._kd_desc.batch != result._kd_desc.batch:
        raise ShapeMismatch(
            f"`out` must have batch_size {result._kd_desc.batch}, got {out._kd_desc.batch}."
        )
    writes: list[Write] = []
    for target, source in zip(*collect_writes(out, result), strict=True):
        where = finder(out._kd_entries, target)
        if not is_compiling():
            _check(where, target, source)
            check_write(target, source, where)
        writes.append((target, source, where))
    write_all(writes)
    return out


def reduced_to(out: W | None, result: W | Tensor) -> W | Tensor:
    """Return a reduction, or write it into `out`; one tensor for all leaves has no such place."""
    if out is None:
        return result
    if isinstance(result, Tensor):
        raise InvalidArgument(
            "`out` cannot be combined with `reduce=True`, whose result is one tensor."
        )
    return written_to(out, result)


def _check(where: object, target: Tensor, source: Tensor) -> None:
    """Refuse a leaf of `out` into which torch would not write this result."""
    if target.shape == source.shape and torch.can_cast(source.dtype, target.dtype):
        if not (torch.is_grad_enabled() and (target.requires_grad or source.requires_grad)):
            return
        raise InvalidArgument(
            f"entry {_name(where)} requires gradients, which `out` does not support. Leave out "
            "`out`, or use `torch.no_grad()`."
        )
    if target.shape != source.shape:
        raise ShapeMismatch(
            f"entry {_name(where)} of `out` must have shape {tuple(source.shape)}, got "
            f"{tuple(target.shape)}."
        )
    raise InvalidArgument(
        f"entry {_name(where)} of `out` must have a dtype to which {source.dtype} can be cast, got "
        f"{target.dtype}. Cast `out` first."
    )


def _name(where: object) -> str:
    return format_key(where()) if callable(where) else "`...`"
