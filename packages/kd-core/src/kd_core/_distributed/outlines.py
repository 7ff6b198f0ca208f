"""What ranks compare before they exchange data: keys, dtypes and shapes of all leaves.

The outline of a container that holds nothing but dense tensors is remembered by its keys. One call
of torch compares all leaves with those that it was made of: benchmarks/collectives.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from kd_core._errors import InvalidValue
from kd_core._keys import KeyPath, format_key
from kd_core._leaves.foreach import run_copies
from kd_core._leaves.loops import is_shapeless
from kd_core._leaves.writes import check_write
from kd_core._nodes import is_unbatched, tensor_of
from kd_core._protocol import AbstractContainer, Composite
from kd_core._store.manifest import canonical
from kd_core._torch_private import check_of, unflatten

if TYPE_CHECKING:
    from kd_core._nodes import Entry


DATA: Final = "non-tensor data"
STACK: Final = "lazy stack"


class Row(NamedTuple):
    """One entry in an outline."""

    path: KeyPath
    dtype: str
    """The dtype of a dense tensor; for other entries what they are."""
    shape: tuple[int, ...] | None


class Bucket(NamedTuple):
    """The leaves of one dtype and device, in the order of their paths."""

    dtype: torch.dtype
    device: torch.device
    leaves: list[int]
    """Their positions in the order of the container."""
    pick: Callable[[list[Tensor]], tuple[Tensor, ...]]
    """Return them from all leaves."""
    numel: int
    is_flat: bool
    """Whether each leaf has one dimension."""
    starts: list[int]
    """Where each leaf starts if they follow one another: bytes after the first one."""


class Outline:
    """What ranks compare, and how the leaves stand in messages.

    Attributes:
        rows: the entries in the order of their paths.
        plain: whether all entries are dense tensors, so that the rows say everything.
        digest: stands for `rows`.
        buckets: the messages.
        is_large: whether each leaf is worth a message of its own: benchmarks/collectives.py.
        order: the positions of the rows in the order of the container.
    """

    __slots__ = ("buckets", "digest", "is_large", "order", "plain", "rows")

    def __init__(self, rows: list[Row], devices: Sequence[torch.device] = ()) -> None:
        order = sorted(range(len(rows)), key=lambda position: rows[position].path)
        self.order = order
        self.rows = [rows[position] for position in order]
        self.plain = all(row.shape is not None for row in rows)
        self.digest = digest_of(self.rows)
        found: dict[tuple[str, torch.device], list[int]] = {}
        if devices:
            for position in order:
                found.setdefault((rows[position].dtype, devices[position]), []).append(position)
        self.buckets = [
            _bucket_of(leaves, rows, dtype, device)
            for (dtype, device), leaves in sorted(found.items(), key=lambda item: item[0][0])
        ]
        nbytes = sum(bucket.numel * bucket.dtype.itemsize for bucket in self.buckets)
        self.is_large = nbytes >= _LARGE_LEAF * len(rows) > 0


_LARGE_LEAF: Final = 4 << 20
"""Bytes: how many leaves have on average if each one is worth a message."""


def _bucket_of(leaves: list[int], rows: list[Row], dtype: str, device: torch.device) -> Bucket:
    shapes = [rows[position].shape or () for position in leaves]
    is_flat = all(len(shape) == 1 for shape in shapes)
    kind = getattr(torch, dtype)
    *starts, _ = accumulate((prod(shape) * kind.itemsize for shape in shapes), initial=0)
    first = leaves[0]
    pick = itemgetter(*leaves) if len(leaves) > 1 else lambda every: (every[first],)
    return Bucket(kind, device, leaves, pick, sum(map(prod, shapes)), is_flat, starts)


def digest_of(*parts: object) -> bytes:
    """Return a digest that is the same on all ranks for the same values."""
    return hashlib.sha256(canonical(parts)).digest()


class Room(NamedTuple):
    """Memory for the values of all leaves."""

    flats: list[Tensor]
    """One flat tensor for each bucket."""
    parts: list[list[Tensor]]
    """Views of them in the shapes of the leaves."""

    def each(self) -> list[Tensor]:
        """Return a flat view for each leaf."""
        return [part.view(-1) for parts in self.parts for part in parts]

    def nbytes(self) -> int:
        """Return the bytes of all values."""
        return sum(flat.nbytes for flat in self.flats)


_FREE: Final[dict[Outline, Room]] = {}
"""Memory that no call uses, for the next one with the same outline."""

_MOST_FREE: Final = 64 << 20
"""The bytes that it takes at most."""

_MOST_ROOMS: Final = 16
"""For how many outlines it is kept at most."""


class Outlined(NamedTuple):
    """A container with its outline."""

    td: AbstractContainer
    outline: Outline
    leaves: list[Tensor]
    """The leaves in the order of the container; of a plain outline only."""
    is_whole: bool = False
    """Whether each leaf is contiguous, in the order of its memory, and can be written to."""

    def views(self) -> list[Tensor] | None:
        """Return a flat view of each bucket if its leaves follow one another, else `None`."""
        if not self.is_whole:
            return None
        found: list[Tensor] = []
        for bucket, members in zip(self.outline.buckets, self._members(), strict=True):
            first = members[0]
            start = first.data_ptr()
            if members[-1].data_ptr() - start != bucket.starts[-1]:
                return None  # most often, and the rest takes long
            if list(map(Tensor.data_ptr, members)) != [start + at for at in bucket.starts]:
                return None
            rest = first.untyped_storage().nbytes() // first.itemsize - first.storage_offset()
            if rest < bucket.numel:  # leaves of other storages, which happen to come next
                return None
            found.append(first.detach().as_strided((bucket.numel,), (1,)))
        return found

    def each(self) -> list[Tensor] | None:
        """Return a flat view of each leaf, in the order of the buckets, if there is one."""
        if not self.is_whole:
            return None
        leaves = [leaf.detach() for members in self._members() for leaf in members]
        return [leaf.as_strided((leaf.numel(),), (1,)) for leaf in leaves]  # any stride of one

    def nbytes(self) -> int:
        """Return the bytes of all values."""
        return sum(bucket.numel * bucket.dtype.itemsize for bucket in self.outline.buckets)

    def room(self) -> Room:
        """Return flat tensors of the buckets, with views in the shapes of the leaves."""
        known = _FREE.pop(self.outline, None)
        if known is not None:
            return known
        flats = [
            torch.empty(row.numel, dtype=row.dtype, device=row.device)
            for row in self.outline.buckets
        ]
        parts = [
            list(unflatten(flat, list(members)))
            for flat, members in zip(flats, self._members(), strict=True)
        ]
        return Room(flats, parts)

    def packed(self) -> Room:
        """Return copies of all leaves in flat tensors."""
        room, views = self.room(), self.views()
        with torch.no_grad():
            if views is not None:
                run_copies(room.flats, views, False)
                return room
            for position, members in enumerate(self._members()):
                if self.outline.buckets[position].is_flat:  # benchmarks/collectives.py
                    torch.cat(members, out=room.flats[position])
                else:
                    run_copies(room.parts[position], list(members), False)
        return room

    def write(self, room: Room) -> None:
        """Write the values of flat tensors into the leaves."""
        views = self.views()
        with torch.no_grad():
            if views is not None:
                run_copies(views, room.flats, False)
            else:
                for parts, members in zip(room.parts, self._members(), strict=True):
                    run_copies(list(members), parts, False)
        self.put_back(room)

    def put_back(self, room: Room) -> None:
        """Keep room for the next call."""
        size = room.nbytes()
        if not 0 < size <= _MOST_FREE:
            return
        taken = sum(each.nbytes() for each in list(_FREE.values()))
        if len(_FREE) >= _MOST_ROOMS or size + taken > _MOST_FREE:
            _FREE.clear()
        _FREE[self.outline] = room

    def _members(self) -> list[tuple[Tensor, ...]]:
        return [bucket.pick(self.leaves) for bucket in self.outline.buckets]

    def copy(self, other: Outlined) -> None:
        """Write the leaves of another container of the same plain outline into those of this."""
        targets = [self.leaves[position] for position in self.outline.order]
        sources = [other.leaves[position] for position in other.outline.order]
        with torch.no_grad():
            run_copies(targets, sources, False)

    def check_writable(self) -> None:
        """Check that values can be written into each leaf.

        Raises:
            InvalidValue: if not; the message names the entry.
        """
        if not self.outline.plain:
            for row in self.outline.rows:
                if row.shape is None and row.dtype != DATA:
                    raise InvalidValue(
                        f"entry {format_key(row.path)} is {row.dtype}, and cannot be written in "
                        "place. Receive a new container: pass `None`, or call `from_remote_init`."
                    )
        if self.is_whole:
            return
        with torch.no_grad():
            for path, leaf in _dense_of(self.td):
                check_write(leaf, leaf, path)


class Known(NamedTuple):
    """An outline, and what leaves must be for it."""

    outline: Outline
    fits: Callable[..., bool]
    """Return whether types, dtypes, devices, sizes and strides of leaves are those."""
    is_whole: bool
    """See `Outlined`."""


_KNOWN: Final[dict[tuple[object, ...], list[Known]]] = {}
"""Outlines by the keys of containers."""

_MOST_KNOWN: Final = 64
_MOST_ALIKE: Final = 8
"""How many outlines of the same keys are kept at most."""


def outlined(td: AbstractContainer) -> Outlined:
    """Return a container with its outline.

    Raises:
        InvalidValue: if a leaf is sparse, or on the meta device.
    """
    keys: list[object] = []
    leaves: list[Tensor] = []
    if not _sign(td, keys, leaves):
        return Outlined(td, Outline(rows_of(td)), [])
    key = tuple(keys)
    alike = _KNOWN.get(key, [])
    for known in alike:
        if known.fits(*leaves):
            return Outlined(td, known.outline, leaves, known.is_whole)
    known = _known(rows_of(td), leaves)
    if len(_KNOWN) >= _MOST_KNOWN or len(alike) >= _MOST_ALIKE:
        _KNOWN.clear()
        _FREE.clear()
    _KNOWN.setdefault(key, []).append(known)
    return Outlined(td, known.outline, leaves, known.is_whole)


def _known(rows: list[Row], leaves: list[Tensor]) -> Known:
    """Return the outline of leaves, after they were checked."""
    for row, leaf in zip(rows, leaves, strict=True):
        _check_dense(row.path, leaf)
    is_whole = all(
        leaf.is_contiguous() and not (leaf.is_inference() or leaf.is_conj() or leaf.is_neg())
        for leaf in leaves
    )
    return Known(Outline(rows, [leaf.device for leaf in leaves]), check_of(leaves), is_whole)


_DENSE: Final = frozenset({Tensor, Parameter})


def _sign(td: AbstractContainer, keys: list[object], leaves: list[Tensor]) -> bool:
    """Append the keys of all levels and the leaves; return whether all entries are dense tensors.

    Stops at the first entry that is not.
    """
    if isinstance(td, Composite):
        keys += (type(td), len(td._members))
        return all(_sign(part, keys, leaves) for part in td._members)
    entries: Mapping[str, Any] = td._kd_entries
    keys.append(tuple(entries))
    kinds = set(map(type, entries.values()))
    if kinds <= _DENSE:
        leaves += entries.values()
        keys.append(_END)
        return True
    if _DENSE.isdisjoint(kinds) and _sign_parts(list(entries.values()), kinds, keys, leaves):
        return True
    for key, value in entries.items():
        if type(value) in _DENSE:
            leaves.append(value)
        elif is_unbatched(value) and type(value._tensor) in _DENSE:
            leaves.append(value._tensor)
            keys.append((key, type(value)))
        elif not isinstance(value, AbstractContainer):
            return False
        else:
            keys.append(key)
            if not _sign(value, keys, leaves):
                return False
    keys.append(_END)
    return True


_END: Final = None


def _sign_parts(
    parts: list[Any], kinds: set[type], keys: list[object], leaves: list[Tensor]
) -> bool:
    """Append the keys and leaves of containers at once, if they hold nothing but dense tensors.

    This is the fast path of many layers with few parameters each: benchmarks/collectives.py.
    """
    if any(
        not issubclass(kind, AbstractContainer) or issubclass(kind, Composite) for kind in kinds
    ):
        return False
    entries = [part._kd_entries for part in parts]
    found = [*chain.from_iterable([each.values() for each in entries])]
    if not _DENSE.issuperset(map(type, found)):
        return False
    keys += map(tuple, entries)
    leaves += found
    return True


def rows_of(td: AbstractContainer, path: KeyPath = (), *, members: bool = True) -> list[Row]:
    """Return the entries of a container; a lazy stack is one row without its `members`."""
    if isinstance(td, Composite):
        if not members:
            return [Row(path, STACK, None)]
        parts = enumerate(td._members)
        return [row for at, part in parts for row in rows_of(part, (*path, f"[{at}]"))]
    rows: list[Row] = []
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            rows += rows_of(value, (*path, key), members=members)
        else:
            rows.append(_row_of(value, (*path, key)))
    return rows


def is_stack(rows: Mapping[KeyPath, Row], path: KeyPath) -> bool:
    """Return whether an outline has a lazy stack at a path, as one row or with its members."""
    row, depth = rows.get(path), len(path)
    if row is not None:
        return row.dtype == STACK
    return any(
        len(each) > depth and each[:depth] == path and _MEMBER.fullmatch(each[depth])
        for each in rows
    )


_MEMBER: Final = re.compile(r"\[\d+\]")
"""What a member of a lazy stack is called in a path."""


def _row_of(entry: Entry, path: KeyPath) -> Row:
    value = tensor_of(entry)
    if value is None:
        return Row(path, DATA, None)
    dtype = str(value.dtype).removeprefix("torch.")
    if value.is_nested:
        return Row(path, f"jagged {dtype}", None)
    if type(value) not in _DENSE:
        return Row(path, f"{type(value).__name__} of {dtype}", None)
    return Row(path, dtype, tuple(value.shape))


def _dense_of(td: AbstractContainer, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Tensor]]:
    """Yield the dense tensors of a container with their paths."""
    if isinstance(td, Composite):
        for at, part in enumerate(td._members):
            yield from _dense_of(part, (*path, f"[{at}]"))
        return
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            yield from _dense_of(value, (*path, key))
            continue
        leaf = tensor_of(value)
        if leaf is not None and type(leaf) in _DENSE:
            yield (*path, key), leaf


def _check_dense(path: KeyPath, leaf: Tensor) -> None:
    """Check that a leaf has data, and in a form that can be sent.

    Raises:
        InvalidValue: if not; the message names the entry.
    """
    if leaf.layout is not torch.strided or is_shapeless(leaf):
        kind = "a nested tensor of" if is_shapeless(leaf) else "of"
        raise InvalidValue(
            f"entry {format_key(path)} is {kind} layout {leaf.layout}: only dense and jagged "
            "leaves can be exchanged. `exclude` it first, or make it dense."
        )
    if leaf.is_meta:
        raise InvalidValue(
            f"entry {format_key(path)} is on the meta device and does not have data. Fill it "
            "first, or `exclude` it."
        )
