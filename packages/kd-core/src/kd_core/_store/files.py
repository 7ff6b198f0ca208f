"""The calls that change or open files: every one of a store goes through this module.

Names are relative to an open directory, and links are never followed. A call that fails raises
`OSError`; a full disk does so too, because nothing is written through a mapping.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kd_core._errors import InvalidValue, MissingDependency, below_tilde
from kd_core._progress import current

try:
    import fcntl
except ImportError as error:
    raise MissingDependency(
        "saving and loading containers requires a POSIX system, whose files can be locked and "
        "opened relative to a directory. Use `torch.save`, `to_h5` or `to_json` instead."
    ) from error

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_ZEROS: Final = 1 << 20


class OpenFile(NamedTuple):
    """A regular file that is open."""

    descriptor: int
    size: int


def make_folder(path: Path) -> None:
    """Create a directory."""
    path.mkdir()


def make_folders(path: Path) -> None:
    """Create a directory and those above it, unless they exist.

    Raises:
        InvalidValue: if it would be below a directory that is named `~`.
    """
    if not path.exists():
        mistake = below_tilde(path)
        if mistake is not None:
            raise InvalidValue(mistake)
        path.mkdir(parents=True, exist_ok=True)


def make_temporary_folder() -> Path:
    """Create a directory that is removed when this process ends, and return it."""
    made = Path(tempfile.mkdtemp(prefix="kd-"))
    _TEMPORARY.add(os.path.realpath(made))
    atexit.register(remove_folder, made, os.getpid())
    return made


_TEMPORARY: Final[set[str]] = set()
"""Directories that are removed when this process ends."""


def is_temporary(path: str) -> bool:
    """Return whether a directory is removed when this process ends."""
    return os.path.realpath(path) in _TEMPORARY


def remove_folder(path: Path, owner: int) -> None:
    """Remove a directory and all in it, unless this process is a fork of its owner."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def remove_empty_folder(path: Path) -> None:
    """Remove a directory that holds nothing."""
    path.rmdir()


def create(name: str, folder: int) -> int:
    """Create a file that does not exist yet, and return its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=folder)


def write(descriptor: int, data: bytes | memoryview, start: int | None = None) -> None:
    """Write all of some bytes at the position of a file, or at `start`."""
    if start is not None:
        os.lseek(descriptor, start, os.SEEK_SET)
    rest = memoryview(data)
    while len(rest):
        count = os.write(descriptor, rest)
        if count == 0:
            raise OSError(errno.EIO, "no byte was written")
        rest = rest[count:]


def truncate(descriptor: int, size: int) -> None:
    """Remove what a file holds behind some bytes."""
    os.ftruncate(descriptor, size)


def allocate(descriptor: int, size: int) -> None:
    """Allocate the blocks of a new file of some size."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = memoryview(bytes(min(size, _ZEROS)))  # macOS does not have the call
    for start in range(0, size, _ZEROS):
        write(descriptor, zeros[: size - start], start)


def sync(descriptor: int) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    os.fsync(descriptor)


def rename(old: str, new: str, folder: int) -> None:
    """Rename a file, and replace one of the new name."""
    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)


def link(old: str, new: str, folder: int) -> None:
    """Add a second name, which must be free, to a file."""
    os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


def remove(name: str, folder: int) -> None:
    """Remove a file."""
    os.unlink(name, dir_fd=folder)


def close(descriptor: int) -> None:
    """Close a file."""
    os.close(descriptor)


def has_name(descriptor: int) -> bool:
    """Return whether an open file has a name in a directory."""
    return os.fstat(descriptor).st_nlink > 0


def place_of(folder: int) -> tuple[int, int]:
    """Return what tells an open directory from others."""
    found = os.fstat(folder)
    return found.st_dev, found.st_ino


def lock(descriptor: int, *, wait: bool) -> None:
    """Lock an open file against other writers, until it is closed.

    Args:
        descriptor: the file.
        wait: wait until another writer has closed it; else raise `BlockingIOError`.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_lock(name: str, folder: int) -> int:
    """Open the file of a lock, create it if needed, and return its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=folder)


@contextmanager
def locked(name: str, folder: int) -> Iterator[None]:
    """Lock out other writers while the block runs."""
    descriptor = open_lock(name, folder)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def opened_folder(path: Path | str, folder: int | None = None) -> Iterator[int]:
    """Open a directory for as long as the block runs; a link in `folder` is not followed.

    An `OSError` of the block says in which directory the file is.
    """
    flags = _FOLDER if folder is None else _FOLDER | os.O_NOFOLLOW
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    except OSError as error:
        name = error.filename
        if name is None and error.errno is not None:
            error.filename = str(path)
        elif isinstance(name, str) and os.sep not in name and name != str(path):
            error.filename = f"{path}{os.sep}{name}"
        raise
    finally:
        os.close(descriptor)


@contextmanager
def opened(name: str | Path, folder: int | None, *, writable: bool = False) -> Iterator[OpenFile]:
    """Open a regular file for as long as the block runs.

    Args:
        name: its name in the directory, or its path.
        folder: the directory; a link in it is not followed. `None`: `name` is what a user gave.
        writable: open it for writing, too.

    Raises:
        OSError: if it is not a regular file, or has other names beside this one.
    """
    flags = _READ if folder is not None else _READ & ~os.O_NOFOLLOW
    if writable:
        flags |= os.O_RDWR
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file", str(name))
        # A rename between open and fstat can leave it without any name.
        if folder is not None and found.st_nlink > 1:
            raise OSError(errno.EMLINK, "expected a file with one name", str(name))
        yield OpenFile(descriptor, found.st_size)
    finally:
        os.close(descriptor)


def read(file: OpenFile, start: int, count: int) -> bytes:
    """Return bytes of a file: fewer than `count` only if it ends."""
    found = part = os.pread(file.descriptor, count, start)
    while part and len(found) < count:
        part = os.pread(file.descriptor, count - len(found), start + len(found))
        found += part
    return found


def names_in(folder: int) -> list[str]:
    """Return the names in a directory, sorted."""
    return sorted(os.listdir(folder))  # an open directory is not a path


# How far long saves, loads and checks are.


STEP: Final = 4 << 20
"""Bytes between two looks at how far it is, at most."""


def reported(
    pieces: Iterable[memoryview | bytes], total: int, stage: str, *, flushed: bool = False
) -> Iterator[memoryview | bytes]:
    """Yield bytes, and count how many of them were taken, as a stage of the task that runs.

    Args:
        pieces: the bytes.
        total: how many there are.
        stage: what is done with them.
        flushed: whether waiting for the disk is the next stage.
    """
    task = current()
    if task is None:
        yield from pieces
        return
    task.begin(stage, total, "bytes")
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), STEP):
            part = view[start : start + STEP]
            yield part
            task.advance(len(part))
    if flushed:
        task.begin("wait for the disk")
