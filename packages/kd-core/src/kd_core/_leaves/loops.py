"""The loops over leaves: check, map, collect, rebuild and pair.

Every operation on the tensors of a container ends in one of these loops, so only they are written
for speed. They know tensors and a few private methods of a node, never a container class: an entry
of `Node` is a node.

- `all_fit` checks the entries of a new container ("construct" in the benchmarks).
- `map_each` maps one leaf at a time ("index", "shape").
- `collect` and `rebuild` make a list of all leaves for a foreach kernel of `foreach` ("math").
- `zip_each` pairs the leaves of two containers. A node that holds one value per row follows a
  `Selection`, which takes each row from one of two leaves. Another function of two leaves, such as
  a sum, has no meaning for it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core._errors import (
    InvalidValue,
    KeyNotFound,
    KeySetMismatch,
    ShapeMismatch,
    a_type,
    different_keys,
    listed,
    shape_text,
    walks_through_leaf,
    wrong_type,
)
from kd_core._keys import format_key, nearest_key
from kd_core._leaves.foreach import (
    FOREACH_FROM,
    StandIn,
    are_unwrapped,
    is_ragged,
    prepare,
    wraps_tensors,
)
from kd_core._nodes import Node, is_node, tensor_of
from kd_core._shapes import Padded, Reduced
from kd_core._torch_private import (
    make_subclass,
    nested_view_from_buffer,
    no_torch_function,
    ragged_dim,
    sizes_of_rows,
    without_torch_function,
)

if TYPE_CHECKING:
    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entries, Entry, Memo, PartsMemo
    from kd_core._types import BatchFn, LeafFn, PartsFn


# Nested tensors of the jagged layout: rows of different lengths in one tensor.
#
# torch has no indexing, splitting, repeating or joining of these along the batch. An operation
# that moves rows is applied to the numbers of the rows instead, and the rows are taken by their
# numbers.
#
# Knows `torch.nested`; must not know containers.


def row_lengths(leaf: Tensor) -> Tensor:
    """Return the length of each row in the ragged dimension."""
    if leaf.layout is not torch.jagged:
        return torch.tensor([row.shape[0] for row in leaf.unbind()], device=leaf.device)
    lengths = lengths_of(leaf)
    if lengths is not None:
        return lengths
    return offsets_of(leaf).diff()


def stored_in(leaf: Tensor) -> list[Tensor]:
    """Return the tensors that a leaf is made of: values, offsets and perhaps lengths of rows."""
    if leaf.layout is not torch.jagged:
        return [leaf]
    lengths = lengths_of(leaf)
    parts = [_values(leaf), offsets_of(leaf)]
    return parts if lengths is None else [*parts, lengths]


def restored_from(leaf: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return a leaf like another one, made of what stands for its `stored_in`."""
    if leaf.layout is not torch.jagged:
        return parts[0]
    values, offsets, *lengths = parts
    made: Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths[0] if lengths else None, jagged_dim=_ragged_dim(leaf) + 1
    )
    return made


def padded_leaf(leaf: Tensor, padding: float) -> Tensor:
    """Return a nested tensor padded to its longest row."""
    if leaf.layout is not torch.jagged or _ragged_dim(leaf):
        padded: Tensor = torch.nested.to_padded_tensor(leaf, padding)
        return padded
    real = row_mask(leaf)  # torch pads a nested tensor without a known longest row too far
    leaf = _taken(leaf, _numbers(leaf))
    values = _values(leaf)
    filled = values.new_full((*real.shape, *values.shape[1:]), padding)
    return filled.index_put((real,), values)


def padded_stack(
    rows: Sequence[Tensor], padding: float, side: Literal["right", "left"] = "right", dim: int = 0
) -> Tensor:
    """Stack tensors of one rank, each padded to the largest size of each dimension."""
    shape = [max(sizes) for sizes in zip(*[row.shape for row in rows], strict=True)]
    return torch.stack([_padded_to(shape, row, padding, side) for row in rows], dim)


def _padded_to(
    shape: Sequence[int], row: Tensor, padding: float, side: Literal["right", "left"]
) -> Tensor:
    added = [full - size for full, size in zip(shape, row.shape, strict=True)]
    pairs = [
        pair for each in reversed(added) for pair in ((each, 0) if side == "left" else (0, each))
    ]
    return torch.constant_pad_nd(row, pairs, padding) if any(added) else row


def row_mask(leaf: Tensor) -> Tensor:
    """Return a mask of shape (rows, longest row): true for elements that are not padding."""
    lengths = row_lengths(leaf)
    longest = int(lengths.max()) if lengths.numel() else 0
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def moved_rows(leaf: Tensor, fn: LeafFn) -> Tensor:
    """Apply a function that moves rows to a nested tensor.

    Raises:
        InvalidValue: if the result would have other than one batch dimension.
    """
    if leaf.layout is not torch.jagged or is_dynamo_compiling():
        return fn(leaf)
    return _taken(leaf, fn(_numbers(leaf)))


def moved_parts(leaf: Tensor, fn: PartsFn) -> Sequence[Tensor]:
    """Apply a function that divides rows to a nested tensor; see `moved_rows`."""
    if leaf.layout is not torch.jagged or is_dynamo_compiling():
        return fn(leaf)
    return [_taken(leaf, part) for part in fn(_numbers(leaf))]


def _numbers(leaf: Tensor) -> Tensor:
    return torch.arange(leaf.shape[0], device=leaf.device)


def _taken(leaf: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of a nested tensor with these numbers; one row is a plain tensor."""
    if not rows.ndim:
        return leaf[int(rows)]
    if rows.ndim > 1:
        raise InvalidValue(
            f"a nested tensor of the jagged layout has one batch dimension, and cannot have the "
            f"batch_size {tuple(rows.shape)}. Use `to_lazystack()`, or `to_padded_tensor()` first."
        )
    lengths, starts = row_lengths(leaf)[rows], offsets_of(leaf)[:-1][rows]
    offsets = _shared_offsets_of([leaf], rows, lengths, _TAKEN)
    first = torch.repeat_interleave(starts - offsets[:-1], lengths)
    where = first + torch.arange(first.shape[0], device=first.device)
    dim = _ragged_dim(leaf)
    return _jagged(_values(leaf).index_select(dim, where), offsets, dim)


class _Made:
    """Offsets that were made for a leaf, or for leaves that were joined.

    torch combines nested tensors only if they share the tensor of offsets. So the last one is kept,
    for the next leaf of the same operation.
    """

    __slots__ = ("offsets", "rows", "sources")

    def __init__(self, sources: list[weakref.ref[Tensor]], rows: Tensor, offsets: Tensor) -> None:
        self.sources = sources
        self.rows = rows
        self.offsets = offsets


_TAKEN: Final[list[_Made]] = []
_JOINED: Final[list[_Made]] = []


def _shared_offsets_of(
    leaves: Sequence[Tensor], rows: Tensor, lengths: Tensor, last: list[_Made]
) -> Tensor:
    """Return offsets for some lengths; the same tensor for leaves that shared theirs.

    Args:
        leaves: the leaves whose rows they are.
        rows: the numbers of the rows.
        lengths: the length of each.
        last: what was made last by the same operation.
    """
    sources = [part for leaf in leaves for part in _parts(leaf)]
    for made in last:
        known = [source() for source in made.sources]
        if (
            len(known) == len(sources)
            and all(map(operator.is_, known, sources))
            and made.rows.shape == rows.shape
            and torch.equal(made.rows, rows)
        ):
            return made.offsets
    offsets = _ends(lengths)
    last[:] = [_Made([weakref.ref(source) for source in sources], rows, offsets)]
    return offsets


def _parts(leaf: Tensor) -> list[Tensor]:
    """Return the tensors that say where rows start and end."""
    lengths = lengths_of(leaf)
    return [offsets_of(leaf)] if lengths is None else [offsets_of(leaf), lengths]


def flat_values(leaf: Tensor) -> Tensor:
    """Return all elements as a vector; of a nested tensor those of its rows."""
    return _values(_without_gaps(leaf)).reshape(-1) if is_ragged(leaf) else leaf.reshape(-1)


def reduced_rows(leaves: Sequence[Tensor], fn: LeafFn) -> Tensor:
    """Apply a reduction of a vector to the elements of each row of all leaves; rows come last."""
    every = [_without_gaps(leaf) if is_ragged(leaf) else leaf for leaf in leaves]
    if not every[0].shape[0]:
        dtype = torch.cat([flat_values(leaf)[:0] for leaf in every])
        return fn(dtype.new_ones(1)).unsqueeze(-1)[..., :0]
    rows = zip(*[leaf.unbind() for leaf in every], strict=True)
    return torch.stack([fn(torch.cat([part.reshape(-1) for part in row])) for row in rows], -1)


def mapped_rows(leaf: Tensor, fn: LeafFn, together: bool = False) -> Tensor:
    """Apply a function of a vector, which keeps its shape, to each row, or to all together."""
    leaf = _without_gaps(leaf)
    dim, values = _ragged_dim(leaf), _values(leaf)
    rows = [values] if together or not leaf.shape[0] else leaf.unbind()
    made = [fn(row.reshape(-1)).reshape(row.shape) for row in rows]
    return _jagged(torch.cat(made, dim), offsets_of(leaf), dim)


def chosen_rows(leaf: Tensor, mask: Tensor, other: Tensor | float) -> Tensor:
    """Return the rows of a nested tensor where a mask is true, and those of another elsewhere.

    Args:
        leaf: the nested tensor.
        mask: one boolean for each row, or for all.
        other: a nested tensor of as many rows, a tensor of one value for each row, or one value.
    """
    leaf = _without_gaps(leaf)
    mask = mask.to(leaf.device).expand(leaf.shape[0])
    if isinstance(other, Tensor) and other.is_nested:
        other = _without_gaps(other)
        if offsets_of(other) is not offsets_of(leaf):
            numbers = _numbers(leaf)
            both = joined_rows([leaf, other])
            return _taken(both, torch.where(mask, numbers, numbers + leaf.shape[0]))
        other = _values(other)
    elif isinstance(other, Tensor) and other.ndim:
        other = _beside_values(leaf, other.to(leaf.device).expand(leaf.shape[0]))
    chosen = torch.where(_beside_values(leaf, mask), _values(leaf), other)
    return _jagged(chosen, offsets_of(leaf), _ragged_dim(leaf))


def _beside_values(leaf: Tensor, rows: Tensor) -> Tensor:
    """Return one value for each row, repeated to be broadcast over the values of the rows."""
    dim, values = _ragged_dim(leaf), _values(leaf)
    repeated = torch.repeat_interleave(rows, row_lengths(leaf))
    return repeated.reshape([-1 if axis == dim else 1 for axis in range(values.ndim)])


def _without_gaps(leaf: Tensor) -> Tensor:
    """Return a nested tensor whose values are those of its rows, and no others."""
    offsets = offsets_of(leaf)
    lengths = lengths_of(leaf)
    whole = lengths is None and int(offsets[0]) == 0
    whole = whole and int(offsets[-1]) == _values(leaf).shape[_ragged_dim(leaf)]
    return leaf if whole else _taken(leaf, _numbers(leaf))


def joined_rows(leaves: Sequence[Tensor]) -> Tensor:
    """Concatenate nested tensors of the jagged layout along their rows."""
    dim = _ragged_dim(leaves[0])
    values = torch.cat([_values(_without_gaps(leaf)) for leaf in leaves], dim)
    lengths = [row_lengths(leaf) for leaf in leaves]
    counts = torch.tensor([len(each) for each in lengths])
    return _jagged(values, _shared_offsets_of(leaves, counts, torch.cat(lengths), _JOINED), dim)


def strided_parts(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Return all values of a nested tensor of the strided layout in a row, and the sizes of rows.

    The sizes are those of each row, one row each.
    """
    rows = [row.reshape(-1) for row in leaf.unbind()]
    values = torch.cat(rows) if rows else torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return values.detach(), sizes_of_rows(leaf).clone()


def strided_view(values: Tensor, sizes: Tensor) -> Tensor:
    """Return a nested tensor of the strided layout that shares the memory of its values.

    Args:
        values: the values of all rows, one behind the other, in one dimension.
        sizes: the sizes of each row, one row each; their products must sum to all values.
    """
    if not len(sizes):
        return torch.nested.nested_tensor([], dtype=values.dtype)
    counts = sizes.prod(1)
    behind = sizes.flip(1).cumprod(1).flip(1)[:, 1:]  # how far apart neighbours are
    strides = torch.cat([behind, sizes.new_ones(len(sizes), 1)], 1)[:, : sizes.shape[1]]
    starts = counts.cumsum(0) - counts
    return nested_view_from_buffer(values, sizes, strides, starts)


def offsets_of(leaf: Any) -> Tensor:
    """Return where the rows of a jagged tensor start, and the end of the last one."""
    offsets: Tensor = leaf.offsets()
    return offsets


def lengths_of(leaf: Any) -> Tensor | None:
    """Return the lengths of the rows of a jagged tensor with holes; `None` if there are none."""
    lengths: Tensor | None = leaf.lengths()
    return lengths


def _values(leaf: Tensor) -> Tensor:
    values: Tensor = leaf.values()
    return values


def _ends(lengths: Tensor) -> Tensor:
    """Return the offsets of rows that stand one behind the other."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _ragged_dim(leaf: Tensor) -> int:
    """Return the ragged dimension of the values, which have no batch dimension."""
    return ragged_dim(leaf) - 1


def _jagged(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
    made: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim + 1)
    return made


# Writes into leaves of classes that decide when they are written what they refuse.
#
# A leaf made of other tensors, as a `DTensor` is, refuses plain tensors beside it, or an index
# across its parts: one write of each kind is tried on a copy. A class of the user's may raise in
# the middle of a copy: the old values are kept, and written back. Other leaves may have been
# written by then.


class Refused:
    """A write that was refused.

    Attributes:
        position: which of the writes it is.
        reason: what the leaf said.
    """

    __slots__ = ("position", "reason")

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason


@contextmanager
def kept(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Iterator[None]:
    """Write the old values of the targets back if a copy into one of them raises.

    Nothing is kept unless a class of the user's takes part: torch itself was asked before.
    """
    old: list[tuple[Tensor, Tensor]] = []
    if any(map(_decides, (*targets, *sources))):
        old = [pair for pair in map(_old_values, targets) if pair is not None]
    prepare(zip(targets, sources, strict=True))
    try:
        yield
    except BaseException:
        with without_torch_function(), torch.no_grad():
            for plain, values in old:
                plain.copy_(values)
        raise


def _decides(leaf: Tensor) -> bool:
    """Return whether code of the class of a leaf runs when it is copied; wrappers are tried."""
    kind = type(leaf)
    if issubclass(kind, StandIn):
        return False  # it never raises, prepared
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    usual = (getattr(Tensor.__torch_function__, "__func__"), no_torch_function)  # noqa: B009  # stubs call it a function
    if function in usual and kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return kind.copy_ is not Tensor.copy_
    return not wraps_tensors(leaf)


def _old_values(target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a plain tensor in the memory of a leaf, and a copy; `None` where it has none."""
    try:
        with without_torch_function(), torch.no_grad():
            if not target.untyped_storage().data_ptr():
                return None
            plain = make_subclass(Tensor, target)
            return plain, plain.clone()
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def first_refused(
    write: Callable[..., object], targets: Sequence[Tensor], *columns: Sequence[object]
) -> Refused | None:
    """Return the first write that a leaf or operand made of other tensors refuses.

    One write of each kind is tried on a copy. A single kind is not: if the first write of all is
    refused, nothing has been written.

    Args:
        write: the function, called with a leaf and the value of each operand there.
        targets: the tensors that are written.
        *columns: for each operand, its value at each leaf.
    """
    kinds: dict[object, int] = {}
    for position, values in enumerate(zip(targets, *columns, strict=True)):
        kinds.setdefault(_kind_of(values), position)
    if len(kinds) < 2:
        return None
    kinds.pop(None, None)
    for position in kinds.values():
        try:
            with torch.no_grad():
                copy = targets[position].detach().clone()
                write(copy, *[column[position] for column in columns])
        except RuntimeError as error:
            return Refused(position, str(error).partition("\n")[0].rstrip("."))
    return None


def _kind_of(values: tuple[object, ...]) -> object:
    """Return what decides whether a write is refused; `None`: all values are plain."""
    if are_unwrapped(*values):
        return None
    return tuple(
        (value.dtype, value.shape, _parts_of_wrapped(value))
        for value in values
        if isinstance(value, Tensor)
    )


def _parts_of_wrapped(value: Tensor) -> object:
    """Return how a `DTensor` is spread; of others made of tensors, which one it is."""
    if not wraps_tensors(value):
        return None
    placements = getattr(value, "placements", None)
    return id(value) if placements is None else (getattr(value, "device_mesh", None), placements)


# Questions about tensors and dtypes, and tensors that get the shape of others from the left.
#
# Knows tensors; must not know entries or containers.


def expand_right(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a view of a tensor that is expanded to a shape, new dimensions on the right.

    Args:
        tensor: the tensor.
        shape: the shape, which must start with that of the tensor.

    Raises:
        ShapeMismatch: if it does not.

    Example:
        >>> import torch
        >>> from kd_core import expand_right
        >>> expand_right(torch.tensor([1, 2]), (2, 3))
        tensor([[1, 1, 1],
                [2, 2, 2]])
    """
    wanted, have = tuple(shape), tuple(tensor.shape)
    further = len(wanted) - len(have)
    fits = further >= 0
    for size, each in zip(have, wanted, strict=False):  # a generator takes a tenth of the call
        fits = fits and (size == each or size == 1)
    if not fits:
        raise ShapeMismatch(
            f"a tensor of shape {shape_text(have)} cannot be expanded on the right to "
            f"{shape_text(wanted)}: its dimensions must be the first ones of that shape, or 1."
        )
    aligned = tensor.reshape(have + (1,) * further) if further else tensor
    return aligned.expand(wanted)


def expand_as_right(tensor: Tensor, dest: Tensor) -> Tensor:
    """Return a view of a tensor that is expanded to the shape of another; see `expand_right`.

    Args:
        tensor: the tensor.
        dest: the other tensor, or a container.

    Raises:
        ShapeMismatch: if its shape does not start with that of the tensor.

    Example:
        >>> import torch
        >>> from kd_core import expand_as_right
        >>> expand_as_right(torch.zeros(2), torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    return expand_right(tensor, dest.shape)


def is_floating(*args: Tensor | torch.dtype) -> bool:
    """Return whether all tensors or dtypes are of floating point.

    Example:
        >>> import torch
        >>> from kd_core import is_floating
        >>> is_floating(torch.zeros(2), torch.bfloat16), is_floating(torch.int8)
        (True, False)
    """
    return _all(args, lambda dtype: dtype.is_floating_point)


def is_inexact(*args: Tensor | torch.dtype) -> bool:
    """Return whether all tensors or dtypes are of floating point or complex.

    Example:
        >>> import torch
        >>> from kd_core import is_inexact
        >>> is_inexact(torch.complex64)
        True
    """
    return _all(args, lambda dtype: dtype.is_floating_point or dtype.is_complex)


def is_bool(*args: Tensor | torch.dtype) -> bool:
    """Return whether all tensors or dtypes are boolean.

    Example:
        >>> import torch
        >>> from kd_core import is_bool
        >>> is_bool(torch.zeros(2) == 0)
        True
    """
    return _all(args, lambda dtype: dtype is torch.bool)


def is_integer(*args: Tensor | torch.dtype) -> bool:
    """Return whether all tensors or dtypes are of integers; booleans are not.

    Example:
        >>> import torch
        >>> from kd_core import is_integer
        >>> is_integer(torch.arange(2)), is_integer(torch.bool)
        (True, False)
    """
    return _all(args, _is_integer)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _all(args: Sequence[object], question: Callable[[torch.dtype], bool]) -> bool:
    return all(question(_dtype_of(arg)) for arg in args)


def _dtype_of(value: object) -> torch.dtype:
    dtype = value if isinstance(value, torch.dtype) else getattr(value, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise wrong_type("each argument", "a tensor or a dtype", value)
    return dtype


# Tensors without a shape: nested tensors of the layout `torch.strided`.
#
# torch raises an internal error wherever their shape is read. They fit containers of at most one
# batch dimension, that of their rows. Loops do not ask for them; what fails on one asks here why.


def is_shapeless(leaf: Tensor) -> bool:
    """Return whether the shape of a tensor cannot be read."""
    return leaf.is_nested and leaf.layout is torch.strided


def rows_shape(leaf: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; of one without a shape, that of its rows."""
    return (leaf.size(0),) if is_shapeless(leaf) else leaf.shape


def shapes_of(leaves: Sequence[Tensor]) -> list[tuple[int, ...]] | None:
    """Return the shapes of tensors; `None` if one of them has no shape."""
    try:
        return [leaf.shape for leaf in leaves]
    except RuntimeError:
        return None


def have_same_rows(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors without a shape have rows of the same sizes."""
    if not (is_shapeless(one) and is_shapeless(other)):
        return False
    return torch.equal(sizes_of_rows(one), sizes_of_rows(other))


def explain_shapeless(error: Exception | None, what: str, *tensors: Tensor) -> None:
    """Raise the clear error if the one of torch is that a tensor has no shape.

    Raises:
        InvalidValue: if one of the tensors has none.
    """
    if any(map(is_shapeless, tensors)):
        raise without_shape(what) from error


def without_shape(what: str) -> InvalidValue:
    """Build the error for a tensor without a shape where one is needed.

    Args:
        what: the value, with its key.
    """
    return InvalidValue(
        f"{what} must have a shape, got a nested tensor of the layout torch.strided, which has "
        "none. Build it with `layout=torch.jagged`, or pad it with "
        "`torch.nested.to_padded_tensor`."
    )


MANY: Final = 24
"""From this number of entries on, separate passes to check and to copy them are faster than one."""


def all_fit(source: dict[str, object], desc: Descriptor) -> bool:
    """Return whether all keys are plain strings and all values plain tensors that fit `desc`.

    `False` means that the slow path must check them: values may be subclasses of tensors, nodes or
    numbers.
    """
    if desc.device is not None and not _all_on_device(source, desc):
        return False
    if desc.ndim != 1:
        return _all_fit_in(source, desc)
    first = desc.size[0]  # dynamo does not compare a named size with a symbolic one
    try:
        for key, value in source.items():
            if type(value) is not Tensor or type(key) is not str:
                return False
            shape = value.shape  # dynamo catches no `IndexError` of one without dimensions
            if not shape or shape[0] != first:
                return False
    except RuntimeError:  # a tensor without a shape
        return False
    return True


def _all_fit_in(source: dict[str, object], desc: Descriptor) -> bool:
    """Compute `all_fit` for any number of batch dimensions."""
    batch, ndim = desc.size, desc.ndim
    try:
        for key, value in source.items():
            if type(value) is not Tensor or type(key) is not str:
                return False
            if ndim and value.shape[:ndim] != batch:
                return False
    except RuntimeError:  # a tensor without a shape
        return False
    return True


def _all_on_device(source: dict[str, object], desc: Descriptor) -> bool:
    """Return whether all values of a dict are plain tensors on the device of `desc`."""
    device, on_cpu = desc.device, desc.on_cpu
    for value in source.values():
        if type(value) is not Tensor:
            return False
        if not (value.is_cpu if on_cpu else value.device == device):
            return False
    return True


def leaf_fits(value: Tensor, desc: Descriptor) -> bool:
    """Return whether the shape of a tensor starts with the batch size."""
    ndim = desc.ndim
    try:
        if ndim == 1:
            shape = value.shape  # dynamo catches no `IndexError` of one without dimensions
            return shape[0] == desc.size[0] if shape else False
        return ndim == 0 or value.shape[:ndim] == desc.size
    except RuntimeError:
        if is_shapeless(value):
            return desc.ndim == 1 and value.size(0) == desc.size[0]
        raise


def map_each(
    entries: Entries, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None
) -> dict[str, Entry]:
    """Apply `fn` to each leaf, those of nodes included."""
    return {
        key: fn(value)
        if type(value) is Tensor
        else value._kd_map_each(fn, batch, memo)
        if isinstance(value, Node)
        else mapped(value, fn, batch)
        for key, value in entries.items()
    }


def mapped(leaf: Tensor, fn: LeafFn, batch: BatchFn | None) -> Tensor:
    """Apply `fn` to a leaf that may be a nested tensor, whose rows torch does not move."""
    if batch is None or not leaf.is_nested or isinstance(batch, (Reduced, Padded)):
        return fn(leaf)

    return moved_rows(leaf, fn)


def map_to_parts(
    entries: Entries, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo
) -> list[dict[str, Entry]]:
    """Apply `fn`, from a leaf to its parts, and return the entries of each part."""
    parts: list[dict[str, Any]] = [{} for _ in batches]
    for key, value in entries.items():
        dealt: Sequence[Entry]
        if type(value) is Tensor:
            dealt = fn(value)
        elif isinstance(value, Node):
            dealt = value._kd_map_to_parts(fn, batches, memo)
        else:
            dealt = _parts_of(value, fn)
        for part, piece in zip(parts, dealt):  # noqa: B905  # `strict` is slower
            part[key] = piece
    return parts


def _parts_of(leaf: Tensor, fn: PartsFn) -> Sequence[Tensor]:
    if not leaf.is_nested:
        return fn(leaf)

    return moved_parts(leaf, fn)


def collect(entries: Entries, leaves: list[Tensor]) -> None:
    """Append all leaves, depth first, in insertion order."""
    for value in entries.values():
        if type(value) is Tensor or not isinstance(value, Node):
            leaves.append(value)
        else:
            value._kd_collect(leaves)


def rebuild(entries: Entries, leaves: Iterator[Tensor]) -> dict[str, Entry]:
    """Replace the leaves that `collect` lists by new ones, in the same order."""
    rebuilt: dict[str, Entry] = {}  # a loop, because a comprehension costs a frame
    for key, value in entries.items():
        if type(value) is Tensor or not isinstance(value, Node):
            rebuilt[key] = next(leaves)
        else:
            rebuilt[key] = value._kd_rebuild(leaves)
    return rebuilt


def collect_pairs(
    mine: Entries,
    theirs: Mapping[str, Entry],
    left: list[Tensor],
    right: list[Tensor],
    path: tuple[str, ...],
) -> None:
    """Append the leaves of two containers, matched by key.

    Raises:
        KeySetMismatch: if one has a key that the other lacks, or a leaf where the other has none.
    """
    if len(mine) != len(theirs):
        raise key_sets_differ(mine, theirs, path)
    for key, value in mine.items():
        other = theirs.get(key)
        if type(value) is Tensor and type(other) is Tensor:
            left.append(value)
            right.append(other)
        elif other is None:
            raise key_sets_differ(mine, theirs, path)
        elif isinstance(value, Node):
            value._kd_collect_pair(other, left, right, (*path, key))
        elif isinstance(other, Tensor):
            left.append(value)
            right.append(other)
        else:
            raise _kinds_differ(key, value, other, path)


def zip_each(
    mine: Entries,
    theirs: Mapping[str, Entry],
    fn: Callable[[Tensor, Tensor], Tensor],
    path: tuple[str, ...],
) -> dict[str, Entry]:
    """Apply `fn` to the leaves of two containers, matched by key as `collect_pairs` does.

    Raises:
        KeySetMismatch: if one has a key that the other lacks, or a leaf where the other has none.
    """
    if len(mine) != len(theirs):
        raise key_sets_differ(mine, theirs, path)
    entries: dict[str, Entry] = {}
    for key, value in mine.items():
        other = theirs.get(key)
        if type(value) is Tensor and type(other) is Tensor:
            entries[key] = fn(value, other)
        elif other is None:
            raise key_sets_differ(mine, theirs, path)
        elif isinstance(value, Node):
            entries[key] = value._kd_zip_each(other, fn, (*path, key))
        elif isinstance(other, Tensor):
            entries[key] = fn(value, other)
        else:
            raise _kinds_differ(key, value, other, path)
    return entries


def all_plain(entries: Entries) -> bool:
    """Return whether a dense tree surely has only plain tensors: it has at most two levels.

    This is checked before the leaves are looked at one by one: "math" in the benchmarks.
    """
    for value in entries.values():
        if type(value) is not Tensor and getattr(value, "_kd_nested", True):
            return False
    return True


def few_leaves(entries: Entries) -> bool:
    """Return whether a dense tree has too few leaves for a foreach kernel.

    This is checked before the leaves are collected, which is slow for a few leaves. `False` may
    also mean that the tree was not examined.
    """
    if type(entries) is not dict or len(entries) >= FOREACH_FROM:
        return False
    count = 0
    for value in entries.values():
        if type(value) is Tensor:
            if not count and value.is_cuda:
                return False
            count += 1
        elif getattr(value, "_kd_nested", True):  # another kind of leaf, or deeper than one level
            return False
        else:
            count += len(value._kd_entries)
    return count < FOREACH_FROM


def key_sets_differ(mine: Entries, theirs: Entries, path: tuple[str, ...]) -> KeySetMismatch:
    """Build the error for two containers whose keys differ: it lists both differences."""
    where = f" below {format_key(path)}" if path else ""
    return different_keys(mine, theirs, ("the first container", "the second"), where)


def _kinds_differ(key: str, value: Entry, other: Entry, path: tuple[str, ...]) -> KeySetMismatch:
    return KeySetMismatch(
        f"entry {format_key((*path, key))} must be a leaf in both containers or a container in "
        f"both, got {a_type(value)} and {a_type(other)}."
    )


def unwrapped(entry: object) -> object:
    """Return the value of non-tensor data, and anything else as it is."""
    return entry._kd_item() if is_node(entry) else entry


def same_data(one: object, other: object) -> bool:
    """Return whether two non-tensor values are equal; arrays are if all elements are.

    NaN is equal to NaN here, also inside lists, tuples and dicts: it is the same value.
    """
    if one is other or equal_data(one, other):
        return True
    try:
        return _same_but_for_nan(one, other)
    except (TypeError, ValueError, RuntimeError):  # they cannot be compared
        return False


def equal_data(one: object, other: object) -> bool:
    """Return whether `==` tells that two non-tensor values are equal, as for NaN it does not."""
    try:
        if getattr(one, "shape", None) != getattr(other, "shape", None):
            return False
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except (TypeError, ValueError, RuntimeError):  # they cannot be compared
        return False


def _same_but_for_nan(one: object, other: object) -> bool:
    """Return whether two values that differ do so only because NaN is not equal to itself."""
    if isinstance(one, float) and isinstance(other, float):
        return bool(one != one and other != other)  # numpy has truth values of its own
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_data, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_data(one[key], other[key]) for key in one)
    return False


def find_entry(entries: Entries, path: tuple[str, ...]) -> Entry | None:
    """Return the entry at a path, or `None` if it is missing or the path holds tuples."""
    level: Mapping[str, Any] = entries
    try:
        if len(path) == 2:  # the fast path for most nested keys
            first, last = path
            level = level[first]._kd_entries
            return level.get(last)
        for part in path[:-1]:
            level = level[part]._kd_entries
        return level.get(path[-1])
    except (KeyError, AttributeError, TypeError):  # missing, a leaf, or not a key
        return None


def refuse_leaf(entries: Entries, path: tuple[str, ...]) -> None:
    """Raise the error for a path that is missing because it goes on below a tensor."""
    level: Entries | None = entries
    for depth, part in enumerate(path[:-1], 1):
        entry = None if level is None else kinds_by_key(level).get(part)
        if isinstance(entry, Tensor):
            raise walk_error(path, depth, entry)
        level = getattr(entry, "_kd_entries", None)


def has_entry(entries: Entries, path: tuple[str, ...]) -> bool:
    """Return whether there is an entry at a path, without reading it."""
    level: Entries | None = entries
    for part in path[:-1]:
        if level is None or part not in level:
            return False
        if type(level) is not dict and isinstance(kinds_by_key(level)[part], Tensor):
            return False
        level = getattr(level[part], "_kd_entries", None)
    return level is not None and path[-1] in level


def kinds_of(entries: Entries) -> Iterable[tuple[str, Entry]]:
    """Return the keys and, for each, an entry of the same kind: lazy stacks do not stack for it."""
    if type(entries) is dict:
        return entries.items()
    kinds = getattr(entries, "_kinds", None)
    return entries.items() if kinds is None else kinds()


def kinds_by_key(entries: Entries) -> Entries:
    """Return what `kinds_of` returns as a mapping."""
    kinds = getattr(entries, "_kinds", None)
    return entries if kinds is None else dict(kinds())


def entries_of(node: Node) -> Entries | None:
    """Return the entries of a node that is a container, `None` for data."""
    return getattr(node, "_kd_entries", None)


def walk_error(path: tuple[str, ...], depth: int, leaf: object) -> Exception:
    """Build the error for a path that continues below a leaf found at `depth`."""
    kind = "tensor" if isinstance(leaf, Tensor) else "non-tensor value"
    return walks_through_leaf(format_key(path), format_key(path[:depth]), kind)


def missing_key(
    path: tuple[str, ...], depth: int, level: Entries, top: Entries, above: tuple[str, ...] = ()
) -> KeyNotFound:
    """Build the error for a path whose part at `depth` is missing.

    Args:
        path: the whole path.
        depth: the number of parts that were found.
        level: the entries where the next part is missing.
        top: the entries whose paths may have been meant.
        above: the path of `top`.
    """
    where = f" below {format_key(path[:depth])}" if depth else ""
    text = f"key {format_key(path)} not found; available keys{where}: {listed(level)}."
    described: Callable[[], dict[str, str]] | None = getattr(level, "_partial", None)
    partial = None if described is None else described().get(path[depth])
    if partial is not None:
        return KeyNotFound(
            f"{text} A lazy stack shows the keys that all members have, and this one is a "
            f"{partial}. Read it from a member, as in `stack[0]`."
        )
    near = nearest_key(path, _paths(top, above))
    if near is not None:
        text += f" Did you mean {format_key(near)}?"
    return KeyNotFound(text)


def name_of_leaf(entries: Entries, leaf: Tensor) -> tuple[str, ...] | None:
    """Return the path of this tensor, compared by identity, for messages."""
    for key, value in kinds_of(entries):
        if tensor_of(value) is leaf:
            return (key,)
        inner = None if isinstance(value, Tensor) else entries_of(value)
        below = None if inner is None else name_of_leaf(inner, leaf)
        if below is not None:
            return (key, *below)
    return None


def finder(entries: Entries, leaf: Tensor) -> Callable[[], tuple[str, ...]]:
    """Return a function that finds the path of a leaf; it is called for messages only."""
    return lambda: name_of_leaf(entries, leaf) or ("...",)


def _paths(entries: Entries, prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in kinds_of(entries):
        yield (*prefix, key)
        inner = None if isinstance(value, Tensor) else entries_of(value)
        if inner is not None:
            yield from _paths(inner, (*prefix, key))


def version_of(entry: object) -> int:
    """Return a number that grows when a tensor is written; -1 where torch does not count."""
    if not isinstance(entry, Tensor) or entry.is_inference():
        return -1
    return entry._version


def common_batch(shapes: list[tuple[int, ...]], most: int | None = None) -> tuple[int, ...]:
    """Return the leading dimensions that all shapes share, at most `most` of them."""
    if not shapes:
        return ()
    shared = tuple(shapes[0])
    if most is not None:
        shared = shared[:most]
    for shape in shapes:
        while shape[: len(shared)] != shared:
            shared = shared[:-1]
    return shared


class Selection:
    """A function of two leaves that takes each row from one of them.

    Attributes:
        of_member: a function from a stacked dimension and a position in it to the selection among
            the rows of that member; `None`: only stacked leaves can be chosen from.
    """

    __slots__ = ("_choose", "of_member")

    def __init__(
        self,
        choose: Callable[[Tensor, Tensor], Tensor],
        of_member: Callable[[int, int], Selection] | None = None,
    ) -> None:
        self._choose = choose
        self.of_member = of_member

    def __call__(self, leaf: Tensor, new: Tensor) -> Tensor:
        return self._choose(leaf, new)
