"""`MemoryMappedTensor`: one tensor in a file of its own, which every process that maps it sees.

The file holds the bytes of the elements and nothing else. It is allocated in full when it is
created, and one that is there is replaced, never cut: a tensor that maps it keeps the old content.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import weakref
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._descriptor import dtype_of
from kd_core._errors import InvalidArgument, InvalidValue, shape_text, wrong_type
from kd_core._naming import public_in
from kd_core._protocol import AbstractContainer, leaves_of
from kd_core._store import files
from kd_core._torch_private import no_torch_function, storage_of, without_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kd_core._types import DeviceLike, DtypeLike, Index


# Under which name and shape of safetensors a tensor of some dtype is stored.
#
# Most dtypes have a name there. Complex numbers of other sizes are stored as their real and
# imaginary parts in a last dimension of two, and other dtypes of one byte as bytes. The manifest
# holds the dtype and the shape of the tensor itself.


class Wire(NamedTuple):
    """How a dtype is stored."""

    name: str
    itemsize: int
    """Bytes of one element of the tensor, both parts of a complex number."""
    more: tuple[int, ...] = ()
    """The dimensions that the stored shape has in addition."""


_NAMES: Final = {
    "float64": Wire("F64", 8),
    "float32": Wire("F32", 4),
    "float16": Wire("F16", 2),
    "bfloat16": Wire("BF16", 2),
    "int64": Wire("I64", 8),
    "int32": Wire("I32", 4),
    "int16": Wire("I16", 2),
    "int8": Wire("I8", 1),
    "uint64": Wire("U64", 8),
    "uint32": Wire("U32", 4),
    "uint16": Wire("U16", 2),
    "uint8": Wire("U8", 1),
    "bool": Wire("BOOL", 1),
    "complex128": Wire("F64", 16, (2,)),
    "complex64": Wire("C64", 8),
    "complex32": Wire("F16", 4, (2,)),
    "float8_e4m3fn": Wire("F8_E4M3", 1),
    "float8_e5m2": Wire("F8_E5M2", 1),
    "float8_e4m3fnuz": Wire("U8", 1),
    "float8_e5m2fnuz": Wire("U8", 1),
    "float8_e8m0fnu": Wire("U8", 1),
    "float4_e2m1fn_x2": Wire("U8", 1),
}

WIRE: Final = {getattr(torch, name): wire for name, wire in _NAMES.items() if hasattr(torch, name)}
"""How each dtype that this version of torch has is stored."""

NAMES: Final = {dtype: str(dtype).removeprefix("torch.") for dtype in WIRE}
"""The names that a manifest holds, by their dtypes."""

DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}
"""The dtypes by the names that a manifest holds."""

FOREIGN: Final = {wire.name: dtype for dtype, wire in reversed(WIRE.items()) if not wire.more} | {
    "U8": torch.uint8
}
"""The dtypes by their names in files of other origins."""


# Which tensors lie in an arena, and where: by their addresses, because they are plain tensors.
#
# Which container is the whole of an arena is known, too, because an empty one has no tensors.


class Place:
    """An arena that is mapped into memory.

    Attributes:
        address: where its memory begins.
        size: the number of its bytes.
        path: the directory, as an absolute path.
        file: the name of the file in it.
    """

    __slots__ = ("address", "file", "path", "size")

    def __init__(self, address: int, size: int, path: str, file: str) -> None:
        self.address = address
        self.size = size
        self.path = path
        self.file = file


_LIVE: Final[dict[int, tuple[Place, weakref.ref[mmap.mmap]]]] = {}
_STARTS: Final[list[int]] = []
"""The addresses of `_LIVE`, sorted."""


def record(memory: mmap.mmap, path: str, file: str) -> None:
    """Record where an arena is mapped, until no tensor refers to it.

    Memory is given back before Python says so: the address may be that of an arena that another
    thread is about to forget. Its place is taken over then.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    place = Place(address, len(memory), path, file)
    is_known = address in _LIVE
    _LIVE[address] = place, weakref.ref(memory, lambda gone: _forget(address, gone))
    if not is_known:
        insort(_STARTS, address)


def _forget(address: int, gone: weakref.ref[mmap.mmap]) -> None:
    if address in _LIVE and _LIVE[address][1] is gone:  # else taken over
        del _LIVE[address]
        _STARTS.remove(address)


def place_of(leaf: Tensor) -> Place | None:
    """Return the arena in which a tensor lies."""
    if not _LIVE or leaf.layout is not torch.strided or not leaf.is_cpu or not leaf.numel():
        return None
    start = leaf.data_ptr()
    starts = _STARTS.copy()  # an arena that nothing refers to leaves at any time
    below = bisect_right(starts, start)
    found = _LIVE.get(starts[below - 1]) if below else None
    if found is None or start >= found[0].address + found[0].size:
        return None
    return found[0]


def memory_of(path: str, file: str) -> mmap.mmap | None:
    """Return the memory of an arena that is mapped already."""
    for place, memory in list(_LIVE.values()):  # as above
        if (place.path, place.file) == (path, file):
            return memory()
    return None


_ROOTS: Final[dict[int, tuple[str, weakref.ref[AbstractContainer]]]] = {}


def record_root(container: AbstractContainer, path: str) -> None:
    """Record that a container is the whole of an arena, as long as it lives."""
    key = id(container)
    _ROOTS[key] = path, weakref.ref(container, lambda _: _ROOTS.pop(key, None))


def root_of(container: object) -> str | None:
    """Return the directory of the arena whose whole a container is."""
    found = _ROOTS.get(id(container))
    return found[0] if found is not None and found[1]() is container else None


def roots_at(path: str) -> list[AbstractContainer]:
    """Return the containers that are the whole of the arena in a directory."""
    found = [root() for place, root in list(_ROOTS.values()) if place == path]
    return [root for root in found if root is not None]


# Files under a temporary name, beside the name that they get when they are whole.
#
# The writer of one holds a lock on it. One without a lock was left by a writer that was killed.

_NAME: Final = re.compile(r"\.(.*)\.tmp-[0-9a-f]{32}", re.DOTALL)


@contextmanager
def temporary(name: str, folder: int) -> Iterator[tuple[str, int]]:
    """Create a file for a block that fills and renames or links it; return name and descriptor.

    Args:
        name: the name that it gets.
        folder: the directory.
    """
    while True:
        made = f".{name}.tmp-{os.urandom(16).hex()}"
        with _made_folder(made, folder) as descriptor, _removed(made, folder):
            files.lock(descriptor, wait=True)
            if files.has_name(descriptor):  # else a sweep was faster than the lock
                yield made, descriptor
                return


@contextmanager
def _made_folder(name: str, folder: int) -> Iterator[int]:
    """Create a file and close it behind the block."""
    descriptor = files.create(name, folder)
    try:
        yield descriptor
    finally:
        files.close(descriptor)


@contextmanager
def _removed(name: str, folder: int) -> Iterator[None]:
    """Remove a file behind the block, unless it was renamed."""
    try:
        yield
    finally:
        with suppress(OSError):  # the next sweep tries again
            files.remove(name, folder)


def sweep(folder: int, name: str | None = None) -> None:
    """Remove the temporary files of writers that were killed.

    Args:
        folder: the directory.
        name: the name that they should have got; `None`: any.
    """
    for each in files.names_in(folder):
        found = _NAME.fullmatch(each)
        if found and name in (None, found[1]):
            with suppress(OSError), files.opened(each, folder) as file:
                files.lock(file.descriptor, wait=False)
                files.remove(each, folder)


_SWEPT: Final[set[tuple[int, int]]] = set()


def sweep_once(folder: int) -> None:
    """Remove what killed writers left in a directory, the first time that this process asks.

    A directory may hold thousands of tensors: it is not listed for each.
    """
    place = files.place_of(folder)
    if place not in _SWEPT:
        sweep(folder)
        _SWEPT.add(place)


PathLike: TypeAlias = "str | Path"
Number: TypeAlias = "bool | int | float | complex"


class _InMap(type(Tensor)):  # type: ignore[misc]  # the metaclass of tensors
    """Makes leaves of an arena instances, too: they are plain tensors, which is faster."""

    def __instancecheck__(cls, value: object) -> bool:
        if super().__instancecheck__(value):
            return True
        return cls is MemoryMappedTensor and type(value) is Tensor and place_of(value) is not None


@public_in("kd_core")
class MemoryMappedTensor(Tensor, metaclass=_InMap):
    """A tensor in a file, or in memory that processes share.

    A write in place goes to the file, and every process that maps it sees it. Another process that
    is sent the tensor maps the same memory. Parts of it, by an index that gives a view, are of this
    class; results of operations are plain tensors. `pickle`, `torch.save` and `copy.deepcopy` copy
    the content. The file has neither checksums nor a description: `td.memmap(path)` keeps keys,
    shapes and dtypes, too. The leaves of what it returns are plain tensors, and `isinstance` takes
    them for tensors of this class.

    Args:
        source: the tensor to copy, or what `torch.as_tensor` takes; see `from_tensor`.
        dtype: the dtype of the elements in the file; `None`: that of the source.
        shape: the shape in the file, of as many elements; `None`: that of the source.
        index: which part is returned; only an index that gives a view.
        device: the CPU, where files are mapped.
        filename: the file; it must not exist yet. `None`: memory without a file.
        handler: nothing: memory without a file is made here; see `from_handler`.

    Example:
        >>> import torch
        >>> from kd_core import MemoryMappedTensor
        >>> mapped = MemoryMappedTensor(torch.zeros(2, 3), filename="zeros.bin")
        >>> mapped[0] = 1
        >>> MemoryMappedTensor.from_filename("zeros.bin", torch.float32, (2, 3)).sum()
        tensor(3.)
    """

    _filename: Path | None = None
    _whole: torch.Size | None = None

    # Results of operations are plain tensors.
    __torch_function__ = no_torch_function

    def __new__(
        cls,
        source: object,
        *,
        dtype: DtypeLike | None = None,
        shape: Sequence[int] | None = None,
        index: Index | None = None,
        device: DeviceLike | None = None,
        filename: PathLike | None = None,
        handler: object = None,
    ) -> Self:
        """Copy a tensor to a file."""
        _check_device(device)
        tensor = torch.as_tensor(source, dtype=None if dtype is None else dtype_of(dtype))
        made = cls.from_tensor(
            tensor if shape is None else tensor.reshape(tuple(shape)), filename=filename
        )
        return made if index is None else made._taken(index)

    @property
    def filename(self) -> str:
        """The file, as an absolute path.

        Raises:
            InvalidValue: if there is none.
        """
        if self._filename is None:
            raise InvalidValue(
                "a `MemoryMappedTensor` without a file does not have a `filename`. Make it with "
                "`filename=`."
            )
        return str(self._filename)

    @property
    def parent_shape(self) -> torch.Size:
        """The shape of the tensor in the file, of which this one may be a part."""
        return self.shape if self._whole is None else self._whole

    @classmethod
    def from_tensor(
        cls,
        input: Tensor,
        *,
        filename: PathLike | None = None,
        existsok: bool = False,
        copy_existing: bool = False,
        copy_data: bool = True,
        shape: Sequence[int] | None = None,
    ) -> Self:
        """Return a tensor in a file with the values of another one.

        Args:
            input: the tensor; gradients are not kept.
            filename: the file. `None`: memory without a file. What is there already is returned
                itself.
            existsok: whether a file that exists is replaced.
            copy_existing: nothing: values are copied wherever they are.
            copy_data: copy the values; else the file holds zeros.
            shape: the shape in the file, of as many elements; `None`: that of the tensor.

        Raises:
            InvalidValue: if the file exists, unless `existsok`, or the tensor is sparse, nested, or
                without data.
            InvalidArgument: if it is not a tensor.
            OSError: if writing fails, as on a full disk; a file that exists stays as it is.
        """
        if not isinstance(input, Tensor):
            raise wrong_type("`input`", "a tensor", input)
        if input.layout is not torch.strided or input.is_nested or input.is_meta:
            raise InvalidValue(
                "`input` must be a dense tensor with data to be written to a file, got layout "
                f"`{input.layout}` on `{input.device}`. Convert it first."
            )
        place = None if filename is None else Path(os.path.realpath(filename))
        if isinstance(input, cls) and shape in (None, input.shape) and input._filename == place:
            return input
        plain = input.detach().as_subclass(Tensor)
        values = plain if shape is None else plain.reshape(tuple(shape))
        return cls._new(
            tuple(values.shape),
            values.dtype,
            filename,
            existsok=existsok,
            fill=(lambda made: made.copy_(values)) if copy_data else None,
        )

    @classmethod
    def from_filename(
        cls,
        filename: PathLike,
        dtype: DtypeLike,
        shape: Sequence[int],
        index: Index | None = None,
        mode: str | None = None,
    ) -> Self:
        """Return the tensor in a file that exists; writes in place go to the file.

        Args:
            filename: the file, which holds the elements in row-major order and nothing in front.
            dtype: their dtype.
            shape: the shape of the tensor in the file.
            index: which part of it is returned; only an index that gives a view.
            mode: `"r"`: writes stay in this process, and the file may be read-only; `None` and
                `"r+"`: they go to the file.

        Raises:
            InvalidValue: if the file has fewer bytes than that, or the part is not a view.
            OSError: if there is no such file, or it cannot be opened for writing.
        """
        private = is_private(mode)
        path = Path(os.path.realpath(filename))
        dtype, shape = dtype_of(dtype), _shape_of((shape,), None)
        needed = math.prod(shape) * dtype.itemsize
        with files.opened(path, None, writable=not private) as file:
            if file.size < needed:
                raise InvalidValue(
                    f"`{path}` must have at least {needed} bytes for shape {shape_text(shape)} and "
                    f"dtype `{dtype}`, got {file.size}. Check shape and dtype."
                )
            whole = cls._of(_mapped(file.descriptor, shape, dtype, private), path)
        return whole if index is None else whole._taken(index)

    @classmethod
    def from_handler(
        cls,
        handler: object,
        dtype: DtypeLike,
        shape: Sequence[int],
        index: Index | None = None,
    ) -> Self:
        """Return a tensor in memory of another owner, such as another process.

        Args:
            handler: the memory, which can be written to: a `SharedMemory` of `multiprocessing`, an
                `mmap`, a `bytearray`, or an object with it as `buf` or `buffer`.
            dtype: the dtype of the elements.
            shape: the shape; the memory may be larger.
            index: which part is returned; only an index that gives a view.

        Raises:
            InvalidValue: if the memory is too small, or must not be written to.
            InvalidArgument: if it is not memory.

        Example:
            >>> memory = bytearray(8)
            >>> MemoryMappedTensor.from_handler(memory, torch.float32, (2,)).fill_(1.0)
            MemoryMappedTensor([1., 1.])
            >>> len(memory.strip(bytes(1)))
            6
        """
        held: Any = getattr(handler, "buf", getattr(handler, "buffer", handler))
        try:
            memory = memoryview(held)
        except TypeError:
            raise wrong_type("`handler`", "memory, such as a `SharedMemory`", handler) from None
        sizes, dtype = tuple(shape), dtype_of(dtype)
        count = math.prod(sizes)
        size = count * dtype.itemsize
        if memory.readonly or memory.nbytes < size:
            what = "that can be written to" if memory.readonly else f"of at least {size} bytes"
            raise InvalidValue(f"expected memory {what}, got {memory.nbytes} bytes.")
        flat = torch.empty(0, dtype=dtype, device="cpu")
        if count:  # `frombuffer` takes no empty memory
            flat = torch.frombuffer(memory, dtype=dtype, count=count)
        whole = cls._of(flat.view(sizes), None)
        return whole if index is None else whole._taken(index)

    @classmethod
    def from_storage(
        cls,
        storage: torch.UntypedStorage,
        *,
        shape: Sequence[int] | None = None,
        dtype: DtypeLike | None = None,
        device: DeviceLike | None = None,
        index: Index | None = None,
        filename: PathLike | None = None,
        handler: object = None,
    ) -> Self:
        """Return a tensor in a file with the elements of a storage.

        Args:
            storage: the storage; its bytes are copied.
            shape: the shape of the tensor; `None`: one dimension with all elements.
            dtype: the dtype of the elements; `None`: the default of torch.
            device: the CPU, where files are mapped.
            index: which part is returned; only an index that gives a view.
            filename: the file, which must not exist yet. `None`: memory without a file.
            handler: nothing: memory without a file is made here; see `from_handler`.

        Raises:
            InvalidValue: if the file exists.
            RuntimeError: if the storage has fewer bytes than that.
        """
        _check_device(device)
        kind = dtype_of(dtype)
        sizes = (storage.nbytes() // kind.itemsize,) if shape is None else shape
        made = cls.from_tensor(tensor_of(storage, sizes, kind), filename=filename)
        return made if index is None else made._taken(index)

    @classmethod
    def empty(
        cls,
        *size: int | Sequence[int],
        shape: Sequence[int] | None = None,
        dtype: DtypeLike | None = None,
        device: DeviceLike | None = None,
        filename: PathLike | None = None,
        existsok: bool = False,
    ) -> Self:
        """Return a tensor of zeros in a new file, which is allocated in full.

        Args:
            size: the shape, as one sequence or as integers.
            shape: the same by keyword.
            dtype: the dtype; `None`: the default of torch.
            device: the CPU, where files are mapped.
            filename: the file, which must not exist yet. `None`: memory without a file.
            existsok: replace a file that exists.

        Raises:
            InvalidValue: if the file exists, and `existsok` is not given.
            OSError: if there is no room for it.

        Example:
            >>> from kd_core import MemoryMappedTensor
            >>> MemoryMappedTensor.empty(2, 3, filename="empty.bin").shape
            torch.Size([2, 3])
        """
        _check_device(device)
        kind = dtype_of(dtype)
        return cls._new(_shape_of(size, shape), kind, filename, existsok=existsok)

    @classmethod
    def zeros(
        cls,
        *size: int | Sequence[int],
        shape: Sequence[int] | None = None,
        dtype: DtypeLike | None = None,
        device: DeviceLike | None = None,
        filename: PathLike | None = None,
        existsok: bool = False,
    ) -> Self:
        """Return a tensor of zeros in a new file: `empty`, which is zeros, too."""
        sizes = _shape_of(size, shape)
        return cls.empty(sizes, dtype=dtype, device=device, filename=filename, existsok=existsok)

    @classmethod
    def ones(
        cls,
        *size: int | Sequence[int],
        shape: Sequence[int] | None = None,
        dtype: DtypeLike | None = None,
        device: DeviceLike | None = None,
        filename: PathLike | None = None,
        existsok: bool = False,
    ) -> Self:
        """Return a tensor of ones in a new file; see `empty`."""
        sizes, kind = _shape_of(size, shape), dtype_of(dtype)
        return cls.full(sizes, 1, dtype=kind, device=device, filename=filename, existsok=existsok)

    @classmethod
    def full(
        cls,
        *size: int | Sequence[int] | Number,
        fill_value: Number | None = None,
        shape: Sequence[int] | None = None,
        dtype: DtypeLike | None = None,
        device: DeviceLike | None = None,
        filename: PathLike | None = None,
        existsok: bool = False,
    ) -> Self:
        """Return a tensor of one value in a new file; see `empty`.

        Args:
            size: the shape, as one sequence or as integers, and behind it the value unless
                `fill_value` is given.
            fill_value: the value.
            shape: the shape by keyword.
            dtype: the dtype; `None`: the one that `torch.full` takes for the value.
            device: the CPU, where files are mapped.
            filename: the file, which must not exist yet. `None`: memory without a file.
            existsok: replace a file that exists.

        Example:
            >>> from kd_core import MemoryMappedTensor
            >>> MemoryMappedTensor.full((2,), 7, filename="full.bin").tolist()
            [7, 7]
        """
        _check_device(device)
        if fill_value is None:
            if not size:
                raise InvalidArgument("expected `fill_value`, got nothing.")
            *size, fill_value = size  # type: ignore[assignment]  # the value is the last
        kind = None if dtype is None else dtype_of(dtype)
        value = torch.full((), cast("Number", fill_value), dtype=kind)
        return cls._new(
            _shape_of(cast("tuple[int | Sequence[int], ...]", tuple(size)), shape),
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
            octets = torch.zeros(
                torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8, device="cpu"
            )
            octets.share_memory_()
            made = tensor_of(octets.untyped_storage(), shape, dtype)
            if fill is not None:
                fill(made)
            return cls._of(made, None)
        path = Path(os.path.realpath(filename))
        return cls._of(_created(path, shape, dtype, existsok, fill), path)

    @classmethod
    def _of(cls, tensor: Tensor, path: Path | None, whole: torch.Size | None = None) -> Self:
        made = tensor.as_subclass(cls)
        made._filename, made._whole = path, whole
        return made

    def _part(self, part: Tensor) -> Tensor:
        """Return a result of indexing: of this class if it is in the same memory."""
        if storage_of(part) != storage_of(self):
            return part
        return self._of(part, self._filename, self.parent_shape)

    def _taken(self, index: Index) -> Self:
        part = self[index]
        if self.numel() and storage_of(part) != storage_of(self):
            raise InvalidValue(
                f"`index` must give a view of the tensor in the file, got {index!r}, which copies. "
                "Index the result instead."
            )
        return cast("Self", part)

    def __getitem__(self, index: Index) -> Tensor:  # type: ignore[override]  # wider in torch
        """Return a part; a view of the file is of this class."""
        return self._part(super().__getitem__(index))

    def __iter__(self) -> Iterator[Tensor]:
        """Return the rows one by one."""
        return iter(self.unbind(0))

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        """Return the parts along a dimension."""
        return tuple(map(self._part, super().unbind(dim)))

    def split(
        self, split_size: int | list[int] | tuple[int, ...], dim: int = 0
    ) -> tuple[Tensor, ...]:
        """Return parts of given sizes."""
        sizes = split_size if isinstance(split_size, int) else list(split_size)
        return tuple(map(self._part, torch.split(self.as_subclass(Tensor), sizes, dim)))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """Return parts of about one size."""
        return tuple(map(self._part, super().chunk(chunks, dim)))

    def is_shared(self) -> bool:
        """Return whether processes share the memory: those of a file do, too."""
        return self._filename is not None or self.as_subclass(Tensor).untyped_storage().is_shared()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Return what a pickle of the content holds."""
        reduced: tuple[object, ...] = self.as_subclass(Tensor).__reduce_ex__(protocol)
        return reduced

    def __deepcopy__(self, memo: object) -> Tensor:
        """Return a copy of the content."""
        return self.as_subclass(Tensor).clone()


class SealedTensor(Tensor):
    """A leaf whose store must not change, as that of a sealed arena: what would write raises."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch on the plain tensors, unless it writes to one of them."""
        given = kwargs or {}
        written = [given.get("out")]
        name = getattr(func, "__name__", "")
        if is_writing(func):
            written += args[:1] if args else list(given.values())[:1]
        if any(map(_holds_sealed, written)):
            raise InvalidValue(
                "the store of this tensor was sealed, resized, opened for reading, or compressed, "
                f"and its tensors must not change: `{name}` would write to one. Open the store for "
                "writing, set the entry, or `clone()` the tensor."
            )
        with without_torch_function():
            return _sealed_views(func(*args, **given), _memory_of([*args, *given.values()]))

    def __deepcopy__(self, memo: object) -> Tensor:
        """Return a copy of the content."""
        return _plain(self).clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Return what a pickle of the content holds."""
        reduced: tuple[object, ...] = _plain(self).__reduce_ex__(protocol)
        return reduced


_WRITING: Final = frozenset(
    {"__setitem__", "__set__"}
    | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
    | {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "div")}
)
_HARMLESS: Final = frozenset(("requires_grad_", "share_memory_", "retain_grad_", "detach_"))


def is_writing(func: Callable[..., object]) -> bool:
    """Return whether a function of torch writes to its first argument."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (
        name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    )


def _plain(tensor: Tensor) -> Tensor:
    with without_torch_function():
        return tensor.as_subclass(Tensor)


def _memory_of(values: Iterable[object]) -> set[int]:
    """Return the addresses of the memory of sealed tensors."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, SealedTensor):
            found.add(address_of(value))
        elif isinstance(value, list | tuple):
            found |= _memory_of(value)
    return found - {0}


def address_of(tensor: Tensor) -> int:
    """Return where the memory of a tensor is, 0 for what has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _sealed_views(result: object, memory: set[int]) -> object:
    """Return a result of which all that shares the memory of sealed tensors is sealed, too.

    To autograd, what `detach` returns is not a view.
    """
    if type(result) is list:
        return [_sealed_views(each, memory) for each in result]
    if type(result) is tuple:
        return tuple([_sealed_views(each, memory) for each in result])
    if type(result) is Tensor and address_of(result) in memory:
        return result.as_subclass(SealedTensor)
    return result


def _holds_sealed(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_sealed, value))
    return isinstance(value, SealedTensor)


def freeze(roots: Iterable[AbstractContainer]) -> None:
    """Refuse writes to the leaves of containers that are the whole of an arena."""
    for root in roots:
        for leaf in leaves_of(root):
            if type(leaf) is Tensor and place_of(leaf) is not None:
                leaf.__class__ = SealedTensor


def is_private(mode: str | None) -> bool:
    """Return whether a mode of opening a file keeps writes in this process.

    Raises:
        InvalidValue: if there is no such mode.
    """
    if mode not in (None, "r", "r+"):
        raise InvalidValue(f'`mode` must be "r", "r+" or None, got {mode!r}.')
    return mode == "r"


def _check_device(device: DeviceLike | None) -> None:
    if device is not None and torch.device(device).type != "cpu":
        raise InvalidValue(
            f"`device` must be the CPU, where files are mapped, got `{device}`. Call `.to(device)` "
            "on the result."
        )


def tensor_of(storage: torch.UntypedStorage, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a view of the first elements of a storage."""
    size = torch.Size(shape)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat[: size.numel() * dtype.itemsize].view(dtype).view(size)


def _shape_of(
    size: tuple[int | Sequence[int], ...], shape: Sequence[int] | None
) -> tuple[int, ...]:
    if shape is None and not size:
        raise InvalidArgument(
            "expected a shape, got nothing. Write `()` for a tensor of no dimension."
        )
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
    try:
        files.link(name, path.name, folder)
    except FileExistsError:
        raise InvalidValue(
            f"`{path}` exists already. Open it with `MemoryMappedTensor.from_filename`, or pass "
            "`existsok=True` to replace it."
        ) from None


def _mapped(
    descriptor: int, shape: tuple[int, ...], dtype: torch.dtype, private: bool = False
) -> Tensor:
    """Return the tensor at the start of an open file that has room for it."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
    memory = mmap.mmap(descriptor, count * dtype.itemsize, access=access)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _reduced_for_processes(
    tensor: MemoryMappedTensor,
) -> tuple[Callable[..., MemoryMappedTensor], tuple[object, ...]]:
    """Return how another process maps the same memory."""
    plain = tensor.as_subclass(Tensor)
    if tensor._filename is None or not tensor.numel():
        return restore_shared, (plain, tensor._filename)
    place = plain.storage_offset(), tuple(plain.shape), plain.stride()
    return restore_part, (str(tensor._filename), plain.dtype, *place)


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
