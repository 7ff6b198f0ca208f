"""Leaves in a file that several processes fill and add entries to: arenas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import LOCKED_BY_ARENA
from kd_core._keys import path_of
from kd_core._naming import explains_parameters
from kd_core._protocol.primitives import AbstractContainer, leaves_of, lock

if TYPE_CHECKING:
    from typing import Self

    from kd_core._types import NestedKey

PathLike: TypeAlias = "str | Path"


class MemoryMaps(AbstractContainer):
    """Containers whose leaves are in an arena: a file in memory that every process sees."""

    __slots__ = ()

    @explains_parameters
    def memmap(self, path: PathLike | None = None) -> Self:
        """Write the container to an arena, and return one whose leaves are in it.

        A write in place to a leaf of the result, or of what `load_memmap` returns in any process,
        is seen by all of them. An arena has no checksums, and may be lost when the machine stops,
        until `kd_core.store.seal` makes it a store like a saved one.

        Args:
            path: the directory; what a store there holds is replaced. `None`: a temporary one,
                which is removed when the process ends.

        Returns:
            A container that is locked: its keys and shapes are those of the arena.

        Raises:
            InvalidArgument: if the type of an entry cannot be saved; nothing is written.
            InvalidValue: if the value of an entry cannot be saved, or the path is something else.
            OSError: if writing fails, as on a full disk; the old content stays.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).memmap("arena.kd")
            >>> td["a"][1] = 1
            >>> TensorDict.load_memmap("arena.kd")["a"]
            tensor([0., 1., 0.])
        """
        from kd_core._store.forms import create_arena

        return cast("Self", lock(create_arena(self, path), LOCKED_BY_ARENA))

    @explains_parameters
    def memmap_(self, path: PathLike | None = None) -> Self:
        """Write the container to an arena, and replace its leaves by those in it; return self.

        Args:
            path: the directory; what a store there holds is replaced. `None`: a temporary one,
                which is removed when the process ends.

        Returns:
            The container itself, locked; see `memmap`.

        Raises:
            Locked: if the container is locked.
            InvalidArgument: if the type of an entry cannot be saved; nothing is written.
            InvalidValue: if the value of an entry cannot be saved, or the path is something else.
        """
        from kd_core._ops.values.replacing import take_leaves
        from kd_core._store.forms import create_arena
        from kd_core._store.places import record_root, root_of

        self._check_unlocked("replace leaves by those in an arena")
        made = create_arena(self, path)
        take_leaves(self, made)
        record_root(self, cast(str, root_of(made)))
        return lock(self, LOCKED_BY_ARENA)

    @explains_parameters
    def memmap_like(self, path: PathLike | None = None) -> Self:
        """Create an arena for a container of this structure, whose leaves are zeros.

        Leaves are not read and their bytes are not written, so an expanded container describes a
        large arena. Non-tensor data is copied.

        Args:
            path: the directory; what a store there holds is replaced. `None`: a temporary one,
                which is removed when the process ends.

        Returns:
            A container that is locked; see `memmap`.

        Raises:
            InvalidArgument: if the type of an entry cannot be saved; nothing is written.
            InvalidValue: if the value of an entry cannot be saved, or the path is something else.
            OSError: if there is no room for it; the old content stays.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict, store
            >>> row = TensorDict({"x": torch.zeros(4), "done": False})
            >>> data = row.expand(1000).memmap_like("rows.arena")
            >>> data[:2] = row.apply(torch.ones_like).expand(2)
            >>> store.seal("rows.arena")
            >>> TensorDict.load("rows.arena")["x"].sum()
            tensor(8.)
        """
        from kd_core._store.forms import create_arena

        return cast("Self", lock(create_arena(self, path, filled=False), LOCKED_BY_ARENA))

    @classmethod
    @explains_parameters
    def load_memmap(cls, path: PathLike) -> Self:
        """Return the container in an arena; writes in place go to its file.

        Args:
            path: the directory that `memmap` or `memmap_like` wrote.

        Raises:
            FormatError: if it is damaged, is not an arena, or is sealed: see `load`.
            OSError: if there is nothing at the path.
        """
        from kd_core._store.forms import load_arena

        return cast("Self", lock(load_arena(path), LOCKED_BY_ARENA))

    @explains_parameters
    def load_memmap_(self, path: PathLike) -> Self:
        """Write the values of an arena into entries that exist, in place; return self.

        Allowed on a locked container. To map the arena itself use `load_memmap`.

        Args:
            path: the directory that `memmap` or `memmap_like` wrote.

        Raises:
            KeyNotFound: if the arena has a key that does not exist here.
            ShapeMismatch: if a value cannot be broadcast to its entry.
            FormatError: if it is damaged, is not an arena, or is sealed: see `load_`.
        """
        from kd_core._store.forms import load_arena

        return cast("Self", self.update_(load_arena(path)))  # type: ignore[attr-defined]  # of a concern

    def is_memmap(self) -> bool:
        """Return whether all leaves are in one arena; `False` if none has elements.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": [1, 2]}, [2])
            >>> td.is_memmap(), td.memmap("is.arena").is_memmap()
            (False, True)
        """
        return _path_of_leaves(self) is not None

    @property
    def saved_path(self) -> Path | None:
        """The directory of the arena in which all leaves are, or `None`.

        That of an empty container is the one from which it was made.
        """
        from kd_core._store.places import root_of

        found = _path_of_leaves(self) if any(map(Tensor.numel, leaves_of(self))) else root_of(self)
        return None if found is None else Path(found)

    @explains_parameters
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

    @explains_parameters
    def make_memmap_from_tensor(self, key: NestedKey, tensor: Tensor) -> Tensor:
        """Add an entry with the values of a tensor to the arena of the container; return it.

        Args:
            key: the key; levels that do not exist are created.
            tensor: the values, whose shape starts with the batch size.

        Raises:
            InvalidValue: if the tensor cannot be saved; else as `make_memmap`.
        """
        return _added(self, key, tensor, filled=True)

    @explains_parameters
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

    @explains_parameters
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


def _path_of_leaves(td: AbstractContainer) -> str | None:
    """Return the directory of the one arena in which all leaves are that have elements."""
    from kd_core._store.places import place_of

    found = map(place_of, filter(Tensor.numel, leaves_of(td)))
    places = {None if place is None else place.path for place in found}
    return places.pop() if len(places) == 1 else None


def _added(td: AbstractContainer, key: NestedKey, leaf: Tensor, *, filled: bool) -> Tensor:
    from kd_core._store.forms import add_entry

    return add_entry(td, path_of(key), leaf, filled=filled)
