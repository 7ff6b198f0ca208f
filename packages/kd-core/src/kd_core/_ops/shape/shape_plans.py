"""What the arguments of a shape method mean for one batch size: plans, cached.

The function of a leaf makes the fastest torch call ("shape" in the benchmarks): it passes sizes as
separate arguments, -1 for a single trailing dimension, and `x[None]` for `x.unsqueeze(0)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.names import resized, without_names
from kd_core._batch.plans import Grown, Plan, Viewed, cached, kept, plan
from kd_core._batch.shapes import (
    as_int,
    expanded,
    fitted,
    infer_sizes,
    numbered,
    numel,
    one_per_dim,
    sizes_of,
    wrap_dim,
    wrap_dims,
)
from kd_core._errors import InvalidValue, ShapeMismatch

if TYPE_CHECKING:
    from kd_core._types import Batch, Dims, Sizes


def distinct_dims(dims: Dims, batch: Batch) -> Batch:
    """Return one dimension, or several, by number or name, counted from the front."""
    return wrap_dims(sizes_of([cast("int", numbered(dims, batch))]), len(batch))


def _resizing(batch: Batch, new: Batch, name: str) -> Plan:
    """Return the plan of a `view` or `reshape`; it adds no guard on a traced size."""
    ndim = len(batch)

    def resize_leaf(leaf: Tensor) -> Tensor:
        # Passing the shape as one argument is slower, in compiled code too.
        call: Callable[..., Tensor] = getattr(leaf, name)
        sizes = leaf.shape[ndim:]
        return call(*new, *sizes) if new else call(sizes)

    return resize_leaf, new, lambda shape: new + shape[ndim:]  # as `plan`, inlined for dynamo


def _fast_resizing(batch: Batch, new: Batch, name: str) -> Plan:
    """Return the same with a faster function of a leaf where sizes are numbers."""
    general = _resizing(batch, new, name)
    # -1 is ambiguous without elements, and comparing a traced size with 0 would add a guard.
    if is_compiling() or not numel(batch):
        return general
    ndim = len(batch)
    call: Callable[..., Tensor] = getattr(Tensor, name)
    single = (*new, -1)

    def resize_leaf(leaf: Tensor) -> Tensor:
        if leaf.ndim == ndim + 1:
            try:
                return call(leaf, *single)
            except RuntimeError:
                pass  # -1 is ambiguous too where vmap maps over no rows
        return call(leaf, (*new, *leaf.shape[ndim:]))

    if name == "view":
        return resize_leaf, new, Viewed(new, ndim)
    return resize_leaf, *general[1:]


@cached
def resize_plan(batch: Batch, shape: Sizes, name: str) -> Plan:
    new = fitted(batch, shape)
    if not is_compiling() and new == batch:  # comparing traced sizes would add a guard
        return kept(batch)
    return _fast_resizing(batch, new, name)


@cached
def flatten_plan(batch: Batch, start_dim: int | str, end_dim: int | str) -> Plan:
    if not batch:
        return unsqueeze_plan(batch, 0)
    start, end = wrap_dim(start_dim, batch), wrap_dim(end_dim, batch)
    if end < start:
        raise InvalidValue(
            f"`start_dim` of `flatten` must not be after `end_dim`, got {start_dim} and {end_dim}. "
            "Exchange them."
        )
    new = (*batch[:start], numel(batch[start : end + 1]), *batch[end + 1 :])
    return plan(batch, lambda leaf: leaf.flatten(start, end), new)


@cached
def unflatten_plan(batch: Batch, dim: int | str, sizes: Sequence[int]) -> Plan:
    at = wrap_dim(dim, batch)
    what = f"dimension {at} of batch_size {batch}"
    split = infer_sizes(sizes_of([sizes]), batch[at], what)
    if split:  # the last one has the name
        split = (*split[:-1], resized(batch[at], split[-1]))
    new = (*batch[:at], *split, *batch[at + 1 :])
    return _fast_resizing(batch, new, "view")


@cached
def squeeze_plan(batch: Batch, dim: Dims | None) -> Plan:
    ndim = len(batch)
    dims = range(ndim) if dim is None else distinct_dims(dim, batch)
    dropped = tuple(i for i in dims if batch[i] == 1)
    if not dropped:
        return kept(batch)
    new = tuple(size for i, size in enumerate(batch) if i not in dropped)
    if dropped == (0,):
        return plan(batch, lambda leaf: leaf[0], new)
    return plan(batch, lambda leaf: leaf.squeeze(dropped), new)


@cached
def unsqueeze_plan(batch: Batch, dim: int) -> Plan:
    at = wrap_dim(dim, len(batch) + 1)
    new = (*batch[:at], 1, *batch[at:])
    grown = Grown(new, len(batch))
    if at == 0:
        return lambda leaf: leaf[None], new, grown
    return lambda leaf: leaf.unsqueeze(at), new, grown


@cached
def permute_plan(batch: Batch, dims: tuple[Dims, ...]) -> Plan:
    given = one_per_dim(cast("Sizes", numbered(dims, batch)), batch, "permute")
    order = wrap_dims(given, len(batch))
    if len(order) != len(batch):
        raise InvalidValue(
            f"`permute` expected each of the {len(batch)} batch dimensions once, got {given}. Use "
            "`apply` for trailing dimensions of entries."
        )
    return _permuted(batch, order)


def _permuted(batch: Batch, order: Batch) -> Plan:
    ndim = len(batch)
    if order == (*range(ndim),):
        return kept(batch)
    single = (*order, ndim)

    def permute_leaf(leaf: Tensor) -> Tensor:
        if leaf.ndim == ndim + 1:
            return leaf.permute(*single)
        return leaf.permute((*order, *range(ndim, leaf.ndim)))

    return plan(batch, permute_leaf, tuple(batch[i] for i in order))


@cached
def transpose_plan(batch: Batch, dim0: int | str, dim1: int | str) -> Plan:
    one, two = wrap_dim(dim0, batch), wrap_dim(dim1, batch)
    if one == two:
        return kept(batch)
    new = list(batch)
    new[one], new[two] = batch[two], batch[one]
    return plan(batch, lambda leaf: leaf.transpose(one, two), tuple(new))


@cached
def movedim_plan(batch: Batch, source: Dims, destination: Dims) -> Plan:
    ndim = len(batch)
    sources, targets = distinct_dims(source, batch), distinct_dims(destination, batch)
    if len(sources) != len(targets):
        raise InvalidValue(
            f"`movedim` expected as many destinations as sources, got {source} and {destination}."
        )
    moved = dict(zip(targets, sources, strict=True))
    rest = [i for i in range(ndim) if i not in sources]
    order = tuple(moved[i] if i in moved else rest.pop(0) for i in range(ndim))
    return _permuted(batch, order)


@cached
def expand_plan(batch: Batch, shape: Sizes) -> Plan:
    new = expanded(batch, sizes_of(shape))
    ndim = len(batch)
    lead = len(new) - ndim
    sizes = without_names(new)
    new = (*new[:lead], *map(resized, batch, new[lead:]))
    single = (*sizes, -1)

    def expand_leaf(leaf: Tensor) -> Tensor:
        extra = leaf.ndim - ndim
        return leaf.expand(*single) if extra == 1 else leaf.expand((*sizes, *[-1] * extra))

    return (expand_leaf, new, Grown(new, ndim)) if lead else plan(batch, expand_leaf, new)


@cached
def repeat_plan(batch: Batch, counts: Batch) -> Plan:
    if any(count < 0 for count in counts):
        raise InvalidValue(f"counts must be non-negative, got {counts}.")
    ndim = len(batch)
    lead = len(counts) - ndim
    sizes = zip(counts[lead:], batch, strict=True)
    new = counts[:lead] + tuple(resized(size, count * size) for count, size in sizes)
    return plan(batch, lambda leaf: leaf.repeat((*counts, *[1] * (leaf.ndim - ndim))), new)


def repeat_interleave_plan(
    batch: Batch, repeats: int | Tensor, dim: int | str, output_size: int | None
) -> Plan:
    at = wrap_dim(dim, batch)
    if not isinstance(repeats, Tensor) or not repeats.ndim:
        repeats = as_int(repeats)
    size = _output_size(repeats, batch[at], output_size)
    new = (*batch[:at], resized(batch[at], size), *batch[at + 1 :])
    return plan(batch, lambda leaf: leaf.repeat_interleave(repeats, at, output_size=size), new)


def _output_size(repeats: int | Tensor, size: int, given: int | None) -> int:
    """Return the number of rows after each was repeated; on a GPU a given number is not checked."""
    if given is not None and isinstance(repeats, Tensor) and not repeats.is_cpu:
        return as_int(given)
    rows = _repeated_size(repeats, size)
    if given is not None and as_int(given) != rows:
        raise InvalidValue(f"`output_size` must be the sum of `repeats`, {rows}, got {given}.")
    return rows


def _repeated_size(repeats: int | Tensor, size: int) -> int:
    if not isinstance(repeats, Tensor):
        if repeats < 0:
            raise InvalidValue(f"`repeats` must be non-negative, got {repeats}.")
        return size * repeats
    if repeats.ndim > 1 or (repeats.ndim == 1 and repeats.shape[0] not in (1, size)):
        raise ShapeMismatch(
            f"`repeats` must hold one count for each of the {size} rows, got shape "
            f"{tuple(repeats.shape)}."
        )
    return int(repeats.expand(size).sum())


@cached
def roll_plan(batch: Batch, shifts: int | Sequence[int], dims: Dims) -> Plan:
    by, given = sizes_of([shifts]), sizes_of([cast("int", numbered(dims, batch))])
    along = tuple(wrap_dim(dim, batch) for dim in given)  # of one given twice torch adds the shifts
    if len(by) != len(along):
        raise InvalidValue(f"`roll` expected one shift for each dimension, got {by} and {along}.")
    return plan(batch, lambda leaf: leaf.roll(by, along), batch)


@cached
def flip_plan(batch: Batch, dims: tuple[Dims, ...]) -> Plan:
    given = cast("Sizes", numbered(dims, batch))
    along = wrap_dims(one_per_dim(given, batch, "flip"), len(batch))
    return plan(batch, lambda leaf: leaf.flip(along), batch)
