"""What an index of the batch means: a function from a leaf to the new leaf, and the new size.

An index is resolved once for the batch size. A mask is converted to row numbers once, not for each
leaf. The functions that take rows of leaves by a mask or by numbers stand here, too.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core._batch.names import has_names, resized, without_names
from kd_core._batch.shapes import (
    check_ellipsis,
    index_int,
    index_simple,
    index_slice,
    too_many_indices,
)
from kd_core._errors import InvalidArgument, OutOfRange, a_type
from kd_core._nodes.entry import is_node
from kd_core._ops.shape.rebatching import locked_as_rows
from kd_core._protocol.composite import takes
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._batch.shapes import Simple
    from kd_core._types import Batch, BatchFn, IndexItem, LeafFn

    Resolved: TypeAlias = tuple[LeafFn, Batch]
    W = TypeVar("W", bound=AbstractContainer)


def for_nested(index: object, batch: Batch) -> object:
    """Return an index that is the same for a nested stack, which may have more batch dimensions."""
    items = index if isinstance(index, tuple) else (index,)
    return plain_index(index, batch) if any(item is Ellipsis for item in items) else index


def goes_beyond(index: object, ndim: int) -> bool:
    """Return whether an index of a tensor says something of dimensions behind the first `ndim`."""
    if not isinstance(index, tuple):
        return False
    taken = 0
    for item in index:
        if item is Ellipsis:
            return True
        is_mask = isinstance(item, Tensor) and item.dtype is torch.bool
        taken += 0 if item is None else item.ndim if is_mask else 1
    return taken > ndim


def _reading(index: int | slice | tuple[Simple, ...]) -> LeafFn:
    # An `itemgetter` is faster than a function, but dynamo cannot trace it.
    return (lambda leaf: leaf[index]) if is_dynamo_compiling() else itemgetter(index)


def resolve(index: object, batch: Batch) -> Resolved:
    """Return an index as a function of a leaf, and the new batch size."""
    ndim = len(batch)
    if index.__class__ is slice:
        return _reading(index), index_slice(batch, index)
    if index.__class__ is tuple:
        if len(index) == 2 and index[0] is Ellipsis and index[1] is None:
            return lambda leaf: leaf.unsqueeze(ndim), (*batch, 1)
        return _resolve_items(index, batch)
    if isinstance(index, int) and not isinstance(index, bool):
        return lambda leaf: leaf[index], index_int(batch, index)
    if isinstance(index, Tensor):
        if index.dtype is torch.bool:
            return rows_where(index, batch)
        if batch and index.dtype is torch.int64:
            rows = index.shape
            lead = (resized(batch[0], rows[0]),) if len(rows) == 1 else tuple(rows)
            return lambda leaf: leaf[index], (*lead, *batch[1:])
    return _resolve_items(index if isinstance(index, tuple) else (index,), batch)


def _resolve_items(index: tuple[object, ...], batch: Batch) -> Resolved:
    simple = index_simple(batch, index)
    if simple is not None:
        where, shape = simple
        return _reading(where), shape
    items = plain_index(index, batch)
    try:
        shape = shape_at(items, batch)
    except IndexError as error:
        raise beyond(batch, error) from None
    return lambda leaf: leaf[items], _with_names_of(batch, items, shape)


def shape_at(items: tuple[IndexItem, ...], batch: Batch) -> Batch:
    """Return the shape of the rows at an index.

    Raises:
        IndexError: as torch raises it. Numbers on a GPU are not read: it would have to be waited
            for.
    """
    shaped = tuple(_without_numbers(item) if isinstance(item, Tensor) else item for item in items)
    return tuple(torch.empty((), device="cpu").expand(batch)[shaped].shape)


def _without_numbers(rows: Tensor) -> Tensor:
    """Return what takes as many rows on the CPU; the elements of a mask must be read for it."""
    if rows.is_cpu:
        return rows
    if rows.dtype in (torch.bool, torch.uint8):
        return rows.cpu()
    return torch.zeros((), dtype=rows.dtype, device="cpu").expand(rows.shape)


def _with_names_of(batch: Batch, items: tuple[IndexItem, ...], shape: Batch) -> Batch:
    """Return the shape of `td[items]` with the names of the dimensions that it keeps.

    A slice keeps its dimension, and so does a vector of rows. Several vectors make one dimension.
    """
    if not has_names(batch):
        return shape
    kept: list[int] = []  # the size of each dimension of the result, with its name
    rows: list[tuple[int, int]] = []  # where a tensor stands, and the size that it replaces
    dim = 0
    for item in items:
        if item is None:
            kept.append(1)
            continue
        if isinstance(item, slice):
            kept.append(batch[dim])
        elif isinstance(item, Tensor) and (item.ndim or item.dtype is torch.bool):
            rows.append((len(kept), batch[dim] if item.ndim == 1 else 1))
        dim += item.ndim if isinstance(item, Tensor) and item.dtype is torch.bool else 1
    kept += batch[dim:]
    if rows:
        places = {place for place, _ in rows}
        at = places.pop() if len(places) == 1 else 0  # torch puts rows that are apart in front
        count = len(shape) - len(kept)
        kept[at:at] = [rows[0][1]] if len(rows) == count == 1 else [1] * count
    return tuple(map(resized, kept, shape))


def beyond(batch: Batch, error: IndexError) -> IndexError:
    """Build the error for an index that is out of range for torch."""
    return OutOfRange(f"an index is out of range for batch_size {batch}: {error}.")


def leading(old: Batch, new: Batch) -> BatchFn:
    """Return a function that replaces the leading dimensions of a batch."""
    ndim = len(old)
    return lambda batch: new + batch[ndim:]


def plain_index(index: object, batch: Batch) -> tuple[IndexItem, ...]:
    """Return an index as a tuple without ellipsis; lists, arrays and booleans become tensors.

    Raises:
        OutOfRange: if it has more items than there are batch dimensions.
    """
    items = index if isinstance(index, tuple) else (index,)
    check_ellipsis(items)
    used = 0
    converted: list[IndexItem] = []
    for item in items:
        if item is None or item is Ellipsis or _is_position(item):
            used += item is not None and item is not Ellipsis
        else:
            rows = _index_tensor(item)
            used += rows.ndim if rows.dtype is torch.bool else 1
            item = rows
        converted.append(item)
    if used > len(batch):
        raise too_many_indices(items, batch)
    for at, item in enumerate(converted):
        if item is Ellipsis:
            converted[at : at + 1] = [slice(None)] * (len(batch) - used)
            break
    return tuple(converted)


def _is_position(item: object) -> bool:
    """Return whether an item of an index is one row or a slice; a bool is a mask."""
    return isinstance(item, (int, slice)) and not isinstance(item, bool)


def _index_tensor(item: object) -> Tensor:
    if is_node(item):  # which torch may take for an empty list
        raise _no_index(item)
    try:
        tensor = torch.as_tensor(list(item) if isinstance(item, range) else item)
    except (TypeError, ValueError, RuntimeError):
        raise _no_index(item) from None
    if tensor.dtype in (torch.int64, torch.int32, torch.bool):
        return tensor
    if tensor.dtype is torch.uint8:  # a mask, as in torch
        return tensor.bool()
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    if not isinstance(item, Tensor) and (is_integer or not tensor.numel()):
        return tensor.long()  # of numpy, or an empty list
    if not isinstance(item, Tensor) and not tensor.ndim:
        raise _no_index(item)
    raise OutOfRange(
        "a tensor that indexes rows must be of torch.int64, torch.int32 or torch.bool, got "
        f"{tensor.dtype}. Cast it with `index.long()`, or compare it to make a mask."
    )


def _no_index(item: object) -> InvalidArgument:
    remedy = ""
    if isinstance(item, str):
        remedy = f" Read the entry first for rows of it, as in `td[{item!r}][0]`."
    elif isinstance(item, list) and item and isinstance(item[0], str):
        remedy = f" Use `select({', '.join(map(repr, item))})` for several keys."
    elif is_node(item):
        remedy = (
            " A loop over a container gives its rows: loop over `keys()` for the keys, and pass "
            "`collate_fn=lambda batch: batch` to a `DataLoader` of `batch_size=None`."
        )
    return InvalidArgument(
        f"an index must be a key (a string or a tuple of strings), an integer, a slice, a mask, a "
        f"tensor, `None` or `...`, got {a_type(item)}.{remedy}"
    )


def gives_views(index: object) -> bool:
    if index.__class__ is int or index.__class__ is slice:
        return True
    items = index if isinstance(index, tuple) else (index,)
    return all(item is None or item is Ellipsis or _is_position(item) for item in items)


def check_mask(mask: object) -> Tensor:
    """Check that a value is a mask, and return it.

    Raises:
        InvalidArgument: if it is not a tensor of booleans.
    """
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        return mask
    kind = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else f"`{type(mask).__name__}`"
    raise InvalidArgument(f"a mask must be a tensor of torch.bool, got {kind}.")


def rows_where(mask: Tensor, batch: Batch) -> tuple[LeafFn, Batch]:
    """Return a function that selects the rows of a leaf where a mask is true, and the batch size.

    The row numbers are computed once, not for each leaf.

    Args:
        mask: the mask.
        batch: the batch size.

    Raises:
        OutOfRange: if the mask does not have the first dimensions of the batch: an `IndexError`, as
            in torch.
    """
    ndim = mask.ndim
    if mask.shape != without_names(batch[:ndim]):  # to dynamo no symbol is equal to a named size
        raise OutOfRange(
            f"the shape of a mask must be the first dimensions of batch_size {batch}, got "
            f"{tuple(mask.shape)}."
        )
    if not ndim:  # as in torch, a new dimension in front
        return lambda leaf: leaf[beside(mask, leaf)], (int(mask), *batch)
    rows = (mask if ndim == 1 else mask.flatten()).nonzero().view(-1)
    count = rows.shape[0]
    if ndim == 1:
        return lambda leaf: take_rows(leaf, rows), (resized(batch[0], count), *batch[1:])
    return lambda leaf: take_rows(leaf.flatten(0, ndim - 1), rows), (count, *batch[ndim:])


def take_rows(leaf: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """Copy the rows of the given numbers along a dimension."""
    there = rows if rows.is_cpu and leaf.is_cpu else beside(rows, leaf)
    try:
        return leaf.index_select(dim, there)
    except IndexError:
        raise OutOfRange(
            f"row numbers must be non-negative and less than {leaf.shape[dim]}, got "
            f"{rows.min().item()} to {rows.max().item()}."
        ) from None
    except NotImplementedError:  # torch.uint16, torch.uint32, torch.uint64
        return leaf.movedim(dim, 0)[there.view(-1)].movedim(0, dim)


def beside(tensor: Tensor, leaf: Tensor) -> Tensor:
    """Return a tensor moved to the device of a leaf."""
    return tensor if tensor.device == leaf.device else tensor.to(leaf.device)


def behind(tensor: Tensor, leaf: Tensor) -> Tensor:
    """Return a tensor with dimensions of size 1 appended, to broadcast to a leaf."""
    sizes = (*tensor.shape, *[1] * (leaf.ndim - tensor.ndim))
    there = beside(tensor, leaf)
    return there.reshape(*sizes) if sizes else there  # one argument for all sizes is slower


def _takes_all(index: object) -> bool:
    """Return whether an index is `:`, `...`, or a tuple of these."""
    if index.__class__ is tuple:
        return all(map(_takes_all, cast("tuple[object, ...]", index)))
    return index is ... or (index.__class__ is slice and index == slice(None))


def views_at(container: W, index: object) -> W:
    """Return the rows at an index; see `locked_as_rows` for those of a locked container."""
    rows = rows_at(container, index)
    if container._kd_desc.frozen and rows is not container and gives_views(index):
        return locked_as_rows(container, rows)
    return rows


def rows_at(container: W, index: object) -> W:
    """Return the rows at an index of any kind: the container itself, if it is `:` or `...`."""
    desc = container._kd_desc
    if _takes_all(index) and container._kd_owns_leaves and container._kd_tensor_class is None:
        resolve(index, desc.batch)  # it may have too many items
        return container
    fn, after = resolve(index, desc.batch)
    ndim = desc.ndim
    if container._kd_nested and not is_dynamo_compiling():
        takes(fn, index, desc.batch)
    try:
        return container._kd_map_each(
            fn, lambda shape: after + shape[ndim:], (desc, desc.with_batch(after))
        )
    except IndexError as error:
        raise beyond(desc.batch, error) from None
