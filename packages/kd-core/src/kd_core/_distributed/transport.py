"""Containers in their wire form, between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._distributed.differences import difference
from kd_core._distributed.outlines import outlined
from kd_core._errors import FormatError, InvalidValue, a_type
from kd_core._keys import format_key
from kd_core._nodes.entry import is_row_data, tensor_of
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer
from kd_core._wire.form import container_of
from kd_core._wire.header import Header, header_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kd_core._distributed.groups import Team
    from kd_core._types import DeviceLike


def octets_of(flat: Tensor, team: Team) -> Tensor:
    """Return a flat tensor as bytes where the group can send them."""
    return team.message(flat).view(torch.uint8)


def text_tensor(text: bytes, team: Team) -> Tensor:
    """Return bytes as a message."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(team.device)


class Incoming:
    """Room for the buffers of a header.

    Attributes:
        messages: the tensors of bytes to receive into.
    """

    def __init__(self, text: bytes, team: Team) -> None:
        self._text = text
        self._header: Header = header_of(text)
        self._places = [
            team.place(self._header.devices[row.device]) for row in self._header.buffers
        ]
        try:
            made = [
                torch.empty(row.numel * row.dtype.itemsize, dtype=torch.uint8, device=place)
                for row, place in zip(self._header.buffers, self._places, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            total = sum(row.numel * row.dtype.itemsize for row in self._header.buffers)
            raise FormatError(f"there is not memory for {total} bytes of a container.") from error
        self.messages = [team.message(flat) for flat in made]

    def container(self) -> AbstractContainer:
        """Return the container, after all messages were received."""
        placed = [flat.to(at) for flat, at in zip(self.messages, self._places, strict=True)]
        return container_of(self._text, placed)


def moved_to(td: AbstractContainer, device: DeviceLike | None) -> AbstractContainer:
    """Return a container on a device; `None`: where it is."""
    return td if device is None else td._kd_engine.to(td, device)  # type: ignore[attr-defined]  # of a concern


def take(
    target: AbstractContainer, made: AbstractContainer, call: str, ranks: tuple[int, int]
) -> None:
    """Write a received container into one of the same schema.

    Tensors and values of rows are written in place. A value for the whole batch replaces another.

    Args:
        target: the container to write into.
        made: the container that was received.
        call: the call, for messages.
        ranks: the rank that received, and the one that sent.

    Raises:
        KeySetMismatch: if the keys differ; likewise `ShapeMismatch`, and `InvalidValue` for dtypes.
        Locked: if a value for the whole batch differs, and the container is locked.
    """
    mine, other = outlined(target), outlined(made)
    if mine.outline.digest != other.outline.digest:
        rows = mine.outline.rows, other.outline.rows
        raise difference(call, list(zip(ranks, rows, strict=True)))
    mine.check_writable()
    if mine.outline.plain:
        mine.copy(other)
        return
    others = list(_other_data(target, made, ()))
    for level, _, path in others:
        level._kd_check_unlocked(f"receive another value of {format_key(path)}")
    entries = [source._kd_entries[path[-1]] for _, source, path in others]
    for level, source, path in others:
        source._kd_set_entry(path[-1], level._kd_entries[path[-1]])
    with torch.no_grad():
        target._kd_engine.update_(target, made)  # type: ignore[attr-defined]  # of a concern
    for (level, _, path), entry in zip(others, entries, strict=True):
        level._kd_set_entry(path[-1], entry)


def _other_data(
    target: AbstractContainer, made: AbstractContainer, path: tuple[str, ...]
) -> Iterator[tuple[AbstractContainer, AbstractContainer, tuple[str, ...]]]:
    """Yield where values for a whole batch differ: the containers that hold them, and the path."""
    if isinstance(target, Composite) and isinstance(made, Composite):
        for at, pair in enumerate(zip(target._members, made._members, strict=True)):
            yield from _other_data(*pair, (*path, f"[{at}]"))
        return
    for key, value in target._kd_entries.items():
        other = made._kd_entries.get(key)
        if isinstance(value, AbstractContainer) and isinstance(other, AbstractContainer):
            yield from _other_data(value, other, (*path, key))
            continue
        of_batch = tensor_of(value) is None and not is_row_data(value)
        if of_batch and not value._agrees(other):  # type: ignore[union-attr]  # data
            yield target, made, (*path, key)


def fill(target: AbstractContainer, made: AbstractContainer) -> None:
    """Set what was received in an empty container.

    Raises:
        Locked: if it is locked.
        InvalidValue: if what was received is of another kind.
    """
    target._kd_check_unlocked("receive entries")
    if type(made) is not type(target):
        raise InvalidValue(
            f"{a_type(target)} cannot take what {a_type(made)} holds. "
            "Receive it as a new container: pass `None`, or call `from_remote_init`."
        )
    target._kd_describe(made._kd_desc)
    for key, value in made._kd_entries.items():
        target._kd_set_entry(key, value)
