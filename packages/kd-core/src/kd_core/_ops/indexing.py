"""The index operator: keys, and the batch dimensions as on a tensor of shape `batch_size`.

Rows are read with the function that `resolve` makes of an index. An indexed write checks all values
before it writes the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias, cast, overload
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._descriptor import describe
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    OutOfRange,
    ShapeMismatch,
    a_type,
    cannot_broadcast,
    shape_text,
    unknown_keys,
)
from kd_core._keys import format_key, is_path, path_of
from kd_core._leaves.foreach import is_eager, is_ragged, is_stand_in, shares_storage
from kd_core._leaves.loops import Selection, chosen_rows, find_entry, is_shapeless, without_shape
from kd_core._leaves.writes import (
    INCOMPLETE,
    Write,
    are_rows_of,
    as_source,
    check_same_data,
    check_write,
    commit,
    copy_pairs,
    put_rows,
    unknown_below,
    without_ones,
    write_all,
)
from kd_core._nodes import (
    is_any_data,
    is_data,
    is_node,
    is_row_data,
    is_unbatched,
    operand_of,
)
from kd_core._ops.access import keys_to_take, narrowed_items, source_items
from kd_core._ops.binary import blended, fitted, keeps_batch
from kd_core._ops.description import locked_as_rows
from kd_core._ops.joining import cat
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    check_has,
    level_at,
    name_in,
    refuse_unbatched,
    remove_entry,
    takes,
    writes_at,
)
from kd_core._shapes import (
    SAME_SHAPE,
    broadcasts_to,
    check_ellipsis,
    check_lines_up,
    has_names,
    index_int,
    index_simple,
    index_slice,
    resized,
    too_many_indices,
    without_names,
)
from kd_core._torch_private import traced_as
from kd_core._validation import as_entry, with_plain_keys

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._leaves.foreach import StandIn
    from kd_core._nodes import AnyKey, Entry, Node, Source
    from kd_core._shapes import Simple
    from kd_core._types import Batch, BatchFn, Index, IndexItem, LeafFn, NestedKey

    Resolved: TypeAlias = tuple[LeafFn, Batch]
    W = TypeVar("W", bound=AbstractContainer)


# What an index of the batch means: a function from a leaf to the new leaf, and the new size.
#
# An index is resolved once for the batch size. A mask is converted to row numbers once, not for
# each leaf. The functions that take rows of leaves by a mask or by numbers stand here, too.


def for_nested(index: object, batch: Batch) -> object:
    """Return an index that is the same for a nested stack, which may have more batch dimensions."""
    items = index if isinstance(index, tuple) else (index,)
    return plain_index(index, batch) if any(item is Ellipsis for item in items) else index


def goes_beyond(index: object, ndim: int) -> bool:
    """Return whether an index of a tensor says something of dimensions behind the first `ndim`."""
    taken = 0
    for item in index if isinstance(index, tuple) else (index,):
        if item is Ellipsis:
            return isinstance(index, tuple)
        if item is None or _is_position(item):
            taken += item is not None
        else:
            rows = _index_tensor(item)
            taken += rows.ndim if rows.dtype is torch.bool else 1
    return taken > ndim


def _reading(index: int | slice | tuple[Simple, ...]) -> LeafFn:
    # An `itemgetter` is faster than a function, but dynamo cannot trace it.
    return (lambda leaf: leaf[index]) if is_dynamo_compiling() else itemgetter(index)


def resolve(index: object, batch: Batch) -> Resolved:
    """Return an index as a function of a leaf, and the new batch size."""
    ndim = len(batch)
    if type(index) is slice:
        return _reading(index), index_slice(batch, index)
    if type(index) is tuple:
        if len(index) == 2 and index[0] is Ellipsis and index[1] is None:
            return lambda leaf: leaf.unsqueeze(ndim), (*batch, 1)
        return _resolve_items(index, batch)
    if isinstance(index, int) and not isinstance(index, bool):
        return lambda leaf: leaf[index], index_int(batch, index)
    if isinstance(index, Tensor):
        rows = operand_of(index)
        if rows.dtype is torch.bool:
            return rows_where(rows, batch)
        if batch and rows.dtype is torch.int64:
            shape = rows.shape
            lead = (resized(batch[0], shape[0]),) if len(shape) == 1 else tuple(shape)
            return lambda leaf: leaf[rows], (*lead, *batch[1:])
    return _resolve_items(index if isinstance(index, tuple) else (index,), batch)


def _resolve_items(index: tuple[object, ...], batch: Batch) -> Resolved:
    simple = index_simple(batch, index)
    if simple is not None:
        where, shape = simple
        return _reading(where), shape
    items = plain_index(tuple(map(operand_of, index)), batch)
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
        named = ", ".join(map(repr, item))
        nested = f", `td[{named}]` for a nested one" if len(item) > 1 else ""
        remedy = f" Use `select({named})` for several keys{nested}."
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
    if type(index) is int or type(index) is slice:
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
        return lambda leaf: _rows_of(leaf, rows), (resized(batch[0], count), *batch[1:])
    return lambda leaf: _rows_of(leaf.flatten(0, ndim - 1), rows), (count, *batch[ndim:])


def _rows_of(leaf: Tensor, rows: Tensor) -> Tensor:
    """Copy the rows of the given non-negative numbers by what is faster on the device."""
    return leaf[beside(rows, leaf)] if leaf.is_cuda else take_rows(leaf, rows)


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
    if type(index) is tuple:
        return all(map(_takes_all, index))
    return index is ... or (type(index) is slice and index == slice(None))


def views_at(container: W, index: object) -> W:
    """Return the rows at an index; see `locked_as_rows` for those of a locked container."""
    rows = rows_at(container, index)
    if container._kd_desc.frozen and rows is not container and gives_views(index):
        return locked_as_rows(container, rows)
    return rows


def rows_at(container: W, index: object) -> W:
    """Return the rows at an index of any kind: the container itself, if it is `:` or `...`."""
    desc = container._kd_desc
    if _takes_all(index) and container._kd_owns_leaves:
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


class Indexing(AbstractContainer):
    """The index operator."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: NestedKey) -> Tensor: ...
    @overload
    def __getitem__(self, index: Index) -> Self: ...
    def __getitem__(self, index: object) -> object:
        """Return the entry at a key, or index the batch dimensions.

        Leaves of `td[i]` and `td[a:b]` are views.

        Raises:
            KeyNotFound: if a key is missing.
            OutOfRange: if an index is out of range.
        """
        value: Entry | None = None
        if type(index) is str:
            try:
                value = self._kd_entries[index]
            except KeyError:
                value = None
        elif type(index) is tuple and index and type(index[0]) is str:
            value = find_entry(self._kd_entries, index)
        elif type(index) is int or type(index) is slice or not is_path(index):
            return self._kd_rows_at(index)
        if type(value) is Tensor:
            return value
        if value is None:  # also for a path of a subclass of `str`
            value = self._kd_read(path_of(index))
        return value._kd_item() if is_node(value) else value

    def __setitem__(self, index: object, value: object) -> None:
        """Store a value at a key, or write values at an index of the batch dimensions.

        The source of an indexed write is a container or mapping, which may have fewer keys, or one
        value for all leaves. It is broadcast. All values are checked before the first is written.
        Entries that only the source has are added: zeros, or `None`, in the other rows.
        One value that all rows share becomes one for each row. `td[0]["a"] = v` does not change
        `td`, because `td[0]` is a new container.

        Raises:
            Locked: if the source has keys that a locked container does not have.
            ShapeMismatch: if a value does not fit.
        """
        if type(index) is str:
            self._kd_put(index, value)
        elif is_path(index):
            self._kd_store(path_of(index), value)
        elif not (isinstance(value, AbstractContainer) and _copied(self, index, value)):
            _write_rows(self, index, value, adds=True)

    def _kd_traced_rows_at(self, index: object) -> Self:
        """Return the rows without what is cached for eager code, which would add guards."""
        if type(index) is not int:
            return rows_at(self, index)
        desc = self._kd_desc
        batch = desc.batch
        known = desc.constants_of(batch)  # methods add no guards
        if known and -known[0] <= index < known[0]:
            row = desc._constant(known[1:], desc.device)
        else:
            row = desc.with_batch(index_int(batch, index))
        return self._kd_map_each(lambda leaf: leaf[index], lambda shape: shape[1:], (desc, row))

    @traced_as(_kd_traced_rows_at)
    def _kd_rows_at(self, index: object) -> Self:
        """Return the rows at an index; in its own method, as closures slow `__getitem__`."""
        desc = self._kd_desc
        batch = desc.batch
        if type(index) is int:
            index_int(batch, index)
            row = desc._row or desc.row()
            made = self._kd_map_each(itemgetter(index), _without_first, (desc, row))
            return locked_as_rows(self, made) if desc.frozen else made
        if type(index) is Tensor and batch and _are_rows(index):
            try:
                return _rows_taken(self, index)
            except (IndexError, RuntimeError):  # one is negative or out of range
                pass
        return views_at(self, index)

    def __delitem__(self, key: str | tuple[str, ...]) -> None:
        remove_entry(self, path_of(key))

    def __iter__(self) -> Iterator[Self]:
        desc = self._kd_desc
        if not desc.ndim:
            raise InvalidArgument(
                "a container must have a batch dimension to be iterated over, got batch_size (). "
                "Iterate over `keys()`, `values()` or `items()`."
            )
        return (self[i] for i in range(desc.batch[0]))

    def __getitems__(self, index: Sequence[int]) -> Self:
        """Return several rows; called by `DataLoader`."""
        return self._kd_rows_at(torch.as_tensor(index, dtype=torch.int64))

    def set_at_(
        self,
        key: str | tuple[str, ...],
        value: object,
        index: Index,
        non_blocking: bool = False,
    ) -> Self:
        """Write rows of one entry in place; allowed on a locked container.

        As `td[key][index] = value`: of a tensor, all dimensions are indexed, of a container its
        own batch dimensions.

        Args:
            key: the key of the entry.
            value: a value that can be broadcast to its rows.
            index: the rows.
            non_blocking: nothing: the write is done when the call returns.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.set_at_("a", 1.0, 0)["a"]
            tensor([1., 0., 0.])
        """
        path = path_of(key)
        beyond = goes_beyond(index, self._kd_desc.ndim)
        if not self._kd_owns_leaves and not beyond:
            resolve(index, self._kd_desc.batch)
        check_has(self, path)
        level = level_at(self, path[:-1])
        writes: list[Write] = []
        entry = level._kd_entries[path[-1]] if beyond or not isinstance(level, Composite) else None
        if isinstance(entry, Tensor):
            rows = _Rows(index, tuple(entry.shape))
        elif isinstance(entry, AbstractContainer) and not isinstance(level, Composite):
            rows = _Rows(index, entry._kd_desc.batch)
        else:
            rows = _Rows(index, self._kd_desc.batch)
        if isinstance(level, Composite):
            if isinstance(entry, Tensor):  # the members index their own dimensions
                entry = entry.clone()
                entry[index] = value  # type: ignore[assignment]  # or it raises
                write_all(writes_at(self, path, entry))
                return self
            rows.direct += level._row_writes(rows.index, {path[-1]: value}, path[:-1])
            rows.commit(writes)
            return self
        assert entry is not None
        if isinstance(entry, AbstractContainer):
            _stage_level(entry, value, path, rows, writes)
        elif isinstance(entry, Tensor):
            writes.append(rows.stage(entry, value, path))
        else:
            rows.stage_data(level, entry, value, path, writes, alike=True)
        rows.commit(writes)
        return self

    def copy_at_(
        self,
        tensordict: AbstractContainer,
        idx: Index,
        non_blocking: bool = False,
        *,
        fast: bool = True,
    ) -> Self:
        """Write the values of a container into rows, in place; return self: `td[idx] = tensordict`.

        Args:
            tensordict: a container, which may have fewer keys; it is broadcast to the rows.
            idx: the rows.
            non_blocking: nothing: rows are copied one after the other.
            fast: nothing: the fast way is taken wherever it gives the same result.

        Raises:
            KeySetMismatch: if the source has keys that this container does not have.
        """
        if not self._kd_desc.ndim and isinstance(tensordict, (AbstractContainer, Mapping)):
            _write_at(self, source_items(tensordict, "copy_at_"), idx)
        elif not _copied(self, idx, tensordict):
            _write_rows(self, idx, tensordict)
        return self

    def update_at_(
        self,
        input_dict_or_td: Source[AnyKey],
        idx: Index,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Iterable[NestedKey] | None = None,
    ) -> Self:
        """Write the values of a source into rows of entries that exist, in place; return self.

        All values are checked before the first is written; allowed on a locked container. Without
        batch dimensions each entry is indexed as it is, as by `set_at_`.

        Args:
            input_dict_or_td: a mapping (its keys may be nested tuples) or a container.
            idx: the rows.
            clone: nothing: values are copied into the rows.
            non_blocking: nothing: rows are copied one after the other.
            keys_to_update: take only these keys of the source, and what is below them.

        Raises:
            KeySetMismatch: if the source has a key that does not exist here.
            ShapeMismatch: if a value cannot be broadcast to its rows.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3])
            >>> td.update_at_({"a": 1.0}, slice(2))["a"]
            tensor([1., 1., 0.])
        """
        items = source_items(input_dict_or_td, "update_at_")
        if keys_to_update is not None:
            items = narrowed_items(items, keys_to_take(keys_to_update))
        if not self._kd_owns_leaves:
            resolve(idx, self._kd_desc.batch)
        _check_known(self, items, ())  # before the index: a call may be wrong in both
        if self._kd_desc.ndim:
            whole = isinstance(input_dict_or_td, AbstractContainer) and keys_to_update is None
            _write_rows(self, idx, input_dict_or_td if whole else items)
        else:
            _write_at(self, items, idx)
        return self


def _write_rows(
    target: AbstractContainer, index: object, source: object, adds: bool = False
) -> None:
    rows = _Rows(index, target._kd_desc.batch)
    writes: list[Write] = []
    _stage_level(target, source, (), rows, writes, adds)
    rows.commit(writes)


def _write_at(td: AbstractContainer, items: Mapping[str, object], index: object) -> None:
    """Write values into entries of a container without batch dimensions, each at an index of it."""
    staged: list[tuple[_Rows, list[Write]]] = []
    _stage_at(td, items, index, (), staged)
    for rows, writes in staged if len(staged) > 1 else ():
        rows.check(writes)
    for rows, writes in staged:
        rows.commit(writes)


def _stage_at(
    level: AbstractContainer,
    items: Mapping[str, object],
    index: object,
    path: tuple[str, ...],
    staged: list[tuple[_Rows, list[Write]]],
) -> None:
    _check_known(level, items, path)
    entries = level._kd_entries
    for key, value in items.items():
        entry, where = entries[key], (*path, key)
        if isinstance(entry, AbstractContainer) and isinstance(value, (AbstractContainer, Mapping)):
            _stage_at(entry, source_items(value, "update_at_"), index, where, staged)
            continue
        rows = _Rows(
            index, tuple(entry.shape) if isinstance(entry, Tensor) else entry._kd_desc.batch
        )
        writes: list[Write] = []
        if isinstance(entry, Tensor):
            writes.append(rows.stage(entry, value, where))
        elif isinstance(entry, AbstractContainer):
            _stage_level(entry, value, where, rows, writes)
        else:
            rows.stage_data(level, entry, value, where, writes)
        staged.append((rows, writes))


def _check_known(
    level: AbstractContainer, items: Mapping[str, object], path: tuple[str, ...]
) -> None:
    entries = level._kd_entries
    unknown = [key for key in items if key not in entries]
    if unknown:
        raise unknown_keys(unknown, entries, f" below {format_key(path)}" if path else "")


def _without_first(batch: Batch) -> Batch:
    return batch[1:]


def _are_rows(index: Tensor) -> bool:
    """Return whether an index is a vector of row numbers on the CPU, as `index_select` expects."""
    return index.dtype is torch.int64 and index.ndim == 1 and index.is_cpu and is_eager()


def _rows_taken(container: W, rows: Tensor) -> W:
    """Return the rows of the given non-negative numbers.

    A fast path ("td[tensor]" in the benchmarks): torch raises an error for a negative number, and
    the caller then uses the index operator.
    """
    count = rows.shape[0]
    return container._kd_map_each(
        takes(lambda leaf: _rows_of(leaf, rows), rows),
        lambda batch: (resized(batch[0], count), *batch[1:]),
    )


class _Rows:
    """The target of an indexed write: a view of each leaf, or an index into it."""

    __slots__ = (
        *("added", "batch", "batch_fn", "direct", "fn", "index", "ndim", "numbers", "where"),
        "whole",
    )

    def __init__(self, index: object, batch: Batch) -> None:
        self.whole = index == () if type(index) is tuple else False
        """Whether the index names no rows: then one value for all of them stays one."""
        index = None if index is True else index  # torch copies then, and converts the dtype
        self.fn, after = resolve(index, batch)
        self.batch_fn = leading(batch, after)
        self.batch, self.ndim = batch, len(batch)
        self.where: tuple[IndexItem, ...] | bool | None
        if index is False:
            self.where = False  # torch then writes nothing, into any dtype
        else:
            self.where = None if gives_views(index) else plain_index(index, batch)
        self.index = for_nested(index, batch)
        self.numbers = index if type(index) is Tensor and batch and is_eager() else None
        """Row numbers that `resolve` has not compared with the batch size, or a mask."""
        self.direct: list[Write] = []
        """Writes into members of a stack, which have resolved their rows already."""
        self.added: list[tuple[AbstractContainer, str, Entry]] = []
        """Entries that the written rows make: of a container, by key."""

    def stage(self, leaf: Tensor, value: object, path: tuple[str, ...]) -> Write:
        """Check and record one write."""
        if self.where is None:
            target = self.fn(leaf)
            shape = target.shape
        else:
            target = leaf
            shape = self.batch_fn(tuple(leaf.shape[: self.ndim])) + leaf.shape[self.ndim :]
        source = value
        if not isinstance(source, Tensor):
            source = as_source(path, value, leaf.dtype)
        if is_shapeless(source):
            raise without_shape(f"what is written to rows of entry {format_key(path)}")
        if source.shape != shape:
            source = without_ones(source, len(shape))
            _check_broadcast(source, shape, path)
        doubtful = source.dtype is not leaf.dtype or leaf.dtype in INCOMPLETE
        if self.where is not None and doubtful and not is_compiling():
            self._check_dtype(leaf, source, path)
        return target, source, path

    def stage_data(
        self,
        level: AbstractContainer,
        entry: Node,
        value: object,
        path: tuple[str, ...],
        writes: list[Write],
        alike: bool = False,
    ) -> None:
        """Check and record a write of one value per row.

        One value for the whole batch becomes one per row, if it is not to stay one: `MetaData`.

        Args:
            level: the container that holds the entry.
            entry: what is written.
            value: what is written there.
            path: the path of the entry.
            writes: where the write is appended.
            alike: whether rows get values of their own where the value is the same, too.
        """
        if not is_row_data(entry):
            batch = entry._kd_desc.batch
            always, of_batch = entry._kd_state() if is_data(entry) else (False, True)
            if is_any_data(entry) and entry._agrees(value) and (always or not (alike and batch)):
                return
            one = batch and self.whole and is_data(entry) and _is_one_value(value)
            if one or ((always or not of_batch) and not (batch or self.batch_fn(batch))):
                self.direct += level._kd_writes(path[-1], value, path)
                return
            if not is_data(entry) or entry._kd_state()[0] or not entry._kd_desc.ndim:
                check_same_data(entry, value, path)
                return
            if entry._kd_item() is None and isinstance(value, Tensor):
                value = self._wrapped_rows(value)
            entry = entry._spread(entry._kd_desc)
            above = level._kd_desc
            if above.frozen:
                entry._kd_hold(above.held + (above.lock is not None), (ref(level),))
            self.added.append((level, path[-1], entry))
        shape = self.batch_fn(entry._kd_desc.batch)
        whole, source = entry._encode(value, path, shape)
        if is_compiling():
            writes.append(self.stage(whole, source, path))
            return
        stand_in = cast("StandIn", whole)
        target, source, _ = self.stage(stand_in.plain, source, path)
        writes.append((stand_in.of(target), source, path))

    def _wrapped_rows(self, value: Tensor) -> Node:
        """Return the rows of a tensor as values, for a field that was `None`."""
        shape = self.batch_fn(self.batch)
        rows = value.reshape(-1, *value.shape[len(shape) :]) if shape else [value]
        desc = describe(shape)
        return (
            registry.wrap_rows(list(rows), None, desc) if shape else registry.wrap_data(value, desc)
        )

    def add(
        self,
        level: AbstractContainer,
        source: object,
        value: object,
        path: tuple[str, ...],
        writes: list[Write],
    ) -> None:
        """Record a key that a container lacks: zeros, or no value, in the rows not written."""
        desc = level._kd_desc
        if desc.frozen:
            level._kd_check_unlocked(f"set {format_key(path)}")
        level._kd_check_key(path[-1])  # before the first value is written
        given = describe(self.batch_fn(self.batch))
        if isinstance(source, AbstractContainer):
            given = source._kd_desc.unlocked()
        new = as_entry(path[-1], value, given, path[:-1])
        entry: Entry
        if isinstance(new, Tensor):
            feature = new.shape[given.ndim :]
            entry = new.new_zeros((*desc.batch, *feature))
            writes.append(self.stage(entry, new, path))
        elif isinstance(new, AbstractContainer):
            batch = (*desc.batch, *new._kd_desc.batch[given.ndim :])
            inner = desc if len(batch) == desc.ndim else desc.with_batch(batch)
            below: AbstractContainer = registry.make_dense({}, inner.unlocked(), True)
            _stage_level(below, new, path, self, writes, adds=True)
            entry = below
        elif is_unbatched(new) or not desc.ndim or (is_data(new) and new._kd_state()[0]):
            entry = new._kd_with_descriptor(desc)
        else:
            rows = registry.wrap_data(None, desc)._spread(desc)
            lists = is_row_data(new) and new._kd_desc.ndim > given.ndim  # as values of rows
            self.stage_data(level, rows, new._kd_item() if lists else new, path, writes)
            entry = rows
        self.added.append((level, path[-1], entry))

    def _check_dtype(self, leaf: Tensor, source: Tensor, path: tuple[str, ...]) -> None:
        """Refuse a dtype that torch does not convert at this index, by a try on a copy."""
        with torch.no_grad():
            try:
                leaf.clone()[self.where] = source
            except RuntimeError as error:
                raise InvalidValue(
                    f"cannot write a value of {source.dtype} to rows of {format_key(path)} of "
                    f"{leaf.dtype} at this index: {str(error).rstrip('.')}. Cast the value first."
                ) from None

    def check(self, writes: list[Write]) -> None:
        """Refuse what `commit` would, before others commit."""
        if is_compiling():
            return
        for each in (*writes, *self.direct):
            if not is_stand_in(each[0]):
                check_write(*each)
        if isinstance(self.where, tuple):
            try:
                shape_at(self.where, self.batch)
            except IndexError as error:
                raise beyond(self.batch, error) from None

    def commit(self, writes: list[Write]) -> None:
        """Write what was recorded."""
        for each in () if is_compiling() else self.direct:
            check_write(*each)
        if self.numbers is not None and self.numbers.dtype is torch.int64:
            _check_range(self.numbers, self.batch)
        if self.where is None:
            write_all(writes)
        else:
            try:
                if not is_compiling() and not any(target.numel() for target, *_ in writes):
                    where = self.where if isinstance(self.where, tuple) else (self.where,)
                    shape_at(where, self.batch)  # writes would not look at it
                values = [] if is_compiling() else self._values(writes)
                commit([each for each in writes if not is_stand_in(each[0])], self._put_rows)
                for target, source in values:
                    target.copy_(source)  # which cannot fail: it is prepared
            except IndexError as error:  # at the first write: the index is the same for all
                raise beyond(self.batch, error) from None
        write_all(self.direct)
        for level, key, entry in self.added:
            level._kd_set_entry(key, entry)

    def _values(self, writes: list[Write]) -> list[tuple[Tensor, Tensor]]:
        """Return prepared copies in place of the writes of values that are not tensors."""
        found: list[tuple[Tensor, Tensor]] = []
        for target, source, _ in writes:
            if is_stand_in(target):
                rows = target.of(target.plain[_on_cpu(self.where)])
                rows.prepare(source)
                found.append((rows, source))
        return found

    def _put_rows(self, target: Tensor, source: Tensor) -> None:
        if not (source.is_cpu and target.is_cpu) and source.ndim:  # torch takes numbers alone
            source = beside(source, target)
        try:
            target[self.where] = source
        except RuntimeError:
            items = self.where if isinstance(self.where, tuple) else ()
            if not any(isinstance(item, Tensor) and shares_storage(target, item) for item in items):
                raise
            # torch refuses an index that the leaf holds; the leaves before it are written.
            self.where = tuple(each.clone() if isinstance(each, Tensor) else each for each in items)
            target[self.where] = source


def _on_cpu(where: tuple[IndexItem, ...] | bool | None) -> tuple[IndexItem, ...] | bool | None:
    """Return an index for the numbers of values that are not tensors, which are on the CPU."""
    if not isinstance(where, tuple):
        return where
    return tuple(item.cpu() if isinstance(item, Tensor) else item for item in where)


def _check_range(rows: Tensor, batch: Batch) -> None:
    """Compare row numbers with the batch size: torch writes those before one out of range."""
    if not rows.is_cpu or not rows.numel():
        return
    for bound in torch.aminmax(rows):
        number = int(bound)
        if not -batch[0] <= number < batch[0]:
            error = IndexError(
                f"index {number} is out of bounds for dimension 0 with size {batch[0]}"
            )
            raise beyond(batch, error)


def _copied(target: AbstractContainer, index: object, source: object) -> bool:
    """Copy a container of plain leaves to rows at once; return `False`, nothing written, if unsure.

    The fast path of `_Rows`, which takes any source and any index: "td[:5] = rows" in the
    benchmarks.
    """
    if is_compiling() or not isinstance(source, AbstractContainer):
        return False
    batch = target._kd_desc.batch
    numbers = index if type(index) is Tensor and batch and _are_rows(index) else None
    if numbers is None and not gives_views(index):
        return False
    leaves: list[Tensor] = []
    values: list[Tensor] = []
    if not _paired(target, source, leaves, values):
        return False
    if numbers is not None:
        if not are_rows_of(leaves, values, numbers.shape[0]):
            return False
        _check_range(numbers, batch)
        put_rows(leaves, values, numbers)
        return True
    rows_of, _ = resolve(index, batch)
    return copy_pairs([rows_of(leaf) for leaf in leaves], values)


def _paired(
    target: AbstractContainer, source: AbstractContainer, leaves: list[Tensor], values: list[Tensor]
) -> bool:
    """Append the leaves of a source and of the target with the same keys, if all are plain."""
    if not target._kd_owns_leaves:
        return False
    entries = target._kd_entries
    for key, value in source._kd_entries.items():
        entry = entries.get(key)
        if type(entry) is Tensor and type(value) is Tensor:
            leaves.append(entry)
            values.append(value)
        elif (
            not isinstance(entry, AbstractContainer)
            or not isinstance(value, AbstractContainer)
            or not _paired(entry, value, leaves, values)
        ):
            return False
    return True


def _check_broadcast(source: Tensor, shape: tuple[int, ...], path: tuple[str, ...]) -> None:
    if not broadcasts_to(source.shape, shape):
        raise cannot_broadcast(source.shape, f"rows of {format_key(path)}", shape)


def _is_one_value(value: object) -> bool:
    return is_data(value) if is_any_data(value) else not isinstance(value, (list, tuple, Tensor))


def _stage_level(
    target: AbstractContainer,
    value: object,
    path: tuple[str, ...],
    rows: _Rows,
    writes: list[Write],
    adds: bool = False,
) -> None:
    """Record the writes of one level: of a container, a mapping, or one value for all.

    Args:
        target: what is written.
        value: what is written there.
        path: the path of the target.
        rows: the rows that are written.
        writes: where the writes are appended.
        adds: whether a level gets the entries of the source that it lacks.
    """
    if isinstance(target, Composite):
        rows.direct += target._row_writes(rows.index, value, path)
        return
    entries = target._kd_entries
    if isinstance(value, AbstractContainer):
        source: Mapping[str, object] = value._kd_entries
    elif isinstance(value, Mapping):
        source = value if all(type(key) is str for key in value) else with_plain_keys(value, path)
    else:
        source = {
            key: value
            for key, entry in entries.items()
            if isinstance(entry, (Tensor, AbstractContainer)) or is_unbatched(entry)
        }
    for key, new in source.items():
        entry = entries.get(key)
        if isinstance(entry, Tensor):
            writes.append(rows.stage(entry, new, (*path, key)))
        elif isinstance(entry, AbstractContainer):
            _stage_level(entry, new, (*path, key), rows, writes, adds)
        elif entry is None and adds:
            rows.add(target, value, new, (*path, key), writes)
        elif entry is None:
            raise unknown_below(source, target._kd_entries, path)
        else:
            rows.stage_data(target, entry, new, (*path, key), writes)


# Rows chosen by a condition: what `where` does, and `scatter` where it must. A condition lines up
# with the first batch dimensions; entries of lazy stacks are chosen member by member, and rows of
# nested tensors one by one.


def selected(
    td: W, condition: Tensor, other: AbstractContainer | Tensor | float, pad: float | None
) -> W:
    """Return the rows of a container where a condition is true, and those of `other` elsewhere."""
    batch = td._kd_desc.batch
    chosen = spread(check_mask(condition), batch, "a condition", features=True)
    if isinstance(other, AbstractContainer):
        other = fitted(td, other)
        if other._kd_desc.batch != batch:
            raise ShapeMismatch(
                f"batch sizes must be equal, got {batch} and {other._kd_desc.batch} in `other` of "
                "`where`."
            )
        from kd_core._ops.blending import select

        return select(td, other, _selection(td, other, condition, batch), pad)
    new = _beside(other, batch) if isinstance(other, Tensor) and other.ndim else None
    refuse_unbatched(td, "written at some rows")
    if not keeps_batch(td):
        if condition.ndim > len(batch):  # over features, which each member has behind its own rows
            return td._kd_zip_each(td, _replacement(condition, other, batch))
        condition = from_the_first(condition, batch)
        if new is not None:
            for shape in () if td._kd_desc.open else _stacked_shapes(td, batch, len(batch)):
                new(torch.empty(shape, device="meta"))
            other = from_the_first(cast("Tensor", other), batch)
        return blended(td, _chosen, condition, other)

    def pick(leaf: Tensor) -> Tensor:
        if is_ragged(leaf):
            return _ragged_rows(td, leaf, condition, other)
        return torch.where(chosen(leaf), leaf, other if new is None else new(leaf))

    return td._kd_map_each(pick, SAME_SHAPE)


def _selection(
    td: AbstractContainer,
    other: AbstractContainer,
    condition: Tensor,
    batch: Batch,
) -> Selection:
    """Return the function that chooses among the rows of two containers of a batch size."""
    chosen = spread(condition, batch, "a condition", features=True)

    def pick(leaf: Tensor, new: Tensor) -> Tensor:
        if type(leaf) is not Tensor and is_ragged(leaf):
            return _ragged_rows(td, leaf, condition, new)
        if type(new) is not Tensor and is_ragged(new):
            return _ragged_rows(other, new, ~condition, leaf)
        return torch.where(chosen(new if leaf.ndim < new.ndim else leaf), leaf, new)

    def of_member(dim: int, row: int) -> Selection:
        part = _part_of_member(condition, dim, row)
        return _selection(td, other, part, batch[:dim] + batch[dim + 1 :])

    return Selection(pick, of_member)


def _replacement(condition: Tensor, other: Tensor | float, batch: Batch) -> Selection:
    """Return the function that replaces rows by a tensor or a number; it is given a leaf twice."""
    chosen = spread(condition, batch, "a condition", features=True)
    new = _beside(other, batch) if isinstance(other, Tensor) and other.ndim else None

    def pick(leaf: Tensor, same: Tensor) -> Tensor:
        return torch.where(chosen(leaf), leaf, other if new is None else new(leaf))

    def of_member(dim: int, row: int) -> Selection:
        part = _part_of_member(condition, dim, row)
        value = _part_of_member(other, dim, row) if isinstance(other, Tensor) else other
        return _replacement(part, value, batch[:dim] + batch[dim + 1 :])

    return Selection(pick, of_member)


def _stacked_shapes(td: AbstractContainer, batch: Batch, ndim: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of stacked leaves; those of a member have `ndim` of the batch dimensions."""
    if isinstance(td, Composite):
        for member in td._members:
            yield from _stacked_shapes(member, batch, ndim - 1 if td._dim < ndim else ndim)
        return
    for entry in td._kd_entries.values():
        if isinstance(entry, AbstractContainer):
            yield from _stacked_shapes(entry, batch, ndim)
        elif isinstance(entry, Tensor) and not is_shapeless(entry):
            yield (*batch, *entry.shape[ndim:])


def _beside(tensor: Tensor, batch: Batch) -> LeafFn:
    """Return a tensor beside each leaf: over its first dimensions, or over the last as in torch.

    Raises:
        ShapeMismatch: if it fits neither of a leaf, or both with other results.
    """
    if is_shapeless(tensor):
        raise without_shape("a tensor")
    shape = tuple(tensor.shape)

    def to_leaf(leaf: Tensor) -> Tensor:
        more = leaf.ndim - len(shape)
        last = more >= 0 and broadcasts_to(shape, leaf.shape[more:])
        first = more > 0 and broadcasts_to(shape, leaf.shape[: len(shape)])
        if first and last and any(size != 1 for size in shape):
            ones = ", ".join(["None"] * more)
            raise ShapeMismatch(
                f"a tensor of shape {shape} fits the first and the last dimensions of an entry of "
                f"shape {shape_text(leaf.shape)}, with other results. Write `x[..., {ones}]` for "
                f"the first, `x[{ones}]` for the last."
            )
        if last:
            return beside(tensor, leaf)
        check_lines_up(shape, batch, "a tensor")
        return behind(tensor, leaf)

    return to_leaf


def _part_of_member(tensor: Tensor, dim: int, row: int) -> Tensor:
    """Return the part of a tensor over the rows of a stack that one member has."""
    if dim >= tensor.ndim:
        return tensor
    return tensor.select(dim, row if tensor.shape[dim] != 1 else 0)


def _chosen(leaf: Tensor, condition: Tensor, other: Tensor | float) -> Tensor:
    if is_ragged(leaf):
        return chosen_rows(leaf, condition.reshape(condition.shape[:1]), other)
    return torch.where(condition, leaf, other)


def _ragged_rows(
    td: AbstractContainer, leaf: Tensor, condition: Tensor, other: Tensor | float
) -> Tensor:
    """Return the rows of a nested tensor where a condition is true, and others elsewhere."""
    if isinstance(other, Tensor) and other.ndim > 1 and not is_ragged(other):
        raise InvalidValue(
            f"{name_in(td, leaf)} must be ragged in both containers or in none, got shapes "
            f"{shape_text(leaf.shape)} and {shape_text(other.shape)}. Call `to_padded_tensor` "
            "first."
        )
    return chosen_rows(leaf, condition, other)


def scattered_rows(td: W, index: Tensor, src: W | float) -> W:
    """Return a copy with rows of a source at row numbers: `scatter` along the only dimension.

    Unlike `torch.scatter`, it never stacks the entries of lazy stacks, whose shapes may differ.

    Raises:
        OutOfRange: if a row number is.
    """
    if not index.numel():
        return td._kd_map_each(Tensor.clone)
    batch = td._kd_desc.batch
    low, high = index.min().item(), index.max().item()
    if low < 0 or high >= batch[0]:
        raise OutOfRange(
            f"row numbers of `scatter` must be from 0 to {batch[0] - 1}, got "
            f"{low if low < 0 else high}."
        )
    rows, count = torch.arange(batch[0], device=index.device), len(index)
    if not isinstance(src, AbstractContainer):
        rows[index.long()] = -1
        return selected(td, rows >= 0, src, None)
    rows[index.long()] = torch.arange(batch[0], batch[0] + count, device=index.device)
    both: W = cat((td, rows_at(src, slice(count))))
    return rows_at(both, rows)


def _over_features(tensor: Tensor, what: str, leaf: Tensor) -> Tensor:
    """Return a tensor that stands for the first dimensions of a leaf, beyond the batch too."""
    shape = tuple(tensor.shape)
    if len(shape) > leaf.ndim or not broadcasts_to(shape, leaf.shape[: len(shape)]):
        raise ShapeMismatch(
            f"{what} of shape {shape} must fit the first dimensions of each entry, got an entry of "
            f"shape {shape_text(leaf.shape)}. Pass one over the batch dimensions alone."
        )
    return behind(tensor, leaf)


def holds_stack(node: object) -> bool:
    """Return whether a container is a lazy stack, or one is below it."""
    if isinstance(node, Composite):
        return True
    return isinstance(node, AbstractContainer) and any(map(holds_stack, node._kd_below()))


def from_the_first(tensor: Tensor, batch: Batch) -> Tensor:
    """Return a tensor that fits the first batch dimensions with a dimension for each of them.

    Unlike an operand, a mask that fits the last dimensions too means the first, as an index does.
    """
    if is_shapeless(tensor):
        return tensor
    shape, missing = tuple(tensor.shape), len(batch) - tensor.ndim
    if shape and missing > 0 and broadcasts_to(shape, batch[: len(shape)]):
        return tensor.reshape(shape + (1,) * missing)
    return tensor


def spread(tensor: Tensor, batch: Batch, what: str, features: bool = False) -> LeafFn:
    """Return `behind` for many leaves; it is called once for each number of dimensions.

    Args:
        tensor: the tensor.
        batch: the batch size.
        what: what an error calls the tensor.
        features: it may have more dimensions than the batch, which are those of all leaves.

    Raises:
        ShapeMismatch: if the shape of the tensor does not fit the batch, or a leaf.
    """
    if is_shapeless(tensor):
        raise without_shape(what)
    if features and tensor.ndim > len(batch):
        return partial(_over_features, tensor, what)
    check_lines_up(tensor.shape, batch, what)
    made: dict[int, Tensor] = {}
    on_cpu = tensor.is_cpu

    def to_leaf(leaf: Tensor) -> Tensor:
        if not on_cpu or not leaf.is_cpu:
            return behind(tensor, leaf)
        ndim = leaf.ndim
        if ndim not in made:
            made[ndim] = behind(tensor, leaf)
        return made[ndim]

    return to_leaf
