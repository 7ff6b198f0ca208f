"""`LazyStackedTensorDict`: a sequence of containers seen as one.

Members stay as they are; an entry is stacked when it is read, and written back to the members when
it is written to. So members may differ: in keys (only those that all have are seen) and in the
shapes of entries (each can be read from its member). What works on one leaf after another without
asking for its batch (arithmetic, clones, moves) runs on the members and gives a lazy stack again;
everything that rearranges the batch gives a `TensorDict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast, overload

import torch
from torch import Tensor

from kd_core import _registry
from kd_core._base import TensorDictBase
from kd_core._batch.descriptor import describe
from kd_core._batch.shapes import wrap_dim
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KdError,
    KeySetMismatch,
    ShapeMismatch,
    shape_text,
)
from kd_core._keys import format_key
from kd_core._leaves.loops import same_data
from kd_core._protocol.primitives import Waist

if TYPE_CHECKING:
    from typing import Self

    from kd_core._batch.descriptor import Descriptor
    from kd_core._types import BatchFn, Entry, Index


class LazyStackedTensorDict(TensorDictBase):
    """Containers of one batch size, seen as one with another dimension.

    Only keys that all members have are seen. A nested container comes as a lazy stack. Writing a
    key writes its rows to the members.

    Args:
        *members: the containers, one or more, kept by reference.
        stack_dim: where the new batch dimension stands.

    Raises:
        ShapeMismatch: if the batch sizes differ.

    Example:
        >>> import torch
        >>> from kd_core import LazyStackedTensorDict, TensorDict
        >>> rows = [TensorDict({"a": torch.zeros(2), "own": 1.0}) for _ in range(3)]
        >>> del rows[1]["own"]
        >>> stacked = LazyStackedTensorDict(*rows)
        >>> stacked.batch_size, list(stacked.keys()), stacked["a"].shape
        (torch.Size([3]), ['a'], torch.Size([3, 2]))
        >>> stacked[0] is rows[0]
        True
    """

    __slots__ = ("__weakref__", "_desc", "_dim", "_members")

    _owns_leaves: ClassVar[bool] = False

    _desc: Descriptor
    _dim: int
    _members: list[TensorDictBase]

    def __init__(self, *members: TensorDictBase, stack_dim: int = 0) -> None:
        if not members:
            raise InvalidValue("a lazy stack needs one member or more: its keys come from them.")
        for position, member in enumerate(members):
            if not isinstance(member, TensorDictBase):
                raise InvalidArgument(
                    f"members of a lazy stack are containers, but member {position} is a "
                    f"`{type(member).__name__}`. Wrap a mapping with `TensorDict` first."
                )
        first = members[0]._desc
        for position, member in enumerate(members):
            if member._desc is not first and member._desc.batch != first.batch:
                raise ShapeMismatch(
                    f"members of a lazy stack have one batch size: that of member 0 is "
                    f"{shape_text(first.batch)}, that of member {position} "
                    f"{shape_text(member._desc.batch)}."
                )
        self._dim = wrap_dim(stack_dim, first.ndim + 1)
        self._members = list(members)
        alike = all(member._desc.device == first.device for member in members)
        batch = (*first.batch[: self._dim], len(members), *first.batch[self._dim :])
        self._desc = describe(batch, first.device if alike else None)

    @property
    def stack_dim(self) -> int:
        """The batch dimension along which the members are stacked."""
        return self._dim

    @property
    def _entries(self) -> Mapping[str, Entry]:
        return _StackedEntries(self)

    def _describe(self, desc: Descriptor) -> None:
        if desc.batch != self._desc.batch:
            self._members = self._refitted(desc)
        self._desc = desc

    def _refitted(self, desc: Descriptor) -> list[TensorDictBase]:
        batch, dim = desc.batch, self._dim
        if batch[dim : dim + 1] != (len(self._members),):
            raise ShapeMismatch(
                f"batch_size {shape_text(batch)} does not fit {len(self._members)} containers "
                f"stacked along dimension {dim}: that dimension must stay. Take `contiguous()`."
            )
        inner = batch[:dim] + batch[dim + 1 :]
        return [member._with_descriptor(member._desc.with_batch(inner)) for member in self._members]

    def _with_descriptor(self, desc: Descriptor) -> Self:
        device = desc.device
        if desc.batch != self._desc.batch:
            members = self._refitted(desc)
        elif device is None:
            return self._of([member._shallow() for member in self._members], desc)
        else:
            members = self._members
        if device is not None:
            members = [
                member._with_descriptor(describe(member._desc.batch, device)) for member in members
            ]
        return self._of(members, desc)

    def _of(self, members: Sequence[TensorDictBase], desc: Descriptor) -> Self:
        new = object.__new__(self.__class__)
        new._members = list(members)
        new._dim = self._dim
        new._desc = desc
        return new

    def _like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        return cast(
            "Self", _registry.make_dense(entries, desc)
        )  # what it is typed as, not its class

    def _check_unlocked(self, action: str) -> None:
        super()._check_unlocked(action)
        for member in self._members:
            member._check_unlocked(action)

    def _set_entry(self, key: str, value: Entry) -> None:
        if not self._desc.frozen:
            self._check_unlocked(f"set {format_key(key)}")
        for member, row in zip(self._members, self._rows(value), strict=True):
            member._set_entry(key, row)

    def _del_entry(self, key: str) -> None:
        self._check_unlocked(f"remove {format_key(key)}")
        for member in self._members:
            member._del_entry(key)

    def _rows(self, value: Entry) -> Sequence[Entry]:
        """What of an entry goes to each member."""
        dim = self._dim
        if isinstance(value, Tensor):
            return value.unbind(dim)
        if isinstance(value, LazyStackedTensorDict) and self._matches(value):
            return cast("list[Entry]", value._members)
        count = len(self._members)
        return [value._map_each(_Row(dim, row), _without(dim)) for row in range(count)]

    def _matches(self, other: LazyStackedTensorDict) -> bool:
        return other._dim == self._dim and len(other._members) == len(self._members)

    def _take_back(self, leaves: Mapping[str, Tensor]) -> None:
        for key, leaf in leaves.items():
            for member, row in zip(self._members, leaf.unbind(self._dim), strict=True):
                if member._owns_leaves:
                    cast(Tensor, member._entries[key]).copy_(row)
                else:
                    member._take_back({key: row})

    def _alike(self) -> list[TensorDictBase]:
        """The members, without what is not in all of them."""
        first, *others = self._members
        keys = set(first.keys(True, True))
        if all(keys == set(other.keys(True, True)) for other in others):
            return self._members
        keys = keys.intersection(*(other.keys(True, True) for other in others))
        return [member.select(*keys) for member in self._members]

    def _collect(self, leaves: list[Tensor]) -> None:
        for member in self._alike():
            member._collect(leaves)

    def _rebuild(self, leaves: Iterator[Tensor]) -> Self:
        members = [member._rebuild(leaves) for member in self._alike()]
        return self._of(members, self._desc.unlocked())

    def _collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        batch = self._desc.batch
        if not isinstance(other, Waist):
            super()._collect_pair(other, mine, theirs, path)
        elif other._desc.batch and other._desc.batch[: len(batch)] != batch:
            raise ShapeMismatch(
                f"containers of batch sizes {shape_text(batch)} and "
                f"{shape_text(other._desc.batch)} do not match."
            )
        else:
            if not other._desc.batch:
                rows: Sequence[Entry] = [other] * len(self._members)
            elif isinstance(other, LazyStackedTensorDict) and self._matches(other):
                rows = other._alike()
            else:
                rows = self._rows(other)
            for member, row in zip(self._alike(), rows, strict=True):
                member._collect_pair(row, mine, theirs, path)

    def _shallow(self) -> Self:
        return self._of([member._shallow() for member in self._members], self._desc.unlocked())

    def _below(self) -> list[TensorDictBase]:
        return self._members

    @overload
    def __getitem__(self, index: str) -> Tensor: ...
    @overload
    def __getitem__(self, index: tuple[str, ...]) -> Tensor: ...
    @overload
    def __getitem__(self, index: Index) -> Self: ...
    def __getitem__(self, index: object) -> object:
        """Read a key, or index the batch; rows of the stacked dimension are the members."""
        if index.__class__ is int and self._dim == 0:
            if -len(self._members) <= index < len(self._members):
                return _released(self, [self._members[index]])[0]
        elif index.__class__ is slice and self._dim == 0:
            members = self._members[index]
            if members:
                return self.__class__(*_released(self, members))
        return super().__getitem__(cast("Index", index))

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Make a container of each row along a batch dimension; of the stacked one, the members."""
        if wrap_dim(dim, self._desc.ndim) == self._dim:
            return cast("tuple[Self, ...]", tuple(_released(self, self._members)))
        return super().unbind(dim)

    def contiguous(self) -> Self:
        """Stack all entries: the same as a `TensorDict`.

        Raises:
            ShapeMismatch: if the shapes of an entry differ among the members.
        """
        joined = _join_alike(self._members, self._dim)
        if joined is not None:
            return self._like(joined, self._desc._unlocked)
        entries = self._entries
        dense: dict[str, Entry] = {}
        for key in entries:
            value = entries[key]
            if isinstance(value, LazyStackedTensorDict):
                value = cast("Entry", value.contiguous())
            dense[key] = value if isinstance(value, Tensor) else value._map_each(Tensor.contiguous)
        return self._like(dense, self._desc.unlocked())

    def __reduce__(self) -> tuple[object, ...]:
        lock = self._desc.lock
        return restore_stack, (self.__class__, self._members, self._dim, lock is not None)


def _join_alike(members: Sequence[TensorDictBase], dim: int) -> dict[str, Entry] | None:
    """Stack all entries of members that are alike; `None` where one needs a closer look.

    Without a lazy stack for each nested container: "lazy_stack.contiguous()" in the benchmarks.
    """
    levels = [member._entries for member in members]
    first = levels[0]
    for level in levels:
        if type(level) is not dict or len(level) != len(first):
            return None
    joined: dict[str, Entry] = {}
    for key, value in first.items():
        column = [level.get(key) for level in levels]
        if value.__class__ is Tensor:
            try:
                joined[key] = torch.stack(column, dim)  # type: ignore[arg-type]  # or it raises
            except (KdError, RuntimeError, TypeError):
                return None
            continue
        desc = value._desc if isinstance(value, TensorDictBase) else None
        if desc is None or any(getattr(node, "_desc", None) is not desc for node in column):
            return None
        below = _join_alike(cast("list[TensorDictBase]", column), dim)
        if below is None:
            return None
        batch = (*desc.batch[:dim], len(levels), *desc.batch[dim:])
        joined[key] = cast("Entry", _registry.make_dense(below, desc.with_batch(batch)))
    return joined


def _released(stack: LazyStackedTensorDict, members: list[TensorDictBase]) -> list[TensorDictBase]:
    """Members as results: those of a locked stack are locked with it, results are not."""
    return [member._shallow() for member in members] if stack._desc.frozen else members


class _StackedEntries(Mapping[str, "Entry"]):
    """The entries of a lazy stack: stacked when they are read."""

    __slots__ = ("_stack",)

    def __init__(self, stack: LazyStackedTensorDict) -> None:
        self._stack = stack

    def __getitem__(self, key: str) -> Entry:
        entry = self.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def get(self, key: str, default: object = None) -> Entry | None:  # type: ignore[override]  # one
        """The stacked entry; `default` where a member has none."""
        stack = self._stack
        found = [member._entries.get(key) for member in stack._members]
        if found[0].__class__ is Tensor:
            try:  # asking each for its class first would cost as much as the stacking
                return torch.stack(cast("list[Tensor]", found), stack._dim)
            except (KdError, RuntimeError, TypeError):
                pass  # one of them is something else
        if any(entry is None for entry in found):
            return cast("Entry | None", default)
        return _stacked(stack, key, cast("list[Entry]", found))

    def __iter__(self) -> Iterator[str]:
        first, *others = (member._entries for member in self._stack._members)
        keys = first.keys()
        if all(keys == other.keys() for other in others):
            return iter(keys)
        return iter([key for key in keys if all(key in other for other in others)])

    def _kinds(self) -> list[tuple[str, Entry]]:
        """Keys and what is of the kind of their entries: for listing keys, where no value counts.

        So that keys of ragged entries are listed, and nothing is stacked for it.
        """
        stack = self._stack
        found: list[tuple[str, Entry]] = []
        for key in self:
            rows = [member._entries[key] for member in stack._members]
            nodes = all(isinstance(row, TensorDictBase) for row in rows)
            found.append(
                (
                    key,
                    _stacked_nodes(stack, cast("list[TensorDictBase]", rows)) if nodes else rows[0],
                )
            )
        return found

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return all(key in member._entries for member in self._stack._members)


def _stacked(stack: LazyStackedTensorDict, key: str, found: list[Entry]) -> Entry:
    """One entry of all members, or the error that says why there is none."""
    if all(isinstance(entry, Tensor) for entry in found):
        leaves = cast("list[Tensor]", found)
        try:
            return torch.stack(leaves, stack._dim)
        except RuntimeError as error:
            raise _ragged(key, leaves, stack._dim, error) from None
    if all(isinstance(entry, TensorDictBase) for entry in found):
        return _stacked_nodes(stack, cast("list[TensorDictBase]", found))
    if any(isinstance(entry, (Tensor, Waist)) for entry in found):
        kinds = " and a ".join(sorted({f"`{type(entry).__name__}`" for entry in found}))
        raise KeySetMismatch(
            f"entry {format_key(key)} is a {kinds} among the members: it must be of one kind. Read "
            f"it from each, as in `[member[{key!r}] for member in td.unbind({stack._dim})]`."
        )
    values = [cast("Waist", entry)._item() for entry in found]
    if not all(same_data(value, values[0]) for value in values):
        raise InvalidValue(
            f"entry {format_key(key)} is data that differs among the members: it has no one value. "
            f"Read it from each, as in `[member[{key!r}] for member in td.unbind({stack._dim})]`."
        )
    return _registry.wrap_data(values[0], stack._desc.unlocked())


def _stacked_nodes(
    stack: LazyStackedTensorDict, members: list[TensorDictBase]
) -> LazyStackedTensorDict:
    first = members[0]._desc.batch
    if any(member._desc.batch != first for member in members):
        outer = [member._desc.batch for member in stack._members]
        pairs = zip(members, outer, strict=True)
        members = [
            member._with_descriptor(member._desc.with_batch(batch)) for member, batch in pairs
        ]
    nested = LazyStackedTensorDict(*members, stack_dim=stack._dim)
    if stack._desc.frozen:
        nested._desc = nested._desc.with_lock(None, 1)
    return nested


def _ragged(key: str, leaves: list[Tensor], dim: int, error: RuntimeError) -> KdError:
    shapes = {shape_text(leaf.shape): None for leaf in leaves}
    if len(shapes) == 1:
        return InvalidValue(f"entry {format_key(key)} cannot be stacked: {error}")
    return ShapeMismatch(
        f"entry {format_key(key)} is ragged: its shapes among the {len(leaves)} members are "
        f"{', '.join(shapes)}. Read it from each, as in `[member[{key!r}] for member in "
        f"td.unbind({dim})]`, or pad the members to one shape."
    )


class _Row:
    """Takes one row of a dimension."""

    __slots__ = ("_dim", "_row")

    def __init__(self, dim: int, row: int) -> None:
        self._dim, self._row = dim, row

    def __call__(self, leaf: Tensor) -> Tensor:
        return leaf.select(self._dim, self._row)


def _without(dim: int) -> BatchFn:
    return lambda batch: batch[:dim] + batch[dim + 1 :]


def restore_stack(
    cls: type[LazyStackedTensorDict], members: list[TensorDictBase], dim: int, lock: bool
) -> LazyStackedTensorDict:
    """Put a lazy stack together again: what unpickling calls."""
    stack = cls(*members, stack_dim=dim)
    return stack.lock_() if lock else stack


def lazy_stack(members: Sequence[TensorDictBase], dim: int = 0) -> LazyStackedTensorDict:
    """See several containers as one with another batch dimension; nothing is copied.

    Args:
        members: containers of one batch size, one or more.
        dim: where the new dimension stands.

    Raises:
        ShapeMismatch: if the batch sizes differ.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, lazy_stack
        >>> rows = [TensorDict({"a": torch.zeros(n)}) for n in (2, 3)]
        >>> stacked = lazy_stack(rows)
        >>> stacked["a"]
        Traceback (most recent call last):
        ...
        kd_core._errors.ShapeMismatch: entry `a` is ragged: its shapes among the 2 members are ...
        >>> [row["a"].shape[0] for row in stacked.unbind(0)]
        [2, 3]
    """
    return LazyStackedTensorDict(*members, stack_dim=dim)


def maybe_dense_stack(members: Sequence[TensorDictBase], dim: int = 0) -> TensorDictBase:
    """Stack containers into a `TensorDict` if they are alike, else into a lazy stack.

    Args:
        members: containers of one batch size, one or more.
        dim: where the new dimension stands.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, maybe_dense_stack
        >>> rows = [TensorDict({"a": torch.zeros(n)}) for n in (2, 2, 3)]
        >>> [type(maybe_dense_stack(some)).__name__ for some in (rows[:2], rows)]
        ['TensorDict', 'LazyStackedTensorDict']
    """
    stack = LazyStackedTensorDict(*members, stack_dim=dim)
    if stack._alike() is not stack._members:
        return stack
    try:
        return stack.contiguous()
    except KdError:
        return stack
