"""Entries that are added to an arena, and those that other processes added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._keys import path_of
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from kd_core._types import NestedKey


class MemoryGrowth(AbstractContainer):
    """Adding entries to the arena of a container, which stays locked for everything else."""

    __slots__ = ()

    def make_memmap(
        self, key: NestedKey, shape: Sequence[int] | Tensor, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Add an entry of zeros to the arena of the container, and return it.

        Other processes see it after `memmap_refresh_`. The container is what `memmap`, `memmap_`,
        `memmap_like` or `load_memmap` returned, and it may be empty at first.

        Args:
            key: the key; levels that do not exist are created.
            shape: the shape, which starts with the batch size.
            dtype: the dtype; `None`: the default of torch.

        Raises:
            InvalidValue: if the container is not the whole of an arena.
            KeyCollision: if there is such an entry, here or in the arena.
            ShapeMismatch: if the shape does not start with the batch size.
            FormatError: if the arena is sealed.
            OSError: if there is no room for it; nothing is changed.

        Example:
            >>> from kd_core import TensorDict
            >>> data = TensorDict({}, [1000]).memmap("grown.arena")
            >>> data.make_memmap("obs", (1000, 4))[:2] = 1
            >>> TensorDict.load_memmap("grown.arena")["obs"].sum()
            tensor(8.)
        """
        sizes = shape.tolist() if isinstance(shape, Tensor) else shape
        checked = torch.empty(tuple(sizes), device="meta").shape
        zeros = torch.zeros((), dtype=dtype or torch.get_default_dtype())
        return _added(self, key, zeros.expand(checked), filled=False)

    def make_memmap_from_tensor(self, key: NestedKey, tensor: Tensor) -> Tensor:
        """Add an entry with the values of a tensor to the arena of the container; return it.

        Args:
            key: the key; levels that do not exist are created.
            tensor: the values, whose shape starts with the batch size.

        Raises:
            InvalidValue: if the tensor cannot be saved; else as `make_memmap`.
        """
        return _added(self, key, tensor, filled=True)

    def make_memmap_from_storage(
        self,
        key: NestedKey,
        storage: torch.UntypedStorage,
        shape: Sequence[int] | Tensor,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Add an entry with the bytes of a storage to the arena of the container; return it.

        Args:
            key: the key; levels that do not exist are created.
            storage: the storage; its bytes are copied.
            shape: the shape, which starts with the batch size.
            dtype: the dtype of the elements; `None`: the default of torch.

        Raises:
            RuntimeError: if the storage has fewer bytes; else as `make_memmap`.
        """
        from kd_core._store.mapped_tensor import tensor_of

        sizes = shape.tolist() if isinstance(shape, Tensor) else shape
        found = tensor_of(storage, sizes, dtype or torch.get_default_dtype())
        return _added(self, key, found, filled=True)

    def memmap_refresh_(self) -> Self:
        """Add the entries to the container that its arena has by now; return self.

        Values need no refresh: all processes see them at once.

        Raises:
            InvalidValue: if the container is not the whole of an arena.
            FormatError: if the arena is sealed, or is damaged.

        Example:
            >>> from kd_core import TensorDict
            >>> data = TensorDict({}, [3]).memmap("refreshed.arena")
            >>> TensorDict.load_memmap("refreshed.arena").make_memmap("new", (3,))
            tensor([0., 0., 0.])
            >>> list(data.keys()), list(data.memmap_refresh_().keys())
            ([], ['new'])
        """
        from kd_core._store.forms import refresh

        refresh(self)
        return self


def _added(td: AbstractContainer, key: NestedKey, leaf: Tensor, *, filled: bool) -> Tensor:
    from kd_core._store.forms import add_entry

    return add_entry(td, path_of(key), leaf, filled=filled)
