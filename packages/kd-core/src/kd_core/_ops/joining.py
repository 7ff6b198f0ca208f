"""Stacking and concatenating containers: traversal of several at once to join their leaves.

Decisions:

- All containers must have the same keys, in any order, and batch sizes that fit.
- A non-tensor entry with one value for the whole batch stays one if it is equal in all containers.
  Other non-tensor entries become one value per row.
- The first container determines the kind of the result.

The leaves of one key are passed to torch without a check. Only if torch raises an error, the leaves
are compared, and the message names the entry and the number of the container that differs. With few
keys a lookup for each leaf is faster than comparing the lists of keys, with many keys slower
("stack 8 x 128 leaves" in the benchmarks).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    NoReturn,
    TypeAlias,
    TypeVar,
    cast,
)

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core import _registry as registry
from kd_core._descriptor import Descriptor, describe
from kd_core._errors import (
    DeviceMismatch,
    InvalidArgument,
    InvalidValue,
    KdError,
    KeySetMismatch,
    ShapeMismatch,
    different_keys,
    listed,
    wrap_mapping,
    wrong_type,
)
from kd_core._keys import format_key
from kd_core._leaves.foreach import prepare
from kd_core._leaves.loops import explain_shapeless, joined_rows
from kd_core._leaves.writes import check_write, is_converted, writable_source, write_all
from kd_core._naming import also_named
from kd_core._nodes import (
    are_data,
    is_any_data,
    is_node,
    is_row_data,
    is_unbatched,
)
from kd_core._ops.binary import cloned, written_to
from kd_core._protocol import AbstractContainer, Composite
from kd_core._shapes import new_dim, plain_size, resized, without_names, wrap_dim
from kd_core._switches import lazy_legacy

if TYPE_CHECKING:
    from kd_core._keys import KeyPath
    from kd_core._leaves.writes import Write
    from kd_core._nodes import Data, Entries, Entry, Memo
    from kd_core._types import Batch

    Column: TypeAlias = Sequence[Entry]

C = TypeVar("C", bound=AbstractContainer)


class Join:
    """One way to join.

    Attributes:
        name: the name of the public function, for messages.
        call: the torch function.
        dim: the batch dimension that is new, or grows.
        of_keys, of_shapes: how the messages on keys and on shapes that differ begin: libraries
            tell by these words what went wrong.
    """

    __slots__ = ("dim",)

    name: ClassVar[str]
    of_keys: ClassVar[str] = ""
    of_shapes: ClassVar[str] = ""
    call: Callable[..., Tensor]
    dim: int

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def wrapped(self, dim: int, containers: object, new: int) -> int:
        """Return a dimension of the result counted from the front, where `new` are added.

        Only the first container is read; the others are checked when their entries are read.
        """
        if (
            isinstance(containers, list)
            and containers
            and isinstance(containers[0], AbstractContainer)
        ):
            first = containers[0]._kd_desc
        else:
            first = first_of(containers, self.name)._kd_desc
        ndim = first.ndim + new
        return dim if type(dim) is int and 0 <= dim < ndim else wrap_dim(dim, ndim)

    def shape(self, shapes: Sequence[Batch]) -> Batch | None:
        """Return the shape of the result; `None` if the shapes of the parts do not fit."""
        raise NotImplementedError

    def even(self, shape: Batch, count: int) -> Batch:
        """Return the shape of the result for a number of parts of one shape."""
        raise NotImplementedError

    def members(self, containers: Sequence[object]) -> Composite | None:
        """Join lazy stacks by their members; `None` if their entries must be joined instead."""
        return None

    def by_member(self, containers: Sequence[object], out: Composite) -> list[Composite] | None:
        """Return the containers as lazy stacks if they join into the members of `out`."""
        stacks = _alike(containers)
        if stacks is None or self.stacked(stacks[0]._dim) != out._dim:
            return None
        return stacks

    def stacked(self, dim: int) -> int | None:
        """Return the stacked dimension of joined lazy stacks; `None` if it is the joined one."""
        raise NotImplementedError

    def rows(self, leaves: Sequence[Tensor]) -> Tensor | None:
        """Join nested tensors of the jagged layout; `None` if they cannot be joined."""
        return None

    def combined(self, containers: Sequence[C], out: C | None) -> C:
        """Join containers into new leaves or the leaves of `out`."""
        if out is not None:
            return _combined_into(self, containers, out)
        made: C = self.joined(containers, (), None)  # of the kind of the first
        return made

    def joined(self, nodes: Sequence[Any], path: KeyPath, memo: Memo) -> Any:
        """Join containers level by level."""
        try:
            levels = [node._kd_entries for node in nodes]
        except AttributeError:
            if not path:
                first_of(nodes, self.name)
            return _join_data(self, nodes, path, memo)
        first, desc = levels[0], nodes[0]._kd_desc
        memo = desc, self.descriptor(nodes, path, memo)
        count = len(first)
        for level in levels:
            if len(level) != count:
                raise _keys_differ(self, levels, path)
        columns = _columns(levels) if count >= 16 else None  # a name for it would add a guard
        call, dim = self.call, self.dim
        joined: dict[str, Entry] = {}
        column: Column = ()
        key = ""
        try:
            for key in first:
                column = next(columns) if columns else [level[key] for level in levels]
                if type(column[0]) is not Tensor:
                    joined[key] = self._joined_other(column, (*path, key), memo)
                elif dim:
                    joined[key] = call(column, dim)
                else:  # passing the default dimension is slower than leaving it out
                    joined[key] = call(column)
        except (KdError, KeyError, RuntimeError, TypeError, IndexError) as error:
            _explain_level(self, nodes, levels, column, (*path, key), error)
        return nodes[0]._kd_like(joined, memo[1])

    def _joined_other(self, column: Column, path: KeyPath, memo: Memo) -> Entry:
        """Join nodes, nested tensors, or tensors of a subclass."""
        first = column[0]
        if isinstance(first, Composite):
            stack = self.members(column)
            if stack is not None:
                return stack
        if not isinstance(first, Tensor):
            made: Entry = self.joined(column, path, memo)
            return made
        if not first.is_nested:
            return self.call(column, self.dim)
        return _joined_rows(self, column, path)

    def descriptor(self, nodes: Sequence[Any], path: KeyPath, memo: Memo) -> Descriptor:
        """Return the descriptor of the result."""
        first: Descriptor = nodes[0]._kd_desc
        for node in nodes:
            if node._kd_desc is not first:
                if not all(map(is_node, nodes)):
                    first_of(nodes, self.name)
                return _mixed_descriptor(self, [node._kd_desc for node in nodes], path)
        if memo is not None and memo[0] is first:
            return memo[1]
        return first.with_batch(self.even(first.batch, len(nodes)))


def _columns(levels: Sequence[Entries]) -> Iterator[Column] | None:
    """Return the entries of each key in all containers; `None` if the order of keys differs."""
    keys = list(levels[0])
    if all(list(level) == keys for level in levels):
        return zip(*[level.values() for level in levels], strict=True)
    return None


def rows_of(container: C, name: str, dim: object = 0) -> Sequence[C]:
    """Return the rows of a container that is passed in place of a sequence of containers.

    Raises:
        InvalidArgument: if a second container stands where a dimension is expected, or it has no
            rows.
    """
    if isinstance(dim, AbstractContainer) or not container._kd_desc.batch:
        first_of(container, name)
    return container._kd_engine.unbind(container, 0)


def first_of(containers: object, name: str) -> AbstractContainer:
    """Return the first of a sequence of containers, after checking all.

    Raises:
        InvalidArgument: if it is not a list or tuple of containers.
        InvalidValue: if the sequence is empty.
    """
    if not isinstance(containers, (list, tuple)):
        remedy = "Put what it yields in a list." if isinstance(containers, Iterator) else ""
        if isinstance(containers, AbstractContainer):
            remedy = f"Put them in a list: `{name}([a, b])`."
        raise wrong_type(
            f"the input of `{name}`", "a list or tuple of containers", containers, remedy
        )
    for each in containers:
        if not isinstance(each, AbstractContainer):
            number = next(i for i, one in enumerate(containers) if one is each)
            what = f"input {number} of `{name}`"
            raise wrong_type(what, "a container", each, wrap_mapping(each))
    if not containers:
        raise InvalidValue(f"`{name}` expected at least one container, got none.")
    first: AbstractContainer = containers[0]
    return first


def _combined_into(how: Join, containers: Sequence[C], out: C) -> C:
    """Join containers into the leaves of `out`."""
    staged = _Staged()
    _stage_out(how, containers, out, (), staged)
    for write in staged.copies:
        check_write(*write)
    if not is_compiling():
        for join, column, target, path in staged.columns:
            leaves = cast("Sequence[Tensor]", column)
            kinds = {(leaf.dtype, leaf.layout): leaf for leaf in leaves}  # mostly one
            plain = all(is_converted(target, leaf) for leaf in kinds.values())
            check_write(target, target if plain else join.call(column, join.dim), path)
        prepare((target, source) for target, source, _ in staged.copies)
    for join, column, target, _ in staged.columns:
        _join_into(join, column, target)
    write_all(staged.copies)
    return out


def _join_into(how: Join, column: Column, target: Tensor) -> None:
    try:
        how.call(column, how.dim, out=target)
    except RuntimeError:  # they overlap, or are sparse
        if is_compiling():
            raise
        target.copy_(how.call(column, how.dim))


class _Staged:
    """The checked writes to `out`.

    Attributes:
        columns: how leaves are joined, the leaves, the one that torch joins them into, and its
            key path.
        copies: writes of joined leaves into the members of a stack.
    """

    __slots__ = ("columns", "copies")

    def __init__(self) -> None:
        self.columns: list[tuple[Join, Column, Tensor, KeyPath]] = []
        self.copies: list[Write] = []


def _is_other(entry: Entry) -> bool:
    """Return whether an entry is a node or a nested tensor, which torch does not join."""
    return not isinstance(entry, Tensor) or entry.is_nested


def _joined_rows(how: Join, column: Column, path: KeyPath) -> Tensor:
    """Join nested tensors."""
    leaves = [leaf for leaf in column if isinstance(leaf, Tensor) and leaf.layout is torch.jagged]
    if len(leaves) < len(column):
        _explain(how, column, path, None)
    joined = how.rows(leaves)
    if joined is None:
        raise InvalidValue(
            f"`{how.name}` cannot join the entries {format_key(path)}: a nested tensor of the "
            "jagged layout has one batch dimension. Use `lazy_stack`, or `cat`."
        )
    return joined


def _keys_differ(how: Join, levels: Sequence[Entries], path: KeyPath) -> KeySetMismatch:
    number = next(i for i, level in enumerate(levels) if level.keys() != levels[0].keys())
    names = "container 0", f"container {number}"
    where = f" in {names[0]} and {names[1]} of `{how.name}`"
    if path:
        where += f" below {format_key(path)}"
    error = different_keys(levels[0], levels[number], names, where)
    return KeySetMismatch(f"{how.of_keys}{error}")


def _mixed_descriptor(how: Join, descs: list[Descriptor], path: KeyPath) -> Descriptor:
    first = descs[0]
    batch = how.shape([desc.batch for desc in descs])
    if batch is None:
        for number, desc in enumerate(descs):
            if how.shape([first.batch, desc.batch]) is None:
                raise batches_differ(first.batch, desc.batch, number, how.name, path)
        raise AssertionError("shapes that fit the first fit each other")
    if isinstance(how, _Stacking) or all(desc.device == first.device for desc in descs):
        return first.with_batch(batch)
    return describe(batch)


_EQUAL_BATCHES: Final = frozenset({"stack", "merge_tensordicts"})


def batches_differ(
    first: Batch, other: Batch, number: int, name: str, path: KeyPath
) -> ShapeMismatch:
    """Build the error for batch sizes that must be equal, or equal except in one dimension."""
    where = f" of {format_key(path)}" if path else ""
    fit = "equal" if name in _EQUAL_BATCHES else "equal except in the dimension that grows"
    remedy = " Pad the containers with `pad_sequence`." if name == "stack" else ""
    return ShapeMismatch(
        f"batch sizes{where} must be {fit}, got {first} in container 0 and {other} in container "
        f"{number} of `{name}`.{remedy}"
    )


def _join_data(how: Join, nodes: Column, path: KeyPath, memo: Memo = None) -> Data:
    """Join entries that are neither tensors nor containers, as their kind does."""
    first = nodes[0]
    if not is_any_data(first) or len(set(map(_kind, nodes))) > 1:
        _explain(how, nodes, path, None)
    if memo is not None and is_unbatched(first):
        desc = memo[1]
    else:
        desc = how.descriptor(nodes, path, None)
    return first._join(nodes, how.call, how.dim, desc, path)


def _explain_level(
    how: Join,
    nodes: Column,
    levels: Sequence[Entries],
    column: Column,
    path: KeyPath,
    error: Exception,
) -> NoReturn:
    """Raise what says why an entry of containers cannot be joined; a good error is raised again."""
    if isinstance(error, KdError):
        if not column or _is_other(column[0]) or isinstance(nodes[0], Composite):
            raise error  # by a container below, or by an entry that a stack could not read
    elif isinstance(error, KeyError) and any(path[-1] not in level for level in levels):
        raise _keys_differ(how, levels, path[:-1]) from error
    _explain(how, column, path, error)


def _explain(how: Join, column: Column, path: KeyPath, error: Exception | None) -> NoReturn:
    """Raise the error that names the container whose entry does not fit that of the first."""
    first, key = column[0], format_key(path)
    for number, entry in enumerate(column):
        if _kind(entry) != _kind(first):
            raise KeySetMismatch(
                f"entry {key} must be of one kind, got {_kind(first)} in container 0 and "
                f"{_kind(entry)} in container {number} of `{how.name}`."
            ) from error
        if isinstance(first, Tensor) and isinstance(entry, Tensor):
            explain_shapeless(error, f"entry {key} of all containers", first, entry)
            _explain_leaf(how, first, entry, number, key)
    raise InvalidValue(f"`{how.name}` cannot join the entries {key}: {error}") from error


def _kind(entry: Entry) -> str:
    if isinstance(entry, Tensor):
        return "a tensor"
    if is_unbatched(entry):
        return "an `UnbatchedTensor`"
    return "a container" if isinstance(entry, AbstractContainer) else "a non-tensor value"


def _explain_leaf(how: Join, first: Tensor, entry: Tensor, number: int, key: str) -> None:
    if how.shape([tuple(first.shape), tuple(entry.shape)]) is None:
        raise ShapeMismatch(
            f"{how.of_shapes}`{how.name}` cannot join entry {key}: its shape is "
            f"{tuple(entry.shape)} in container {number} and {tuple(first.shape)} in container 0. "
            f"Use `pad`, `lazy_stack`, or `collate(rows, pad_keys=[...])`."
        )
    if entry.device != first.device:
        raise DeviceMismatch(
            f"`{how.name}` cannot join entry {key}: it is on {entry.device} in container {number} "
            f"and on {first.device} in container 0. Move the containers to one device with `to`."
        )


def _stage_out(
    how: Join,
    nodes: Column,
    out: Entry,
    path: KeyPath,
    staged: _Staged,
) -> None:
    """Check that the result fits `out`, and record the writes."""
    if not isinstance(out, AbstractContainer):
        _stage_data_out(_join_data(how, nodes, path), out, path, staged)
        return
    containers = cast("Sequence[AbstractContainer]", nodes)
    desc = how.descriptor(nodes, path, None)
    if out._kd_desc.batch != desc.batch:
        where = f"{format_key(path)} of `out`" if path else "`out`"
        raise ShapeMismatch(f"{where} must have batch_size {desc.batch}, got {out._kd_desc.batch}.")
    if isinstance(out, Composite) and (stacks := how.by_member(containers, out)):
        at = stacks[0]._dim
        join = type(how)(how.dim - (how.dim > at))
        rows = zip(*[stack._members for stack in stacks], strict=True)
        for row, member in zip(rows, out._members, strict=True):
            _stage_out(join, row, member, path, staged)
        return
    levels = [node._kd_entries for node in containers]
    entries = out._kd_entries
    for level in levels:
        if level.keys() != levels[0].keys():
            levels = _known_to(entries, levels)
            if any(each.keys() != levels[0].keys() for each in levels):
                raise _keys_differ(how, levels, path)
            break
    for key in levels[0]:
        column = [level[key] for level in levels]
        target = entries.get(key)
        if target is None:  # `out` decides which tensors are wanted
            _check_left_out(column[0], out, (*path, key))
            continue
        if _kind(column[0]) != _kind(target):
            raise KeySetMismatch(
                f"entry {format_key((*path, key))} of `out` must be {_kind(column[0])}, got "
                f"{_kind(target)}."
            )
        if isinstance(column[0], Tensor) and isinstance(target, Tensor):
            _check_leaf_out(how, column, target, (*path, key))
            if isinstance(out, Composite):
                whole = how.call(column, how.dim)
                staged.copies.extend(out._kd_writes(key, whole, (*path, key)))
            else:
                staged.columns.append((how, column, target, (*path, key)))
        elif isinstance(out, Composite) and not isinstance(target, AbstractContainer):
            data = _join_data(how, column, (*path, key))
            staged.copies.extend(out._kd_writes(key, data, (*path, key)))
        else:
            _stage_out(how, column, target, (*path, key), staged)


def _known_to(entries: Entries, levels: Sequence[Entries]) -> list[Entries]:
    """Return the entries of each level that are in `entries`, too."""
    return [{key: level[key] for key in level if key in entries} for level in levels]


def _check_left_out(entry: Entry, out: AbstractContainer, path: KeyPath) -> None:
    """Raise an error for data that `out` has no entry for: there is nothing to write it into."""
    if not isinstance(entry, Tensor | AbstractContainer):
        raise KeySetMismatch(
            f"`out` must have an entry {format_key(path)}, which is not a tensor, got the keys "
            f"{listed(out._kd_entries)}. Set it there before."
        )


def _stage_data_out(data: Data, out: Entry, path: KeyPath, staged: _Staged) -> None:
    if is_row_data(out) and out._kd_desc.batch == data._kd_desc.batch:
        staged.copies.append((*out._encode(data, path), path))
    elif is_unbatched(data) and is_unbatched(out):
        if not out._agrees(data):
            tensor = data._tensor
            staged.copies.append((out._tensor, writable_source(path, out._tensor, tensor), path))
    elif not (is_any_data(out) and out._agrees(data)):
        raise InvalidValue(
            f"entry {format_key(path)} of `out` must hold {data._kd_item()!r}, the value of the "
            "containers."
        )


def _check_leaf_out(how: Join, column: Column, target: Tensor, path: KeyPath) -> None:
    first, *others = leaves = [leaf for leaf in column if isinstance(leaf, Tensor)]
    size, shape = first.shape, None
    if len(leaves) == len(column):
        if all(leaf.shape == size for leaf in others):
            shape = how.even(tuple(size), len(leaves))
        else:
            shape = how.shape([tuple(leaf.shape) for leaf in leaves])
    if shape is None:
        _explain(how, column, path, None)
    dtypes = dict.fromkeys([leaf.dtype for leaf in leaves])
    dtype = functools.reduce(torch.promote_types, dtypes)
    if not torch.can_cast(dtype, target.dtype):
        raise InvalidArgument(
            f"entry {format_key(path)} of `out` must have a dtype to which {dtype} can be cast, "
            f"got {target.dtype}. Cast `out` first."
        )
    device = target.device
    for number, leaf in enumerate(leaves):
        if leaf.device != device:
            raise DeviceMismatch(
                f"entry {format_key(path)} of `out` is on {target.device}, but that of container "
                f"{number} is on {leaf.device}. Move the containers to one device with `to`."
            )
    if tuple(target.shape) != shape:
        raise ShapeMismatch(
            f"entry {format_key(path)} of `out` must have shape {shape}, got {tuple(target.shape)}."
        )
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in (*leaves, target)):
        raise InvalidArgument(
            f"entry {format_key(path)} requires gradients, which `out` does not support. Leave out "
            "`out`, or use `torch.no_grad()`."
        )


# Stacking containers along a new batch dimension, and concatenating them along an old one.


@also_named(tensors="input")
def stack(input: Sequence[C] | C, dim: int | str = 0, *, out: C | None = None) -> C:
    """Stack containers along a new batch dimension; `torch.stack` calls this function too.

    Args:
        input: containers of the same keys and batch size. Lazy stacks of the same stacked
            dimension are stacked member by member: the result is a lazy stack. One container stands
            for its rows, as a `DataLoader` passes them to `collate_fn`.
        dim: the position of the new dimension; a negative one counts from the end of the result,
            and the name of a dimension is its position.
        out: a container into whose leaves the result is written; entries that it does not have
            are left out. A lazy stack of rows of different shapes takes each row in its member.

    Raises:
        KeySetMismatch: if a container has other keys than the first, without such a stack.
        ShapeMismatch: if a batch size or the shape of an entry differs.
        InvalidValue: if an entry of `out` holds one value for all rows, and it differs.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, stack
        >>> stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]).batch_size
        torch.Size([2, 3])
    """
    rows = rows_of(input, "stack", dim) if isinstance(input, AbstractContainer) else input
    if isinstance(dim, str):
        dim = new_dim(dim, first_of(rows, "stack")._kd_desc.batch)
    if lazy_legacy() and out is None and not are_data(rows):
        return registry.lazy_stack([*rows], dim)
    how = object.__new__(_Stacking)  # calling a class is slow to trace
    try:
        how.dim = how.wrapped(dim, rows, 1)
    except InvalidArgument:
        if are_data(rows):
            return cast("C", torch.stack(cast("list[Tensor]", rows), dim))
        raise
    into: object = out
    if into is not None and not isinstance(into, Composite):
        return how.combined(rows, out)
    if into is not None and into._dim == how.dim and _is_ragged(into):
        return _stacked_by_row(rows, cast("C", into), how.dim)
    joined = how.members(rows)
    if joined is None or (into is not None and into._dim != joined._dim):
        return how.combined(rows, out)
    return cast("C", joined) if into is None else written_to(out, cast("C", joined))


class _Stacking(Join):
    __slots__ = ()

    name = "stack"
    of_keys = "The sets of keys in the tensordicts to stack are exclusive: "
    of_shapes = "The shapes of the tensors to stack is incompatible: "
    call = staticmethod(torch.stack)

    def shape(self, shapes: Sequence[Batch]) -> Batch | None:
        first = shapes[0]
        plain = without_names(first)  # see `check_batches`
        for shape in shapes:
            if without_names(shape) != plain:
                return None
        return self.even(first, len(shapes))

    def even(self, shape: Batch, count: int) -> Batch:
        return (*shape[: self.dim], count, *shape[self.dim :])

    def stacked(self, dim: int) -> int | None:
        return dim + (self.dim <= dim)

    def members(self, containers: Sequence[object]) -> Composite | None:
        stacks = _alike(containers)
        if stacks is None or any(
            each._kd_desc.batch != stacks[0]._kd_desc.batch for each in stacks
        ):
            return None
        at = stacks[0]._dim
        inner = self.dim - (self.dim > at)
        rows = zip(*[each._members for each in stacks], strict=True)
        return stacks[0]._of([stack(list(row), inner) for row in rows], self.stacked(at))


def _is_ragged(stack: Composite) -> bool:
    """Return whether the leaves of some members have other shapes."""
    shapes: list[list[torch.Size]] = []
    for member in stack._members:
        if isinstance(member, Composite) and _is_ragged(member):
            return True
        leaves: list[Tensor] = []
        member._kd_collect(leaves)
        shapes.append([leaf.shape for leaf in leaves])
    return any(each != shapes[0] for each in shapes)


def _stacked_by_row(rows: Sequence[C], out: C, dim: int) -> C:
    """Write each row into its member of a lazy stack, whose entries are not whole."""
    joined: C = registry.lazy_stack(list(rows), dim)
    known = set(out._kd_engine.keys(out, True, True))
    lacking = [key for key in joined._kd_engine.keys(joined, True, True) if key not in known]
    if lacking:
        joined = joined._kd_engine.exclude(joined, *lacking)
    out._kd_engine.update_(out, joined)
    return out


def _alike(containers: Sequence[object]) -> list[Composite] | None:
    """Return containers that all are lazy stacks along the same dimension; else `None`."""
    first = containers[0]
    if not isinstance(first, Composite):
        return None
    stacks = [
        each for each in containers if isinstance(each, Composite) and each._dim == first._dim
    ]
    return stacks if len(stacks) == len(containers) else None


@also_named(items="input")
def maybe_dense_stack(
    input: Sequence[C], dim: int | str = 0, out: C | None = None, strict: bool = False
) -> C:
    """Stack containers densely, as `stack` does, if their entries can be stacked, else lazily.

    Where only nested containers differ, those are stacked lazily, and what holds them densely.

    Args:
        input: one or more containers whose batch sizes have as many dimensions; the name `items` is
            taken, too.
        dim: the position of the new dimension, or the name of the dimension at it.
        out: a container into whose leaves the stacked entries are written; it is returned.
        strict: nothing: members with other keys make a lazy stack in any case.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, maybe_dense_stack
        >>> rows = [TensorDict({"a": torch.zeros(n)}) for n in (2, 2, 3)]
        >>> [type(maybe_dense_stack(some)).__name__ for some in (rows[:2], rows)]
        ['TensorDict', 'LazyStackedTensorDict']
    """
    lazy: C = registry.lazy_stack(input, dim)
    made: object = lazy
    if isinstance(made, Tensor):  # `lazy_stack` takes tensors, too
        first_of(list(input), "maybe_dense_stack")
    if out is None and is_any_data(made):
        return lazy
    if out is not None:
        return written_to(out, lazy)
    first, *others = [set(member._kd_engine.keys(member, True, True)) for member in input]
    if all(keys == first for keys in others):
        with suppress(KdError):
            return stack(input, dim)
    return _dense_where_alike(input, lazy, cast("Composite", lazy)._dim)


def _dense_where_alike(members: Sequence[C], lazy: C, dim: int) -> C:
    """Return a dense stack in which nested containers that differ are lazy; else the lazy one."""
    if not all(member._kd_owns_leaves for member in members):
        return lazy
    levels = [member._kd_entries for member in members]
    below = [
        key
        for key in levels[0]
        if all(isinstance(level.get(key), AbstractContainer) for level in levels)
    ]
    rows = {key: [cast("C", level[key]) for level in levels] for key in below}
    if not rows or any(
        one._kd_desc.batch != several[0]._kd_desc.batch
        for several in rows.values()
        for one in several
    ):
        return lazy
    try:
        flat = stack([each._kd_engine.exclude(each, *below) for each in members], dim)
        stacks = {key: maybe_dense_stack(several, dim) for key, several in rows.items()}
    except KdError:
        return lazy
    entries = {key: stacks[key] if key in stacks else flat._kd_entries[key] for key in levels[0]}
    return flat._kd_like(entries, flat._kd_desc)


@also_named(tensors="input")
def cat(input: Sequence[C], dim: int | str = 0, *, out: C | None = None) -> C:
    """Concatenate containers along a batch dimension; `torch.cat` calls this function too.

    Args:
        input: containers of the same keys, whose batch sizes may differ only in `dim`. Lazy
            stacks of the same stacked dimension, and others beside them, are joined member by
            member.
        dim: the batch dimension along which they are concatenated, or its name.
        out: a container into whose leaves the result is written; entries that it does not have
            are left out.

    Raises:
        KeySetMismatch: if a container has other keys than the first.
        ShapeMismatch: if a batch size or the shape of an entry differs elsewhere.
        InvalidValue: if an entry of `out` holds one value for all rows, and it differs.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, cat
        >>> cat([TensorDict({"a": torch.zeros(n)}, [n]) for n in (2, 3)]).batch_size
        torch.Size([5])
    """
    if isinstance(dim, str):
        dim = wrap_dim(dim, first_of(input, "cat")._kd_desc.batch)
    how = object.__new__(_Concatenating)  # calling a class is slow to trace
    how.dim = how.wrapped(dim, input, 0)
    into: object = out
    if into is not None and not isinstance(into, Composite):
        return how.combined(input, out)
    joined = how.members(input)
    if joined is None or (into is not None and into._dim != joined._dim):
        return how.combined(input, out)
    return written_to(out, cast("C", joined))


class _Concatenating(Join):
    __slots__ = ()

    name = "cat"
    of_shapes = "Sizes of tensors must match: "
    call = staticmethod(torch.cat)

    def shape(self, shapes: Sequence[Batch]) -> Batch | None:
        first, dim = shapes[0], self.dim
        before, behind = first[:dim], first[dim + 1 :]
        plain = without_names((*before, *behind))  # see `check_batches`
        rows = 0
        for shape in shapes:
            others = (*shape[:dim], *shape[dim + 1 :])
            if len(shape) != len(first) or without_names(others) != plain:
                return None
            rows += plain_size(shape[dim])
        return (*before, resized(first[dim], rows), *behind)

    def even(self, shape: Batch, count: int) -> Batch:
        dim = self.dim
        return (*shape[:dim], resized(shape[dim], shape[dim] * count), *shape[dim + 1 :])

    def stacked(self, dim: int) -> int | None:
        return None if dim == self.dim else dim

    def members(self, containers: Sequence[object]) -> Composite | None:
        stacks = [each for each in containers if isinstance(each, Composite)]
        if not stacks or any(each._dim != stacks[0]._dim for each in stacks):
            return None
        first, dim = stacks[0], self.dim
        at, batch = first._dim, first._members[0]._kd_desc.batch
        rows: list[Sequence[AbstractContainer]] = []
        for each in containers:
            if isinstance(each, Composite):
                rows.append(each._members)
            elif (
                isinstance(each, AbstractContainer)
                and each._kd_desc.ndim == first._kd_desc.ndim
                and each._kd_desc.batch[at]
            ):
                rows.append(each._kd_engine.unbind(each, at))
            else:
                return None
        if dim == at:
            members = [member for column in rows for member in column]
            open_sizes = any(each._kd_desc.open for each in stacks)
            if not open_sizes and any(member._kd_desc.batch != batch for member in members):
                return None
            return first._of([cloned(member) for member in members])
        if any(len(column) != len(rows[0]) for column in rows):
            return None
        inner = dim - (dim > at)
        return first._of([cat(list(column), inner) for column in zip(*rows, strict=True)])

    def rows(self, leaves: Sequence[Tensor]) -> Tensor | None:
        return joined_rows(leaves)


class _ConcatenatingOnce(_Concatenating):
    """Joins the same tensors once: a tensor under several keys of all parts stays one."""

    __slots__ = ("_rows", "call")

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.call = _once(torch.cat)
        self._rows = _once(joined_rows)

    def rows(self, leaves: Sequence[Tensor]) -> Tensor | None:
        return self._rows(leaves)


def cat_once(parts: Sequence[AbstractContainer]) -> AbstractContainer:
    """Concatenate along the first dimension; a tensor under several keys of all parts stays one."""
    how = _ConcatenatingOnce(wrap_dim(0, parts[0]._kd_desc.ndim))
    joined = how.members(parts)
    return how.combined(parts, None) if joined is None else joined


def _once(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that joins the same tensors along the same dimension only once."""
    known: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = {}

    def joined(leaves: Sequence[Tensor], *dim: int) -> Tensor:
        same = (*map(id, leaves), *dim)
        if same not in known:
            known[same] = list(leaves), fn(leaves, *dim)  # which keeps their `id`
        return known[same][1]

    return joined
