"""Pointwise operations on containers: the rules and checks of the second operand.

Each generated method of `_ops.math.pointwise` is one call of a function in this module. The second
operand is

- a number: for every leaf;
- a tensor: its dimensions are the *first* batch dimensions, so its shape is padded on the right
  with ones to the rank of each leaf; it must not enlarge the batch;
- a container: leaves are matched by key. Both must have the same keys and the same batch size, or
  one of them the batch size ().

Non-tensor entries are passed through. An in-place form checks all leaves before it writes the
first, so an operand that does not fit does not change the container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core._batch.shapes import check_lines_up
from kd_core._errors import DeviceMismatch, KdError, ShapeMismatch, wrong_type
from kd_core._leaves.foreach import (
    CONSTANT_FROM,
    PLAIN,
    Kernel,
    are_mixed,
    as_it_was,
    exact_constant,
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
)
from kd_core._leaves.in_place import check_in_place
from kd_core._leaves.loops import all_plain, few_leaves
from kd_core._leaves.nested import is_ragged
from kd_core._ops.math.alignment import (
    beside_members,
    check_members_keep_batch,
    lift_scalars,
    lower_scalars,
)
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer, leaves_of, name_in

if TYPE_CHECKING:
    from kd_core._nodes.entry import Entry
    from kd_core._types import Batch

W = TypeVar("W", bound=AbstractContainer)
Operand: TypeAlias = "AbstractContainer | Tensor | complex"
"""A number, a tensor that broadcasts over the batch dimensions, or a container."""

CastFilter: TypeAlias = Callable[[tuple[str, ...], Tensor], bool]
"""A function of the path and the tensor of a leaf that says whether the leaf is cast."""

# A tuple, because the guard of dynamo on a class in a set fails at once.
_NUMBERS: Final = (int, float, bool, complex)
_OPERANDS: Final = (AbstractContainer, Tensor, int, float, complex)
_LeafOp: TypeAlias = Callable[..., Tensor]


def is_operand(value: object) -> TypeGuard[Operand]:
    """Return whether a pointwise operation takes this value."""
    return isinstance(value, _OPERANDS) or _is_array(value)


def unary(td: W, fn: _LeafOp, kernel: Kernel | None = None) -> W:
    """Apply a function of one tensor to every leaf."""
    if kernel is None or is_dynamo_compiling() or few_leaves(td._entries):
        return td._map_each(fn)
    leaves: list[Tensor] = []
    td._collect(leaves)
    return td._rebuild(iter(run(leaves, fn, kernel)))


def unary_(td: W, fn: _LeafOp, kernel: Kernel | None = None, refuse_overlap: bool = True) -> W:
    """Apply a function that writes into the storage of each leaf; see `check_in_place`."""
    leaves = leaves_of(td)
    alike = check_in_place(td._entries, leaves, fn, refuse_overlap=refuse_overlap)
    run_(leaves, fn, kernel, alike)
    return td


def binary(
    td: W, other: object, fn: _LeafOp, kernel: Kernel | None = None, exact: Kernel | None = None
) -> W:
    """Apply a function of two to every leaf and the operand.

    Args:
        td: the first operand.
        other: the second operand.
        fn: the function of one leaf and the operand for it.
        kernel: the foreach function for all leaves, if there is one.
        exact: the same for a 0-dim tensor; given if it can replace a number with equal results.
    """
    if other.__class__ in _NUMBERS:
        if is_dynamo_compiling():  # a loop adds the fewest guards
            return td._map_each(lambda leaf: fn(leaf, other))
        leaves: list[Tensor] = []
        td._collect(leaves)
        return td._rebuild(iter(_run_number(leaves, other, fn, kernel, exact)))
    if isinstance(other, AbstractContainer):
        try:
            return _zip(td, other, fn, kernel)
        except RuntimeError as error:
            _explain_pairs(td, other, error)
            raise
    operand = as_operand(other)
    leaves = leaves_of(td)
    if isinstance(operand, Tensor):
        if operand.ndim == 0 and _keeps_batch(td):
            return td._rebuild(iter(run_with(leaves, operand, fn, None)))
        beside = padded(td, operand, leaves)
        return _combine_pairs(td, operand, leaves, beside, fn, kernel)
    return td._rebuild(iter(_run_number(leaves, operand, fn, kernel, exact)))


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
        td._collect_pair(cast("Entry", other), leaves, theirs, ())
        check_batches(td._desc.batch, other._desc.batch)
    else:
        td._collect(leaves)
        operand = as_operand(other)
        if isinstance(operand, Tensor):
            operand = as_it_was(operand, leaves)
        if not isinstance(operand, Tensor) or (not operand.ndim and _keeps_batch(td)):
            return _write_number(td, leaves, operand, fn, kernel, exact, refuse_overlap)
        theirs = padded(td, operand, leaves)
    if not _keeps_batch(td):
        lift_scalars(td, leaves, [other], [theirs])
    alike = check_in_place(td._entries, leaves, fn, theirs)
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
    alike = check_in_place(td._entries, leaves, fn, column, refuse_overlap=refuse_overlap)
    constant = None if exact is None else exact_constant(leaves, number, alike)
    if constant is None:
        run_with_(leaves, number, fn, kernel, alike)
    elif len(leaves) < CONSTANT_FROM or exact is None or (not alike and are_mixed(leaves)):
        run_with_(leaves, constant, fn, None, alike)
    else:
        exact(leaves, constant)
    return td


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


def blend(td: W, fn: _LeafOp, first: object, second: object, kernel: Kernel | None = None) -> W:
    """Apply a function of three to every leaf and two operands.

    Args:
        td: the container.
        fn: the function of one leaf and the operands for it.
        first: the first operand; `None` is passed on.
        second: the second operand.
        kernel: the foreach function for two lists and a number.
    """
    if is_plain(first) and is_plain(second):
        return td._map_each(lambda leaf: fn(leaf, first, second))
    leaves, columns = _columns(td, first, second)
    if not _keeps_batch(td):
        lifted = lift_scalars(td, leaves, [first, second], columns)
        results = lower_scalars(_run_columns(leaves, columns, fn, kernel), lifted)
        return _of_members(td, results)
    results = _run_columns(leaves, columns, fn, kernel)
    ndim, batch = td._desc.ndim, td._desc.batch
    for leaf, result in zip(leaves, results, strict=True):
        if tuple(result.shape[:ndim]) != batch:
            raise _leaves_batch(td, leaf, result)
    return _of_pairs(td, first, results)


def blend_(td: W, fn: _LeafOp, first: object, second: object, kernel: Kernel | None = None) -> W:
    """Apply a function of three that writes into the storage of each leaf; see `blend`."""
    operands = [
        as_it_was(each, leaves_of(td)) if isinstance(each, Tensor) else each
        for each in (first, second)
    ]
    leaves, columns = _columns(td, *operands)
    if not _keeps_batch(td):
        lift_scalars(td, leaves, operands, columns)
    check_in_place(td._entries, leaves, fn, *columns)
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
    return td


def is_plain(operand: object) -> bool:
    """Return whether an operand is a number or `None`."""
    return operand is None or operand.__class__ in _NUMBERS


def _columns(td: AbstractContainer, *operands: object) -> tuple[list[Tensor], list[list[object]]]:
    """Return the leaves, and for each operand its values, one for each leaf."""
    leaves: list[Tensor] = []
    td._collect(leaves)
    columns: list[list[object]] = []
    for operand in operands:
        column: list[Tensor] = []
        if isinstance(operand, AbstractContainer):
            td._collect_pair(cast("Entry", operand), [], column, ())
            check_batches(td._desc.batch, operand._desc.batch)
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
        return list(kernel(leaves, ends, columns[1][0]))  # type: ignore[call-overload, no-any-return]  # gives the leaves
    return list(map(fn, leaves, *columns))


def _ends(leaves: list[Tensor], columns: list[list[object]]) -> list[Tensor] | None:
    """Return the first operands where a kernel takes them beside a number, else `None`."""
    first, second = columns
    if leaves and isinstance(second[0], (float, int)):
        ends = [each for each in first if isinstance(each, Tensor)]
        if len(ends) == len(leaves) and use_foreach(leaves) and use_foreach(ends):
            return ends
    return None


def cast_leaves(td: W, dtype: torch.dtype, cast_filter: CastFilter | None = None) -> W:
    """Cast every leaf; the container itself is returned where all have the dtype.

    Args:
        td: the container.
        dtype: the dtype.
        cast_filter: called with the path and the tensor of each leaf; says whether it is cast.
    """
    if cast_filter is not None:
        return _cast_some(td, dtype, cast_filter, ())
    leaves = leaves_of(td)
    for leaf in leaves:
        if leaf.dtype is not dtype:
            return td._rebuild(iter([leaf.to(dtype=dtype) for leaf in leaves]))
    return td


def _cast_some(td: W, dtype: torch.dtype, cast_filter: CastFilter, path: tuple[str, ...]) -> W:
    """Cast the leaves that a filter chooses."""
    if isinstance(td, Composite):
        return td._by_member(lambda member: _cast_some(member, dtype, cast_filter, path))
    entries: dict[str, Entry] = {}
    for key, value in td._entries.items():
        if isinstance(value, AbstractContainer):
            entries[key] = cast("Entry", _cast_some(value, dtype, cast_filter, (*path, key)))
        elif isinstance(value, Tensor) and cast_filter((*path, key), value):
            entries[key] = value.to(dtype=dtype)
        else:
            entries[key] = value
    return td._like(entries, td._desc.unlocked())


def _keeps_batch(td: AbstractContainer) -> bool:
    """Return whether the shapes of collected leaves start with the batch size."""
    if not td._nested:  # only tensors: "math" in the benchmarks
        return True
    if not td._owns_leaves:
        return False
    return all_plain(td._entries) or all(
        _keeps_batch(node) for node in td._below() if isinstance(node, AbstractContainer)
    )


def padded(td: AbstractContainer, operand: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return a tensor operand for each collected leaf; members receive their rows."""
    batch = td._desc.batch
    if not operand.ndim:
        return [operand] * len(leaves)
    if _keeps_batch(td):
        return pad_to_leaves(operand, leaves, batch)
    check_lines_up(tuple(operand.shape), batch, "a tensor")
    return beside_members(td, operand)


def pad_to_leaves(operand: Tensor, leaves: Iterable[Tensor], batch: Batch) -> list[Tensor]:
    """Return a tensor over the first batch dimensions, made broadcastable to each leaf.

    Raises:
        ShapeMismatch: if its shape does not fit, or would enlarge the batch.
    """
    shape = tuple(operand.shape)
    check_lines_up(shape, batch, "a tensor")
    ndim = operand.ndim
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        extra = leaf.ndim - ndim
        if extra not in made:
            made[extra] = operand.reshape(*shape, *(1,) * extra)
    return [made[leaf.ndim - ndim] for leaf in leaves]


def _explain_pairs(td: AbstractContainer, other: AbstractContainer, error: RuntimeError) -> None:
    """Raise the error that names the entry whose two leaves cannot be combined."""
    if isinstance(error, KdError) or is_compiling():
        return
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    td._collect_pair(cast("Entry", other), mine, theirs, ())
    for leaf, value in zip(mine, theirs, strict=True):
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


def _zip(td: W, other: AbstractContainer, fn: _LeafOp, kernel: Kernel | None) -> W:
    desc, second = td._desc, other._desc
    # With one batch dimension, broadcasting cannot change a batch that both containers have.
    stays = desc.ndim < 2 and (desc is second or desc.batch == second.batch)
    loops = kernel is None or is_dynamo_compiling()
    if stays and (_keeps_batch(td) if loops else few_leaves(td._entries)):
        return td._zip_each(other, fn)
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    td._collect_pair(cast("Entry", other), mine, theirs, ())
    if stays and desc.ndim:
        return _of_pairs(td, other, run_pairs(mine, theirs, fn, kernel))
    check_batches(desc.batch, second.batch)
    if not _keeps_batch(td):
        return _combine_pairs(td, other, mine, theirs, fn, kernel)
    results = run_pairs(mine, theirs, fn, kernel)
    for leaf, result in zip(mine, results, strict=True):
        if tuple(result.shape[: desc.ndim]) != desc.batch:
            raise _leaves_batch(td, leaf, result)
    return _of_pairs(td, other, results)


def _of_pairs(td: W, other: object, results: list[Tensor]) -> W:
    """Return the results for pairs of leaves as a container; they are ragged where `other` is."""
    mixed = isinstance(other, AbstractContainer) and other._nested and _keeps_batch(td)
    if mixed and not PLAIN.issuperset(map(type, results)) and any(map(is_ragged, results)):
        found = iter(results)
        return td._zip_each(cast("Entry", other), lambda leaf, beside: next(found))
    return td._rebuild(iter(results))


def _combine_pairs(
    td: W,
    operand: object,
    mine: list[Tensor],
    theirs: list[Tensor],
    fn: _LeafOp,
    kernel: Kernel | None,
) -> W:
    """Apply a function of two to each leaf and its operand, for members as for their stack."""
    if _keeps_batch(td):
        return td._rebuild(iter(run_pairs(mine, theirs, fn, kernel)))
    lifted = lift_scalars(td, mine, [operand], [theirs])
    return _of_members(td, lower_scalars(list(run_pairs(mine, theirs, fn, kernel)), lifted))


def _of_members(td: W, results: list[Tensor]) -> W:
    new = td._rebuild(iter(results))
    check_members_keep_batch(new)
    return new


def _leaves_batch(td: AbstractContainer, leaf: Tensor, result: Tensor) -> ShapeMismatch:
    return ShapeMismatch(
        f"the result for {name_in(td, leaf)} must have a shape that starts with batch_size "
        f"{td._desc.batch}, got {tuple(result.shape)}. Expand the first container, or exchange the "
        "operands."
    )


def check_batches(mine: Batch, theirs: Batch) -> None:
    """Refuse two containers of different batch sizes, unless one of them is ()."""
    if mine != theirs and mine and theirs:
        raise ShapeMismatch(
            f"batch sizes must be equal, or one of them (), got {mine} and {theirs}. Use `expand` "
            "or `reshape` first."
        )


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "dtype")


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
    remedy = "Wrap a mapping with `TensorDict` first."
    raise wrong_type("the other operand", "a number, a tensor or a container", value, remedy)
