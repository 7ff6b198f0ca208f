"""Splitting a batch, selecting rows of it, and rows of different lengths.

As in `_ops.shaping`, a container is treated as a tensor of shape `batch_size`, and arguments
are resolved once to a plan. The parts are views where torch makes views. For each leaf the fastest
torch function is called: `split_with_sizes` rather than `Tensor.split`, a slice rather than
`narrow`, `index_select` rather than `gather` ("split" and "gather" in the benchmarks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._errors import InvalidArgument, InvalidValue, KeyCollision, OutOfRange, ShapeMismatch
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import Selection, has_entry, padded_leaf, refuse_leaf, row_mask
from kd_core._nodes import as_read
from kd_core._ops.access import Update, merge
from kd_core._ops.binary import written_to
from kd_core._ops.description import StaysLazy, become, locked_as_rows
from kd_core._ops.indexing import (
    behind,
    check_mask,
    goes_beyond,
    holds_stack,
    leading,
    resolve,
    rows_at,
    rows_where,
    scattered_rows,
    selected,
    take_rows,
    views_at,
)
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    Reading,
    absent,
    is_container,
    lock,
    locked_as,
    map_by,
    read_as,
    reading,
    refuse_unbatched,
    takes,
    unlock,
)
from kd_core._shapes import (
    SAME_SHAPE,
    Padded,
    Plan,
    as_int,
    as_ints,
    cached,
    definite,
    int_or_ints,
    plain_size,
    plan,
    refuse_open,
    resized,
    slice_length,
    wrap_dim,
)

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from torch.distributed import ProcessGroup

    from kd_core._nodes import Entry
    from kd_core._protocol import Side
    from kd_core._types import Batch, BatchFn, DeviceLike, Index, LeafFn, NestedKey, PartsFn

    T = TypeVar("T")
    W = TypeVar("W", bound=AbstractContainer)
    C = TypeVar("C", bound=AbstractContainer)


PartsPlan: TypeAlias = "tuple[PartsFn, list[Batch], list[BatchFn]]"
"""The plan of a split: a function from a leaf to its parts, the batch size of each part, and for
each part a function from the batch size of a nested container to the new one."""


class Partition(AbstractContainer):
    """The methods that split a batch, select rows, and read rows of one entry."""

    __slots__ = ()

    def split(self, split_size: int | Sequence[int], dim: int | str = 0) -> tuple[Self, ...]:
        """Split the batch into pieces; their leaves are views.

        Args:
            split_size: the rows of each piece (the last one may have fewer), or a list of sizes.
            dim: the batch dimension.

        Raises:
            InvalidValue: if the sizes do not add up.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> [piece["a"] for piece in TensorDict({"a": torch.arange(3)}, [3]).split(2)]
            [tensor([0, 1]), tensor([2])]
        """
        return _parts(self, _split(self._kd_desc.batch, int_or_ints(split_size), dim))

    def chunk(self, chunks: int, dim: int | str = 0) -> tuple[Self, ...]:
        """Split the batch into `chunks` pieces, or fewer if there are not enough rows.

        Args:
            chunks: the number of pieces, at least 1.
            dim: the batch dimension.
        """
        return _parts(self, _chunk(self._kd_desc.batch, chunks, dim))

    def tensor_split(
        self, indices_or_sections: int | Sequence[int], dim: int | str = 0
    ) -> tuple[Self, ...]:
        """Split the batch into a number of pieces, or before the given rows.

        Args:
            indices_or_sections: the number of pieces, or the first rows of the pieces after the
                first.
            dim: the batch dimension.
        """
        where = int_or_ints(indices_or_sections)
        return _parts(self, _tensor_split(self._kd_desc.batch, where, dim))

    def unbind(self, dim: int | str = 0) -> tuple[Self, ...]:
        """Return a container for each row along a batch dimension, which is removed.

        Args:
            dim: the batch dimension.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> [row["a"].item() for row in TensorDict({"a": torch.arange(3)}, [3]).unbind()]
            [0, 1, 2]
        """
        return _parts(self, _unbind(self._kd_desc.batch, dim), locks=False)

    def narrow(self, dim: int | str, start: int, length: int) -> Self:
        """Return `length` rows beginning at `start`; leaves are views.

        Raises:
            OutOfRange: if there are not enough rows.
        """
        return locked_as(self, map_by(_narrow(self._kd_desc.batch, dim, start, length), self))

    def index_select(self, dim: int | str, index: Tensor) -> Self:
        """Copy the rows numbered by a vector.

        Args:
            dim: the batch dimension.
            index: row numbers, a vector or a 0-d tensor.
        """
        batch = self._kd_desc.batch
        at = wrap_dim(dim, batch)
        _check_integers(index)
        if index.ndim > 1:
            raise ShapeMismatch(
                f"`index_select` expected a vector of row numbers, got shape {tuple(index.shape)}. "
                "Use `gather`, or `td[index]`."
            )
        new = (*batch[:at], resized(batch[at], index.numel()), *batch[at + 1 :])
        where = _along(at, index.reshape(-1))  # one row is a dimension of size 1
        return map_by(plan(batch, takes(lambda leaf: take_rows(leaf, index, at), where), new), self)

    def gather(
        self, dim: int | str, index: Tensor, out: Self | None = None, *, inplace: bool = False
    ) -> Self:
        """Copy rows by number along one batch dimension, as `torch.gather` does.

        Args:
            dim: the batch dimension.
            index: row numbers; it has as many dimensions as the batch, and is broadcast over the
                trailing dimensions of every leaf.
            out: a container into whose leaves the result is written.
            inplace: change this container instead of making a new one.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.tensor([[1, 2], [3, 4]])}, [2])
            >>> td.gather(0, torch.tensor([1, 1]))["a"]
            tensor([[3, 4],
                    [3, 4]])
        """
        batch = self._kd_desc.batch
        at = _check_index(index, batch, dim, "gather")
        if len(batch) == 1:
            how = plan(batch, lambda leaf: take_rows(leaf, index), batch)
        else:
            ndim = len(batch)
            how = plan(batch, lambda leaf: leaf.gather(at, _rows(index, leaf, ndim)), batch)
        new = tuple(map(resized, batch, index.shape))
        result = map_by((how[0], new, _leading_sizes(new, len(batch))), self)
        return become(self, result, "gather in place") if inplace else written_to(out, result)

    @overload
    def scatter(self, dim: int | str, index: Tensor, src: AbstractContainer | float) -> Self: ...
    @overload
    def scatter(
        self,
        src: int,
        tensordicts: Sequence[AbstractContainer] | None = None,
        *,
        group: ProcessGroup | None = None,
        device: DeviceLike | None = None,
    ) -> Self: ...
    def scatter(self, *places: object, **named: object) -> Self:
        """Write rows at numbers, as `torch.scatter` does; or give each rank its container.

        `td.scatter(dim, index, src)` returns a copy with rows written at the given numbers.
        `td.scatter(src, tensordicts)` returns the container that the rank `src` has for this one.

        Args:
            *places: the batch dimension, row numbers and what is written (a container of the same
                keys, at least as large as the numbers, or one number); or a rank, and its
                containers, one for each rank.
            **named: the same by name; `group`, the process group; `device`, where the container is
                put that is received.

        Raises:
            KeySetMismatch: if the keys of what is written differ.
        """
        has_index = "index" in named or any(isinstance(each, Tensor) for each in places[1:2])
        if has_index or len(places) == 3:
            own: Callable[..., Self] = self._kd_scattered
            return own(*places, **named)
        received: Callable[..., Self] = _from_rank
        return received(self, *places, **named)

    def _kd_scattered(self, dim: int | str, index: Tensor, src: Self | float) -> Self:
        """Return a copy with rows written at the given numbers."""
        batch, ndim = self._kd_desc.batch, self._kd_desc.ndim
        at = _check_index(index, batch, dim, "scatter")
        if isinstance(src, AbstractContainer):
            _check_source(src._kd_desc.batch, index)

        def write(leaf: Tensor, new: Tensor | float) -> Tensor:
            return leaf.scatter(at, _rows(index, leaf, ndim), new)

        try:
            if isinstance(src, AbstractContainer):
                return self._kd_zip_each(src, Selection(write))
            refuse_unbatched(self, "written at some rows")
            return self._kd_map_each(lambda leaf: write(leaf, src), SAME_SHAPE)
        except ShapeMismatch:
            if ndim != 1 or not any(map(holds_stack, (self, src))):
                raise
            return scattered_rows(self, index, src)

    def masked_select(self, mask: Tensor, *, inplace: bool = False) -> Self:
        """Copy the rows where a mask is true, in one batch dimension: `td[mask]`.

        Args:
            mask: booleans; its shape is that of the leading batch dimensions.
            inplace: change this container instead of making a new one.
        """
        batch = self._kd_desc.batch
        if not batch and mask.shape == (1,):
            mask = mask[0]  # as for a 0-dim tensor
        result = map_by(plan(batch, *rows_where(check_mask(mask), batch)), self)
        return become(self, result, "select rows in place") if inplace else result

    def where(
        self,
        condition: Tensor,
        other: AbstractContainer | Tensor | float,
        *,
        out: Self | None = None,
        pad: float | None = None,
        update_batch_size: bool = False,
    ) -> Self:
        """Return the rows where a condition is true, and those of `other` elsewhere.

        Args:
            condition: a tensor of booleans whose dimensions are the first batch dimensions, each
                of the same size or 1; further ones are those of the features of all entries.
            other: a container of the same keys, a number, or a tensor whose shape follows the rule
                of `condition`.
            out: a container that takes the entries of the result; its tensors are not written to.
            pad: what stands for an entry that `self` or a container `other` lacks.
            update_batch_size: give `out` the entries and the batch size of the result, where it has
                others.

        Raises:
            KeySetMismatch: if the keys of `other` differ, and there is no `pad`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2, 2)}, [2])
            >>> td.where(torch.tensor([True, False]), 0.0)["a"]
            tensor([[1., 1.],
                    [0., 0.]])
        """
        result = selected(self, condition, other, pad)
        if out is None:
            if isinstance(other, AbstractContainer):
                return unlock(result) if result._kd_desc.frozen else result
            return locked_as(self, result)
        if out._kd_desc.batch != result._kd_desc.batch:
            if update_batch_size:
                return become(out, result, "change the batch size")
            raise ShapeMismatch(
                f"`out` must have batch_size {result._kd_desc.batch}, got {out._kd_desc.batch}. "
                "Pass `update_batch_size=True` to replace it."
            )
        merge(out, (result,), Update())
        return out

    @overload
    def get_at(
        self,
        key: str | tuple[str, ...],
        index: Index,
        default: object = None,
        *,
        as_list: Literal[False] = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> Tensor: ...
    @overload
    def get_at(
        self,
        key: str | tuple[str, ...],
        index: Index,
        default: object = None,
        *,
        as_list: Literal[True],
    ) -> Tensor | list[Tensor]: ...
    def get_at(
        self,
        key: str | tuple[str, ...],
        index: Index,
        default: object = None,
        *,
        as_list: bool = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> Tensor | list[Tensor]:
        """Read rows of one entry: `td[key][index]`, over all that the entry itself can index.

        Args:
            key: the key of the entry.
            index: an index of the tensor, or of the batch dimensions of the container.
            default: what is returned for a missing key.
            as_list: how rows of a lazy stack are read, as are the arguments after it: see `get`.
            as_padded_tensor: the same, padded to one shape.
            as_nested_tensor: the same, as a nested tensor.
            padding_value: the value of the elements that are added.
            padding_side: where they are added: `"left"` or `"right"`.
            layout: the layout of a nested tensor.

        Raises:
            KeyThroughLeaf: if the key goes on below a tensor.
            KeyNotFound: if the key is missing, and the default is `NO_DEFAULT`.
        """
        path = path_of(key)
        if not has_entry(self._kd_entries, path):
            refuse_leaf(self._kd_entries, path)
            return as_read(absent(self, path, default))
        how: Reading | None = None
        if as_list or as_padded_tensor or as_nested_tensor:
            options = padding_value, padding_side, layout
            how = reading(as_list, as_padded_tensor, as_nested_tensor, *options)
        if how is None and not isinstance(self, Composite):
            entry = self._kd_read(path)
            if isinstance(entry, Tensor):
                return resolve(index, tuple(entry.shape))[0](entry)
            if isinstance(entry, AbstractContainer):
                return as_read(views_at(entry, index))
            batch = self._kd_desc.batch
            fn, after = resolve(index, batch)
            return as_read(entry._kd_map_each(fn, leading(batch, after)))
        if how is None and goes_beyond(index, self._kd_desc.ndim):
            entry = self._kd_read(path)
            if isinstance(entry, Tensor):
                return resolve(index, tuple(entry.shape))[0](entry)
            if isinstance(entry, AbstractContainer):
                return as_read(views_at(entry, index))
        rows = rows_at(_alone(self, path[0]), index)
        return as_read(rows._kd_read(path) if how is None else read_as(rows, path, None, how))


def _parts_plan(batch: Batch, leaf: PartsFn, at: int, sizes: Sequence[Batch]) -> PartsPlan:
    """Return the plan of a split along dimension `at` into parts of the given sizes."""
    batches = [
        (*batch[:at], *[resized(batch[at], rows) for rows in size], *batch[at + 1 :])
        for size in sizes
    ]
    if not is_dynamo_compiling():
        leaf.__dict__["indices"] = _indices(at, sizes)
    ndim = len(batch)
    return leaf, batches, [_leading_sizes(new, ndim) for new in batches]


def _indices(at: int, sizes: Sequence[Batch]) -> list[tuple[slice | int, ...]]:
    """Return the index of each part, with which a lazy stack selects members."""
    if () in sizes:
        return [_along(at, row) for row in range(len(sizes))]
    stops = [*accumulate(size for (size,) in sizes)]
    return [
        _along(at, slice(stop - size, stop)) for (size,), stop in zip(sizes, stops, strict=True)
    ]


def _along(at: int, item: T) -> tuple[T | slice, ...]:
    """Return an index that takes `item` of dimension `at`."""
    # Not a tuple times `at`, whose product by a symbolic integer dynamo may put into the graph.
    return (*[slice(None) for _ in range(at)], item) if at else (item,)


def _leading_sizes(new: Batch, ndim: int) -> BatchFn:
    return lambda batch: new + batch[ndim:]


def _parts(container: W, how: PartsPlan, locks: bool = True) -> tuple[W, ...]:
    """Return the parts of a container; pieces of a locked one are locked; see `locked_as_rows`."""
    leaf, batches, inner = how
    desc = container._kd_desc
    after = [desc.with_batch(batch) for batch in batches]
    parts = tuple(container._kd_map_to_parts(leaf, inner, (desc, after)))
    if desc.frozen:
        for part in parts:
            lock(part) if locks else locked_as_rows(container, part)
    return parts


@cached
def _split(batch: Batch, split_size: int | Batch, dim: int | str) -> PartsPlan:
    at = wrap_dim(dim, batch)
    size = batch[at]
    if isinstance(split_size, int):
        if split_size < 0 or (split_size == 0 and size != 0):
            raise InvalidValue(f"`split_size` must be positive, got {split_size}.")
        return _pieces(batch, at, _even_sizes(size, split_size))
    if any(part < 0 for part in split_size) or sum(split_size) != size:
        raise InvalidValue(
            f"the sizes of a split must be non-negative and sum to the {size} rows of dimension "
            f"{at}, got {split_size} with sum {sum(split_size)}."
        )
    return _pieces(batch, at, split_size)


@cached
def _chunk(batch: Batch, chunks: int, dim: int | str) -> PartsPlan:
    at, chunks = wrap_dim(dim, batch), as_int(chunks)
    if chunks < 1:
        raise InvalidValue(f"`chunks` must be positive, got {chunks}.")
    size = batch[at]
    if size == 0:
        return _pieces(batch, at, (0,) * chunks)
    return _pieces(batch, at, _even_sizes(size, -(-size // chunks)))


def _even_sizes(size: int, part: int) -> Batch:
    if size == 0:
        return (0,)
    full, rest = size // part, size % part  # a symbolic size does not support `divmod`
    return (part,) * full + ((rest,) if rest else ())


def _pieces(batch: Batch, at: int, sizes: Batch) -> PartsPlan:
    each = [(size,) for size in sizes]
    if at == 0:
        return _parts_plan(batch, lambda leaf: leaf.split_with_sizes(sizes), at, each)
    return _parts_plan(batch, lambda leaf: leaf.split_with_sizes(sizes, at), at, each)


@cached
def _tensor_split(batch: Batch, where: int | Batch, dim: int | str) -> PartsPlan:
    at = wrap_dim(dim, batch)
    size = batch[at]
    if isinstance(where, int):
        if where < 1:
            raise InvalidValue(f"the number of sections must be positive, got {where}.")
        part, longer = size // where, size % where
        sizes = [(part + (i < longer),) for i in range(where)]
        return _parts_plan(batch, lambda leaf: leaf.tensor_split(where, at), at, sizes)
    bounds = list(zip((0, *where), (*where, size), strict=True))
    sizes = [(slice_length(slice(start, stop), size),) for start, stop in bounds]
    how = _parts_plan(batch, lambda leaf: leaf.tensor_split(where, at), at, sizes)
    if not is_dynamo_compiling():
        how[0].__dict__["indices"] = [_along(at, slice(*bound)) for bound in bounds]
    return how


@cached
def _unbind(batch: Batch, dim: int | str) -> PartsPlan:
    at = wrap_dim(dim, batch)
    return _parts_plan(batch, lambda leaf: leaf.unbind(at), at, [()] * plain_size(batch[at]))


@cached
def _narrow(batch: Batch, dim: int | str, start: int, length: int) -> Plan:
    at, start, length = wrap_dim(dim, batch), as_int(start), as_int(length)
    size = batch[at]
    first = start + size if start < 0 else start
    if length < 0 or first < 0 or first + length > size:
        raise OutOfRange(
            f"cannot take {length} rows from row {start} of dimension {at}, which has {size} rows."
        )
    new = (*batch[:at], resized(size, length), *batch[at + 1 :])
    rows = slice(first, first + length)
    if at == 0:
        return plan(batch, takes(lambda leaf: leaf[first : first + length], rows), new)
    return plan(batch, takes(lambda leaf: leaf.narrow(at, first, length), _along(at, rows)), new)


def _rows(index: Tensor, leaf: Tensor, ndim: int) -> Tensor:
    """Return an index of rows, expanded over the trailing dimensions of a leaf."""
    return behind(index.long(), leaf).expand(*index.shape, *leaf.shape[ndim:])


def _from_rank(
    td: W,
    src: int,
    tensordicts: Sequence[W] | None = None,
    *,
    group: ProcessGroup | None = None,
    device: DeviceLike | None = None,
) -> W:
    """Return the container that a rank has for this one."""
    from kd_core._distributed.collectives import scatter

    return scatter(tensordicts, src, group, device)


def _check_index(index: Tensor, batch: Batch, dim: int | str, method: str) -> int:
    """Check the dimension and an index with all batch dimensions; return the dimension."""
    at = wrap_dim(dim, batch)
    _check_integers(index)
    if index.ndim != len(batch) or any(
        got > have
        for axis, (got, have) in enumerate(zip(index.shape, batch, strict=True))
        if axis != at
    ):
        raise ShapeMismatch(
            f"the index of `{method}` must have as many dimensions as batch_size {batch}, and only "
            f"dimension {at} may be larger, got shape {tuple(index.shape)}."
        )
    return at


def _check_source(batch: Batch, index: Tensor) -> None:
    if len(batch) != index.ndim or any(
        have < need for have, need in zip(batch, index.shape, strict=True)
    ):
        raise ShapeMismatch(
            f"the source of `scatter` must be at least as large as the index {tuple(index.shape)}, "
            f"got batch_size {batch}."
        )


def _check_integers(index: object) -> None:
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise InvalidArgument(
            f"row numbers must be a tensor of torch.int64 or torch.int32, got {kind}."
        )


def _alone(container: AbstractContainer, key: str) -> AbstractContainer:
    """Return a container of one entry alone, so that a stack chooses rows of no other one."""
    if isinstance(container, Composite):
        return container._by_member(lambda member: _alone(member, key))
    entries = {key: container._kd_read((key,))}
    return registry.make_dense(entries, container._kd_desc.unlocked())


# Rows of different lengths, as stacks, nested tensors and padded tensors; rows that are added.


class Ragged(AbstractContainer):
    """Rows of different lengths, and rows added before and after those of a batch."""

    __slots__ = ()

    def _kd_dense_entry(self, key: str, layout: torch.layout) -> Entry:
        entry = self._kd_entries[key]
        return densified(entry, layout) if is_container(entry, self) else entry

    def to_padded_tensor(
        self,
        padding: float = 0.0,
        mask_key: NestedKey | None = None,
        *,
        keys: Iterable[NestedKey] | None = None,
    ) -> Self:
        """Return a dense container with rows of different lengths padded to the longest.

        These are nested tensors, and entries of lazy stacks that cannot be stacked.

        Args:
            padding: the value of the elements that are added.
            mask_key: where to store a mask that is true for real elements; it is that of the first
                of `keys`, or of the first padded entry.
            keys: entries that have a mask whatever the lengths of their rows are: the mask of one
                whose rows are all of one length, as in a last batch of one row, is all true.

        Raises:
            KeyCollision: if there is an entry at `mask_key`.
            InvalidValue: if there is no entry to make a mask of.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 2)])
            >>> padded = stack.to_padded_tensor(mask_key="mask", keys=["a"])
            >>> padded["a"], padded["mask"]
            (tensor([[1., 0.],
                    [1., 1.]]), tensor([[ True, False],
                    [ True,  True]]))
        """
        dense = densified(self, torch.jagged)
        masks: list[Tensor] = []
        if keys is not None:
            masks += [_mask_at(dense, path_of(key)) for key in keys]

        def padded(leaf: Tensor) -> Tensor:
            if not leaf.is_nested:
                return leaf
            if not masks:
                masks.append(row_mask(leaf))
            return padded_leaf(leaf, padding)

        made = dense._kd_map_each(padded)
        if mask_key is None:
            return made
        if not masks:
            raise InvalidValue(
                "no entry is ragged, so there is no mask for `mask_key`. Pass `keys`, the entries "
                "that have a mask in any case."
            )
        path = path_of(mask_key)
        if has_entry(made._kd_entries, path):
            raise KeyCollision(f"key {format_key(path)} exists already. Pass another `mask_key`.")
        made._kd_store(path, masks[0])
        return made

    def pad(
        self,
        pad_size: Sequence[int],
        value: float = 0.0,
        inplace: bool = False,
        safe: bool = True,
    ) -> Self:
        """Add rows before and after those along each batch dimension.

        Args:
            pad_size: the numbers of rows to add before and after, for the first batch dimension,
                then for the second, and so on; negative numbers remove rows.
            value: the value of the new rows.
            inplace: change this container instead of making a new one. The members of a lazy
                stack stay: they are padded themselves, and new ones are added at both ends.
            safe: nothing: every call checks its sizes.

        Raises:
            InvalidValue: if the numbers are not pairs, or there are too many.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.ones(2)}, [2]).pad([0, 1], value=5)["a"]
            tensor([1., 1., 5.])
        """
        batch = self._kd_desc.batch
        new, backwards = _padded_sizes(batch, as_ints(pad_size))
        stack: AbstractContainer = self
        if inplace and isinstance(stack, Composite):
            _pad_members(stack, new, backwards, value)
            return self

        def pad_leaf(leaf: Tensor) -> Tensor:
            return torch.constant_pad_nd(leaf, [0, 0] * (leaf.ndim - len(batch)) + backwards, value)

        result = map_by((pad_leaf, new, Padded(new, len(batch))), self)
        return become(self, result, "pad in place") if inplace else result


def _row_at(dim: int, row: int) -> tuple[LeafFn, BatchFn]:
    return (
        lambda leaf: leaf.select(dim, row),
        lambda batch: batch[:dim] + batch[dim + 1 :],
    )


def _pad_members(stack: Composite, new: Batch, backwards: Sequence[int], value: float) -> None:
    """Pad the members of a lazy stack in place, and add members to both ends.

    Args:
        stack: the stack.
        new: its batch size then.
        backwards: the rows to add before and after, as `_padded_sizes` returns them.
        value: the value of the new rows.
    """
    stack._kd_check_unlocked("pad in place")
    dim = stack._dim
    if not new[dim]:
        raise StaysLazy("cannot pad in place: a lazy stack must keep a member.")
    pairs = [backwards[at : at + 2] for at in reversed(range(0, len(backwards), 2))]
    before, after = pairs.pop(dim)
    inner = [rows for pair in pairs for rows in pair]
    members = stack._members
    padded = members
    if any(inner):
        padded = [member._kd_engine.pad(member, inner, value) for member in members]

    def blank(member: AbstractContainer) -> AbstractContainer:
        rows = member._kd_engine.unsqueeze(member, 0)
        return rows._kd_engine.unbind(rows._kd_engine.pad(rows, [1, -1], value), 0)[0]

    heads = [blank(padded[0]) for _ in range(before)]
    tails = [blank(padded[-1]) for _ in range(after)]
    for member, result in zip(members, padded, strict=True):
        if result is not member:
            become(member, result, "pad in place")
    kept = members[max(-before, 0) : len(members) - max(-after, 0)]
    stack._replace_members([*heads, *kept, *tails])
    stack._kd_describe(stack._kd_desc.with_batch(new))


def _mask_at(td: AbstractContainer, path: tuple[str, ...]) -> Tensor:
    """Return which elements of an entry are not padding; one row after the other is looked at."""
    leaf = td._kd_read(path)
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return row_mask(leaf)
    ndim = td._kd_desc.ndim
    if not isinstance(leaf, Tensor) or leaf.ndim <= ndim:
        raise InvalidValue(
            f"entry {format_key(path)} must be a tensor with a dimension behind the batch to have "
            "a mask. Leave it out of `keys`."
        )
    return leaf.new_ones(leaf.shape[: ndim + 1], dtype=torch.bool)


def densified(container: W, layout: torch.layout) -> W:
    """Return a dense container in which entries that cannot be stacked are nested tensors.

    One without lazy stacks is returned itself.
    """
    of, mine = container._kd_engine, container._kd_entries
    entries = {key: of._kd_dense_entry(container, key, layout) for key in mine}
    if not isinstance(container, Composite) and all(entries[key] is mine[key] for key in mine):
        return container
    desc = container._kd_desc.unlocked()
    if desc.open:  # a nested tensor has the rows of all members
        desc = desc.with_batch(definite(desc.batch))
        for key, entry in entries.items():
            if not isinstance(entry, Tensor) and entry._kd_desc.open:
                entries[key] = entry._kd_with_descriptor(desc)
    return container._kd_like(entries, desc)


def as_stack(container: C, dim: int | str) -> C:
    """Return a lazy stack of the rows along a batch dimension."""
    at = wrap_dim(dim, container._kd_desc.batch)
    if isinstance(container, Composite) and container._dim == at:
        return container
    refuse_open(container._kd_desc.batch)
    rows = [
        container._kd_map_each(*_row_at(at, row)) for row in range(container._kd_desc.batch[at])
    ]
    if container._kd_desc.frozen:
        rows = [locked_as_rows(container, row) for row in rows]
    stack: C = registry.lazy_stack(rows, at)
    if container._kd_desc.named:
        desc = stack._kd_desc.with_batch(container._kd_desc.batch)
        stack._kd_describe(desc)
    return stack


@cached
def _padded_sizes(batch: Batch, pad_size: Batch) -> tuple[Batch, list[int]]:
    """Return the batch size after padding, and the rows to add with the last dimension first.

    The padding value is not an argument: -0.0 and 0.0 would be the same key of the cache.
    """
    ndim = len(batch)
    if len(pad_size) % 2 or len(pad_size) > 2 * ndim:
        raise InvalidValue(
            f"`pad_size` must hold a pair (rows before, rows after) for at most {ndim} batch "
            f"dimensions, got {pad_size}."
        )
    pairs = [pad_size[i : i + 2] for i in range(0, len(pad_size), 2)]
    pairs += [(0, 0)] * (ndim - len(pairs))
    new = tuple(resized(size, size + sum(pair)) for size, pair in zip(batch, pairs, strict=True))
    if any(size < 0 for size in new):
        raise InvalidValue(
            f"`pad_size` must not remove more rows than batch_size {batch} has, got {pad_size}."
        )
    return new, [rows for pair in reversed(pairs) for rows in pair]
