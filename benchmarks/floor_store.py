"""The floor of files: the shortest correct code for the rows of io.

It keeps the promises that raw does not. What is saved is there as a whole or not at all: a file is
written under another name, and renamed. A saved file survives a crash, and damage is noticed: it is
synced to the disk before it has its name, the folder after, and each tensor has a checksum. A
mapped one changes, and promises neither. Knows torch and safetensors; must not know kd.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib

import torch
from floor import Floor
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "data"


class Stored(Floor):
    """A floor that can be saved: tensors alone, of the same batch size."""

    __slots__ = ()

    def memmap(self, folder: str) -> None:
        """Write all tensors into one file."""
        rows = [[key, str(value.dtype), list(value.shape)] for key, value in self.entries.items()]
        header = json.dumps([self.batch_size, rows]).encode()
        header += b" " * (-len(header) % 64)
        temporary = f"{folder}/.{FILE}"
        with open(temporary, "wb") as file:
            file.write(len(header).to_bytes(64, "little") + header)
            for value in self.entries.values():
                file.write(octets_of(value))
        os.rename(temporary, f"{folder}/{FILE}")

    @classmethod
    def load_memmap(cls, folder: str) -> Stored:
        """Map the file; a tensor is a view of it."""
        with open(f"{folder}/{FILE}", "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 64 + int.from_bytes(data[:64], "little")
        batch, rows = json.loads(data[64:start])
        entries = {}
        for key, dtype, shape in rows:
            kind = getattr(torch, dtype.removeprefix("torch."))
            count = torch.Size(shape).numel()
            entries[key] = torch.frombuffer(data, dtype=kind, offset=start, count=count).view(shape)
            start += count * kind.itemsize
        return cls(entries, batch)


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
