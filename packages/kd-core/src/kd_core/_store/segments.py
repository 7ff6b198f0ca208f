"""The tensors of one file of safetensors: order, header, checksums, and views of them.

A file starts with the length of its header, in eight bytes. The header is canonical JSON, padded
with spaces so that the data starts at a multiple of 64. The tensors follow one another without
holes, those of the largest elements first, so that each is aligned. Names, dtypes and shapes thus
determine every byte of the header: a reader computes it and compares.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Final, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from kd_core._errors import FormatError
from kd_core._store import files
from kd_core._store.files import reported
from kd_core._store.manifest import RESTORE, canonical
from kd_core._store.mapped_tensor import WIRE
from kd_core._torch_private import flatten

P = ParamSpec("P")
R = TypeVar("R")

BLOCK: Final = 4 << 20
"""Bytes under one checksum."""

_SMALL: Final = 1 << 16
"""Tensors below this size are gathered before they are written."""

_ALIGNMENT: Final = 64

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.]*")
"""Names that JSON does not escape."""


class Spec(NamedTuple):
    """What a manifest says about one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * WIRE[self.dtype].itemsize


class Layout(NamedTuple):
    """Where the tensors of a file are."""

    header: bytes
    """Everything in front of the data."""
    starts: dict[str, int]
    """The first byte of each tensor in the file, in the order of the file."""
    size: int
    """The bytes of the file."""


def layout_of(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of a file that holds some tensors."""
    # Few kinds of tensors, whose specs are mostly shared: "io" in the benchmarks.
    kinds = {id(spec): spec for spec in specs.values()}
    stored = {kind: _stored(spec) for kind, spec in kinds.items()}
    order = list(specs.items())
    if len({each.itemsize for each in stored.values()}) > 1:
        order.sort(key=lambda item: -stored[id(item[1])].itemsize)
    rows: dict[str, str] = {}
    starts: dict[str, int] = {}
    end, last = 0, None
    for name, spec in order:
        if spec is not last:  # mostly it is
            last, (_, nbytes, rest) = spec, stored[id(spec)]
        starts[name] = start = end
        end += nbytes
        rows[name] = f'{{"data_offsets":[{start},{end}],{rest}}}'
    text = _header_text(rows, metadata)
    length = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8
    header = length.to_bytes(8, "little") + text.ljust(length)
    size = len(header)
    return Layout(header, {name: size + start for name, start in starts.items()}, size + end)


class _Stored(NamedTuple):
    """How tensors of one shape and dtype are stored."""

    itemsize: int
    nbytes: int
    rest: str
    """What the header says of them behind their place."""


def _stored(spec: Spec) -> _Stored:
    wire = WIRE[spec.dtype]
    sizes = ",".join(map(str, (*spec.shape, *wire.more)))
    return _Stored(wire.itemsize, spec.nbytes, f'"dtype":"{wire.name}","shape":[{sizes}]')


def _header_text(rows: dict[str, str], metadata: Mapping[str, str] | None) -> bytes:
    """Return canonical JSON, joined from rows; encoders are slower: "io" in the benchmarks."""
    if metadata is not None:
        rows["__metadata__"] = canonical(metadata).decode("ascii")
    names = sorted(rows)
    if _PLAIN.fullmatch("".join(names)):
        pairs = [f'"{name}":{rows[name]}' for name in names]
    else:
        pairs = [f"{canonical(name).decode('ascii')}:{rows[name]}" for name in names]
    return f"{{{','.join(pairs)}}}".encode("ascii")


def data_of(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[memoryview | bytes]:
    """Yield the bytes of tensors in the order of a layout, small ones of a dtype together."""
    return reported(
        _data_of(tensors, layout), layout.size - len(layout.header), "write", flushed=True
    )


def _data_of(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[memoryview]:
    together: list[Tensor] = []
    size = 0
    for name in layout.starts:
        plain = _plain(tensors[name])
        count = plain.nbytes
        alone = count > _SMALL
        if together and (alone or size > BLOCK or plain.dtype is not together[0].dtype):
            yield _octets(together)
            together, size = [], 0
        if alone:
            yield _octets([plain])
        else:
            together.append(plain)
            size += count
    if together:
        yield _octets(together)


def _plain(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _octets(tensors: list[Tensor]) -> memoryview:
    """Return the bytes of tensors of one dtype, one behind the other."""
    flat = flatten(tensors)
    return _buffer(flat.view(torch.uint8))


def _buffer(octets: Tensor) -> memoryview:
    """Return the memory of a tensor, which the view keeps alive."""
    array = (ctypes.c_char * octets.numel()).from_address(octets.data_ptr())
    array.owner = octets  # type: ignore[attr-defined]  # an attribute of a ctypes object
    return memoryview(array).cast("B")


def written(descriptor: int, pieces: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """Yield bytes after they were written to a file."""
    for piece in pieces:
        files.write(descriptor, piece)
        yield piece


def without_collection(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that makes very many objects, none of them garbage.

    Looking for garbage among them again and again takes longer than making them: a manifest of
    300 000 entries in "io" of the benchmarks.
    """

    @wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **given)
        gc.disable()
        try:
            return function(*args, **given)
        finally:
            gc.enable()

    return call


def checksums_of(pieces: Iterable[memoryview | bytes]) -> list[int]:
    """Return the CRC-32 of each block of some bytes."""
    sums: list[int] = []
    current, filled = 0, 0
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest):
            part = rest[: BLOCK - filled]
            current = zlib.crc32(part, current)
            filled += len(part)
            rest = rest[len(part) :]
            if filled == BLOCK:
                sums.append(current)
                current, filled = 0, 0
    if filled:
        sums.append(current)
    return sums


def stored_checksums(file: files.OpenFile, start: int = 0) -> list[int]:
    """Return the checksums of the bytes of a file from `start` on."""
    places = range(start, file.size, BLOCK)
    blocks = (files.read(file, place, BLOCK) for place in places)
    return checksums_of(reported(blocks, file.size - start, "compare checksums"))


def check_header(file: files.OpenFile, layout: Layout, name: str) -> None:
    """Check size and header of a file.

    Raises:
        FormatError: if they are not those of the layout.
    """
    if file.size != layout.size:
        raise FormatError(f"`{name}` must have {layout.size} bytes, got {file.size}. {RESTORE}")
    if files.read(file, 0, len(layout.header)) != layout.header:
        raise FormatError(f"the header of `{name}` does not agree with the manifest. {RESTORE}")


class MappedFile(NamedTuple):
    """A file in memory."""

    memory: mmap.mmap
    starts: Mapping[str, int]

    def tensors(self, specs: Mapping[str, Spec]) -> dict[str, Tensor]:
        """Return tensors of the file that share its memory."""
        memory, starts = self
        made: dict[str, Tensor] = {}
        last = None
        for name, spec in specs.items():
            if spec is not last:  # mostly it is: "io" in the benchmarks
                last, (dtype, shape) = spec, spec
                count, itemsize, dims = math.prod(shape), dtype.itemsize, len(shape)
            start = starts[name]
            if not count:
                made[name] = torch.empty(shape, dtype=dtype, device="cpu")
            elif start % itemsize:  # in a file of another origin
                octets = bytearray(memory[start : start + spec.nbytes])
                made[name] = torch.frombuffer(octets, dtype=dtype).view(shape)
            else:
                flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
                # In place, which is faster than a view: "io" in the benchmarks.
                made[name] = flat if dims == 1 else flat.resize_(shape)
        return made


def mapped(file: files.OpenFile, starts: Mapping[str, int], *, shared: bool = False) -> MappedFile:
    """Map a file into memory.

    Args:
        file: the open file, of a size above 0.
        starts: the first byte of each tensor.
        shared: whether writes go to the file; else they stay with this mapping.
    """
    access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
    return MappedFile(mmap.mmap(file.descriptor, file.size, access=access), starts)
