"""Reading the zip archive that a ``.pt2`` file is, without executing anything it holds.

torch writes its archives without compression, so a file can be told from a bomb before it is
unpacked: what it holds cannot be larger than it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from kd_export._errors import ExportError, UntrustedArtifact

SCHEMA_FILE = "kd_export.json"
LARGEST_SCHEMA = 1 << 24
"""Bytes that the schema of a file may have."""

_LARGEST_DIRECTORY = 1 << 22
_CHUNK = 1 << 20
_END, _END64, _LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_END_SIZE, _LOCATOR_SIZE, _LONGEST_COMMENT = 22, 20, 1 << 16
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # an encrypted archive, one of a compression that is not known
)


@contextlib.contextmanager
def open_zip(file: BinaryIO) -> Iterator[zipfile.ZipFile]:
    """Open an archive whose entries are stored as they are.

    Raises:
        ExportError: It is not a whole archive, or its entries are compressed.
    """
    try:
        size = file.seek(0, os.SEEK_END)
        _check_directory(file, size)
        with zipfile.ZipFile(file) as archive:
            _check_stored(archive.infolist(), size)
            yield archive
    except _DAMAGED as error:
        if isinstance(error, ExportError):
            raise
        raise ExportError(
            f"the file is not a whole .pt2 archive: {error}.", hint="It may be truncated."
        ) from error


def _check_directory(file: BinaryIO, size: int) -> None:
    """Refuse an archive whose directory alone would fill the memory."""
    start = max(0, size - _END_SIZE - _LONGEST_COMMENT)
    file.seek(start)
    tail = file.read()
    end = tail.rfind(_END)
    if end < 0 or len(tail) < end + _END_SIZE:
        raise zipfile.BadZipFile("it has no directory")
    (length,) = struct.unpack_from("<I", tail, end + 12)
    if length == 0xFFFFFFFF:
        length = _length64(file, tail[max(0, end - _LOCATOR_SIZE) : end])
    if length > _LARGEST_DIRECTORY:
        raise ExportError(
            f"the directory of the archive has {length:,} bytes, more than {_LARGEST_DIRECTORY:,}.",
            hint="The file is forged or damaged.",
        )


def _length64(file: BinaryIO, locator: bytes) -> int:
    """Read the length of the directory of an archive of more than 4 GB."""
    if not locator.startswith(_LOCATOR64):
        raise zipfile.BadZipFile("it has no directory")
    (position,) = struct.unpack_from("<Q", locator, 8)
    file.seek(min(position, 1 << 62))
    record = file.read(56)
    if not record.startswith(_END64) or len(record) < 56:
        raise zipfile.BadZipFile("it has no directory")
    (length,) = struct.unpack_from("<Q", record, 40)
    return int(length)


def _check_stored(infos: list[zipfile.ZipInfo], size: int) -> None:
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ExportError(
                f"`{info.filename[:200]}` in the archive is compressed.",
                hint="kd-export stores without compression: the file is forged or was repacked.",
            )
    whole = sum(info.file_size for info in infos)
    if whole > size:
        raise ExportError(
            f"the archive of {size:,} bytes unpacks to {whole:,}.",
            hint="The file is forged or damaged.",
        )


FORMAT_FILES = (
    r"archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id"
    r"|\.format_version|\.storage_alignment|extra/[^/]+"
)
"""A pattern of what every archive of torch may hold, whatever it is an archive of."""


def members(archive: zipfile.ZipFile, known: re.Pattern[str]) -> dict[str, zipfile.ZipInfo]:
    """List the files of an archive by their path in its one folder.

    Args:
        archive: The archive.
        known: A pattern of the paths that it may hold.

    Raises:
        UntrustedArtifact: It holds another file, or one twice, or has several folders.
    """
    files: dict[str, zipfile.ZipInfo] = {}
    folders = set()
    for info in archive.infolist():
        folder, _, name = info.filename.partition("/")
        folders.add(folder)
        if folder in ("", ".", "..") or not known.fullmatch(name):
            raise unknown_member(info.filename)
        if name in files or len(folders) > 1:
            raise UntrustedArtifact(
                "the archive holds several programs, or a file twice.",
                got=tuple(sorted(folders)),
                hint="The file is forged or damaged: do not use it.",
            )
        files[name] = info
    return files


def copy_member(
    source: zipfile.ZipFile, info: zipfile.ZipInfo, target: zipfile.ZipFile, name: str
) -> None:
    """Copy a file of one archive into another, in parts of bounded size."""
    with source.open(info) as content, target.open(name, "w", force_zip64=True) as copy:
        shutil.copyfileobj(content, copy, _CHUNK)


def unknown_member(name: str) -> UntrustedArtifact:
    """Build the error of a file in an archive that kd_export does not write there."""
    return UntrustedArtifact(
        f"`{name[:200]}` is not part of an exported program.",
        got=name[:1000],
        hint="The file is forged, of another format, or pickled: do not use it. Ask for a file "
        "that `kd_export.save` wrote.",
    )


def read_zip_schema(file: BinaryIO) -> str | None:
    """Read the schema text out of a ``.pt2`` file; ``None`` if it has none."""
    with open_zip(file) as archive:
        paths = {name.split("/", 1)[-1]: name for name in archive.namelist()}
        if "archive_format" not in paths:
            # What is left of a cut file may end with the directory of an archive inside it.
            raise zipfile.BadZipFile("it has no archive_format")
        if f"extra/{SCHEMA_FILE}" not in paths:
            return None
        info = archive.getinfo(paths[f"extra/{SCHEMA_FILE}"])
        check_schema_size(info.file_size)
        return archive.read(info).decode()


def check_schema_size(size: int) -> None:
    """Refuse a schema that is too large to be read."""
    if size > LARGEST_SCHEMA:
        raise ExportError(
            f"the schema has {size:,} bytes, more than {LARGEST_SCHEMA:,}.",
            hint="The file is forged or damaged, or its metadata is too large.",
        )


def foreign(suffix: str) -> ExportError:
    """Build the error of a file that kd_export did not write."""
    return ExportError(
        f"the {suffix} file carries no kd-export schema.",
        hint="It was not written by kd-export: export the keyed module with `kd_export.export`.",
    )
