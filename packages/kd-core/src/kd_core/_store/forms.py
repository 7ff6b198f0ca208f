"""Which form of a store a path stands for: a name that ends in `.safetensors` is a single file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kd_core._errors import InvalidValue
from kd_core._store import arena, directory, files, growing, single

if TYPE_CHECKING:
    from torch import Tensor

    from kd_core._protocol.primitives import AbstractContainer
    from kd_core._store.summary import StoreInfo
    from kd_core._types import NestedKey

SUFFIX: Final = ".safetensors"


def save(td: AbstractContainer, path: str | Path) -> None:
    """Write a container to a path, in place of what is there."""
    place = Path(path)
    if _is_single(place):
        single.save(td, place)
    else:
        directory.save(td, place)


def load(
    path: str | Path, verify: str = "fast", keys: Iterable[NestedKey] | None = None
) -> AbstractContainer:
    """Return the container at a path, not locked."""
    if verify not in ("fast", "full"):
        raise InvalidValue(f'`verify` must be "fast" or "full", got {verify!r}.')
    place = Path(path)
    read = directory.load if place.is_dir() else single.load
    return read(place, full=verify == "full", keys=keys)


def append(td: AbstractContainer, path: str | Path) -> None:
    """Add the rows of a container to the store at a path."""
    directory.append(td, _directory(path, "append to"))


def compact(path: str | Path) -> None:
    """Rewrite the store at a path in one segment."""
    directory.compact(_directory(path, "compact"))


def create_arena(
    td: AbstractContainer, path: str | Path | None, *, filled: bool = True
) -> AbstractContainer:
    """Write an arena to a path; return the container in it, not locked.

    Without a path it is temporary.
    """
    if path is None:
        return arena.create(td, files.make_temporary_folder(), filled=filled)
    return arena.create(td, _directory(path, "create an arena at"), filled=filled)


def load_arena(path: str | Path) -> AbstractContainer:
    """Return the container in the arena at a path, not locked."""
    _check_directory(path, "open as an arena")
    return arena.load(os.fspath(path))  # without a `Path`, which is slow: "io" in the benchmarks


def add_entry(
    td: AbstractContainer, keys: tuple[str, ...], leaf: Tensor, *, filled: bool = True
) -> Tensor:
    """Add an entry to the arena of a container, and to the container; return it."""
    return growing.add_entry(td, keys, leaf, filled=filled)


def refresh(td: AbstractContainer) -> None:
    """Add the entries to a container that its arena has by now."""
    growing.refresh(td)


def seal(path: str | Path) -> None:
    """Write the arena at a path to the disk, and record its checksums."""
    arena.seal(_directory(path, "seal"))


def check(path: str | Path) -> None:
    """Read all of the store at a path and compare it with its checksums."""
    place = Path(path)
    (directory.check if place.is_dir() else single.check)(place)


def info(path: str | Path) -> StoreInfo:
    """Return what the store at a path holds, without reading its tensors."""
    place = Path(path)
    return directory.info(place) if place.is_dir() else single.info(place)


def _directory(path: str | Path, action: str) -> Path:
    _check_directory(path, action)
    return Path(path)


def _check_directory(path: str | Path, action: str) -> None:
    if _is_single(path):
        raise InvalidValue(
            f"cannot {action} `{path}`: a name that ends in `{SUFFIX}` is a single file. Save to a "
            "directory."
        )


def _is_single(path: str | Path) -> bool:
    return str(path).endswith(SUFFIX) and not Path(path).is_dir()
