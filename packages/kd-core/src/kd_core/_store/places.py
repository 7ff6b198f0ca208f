"""Which tensors lie in an arena, and where: by their addresses, because they are plain tensors.

Which container is the whole of an arena is known, too, because an empty one has no tensors.
"""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_right, insort
from typing import Final

import torch
from torch import Tensor


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
    """Record where an arena is mapped, until no tensor refers to it."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    place = Place(address, len(memory), path, file)
    _LIVE[address] = place, weakref.ref(memory, lambda _: _forget(address))
    insort(_STARTS, address)


def _forget(address: int) -> None:
    _STARTS.remove(address)
    del _LIVE[address]


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


_ROOTS: Final[dict[int, tuple[str, weakref.ref[object]]]] = {}


def record_root(container: object, path: str) -> None:
    """Record that a container is the whole of an arena, as long as it lives."""
    key = id(container)
    _ROOTS[key] = path, weakref.ref(container, lambda _: _ROOTS.pop(key, None))


def root_of(container: object) -> str | None:
    """Return the directory of the arena whose whole a container is."""
    found = _ROOTS.get(id(container))
    return found[0] if found is not None and found[1]() is container else None


def roots_at(path: str) -> list[object]:
    """Return the containers that are the whole of the arena in a directory."""
    found = [root() for place, root in list(_ROOTS.values()) if place == path]
    return [root for root in found if root is not None]
