"""Containers as context managers: the operation that made one is undone on exit."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self


class Contexts(AbstractContainer):
    """`with` on the result of an operation that can be undone.

    These are `view`, `reshape`, `flatten`, `unflatten`, `squeeze`, `unsqueeze`, `permute`,
    `transpose`, `movedim`, `flip`, `roll` and their like, `flatten_keys`, `unflatten_keys`, `lock_`
    and `unlock_`. On exit, entries that were added, replaced or removed are so in the source as
    well; values written in place are there already. If the block raises, or an entry does not fit,
    the keys of the source stay as they were.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": {"b": torch.zeros(2, 3)}}, [2, 3])
        >>> with td.flatten_keys() as flat:
        ...     flat["a.c"] = flat["a.b"] + 1
        >>> td["a", "c"].shape
        torch.Size([2, 3])
        >>> with td.view(6) as rows:
        ...     rows["row"] = torch.arange(6)
        >>> td["row"].tolist()
        [[0, 1, 2], [3, 4, 5]]
        >>> with td.lock_().unlock_():
        ...     td["d"] = 1 + td["row"]
        >>> td.is_locked
        True
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        from kd_core._ops.scopes.carrying import enter

        enter(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        from kd_core._ops.scopes.carrying import leave

        leave(self, exc_type is not None)
