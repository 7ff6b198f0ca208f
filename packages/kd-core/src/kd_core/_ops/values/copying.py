"""Copies: deep, shallow, and as plain dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._compat import clone_all
from kd_core._nodes import registry
from kd_core._ops.entries.listing import dict_of
from kd_core._ops.math.binary import unary
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from kd_core._nodes.entry import Entry, Node


class Copying(AbstractContainer):
    """Copies."""

    __slots__ = ()

    def clone(self, recurse: bool = True) -> Self:
        """Copy the container; the copy is not locked.

        Args:
            recurse: copy the tensors too; else the copy shares them.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
            (False, True)
        """
        if not recurse:
            return self._shallow()
        return unary(self, torch.clone, clone_all)

    def copy(self) -> Self:
        """Copy the container and its nested ones; tensors are shared."""
        return self._shallow()

    def __copy__(self) -> Self:
        return self._shallow()

    def to_dict(
        self,
        *,
        retain_none: bool = True,
        convert_tensors: bool = False,
        tolist_first: bool = False,
    ) -> dict[str, object]:
        """Convert the container into nested plain dicts; tensors are shared, data is unwrapped.

        Args:
            retain_none: keep entries whose value is `None`.
            convert_tensors: return tensors as numbers or nested lists of numbers.
            tolist_first: return a nested container that has a batch as a list of its rows.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": {"b": 1.0, "s": "text"}}).to_dict()
            {'a': {'b': tensor(1.), 's': 'text'}}
            >>> TensorDict({"a": {"b": [1.0, 2.0]}}).to_dict(convert_tensors=True)
            {'a': {'b': [1.0, 2.0]}}
        """
        return dict_of(self, retain_none, convert_tensors, tolist_first)


def dense_copy(td: AbstractContainer, retain_none: bool) -> Node:
    """Return a copy in which every container is a `TensorDict`."""
    entries: dict[str, Entry] = {}
    for key, value in td._entries.items():
        if isinstance(value, Tensor):
            entries[key] = value.clone()
        elif isinstance(value, AbstractContainer):
            entries[key] = dense_copy(value, retain_none)
        elif retain_none or value._item() is not None:
            entries[key] = value._shallow()
    return registry.make_dense(entries, td._desc.unlocked())
