"""Containers in files and directories, and as one header and few flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from kd_core._errors import InvalidValue, refuse_pickles
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor
    from typing_extensions import Buffer

    from kd_core._types import DeviceLike, NestedKey

PathLike: TypeAlias = "str | Path"


class Saving(AbstractContainer):
    """Saving and loading, and conversion to flat buffers and back."""

    __slots__ = ()

    def save(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: str | int | None = None,
        atomic: bool = False,
    ) -> Self:
        """Write the container to a directory, or to one file; return self.

        It is a file if the name ends in `.safetensors`, or in another suffix that stands for a
        file: `.pt`, `.pth`, `.ckpt`, `.bin`, `.st`, `.tdz`, `.zip`. What is there is replaced:
        other processes, and this one after a crash, read either the old content or the new one.
        Keys may be any strings. Data that is not a tensor is kept if it is made of strings,
        numbers, bytes, lists, tuples, dicts and `None`, or of types that are registered with
        `kd_core.store`. Gradients, and whether they are required, are not kept.

        Args:
            prefix: the directory or the file; directories above it are created. `None`: a temporary
                directory, which is removed when the process ends.
            copy_existing: nothing: leaves are written, wherever they are.
            num_threads: nothing: one file is written in one piece.
            return_early: nothing: the content is there when the call returns.
            share_non_tensor: nothing: data that is not a tensor does not change in a store.
            robust_key: nothing: any string is a key.
            archive: whether it is a single file; `None`: the name says so.
            compression: nothing: what is mapped is not compressed.
            atomic: nothing: every save is seen whole or not at all.

        Raises:
            InvalidArgument: if the type of an entry cannot be saved; nothing is written.
            InvalidValue: if the value of an entry cannot be saved, or the path is something else.
            OSError: if writing fails; the old content stays.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(3), "n": {"b/c": "word"}}, [3])
            >>> saved = td.save("model.kd")
            >>> TensorDict.load("model.kd")["n", "b/c"]
            'word'
        """
        from kd_core._store import files, forms

        if prefix is None and archive:
            raise InvalidValue("`archive=True` writes a single file: pass its path as `prefix`.")
        if prefix is None:
            prefix = files.make_temporary_folder()
        single = forms.is_single(prefix) if archive is None else archive
        forms.check_compression(compression, single)
        forms.save(self, prefix, single)
        return self

    dumps = save

    @classmethod
    def load(
        cls,
        prefix: PathLike,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        *,
        verify: str = "fast",
        keys: Iterable[NestedKey] | None = None,
        out: AbstractContainer | None = None,
        robust_key: bool | None = True,
        subpath: NestedKey | None = None,
        mode: str | None = None,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
    ) -> Self:
        """Return the container that `save` wrote, or `memmap`.

        Tensors are read when they are used: they are views of the file in memory, and writes to
        them stay in this process. With `mode="r+"` they go to the file: see `load_memmap`.

        Args:
            prefix: the directory or the file.
            device: where the tensors are moved; `None`: the CPU.
            non_blocking: return before the copy to `device` has finished.
            verify: `"fast"`: compare sizes, headers and the digest of the manifest; `"full"`: read
                everything and compare the checksums too.
            keys: the keys to load; `None`: all.
            out: a container that takes the values, and is returned.
            robust_key: nothing: any string is a key.
            subpath: the key of a nested container, which is returned.
            mode: `"r"` and `None`: writes stay in this process; `"r+"`: they go to the file.
            num_threads: nothing: a file is mapped in one piece.
            allow_pickle: `False` or `None`; no file can run code when it is read.

        Raises:
            FormatError: if the file is damaged, or is not of this format.
            KeyNotFound: if one of `keys` does not exist.
            InvalidValue: if there is no such mode or `subpath`, or `allow_pickle` is `True`.
            OSError: if there is nothing at the path, or reading fails.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}).save("td.safetensors")
            >>> TensorDict.load("td.safetensors", keys=["a"], verify="full")["a"]
            tensor([1., 1.])
        """
        from kd_core._store import forms

        refuse_pickles(allow_pickle)
        if mode is not None:
            from kd_core._store.mapped_tensor import is_private

            if not is_private(mode):
                found = forms.part_at(forms.load_arena(prefix), subpath, prefix)
                return cast("Self", forms.taken(found, device, non_blocking, out))
        found = forms.part_at(forms.load(prefix, verify, keys), subpath, prefix)
        return cast("Self", forms.taken(found, device, non_blocking, out))

    @classmethod
    def from_consolidated(cls, filename: PathLike) -> Self:
        """Return the container in one file of safetensors, whatever its name is; see `load`.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": [1, 2]}).save("one.safetensors")
            >>> TensorDict.from_consolidated("one.safetensors")["a"]
            tensor([1, 2])
        """
        return cls.load(filename)

    def load_(
        self,
        prefix: PathLike,
        *,
        verify: str = "fast",
        robust_key: bool | None = True,
        allow_pickle: bool | None = None,
        mode: str | None = None,
    ) -> Self:
        """Write the values of a store into entries that exist, and add the others; return self.

        Allowed on a locked container that has all keys. All or nothing.

        Args:
            prefix: the directory or the file that `save` wrote.
            verify: as that of `load`.
            robust_key: nothing: any string is a key.
            allow_pickle: `False` or `None`; no file can run code when it is read.
            mode: nothing: the values are read.

        Raises:
            FormatError: if the file is damaged, or is not of this format.
            Locked: if the store has a key that a locked container does not have.
            ShapeMismatch: if a value cannot be broadcast to its entry.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> saved = TensorDict({"a": torch.ones(2)}).save("filled.kd")
            >>> TensorDict({"a": torch.zeros(2)}).load_("filled.kd")["a"]
            tensor([1., 1.])
        """
        from kd_core._store.forms import load

        refuse_pickles(allow_pickle)
        return cast("Self", self._kd_engine.update(self, load(prefix, verify), inplace=True))  # type: ignore[attr-defined]  # of a concern

    def append_to(self, path: PathLike) -> None:
        """Add the rows of the container, along its first batch dimension, to those of a store.

        They are written as a further segment: the rows that are there are not touched, and a reader
        sees all new rows or none. `kd_core.store.compact` joins the segments. To a path where
        nothing is, the container is saved.

        Args:
            path: the directory that `save` or `append_to` wrote.

        Raises:
            FormatError: if the manifest of the store is damaged, or it is an arena.
            InvalidValue: if a batch size, dtype or shape does not fit the rows of the store, or a
                value of the whole batch differs.
            KeySetMismatch: if the keys differ.
            OSError: if writing fails; the rows of the store stay as they are.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> for part in (torch.zeros(2), torch.ones(1)):
            ...     TensorDict({"a": part}, [len(part)]).append_to("rows.kd")
            >>> TensorDict.load("rows.kd")["a"]
            tensor([0., 0., 1.])
        """
        from kd_core._store.forms import append

        append(self, path)

    def to_buffers(self) -> tuple[bytes, list[Tensor]]:
        """Return the container as a header and one flat tensor for each dtype and device.

        For sockets, shared memory, object stores and other engines that move tensors or bytes. The
        header is JSON, never a pickle; it holds keys, shapes, names of dimensions and data that is
        not a tensor, of the types that `save` keeps. A flat tensor shares the memory of its leaves
        where they follow one another already: a single leaf, or those that `consolidate` placed.
        Gradients, whether they are required, and locks are not kept.

        Returns:
            The header, and the flat tensors.

        Raises:
            InvalidArgument: if the type of an entry cannot be kept, as for `save`.
            InvalidValue: if the value of an entry cannot be kept.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(2), "b": {"c": torch.ones(2, 3)}}, [2])
            >>> header, buffers = td.to_buffers()
            >>> [(flat.dtype, flat.shape) for flat in buffers]
            [(torch.int64, torch.Size([2])), (torch.float32, torch.Size([6]))]
            >>> (TensorDict.from_buffers(header, buffers) == td).all()
            True
        """
        from kd_core._wire.form import form_of

        header, buffers = form_of(self)
        return header, buffers

    @classmethod
    def from_buffers(cls, header: bytes, buffers: Sequence[Tensor | Buffer]) -> Self:
        """Return the container that `to_buffers` described; its leaves are views of the buffers.

        Header and buffers may come from anywhere: nothing in them is run, and what does not fit is
        refused without further memory.

        Args:
            header: the header.
            buffers: the flat tensors in their order, or their bytes: as flat tensors of
                `torch.uint8`, on any device, or as objects that have a buffer, like `bytearray` and
                arrays of numpy. What is read-only, like `bytes`, is copied.

        Raises:
            FormatError: if the header is not valid, or does not fit the buffers, or names a class
                that is not registered with `kd_core.store`.
            InvalidArgument: if an argument has the wrong type.
            InvalidValue: if only some buffers of one device were moved.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> header, buffers = TensorDict({"a": torch.arange(2), "s": "word"}).to_buffers()
            >>> octets = [bytes(flat.numpy()) for flat in buffers]
            >>> TensorDict.from_buffers(header, octets)["a"]
            tensor([0, 1])
        """
        from kd_core._wire.form import container_of

        return cast("Self", container_of(header, buffers))
