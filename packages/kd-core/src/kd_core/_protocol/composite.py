"""The base class of containers that are made of members, as lazy stacks are.

An operation that does not need the whole batch runs on each member (`_by_member`), so members keep
their own keys, shapes, dtypes and storage. An operation that changes the structure changes all
members or none (`_change_members`). All others read `_kd_entries`, which stacks the members.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, cast

import torch
from torch.compiler import is_dynamo_compiling

from kd_core._errors import InvalidArgument, ShapeMismatch
from kd_core._leaves.loops import find_entry, refuse_leaf
from kd_core._nodes.entry import tensor_of
from kd_core._protocol.primitives import AbstractContainer
from kd_core._types import NO_DEFAULT

if TYPE_CHECKING:
    from typing import Self

    from kd_core._leaves.writes import Write
    from kd_core._nodes.entry import Entry
    from kd_core._types import Batch, LeafFn


class MemberList(list[object]):
    """The entry of each member of a stack, which may differ in shape."""


Side: TypeAlias = "Literal['left', 'right']"


class Reading:
    """How an entry is read whose shapes differ among the members of a stack; see `reading`."""

    __slots__ = ("form", "layout", "padding_side", "padding_value")

    def __init__(
        self,
        form: Literal["list", "padded", "nested"],
        padding_value: float,
        padding_side: Side,
        layout: torch.layout,
    ) -> None:
        self.form, self.layout = form, layout
        self.padding_value, self.padding_side = padding_value, padding_side


class Composite(AbstractContainer):
    """Members stacked along a batch dimension."""

    __slots__ = ()

    _kd_owns_leaves: ClassVar[bool] = False

    _dim: int
    """The batch dimension along which members are stacked."""

    _members: list[AbstractContainer]

    @abstractmethod
    def _of(self, members: Sequence[AbstractContainer], dim: int | None = None) -> Self:
        """Return a container of other members, stacked along another dimension if one is given."""

    @abstractmethod
    def _replace_members(self, members: Sequence[AbstractContainer]) -> None:
        """Take other members, which fit the descriptor that is set next."""

    @abstractmethod
    def _rows_of_operand(self, other: Entry) -> Sequence[Entry]:
        """Return the part of another container that belongs to each member."""

    @abstractmethod
    def _row_writes(self, index: object, value: object, path: tuple[str, ...]) -> list[Write]:
        """Return the checked writes that store a value in the rows at an index."""

    @abstractmethod
    def _read_as(self, path: tuple[str, ...], default: object, how: Reading) -> object:
        """Return an entry whose shapes may differ; `default` where a member lacks it."""

    def _by_member(self, fn: Callable[..., AbstractContainer], *others: object) -> Self:
        """Apply `fn` to each member and its rows of other containers; stack the results."""
        columns = [self._rows_of_operand(cast("Entry", other)) for other in others]
        return self._of([fn(*row) for row in zip(self._members, *columns, strict=True)])

    def _change_members(
        self, action: str, change: Callable[..., object], *columns: Sequence[object]
    ) -> None:
        """Change the structure of each member; if one fails, restore all.

        Args:
            action: the action, for the message of a locked container.
            change: called once for each member, with the member and its item of each column.
            *columns: further arguments of `change`, one item for each member.
        """
        self._kd_check_unlocked(action)
        rows = {id(row[0]): row for row in zip(self._members, *columns, strict=True)}
        with unchanged_on_error(self):
            for row in rows.values():
                change(*row)


def reading(
    as_list: bool,
    as_padded_tensor: bool,
    as_nested_tensor: bool,
    padding_value: float = 0.0,
    padding_side: Side = "right",
    layout: torch.layout = torch.jagged,
) -> Reading:
    """Return how an entry is read, from the arguments of `get`, of which one is true."""
    if as_list + as_padded_tensor + as_nested_tensor > 1:
        raise InvalidArgument(
            "`as_list`, `as_padded_tensor` and `as_nested_tensor` cannot be combined. Pass one."
        )
    form: Literal["list", "padded", "nested"] = "list" if as_list else "padded"
    return Reading("nested" if as_nested_tensor else form, padding_value, padding_side, layout)


def read_as(
    container: AbstractContainer, path: tuple[str, ...], default: object, how: Reading
) -> object:
    """Return an entry, read as is said if it is in a stack, or `default` where there is none."""
    stack, below = stack_above(container, path)
    if stack is not None:
        return stack._read_as(below, default, how)
    found = find_entry(container._kd_entries, path)
    return default if found is None else found


def absent(container: AbstractContainer, path: tuple[str, ...], default: object) -> object:
    """Return the default of a read; if none is given, `None`, unless it goes on below a tensor."""
    if default is not NO_DEFAULT:
        return default
    refuse_leaf(container._kd_entries, path)
    return None


def holds_entries(container: AbstractContainer) -> bool:
    """Return whether there is an entry; of a stack, in any member: they need not be in all."""
    if isinstance(container, Composite):
        return any(map(holds_entries, container._members))
    return bool(container._kd_entries)


def stack_above(
    container: AbstractContainer, path: tuple[str, ...]
) -> tuple[Composite | None, tuple[str, ...]]:
    """Return the first stack on the way to an entry, and the path of the entry in it."""
    level: object = container
    for depth, part in enumerate(path):
        if isinstance(level, Composite):
            return level, path[depth:]
        if not isinstance(level, AbstractContainer):
            break
        level = level._kd_entries.get(part)
    return None, ()


def rows_or_stacked(stack: Composite, key: str) -> object:
    """Return an entry of a stack; one that cannot be stacked as the list of its rows."""
    try:
        return stack._kd_entries[key]
    except ShapeMismatch:
        return MemberList(
            rows_or_stacked(member, key)
            if isinstance(member, Composite)
            else member._kd_entries[key]
            for member in stack._members
        )


def are_alike(one: Composite, other: Composite) -> bool:
    """Return whether two stacks have as many members along the same dimension."""
    return one._dim == other._dim and len(one._members) == len(other._members)


def takes(fn: LeafFn, index: object, batch: Batch = ()) -> LeafFn:
    """Record on a leaf function its index of the batch, so that a stack can select members.

    An index that may hold `...` is recorded with the batch size that it indexes.
    """
    if type(fn) is not itemgetter and not is_dynamo_compiling():
        fn.__dict__["index"] = index, batch
    return fn


def index_of(fn: LeafFn) -> tuple[object, Batch] | None:
    """Return what `takes` recorded on a leaf function: an index and a batch size."""
    if type(fn) is itemgetter:
        return cast("tuple[object, tuple[object]]", fn.__reduce__())[1][0], ()
    return getattr(fn, "index", None)


@contextmanager
def unchanged_on_error(root: AbstractContainer) -> Iterator[None]:
    """Restore the entries of a container, and of all below it, if the block raises."""
    saved = [(level, dict(level._kd_entries)) for level in _levels(root)]
    try:
        yield
    except BaseException:
        for level, entries in saved:
            _restore(level, entries)
        raise


def _levels(level: AbstractContainer) -> Iterator[AbstractContainer]:
    """Iterate over all containers that hold entries of their own."""
    if not isinstance(level, Composite):
        yield level
    for node in level._kd_below():
        if isinstance(node, AbstractContainer):
            yield from _levels(node)


def _restore(level: AbstractContainer, entries: dict[str, Entry]) -> None:
    """Restore the entries of a level, in their order."""
    old, wanted = list(level._kd_entries), list(entries)
    same = 0
    while same < min(len(old), len(wanted)) and old[same] == wanted[same]:
        same += 1
    for key in old[same:]:
        if not level._kd_keeps(key):
            level._kd_del_entry(key)
    now = level._kd_entries  # read here: a kind may compute it, and entries are gone by now
    for key, entry in entries.items():
        if now.get(key) is not entry:
            level._kd_set_entry(key, entry)


def take_leaves(td: AbstractContainer, made: AbstractContainer) -> None:
    """Replace the leaves of a container by those of another one of the same structure."""
    with unchanged_on_error(td):
        _take_leaves(td, made)


def _take_leaves(td: AbstractContainer, made: AbstractContainer) -> None:
    if isinstance(td, Composite) and isinstance(made, Composite):
        for member, other in zip(td._members, made._members, strict=True):
            _take_leaves(member, other)
        return
    for key, value in made._kd_entries.items():
        mine = td._kd_entries[key]
        if tensor_of(value) is not None:
            td._kd_set_entry(key, value)
        elif isinstance(mine, AbstractContainer) and isinstance(value, AbstractContainer):
            _take_leaves(mine, value)
