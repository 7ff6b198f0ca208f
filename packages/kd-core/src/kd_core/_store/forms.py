"""Which form of a store a path stands for: a name with the suffix of a file is a single file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from errno import ENOENT
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kd_core._errors import (
    FormatError,
    InvalidValue,
    below_tilde,
    listed,
    refuse_existing,
    warn_caller,
)
from kd_core._keys import format_key, path_of
from kd_core._progress import Task
from kd_core._protocol import AbstractContainer
from kd_core._store import arena, directory, files, foreign, foreign_writing, single
from kd_core._store.commit import MANIFEST, read_manifest
from kd_core._store.mapped_tensor import root_of
from kd_core._switches import files_of_tensordict

if TYPE_CHECKING:
    from torch import Tensor

    from kd_core._store.commit import StoreInfo
    from kd_core._types import DeviceLike, NestedKey

SUFFIXES: Final = frozenset((".bin", ".ckpt", ".pt", ".pth", ".safetensors", ".st", ".tdz", ".zip"))
"""What a reader takes for a file: a directory of such a name would be a surprise."""


_FOREIGN: Final = {
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), ("torch", "`torch.save(td, path)`")),
    **dict.fromkeys((".h5", ".hdf5"), ("HDF5", "`to_h5`")),
    **dict.fromkeys((".pkl", ".pickle"), ("pickle", "`pickle.dump(td, file)`")),
    **dict.fromkeys((".npz", ".npy"), ("numpy", "`numpy.savez` of what `to_struct_array` returns")),
    **dict.fromkeys((".arrow", ".feather"), ("Arrow", "`to_arrow`")),
    **dict.fromkeys((".onnx", ".pt2"), ("exported modules", "`kd_export.save(module, path)`")),
    ".parquet": ("Parquet", "`to_parquet`"),
    ".csv": ("CSV", "`to_csv`"),
    ".json": ("JSON", "`to_json`"),
    ".zarr": ("Zarr", "`to_zarr`"),
}
"""For suffixes of other formats: the format, and what writes it."""


def note_suffix(path: str | Path, single: bool) -> None:
    """Warn that a new store has the suffix of another format, which its tools expect."""
    place = Path(path)
    if place.suffix not in _FOREIGN or place.exists() or files_of_tensordict():
        return
    name, writer = _FOREIGN[place.suffix]
    form = "a single file of safetensors" if single else "a directory"
    warn_caller(
        f"`{place.name}` has the suffix of {name}, and becomes {form}, which `TensorDict.load` "
        f"reads. Use {writer} for {name}, or another suffix: `.safetensors` for a single file, "
        "`.kd` for a directory."
    )


def save(
    td: AbstractContainer, path: str | Path, archive: bool | None = None, *, durable: bool = True
) -> None:
    """Write a container to a path, in place of what is there.

    Args:
        td: the container.
        path: the directory or the file; directories above it are created.
        archive: whether it is a single file; `None`: the name says so.
        durable: wait until it is on the disk.
    """
    place = Path(path)
    files.make_folders(place.parent)
    with Task(f"save `{place.name}`"):
        if is_single(place) if archive is None else archive:
            single.save(td, place, durable)
            return
        folder = _folder_of_tensordict(td, place)
        if folder is None:
            directory.save(td, place, durable)
        else:
            foreign_writing.write(folder, place, filled=True, durable=durable)


def _folder_of_tensordict(td: AbstractContainer, path: Path) -> foreign_writing.Folder | None:
    """Return what is written to a directory of the layout of tensordict; `None`: to a store."""
    if not files_of_tensordict() or (path / MANIFEST).exists() or path.is_file():
        return None
    return foreign_writing.folder_of(td)


def load(
    path: str | Path, verify: str = "fast", keys: Iterable[NestedKey] | None = None
) -> AbstractContainer:
    """Return the container at a path, not locked; writes to its tensors stay in this process.

    A path below that of a store is the place of a nested container: `store/nested`.
    """
    if verify not in ("fast", "full"):
        raise InvalidValue(f'`verify` must be "fast" or "full", got {verify!r}.')
    place = Path(path)
    mistake = below_tilde(place)
    if mistake is not None:
        raise FileNotFoundError(ENOENT, mistake, str(path))
    above = _store_above(place)
    if above is not None:
        inner = place.parts[len(above.parts) :]
        below = None if keys is None else [(*inner, *path_of(key)) for key in keys]
        return _nested(load(above, verify, below), inner, place)
    if foreign.is_foreign(place):
        return _selected(foreign.load(place), keys)
    read = directory.load if place.is_dir() else single.load
    try:
        if verify == "fast":
            return read(place, keys=keys)
        with Task(f"load `{place.name}`"):
            return read(place, full=True, keys=keys)
    except FormatError:
        if not place.is_file() or not foreign.is_foreign_file(place):
            raise
    return _selected(foreign.load_file(place), keys)


def _selected(found: AbstractContainer, keys: Iterable[NestedKey] | None) -> AbstractContainer:
    return found if keys is None else found._kd_engine.select(found, *keys)


def _store_above(path: Path) -> Path | None:
    """Return the store that a path where nothing is would be inside of, if there is one."""
    if path.exists():
        return None
    above = next(each for each in path.parents if each.exists())
    return above if (above / MANIFEST).exists() else None


def _nested(found: AbstractContainer, keys: tuple[str, ...], path: Path) -> AbstractContainer:
    """Return a nested container of a store, whose path goes on with its keys."""
    for key in keys:
        inner = found._kd_entries.get(key)
        if not isinstance(inner, AbstractContainer):
            raise FileNotFoundError(ENOENT, "there is no container in the store", str(path))
        found = inner
    return found


def append(td: AbstractContainer, path: str | Path) -> None:
    """Add the rows of a container to the store at a path."""
    place = _directory(path, "append to")
    if foreign.is_foreign(place):
        raise InvalidValue(
            f"`{place}` is a directory of tensordict, to which rows are not added. Save what "
            "`TensorDict.load` returns to another path, and append to that."
        )
    with Task(f"append to `{place.name}`"):
        (arena if is_arena(place) else directory).append(td, place)


def resize(path: str | Path, rows: int) -> None:
    """Change the number of rows of the arena at a path."""
    place = _directory(path, "resize")
    with Task(f"resize `{place.name}`"):
        arena.resize(place, rows)


def is_arena(path: Path) -> bool:
    """Return whether a store at a path is an arena, which is not sealed."""
    if not (path / MANIFEST).is_file():
        return False
    with files.opened_folder(path) as folder, suppress(FormatError):
        return not read_manifest(folder, path).sealed
    return False


def compact(path: str | Path) -> None:
    """Rewrite the store at a path in one segment."""
    place = _directory(path, "compact")
    with Task(f"compact `{place.name}`"):
        directory.compact(place)


def create_arena(
    td: AbstractContainer,
    path: str | Path | None,
    *,
    filled: bool = True,
    exist_ok: bool = True,
    overwrite: bool = True,
) -> AbstractContainer:
    """Write an arena to a path; return the container in it, not locked.

    Args:
        td: what it holds.
        path: the directory; `None`: a temporary one.
        filled: whether tensors are written; else they are zeros.
        exist_ok: whether there may be something at the path.
        overwrite: whether it is replaced; else it is opened, if it has the structure of `td`.

    Raises:
        AlreadyExists: if there is something that must not be touched.
    """
    if path is None:
        with Task("write an arena"):
            return arena.create(td, files.make_temporary_folder(), filled=filled, overwrite=True)
    place = _directory(path, "create an arena at")
    refuse_existing(place, exist_ok)
    files.make_folders(place.parent)
    with Task(f"write `{place.name}`"):
        folder = _folder_of_tensordict(td, place)
        if folder is None:
            return arena.create(td, place, filled=filled, overwrite=overwrite)
        made = foreign_writing.create(folder, place, filled=filled, overwrite=overwrite)
        if made is None:
            raise arena.holds_another(place)
        return made


def load_arena(path: str | Path, *, private: bool = False) -> AbstractContainer:
    """Return the container in the store at a path, not locked; writes to its tensors go to it.

    A saved store is made an arena first; a single file, and what must not be written to, is opened
    as `load` does. A directory of tensordict is mapped as it is.

    Args:
        path: the directory or the file.
        private: writes stay in this process.
    """
    if private or Path(path).is_file():
        return load(path)
    try:
        return arena.load(os.fspath(path))  # without a `Path`, which is slow: "io" of benchmarks
    except FileNotFoundError:
        place = Path(path)
        if foreign.is_foreign(place):
            return foreign.load(place, shared=True)
        above = _store_above(place)
        if above is None:
            raise
    return _nested(load_arena(above), place.parts[len(above.parts) :], place)


def add_entry(
    td: AbstractContainer, keys: tuple[str, ...], leaf: Tensor, *, filled: bool = True
) -> Tensor:
    """Add an entry to the arena of a container, and to the container; return it."""
    root = root_of(td)
    if root is None or not foreign.is_foreign(Path(root)):
        return arena.add_entry(td, keys, leaf, filled=filled)
    made = foreign_writing.add_entry(td, Path(root), keys, leaf, filled=filled)
    arena.set_entry(td, keys, made)
    return made


def refresh(td: AbstractContainer) -> None:
    """Add the entries to a container that its arena has by now."""
    root = root_of(td)
    if root is None or not foreign.is_foreign(Path(root)):
        arena.refresh(td)
    else:
        arena.take_new(td, foreign.load(Path(root), shared=True))


def seal(path: str | Path) -> None:
    """Write the arena at a path to the disk, and record its checksums."""
    place = _directory(path, "seal")
    with Task(f"seal `{place.name}`"):
        arena.seal(place)


def seal_if_open(path: str | Path) -> None:
    """Make an arena a store; leave another store as it is."""
    with files.opened_folder(path) as folder:
        found = read_manifest(folder, path)
    if not found.sealed:
        seal(path)


def check(path: str | Path) -> None:
    """Read all of the store at a path and compare it with its checksums."""
    place = Path(path)
    with Task(f"check `{place.name}`"):
        (directory.check if place.is_dir() else single.check)(place)


def info(path: str | Path) -> StoreInfo:
    """Return what the store at a path holds, without reading its tensors."""
    place = Path(path)
    return directory.info(place) if place.is_dir() else single.info(place)


def is_archive(path: str | Path) -> bool:
    """Return whether a container is at a path, in a single file."""
    place = Path(path)
    return place.is_file() and single.is_saved(place)


def _directory(path: str | Path, action: str) -> Path:
    if str(path).endswith(".safetensors") and not Path(path).is_dir():
        raise InvalidValue(
            f"cannot {action} `{path}`: a name that ends in `.safetensors` is a single file. Save "
            "to a directory."
        )
    return Path(path)


def is_single(path: str | Path) -> bool:
    """Return whether a path is that of a single file, by its name or by what is there."""
    suffixes = {".tdz"} if files_of_tensordict() else SUFFIXES
    return Path(path).suffix in suffixes and not Path(path).is_dir()


_COMPRESSIONS: Final = frozenset(("bzip2", "deflate", "deflated", "lzma", "stored"))


def check_compression(compression: str | int | None, single: bool) -> None:
    """Raise `InvalidValue` for a compression that does not exist, or of a directory."""
    if compression is None:
        return
    if isinstance(compression, str) and compression not in _COMPRESSIONS:
        raise InvalidValue(
            f"`compression` must be one of {listed(sorted(_COMPRESSIONS))}, got {compression!r}."
        )
    if not single:
        raise InvalidValue(
            "`compression` cannot be combined with a directory. Pass `archive=True`, or leave it "
            "out."
        )


def part_at(
    found: AbstractContainer, subpath: NestedKey | None, path: str | Path
) -> AbstractContainer:
    """Return the container at a key of one that was loaded."""
    if subpath is None:
        return found
    for key in path_of(subpath):
        inner = found._kd_entries.get(key)
        if not isinstance(inner, AbstractContainer):
            raise InvalidValue(
                f"`subpath` must be the key of a container in `{path}`, got "
                f"{format_key(path_of(subpath))}."
            )
        found = inner
    return found


def taken(
    found: AbstractContainer,
    device: DeviceLike | None,
    non_blocking: bool,
    out: AbstractContainer | None,
) -> AbstractContainer:
    """Return what was loaded: on a device, or written to another container."""
    if out is not None:
        return out._kd_engine.update(out, found, inplace=True)
    if device is not None:
        found = found._kd_engine.to(found, device, non_blocking=non_blocking)
    return found
