"""Copies: deep, shallow, and as plain dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._compat import clone_all
from kd_core._ops.operands import unary
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self


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

    def to_dict(self, *, retain_none: bool = True) -> dict[str, object]:
        """Convert the container into nested plain dicts; tensors are shared, data is unwrapped.

        Args:
            retain_none: keep entries whose value is `None`.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": {"b": 1.0, "s": "text"}}).to_dict()
            {'a': {'b': tensor(1.), 's': 'text'}}
        """
        plain: dict[str, object] = {}
        for key, value in self._entries.items():
            if isinstance(value, Tensor):
                plain[key] = value
            elif isinstance(value, Copying):
                plain[key] = value.to_dict(retain_none=retain_none)
            else:
                item = value._item()
                if retain_none or item is not None:
                    plain[key] = item
        return plain
