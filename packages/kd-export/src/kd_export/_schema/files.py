"""Files on disk: regular ones, one written in one step, weights beside a model, zip archives.

The one file of weights that may stand beside a model must be a regular file and not a link, which
could lead to any file of the reader, and each tensor must be a part of it of the tensor's own
length. A ``.pt2`` file is a zip archive without compression, as torch writes it, so a file can be
told from a bomb before it is unpacked: what it holds cannot be larger than it is. Nothing that a
file holds is executed.
"""

from __future__ import annotations

import contextlib
import errno
import keyword
import math
import mmap
import os
import re
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from kd_export._errors import ExportError, Key, KeyMismatch, UntrustedArtifact, brief, nearest

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

    Raises:
        ExportError: The target cannot be written, or is new, and one of the others would replace
            a file that is there.
    """
    with _folder_beside(path) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        others = [file for file in Path(folder).iterdir() if file != temporary]
        for written in others:
            taken = path.with_name(written.name)
            if not path.exists() and taken.exists() and not taken.name.startswith(path.name):
                raise ExportError(
                    f"`{path.name}` is written with `{taken.name}`, and there is another file of "
                    f"that name: `{taken}`.",
                    got=str(taken),
                    hint="Give another name or folder, or remove that file.",
                )
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


def mapped(path: Path) -> memoryview:
    """Map a file beside a model, as long as something reads it; one that is not there is empty.

    Raises:
        UntrustedArtifact: It is a link.
        ExportError: It is not a regular file, or it cannot be read.
    """
    if not os.path.lexists(path):
        return memoryview(b"")
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise _link(path)
    with open_regular(path) as file:
        if not os.path.samestat(status, os.fstat(file.fileno())):
            raise _link(path)  # put there in between
        return contents(file)


def contents(file: BinaryIO) -> memoryview:
    """Map the bytes of an open file, as long as something reads them."""
    if not os.fstat(file.fileno()).st_size:
        return memoryview(b"")
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _link(path: Path) -> UntrustedArtifact:
    return UntrustedArtifact(
        f"`{path.name}` beside the model is a link.",
        expected="a regular file",
        got=str(path),
        hint="Put the file itself there.",
    )


def check_extent(needed: int, offset: int, stated: int, name: str, size: int) -> None:
    """Refuse a tensor whose data is not a part of the file, or not of the tensor's own length.

    Args:
        needed: The bytes that its shape and dtype need.
        offset: Where the model says that they start.
        stated: How many bytes the model says that they are.
        name: The file.
        size: How many bytes the file has.

    Raises:
        UntrustedArtifact: The numbers do not fit.
    """
    if stated != needed or offset + needed > size:
        raise UntrustedArtifact(
            f"a tensor of {needed:,} bytes has {stated:,} bytes at {offset:,} of "
            f"`{name}`, which has {size:,}.",
            expected=needed,
            got=stated,
            hint="The file beside the model is missing or cut, or the model is forged.",
        )


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


WRITTEN_BY_TORCH = "`torch.save` writes weights or a pickled module."
EXPORT_IT = 'Load them into the module, and export it: `kd_export.save(module, "m.pt2", example)`.'

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
            if "data.pkl" in paths:
                raise ExportError(f"the file is not a program. {WRITTEN_BY_TORCH}", hint=EXPORT_IT)
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


# Keys and values as a file holds them: flat names for nested keys, and checked values of JSON.
#
# A *wire name* joins the parts of a key with dots: ``("out", "image")`` is ``out.image``. It is
# reversible and free of collisions, because dots (and percent signs) inside a part are escaped as
# in a URL. An *argument name* is what the same key is called as a Python argument: it need not be
# reversible, but it must be unique among its siblings.
#
# JSON may hold anything: a function ``as_...`` returns what a value must be, or raises `TypeError`
# or `ValueError` with a message that stays short whatever the value is. What a user passes to be
# stored must be such that JSON holds it exactly.
#
# Nothing here imports torch: the functions serve files that are read without it.

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Number = bool | int | float

_DTYPES = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32
complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
_LARGEST_SIZE = 1 << 62
_LARGEST_NUMBER = 1 << 64


def as_number(item: Json) -> Number:
    if isinstance(item, str):
        return float(item)
    if isinstance(item, float) or (isinstance(item, int) and abs(item) < _LARGEST_NUMBER):
        return item
    raise TypeError(f"expected a number, got {brief(item)}")


def as_finite(item: Json) -> Number:
    number = as_number(item)
    if math.isfinite(number):
        return number
    raise ValueError(f"expected a finite number, got {number}")


def as_size(item: Json) -> int:
    size = as_int(item)
    if 0 <= size <= _LARGEST_SIZE:
        return size
    raise ValueError(f"expected a size, got {size}")


def as_int(item: Json) -> int:
    if type(item) is int:
        return item
    raise TypeError(f"expected an integer, got {brief(item)}")


def as_str(item: Json) -> str:
    if isinstance(item, str):
        return item
    raise TypeError(f"expected a string, got {brief(item)}")


def as_dtype(item: Json) -> str:
    name = as_str(item)
    if name in _DTYPES.split():
        return name
    raise ValueError(f"expected a dtype, got {brief(name)}")


def as_list(item: Json) -> list[Json]:
    if isinstance(item, list):
        return item
    raise TypeError(f"expected a list, got {brief(item)}")


def as_dict(item: Json) -> dict[str, Json]:
    if isinstance(item, dict):
        return item
    raise TypeError(f"expected an object, got {brief(item)}")


def check_mapping(
    name: str, value: object, form: str, kind: type[ExportError] = ExportError
) -> None:
    """Check that an argument is a mapping, if it is given.

    Args:
        name: The argument.
        value: What was passed for it.
        form: An example of what may be.
        kind: What to raise.

    Raises:
        ExportError: It is not.
    """
    if value is not None and not isinstance(value, Mapping):
        raise kind(
            f"expected a dict for `{name}`, got {value!r}.",
            expected="a dict",
            got=value,
            hint=f"Pass one, such as `{name}={form}`.",
        )


def check_metadata(value: Mapping[str, object] | None) -> dict[str, Json]:
    """Check that metadata is a mapping of exact JSON.

    Raises:
        ExportError: It is not.
    """
    check_mapping("metadata", value, "{'note': ...}")
    stored = check_json(dict(value or {}))
    assert isinstance(stored, dict)
    return stored


def check_json(value: object, where: str = "metadata") -> Json:
    """Check that a value is exact JSON: no NaN, no tuples, no objects, string keys only."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return [check_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: check_json(item, f"{where}[{name!r}]") for name, item in value.items()}
    raise ExportError(
        f"`{where}` is {value!r}, which JSON cannot hold exactly.",
        got=value,
        hint="Use None, bool, int, finite float, str, lists of these, or dicts with string keys.",
    )


_EMPTY = "%"


def wire_name(key: Key) -> str:
    """Return the flat name of a nested key.

    >>> wire_name(("out", "image"))
    'out.image'
    >>> wire_name(("v1.2", "100%"))
    'v1%2E2.100%25'
    """
    return ".".join(
        part.replace("%", "%25").replace(".", "%2E") if part else _EMPTY for part in key
    )


def wire_key(name: str) -> Key:
    """Return the nested key that a flat name stands for.

    >>> wire_key("out.image")
    ('out', 'image')
    >>> wire_key("v1%2E2.100%25")
    ('v1.2', '100%')
    """
    return tuple(
        "" if part == _EMPTY else part.replace("%2E", ".").replace("%25", "%")
        for part in name.split(".")
    )


def as_key(key: object) -> Key:
    """Convert a key, a string or (nested) tuples of strings, to one flat tuple.

    >>> as_key("a"), as_key(("a", ("b", "c")))
    (('a',), ('a', 'b', 'c'))
    """
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and key:
        return tuple(part for item in key for part in as_key(item))
    raise KeyMismatch(
        f"a key must be a string or a tuple of strings, got {key!r}.", expected="key", got=key
    )


def argument_names(keys: Iterable[Key]) -> dict[Key, str]:
    """Name keys as Python arguments, each differently.

    >>> argument_names([("some", "key"), ("class",), ("some_key",)])
    {('some', 'key'): 'some_key', ('class',): 'class_', ('some_key',): 'some_key_1'}
    """
    names: dict[Key, str] = {}
    for key in keys:
        name = re.sub(r"\W", "_", "_".join(key), flags=re.ASCII)
        if not name or name[0].isdigit():
            name = f"_{name}"
        if keyword.iskeyword(name) or name == "self":
            name = f"{name}_"
        names[key] = unused_name(name, names.values())
    return names


def identifier(text: str) -> str:
    """Return an identifier of C.

    >>> identifier("next.h"), identifier("2d")
    ('next_h', '_2d')
    """
    word = re.sub(r"\W", "_", text, flags=re.ASCII) or "_"
    return f"_{word}" if word[0].isdigit() else word


def unused_name(name: str, taken: Iterable[str]) -> str:
    """Append a number to a name that is taken.

    >>> unused_name("x", ["x", "x_1"])
    'x_2'
    """
    used = set(taken)
    candidate, count = name, 0
    while candidate in used:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def nest(entries: Mapping[Key, object]) -> dict[str, object]:
    """Build nested dictionaries from entries by key.

    >>> nest({("a", "b"): 1, ("c",): 2})
    {'a': {'b': 1}, 'c': 2}
    """
    tree: dict[str, object] = {}
    for key, value in entries.items():
        node = tree
        for part in key[:-1]:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise KeyMismatch(
                    f"`{wire_name(key)}` lies below an entry that is itself a value.", key=key
                )
            node = child
        node[key[-1]] = value
    return tree


def unnest(tree: Mapping[str, object], prefix: Key = ()) -> dict[Key, object]:
    """List the entries of nested dictionaries by key, the reverse of `nest`.

    >>> unnest({"a": {"b": 1}, "c": 2})
    {('a', 'b'): 1, ('c',): 2}
    """
    entries: dict[Key, object] = {}
    for part, value in tree.items():
        if isinstance(value, Mapping):
            entries.update(unnest(value, (*prefix, part)))
        else:
            entries[(*prefix, part)] = value
    return entries
