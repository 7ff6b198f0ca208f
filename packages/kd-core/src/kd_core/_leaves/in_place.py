"""In-place functions of all leaves: checked before the first write.

The state of each leaf is checked, and the function is tried on an element or two of each kind of
leaf and operand, to find out whether torch accepts their dtypes. Leaves of one floating point dtype
that record no gradients need neither (the fast path).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.shapes import broadcasts_to
from kd_core._errors import InvalidValue, ShapeMismatch, cannot_broadcast
from kd_core._keys import format_key
from kd_core._leaves.foreach import (
    PLAIN,
    dtype_of,
    is_cpu,
    is_inference,
    is_meta,
    needs_grad,
)
from kd_core._leaves.loops import finder
from kd_core._leaves.writes import overlap_refusal, refusal, refused_write
from kd_core._torch_private import dispatch_modes

if TYPE_CHECKING:
    from kd_core._nodes.entry import Entries

Column: TypeAlias = Sequence[object]
"""The values of one operand, one for each leaf: all tensors, or the same number repeated."""

_USUAL: Final = frozenset({torch.float32, torch.float64})
"""The dtypes whose in-place functions accept numbers and tensors of the same dtype."""

_LARGEST: Final = 1e30
"""The largest number that is taken to fit each of these dtypes."""

_DIVIDES: Final = (Tensor.div_, Tensor.floor_divide_, Tensor.remainder_, Tensor.fmod_)
"""Functions that raise where an integer is divided by zero."""

_UNRECORDED: Final = frozenset(
    {Tensor.logical_and_, Tensor.logical_or_, Tensor.logical_xor_, Tensor.logical_not_}
)
"""Functions without a derivative that torch runs on any tensor, those that need gradients too."""


def writing(fn: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the in-place form of a function of two for which torch has none."""

    def write(leaf: Tensor, other: Tensor) -> Tensor:
        # A leaf that is kept by the history of its own new value would never be freed.
        mine = leaf.clone() if leaf.requires_grad and torch.is_grad_enabled() else leaf
        result = fn(mine, mine if other is leaf else other)
        if _rank(result.dtype) > _rank(leaf.dtype):
            raise InvalidValue(
                f"result type {result.dtype} cannot be cast to the dtype {leaf.dtype} of the leaf"
            )
        if result.shape != leaf.shape:
            raise ShapeMismatch(
                f"the result of shape {tuple(result.shape)} does not fit the leaf of shape "
                f"{tuple(leaf.shape)}"
            )
        return leaf.copy_(result)

    return write


def _rank(dtype: torch.dtype) -> int:
    """Return the category of a dtype; as `torch.can_cast`, which dynamo does not trace."""
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype is not torch.bool)


maximum_ = writing(torch.maximum)
minimum_ = writing(torch.minimum)
fmax_ = writing(torch.fmax)
fmin_ = writing(torch.fmin)
logaddexp_ = writing(torch.logaddexp)


def check_in_place(
    entries: Entries,
    leaves: list[Tensor],
    fn: Callable[..., object],
    *columns: Column,
    refuse_overlap: bool = True,
) -> bool:
    """Refuse what torch would refuse for one leaf after others were written.

    Args:
        entries: the entries that hold the leaves, to name one in a message.
        leaves: the tensors that are written.
        fn: the function, called with a leaf and the value of each operand there.
        *columns: for each operand, its value at each leaf.
        refuse_overlap: whether torch refuses leaves whose elements overlap in memory.

    Returns:
        Whether all leaves are of one float dtype and no gradient is recorded for any of them.

    Raises:
        InvalidValue: if torch refuses to write into a leaf.
        ShapeMismatch: if an operand would enlarge a leaf.
    """
    if not leaves or is_compiling():  # tracing writes nothing
        return False
    if _are_common(leaves, columns):
        return True
    tensors = [cast("list[Tensor]", each) for each in columns if isinstance(each[0], Tensor)]
    for column in tensors:
        for leaf, operand in zip(leaves, column, strict=True):
            if operand.shape != leaf.shape and not broadcasts_to(operand.shape, leaf.shape):
                raise _enlarges(entries, leaf, operand)
    doubtful = _is_doubtful(leaves, tensors)
    if doubtful:
        with torch.set_grad_enabled(torch.is_grad_enabled() and fn not in _UNRECORDED):
            _check_states(entries, leaves, columns, refuse_overlap)
    if not _are_usual(leaves, columns) or (doubtful and not all(map(_is_strided, leaves))):
        _rehearse(entries, leaves, fn, columns)
    refused = refused_write(fn, leaves, *columns)
    if refused is not None:
        raise _cannot_write(entries, leaves[refused.position], f"{refused.reason}.")
    return False


def _are_common(leaves: list[Tensor], columns: Sequence[Column]) -> bool:
    """Return whether torch surely writes: the usual leaves and operands, looked at once.

    Each attribute that is read shows in the benchmarks: a leaf on the CPU is not on `meta`, and
    only inference tensors have no version.
    """
    dtype = leaves[0].dtype
    if dtype not in _USUAL or dispatch_modes():  # a mode would see the questions as operations
        return False
    if not PLAIN.issuperset(map(type, leaves)):
        return False
    recording = torch.is_grad_enabled()
    try:
        for leaf in leaves:
            if leaf.dtype is not dtype or (recording and leaf.requires_grad):
                return False
            if not leaf.is_contiguous() or leaf._version < 0:
                return False
        for column in columns:
            if not _are_common_operands(leaves, column, dtype, recording):
                return False
    except RuntimeError:  # compressed sparse tensors, inference tensors
        return False
    return True


def _are_common_operands(
    leaves: list[Tensor], column: Column, dtype: torch.dtype, recording: bool
) -> bool:
    """Return whether an operand is a number that all dtypes hold, or tensors like the leaves."""
    if not isinstance(column[0], Tensor):
        return _is_usual_number(column[0])
    operands = cast("list[Tensor]", column)
    if not PLAIN.issuperset(map(type, operands)):
        return False
    for leaf, operand in zip(leaves, operands):  # noqa: B905  # asking for `strict` costs
        if operand.dtype is not dtype or (recording and operand.requires_grad):
            return False
        if not operand.is_same_size(leaf):
            return False
        if not (operand.is_cpu and leaf.is_cpu) and operand.device != leaf.device:
            return False
    return True


def _is_usual_number(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST


def _check_states(
    entries: Entries, leaves: list[Tensor], columns: Sequence[Column], refuse_overlap: bool
) -> None:
    for leaf, *operands in zip(leaves, *columns, strict=True):
        reason = refusal(leaf, *operands) or (overlap_refusal(leaf) if refuse_overlap else None)
        if reason is not None:
            raise _cannot_write(entries, leaf, reason)


def _is_strided(leaf: Tensor) -> bool:
    return leaf.layout is torch.strided


def _is_doubtful(leaves: list[Tensor], tensors: list[list[Tensor]]) -> bool:
    """Return whether torch may refuse a write because of the state of a leaf or operand."""
    try:
        if not all(map(Tensor.is_contiguous, leaves)) or any(map(is_inference, leaves)):
            return True
    except RuntimeError:  # compressed sparse tensors
        return True
    recording = torch.is_grad_enabled()
    if recording and any(map(needs_grad, leaves)):
        return True
    return any(
        any(map(is_meta, column)) or (recording and any(map(needs_grad, column)))
        for column in tensors
    )


def _are_usual(leaves: list[Tensor], columns: Sequence[Column]) -> bool:
    """Return whether all leaves and operands have the same of the usual dtypes."""
    dtype = leaves[0].dtype
    if dtype not in _USUAL or len(set(map(dtype_of, leaves))) > 1:
        return False
    for column in columns:
        first = column[0]
        if isinstance(first, Tensor):
            operands = cast("list[Tensor]", column)
            if set(map(dtype_of, operands)) != {dtype}:
                return False
            if len({*map(is_cpu, leaves), *map(is_cpu, operands)}) > 1:
                return False
        elif not _is_usual_number(first):
            return False
    return True


def _rehearse(
    entries: Entries, leaves: list[Tensor], fn: Callable[..., object], columns: Sequence[Column]
) -> None:
    """Call a function with one or two elements in place of each kind of leaf and operand."""
    divides = getattr(fn, "func", fn) in _DIVIDES
    seen: set[tuple[object, ...]] = set()
    for leaf, *operands in zip(leaves, *columns, strict=True):
        integers = divides and not (leaf.is_floating_point() or leaf.is_complex())
        single = leaf.numel() == 1  # only then does `fill_` take a number out of range
        kind = (leaf.layout, single, *[_kind(value, integers) for value in (leaf, *operands)])
        if kind in seen:
            continue
        seen.add(kind)
        if _is_strided(leaf):
            one = cast("Tensor", _stand_in(leaf))
            target = one if single else one.repeat(2)
            values = [target, *[_stand_in(operand, integers) for operand in operands]]
        else:  # one element cannot represent it
            values = [leaf.detach().clone(), *operands]
        try:
            fn(*values)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            remedy = "Use the form without `_`, or cast the entry first."
            raise _cannot_write(entries, leaf, f"{reason}. {remedy}") from None


def _kind(value: object, divisor: bool = False) -> object:
    """Return what decides whether a function accepts a value: dtype, device, rank of tensors."""
    if not isinstance(value, Tensor):
        return None  # the same number at each leaf
    return value.dtype, value.device, not value.ndim, divisor and bool(value.all())


def _stand_in(value: object, divisor: bool = False) -> object:
    """Return one element with the dtype and device of a tensor; zero if a divisor has a zero."""
    if not isinstance(value, Tensor):
        return value
    one = torch.ones((1,) if value.ndim else (), dtype=value.dtype, device=value.device)
    # Not `logical_and_`, which does not promote a bool beside torch.uint16.
    return one.mul_(value.all().to(value.dtype)) if divisor else one


def _enlarges(entries: Entries, leaf: Tensor, operand: Tensor) -> ShapeMismatch:
    name = format_key(finder(entries, leaf)())
    return cannot_broadcast(operand.shape, name, leaf.shape, "Use the form without `_`.")


def _cannot_write(entries: Entries, leaf: Tensor, reason: str) -> InvalidValue:
    name = format_key(finder(entries, leaf)())
    return InvalidValue(f"entry {name} of {leaf.dtype} cannot be written in place: {reason}")
