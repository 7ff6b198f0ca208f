"""Reading regular files, and writing a file in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from kd_export._errors import ExportError, nearest

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading, if it is a regular one: not a pipe, a device or a folder.

    Raises:
        ExportError: It is not, or it cannot be read.
    """
    try:
        _check_regular(path, path.stat())  # to open some devices has an effect
        with os.fdopen(os.open(path, _FLAGS), "rb") as file:
            _check_regular(path, os.fstat(file.fileno()))
            yield file
    except MemoryError as error:
        raise ExportError(f"`{path}` does not fit into memory.", got=str(path)) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ExportError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ExportError(
            f"`{path}` cannot be read: {reason}.", got=str(path), hint=_remedy(path)
        ) from error


def _remedy(path: Path) -> str:
    try:
        known = [file.stem for file in path.parent.glob(f"*{path.suffix}") if file.is_file()]
    except (OSError, ValueError):
        known = []
    close = nearest(path.stem, known)
    if close is None or close == path.stem:
        return "Pass the path of a file on disk that you may read."
    return f"Did you mean `{path.with_stem(close)}`?"


def read_regular(path: Path) -> bytes:
    """Read a regular file whole."""
    with open_regular(path) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ExportError(
            f"`{path}` is not a regular file.",
            expected="a regular file",
            got=stat.filemode(status.st_mode),
            hint="Pass the path of a file on disk.",
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Create a temporary path beside the target; move it there when the block succeeds.

    The target is replaced in one step after the bytes have reached the disk. When the block
    raises, the target is left as it was. The temporary file has the target's own name, in a folder
    of its own, because torch writes the name of the file into the archive. Other files in that
    folder are moved too.
    """
    with _folder_beside(path) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        others = [file for file in Path(folder).iterdir() if file != temporary]
        for written in (*others, temporary):  # the target last: it names the others
            with written.open("rb") as file:
                os.fsync(file.fileno())
            written.chmod(0o666 & ~_umask())
            written.replace(path.with_name(written.name))


def _folder_beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        return tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ExportError(
            f"`{path}` cannot be written: {error.strerror}.",
            got=str(path),
            hint="Give a file name in a folder that exists and that you may write to.",
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
