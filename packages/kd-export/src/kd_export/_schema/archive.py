"""Reading and writing artefacts as files, without executing anything they hold.

A ``.pt2`` is a zip archive and an ``.onnx`` file a protobuf message. What is wanted from them is
a string that kd_export put there itself, so the standard library is enough: neither torch nor
onnx is imported, weights are skipped and not read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kd_export._errors import ExportError, UntrustedArtifact

SCHEMA_FILE = "kd_export.json"
SCHEMA_PROPERTY = "kd_export"

_METADATA_PROPS = 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LARGEST_SCHEMA = 1 << 26

DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # an encrypted archive, one of a compression that is not known
)
"""What reading a damaged archive raises."""


def read_zip_schema(file: BinaryIO) -> str:
    """Read the schema text out of a ``.pt2`` file."""
    try:
        with zipfile.ZipFile(file) as archive:
            paths = {name.split("/", 1)[-1]: name for name in archive.namelist()}
            if "archive_format" not in paths:
                # What is left of a cut file may end with the directory of an archive inside it.
                raise zipfile.BadZipFile("it has no archive_format")
            if f"extra/{SCHEMA_FILE}" in paths:
                return _read_schema(archive, paths[f"extra/{SCHEMA_FILE}"])
    except ExportError:
        raise
    except DAMAGED as error:
        raise ExportError(
            f"the file is not a whole .pt2 archive: {error}.", hint="It may be truncated."
        ) from error
    raise _foreign(".pt2")


def _read_schema(archive: zipfile.ZipFile, name: str) -> str:
    size = archive.getinfo(name).file_size
    if size > _LARGEST_SCHEMA:
        raise ExportError(
            f"the schema has {size:,} bytes, more than {_LARGEST_SCHEMA:,}.",
            hint="The file is forged or damaged.",
        )
    return archive.read(name).decode()


def read_onnx_schema(file: BinaryIO) -> str:
    """Read the schema text out of the metadata of an ``.onnx`` file."""
    file.seek(0, os.SEEK_END)
    end = file.tell()
    file.seek(0)
    try:
        found = [
            text.decode()
            for number, start, size in _fields(file, end)
            if number == _METADATA_PROPS and size < _LARGEST_SCHEMA
            for name, text in [_pair(file, start, size)]
            if name == SCHEMA_PROPERTY.encode()
        ]
    except (EOFError, UnicodeDecodeError) as error:
        raise ExportError(
            f"the file is not a whole ONNX model: {error}.", hint="It may be truncated."
        ) from error
    if found:
        return found[0]
    raise _foreign(".onnx")


def _foreign(suffix: str) -> ExportError:
    return ExportError(
        f"the {suffix} file carries no kd-export schema.",
        hint="It was not written by kd-export: export the keyed module with `kd_export.export`.",
    )


def _pair(file: BinaryIO, start: int, size: int) -> tuple[bytes, bytes]:
    """Read a message of a name (field 1) and a text (field 2)."""
    file.seek(start)
    found = {}
    for number, begin, length in _fields(file, start + size):
        file.seek(begin)
        found[number] = file.read(length)
    return found.get(1, b""), found.get(2, b"")


def _fields(file: BinaryIO, end: int) -> Iterator[tuple[int, int, int]]:
    """Walk over the fields of a protobuf message: number, where its bytes start, how many.

    The wire format is the one of the Protocol Buffers encoding guide: a varint tag (number and
    type), then a varint, 8 bytes, 4 bytes, or a varint length and that many bytes.
    """
    while file.tell() < end:
        tag = _varint(file)
        kind, start = tag & 7, file.tell()
        if kind == _VARINT:
            _varint(file)
            size = file.tell() - start
        elif kind == _BYTES:
            size = _varint(file)
            start = file.tell()
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise EOFError(f"unknown wire type {kind}")
        if start + size > end:
            raise EOFError("a field reaches beyond the end")
        yield tag >> 3, start, size
        file.seek(start + size)


def _varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise EOFError("the file ends inside a number")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise EOFError("a number is too long")


def check_trust(data: bytes, path: Path, *, trusted: bool, sha256: str | None) -> None:
    """Demand that somebody vouches for a file that is about to be executed.

    The digest is taken over the very bytes that are loaded afterwards.
    """
    if sha256 is not None:
        digest = hashlib.sha256(data).hexdigest()
        if digest != sha256.lower():
            raise UntrustedArtifact(
                f"the SHA-256 of `{path.name}` is not the one given.",
                expected=sha256,
                got=digest,
                hint="The file was changed since its digest was taken.",
            )
    elif not trusted:
        raise UntrustedArtifact(
            f"opening `{path.name}` executes the program it holds.",
            expected="trusted=True or sha256=...",
            hint="Pass `trusted=True` if you know who made it, or `sha256=` with its digest.",
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside the target; move it there when the block succeeds.

    The target is replaced in one step after the bytes have reached the disk. When the block
    raises, the target is left as it was. The temporary file has the target's own name, in a folder
    of its own, because torch writes the name of the file into the archive.
    """
    with _folder_beside(path) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)


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
