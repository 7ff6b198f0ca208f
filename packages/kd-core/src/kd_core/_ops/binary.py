"""Functions of one leaf, or of a leaf and an operand, run on all leaves of a container.

Each generated method of `_ops.pointwise` is one call of a function in this module. The rules
for operands stand above the first functions. Where torch takes no number, it becomes a 0-dim tensor
beside each leaf. Non-tensor entries are passed through. An in-place form checks all leaves before
it writes the first, so an operand that does not fit does not change the container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._errors import (
    DeviceMismatch,
    InvalidArgument,
    InvalidValue,
    KdError,
    ShapeMismatch,
    shape_text,
    wrap_mapping,
    wrong_type,
)
from kd_core._keys import format_key
from kd_core._leaves.foreach import (
    CONSTANT_FROM,
    PLAIN,
    Kernel,
    are_mixed,
    as_it_was,
    clone_leaves,
    exact_constant,
    is_ragged,
    run,
    run_,
    run_exact,
    run_pairs,
    run_pairs_,
    run_up_to_overlap,
    run_with,
    run_with_,
    use_foreach,
    write_apart,
    wrote,
)
from kd_core._leaves.loops import (
    all_plain,
    explain_shapeless,
    few_leaves,
    finder,
    is_shapeless,
    name_of_leaf,
    without_shape,
)
from kd_core._leaves.writes import (
    Write,
    Written,
    check_in_place,
    check_write,
    collect_writes,
    write_all,
)
from kd_core._nodes import UnbatchedView, Values, is_data, is_unbatched, tensor_of
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    leaves_of,
    locked_as,
    name_in,
    note_entry,
    refuse_unbatched,
    unlock,
)
from kd_core._shapes import broadcasts_to, check_lines_up, without_names
from kd_core._unbatched import wrap_tensor

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes import Entry
    from kd_core._types import Batch

    C = TypeVar("C", bound=AbstractContainer)
    W = TypeVar("W", bound=AbstractContainer)


# What an operation takes and returns: the operand beside each leaf, and the results in `out`.
#
# The second operand is
#
# - a number: for every leaf;
# - a tensor: its dimensions are the *first* batch dimensions, or the last ones where it fits
#   these alone; its shape is padded with ones to the rank of each leaf. One that fits neither
#   enlarges the batch, if torch broadcasts both and the operation does not write in place;
# - a container: leaves are matched by key. Both must have the same keys and the same batch size, or
#   one of them the batch size ().
#
# Results are written into a container that the caller passes as `out`: all of them or none.
#
# Knows operands and results; must not know the operation.

Operand: TypeAlias = "AbstractContainer | Tensor | complex"
"""A number, a tensor that broadcasts over the batch dimensions, or a container."""

Comparable: TypeAlias = "Operand | Mapping[str, object]"
"""An operand of a comparison, which may be a mapping, too."""

# A tuple, because the guard of dynamo on a class in a set fails at once.
NUMBERS: Final = (int, float, bool, complex)
_OPERANDS: Final = (AbstractContainer, Tensor, int, float, complex)


def is_operand(value: object) -> TypeGuard[Operand]:
    """Return whether a pointwise operation takes this value."""
    return isinstance(value, _OPERANDS) or is_unbatched(value) or _is_array(value)


def is_comparable(value: object) -> TypeGuard[Comparable]:
    """Return whether a container is compared with this value: an operand, or a mapping."""
    return is_operand(value) or isinstance(value, Mapping)


def as_operand(value: object) -> Tensor | complex:
    """Return a number or a tensor.

    Raises:
        InvalidArgument: if the value is neither.
    """
    if isinstance(value, (Tensor, complex, float, int)):
        return value._kd_tensor if isinstance(value, UnbatchedView) else value
    if is_unbatched(value):
        return value._tensor
    if _is_array(value):
        tensor = torch.as_tensor(value)
        return tensor if tensor.ndim else tensor.item()
    what = "a number, a tensor or a container"
    raise wrong_type("the other operand", what, value, wrap_mapping(value))


def is_plain(operand: object) -> bool:
    """Return whether an operand is a number or `None`."""
    return operand is None or type(operand) in NUMBERS


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
    """Return a container expanded to the batch size that it has with others, as torch broadcasts.

    `None` if they do not fit, or do not enlarge the batch.
    """
    batch = without_names(td._kd_desc.batch)
    shapes = [operand.shape for operand in operands if isinstance(operand, Tensor)]
    batches = [
        without_names(operand._kd_desc.batch)
        for operand in operands
        if isinstance(operand, AbstractContainer) and batch
    ]
    try:
        wide = tuple(torch.broadcast_shapes(batch, *shapes, *batches))
    except RuntimeError:
        return None
    if batches and not all(_fits(each, wide) for each in (batch, *batches)):
        return None
    return None if wide == batch else td._kd_engine.expand(td, wide)


def _fits(shape: Batch, batch: Batch) -> bool:
    """Return whether a batch size can be broadcast to another, to its last dimensions alone."""
    ndim = len(shape)
    if ndim > len(batch) or not broadcasts_to(shape, batch):
        return False
    one_way = ndim == len(batch) or not broadcasts_to(shape, batch[:ndim])
    return one_way or all(size == 1 for size in shape)


def fitted(td: AbstractContainer, operand: C) -> C:
    """Return a container expanded to the batch size of another, if it can be; else as it is."""
    mine, theirs = td._kd_desc.batch, operand._kd_desc.batch
    if not mine or not theirs or (not is_compiling() and mine == theirs):
        return operand
    batch, shape = without_names(mine), without_names(theirs)
    if batch == shape or not _fits(shape, batch):
        return operand
    return operand._kd_engine.expand(operand, batch)


def lined_up(td: W, other: C) -> tuple[W, C]:
    """Return two containers of one batch size, as torch broadcasts; as they are if they have none.

    One without batch dimensions stays as it is.
    """
    mine, theirs = td._kd_desc, other._kd_desc
    if mine is theirs or not mine.ndim or not theirs.ndim:
        return td, other
    if without_names(mine.batch) == without_names(theirs.batch):  # dynamo of 2.10 compares no names
        return td, other
    wide = widened(td, other)
    td = td if wide is None else wide
    return td, fitted(td, other)


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
    if (
        isinstance(other, AbstractContainer)
        and other._kd_nested
        and keeps_batch(td)
        and not PLAIN.issuperset(map(type, results))
        and any(map(is_ragged, results))
    ):
        found = iter(results)
        return td._kd_zip_each(other, lambda leaf, beside: next(found))
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


_LeafOp: TypeAlias = Callable[..., Tensor]
_UNSIGNED: Final = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def unary(td: W, fn: _LeafOp, kernel: Kernel | None = None) -> W:
    """Apply a function of one tensor to every leaf; the result is locked as the container is."""
    try:
        if kernel is None or is_dynamo_compiling() or few_leaves(td._kd_entries):
            result = td._kd_map_each(fn, None, None)  # dynamo adds guards on each default
        else:
            leaves: list[Tensor] = []
            td._kd_collect(leaves)
            result = td._kd_rebuild(iter(run(leaves, fn, kernel)))
    except (RuntimeError, TypeError) as error:
        note_entry(error, td, fn)
        raise
    if td._kd_desc.frozen or not td._kd_owns_leaves:
        return _locked_as(td, result, kernel is not None)
    return result


def _locked_as(td: AbstractContainer, result: W, at_once: bool) -> W:
    """Lock a result as the container is locked; not where all of no leaves were computed at once.

    See `unary`: nothing has come of a kernel that had no leaves.
    """
    return result if at_once and not leaves_of(td) else locked_as(td, result)


def cloned(td: W) -> W:
    """Return a copy, not locked, that shares values that are not tensors."""
    copy = unary(td, torch.clone, clone_leaves)
    return unlock(copy) if copy._kd_desc.frozen else copy


def unary_(td: W, fn: _LeafOp, kernel: Kernel | None = None, refuse_overlap: bool = True) -> W:
    """Apply a function that writes into the storage of each leaf; see `check_in_place`."""
    leaves = leaves_of(td)
    alike = check_in_place(td._kd_entries, leaves, fn, refuse_overlap=refuse_overlap)
    run_(leaves, fn, kernel, alike)
    return td._kd_written() if td._kd_is_linked else td


def binary(
    td: W, other: object, fn: _LeafOp, kernel: Kernel | None = None, exact: Kernel | None = None
) -> W:
    """Apply a function of two to every leaf and the operand.

    The result is locked as the container is, unless the operand is a tensor over the batch.

    Args:
        td: the first operand.
        other: the second operand.
        fn: the function of one leaf and the operand for it.
        kernel: the foreach function for all leaves, if there is one.
        exact: the same for a 0-dim tensor; given if it can replace a number with equal results.
    """
    try:
        kind = type(other)
        if kind is int or kind is float or kind is bool or kind is complex:
            if is_dynamo_compiling():  # a loop adds the fewest guards
                result = td._kd_map_each(lambda leaf: fn(leaf, other), None, None)
            else:
                leaves: list[Tensor] = []
                td._kd_collect(leaves)
                result = td._kd_rebuild(iter(_run_number(leaves, other, fn, kernel, exact)))
        else:
            result = _with_operand(td, other, fn, kernel, exact)
    except RuntimeError as error:
        _explain(td, other, fn, error)
        raise
    if (td._kd_desc.frozen or not td._kd_owns_leaves) and not is_of_rows(other):
        return _locked_as(td, result, kernel is not None)
    return result


def compared(td: W, other: object, fn: _LeafOp) -> W:
    """Compare every leaf with the operand, which may be a mapping, and data that is not a tensor.

    Data is equal or not, one answer for each row; another comparison leaves it as it is.
    """
    # A container is asked for first: `Mapping` is an abstract class, which answers slowly.
    if not isinstance(other, AbstractContainer) and isinstance(other, Mapping):
        other = registry.nest_mapping(_beside(td, other), td._kd_desc.unlocked(), ())
    with_data = False
    if fn in _EQUALITIES and isinstance(other, AbstractContainer):
        td, other, with_data = _alike(*lined_up(td, other))
    result = binary(td, other, fn)
    if result._kd_desc.frozen:
        unlock(result)  # answers are not values of the container
    if with_data and isinstance(other, AbstractContainer):
        _compare_data(td, other, result, fn is torch.eq)
    return result


def _beside(td: AbstractContainer, given: Mapping[str, object]) -> dict[str, object]:
    """Return a mapping whose numbers and tensors have the shapes of the entries beside them."""
    made = dict(given)
    for key, value in made.items():
        entry = td._kd_entries.get(key)
        if isinstance(entry, AbstractContainer) and isinstance(value, Mapping):
            made[key] = _beside(entry, value)
        elif isinstance(entry, Tensor) and isinstance(value, _OPERANDS[1:]):
            tensor = torch.as_tensor(value, device=entry.device)
            if broadcasts_to(tuple(tensor.shape), tuple(entry.shape)):
                made[key] = tensor.expand(entry.shape)
    return made


_EQUALITIES: Final = (torch.eq, torch.ne)


def _alike(td: W, other: AbstractContainer) -> tuple[W, AbstractContainer, bool]:
    """Return two containers with tensors where one of them has a tensor and the other has data.

    Data that a tensor can hold is compared as one; other data is not equal to any tensor. The last
    of the results is whether both may have data at a key, which torch cannot compare.
    """
    if not (td._kd_nested or other._kd_nested) or isinstance(td, Composite):
        return td, other, td._kd_nested
    mine: dict[str, Entry] = {}
    theirs: dict[str, Entry] = {}
    beside, with_data = other._kd_entries, False
    for key, entry in td._kd_entries.items():
        found = beside.get(key)
        if type(entry) is type(found) is Tensor:
            continue
        if isinstance(entry, Tensor) and is_data(found):
            mine[key], theirs[key] = _as_tensors(entry, found)
        elif isinstance(found, Tensor) and is_data(entry):
            theirs[key], mine[key] = _as_tensors(found, entry)
        elif isinstance(entry, AbstractContainer) and isinstance(found, AbstractContainer):
            inner, beside_inner, below = _alike(entry, found)
            with_data |= below
            if inner is not entry:
                mine[key], theirs[key] = inner, beside_inner
        else:
            with_data = True
    if not mine:
        return td, other, with_data
    return (
        td._kd_like({**td._kd_entries, **mine}, td._kd_desc.unlocked()),
        other._kd_like({**beside, **theirs}, other._kd_desc.unlocked()),
        with_data,
    )


def _as_tensors(tensor: Tensor, data: Values) -> tuple[Tensor, Tensor]:
    try:
        value = torch.as_tensor(data.tolist(), device=tensor.device)
        torch.broadcast_shapes(tensor.shape, value.shape)
    except (TypeError, ValueError, RuntimeError):
        unlike = torch.zeros(data._kd_desc.batch, dtype=torch.bool, device=tensor.device)
        return unlike, ~unlike
    return tensor, value


def _compare_data(
    td: AbstractContainer, other: AbstractContainer, result: AbstractContainer, equal: bool
) -> None:
    """Replace the data in a result by whether it is equal, or not equal."""
    if isinstance(result, Composite) and isinstance(td, Composite):
        rows = td._rows_of_operand(other)
        for member, row, found in zip(td._members, rows, result._members, strict=True):
            assert isinstance(row, AbstractContainer)
            _compare_data(member, row, found, equal)
        return
    theirs = other._kd_entries
    for key, entry in list(td._kd_entries.items()):
        if type(entry) is Tensor:
            continue
        if isinstance(entry, AbstractContainer):
            below, made = theirs[key], result._kd_entries[key]
            assert isinstance(below, AbstractContainer)
            assert isinstance(made, AbstractContainer)
            _compare_data(entry, below, made, equal)
        elif is_data(entry):
            result._kd_set_entry(key, entry._equal_rows(theirs[key], equal))


def _with_operand(
    td: W, other: object, fn: _LeafOp, kernel: Kernel | None, exact: Kernel | None
) -> W:
    if isinstance(other, AbstractContainer):
        return _zip(td, other, fn, kernel)
    operand = as_operand(other)
    leaves = leaves_of(td)
    if not isinstance(operand, Tensor):
        return td._kd_rebuild(iter(_run_number(leaves, operand, fn, kernel, exact)))
    if operand.ndim == 0 and keeps_batch(td):
        return td._kd_rebuild(iter(run_with(leaves, operand, fn, None)))
    try:
        beside = padded(td, operand, leaves)
    except ShapeMismatch:
        wide = widened(td, operand)
        if wide is None:
            raise
        return _with_operand(wide, operand, fn, kernel, exact)
    return _combine_pairs(td, operand, leaves, beside, fn, kernel)


def _run_number(
    leaves: list[Tensor],
    number: object,
    fn: _LeafOp,
    kernel: Kernel | None,
    exact: Kernel | None,
) -> list[Tensor]:
    found = None if exact is None else run_exact(leaves, number, fn, exact)
    return run_with(leaves, number, fn, kernel) if found is None else found


def binary_(
    td: W,
    other: object,
    fn: _LeafOp,
    kernel: Kernel | None = None,
    exact: Kernel | None = None,
    refuse_overlap: bool = True,
) -> W:
    """Apply a function that writes into the storage of each leaf; see `binary`.

    Args:
        td: the container that is written.
        other: the second operand.
        fn: the function of one leaf and the operand for it.
        kernel: the in-place foreach function.
        exact: the same for a 0-dim tensor.
        refuse_overlap: see `check_in_place`.
    """
    leaves: list[Tensor] = Written()
    theirs: list[Tensor] = []
    if isinstance(other, AbstractContainer):
        other = fitted(td, other)
        td._kd_collect_pair(other, leaves, theirs, ())
        check_batches(td._kd_desc.batch, other._kd_desc.batch)
    else:
        td._kd_collect(leaves)
        operand = as_operand(other)
        if isinstance(operand, Tensor):
            operand = as_it_was(operand, leaves)
        if not isinstance(operand, Tensor) or (not operand.ndim and keeps_batch(td)):
            return _write_number(td, leaves, operand, fn, kernel, exact, refuse_overlap)
        theirs = padded(td, operand, leaves)
    if not keeps_batch(td):
        lift_scalars(td, leaves, [other], [theirs])
    alike = check_in_place(td._kd_entries, leaves, fn, theirs)
    run_pairs_(leaves, theirs, fn, kernel, alike)
    return td._kd_written() if td._kd_is_linked else td


def _write_number(
    td: W,
    leaves: list[Tensor],
    number: Tensor | complex,
    fn: _LeafOp,
    kernel: Kernel | None,
    exact: Kernel | None,
    refuse_overlap: bool,
) -> W:
    """Apply a function of leaves and one number, or a 0-dim tensor, that writes into the leaves."""
    column = [number] * len(leaves)
    alike = check_in_place(td._kd_entries, leaves, fn, column, refuse_overlap=refuse_overlap)
    constant = None if exact is None else exact_constant(leaves, number, alike)
    if constant is None:
        run_with_(leaves, number, fn, kernel, alike)
    elif len(leaves) < CONSTANT_FROM or exact is None or (not alike and are_mixed(leaves)):
        run_with_(leaves, constant, fn, None, alike)
    elif not wrote(exact, leaves, constant):
        run_with_(leaves, number, fn, None, alike)
    return td._kd_written() if td._kd_is_linked else td


def binary_swapped(
    td: W, left: object, fn: _LeafOp, kernel: Kernel | None = None, exact: Kernel | None = None
) -> W:
    """Apply `binary` to an operand on the left; torch puts a number on the right itself."""
    if isinstance(left, Tensor):
        return reflected(td, left, fn)
    return binary(td, left, fn, kernel, exact)


def reflected(td: W, left: object, fn: Callable[..., Tensor], exact: bool = False) -> W:
    """Apply an operator to the operand and every leaf, with the leaf on the right.

    Args:
        td: the right operand.
        left: the left operand.
        fn: the operator.
        exact: whether a 0-dim tensor may replace a number: for + - and * only, because torch
            computes a number divided by a tensor as a product with the reciprocal.
    """
    return binary(
        td,
        left,
        lambda leaf, operand: fn(operand, leaf),
        None,
        (lambda leaves, constant: [fn(constant, leaf) for leaf in leaves]) if exact else None,
    )


def _zip(td: W, other: AbstractContainer, fn: _LeafOp, kernel: Kernel | None) -> W:
    desc, second = td._kd_desc, other._kd_desc
    # With one batch dimension, broadcasting cannot change a batch that both containers have.
    stays = desc.ndim < 2 and (desc is second or desc.batch == second.batch)
    loops = kernel is None or is_dynamo_compiling()
    if stays and (keeps_batch(td) if loops else few_leaves(td._kd_entries)):
        return td._kd_zip_each(other, fn)
    td, other = lined_up(td, other)
    desc, second = td._kd_desc, other._kd_desc
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    td._kd_collect_pair(other, mine, theirs, ())
    if stays and desc.ndim:
        return of_pairs(td, other, run_pairs(mine, theirs, fn, kernel))
    check_batches(desc.batch, second.batch)
    if not keeps_batch(td):
        return _combine_pairs(td, other, mine, theirs, fn, kernel)
    results = run_pairs(mine, theirs, fn, kernel)
    batch = desc.size  # without names: to dynamo no symbol is equal to a named size
    for leaf, result in zip(mine, results, strict=True):
        if result.shape[: desc.ndim] != batch and has_rows(td, leaf):
            raise leaves_batch(td, leaf, result)
    return of_pairs(td, other, results)


def _combine_pairs(
    td: W,
    operand: object,
    mine: list[Tensor],
    theirs: list[Tensor],
    fn: _LeafOp,
    kernel: Kernel | None,
) -> W:
    """Apply a function of two to each leaf and its operand, for members as for their stack."""
    if keeps_batch(td):
        return td._kd_rebuild(iter(run_pairs(mine, theirs, fn, kernel)))
    lifted = lift_scalars(td, mine, [operand], [theirs])
    return of_members(td, lower_scalars(list(run_pairs(mine, theirs, fn, kernel)), lifted))


def _explain(td: AbstractContainer, other: object, fn: _LeafOp, error: RuntimeError) -> None:
    """Name the entry that cannot be combined with the operand."""
    if isinstance(error, KdError) or is_compiling():
        return
    if isinstance(other, AbstractContainer):
        _explain_pairs(td, other, fn, error)
    elif isinstance(other, Tensor):
        note_entry(error, td, fn, padded(td, other, leaves_of(td)))
    else:
        note_entry(error, td, lambda leaf: fn(leaf, other))


def _explain_pairs(
    td: AbstractContainer, other: AbstractContainer, fn: _LeafOp, error: RuntimeError
) -> None:
    """Raise the error that names the entry whose two leaves cannot be combined."""
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    td._kd_collect_pair(other, mine, theirs, ())
    for leaf, value in zip(mine, theirs, strict=True):
        explain_shapeless(error, f"{name_in(td, leaf)} in both containers", leaf, value)
        pairs = zip(reversed(leaf.shape), reversed(value.shape), strict=False)
        if any(size != beside and 1 not in (size, beside) for size, beside in pairs):
            raise ShapeMismatch(
                f"the shapes of {name_in(td, leaf)} must be broadcastable, got "
                f"{tuple(leaf.shape)} in the first container and {tuple(value.shape)} in the "
                "second."
            ) from error
        if leaf.device != value.device and leaf.ndim and value.ndim:
            raise DeviceMismatch(
                f"{name_in(td, leaf)} must be on the same device in both containers, got "
                f"{leaf.device} and {value.device}. Move one of the containers with `to`."
            ) from error
    if len(mine) == len(leaves_of(td)):
        note_entry(error, td, fn, theirs)


def as_truth(other: object) -> AbstractContainer | Tensor:
    """Return an operand; a number becomes a 0-dim tensor of its truth, which every dtype holds."""
    operand = _operand(other)
    if isinstance(operand, (AbstractContainer, Tensor)):
        return operand
    return torch.tensor(bool(operand))


def as_float(other: object) -> AbstractContainer | Tensor | complex:
    """Return an operand of a function that computes in floating point; an integer as a float."""
    operand = _operand(other)
    return float(operand) if isinstance(operand, int) else operand


def binary_of_tensors(td: W, other: object, fn: _LeafOp, kernel: Kernel | None = None) -> W:
    """Apply a function of two tensors to every leaf and the operand; see `binary`.

    Raises:
        InvalidValue: if the operand is an integer that the dtype of a leaf does not hold.
    """
    operand = _operand(other)
    if isinstance(operand, (AbstractContainer, Tensor)):
        return binary(td, operand, fn, kernel)
    leaves = leaves_of(td)
    beside = [number_beside(leaf, operand) for leaf in leaves]
    made = td._kd_rebuild(iter(run_pairs(leaves, beside, fn, kernel)))
    return _locked_as(td, made, kernel is not None)


def binary_of_tensors_(td: W, other: object, fn: _LeafOp, kernel: Kernel | None = None) -> W:
    """Apply a function of two tensors that writes into the storage of each leaf; see `binary_`."""
    operand = _operand(other)
    if isinstance(operand, (AbstractContainer, Tensor)):
        return binary_(td, operand, fn, kernel)
    leaves = leaves_of(td)
    beside = [number_beside(leaf, operand) for leaf in leaves]
    run_pairs_(leaves, beside, fn, kernel, check_in_place(td._kd_entries, leaves, fn, beside))
    return td._kd_written() if td._kd_is_linked else td


def _operand(other: object) -> AbstractContainer | Tensor | complex:
    return other if isinstance(other, AbstractContainer) else as_operand(other)


def promoted(dtype: torch.dtype, number: complex) -> torch.dtype:
    """Return `torch.result_type` of a tensor and a number, which dynamo does not trace."""
    if isinstance(number, (bool, int)):
        is_wider = dtype is torch.bool and not isinstance(number, bool)
        return torch.int64 if is_wider else dtype
    floats = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
    return floats if isinstance(number, float) else floats.to_complex()


def number_beside(leaf: Tensor, number: complex) -> Tensor:
    """Return a number as a 0-dim tensor on the device of a leaf.

    Raises:
        InvalidValue: if it is an integer that the promoted dtype does not hold.
    """
    dtype = promoted(leaf.dtype, number)
    try:
        if isinstance(number, int) and dtype in _UNSIGNED and number < 0:
            raise OverflowError
        if _rounds_to_infinity(dtype, number):
            return torch.tensor(number, dtype=dtype, device=leaf.device)
        # Unlike `torch.tensor`, this is traced without a constant.
        return torch.full((), number, dtype=dtype, device=leaf.device)
    except (RuntimeError, OverflowError) as error:
        if not isinstance(number, int):
            raise
        raise InvalidValue(
            f"a number beside a leaf of {dtype} must be one that {dtype} holds, got {number}. "
            "Cast the leaf to a wider dtype first."
        ) from error


def _rounds_to_infinity(dtype: torch.dtype, number: complex) -> bool:
    """Return whether `torch.full` may refuse a number because it is infinite in a dtype."""
    return (dtype.is_floating_point or dtype.is_complex) and abs(number) > torch.finfo(dtype).max


CastFilter: TypeAlias = Callable[[tuple[str, ...], Tensor], bool]
"""A function of the path and the tensor of a leaf that says whether the leaf is cast."""


def cast_leaves(td: W, dtype: torch.dtype, cast_filter: CastFilter | None = None) -> W:
    """Cast every leaf; those that have the dtype are shared. See `unary` for the lock.

    Args:
        td: the container.
        dtype: the dtype.
        cast_filter: called with the path and the tensor of each leaf; says whether it is cast.
    """
    if cast_filter is not None:
        return locked_as(td, _cast_some(td, dtype, cast_filter, ()))
    leaves = [leaf if leaf.dtype is dtype else leaf.to(dtype=dtype) for leaf in leaves_of(td)]
    return locked_as(td, td._kd_rebuild(iter(leaves)))


def _cast_some(td: W, dtype: torch.dtype, cast_filter: CastFilter, path: tuple[str, ...]) -> W:
    """Cast the leaves that a filter chooses."""
    if isinstance(td, Composite):
        return td._by_member(lambda member: _cast_some(member, dtype, cast_filter, path))
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            entries[key] = _cast_some(value, dtype, cast_filter, (*path, key))
            continue
        leaf = tensor_of(value)
        entries[key] = value
        if leaf is not None and cast_filter((*path, key), leaf):
            made = leaf.to(dtype=dtype)
            entries[key] = made if leaf is value else wrap_tensor(made, td._kd_desc)
    return td._kd_like(entries, td._kd_desc.unlocked())


# Functions of a leaf and two operands, run on all leaves of a container.


def blend(td: W, fn: _LeafOp, first: object, second: object, kernel: Kernel | None = None) -> W:
    """Apply a function of three to every leaf and two operands; see `binary` for the lock.

    Args:
        td: the container.
        fn: the function of one leaf and the operands for it.
        first: the first operand; `None` is passed on.
        second: the second operand.
        kernel: the foreach function for two lists and a number.
    """
    result = blended(td, fn, first, second, kernel)
    beside = isinstance(first, AbstractContainer) or isinstance(second, AbstractContainer)
    if not beside and (is_of_rows(first) or is_of_rows(second)):
        return result
    return _locked_as(td, result, True)


def blended(td: W, fn: _LeafOp, first: object, second: object, kernel: Kernel | None = None) -> W:
    """Apply a function of three to every leaf and two operands; the result is not locked."""
    if is_plain(first) and is_plain(second):
        return td._kd_map_each(lambda leaf: fn(leaf, first, second))
    try:
        leaves, columns = _columns(td, first, second)
    except ShapeMismatch:
        wide = widened(td, first, second)
        if wide is None:
            raise
        return blended(wide, fn, first, second, kernel)
    if not keeps_batch(td):
        lifted = lift_scalars(td, leaves, [first, second], columns)
        results = lower_scalars(_run_columns(leaves, columns, fn, kernel), lifted)
        return of_members(td, results)
    results = _run_columns(leaves, columns, fn, kernel)
    ndim, batch = td._kd_desc.ndim, td._kd_desc.size  # of plain integers, as in `binary`
    for leaf, result in zip(leaves, results, strict=True):
        if result.shape[:ndim] != batch and has_rows(td, leaf):
            raise leaves_batch(td, leaf, result)
    return of_pairs(td, first, results)


def blend_(td: W, fn: _LeafOp, first: object, second: object, kernel: Kernel | None = None) -> W:
    """Apply a function of three that writes into the storage of each leaf; see `blend`."""
    operands = [
        as_it_was(each, leaves_of(td)) if isinstance(each, Tensor) else each
        for each in (first, second)
    ]
    leaves, columns = _columns(td, *operands, written=True)
    if not keeps_batch(td):
        lift_scalars(td, leaves, operands, columns)
    check_in_place(td._kd_entries, leaves, fn, *columns)
    left, right = columns
    ends = _ends(leaves, columns) if kernel is not None else None
    start = 0
    if kernel is not None and ends is not None:
        start = run_up_to_overlap(kernel, leaves, ends, right[0])
    for position in range(start, len(leaves)):
        leaf, one, two = leaves[position], left[position], right[position]
        try:
            fn(leaf, one, two)
        except RuntimeError:
            write_apart(fn, leaf, one, two)
    return td._kd_written() if td._kd_is_linked else td


def _columns(
    td: AbstractContainer, *operands: object, written: bool = False
) -> tuple[list[Tensor], list[list[object]]]:
    """Return the leaves, and for each operand its values, one for each leaf."""
    leaves: list[Tensor] = []
    td._kd_collect(leaves)
    columns: list[list[object]] = []
    for operand in operands:
        column: list[Tensor] = []
        if isinstance(operand, AbstractContainer):
            operand = fitted(td, operand)
            td._kd_collect_pair(operand, Written() if written else [], column, ())
            check_batches(td._kd_desc.batch, operand._kd_desc.batch)
        elif operand is not None:
            value = as_operand(operand)
            if isinstance(value, Tensor) and value.ndim:
                column = padded(td, value, leaves)
            else:
                columns.append([value] * len(leaves))
                continue
        columns.append(list(column) if column else [None] * len(leaves))
    return leaves, columns


def _run_columns(
    leaves: list[Tensor], columns: list[list[object]], fn: _LeafOp, kernel: Kernel | None
) -> list[Tensor]:
    ends = _ends(leaves, columns) if kernel is not None else None
    if kernel is not None and ends is not None:
        return list(kernel(leaves, ends, columns[1][0]))
    return list(map(fn, leaves, *columns))


def _ends(leaves: list[Tensor], columns: list[list[object]]) -> list[Tensor] | None:
    """Return the first operands where a kernel takes them beside a number, else `None`."""
    first, second = columns
    if leaves and isinstance(second[0], (float, int)):
        ends = [each for each in first if isinstance(each, Tensor)]
        if len(ends) == len(leaves) and use_foreach(leaves) and use_foreach(ends):
            return ends
    return None
