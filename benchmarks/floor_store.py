"""The floor of files: the shortest correct code for the rows of io.

It keeps the promises that raw does not. What is saved is there as a whole or not at all, and one
writer works at a time: a file is written under another name, and renamed. Links are not followed,
and what is opened is compared: digest, type, size and header. A file names no other folder, and
what it makes a reader allocate has a limit. A manifest is canonical JSON of the form that the
specification of the format gives: containers can be nested, keys are not names of tensors, and a
mapped container may have several files, as one that gained entries has. No object of it has a key
twice, no number is infinite, and no file is named twice. A file of tensors is one of safetensors,
in which they are aligned, whatever their dtypes are. A reader whose files are gone because the
manifest was replaced starts again. A saved file survives a
crash, and damage is noticed: it is synced to the disk before it has its name, the folder after, and
each tensor has a checksum. A mapped one changes, and promises neither: it is locked, and which file
a tensor is in is known as long as it is mapped, so that another process can map it too.
Knows torch and safetensors; must not know kd.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import mmap
import os
import re
import stat
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from floor import Floor
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST = "manifest.json"
VERSION = 1
MOST_BYTES = 64 << 20
NAME = re.compile(r"arena-[0-9a-f]{32}\.safetensors")
PLACES: dict[int, tuple[int, str, str, weakref.ref[mmap.mmap]]] = {}
"""Which file is mapped at an address: its size, folder and name."""

FIELDS = {
    "format": "kd",
    "generation": 1,
    "min_reader": 1,
    "parent": None,
    "sealed": False,
    "version": VERSION,
}
ROOTS: dict[int, tuple[str, weakref.ref[Floor]]] = {}
"""Which floor is the whole of a folder, by its id."""

WIRE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in WIRE}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
Tree = dict[str, object]
Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Stored(Floor):
    """A floor that can be saved: tensors alone, of the same batch size."""

    __slots__ = ("__weakref__",)

    def memmap(self, path: str) -> Stored:
        """Write all tensors into one file, and return those in it."""
        if "__metadata__" in self.entries:
            raise ValueError
        specs = {
            f"t{at}": (leaf.dtype, leaf.shape) for at, leaf in enumerate(self.entries.values())
        }
        header, _, size = layout_of(specs)
        name = f"arena-{os.urandom(16).hex()}.safetensors"
        nodes = [
            [key, {"tensor": [0, at, NAMES[leaf.dtype], list(leaf.shape)]}]
            for at, (key, leaf) in zip(specs, self.entries.items(), strict=True)
        ]
        tree = {"td": {"batch": list(self.batch_size), "entries": nodes}}
        fields = {**FIELDS, "segments": [[name, size, []]], "tree": tree}
        body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        with opened(path, None, os.O_DIRECTORY) as folder:
            with opened(".lock", folder, os.O_RDWR | os.O_CREAT) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                old = os.listdir(folder)
                kept = {".lock", MANIFEST, name}
                if MANIFEST in old:
                    kept |= {name for name, _ in segments_of(manifest_of(folder))}
                put(folder, name, header, *contents_of(self.entries.values()))
                digest = hashlib.sha256(body).hexdigest().encode()
                put(folder, MANIFEST, b'{"sha256": "%s"}\n' % digest, body)
                for each in old:
                    if each not in kept:
                        os.unlink(each, dir_fd=folder)
            return Stored._mapped(folder, path, fields)

    @classmethod
    def load_memmap(cls, path: str) -> Stored:
        """Map the file; a tensor is a view of it."""
        with opened(path, None, os.O_DIRECTORY) as folder:
            seen = None
            while True:
                manifest = manifest_of(folder)
                try:
                    return cls._mapped(folder, path, manifest)
                except FileNotFoundError:
                    if manifest == seen:
                        raise
                    seen = manifest
                except (LookupError, TypeError, RuntimeError, OverflowError) as error:
                    raise ValueError from error

    @classmethod
    def _mapped(cls, folder: int, path: str, fields: Tree) -> Stored:
        place = os.path.realpath(path)
        segments = segments_of(fields)
        specs: list[Specs] = [{} for _ in segments]
        add_specs(fields["tree"], specs)
        leaves = [map_file(folder, place, *row) for row in zip(segments, specs, strict=True)]
        made = cls._of(fields["tree"], leaves)
        key = id(made)
        ROOTS[key] = place, weakref.ref(made, lambda _: ROOTS.pop(key))
        return made

    @classmethod
    def _of(cls, node: Tree, leaves: list[dict[str, Tensor]]) -> Stored:
        level = node["td"]
        entries = {}
        for key, value in level["entries"]:
            if "tensor" in value:
                segment, name, _, _ = value["tensor"]
                entries[key] = leaves[segment][name]
            else:
                entries[key] = cls._of(value, leaves)
        if len(entries) < len(level["entries"]):
            raise ValueError
        made = cls(entries, level["batch"])
        made.locked = True
        return made


def map_file(folder: int, place: str, segment: tuple[str, int], specs: Specs) -> dict[str, Tensor]:
    """Return the tensors in a file."""
    name, size = segment
    header, starts, end = layout_of(specs)
    with opened(name, folder, os.O_RDWR) as file:
        if not size == end == size_of(file) or os.pread(file, len(header), 0) != header:
            raise ValueError
        data = mmap.mmap(file, size, access=mmap.ACCESS_WRITE)
    record(data, place, name)
    leaves = {}
    for name, (dtype, shape) in specs.items():
        count = math.prod(shape)
        if count:
            leaf = torch.frombuffer(data, dtype=dtype, offset=starts[name], count=count)
            leaves[name] = leaf.view(*shape)
        else:
            leaves[name] = torch.empty(shape, dtype=dtype)
    return leaves


def record(data: mmap.mmap, path: str, name: str) -> None:
    """Record where a file is mapped, until no tensor refers to it."""
    address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    gone = weakref.ref(data, lambda _: PLACES.pop(address))
    PLACES[address] = len(data), path, name, gone


def add_specs(node: Tree, specs: list[Specs]) -> None:
    """Add what a node says of tensors, by segments."""
    for _, value in node["td"]["entries"]:
        if "tensor" not in value:
            add_specs(value, specs)
            continue
        segment, name, dtype, shape = value["tensor"]
        for size in shape:
            if type(size) is not int or size < 0:
                raise ValueError
        spec = DTYPES[dtype], tuple(shape)
        if type(segment) is not int or segment < 0 or type(name) is not str:
            raise ValueError
        if specs[segment].setdefault(name, spec) != spec:
            raise ValueError


def layout_of(specs: Specs) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a file, where its tensors start, and its size."""
    fields, starts, end = {}, {}, 0
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        starts[name] = end
        end += math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": WIRE[dtype], "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end


def contents_of(leaves: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of tensors in the order of a file, those of a dtype together."""
    order = sorted(leaves, key=lambda leaf: -leaf.dtype.itemsize)
    for _, some in itertools.groupby(order, key=lambda leaf: leaf.dtype):
        octets = torch._C._nn.flatten_dense_tensors(list(some))
        yield octets_of(octets.view(torch.uint8))


def segments_of(fields: Tree) -> list[tuple[str, int]]:
    """Return the names and sizes of the files of tensors, which must not be sealed."""
    if fields["format"] != "kd" or fields["min_reader"] > VERSION or fields["sealed"]:
        raise ValueError
    segments = [(name, size) for name, size, _ in fields["segments"]]
    named = {name for name, _ in segments if NAME.fullmatch(name)}
    if fields["generation"] < 1 or len(named) < len(segments):
        raise ValueError
    return segments


def manifest_of(folder: int) -> Tree:
    """Return what the manifest says."""
    with opened(MANIFEST, folder, os.O_RDONLY) as file:
        data = os.pread(file, min(size_of(file), MOST_BYTES), 0)
    line, _, body = data.partition(b"\n")
    if b'{"sha256": "%s"}' % hashlib.sha256(body).hexdigest().encode() != line:
        raise ValueError
    return DECODER.decode(body.decode())


def unique(pairs: list[tuple[str, object]]) -> Tree:
    """Return an object of JSON."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError
    return made


def refuse(name: str) -> object:
    """Refuse a number that is not finite."""
    raise ValueError(name)


def finite(text: str) -> float:
    """Return a number."""
    if math.isinf(float(text)):
        raise ValueError
    return float(text)


DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_float=finite, parse_constant=refuse)


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
