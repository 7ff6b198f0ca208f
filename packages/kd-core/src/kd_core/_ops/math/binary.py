"""Functions of one leaf, or of a leaf and an operand, run on all leaves of a container.

Each generated method of `_ops.math.pointwise` is one call of a function in this module.
`_ops.math.operands` has the rules for operands. Where torch takes no number, it becomes a 0-dim
tensor beside each leaf. Non-tensor entries are passed through. An in-place
form checks all leaves before it writes the first, so an operand that does not fit does not change
the container.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core._errors import DeviceMismatch, InvalidValue, KdError, ShapeMismatch
from kd_core._leaves.foreach import (
    CONSTANT_FROM,
    Kernel,
    are_mixed,
    as_it_was,
    exact_constant,
    run,
    run_,
    run_exact,
    run_pairs,
    run_pairs_,
    run_with,
    run_with_,
    wrote,
)
from kd_core._leaves.in_place import check_in_place
from kd_core._leaves.loops import few_leaves
from kd_core._leaves.shapeless import explain_shapeless
from kd_core._nodes import registry
from kd_core._nodes.entry import is_data, tensor_of
from kd_core._ops.math.operands import (
    as_operand,
    check_batches,
    has_rows,
    is_of_rows,
    keeps_batch,
    leaves_batch,
    lift_scalars,
    lower_scalars,
    of_members,
    of_pairs,
    padded,
    widened,
)
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import (
    AbstractContainer,
    leaves_of,
    lock,
    locked_as,
    name_in,
    note_entry,
    unlock,
)

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes.entry import Entry

    W = TypeVar("W", bound=AbstractContainer)

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
    return lock(result) if td._kd_desc.frozen else result


def unary_(td: W, fn: _LeafOp, kernel: Kernel | None = None, refuse_overlap: bool = True) -> W:
    """Apply a function that writes into the storage of each leaf; see `check_in_place`."""
    leaves = leaves_of(td)
    alike = check_in_place(td._kd_entries, leaves, fn, refuse_overlap=refuse_overlap)
    run_(leaves, fn, kernel, alike)
    return td


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
        kind = other.__class__
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
    return lock(result) if td._kd_desc.frozen and not is_of_rows(other) else result


def compared(td: W, other: object, fn: _LeafOp) -> W:
    """Compare every leaf with the operand, which may be a mapping, and data that is not a tensor.

    Data is equal or not, one answer for each row; another comparison leaves it as it is.
    """
    if isinstance(other, Mapping) and not isinstance(other, AbstractContainer):
        other = registry.nest_mapping(
            cast("Mapping[str, object]", other), td._kd_desc.unlocked(), ()
        )
    result = binary(td, other, fn)
    if td._kd_desc.frozen:
        unlock(result)  # answers are not values of the container
    if fn in _EQUALITIES and td._kd_nested and isinstance(other, AbstractContainer):
        _compare_data(td, other, result, fn is torch.eq)
    return result


_EQUALITIES: Final = (torch.eq, torch.ne)


def _compare_data(
    td: AbstractContainer, other: AbstractContainer, result: AbstractContainer, equal: bool
) -> None:
    """Replace the data in a result by whether it is equal, or not equal."""
    if isinstance(result, Composite) and isinstance(td, Composite):
        rows = td._rows_of_operand(other)
        for member, row, found in zip(td._members, rows, result._members, strict=True):
            _compare_data(member, cast("AbstractContainer", row), found, equal)
        return
    theirs = other._kd_entries
    for key, entry in list(td._kd_entries.items()):
        if isinstance(entry, AbstractContainer):
            below = cast("AbstractContainer", theirs[key])
            _compare_data(entry, below, cast("AbstractContainer", result._kd_entries[key]), equal)
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
    leaves: list[Tensor] = []
    theirs: list[Tensor] = []
    if isinstance(other, AbstractContainer):
        td._kd_collect_pair(cast("Entry", other), leaves, theirs, ())
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
    return td


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
    return td


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
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    td._kd_collect_pair(cast("Entry", other), mine, theirs, ())
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
    td._kd_collect_pair(cast("Entry", other), mine, theirs, ())
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
    return locked_as(td, td._kd_rebuild(iter(run_pairs(leaves, beside, fn, kernel))))


def binary_of_tensors_(td: W, other: object, fn: _LeafOp, kernel: Kernel | None = None) -> W:
    """Apply a function of two tensors that writes into the storage of each leaf; see `binary_`."""
    operand = _operand(other)
    if isinstance(operand, (AbstractContainer, Tensor)):
        return binary_(td, operand, fn, kernel)
    leaves = leaves_of(td)
    beside = [number_beside(leaf, operand) for leaf in leaves]
    run_pairs_(leaves, beside, fn, kernel, check_in_place(td._kd_entries, leaves, fn, beside))
    return td


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
        return torch.full((), cast("float", number), dtype=dtype, device=leaf.device)
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
            entries[key] = cast("Entry", _cast_some(value, dtype, cast_filter, (*path, key)))
            continue
        leaf = tensor_of(value)
        entries[key] = value
        if leaf is not None and cast_filter((*path, key), leaf):
            made = leaf.to(dtype=dtype)
            entries[key] = made if leaf is value else registry.wrap_tensor(made, td._kd_desc)
    return td._kd_like(entries, td._kd_desc.unlocked())
