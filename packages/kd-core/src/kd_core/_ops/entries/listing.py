"""Containers as nested dicts and lists of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._nodes.entry import tensor_of
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._nodes.entry import Node


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
            plain[key] = leaf.tolist() if convert_tensors else leaf
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
