"""`LazyStackedTensorDict`: a sequence of containers that behaves as one.

Members are not copied: an entry is stacked when it is read, and a write to it writes its rows to
the members. Operations that do not need the whole batch run on each member and return a lazy stack.
What torch makes a view of a tensor is a lazy stack of views of the members. Operations that copy
rows stack the entries and return a `TensorDict` with new storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._base import TensorDictBase
from kd_core._containers.stack_moves import (
    Picked,
    numbered_rows,
    pick,
    plain_class,
    stack_class,
)
from kd_core._containers.stack_writes import (
    MemberStorage,
    describe_stack,
    holds_unbatched,
    nested_rows,
    padded_rows,
    rows_of,
    stage_with_new,
)
from kd_core._descriptor import LOCKED_AS_PART, describe
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KdError,
    KeyNotFound,
    KeySetMismatch,
    ShapeMismatch,
    different_keys,
    listed,
    not_valid,
    restores,
    shape_text,
    wrap_mapping,
    wrong_type,
)
from kd_core._keys import format_key, is_path, path_of, plain_str
from kd_core._leaves.loops import common_batch, has_entry
from kd_core._leaves.writes import Write, write_all
from kd_core._naming import ELSEWHERE, USUAL_KEYS, KeyAsAttribute, NamedElsewhere, leaves_out
from kd_core._nodes import are_data, as_read
from kd_core._ops.binary import cloned, written_to
from kd_core._ops.conversion import build
from kd_core._ops.description import StaysLazy, named, resize, shapes_of
from kd_core._ops.indexing import resolve
from kd_core._ops.joining import maybe_dense_stack
from kd_core._ops.scopes import Flattened, Unflattened, record
from kd_core._ops.shaping import name_dims
from kd_core._protocol import (
    AbstractContainer,
    absent,
    are_alike,
    check_has,
    engine,
    free_parts,
    is_frozen,
    lock,
    locked_as,
    reading,
    unlock,
)
from kd_core._shapes import (
    as_int,
    batch_of,
    broadcasts_to,
    checked_names,
    names_of,
    new_dim,
    refuse_open,
    resized,
    sizes_of,
    with_names,
    wrap_dim,
)
from kd_core._types import NO_DEFAULT, OR_NONE
from kd_core._validation import refuse_cycle

if TYPE_CHECKING:
    from typing import Self

    from kd_core._nodes import AnyKey, Entry, Source
    from kd_core._protocol import Reading, Side
    from kd_core._types import (
        Batch,
        BatchSize,
        DeviceLike,
        Index,
        IndexItem,
        NestedKey,
        NoDefault,
    )

    S = TypeVar("S", bound="LazyStackedTensorDict")


# What may become a member of a stack.


def _check_class(member: TensorDictBase, position: int, cls: type | None) -> None:
    """Refuse a member without the fields of a stack."""
    if cls is not None and not isinstance(member, cls):
        name = cls.__name__
        raise wrong_type(
            f"member {position} that is added to a lazy stack of `{name}`",
            f"an instance of `{name}`",
            member,
            "Make another stack: `lazy_stack([*stack.tensordicts, member])`.",
        )


def check_member(
    member: object, position: int, first: TensorDictBase, holder: MemberStorage | None
) -> None:
    """Check that a container can be a member.

    Args:
        member: the container.
        position: its number, for messages.
        first: a member of the stack.
        holder: the stack, if it exists already.

    Raises:
        InvalidArgument: if it is not a container.
        InvalidValue: if it holds the stack.
        ShapeMismatch: if its batch size has other dimensions than that of the first member; for a
            stack that exists, of members of one batch size, if the batch size differs.
    """
    if not isinstance(member, TensorDictBase):
        what = f"member {position} of" if holder is None else "what is added to"
        what += " a lazy stack"
        raise wrong_type(what, "a container", member, wrap_mapping(member))
    if isinstance(member, MemberStorage) or (holder is not None and member._kd_below()):
        refuse_cycle(f"member {position}", member, holder, ())
    if member._kd_desc is not first._kd_desc:
        mine, theirs = first._kd_desc.batch, member._kd_desc.batch
        one_size = holder is not None and not holder._kd_desc.open
        if len(mine) != len(theirs) or (one_size and mine != theirs):
            raise _does_not_fit(mine, theirs, position, holder)


def _does_not_fit(
    mine: Batch, theirs: Batch, position: int, holder: MemberStorage | None
) -> ShapeMismatch:
    shared = shape_text(common_batch([mine, theirs]))
    remedy = f"Give each container the `batch_size` that they share, {shared}"
    if holder is None:
        return ShapeMismatch(
            "the members of a lazy stack must have batch sizes of as many dimensions, got "
            f"{shape_text(mine)} in member 0 and {shape_text(theirs)} in member {position}. "
            f"{remedy}."
        )
    again = "or make another stack: `lazy_stack([*stack.tensordicts, member])`."
    return ShapeMismatch(
        f"batch sizes must be equal, got {shape_text(mine)} in the members and "
        f"{shape_text(theirs)} in container {position} that is added to the lazy stack. {remedy}, "
        f"{again if len(mine) == len(theirs) else 'or pad them with `pad_sequence`.'}"
    )


@leaves_out(*USUAL_KEYS.split(), kind=KeyAsAttribute)
@leaves_out(*ELSEWHERE, kind=NamedElsewhere)
class LazyStackedTensorDict(MemberStorage):
    """Containers stacked lazily along a new batch dimension.

    Only keys that all members have are visible. A nested container is read as a lazy stack. Writing
    a key writes its rows to the members. The batch sizes of the members have as many dimensions; a
    size that differs among them is -1 in that of the stack, and what needs one size there raises an
    error.

    Args:
        *members: one or more containers, kept by reference.
        stack_dim: the position of the new batch dimension, or the name of the dimension at it.
        batch_size: the batch size that the stack must have; `None` does not check it.
        device: where the members are moved; `None` leaves them where they are.
        names: the names of all batch dimensions; they are set in the members, too.
        stack_dim_name: the name of the new dimension alone.
        strict_shape: refuse members with an entry that cannot be stacked.
        hook_in: `None`; for programs that pass it on.
        hook_out: the same.

    Raises:
        ShapeMismatch: if the batch sizes have different numbers of dimensions.
        KeySetMismatch: with `strict_shape`, if a member has other keys than the first.

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

    __slots__ = ()

    def __new__(cls, *members: TensorDictBase, **options: object) -> Self:
        """Create a stack of the class that its members ask for."""
        return object.__new__(_class_for(cls, members))

    def __init__(
        self,
        *members: TensorDictBase,
        stack_dim: int | str = 0,
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        names: Sequence[str | None] | None = None,
        stack_dim_name: str | None = None,
        strict_shape: bool = False,
        hook_in: object = None,
        hook_out: object = None,
    ) -> None:
        if hook_in is not None or hook_out is not None:
            raise InvalidArgument(
                "`hook_in` and `hook_out` must be `None`: `torch.vmap` maps a stack without hooks. "
                "Leave them out."
            )
        self._assemble(members, stack_dim, device, stack_dim_name, strict_shape, batch_size)
        if names is not None:
            name_dims(self, names)

    def _assemble(
        self,
        members: tuple[TensorDictBase, ...],
        stack_dim: int | str,
        device: DeviceLike | None,
        stack_dim_name: str | None,
        strict_shape: bool,
        batch_size: BatchSize | None = None,
    ) -> None:
        """Set the members; also called by `lazy_stack`: "lazy_stack 8" in the benchmarks."""
        if not members:
            raise InvalidValue("a lazy stack must have at least one member, got none.")
        for position, member in enumerate(members):
            check_member(member, position, members[0], None)
        if device is not None:
            members = tuple([member._kd_engine.to(member, device) for member in members])
        self._dim = new_dim(stack_dim, members[0]._kd_desc.batch)
        self._members = list(members)
        self._kd_desc = describe_stack(members, self._dim)
        if batch_size is not None and batch_of(batch_size) != self._kd_desc.size:
            raise ShapeMismatch(
                f"batch_size must be {shape_text(self._kd_desc.size)}, that of {len(members)} "
                f"members stacked along dimension {self._dim}, got "
                f"{shape_text(batch_of(batch_size))}. Leave it out."
            )
        if strict_shape:
            _check_stackable(self)
        if stack_dim_name is not None:
            mine = list(names_of(self._kd_desc.batch))
            mine[self._dim] = stack_dim_name
            checked = checked_names(mine, self._kd_desc.batch)
            self._kd_desc = self._kd_desc.with_batch(with_names(self._kd_desc.batch, checked))

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[str, Mapping[AnyKey, object]] | Sequence[Mapping[AnyKey, object]],
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
        stack_dim: int | str = 0,
        stack_dim_name: str | None = None,
    ) -> Self:
        """Build a stack from nested dicts, one for each member.

        Args:
            input_dict: the dicts, under the keys `"0"`, `"1"`, ..., or in a list.
            batch_size: the batch size of each member.
            device: the device to which every entry is moved.
            auto_batch_size: infer the batch size of each member.
            batch_dims: the largest number of batch dimensions to infer.
            names: the name of each batch dimension of the stack.
            stack_dim: the position of the new batch dimension.
            stack_dim_name: the name of the new dimension.

        Raises:
            KeyNotFound: if the keys are not the numbers of the members.

        Example:
            >>> from kd_core import LazyStackedTensorDict
            >>> rows = LazyStackedTensorDict.from_dict({"0": {"a": [1]}, "1": {"a": [1, 2]}})
            >>> rows.batch_size, rows[1]["a"]
            (torch.Size([2]), tensor([1, 2]))
        """
        sources = input_dict
        if isinstance(sources, Mapping):
            numbers = [str(number) for number in range(len(sources))]
            missing = [number for number in numbers if number not in sources]
            if missing:
                raise KeyNotFound(
                    f"the members of a lazy stack must have the keys {listed(numbers)}, got "
                    f"{listed(sources)}. Use `TensorDict.from_dict` for entries."
                )
            sources = [sources[number] for number in numbers]
        given = batch_size, device, auto_batch_size, batch_dims
        members = [build(cls, source, *given) for source in sources]  # dense ones
        return cls(*members, stack_dim=stack_dim, names=names, stack_dim_name=stack_dim_name)

    hook_in: ClassVar[None] = None
    """What tensordict calls on entries inside of `vmap`; a stack needs no hook for it."""
    hook_out: ClassVar[None] = None
    """The same for results."""

    def valid_keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> KeysView[NestedKey]:
        """Return the keys that all members have: another name of `keys`."""
        return super().keys(include_nested, leaves_only, is_leaf, sort=sort)

    @property
    def stack_dim(self) -> int:
        """The batch dimension along which the members are stacked."""
        return self._dim

    @property
    def tensordicts(self) -> tuple[TensorDictBase, ...]:
        """The members, in order; `append`, `extend` and `insert` add others."""
        return tuple(self._members)

    @property
    def is_locked(self) -> bool:
        """Whether the structure may not change: the stack is locked, or all its members are."""
        return is_frozen(self)

    @is_locked.setter
    def is_locked(self, locked: bool) -> None:
        self._kd_engine.lock_(self) if locked else self._kd_engine.unlock_(self)

    @overload
    def __getitem__(self, index: NestedKey) -> Tensor: ...
    @overload
    def __getitem__(self, index: Index) -> Self: ...
    def __getitem__(self, index: NestedKey | Index) -> object:
        """Return the entry at a key, or index the batch: `stack[i]` is member `i`."""
        if type(index) is int and self._dim == 0:
            count = len(self._members)
            if -count <= index < count:
                return self._members[index]
        if type(index) is str or is_path(index):
            return super().__getitem__(index)
        picked = pick(index, self._kd_desc.batch, self._dim)
        if picked is None:
            several = self._several(index)
            return super().__getitem__(index) if several is None else several
        try:
            return self._result(picked)
        except (KdError, IndexError):  # it names the batch of a member, not of the stack
            if self._kd_desc.open:
                raise
            return super().__getitem__(index)

    def __setitem__(self, index: object, value: object) -> None:
        """Store a value at a key, or write values at an index of the batch dimensions."""
        if isinstance(index, (str, tuple)) and is_path(index):
            super().__setitem__(index, value)
            return
        try:
            writes = self._row_writes(index, value, ())
        except KeySetMismatch:
            if not self._write_new_keys(index, value):
                raise
        else:
            write_all(writes)

    def _write_new_keys(self, index: object, value: object) -> bool:
        """Write a container, or a mapping, into rows of members, some of which lack keys of it.

        Returns:
            Whether the index selects each member once, and the value has the rows that it selects.
        """
        picked = pick(index, self._kd_desc.batch, self._dim)
        if (
            picked is None
            or not picked.distinct
            or not isinstance(value, Mapping | AbstractContainer)
        ):
            return False
        members = self._picked(picked)
        rows = self._new_rows(index, picked, value)
        if rows is None:
            return False
        writes: list[Write] = []
        added: list[tuple[AbstractContainer, str, Entry]] = []
        for member, row in zip(members, rows, strict=True):
            new = row
            if all(item is None for item in picked.inner) and not member._kd_desc.ndim:
                new = cloned(row._kd_engine.reshape(row, ()))
            elif picked.inner:
                new = cloned(member)
                new[picked.inner] = row
            elif row._kd_desc.batch != member._kd_desc.batch:
                return False
            stage_with_new(member, new, (), writes, added)
        write_all(writes)
        for level, key, entry in added:
            level._kd_set_entry(key, entry)
        return True

    def _new_rows(
        self, index: object, picked: Picked, value: object
    ) -> Sequence[TensorDictBase] | None:
        """Return copies of the rows that an index gives each member; `None` if they do not fit."""
        if isinstance(picked.rows, int):
            shape = (*self._members[picked.rows]._kd_desc.batch,)
            if picked.inner:
                shape = resolve(picked.inner, shape)[1]
        elif self._kd_desc.open:
            shape = None
        else:
            shape = tuple(numbered_rows(self, index)[1].shape)
        if not isinstance(value, AbstractContainer):
            if shape is None:
                return None
            value = registry.nest_mapping(value, describe(shape), ())
        given = cast("TensorDictBase", value)
        if shape is not None and given._kd_desc.batch != shape:
            if not broadcasts_to(given._kd_desc.batch, shape):
                return None
            given = given._kd_engine.expand(given, shape)
        rows = given._kd_map_each(torch.clone)
        if isinstance(picked.rows, int):
            return [rows]
        if rows._kd_desc.batch[picked.dim : picked.dim + 1] != (len(picked.rows),):
            return None
        return rows._kd_engine.unbind(rows, picked.dim)

    def __getitems__(self, index: Sequence[int]) -> Self:
        """Return several rows; called by `DataLoader`."""
        return self[list(index)]

    def __iter__(self) -> Iterator[Self]:
        refuse_open(self._kd_desc.batch[:1])
        return super().__iter__()

    def __len__(self) -> int:
        refuse_open(self._kd_desc.batch[:1])
        return super().__len__()

    # What is done member by member where their sizes differ.

    def numel(self) -> int:
        """Return the number of rows: of members of different sizes, the sum of theirs."""
        if not self._kd_desc.open:
            return super().numel()
        return sum([member._kd_engine.numel(member) for member in self._members])

    def unbind(self, dim: int | str = 0) -> tuple[Self, ...]:
        """Return a container for each row along a batch dimension; see `TensorDict.unbind`."""
        batch = self._kd_desc.batch
        at = wrap_dim(dim, batch)
        if self._kd_desc.open:
            refuse_open(batch[at : at + 1])
            before: list[IndexItem] = [slice(None)] * at
            parts = tuple([self[(*before, row)] for row in range(batch[at])])
        else:
            parts = super().unbind(dim)
        if at != self._dim:  # as those of a dense container
            for part in parts:
                if part._kd_desc.frozen:
                    unlock(part)
        return parts

    def reshape(
        self,
        *args: int | Sequence[int],
        shape: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        inplace: bool = False,
    ) -> Self:
        """Reshape the batch dimensions; see `TensorDict.reshape`.

        Where the sizes of the members differ, `reshape(-1)` returns all of their rows.
        """
        desc = self._kd_desc
        if desc.open and not inplace:
            sizes = sizes_of(args or (shape or size or (),))
            if sizes == desc.size:  # as users see it
                return locked_as(self, self._kd_shallow())
            if sizes in ((-1,), (engine(self).numel(self),)):
                return self._rows_of_members(desc.ndim - 1)
        return super().reshape(*args, shape=shape, size=size, inplace=inplace)

    def flatten(
        self, start_dim: int | str = 0, end_dim: int | str = -1, *, inplace: bool = False
    ) -> Self:
        """Merge neighbouring batch dimensions into one; see `TensorDict.flatten`.

        Where the sizes of the members differ, the stacked dimension, as the first, can be merged
        with those that follow it.
        """
        batch = self._kd_desc.batch
        if self._kd_desc.open and not inplace:
            start, end = wrap_dim(start_dim, batch), wrap_dim(end_dim, batch)
            if start == 0 < end:
                return self._rows_of_members(end)
        return super().flatten(start_dim, end_dim, inplace=inplace)

    def _rows_of_members(self, end: int) -> Self:
        """Return the rows of all members, whose dimensions before `end` are merged."""
        if self._dim:
            refuse_open(self._kd_desc.batch)
        rows: list[TensorDictBase] = []
        for member in self._members:
            of = member._kd_engine
            rows += of.unbind(of.flatten(member, 0, end - 1), 0)
        return locked_as(self, self._of(rows))

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
        """Stack all entries and return a dense container, of the class that all members have.

        Entries that only some members hold are left out.

        Raises:
            ShapeMismatch: if the shapes of an entry differ among the members.
            InvalidArgument: if `inplace`: a lazy stack stays lazy.
        """
        if inplace:
            raise StaysLazy(
                "cannot make contiguous in place: a lazy stack stays lazy. Leave out "
                "`inplace=True`, and use the result."
            )
        joined = _join_alike(self._members, self._dim, self._kd_desc.batch[self._dim])
        if joined is not None:
            return self._kd_like(joined, self._kd_desc._unlocked)
        entries = self._kd_entries
        dense: dict[str, Entry] = {}
        for key in entries:
            value = entries[key]
            if isinstance(value, LazyStackedTensorDict):
                value = value._kd_engine.contiguous(value)
            dense[key] = (
                value if isinstance(value, Tensor) else value._kd_map_each(Tensor.contiguous)
            )
        return self._kd_like(dense, self._kd_desc.unlocked())

    def _kd_selected(self, keys: Sequence[NestedKey], strict: bool) -> Self | None:
        if strict and not all(has_entry(self._kd_entries, path_of(key)) for key in keys):
            return None
        return self._by_member(lambda member: member._kd_engine.select(member, *keys, strict=False))

    def _kd_without(self, keys: Sequence[NestedKey]) -> Self:
        return self._by_member(lambda member: member._kd_without(keys))

    def _kd_unset(self) -> Sequence[str]:
        return self._members[0]._kd_unset() if self._members else ()

    def _kd_replace_entries(self, other: AbstractContainer, action: str) -> Self:
        self._change_members(
            action,
            lambda member, entries: member._kd_replace_entries(entries, action),
            self._rows(other),
        )
        return self

    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> Self:
        """Rename a key in each member; see `TensorDict.rename_key_`."""
        action = f"rename {format_key(old_key)}"
        self._kd_check_unlocked(action)
        check_has(self, path_of(old_key))
        self._change_members(
            action,
            lambda member: member._kd_engine.rename_key_(member, old_key, new_key, safe),
        )
        return self

    def update(
        self,
        input_dict_or_td: Source[AnyKey] | NoDefault | None = NO_DEFAULT,
        clone: bool = False,
        inplace: bool = False,
        non_blocking: bool = False,
        keys_to_update: Iterable[NestedKey] | None = None,
        is_leaf: Callable[[type], bool] | None = None,
        update_batch_size: bool = False,
        **entries: object,
    ) -> Self:
        """Store the entries of a source; a stack of the same shape updates member by member."""
        alike = isinstance(input_dict_or_td, MemberStorage) and are_alike(self, input_dict_or_td)
        other = (
            isinstance(input_dict_or_td, AbstractContainer)
            and input_dict_or_td._kd_desc.batch != self._kd_desc.batch
        )
        if update_batch_size and other and (inplace or not alike):
            raise InvalidArgument(
                "`update_batch_size=True` cannot change the number of members of a lazy stack. "
                "Make it dense with `contiguous()` first."
            )
        return super().update(
            input_dict_or_td,
            clone,
            inplace,
            non_blocking=non_blocking,
            keys_to_update=keys_to_update,
            is_leaf=is_leaf,
            update_batch_size=update_batch_size and not other,
            **entries,
        )

    def clear(self) -> Self:
        """Remove all entries of each member; return self."""
        self._change_members("remove all entries", lambda member: member._kd_engine.clear(member))
        return self

    def filter_empty_(self) -> Self:
        """Remove nested containers without any entry from each member; return self."""
        self._change_members(
            "remove empty containers", lambda member: member._kd_engine.filter_empty_(member)
        )
        return self

    def flatten_keys(
        self,
        separator: str = ".",
        inplace: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
    ) -> Self:
        """Join the keys of nested entries of each member; see `TensorDict.flatten_keys`."""
        flat = self._by_member(
            lambda member: member._kd_engine.flatten_keys(member, separator, is_leaf=is_leaf)
        )
        if inplace:
            return self._kd_replace_entries(flat, "flatten keys in place")
        return record(flat, self, Flattened, (plain_str(separator), is_leaf))

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """Split keys of each member at a separator; see `TensorDict.unflatten_keys`."""
        nested = self._by_member(lambda member: member._kd_engine.unflatten_keys(member, separator))
        if inplace:
            return self._kd_replace_entries(nested, "unflatten keys in place")
        return record(nested, self, Unflattened, plain_str(separator))

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: BatchSize | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        names: Sequence[str | None] | NoDefault | None = NO_DEFAULT,
    ) -> Self:
        """Return a stack of empty members; a `TensorDict` if their number does not fit the size."""
        if batch_size is None and device is NO_DEFAULT and names is NO_DEFAULT:
            return self._by_member(lambda member: member._kd_engine.empty(member, recurse))
        batch = self._kd_desc.batch if batch_size is None else batch_of(batch_size)
        dim = self._dim
        if recurse or batch[dim : dim + 1] != (len(self._members),):
            return super().empty(recurse, batch_size=batch_size, device=device, names=names)
        inner = (*batch[:dim], *batch[dim + 1 :])
        stack = self._by_member(
            lambda member: member._kd_engine.empty(member, batch_size=inner, device=device)
        )
        return stack if names is NO_DEFAULT else named(stack, names)

    def is_empty(self) -> bool:
        """Return whether all members have no leaf."""
        return all(member._kd_engine.is_empty(member) for member in self._members)

    def __reduce__(self) -> tuple[object, ...]:
        reason = self._kd_desc.pickled_lock
        kind = type(self)
        if self._kd_tensor_class is not None:
            kind = plain_class(kind)
        locked = reason if reason == LOCKED_AS_PART else reason is not None
        given = kind, self._members, self._dim, locked
        name = names_of(self._kd_desc.batch)[self._dim]
        return restore_stack, given if name is None else (*given, name)

    # How ragged entries are read, and members are added.

    @overload
    def get(
        self,
        key: NestedKey,
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
    def get(
        self, key: NestedKey, default: object = None, *, as_list: Literal[True]
    ) -> list[Tensor]: ...
    def get(
        self,
        key: NestedKey,
        default: object = OR_NONE,
        *,
        as_list: bool = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> object:
        """Return the entry at `key`, stacked; or `default` where a member has none.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            default: what is returned if the key is missing, `None` if it is not given; with
                `NO_DEFAULT`, a missing key raises.
            as_list: return the tensors of the members in a list, not stacked; entries that are not
                tensors are stacked.
            as_padded_tensor: pad the entries to one shape, then stack them.
            as_nested_tensor: return a nested tensor; the stacked dimension must be the first.
            padding_value: the value of the elements that are added.
            padding_side: where they are added: `"left"` or `"right"`.
            layout: the layout of a nested tensor.

        Raises:
            ShapeMismatch: if the shapes differ among the members, and how to read them is not said.
            KeyThroughLeaf: if the key goes on below a tensor, and no default is given.
            KeyNotFound: if the key is missing, and the default is `NO_DEFAULT`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 2)])
            >>> stack.get("a", as_padded_tensor=True)
            tensor([[1., 0.],
                    [1., 1.]])
            >>> [row.shape[0] for row in stack.get("a", as_list=True)]
            [1, 2]
        """
        if not (as_list or as_padded_tensor or as_nested_tensor):
            if self._kd_tensor_class is None or default is OR_NONE:
                return super().get(key, default)
            entry = super().get(key, None)
            return absent(self, path_of(key), default) if entry is None else entry
        options = padding_value, padding_side, layout
        how = reading(as_list, as_padded_tensor, as_nested_tensor, *options)
        path = path_of(key)
        found = self._read_as(path, None, how)
        return absent(self, path, default) if found is None else found

    def _read_as(self, path: tuple[str, ...], default: object, how: Reading) -> object:
        if not all(has_entry(member._kd_entries, path) for member in self._members):
            return default
        rows = rows_of(self, path)
        if not _hold_tensors(rows):
            return super().get(path, default)
        if how.form == "list":
            return rows
        if how.form == "padded":
            return padded_rows(self, path, how.padding_value, how.padding_side)
        return nested_rows(self, path, how.layout)

    def get_nestedtensor(
        self, key: NestedKey, default: object = NO_DEFAULT, *, layout: torch.layout | None = None
    ) -> Tensor:
        """Return the entry at `key` as a nested tensor, of strided layout unless it is said.

        Raises:
            KeyNotFound: if a member lacks it and there is no default.
        """
        if default is NO_DEFAULT:
            path = path_of(key)
            lacking = [
                number
                for number, member in enumerate(self._members)
                if not has_entry(member._kd_entries, path)
                and not isinstance(member._kd_entries.get(path[0]), Tensor)  # what `get` refuses
            ]
            if lacking:
                raise KeyNotFound(
                    f"key {format_key(path)} not found in the members {lacking} of the stack. Set "
                    "it there, or give a default."
                )
        layout = layout or torch.strided
        return engine(self).get(self, key, default, as_nested_tensor=True, layout=layout)

    def _kd_dense_entry(self, key: str, layout: torch.layout) -> Entry:
        try:
            return super()._kd_dense_entry(key, layout)
        except ShapeMismatch:
            if holds_unbatched(self, key):
                raise
            return nested_rows(self, (key,), layout)

    def auto_batch_size_(
        self, batch_dims: int | None = None, keep_compliant_size: bool = False
    ) -> Self:
        """Set the batch size to the leading dimensions that the leaves of all members share.

        The stacked dimension stays; see `TensorDict.auto_batch_size_`.
        """
        if batch_dims is not None and batch_dims <= self._dim:
            raise InvalidValue(
                f"`batch_dims` must be larger than the stacked dimension {self._dim}, got "
                f"{batch_dims}. Call `contiguous()` first."
            )
        shapes = [shape for member in self._members for shape in shapes_of(member)]
        inner = common_batch(shapes, None if batch_dims is None else batch_dims - 1)
        if len(inner) < self._dim:
            raise ShapeMismatch(
                f"the leaves of the members share {len(inner)} leading dimensions, and the stacked "
                f"dimension is {self._dim}. Call `contiguous()` first."
            )
        resize(self, (*inner[: self._dim], len(self._members), *inner[self._dim :]))
        return self

    def append(self, tensordict: TensorDictBase) -> None:
        """Add a container to the end of the stack; see `insert`.

        Example:
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=0)])
            >>> stack.append(TensorDict(a=1))
            >>> stack["a"]
            tensor([0, 1])
        """
        engine(self).insert(self, len(self._members), tensordict)

    def extend(self, tensordict: Iterable[TensorDictBase]) -> None:
        """Add containers to the end of the stack: all, or none if one does not fit.

        Args:
            tensordict: containers of the batch size of the members, or, where theirs differ, of as
                many dimensions; or a container whose rows along its first dimension are added.

        Example:
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=0)])
            >>> stack.extend([TensorDict(a=1), TensorDict(a=2)])
            >>> stack.batch_size
            torch.Size([3])
        """
        self._grow(len(self._members), list(tensordict))

    def insert(self, index: int, tensordict: TensorDictBase) -> None:
        """Add a container before the member at a position, as `list.insert` does.

        The batch size of the stack grows. A container that holds the stack does not learn of it, so
        take the stack out of its container first.

        Args:
            index: the position in the stacked dimension.
            tensordict: a container of the batch size of the members, or, where theirs differ, of as
                many dimensions; kept by reference.

        Raises:
            ShapeMismatch: if its batch size differs from the one that all members have.
            Locked: if the stack is locked.

        Example:
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=0), TensorDict(a=2)])
            >>> stack.insert(1, TensorDict(a=1))
            >>> stack["a"]
            tensor([0, 1, 2])
        """
        self._grow(as_int(index), [tensordict])

    def _replaced(self, **changes: object) -> Self:
        """Return a stack of new members with some fields changed; for stacks of tensor classes."""
        columns = {key: self._rows(self._kd_as_entry(key, value)) for key, value in changes.items()}
        members = []
        for position, member in enumerate(self._members):
            replace: Callable[..., TensorDictBase] = getattr(member, "__replace__")  # noqa: B009  # hidden
            members.append(replace(**{key: rows[position] for key, rows in columns.items()}))
        return self._of(members)

    def _grow(self, index: int, members: list[TensorDictBase]) -> None:
        if is_frozen(self):
            self._kd_check_unlocked("add members")
        for position, member in enumerate(members):
            check_member(member, position, self._members[0], self)
            _check_class(member, position, self._kd_tensor_class)
        grown = self._members.copy()
        grown[index:index] = members
        size = resized(self._kd_desc.batch[self._dim], len(grown))
        self._kd_desc, self._members = describe_stack(grown, self._dim, size), grown


def _class_for(kind: type[S], members: Sequence[Any]) -> type[S]:
    """Return the class of a stack that is created."""
    if members and getattr(members[0], "_kd_tensor_class", None) is not None:
        return stack_class(kind, members)
    return kind


def _check_stackable(stack: LazyStackedTensorDict) -> None:
    """Refuse members whose keys or shapes differ."""
    first, *others = (
        dict.fromkeys(map(format_key, each._kd_engine.keys(each, True))) for each in stack._members
    )
    for position, keys in enumerate(others, 1):
        if keys.keys() != first.keys():
            raise different_keys(
                first, keys, ("member 0", f"member {position}"), " of a stack of strict shape"
            )
    rows = [each._members for each in stack._members if isinstance(each, LazyStackedTensorDict)]
    if len(rows) == len(stack._members) and len(set(map(len, rows))) == 1:
        for column in zip(*rows, strict=True):  # ragged ones may be alike
            _check_stackable(lazy_stack(column))
        return
    for key in stack._kd_engine.keys(stack, True):
        stack._kd_engine.get(stack, key)


def _join_alike(members: Sequence[TensorDictBase], dim: int, size: int) -> dict[str, Entry] | None:
    """Stack all entries of members with equal keys; return `None` where the slow path is needed.

    `size` is the number of members, which may carry the name of the dimension.

    Does not build a lazy stack for each nested container: "lazy_stack.contiguous()" in the
    benchmarks.
    """
    levels: list[Any] = [member._kd_entries for member in members]
    first = levels[0]
    for level in levels:
        if type(level) is not dict or len(level) != len(first):
            return None
    joined: dict[str, Entry] = {}
    for key, value in first.items():
        column = [level.get(key) for level in levels]
        if type(value) is Tensor:
            try:
                joined[key] = torch.stack(column, dim)
            except (KdError, RuntimeError, TypeError):
                return None
            continue
        if not isinstance(value, TensorDictBase):
            return None
        kind, desc = type(value), value._kd_desc
        if any(type(node) is not kind or node._kd_desc is not desc for node in column):
            return None
        below = _join_alike(column, dim, size)
        if below is None:
            return None
        batch = (*desc.batch[:dim], size, *desc.batch[dim:])
        joined[key] = value._kd_like(below, desc.with_batch(batch))
    return joined


@restores
def restore_stack(
    cls: type[LazyStackedTensorDict],
    members: list[TensorDictBase],
    dim: int,
    locked: bool | str,
    name: str | None = None,
) -> LazyStackedTensorDict:
    """Rebuild a lazy stack; called by pickle.

    What it encloses, and the stack itself, is locked as `restore_dense` says.

    Raises:
        FormatError: if the class or the members do not fit: a pickle may say anything.
    """
    kind = registry.kind_named(cls, LazyStackedTensorDict)
    if type(dim) is not int or not (name is None or type(name) is str):
        raise not_valid(f"{dim!r} and {name!r} are not a dimension and its name")
    stack = built_stack(kind, members, dim, name)
    free_parts(stack._members)
    if locked == LOCKED_AS_PART:
        return lock(stack, LOCKED_AS_PART)
    return stack._kd_engine.lock_(stack) if locked else stack


def built_stack(
    kind: type[LazyStackedTensorDict],
    members: list[TensorDictBase],
    dim: int,
    name: str | None,
) -> LazyStackedTensorDict:
    """Build a lazy stack of a class."""
    return kind(*members, stack_dim=dim, stack_dim_name=name)


def _hold_tensors(rows: list[object]) -> bool:
    return any(
        isinstance(row, Tensor) or (type(row) is list and _hold_tensors(row)) for row in rows
    )


def lazy_stack(
    input: Sequence[TensorDictBase] | Sequence[Tensor],
    dim: int | str = 0,
    *,
    out: TensorDictBase | None = None,
    device: DeviceLike | None = None,
    stack_dim_name: str | None = None,
    strict_shape: bool = False,
    as_list: bool = False,
    as_padded_tensor: bool = False,
    as_nested_tensor: bool = False,
    padding_value: float = 0.0,
    padding_side: Side = "right",
    layout: torch.layout = torch.jagged,
) -> LazyStackedTensorDict:
    """Stack containers lazily along a new batch dimension; nothing is copied.

    Tensors are stacked at once: as an entry of a lazy stack is read.

    Args:
        input: one or more containers whose batch sizes have as many dimensions, or tensors. A size
            that differs among them is -1 in the batch size of the stack.
        dim: the position of the new dimension, or the name of the dimension at it.
        out: a container into whose leaves the stacked entries are written; it is returned.
        device: where the members are moved; `None` leaves them where they are.
        stack_dim_name: the name of the new dimension.
        strict_shape: refuse members with an entry that cannot be stacked.
        as_list: return tensors as a list.
        as_padded_tensor: return tensors of different shapes padded to one shape and stacked.
        as_nested_tensor: return tensors of different shapes as a nested tensor.
        padding_value: the value of the elements that are added.
        padding_side: where they are added: `"left"` or `"right"`.
        layout: the layout of a nested tensor.

    Raises:
        ShapeMismatch: if the batch sizes have different numbers of dimensions, or the shapes of
            tensors that are stacked differ.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, lazy_stack
        >>> rows = [TensorDict({"a": torch.zeros(n)}) for n in (2, 3)]
        >>> stacked = lazy_stack(rows)
        >>> stacked["a"]
        Traceback (most recent call last):
        ...
        kd_core.ShapeMismatch: Failed to stack tensors within a tensordict: entry `a` is ragged: ...
        >>> [row["a"].shape[0] for row in stacked.unbind(0)]
        [2, 3]
        >>> lazy_stack([torch.zeros(1), torch.ones(2)], as_padded_tensor=True)
        tensor([[0., 0.],
                [1., 1.]])
    """
    position: object = dim
    if isinstance(position, TensorDictBase):
        raise wrong_type(
            "the input of `lazy_stack`",
            "a list or tuple of containers",
            input,
            "Put them in a list: `lazy_stack([a, b])`.",
        )
    rows: tuple[Any, ...] = tuple(input)
    if rows and all(isinstance(row, Tensor) for row in rows):
        how = None
        if as_list or as_padded_tensor or as_nested_tensor:
            options = padding_value, padding_side, layout
            how = reading(as_list, as_padded_tensor, as_nested_tensor, *options)
        return cast("LazyStackedTensorDict", _stacked_tensors(rows, dim, how))
    if are_data(rows):
        return cast("LazyStackedTensorDict", torch.stack(rows, new_dim(dim, rows[0].batch_size)))
    stack = object.__new__(_class_for(LazyStackedTensorDict, rows))
    stack._assemble(rows, dim, device, stack_dim_name, strict_shape)
    return stack if out is None else cast("LazyStackedTensorDict", written_to(out, stack))


def _stacked_tensors(
    rows: Sequence[Tensor], dim: int | str, how: Reading | None
) -> Tensor | list[Tensor]:
    """Return tensors as an entry of a lazy stack of containers is read that hold them."""
    if how is not None and how.form == "list":
        return list(rows)
    held: list[TensorDictBase] = [registry.make_dense({"rows": row}, describe(())) for row in rows]
    stack = lazy_stack(held)
    at = new_dim(dim, (0,) * min(row.ndim for row in rows))
    found = stack["rows"] if how is None else as_read(stack._read_as(("rows",), None, how))
    return found if found.is_nested else found.movedim(0, at)


def dense_stack_tds(
    td_list: Sequence[TensorDictBase] | TensorDictBase, dim: int | str = 0
) -> TensorDictBase:
    """Stack containers as `maybe_dense_stack` does, densely wherever they are alike.

    Args:
        td_list: one or more containers, or a lazy stack, whose members are stacked where it has
            them.
        dim: the position of the new dimension, or the name of the dimension at it.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, dense_stack_tds, lazy_stack
        >>> stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)], 1)
        >>> dense_stack_tds(stack)
        TensorDict(batch_size=[2, 3], fields={a: f32[]})
    """
    if isinstance(td_list, LazyStackedTensorDict):
        return maybe_dense_stack(td_list._members, td_list._dim)
    rows: list[TensorDictBase] = [*td_list]
    return maybe_dense_stack(rows, dim)


registry.register("lazy_stack", lazy_stack)
