"""`MemoryMappedTensor`: one tensor in a file of its own, which every process that maps it sees.

The file holds the bytes of the elements and nothing else. It is allocated in full when it is
created, and one that is there is replaced, never cut: a tensor that maps it keeps the old content.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._errors import InvalidArgument, InvalidValue, shape_text, wrong_type
from kd_core._naming import explains_parameters, leaves_out, public_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kd_core._types import Index

PathLike: TypeAlias = "str | Path"
Number: TypeAlias = "bool | int | float | complex"


@public_in("kd_core")
@leaves_out("from_handler", "parent_shape")
class MemoryMappedTensor(Tensor):
    """A tensor in a file, or in memory that processes share.

    A write in place goes to the file, and every process that maps it sees it. Another process that
    is sent the tensor maps the same memory. Results of operations are plain tensors; views of it
    are plain tensors in the same memory. `pickle`, `torch.save` and `copy.deepcopy` copy the
    content. The file has neither checksums nor a description: `td.memmap(path)` keeps keys, shapes
    and dtypes, too.

    Args:
        source: the tensor to copy; see `from_tensor`.
        filename: the file; it must not exist yet. `None`: memory without a file.

    Example:
        >>> import torch
        >>> from kd_core import MemoryMappedTensor
        >>> mapped = MemoryMappedTensor(torch.zeros(2, 3), filename="zeros.bin")
        >>> mapped[0] = 1
        >>> MemoryMappedTensor.from_filename("zeros.bin", torch.float32, (2, 3)).sum()
        tensor(3.)
    """

    _filename: Path | None = None

    # Results of operations are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents

    @explains_parameters
    def __new__(cls, source: Tensor, *, filename: PathLike | None = None) -> Self:
        """Copy a tensor to a file."""
        return cls.from_tensor(source, filename=filename)

    @property
    def filename(self) -> Path | None:
        """The file, as an absolute path; `None` if there is none."""
        return self._filename

    @classmethod
    @explains_parameters
    def from_tensor(
        cls, input: Tensor, *, filename: PathLike | None = None, existsok: bool = False
    ) -> Self:
        """Return a tensor in a file with the values of another one.

        Args:
            input: the tensor; gradients are not kept.
            filename: the file. `None`: memory without a file.
            existsok: whether a file that exists is replaced.

        Raises:
            FileExistsError: if the file exists, unless `existsok`.
            InvalidArgument: if it is not a tensor.
            InvalidValue: if the tensor is sparse, nested, or without data.
            OSError: if writing fails, as on a full disk; a file that exists stays as it is.
        """
        if not isinstance(input, Tensor):
            raise wrong_type("`input`", "a tensor", input)
        if input.layout is not torch.strided or input.is_nested or input.is_meta:
            raise InvalidValue(
                "`input` must be a dense tensor with data to be written to a file, got layout "
                f"`{input.layout}` on `{input.device}`. Convert it first."
            )
        return cls._new(
            tuple(input.shape),
            input.dtype,
            filename,
            existsok=existsok,
            fill=lambda made: made.copy_(input.detach()),
        )

    @classmethod
    @explains_parameters
    def from_filename(
        cls,
        filename: PathLike,
        dtype: torch.dtype,
        shape: Sequence[int],
        index: Index | None = None,
    ) -> Self:
        """Return the tensor in a file that exists; writes in place go to the file.

        Args:
            filename: the file, which holds the elements in row-major order and nothing in front.
            dtype: their dtype.
            shape: the shape of the tensor in the file.
            index: which part of it is returned; only an index that gives a view.

        Raises:
            InvalidValue: if the file has fewer bytes than that, or the part is not a view.
            OSError: if there is no such file, or it cannot be opened for writing.
        """
        from kd_core._store import files  # requires POSIX

        path = Path(os.path.realpath(filename))
        needed = torch.Size(shape).numel() * dtype.itemsize
        with files.opened(path, None, writable=True) as file:
            if file.size < needed:
                raise InvalidValue(
                    f"`{path}` must have at least {needed} bytes for shape {shape_text(shape)} and "
                    f"dtype `{dtype}`, got {file.size}. Check shape and dtype."
                )
            whole = _mapped(file.descriptor, tuple(shape), dtype)
        part = whole if index is None else whole[index]
        if whole.numel() and part.untyped_storage().data_ptr() != whole.data_ptr():
            raise InvalidValue(
                f"`index` must give a view of the tensor in `{path}`, got {index!r}, which copies. "
                "Index the result instead."
            )
        return cls._of(part, path)

    @classmethod
    @explains_parameters
    def from_storage(
        cls,
        storage: torch.UntypedStorage,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        filename: PathLike | None = None,
    ) -> Self:
        """Return a tensor in a file with the elements of a storage.

        Args:
            storage: the storage; its bytes are copied.
            shape: the shape of the tensor.
            dtype: the dtype of the elements.
            filename: the file, which must not exist yet. `None`: memory without a file.

        Raises:
            FileExistsError: if the file exists.
            RuntimeError: if the storage has fewer bytes than that.
        """
        return cls.from_tensor(tensor_of(storage, shape, dtype), filename=filename)

    @classmethod
    @explains_parameters
    def empty(
        cls,
        *size: int | Sequence[int],
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        filename: PathLike | None = None,
        existsok: bool = False,
    ) -> Self:
        """Return a tensor of zeros in a new file, which is allocated in full.

        Args:
            size: the shape, as one sequence or as integers.
            shape: the same by keyword.
            dtype: the dtype; `None`: the default of torch.
            filename: the file, which must not exist yet. `None`: memory without a file.
            existsok: replace a file that exists.

        Raises:
            FileExistsError: if the file exists, and `existsok` is not given.
            OSError: if there is no room for it.

        Example:
            >>> from kd_core import MemoryMappedTensor
            >>> MemoryMappedTensor.empty(2, 3, filename="empty.bin").shape
            torch.Size([2, 3])
        """
        kind = dtype or torch.get_default_dtype()
        return cls._new(_shape_of(size, shape), kind, filename, existsok=existsok)

    @classmethod
    @explains_parameters
    def zeros(
        cls,
        *size: int | Sequence[int],
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        filename: PathLike | None = None,
        existsok: bool = False,
    ) -> Self:
        """Return a tensor of zeros in a new file: `empty`, which is zeros, too."""
        sizes = _shape_of(size, shape)
        return cls.empty(sizes, dtype=dtype, filename=filename, existsok=existsok)

    @classmethod
    @explains_parameters
    def ones(
        cls,
        *size: int | Sequence[int],
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        filename: PathLike | None = None,
        existsok: bool = False,
    ) -> Self:
        """Return a tensor of ones in a new file; see `empty`."""
        sizes, kind = _shape_of(size, shape), dtype or torch.get_default_dtype()
        return cls.full(sizes, 1, dtype=kind, filename=filename, existsok=existsok)

    @classmethod
    @explains_parameters
    def full(
        cls,
        size: Sequence[int],
        fill_value: Number,
        *,
        dtype: torch.dtype | None = None,
        filename: PathLike | None = None,
        existsok: bool = False,
    ) -> Self:
        """Return a tensor of one value in a new file; see `empty`.

        Args:
            size: the shape.
            fill_value: the value.
            dtype: the dtype; `None`: the one that `torch.full` takes for the value.
            filename: the file, which must not exist yet. `None`: memory without a file.
            existsok: replace a file that exists.

        Example:
            >>> from kd_core import MemoryMappedTensor
            >>> MemoryMappedTensor.full((2,), 7, filename="full.bin").tolist()
            [7, 7]
        """
        value = torch.full((), fill_value, dtype=dtype)
        return cls._new(
            tuple(size),
            value.dtype,
            filename,
            existsok=existsok,
            fill=lambda made: made.copy_(value),
        )

    @classmethod
    def empty_like(cls, input: Tensor, *, filename: PathLike | None = None) -> Self:
        """Return a tensor of zeros with the shape and dtype of another one; see `empty`."""
        return cls._new(tuple(input.shape), input.dtype, filename)

    @classmethod
    def zeros_like(cls, input: Tensor, *, filename: PathLike | None = None) -> Self:
        """Return a tensor of zeros with the shape and dtype of another one: `empty_like`."""
        return cls.empty_like(input, filename=filename)

    @classmethod
    def ones_like(cls, input: Tensor, *, filename: PathLike | None = None) -> Self:
        """Return a tensor of ones with the shape and dtype of another one; see `empty`."""
        return cls.full(input.shape, 1, dtype=input.dtype, filename=filename)

    @classmethod
    def full_like(
        cls, input: Tensor, fill_value: Number, *, filename: PathLike | None = None
    ) -> Self:
        """Return a tensor of one value with the shape and dtype of another one; see `full`."""
        return cls.full(input.shape, fill_value, dtype=input.dtype, filename=filename)

    @classmethod
    def _new(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        filename: PathLike | None,
        *,
        existsok: bool = False,
        fill: Callable[[Tensor], object] | None = None,
    ) -> Self:
        if filename is None:
            octets = torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
            octets.share_memory_()  # type: ignore[no-untyped-call]  # as torch declares it
            made = tensor_of(octets.untyped_storage(), shape, dtype)
            if fill is not None:
                fill(made)
            return cls._of(made, None)
        path = Path(os.path.realpath(filename))
        return cls._of(_created(path, shape, dtype, existsok, fill), path)

    @classmethod
    def _of(cls, tensor: Tensor, path: Path | None) -> Self:
        made = tensor.as_subclass(cls)
        made._filename = path
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Return what a pickle of the content holds."""
        reduced: tuple[Any, ...] = self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # as above
        return reduced

    def __deepcopy__(self, memo: object) -> Tensor:
        """Return a copy of the content."""
        return self.as_subclass(Tensor).clone()


def tensor_of(storage: torch.UntypedStorage, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a view of the first elements of a storage."""
    size = torch.Size(shape)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat[: size.numel() * dtype.itemsize].view(dtype).view(size)


def _shape_of(
    size: tuple[int | Sequence[int], ...], shape: Sequence[int] | None
) -> tuple[int, ...]:
    if shape is not None:
        if size:
            raise InvalidArgument("expected `shape` once, got it by position and by keyword.")
        size = (shape,)
    sizes = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return tuple(torch.empty(cast("Sequence[int]", sizes), device="meta").shape)


def _created(
    path: Path,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    existsok: bool,
    fill: Callable[[Tensor], object] | None,
) -> Tensor:
    """Create a file under a temporary name, map and fill it, and give it its name."""
    from kd_core._store import files  # requires POSIX
    from kd_core._store.temporary import sweep_once, temporary  # as above

    size = torch.Size(shape).numel() * dtype.itemsize
    with files.opened_folder(path.parent) as folder:
        sweep_once(folder)
        with temporary(path.name, folder) as (name, descriptor):
            if size:
                files.allocate(descriptor, size)
            made = _mapped(descriptor, shape, dtype)
            if fill is not None:
                fill(made)
            if existsok:
                files.rename(name, path.name, folder)
            else:
                _link(name, path, folder)
    return made


def _link(name: str, path: Path, folder: int) -> None:
    from kd_core._store import files  # requires POSIX

    try:
        files.link(name, path.name, folder)
    except FileExistsError as error:
        raise FileExistsError(
            error.errno,
            "a file exists. Open it with `MemoryMappedTensor.from_filename`, or pass "
            "`existsok=True` to `from_tensor` to replace it",
            str(path),
        ) from None


def _mapped(descriptor: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor at the start of an open file that has room for it."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(descriptor, count * dtype.itemsize, access=mmap.ACCESS_WRITE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _reduced_for_processes(
    tensor: MemoryMappedTensor,
) -> tuple[Callable[..., MemoryMappedTensor], tuple[object, ...]]:
    """Return how another process maps the same memory."""
    plain = tensor.as_subclass(Tensor)
    if tensor.filename is None or not tensor.numel():
        return restore_shared, (plain, tensor.filename)
    place = plain.storage_offset(), tuple(plain.shape), plain.stride()
    return restore_part, (str(tensor.filename), plain.dtype, *place)


def restore_shared(tensor: Tensor, path: Path | None) -> MemoryMappedTensor:
    """Rebuild a tensor without a file; called in another process."""
    return MemoryMappedTensor._of(tensor, path)


def restore_part(
    path: str, dtype: torch.dtype, start: int, shape: Sequence[int], stride: Sequence[int]
) -> MemoryMappedTensor:
    """Rebuild a part of a file; called in another process."""
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    flat = MemoryMappedTensor.from_filename(path, dtype, (start + count,))
    part = flat.as_strided(tuple(shape), tuple(stride), start)
    return MemoryMappedTensor._of(part, Path(path))


ForkingPickler.register(MemoryMappedTensor, _reduced_for_processes)
