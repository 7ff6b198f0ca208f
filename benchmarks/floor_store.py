"""The floor of files: the shortest correct code for the rows of io.

It keeps the promises that raw does not. What is saved is there as a whole or not at all, and one
writer works at a time: a file is written under another name, and renamed. Links are not followed,
and what is opened is compared: digest, type, size and header. A file names no other folder, and
what it makes a reader allocate has a limit. A file of tensors is one of safetensors. A saved file
survives a crash, and damage is noticed: it is synced to the disk before it has its name, the folder
after, and each tensor has a checksum. A mapped one changes, and promises neither: it is locked, and
which file a tensor is in is known as long as it is mapped, so that another process can map it too.
Knows torch and safetensors; must not know kd.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import re
import stat
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from floor import Floor
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST = "manifest"
VERSION = 1
MOST_BYTES = 64 << 20
NAME = re.compile(r"[0-9a-f]{32}")
PLACES: dict[int, tuple[int, str, str, weakref.ref[mmap.mmap]]] = {}
"""Which file is mapped at an address: its size, folder and name."""

NAMES = {torch.float32: "F32"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
Rows = list[list[object]]


class Stored(Floor):
    """A floor that can be saved: tensors alone, of the same batch size."""

    __slots__ = ()

    def memmap(self, path: str) -> Stored:
        """Write all tensors into one file, and return those in it."""
        if "__metadata__" in self.entries:
            raise ValueError
        rows = [[key, NAMES[leaf.dtype], list(leaf.shape)] for key, leaf in self.entries.items()]
        header, _, size = layout_of(rows)
        name = os.urandom(16).hex()
        manifest = [VERSION, name, size, self.batch_size, rows]
        body = json.dumps(manifest).encode()
        with opened(path, None, os.O_DIRECTORY) as folder:
            with opened(".lock", folder, os.O_RDWR | os.O_CREAT) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                old = os.listdir(folder)
                kept = {".lock", MANIFEST, name}
                if MANIFEST in old:
                    kept.add(manifest_of(folder)[1])
                octets = torch._C._nn.flatten_dense_tensors(list(self.entries.values()))
                put(folder, name, header, octets_of(octets))
                put(folder, MANIFEST, hashlib.sha256(body).digest(), body)
                for each in old:
                    if each not in kept:
                        os.unlink(each, dir_fd=folder)
            return Stored._mapped(folder, path, *manifest[1:])

    @classmethod
    def load_memmap(cls, path: str) -> Stored:
        """Map the file; a tensor is a view of it."""
        with opened(path, None, os.O_DIRECTORY) as folder:
            version, *manifest = manifest_of(folder)
            if version != VERSION:
                raise ValueError
            return cls._mapped(folder, path, *manifest)

    @classmethod
    def _mapped(
        cls, folder: int, path: str, name: str, size: int, batch: object, rows: Rows
    ) -> Stored:
        if not NAME.fullmatch(name):
            raise ValueError
        header, starts, end = layout_of(rows)
        with opened(name, folder, os.O_RDWR) as file:
            if not size == end == size_of(file) or os.pread(file, len(header), 0) != header:
                raise ValueError
            data = mmap.mmap(file, size, access=mmap.ACCESS_WRITE)
        record(data, os.path.realpath(path), name)
        entries = {}
        for (key, dtype, shape), start in zip(rows, starts, strict=True):
            count = torch.Size(shape).numel()
            leaf = torch.frombuffer(data, dtype=DTYPES[dtype], offset=start, count=count)
            entries[key] = leaf.view(*shape)
        if len(entries) < len(rows):
            raise ValueError
        made = cls(entries, batch)
        made.locked = True
        return made


def record(data: mmap.mmap, path: str, name: str) -> None:
    """Record where a file is mapped, until no tensor refers to it."""
    address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    gone = weakref.ref(data, lambda _: PLACES.pop(address))
    PLACES[address] = len(data), path, name, gone


def layout_of(rows: Rows) -> tuple[bytes, list[int], int]:
    """Return the header of a file, where its tensors start, and its size."""
    fields, starts, end = {}, [], 0
    for key, dtype, shape in rows:
        starts.append(end)
        end += torch.Size(shape).numel() * DTYPES[dtype].itemsize
        fields[key] = {"dtype": dtype, "shape": shape, "data_offsets": [starts[-1], end]}
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts], len(header) + end


def manifest_of(folder: int) -> list:
    """Return what the manifest says."""
    with opened(MANIFEST, folder, os.O_RDONLY) as file:
        data = os.pread(file, min(size_of(file), MOST_BYTES), 0)
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError
    return json.loads(data[32:])


@contextmanager
def opened(name: str, folder: int | None, flags: int) -> Iterator[int]:
    """Open a file that is not a link."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def size_of(file: int) -> int:
    """Return the size of a regular file with one name."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ValueError
    return found.st_size


def put(folder: int, name: str, *pieces: bytes | memoryview) -> None:
    """Write a file and rename it."""
    temporary = os.urandom(16).hex()
    with opened(temporary, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        for piece in pieces:
            rest = memoryview(piece)
            while len(rest):
                rest = rest[os.write(file, rest) :]
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def to_safetensors(td: Floor, path: str) -> None:
    """Write one file of safetensors."""
    sums = {key: str(zlib.crc32(octets_of(value))) for key, value in td.entries.items()}
    save_file(td.entries, f"{path}.new", {"batch": json.dumps(td.batch_size), **sums})
    with open(f"{path}.new", "rb") as file:
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def from_safetensors(path: str) -> dict[str, Tensor]:
    """Return the tensors of a file."""
    return load_file(path)


def octets_of(leaf: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    return memoryview(leaf.numpy()).cast("B")
