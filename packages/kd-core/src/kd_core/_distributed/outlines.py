"""What ranks compare before they exchange data: keys, dtypes and shapes of all leaves.

The outline of a container that holds nothing but dense tensors is remembered by what it depends on,
so that a call with the same schema as an earlier one only reads it: benchmarks/collectives.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from kd_core._errors import InvalidValue, KdError, KeySetMismatch, ShapeMismatch
from kd_core._keys import format_key
from kd_core._leaves.writes import check_write
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer
from kd_core._store.canonical import canonical
from kd_core._wire.flat import view_of

if TYPE_CHECKING:
    from kd_core._nodes.entry import Entry

Path: TypeAlias = tuple[str, ...]


DATA: Final = "non-tensor data"


class Row(NamedTuple):
    """One entry in an outline."""

    path: Path
    dtype: str
    """The dtype of a dense tensor; for other entries what they are."""
    shape: tuple[int, ...] | None


class Bucket(NamedTuple):
    """The leaves of one dtype and device, in the order of their paths."""

    dtype: torch.dtype
    device: torch.device
    leaves: list[int]
    """Their positions in the order of the container."""
    numel: int
    is_flat: bool
    """Whether each leaf has one dimension."""


class Outline:
    """What ranks compare, and how the leaves stand in messages.

    Attributes:
        rows: the entries in the order of their paths.
        plain: whether all entries are dense tensors, so that the rows say everything.
        digest: stands for `rows`.
        buckets: the messages.
        order: the positions of the rows in the order of the container.
    """

    __slots__ = ("buckets", "digest", "order", "plain", "rows")

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


def _bucket_of(leaves: list[int], rows: list[Row], dtype: str, device: torch.device) -> Bucket:
    shapes = [rows[position].shape or () for position in leaves]
    is_flat = all(len(shape) == 1 for shape in shapes)
    return Bucket(getattr(torch, dtype), device, leaves, sum(map(prod, shapes)), is_flat)


def digest_of(*parts: object) -> bytes:
    """Return a digest that is the same on all ranks for the same values."""
    return hashlib.sha256(canonical(parts)).digest()


class Room(NamedTuple):
    """Memory for the values of all leaves."""

    flats: list[Tensor]
    """One flat tensor for each bucket."""
    parts: list[list[Tensor]]
    """Views of them in the shapes of the leaves."""

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

    def views(self) -> list[Tensor] | None:
        """Return a flat view of each bucket if its leaves follow one another, else `None`."""
        found: list[Tensor] = []
        with torch.no_grad():
            for members in self._members():
                flat = view_of(members)
                if flat is None:
                    return None
                found.append(flat)
        return found

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
        both = zip(flats, self._members(), strict=True)
        return Room(flats, [list(torch._C._nn.unflatten_dense_tensors(*pair)) for pair in both])

    def packed(self) -> Room:
        """Return copies of all leaves in flat tensors."""
        room = self.room()
        with torch.no_grad():
            for position, members in enumerate(self._members()):
                if self.outline.buckets[position].is_flat:  # benchmarks/collectives.py
                    torch.cat(members, out=room.flats[position])
                else:
                    torch._foreach_copy_(room.parts[position], members)
        return room

    def write(self, room: Room) -> None:
        """Write the values of flat tensors into the leaves."""
        with torch.no_grad():
            for parts, members in zip(room.parts, self._members(), strict=True):
                torch._foreach_copy_(members, parts)
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

    def _members(self) -> list[list[Tensor]]:
        buckets = self.outline.buckets
        return [[self.leaves[position] for position in bucket.leaves] for bucket in buckets]

    def copy(self, other: Outlined) -> None:
        """Write the leaves of another container of the same plain outline into those of this."""
        targets = [self.leaves[position] for position in self.outline.order]
        sources = [other.leaves[position] for position in other.outline.order]
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)

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
        leaves = self.leaves
        if all([leaf.is_contiguous() for leaf in leaves]) and not any(  # noqa: C419  # a generator is slower
            [leaf.is_inference() for leaf in leaves]  # noqa: C419  # as above
        ):
            return
        with torch.no_grad():
            for path, leaf in zip(_paths_of(self.td), leaves, strict=True):
                check_write(leaf, leaf, path)


_KNOWN: Final[dict[tuple[object, ...], Outline]] = {}
_MOST_KNOWN: Final = 64


def outlined(td: AbstractContainer) -> Outlined:
    """Return a container with its outline.

    Raises:
        InvalidValue: if a leaf is sparse, or on the meta device.
    """
    keys: list[object] = []
    leaves: list[Tensor] = []
    if not _sign(td, keys, leaves):
        return Outlined(td, Outline(rows_of(td)), [])
    # Lists, since a generator is slower: benchmarks/collectives.py.
    devices = [leaf.device for leaf in leaves]
    dtypes, shapes = [leaf.dtype for leaf in leaves], [leaf.shape for leaf in leaves]
    layouts = [leaf.layout for leaf in leaves]
    key = (*keys, *devices, *dtypes, *shapes, *layouts)
    known = _KNOWN.get(key)
    if known is None:
        rows = rows_of(td)
        for row, leaf in zip(rows, leaves, strict=True):
            _check_dense(row.path, leaf)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
            _FREE.clear()
        known = _KNOWN[key] = Outline(rows, devices)
    return Outlined(td, known, leaves)


_DENSE: Final = frozenset({Tensor, Parameter})


def _sign(td: AbstractContainer, keys: list[object], leaves: list[Tensor]) -> bool:
    """Append the keys of all levels and the leaves; return whether all entries are dense tensors.

    Stops at the first entry that is not.
    """
    if isinstance(td, Composite):
        keys += (type(td), len(td._members))
        return all(_sign(part, keys, leaves) for part in td._members)
    entries = td._entries
    keys.append(tuple(entries))
    for key, value in entries.items():
        if type(value) in _DENSE:
            leaves.append(value)  # type: ignore[arg-type]  # a tensor
        elif not isinstance(value, AbstractContainer):
            return False
        else:
            keys.append(key)
            if not _sign(value, keys, leaves):
                return False
    keys.append(_END)
    return True


_END: Final = "end"


def rows_of(td: AbstractContainer, path: Path = (), *, members: bool = True) -> list[Row]:
    """Return the entries of a container; a lazy stack is one row without its `members`."""
    if isinstance(td, Composite):
        if not members:
            return [Row(path, "lazy stack", None)]
        parts = enumerate(td._members)
        return [row for at, part in parts for row in rows_of(part, (*path, f"[{at}]"))]
    rows: list[Row] = []
    for key, value in td._entries.items():
        if isinstance(value, AbstractContainer):
            rows += rows_of(value, (*path, key), members=members)
        else:
            rows.append(_row_of(value, (*path, key)))
    return rows


def _row_of(value: Entry, path: Path) -> Row:
    if not isinstance(value, Tensor):
        return Row(path, DATA, None)
    dtype = str(value.dtype).removeprefix("torch.")
    if value.is_nested:
        return Row(path, f"jagged {dtype}", None)
    if type(value) not in _DENSE:
        return Row(path, f"{type(value).__name__} of {dtype}", None)
    return Row(path, dtype, tuple(value.shape))


def _paths_of(td: AbstractContainer) -> list[Path]:
    return [row.path for row in rows_of(td)]


def _check_dense(path: Path, leaf: Tensor) -> None:
    """Check that a leaf has data, and in a form that can be sent.

    Raises:
        InvalidValue: if not; the message names the entry.
    """
    if leaf.layout is not torch.strided:
        raise InvalidValue(
            f"entry {format_key(path)} is of layout {leaf.layout}: only dense and jagged leaves "
            "can be exchanged. `exclude` it first, or make it dense."
        )
    if leaf.is_meta:
        raise InvalidValue(
            f"entry {format_key(path)} is on the meta device and does not have data. Fill it "
            "first, or `exclude` it."
        )


def difference(call: str, told: Sequence[tuple[int, Sequence[Row]]]) -> KdError:
    """Return the error that names the first entry in which outlines differ.

    Args:
        call: the call that needs equal outlines.
        told: ranks and the rows of their outlines, which are not all equal.
    """
    (first, rows), *others = told
    expected = {row.path: row for row in rows}
    for rank, other in others:
        found = {row.path: row for row in other}
        for path in [*expected, *found]:
            mine, theirs = expected.get(path), found.get(path)
            if mine != theirs:
                return _different(call, path, (first, mine), (rank, theirs))
    raise AssertionError("the outlines are equal")


def _different(
    call: str, path: Path, mine: tuple[int, Row | None], theirs: tuple[int, Row | None]
) -> KdError:
    (first, row), (rank, other) = mine, theirs
    key = f"entry {format_key(path)}"
    if row is None or other is None:
        has, lacks = (rank, first) if row is None else (first, rank)
        return KeySetMismatch(
            f"`{call}` needs the same keys on all ranks: {key} exists on rank {has}, but not on "
            f"rank {lacks}. Add it, or `select` the shared keys."
        )
    if row.dtype != other.dtype:
        return InvalidValue(
            f"`{call}` needs the same dtypes on all ranks: {key} is {row.dtype} on rank {first}, "
            f"but {other.dtype} on rank {rank}. Convert one of them."
        )
    return ShapeMismatch(
        f"`{call}` needs the same shapes on all ranks: {key} has the shape {row.shape} on rank "
        f"{first}, but {other.shape} on rank {rank}. Pad or index one of them."
    )
