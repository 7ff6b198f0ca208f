"""Containers as nested dicts and lists of plain values, and lists that write to the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._nodes.entry import is_row_data, tensor_of
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._nodes.entry import Node

    WriteRow: TypeAlias = Callable[[SupportsIndex | slice, object], None]


class LinkedList(list[object]):
    """The rows of a container, or the values of rows; an item that is assigned is written there.

    Items are read as they were when the list was made. What changes the length of the list
    (`append`, `pop`) changes the list alone.

    Example:
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"word": ["to", "be"]}, [2])
        >>> td["word"][0] = "or"
        >>> td["word"]
        ['or', 'be']
    """

    __slots__ = ("_write",)

    def __init__(self, values: Iterable[object] = (), write: WriteRow | None = None):
        # What writes is optional: `dataclasses.asdict` and others copy lists by their type.
        super().__init__(values)
        self._write = write

    def __setitem__(self, index: SupportsIndex | slice, value: object) -> None:
        if self._write is not None:
            self._write(index, value)
        super().__setitem__(index, value)  # type: ignore[index]  # as a list takes it

    def __reduce__(self) -> tuple[object, ...]:
        return list, (list(self),)


def dict_of(
    td: AbstractContainer,
    retain_none: bool,
    convert_tensors: bool,
    tolist_first: bool,
    unset: bool = True,
) -> dict[str, object]:
    """Return a container as nested dicts.

    Args:
        td: the container.
        retain_none: keep entries whose value is `None`.
        convert_tensors: return tensors as numbers or nested lists of numbers.
        tolist_first: return a nested container that has a batch as a list of its rows.
        unset: list fields without an entry as `None`.
    """
    plain: dict[str, object] = {}
    for key, value in td._kd_entries.items():
        if value.__class__ is Tensor:
            plain[key] = value.tolist() if convert_tensors else value
        elif isinstance(value, AbstractContainer):
            if tolist_first and value._kd_desc.batch:
                plain[key] = list_of(value, True, convert_tensors, tolist_first)
            else:
                plain[key] = dict_of(value, retain_none, convert_tensors, tolist_first, unset)
        elif (leaf := tensor_of(value)) is not None:
            plain[key] = leaf.tolist() if convert_tensors else value
        elif tolist_first and td._kd_desc.batch and not is_row_data(value):
            plain[key] = cast("Node", value).tolist()  # type: ignore[attr-defined]  # data has it
        else:
            item = cast("Node", value)._kd_item()
            if retain_none or item is not None:
                plain[key] = item
    if retain_none and unset:
        plain.update(dict.fromkeys(td._kd_unset()))
    return plain


def list_of(
    td: AbstractContainer, convert_nodes: bool, convert_tensors: bool, tolist_first: bool
) -> object:
    """Return the rows of a container as nested lists of the shape of its batch.

    Args:
        td: the container.
        convert_nodes: return a row as a dict, else as a container.
        convert_tensors: return tensors as numbers or nested lists of numbers.
        tolist_first: return a nested container that has a batch as a list of its rows.
    """
    if not td._kd_desc.batch:
        options = True, convert_tensors, tolist_first, False
        return dict_of(td, *options) if convert_nodes else td
    rows = cast("Sequence[AbstractContainer]", torch.unbind(cast("Tensor", td)))
    return [list_of(row, convert_nodes, convert_tensors, tolist_first) for row in rows]
