"""Files under a temporary name, beside the name that they get when they are whole.

The writer of one holds a lock on it. One that nobody has locked is what a killed writer left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Final

from kd_core._store import files

_NAME: Final = re.compile(r"\.(.*)\.tmp-[0-9a-f]{32}", re.DOTALL)


@contextmanager
def temporary(name: str, folder: int) -> Iterator[tuple[str, int]]:
    """Create a file for a block that fills and renames or links it; return name and descriptor.

    Args:
        name: the name that it gets.
        folder: the directory.
    """
    while True:
        made = f".{name}.tmp-{token_hex(16)}"
        with _created(made, folder) as descriptor, _removed(made, folder):
            files.lock(descriptor, wait=True)
            if files.has_name(descriptor):  # else a sweep was faster than the lock
                yield made, descriptor
                return


@contextmanager
def _created(name: str, folder: int) -> Iterator[int]:
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
