"""Functions over the rows of containers: padding, duplicates, groups; merging containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_origin, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence as pad_tensors

from kd_core._base import TensorDictBase
from kd_core._containers.field_declarations import hints_of
from kd_core._containers.tensordict import TensorDict
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KeyCollision,
    ShapeMismatch,
    UnknownField,
    shape_text,
    wrong_type,
)
from kd_core._keys import format_key, path_of, several
from kd_core._leaves.loops import padded_stack
from kd_core._naming import also_named
from kd_core._nodes import as_read, is_data, rows_of_data
from kd_core._ops.binary import written_to
from kd_core._ops.indexing import check_mask
from kd_core._ops.joining import batches_differ, first_of, rows_of, stack
from kd_core._protocol import engine, same_batch
from kd_core._shapes import wrap_dim

if TYPE_CHECKING:
    from kd_core._types import NestedKey


C = TypeVar("C", bound=TensorDictBase)
T = TypeVar("T", bound=TensorDictBase)


def pad(
    tensordict: C,
    pad_size: Sequence[int],
    value: float = 0.0,
    inplace: bool = False,
    safe: bool = True,
) -> C:
    """Add rows before and after those along each batch dimension: `tensordict.pad`.

    Args:
        tensordict: the container to pad.
        pad_size: the numbers of rows to add before and after, for the first batch dimension, then
            for the second, and so on; negative numbers remove rows.
        value: the value of the new rows.
        inplace: change the container instead of making a new one.
        safe: nothing: every call checks its sizes.

    Raises:
        InvalidValue: if the numbers are not pairs, or there are too many.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, pad
        >>> pad(TensorDict({"a": torch.ones(2)}, [2]), [1, 2])["a"]
        tensor([0., 1., 1., 0., 0.])
    """
    return tensordict._kd_engine.pad(tensordict, pad_size, value, inplace=inplace)


@also_named(sequences="list_of_tensordicts")
def pad_sequence(
    list_of_tensordicts: Sequence[C],
    pad_dim: int = 0,
    padding_value: float = 0.0,
    out: C | None = None,
    return_mask: bool | str = False,
    padding_side: Literal["right", "left"] = "right",
) -> C:
    """Stack containers of different lengths, the shorter ones padded at one side.

    Containers of one batch size, as data sets give them, may be padded behind it, leaf by leaf:
    each leaf to its own longest. A leaf that lacks dimension `pad_dim` is stacked as it is.

    Args:
        list_of_tensordicts: containers of the same keys, whose batch sizes differ in `pad_dim` at
            most.
        pad_dim: the batch dimension that is padded; of containers of one batch size, the dimension
            of each leaf.
        padding_value: what the new rows hold.
        return_mask: also say which rows are real: a container of masks, one for each entry, at the
            key `"masks"`, or at the key given.
        out: a container into whose leaves the result is written.
        padding_side: where the new rows are: behind the real ones ("right"), or before ("left").

    Raises:
        ShapeMismatch: if batch sizes differ elsewhere.
        KeyCollision: if there is an entry at the key of the masks.
        InvalidArgument: if a tensor class has no field for the masks, or one that is declared to
            hold something else. Such a field is `masks: TensorDict | None = None`.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, pad_sequence
        >>> parts = [TensorDict({"a": torch.ones(n)}, [n]) for n in (1, 2)]
        >>> pad_sequence(parts, return_mask=True)["masks", "a"]
        tensor([[ True, False],
                [ True,  True]])
    """
    first = first_of(list_of_tensordicts, "pad_sequence")
    for number, each in enumerate(list_of_tensordicts):
        if len(each._kd_desc.batch) != first._kd_desc.ndim:
            raise batches_differ(
                first._kd_desc.batch, each._kd_desc.batch, number, "pad_sequence", ()
            )
    _check_side(padding_side)
    left = padding_side == "left"
    ndim = first._kd_desc.ndim
    alike = len({each._kd_desc.size for each in list_of_tensordicts}) == 1
    if alike and not 0 <= pad_dim < ndim:
        return written_to(
            out, _pad_leaves(list_of_tensordicts, pad_dim, padding_value, return_mask, left)
        )
    at = wrap_dim(pad_dim, ndim)
    lengths = [each._kd_desc.batch[at] for each in list_of_tensordicts]
    longest = max(lengths)
    padded = []
    for each, length in zip(list_of_tensordicts, lengths, strict=True):
        rows = (longest - length, 0) if left else (0, longest - length)
        padded.append(pad(each, (*(0, 0) * at, *rows), padding_value) if any(rows) else each)
    result = stack(padded)
    if return_mask is not False:
        result = _with_masks(result, _masks(result, lengths, at + 1, left), return_mask)
    return written_to(out, result)


def unpad_sequence(
    padded: C, mask: NestedKey | Tensor | TensorDictBase | None = None, pad_dim: int = 0
) -> list[C]:
    """Return the containers that `pad_sequence` stacked, without the padding.

    Args:
        padded: a stack along the first batch dimension.
        mask: which rows are real: the key of the masks, `"masks"` by default, or the masks
            themselves: a container as `pad_sequence` adds it, or one tensor for all entries.
        pad_dim: the dimension of each sequence that was padded.

    Raises:
        KeyNotFound: if there is no entry at the key of the masks.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, pad_sequence, unpad_sequence
        >>> parts = [TensorDict({"a": torch.ones(n)}, [n]) for n in (1, 3)]
        >>> padded = pad_sequence(parts, return_mask=True)
        >>> [part["a"].tolist() for part in unpad_sequence(padded)]
        [[1.0], [1.0, 1.0, 1.0]]
    """
    key = "masks" if mask is None else mask
    if isinstance(key, (Tensor, TensorDictBase)):
        masks: object = key
    else:
        path = path_of(key)
        masks = padded._kd_read(path)
        padded = padded.exclude(path)
    if padded._kd_desc.ndim > 1:
        return _unpad_rows(padded, masks, pad_dim)
    return _unpad_leaves(padded, masks, pad_dim)


def _unpad_rows(padded: C, masks: object, pad_dim: int) -> list[C]:
    """Keep the real rows of each sequence along a batch dimension."""
    if isinstance(masks, TensorDictBase):
        masks = next(iter(masks._kd_engine.values(masks, True, True)), None)
    mask = check_mask(masks)
    at = wrap_dim(pad_dim, padded._kd_desc.ndim - 1)
    found: list[C] = []
    for row, real in zip(padded.unbind(0), mask.unbind(0), strict=True):
        others = [dim for dim in range(real.ndim) if dim != at] if real.ndim > 1 else []
        kept = real.any(others) if others else real
        found.append(row.index_select(at, kept.nonzero().view(-1)))
    return found


def _unpad_leaves(padded: C, masks: object, dim: int) -> list[C]:
    """Keep the real values of each leaf of sequences without a batch."""

    def real(name: NestedKey, leaf: Tensor, number: int) -> Tensor:
        mask = masks._kd_engine.get(masks, name) if isinstance(masks, TensorDictBase) else masks
        if not isinstance(mask, Tensor) or mask.ndim - 1 > leaf.ndim or mask.ndim < 2:
            return leaf
        row = check_mask(mask)[number]
        kept = row.any(tuple(range(row.ndim - 1))) if row.ndim > 1 else row
        return leaf.index_select(dim, kept.nonzero().view(-1))

    return [
        row._kd_engine.named_apply(
            row,
            lambda name, leaf, number=number: real(name, leaf, number),
            nested_keys=True,
            batch_size=(),
        )
        for number, row in enumerate(padded.unbind(0))
    ]


def _with_masks(result: C, masks: TensorDictBase, return_mask: bool | str) -> C:
    key = "masks" if return_mask is True else str(return_mask)
    if key in result._kd_entries:
        raise KeyCollision(
            f"key {format_key(key)} exists already. Pass another key as `return_mask`."
        )
    _check_field("return_mask", result, (key,))
    try:
        return result._kd_engine.set(result, key, masks)
    except UnknownField:
        raise _no_field("return_mask", result, (key,)) from None


def _no_field(argument: str, result: TensorDictBase, path: tuple[str, ...]) -> InvalidArgument:
    """Return the error of a tensor class without a field for masks."""
    return InvalidArgument(
        f"`{argument}` expected `{type(result).__name__}` to have a field {format_key(path)} for "
        f"the masks, got none. Declare one, as in `{path[-1]}: TensorDict | None = None`, or pad "
        "what `to_tensordict()` returns."
    )


def _pad_leaves(
    sequences: Sequence[C], dim: int, value: float, return_mask: bool | str, left: bool
) -> C:
    """Stack containers of one batch size, each leaf padded to its own longest in a dimension."""
    sequences = [each._kd_engine.contiguous(each) for each in sequences]  # not member by member
    longest: dict[NestedKey, int] = {}
    for each in sequences:
        for key, leaf in each._kd_engine.items(each, True, True):
            if -leaf.ndim <= dim < leaf.ndim:
                longest[key] = max(longest.get(key, 0), leaf.shape[dim])

    def padded(leaf: Tensor, size: int, fill: float, at: int = dim) -> Tensor:
        missing = size - leaf.shape[at]
        rows = [missing, 0] if left else [0, missing]
        after = leaf.ndim - 1 - at % leaf.ndim
        return torch.constant_pad_nd(leaf, [0, 0] * after + rows, fill)

    def values(key: NestedKey, leaf: Tensor) -> Tensor:
        has_dim = -leaf.ndim <= dim < leaf.ndim
        return padded(leaf, longest[key], value) if has_dim else leaf

    def mask(key: NestedKey, leaf: Tensor) -> Tensor:
        real, batch = leaf.new_ones((), dtype=torch.bool), leaf.shape[: sequences[0]._kd_desc.ndim]
        if not -leaf.ndim <= dim < leaf.ndim:
            return real.expand(batch)
        return padded(real.expand(*batch, leaf.shape[dim]), longest[key], False, -1)

    result = stack(
        [each._kd_engine.named_apply(each, values, nested_keys=True) for each in sequences]
    )
    if return_mask is False:
        return result
    masks = stack([each._kd_engine.named_apply(each, mask, nested_keys=True) for each in sequences])
    return _with_masks(result, masks.filter_non_tensor_data(), return_mask)


def _masks(container: TensorDictBase, lengths: list[int], dim: int, left: bool) -> TensorDictBase:
    """Return a container with one mask for each leaf: true for the rows that are not padding."""
    batch = container._kd_desc.batch
    rows = torch.arange(batch[dim], device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
    rows = rows.flip(1) if left else rows
    shape = [1] * len(batch)
    shape[0], shape[dim] = batch[0], batch[dim]
    mask = rows.reshape(shape).expand(batch)
    alone = container._kd_engine.filter_non_tensor_data(container)
    return alone._kd_map_each(lambda leaf: mask.to(leaf.device), same_batch)


# Stacking samples of which some entries differ in length.


def collate(
    batch: Sequence[C] | C,
    *,
    pad_keys: Mapping[NestedKey, float] | Iterable[NestedKey] = (),
    nested_keys: Iterable[NestedKey] = (),
    mask_key: NestedKey | None = None,
    padding_side: Literal["right", "left"] = "right",
) -> C:
    """Stack samples, for `DataLoader(collate_fn=...)`; some entries may differ in length.

    Samples of a tensor class become one of that class. It has a field for the masks, as it has for
    any other entry: one that may hold a container, as `mask: TensorDict | None = None`.

    Args:
        batch: containers of the same keys, without a batch dimension; or one that holds them as
            rows, as a `DataLoader` passes them to `collate_fn`.
        pad_keys: the entries that are padded, with the value that stands for what is missing;
            without values, 0. Each dimension in which the samples differ is padded.
        nested_keys: the entries that become nested tensors of the jagged layout.
        mask_key: where to store which values are real: a `TensorDict` of a mask for each padded
            entry, along its first dimension. That of pairs, as in a map of contacts, is
            `mask[:, :, None] & mask[:, None, :]`.
        padding_side: where an entry is padded: behind its values ("right"), or before ("left"), as
            prompts are from which a language model goes on.

    Raises:
        KeyNotFound: if a sample lacks a key.
        InvalidValue: if the side is neither.
        ShapeMismatch: if the samples of a padded entry have different numbers of dimensions.
        KeyCollision: if there is an entry at `mask_key`.
        InvalidArgument: if a key is padded and nested, or a tensor class has no field for the
            masks, or one that is declared to hold something else.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, collate
        >>> samples = [TensorDict({"x": torch.ones(n), "y": 1.0 * n}) for n in (1, 2)]
        >>> got = collate(samples, pad_keys={"x": -1.0}, mask_key="mask")
        >>> got["x"].tolist(), got["y"].tolist(), got["mask", "x"].tolist()
        ([[1.0, -1.0], [1.0, 1.0]], [1.0, 2.0], [[True, False], [True, True]])
        >>> from kd_core import TensorClass
        >>> class Prompt(TensorClass):
        ...     tokens: torch.Tensor
        ...     mask: TensorDict | None = None
        >>> prompts = [Prompt(tokens=torch.arange(n)) for n in (1, 3)]
        >>> padded = collate(prompts, pad_keys=["tokens"], mask_key="mask")
        >>> type(padded).__name__, padded.mask["tokens"].sum(-1).tolist()
        ('Prompt', [1, 3])
    """
    if isinstance(batch, TensorDictBase):  # a `DataLoader` fetches the rows of a batch at once
        batch = rows_of(batch, "collate")
    first_of(batch, "collate")
    _check_side(padding_side)
    several(pad_keys, "`pad_keys`")
    values = pad_keys if isinstance(pad_keys, Mapping) else dict.fromkeys(pad_keys, 0.0)
    padded = {path_of(key): value for key, value in values.items()}
    nested = [path_of(key) for key in several(nested_keys, "`nested_keys`")]
    both = [key for key in nested if key in padded]
    if both:
        raise InvalidArgument(
            f"entry {format_key(both[0])} is in `pad_keys` and in `nested_keys`. Choose one."
        )
    columns = {key: _column(batch, key) for key in (*padded, *nested)}
    result = stack([each._kd_engine.exclude(each, *columns) for each in batch])
    masks: dict[tuple[str, ...], Tensor] = {}
    for key, value in padded.items():
        column = columns[key]
        result._kd_engine.set(result, key, _padded_column(key, column, value, padding_side))
        real = [leaf.new_ones(len(leaf)).bool() for leaf in column]
        masks[key] = pad_tensors(real, True, padding_side=padding_side)
    for key in nested:
        result._kd_engine.set(
            result, key, torch.nested.as_nested_tensor(columns[key], layout=torch.jagged)
        )
    if mask_key is not None and masks:
        if mask_key in result:
            raise KeyCollision(f"key {format_key(mask_key)} exists already. Choose another one.")
        path = path_of(mask_key)
        _check_field("mask_key", result, path)
        desc = result._kd_desc
        container = TensorDict(masks, desc.batch, device=desc.device)
        try:
            result._kd_engine.set(result, path, container)
        except UnknownField:
            raise _no_field("mask_key", result, path) from None
    return result


def _check_field(argument: str, result: TensorDictBase, path: tuple[str, ...]) -> None:
    """Refuse a field of a tensor class that is declared to hold something else than containers.

    Raises:
        InvalidArgument: if it is.
    """
    level: object = result
    for part in path:
        if not isinstance(level, TensorDictBase):
            return  # the write says so
        cls = level._kd_tensor_class
        if part in level._kd_entries:
            level = level._kd_entries[part]
            continue
        if cls is not None and not any(map(_takes_container, hints_of(cls, part))):
            raise InvalidArgument(
                f"`{argument}` expected field {format_key(part)} of `{cls.__name__}` to be "
                f"declared for a container of masks, got a declaration of another type. Declare it "
                f"as in `{part}: TensorDict | None = None`, or choose another field."
            )
        return


def _takes_container(hint: object) -> bool:
    """Return whether a declared type may be that of a `TensorDict`, as far as Python can tell."""
    kind = get_origin(hint) or hint
    if kind is Any or not isinstance(kind, type):
        return True
    try:
        return issubclass(TensorDict, kind)
    except TypeError:  # of a protocol
        return True


def _padded_column(
    key: tuple[str, ...], column: list[Tensor], value: float, side: Literal["right", "left"]
) -> Tensor:
    """Stack the samples of an entry, padded in each dimension in which they differ."""
    if len({leaf.shape[1:] for leaf in column}) == 1:
        return pad_tensors(column, True, value, side)
    for number, leaf in enumerate(column):
        if leaf.ndim != column[0].ndim:
            raise ShapeMismatch(
                f"entry {format_key(key)} cannot be padded: its shape is {tuple(leaf.shape)} in "
                f"sample {number} and {tuple(column[0].shape)} in sample 0. Give all samples the "
                "same number of dimensions."
            )
    return padded_stack(column, value, side)


def _check_side(side: str) -> None:
    if side not in ("right", "left"):
        raise InvalidValue(f'`padding_side` must be "right" or "left", got {side!r}.')


def _column(batch: Sequence[TensorDictBase], key: tuple[str, ...]) -> list[Tensor]:
    """Return the leaf at a key of each sample."""
    column: list[Tensor] = []
    for number, each in enumerate(batch):
        leaf = each._kd_read(key)
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            what = f"entry {format_key(key)} of sample {number}"
            raise wrong_type(what, "a tensor with a dimension to pad", leaf)
        column.append(leaf)
    return column


# Rows of a container that are in another one, and rows without their duplicates.


def isin(input: TensorDictBase, reference: TensorDictBase, key: NestedKey, dim: int = 0) -> Tensor:
    """Return which rows of a container have an entry that is a row of a reference.

    Args:
        input: the container whose rows are looked up.
        reference: the container in which they are looked up.
        key: the entry that is compared; all of its other dimensions belong to a row.
        dim: the batch dimension of the rows.

    Returns:
        One boolean for each row.

    Raises:
        ShapeMismatch: if rows of the two have different shapes.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, isin
        >>> td = TensorDict({"id": torch.tensor([[1, 2], [3, 4]])}, [2])
        >>> isin(td, td[1:], "id")
        tensor([False,  True])
    """
    rows, others = _rows(input, key, dim), _rows(reference, key, dim)
    if rows.shape[1:] != others.shape[1:]:
        raise ShapeMismatch(
            f"rows of entry {format_key(path_of(key))} must have the same shape in both containers,"
            f" got {shape_text(rows.shape[1:])} and {shape_text(others.shape[1:])}."
        )
    if rows[0:0].numel() == 0 and 0 in rows.shape[1:]:
        return torch.full((len(rows),), len(others) > 0, device=rows.device)
    together = torch.cat([rows, others])
    _, group = torch.unique(together, dim=0, return_inverse=True)
    return torch.isin(group[: len(rows)], group[len(rows) :])


@overload
def remove_duplicates(
    input: T, key: NestedKey, dim: int = 0, *, return_indices: Literal[False] = False
) -> T: ...
@overload
def remove_duplicates(
    input: T, key: NestedKey, dim: int = 0, *, return_indices: Literal[True]
) -> tuple[T, Tensor]: ...
def remove_duplicates(
    input: T, key: NestedKey, dim: int = 0, *, return_indices: bool = False
) -> T | tuple[T, Tensor]:
    """Return the first row of each group of rows that have an equal entry, in their order.

    Args:
        input: the container.
        key: the entry that is compared; all of its other dimensions belong to a row.
        dim: the batch dimension of the rows.
        return_indices: also return for each row of `input` the position of its equal in the result.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, remove_duplicates
        >>> td = TensorDict({"id": torch.tensor([3, 1, 3]), "x": torch.arange(3)}, [3])
        >>> unique, indices = remove_duplicates(td, "id", return_indices=True)
        >>> unique["x"], indices
        (tensor([0, 1]), tensor([0, 1, 0]))
    """
    dim = wrap_dim(dim, input._kd_desc.ndim)
    rows = _rows(input, key, dim)
    if rows.numel():
        _, group = torch.unique(rows, dim=0, return_inverse=True)
    else:
        group = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    first = torch.full((len(rows),), len(rows), device=rows.device)
    first.scatter_reduce_(0, group, torch.arange(len(rows), device=rows.device), "amin")
    kept = first[first < len(rows)].sort().values
    position = torch.searchsorted(kept, first[group])
    unique = engine(input).index_select(input, dim, kept)
    return (unique, position) if return_indices else unique


def _rows(td: TensorDictBase, key: NestedKey, dim: int) -> Tensor:
    """Return an entry with the dimension of the rows in front."""
    leaf: object = td._kd_read(path_of(key))
    if not isinstance(leaf, Tensor):
        raise wrong_type(f"entry {format_key(path_of(key))}", "a tensor", leaf)
    return leaf.movedim(wrap_dim(dim, td._kd_desc.ndim), 0)


# Grouping the rows of a container by the values of an entry.


def group_by(tensordict: C, key: NestedKey) -> tuple[Tensor, tuple[C, ...]]:
    """Group the rows along the first batch dimension by the values of one entry.

    Args:
        tensordict: the container; rows of a group keep their order.
        key: an entry with one value, or one vector of values, for each row; values that are not
            tensors must be hashable and comparable, as strings are.

    Returns:
        The values that occur, sorted: a tensor, or a list of other values; and a container of the
        rows of each.

    Raises:
        KeyNotFound: if there is no such entry.
        ShapeMismatch: if the container has no batch dimension.
        InvalidArgument: if values cannot be sorted.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, group_by
        >>> td = TensorDict({"who": torch.tensor([1, 0, 1]), "x": torch.arange(3)}, [3])
        >>> who, groups = group_by(td, "who")
        >>> who, [group["x"].tolist() for group in groups]
        (tensor([0, 1]), [[1], [0, 2]])
    """
    values = tensordict._kd_read(path_of(key))
    if not isinstance(values, Tensor) and not is_data(values):
        raise wrong_type(f"entry {format_key(key)}", "a tensor or non-tensor data", values)
    if not tensordict._kd_desc.ndim:
        raise ShapeMismatch(
            "`group_by` expected a batch dimension, got batch_size (). Set the batch size first."
        )
    found: Tensor | list[object]
    if isinstance(values, Tensor):
        found, group = torch.unique(values, dim=0, return_inverse=True)
    else:
        found, group = _unique(rows_of_data(values, 1), key)
    order = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=len(found)).tolist()
    return as_read(found), tensordict.index_select(0, order).split(counts)


def _unique(rows: list[object], key: NestedKey) -> tuple[list[object], Tensor]:
    """Return the values of rows without repetitions, sorted, and the number of that of each row."""
    each = [_hashable(row) for row in rows]
    try:
        found: list[object] = sorted(set(each))  # type: ignore[type-var]  # or it raises
        numbers = {value: number for number, value in enumerate(found)}
    except TypeError as error:
        raise InvalidArgument(
            f"the values of entry {format_key(key)} must be hashable and comparable to group by "
            f"them: {error}. Store a number for each of them, and group by it."
        ) from None
    return found, torch.tensor([numbers[value] for value in each], dtype=torch.int64, device="cpu")


def _hashable(value: object) -> object:
    """Return a list, of the values of several rows or stored as one value, as a tuple."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


# Merging the entries of several containers into one.


def merge_tensordicts(
    first: C,
    *others: TensorDictBase,
    callback_exist: Callable[[object, object], object] | None = None,
) -> C:
    """Merge the entries of several containers, nested ones too; the tensors are shared.

    Args:
        first: gives the kind and the batch size.
        *others: containers of the same batch size; of a key that several have, the first
            container's entry stays.
        callback_exist: called with the two entries of a key that both have, those that are not
            containers; what it returns is stored instead.

    Raises:
        ShapeMismatch: if a batch size differs.

    Example:
        >>> from kd_core import TensorDict, merge_tensordicts
        >>> merged = merge_tensordicts(TensorDict(a=1, b={"c": 2}), TensorDict(b={"d": 3}))
        >>> list(merged.keys(True, True))
        ['a', ('b', 'c'), ('b', 'd')]
    """
    batch = first_of([first, *others], "merge_tensordicts")._kd_desc.batch
    for number, other in enumerate(others, start=1):
        if other._kd_desc.batch != batch:
            raise batches_differ(batch, other._kd_desc.batch, number, "merge_tensordicts", ())
    merged = first._kd_engine.clone(first, recurse=False)
    for other in others:
        _add_missing(merged, other._kd_engine.clone(other, recurse=False), callback_exist)
    return merged


def _add_missing(
    target: TensorDictBase,
    source: TensorDictBase,
    callback: Callable[[object, object], object] | None,
) -> None:
    """Store the entries of a container that another one lacks, level by level."""
    for key, value in source._kd_engine.items(source):
        mine: object = TensorDictBase.get(target, key)
        entry: object = value
        if mine is None:
            target._kd_engine.set(target, key, entry)
        elif isinstance(mine, TensorDictBase) and isinstance(entry, TensorDictBase):
            _add_missing(mine, entry, callback)
        elif callback is not None:
            target._kd_engine.set(target, key, callback(mine, entry))
