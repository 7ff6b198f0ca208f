"""Which form of a store a path stands for: a name that ends in `.safetensors` is a single file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kd_core._errors import InvalidValue
from kd_core._store import directory, single

if TYPE_CHECKING:
    from kd_core._protocol.primitives import AbstractContainer
    from kd_core._types import NestedKey

SUFFIX: Final = ".safetensors"


def save(td: AbstractContainer, path: str | Path) -> None:
    """Write a container to a path, in place of what is there."""
    place = Path(path)
    if place.suffix == SUFFIX and not place.is_dir():
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
