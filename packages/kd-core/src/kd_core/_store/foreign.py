"""What the package tensordict wrote with `memmap` and `consolidate`: how it is read.

In a directory of `memmap` a folder is a container, with a `meta.json` that names its entries; a
leaf is a file of bytes, data that is not a tensor a folder. An archive is a zip file of that. A
file of `consolidate` has all bytes in front and describes them in JSON behind. Classes are found
among those that the program has defined, as for a store. Pickles are refused.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import EACCES, EPERM, EROFS
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._descriptor import describe, device_of
from kd_core._errors import FormatError, KdError
from kd_core._leaves.arrays import values_of_rows
from kd_core._leaves.loops import strided_view
from kd_core._protocol import AbstractContainer
from kd_core._shapes import checked_names, with_names
from kd_core._store import files
from kd_core._store.codec import check_rows, end_of, instance_of, name_stacked
from kd_core._store.commit import MANIFEST, META
from kd_core._store.manifest import BY_FULL_NAME, MOST_BYTES, parsed
from kd_core._store.mapped_tensor import DTYPES, WIRE, record, record_root
from kd_core._validation import MAX_DEPTH

if TYPE_CHECKING:
    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry, Node

Meta = dict[str, object]

LEAF: Final = ".memmap"
SIZES: Final = ".shape"
"""What the name of a file has behind the key whose nested rows it describes."""
INSIDE: Final = "_tensordict"
"""The folder with the entries of a tensor class."""

_RESERVED: Final = frozenset({"shape", "device", "_type"})
"""Keys whose leaves `meta.json` does not name, because it says something else there."""

_ESCAPED: Final = re.compile(r'[\x00-\x20\x7f"%*/:<>?\\|]')

_DATA: Final = frozenset({"NonTensorData", "MetaData", "NonTensorStack"})


def is_foreign(path: Path) -> bool:
    """Return whether a path is a directory of tensordict, and not a store."""
    if not (path / META).is_file() or (path / MANIFEST).exists():
        return False
    try:
        with files.opened_folder(path) as folder:
            return bool(meta_in(folder, str(path)))
    except FormatError:  # a `meta.json` of something else
        return False


def load(path: Path, *, shared: bool = False) -> AbstractContainer:
    """Return the container in a directory of tensordict, not locked, on the CPU.

    Args:
        path: the directory.
        shared: whether writes to tensors go to their files, where this process may write to them;
            else they stay in this process.

    Raises:
        FormatError: if it is not such a directory, or holds what cannot be read without a pickle.
    """
    with _reported(path):
        if shared:
            try:
                made = _Reader(path, True).container()
                record_root(made, os.path.realpath(path))
                return made
            except OSError as error:
                if error.errno not in (EACCES, EPERM, EROFS):
                    raise
        return _Reader(path, False).container()


def is_foreign_file(path: Path) -> bool:
    """Return whether a path is a file that tensordict wrote."""
    with files.opened(path, None) as file:
        if files.read(file, 0, len(_ZIP)) == _ZIP:
            try:
                with ZipFile(path) as archive:
                    return META in archive.namelist()
            except _INVALID:
                return False
        return files.read(file, max(0, file.size - 9), 1) == b"}" and _size_of_tree(file) > 0


def load_file(path: Path) -> AbstractContainer:
    """Return the container in a file of tensordict, on the CPU; writes stay in this process.

    Raises:
        FormatError: if it is not such a file, or holds what cannot be read without a pickle.
    """
    with _reported(path), files.opened(path, None) as file:
        if files.read(file, 0, len(_ZIP)) == _ZIP:
            folder = files.make_temporary_folder()
            try:
                with ZipFile(path) as archive:
                    archive.extractall(folder)
                return _Reader(folder, False).container()
            finally:
                files.remove_folder(folder, os.getpid())  # tensors stay mapped
        size = _size_of_tree(file)
        tree = parsed(files.read(file, file.size - 8 - size, size), f"the end of `{path}`", "utf-8")
        octets = torch.empty(0, dtype=torch.uint8)
        if file.size > size + 8:
            memory = mmap.mmap(file.descriptor, file.size, access=mmap.ACCESS_COPY)
            octets = torch.frombuffer(memory, dtype=torch.uint8)[: file.size - 8 - size]
        return _as_container(_Consolidated(octets).node(_tree(tree), describe(()), 0))


_ZIP: Final = b"PK\x03\x04"


def _size_of_tree(file: files.OpenFile) -> int:
    """Return how many bytes describe the tensors of a file of `consolidate`; 0: it is none."""
    size = int.from_bytes(files.read(file, max(0, file.size - 8), 8), "little")
    return size if file.size >= 10 and 2 <= size <= min(file.size - 8, MOST_BYTES) else 0


_INVALID: Final = (
    RuntimeError, TypeError, ValueError, LookupError, OverflowError, EOFError,
    BadZipFile, struct.error, zlib.error,
)  # fmt: skip


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Raise each error of the block as a `FormatError`."""
    try:
        yield
    except FormatError:
        raise
    except KdError as error:
        raise FormatError(f"`{path}` is not valid: {error}") from error
    except _INVALID as error:
        reason = str(error).partition("\n")[0]
        raise FormatError(f"`{path}` is not valid: {reason}") from error


class _Reader:
    """Reads one directory and those below it.

    Args:
        path: the directory.
        shared: whether writes go to the files.
    """

    def __init__(self, path: Path, shared: bool) -> None:
        self._root = os.path.realpath(path)
        self._path = path
        self._shared = shared

    def container(self) -> AbstractContainer:
        with files.opened_folder(self._path) as folder:
            return _as_container(self._node(folder, (), meta_in(folder, str(self._path)), None))

    def _where(self, above: tuple[str, ...]) -> str:
        return str(self._path.joinpath(*above))

    def _node(self, folder: int, above: tuple[str, ...], meta: Meta, known_as: str | None) -> Node:
        """Return the container of an open folder.

        Args:
            folder: the folder.
            above: the folders from the root to it.
            meta: what its `meta.json` says.
            known_as: the class of which it has the entries; `None`: `meta` says which.
        """
        where = self._where(above)
        if len(above) > 2 * MAX_DEPTH:  # a tensor class has two folders
            raise FormatError(f"`{where}` is nested more than {MAX_DEPTH} levels deep.")
        kind = _type_of(meta)
        names = files.names_in(folder)
        if kind.endswith(".LazyStackedTensorDict"):
            members = [name for name in names if name.isdecimal()]
            return self._stack(folder, above, sorted(members, key=int), meta, known_as)
        if INSIDE in names and "shape" not in meta:
            return self._below(folder, above, INSIDE, kind)
        td = self._level(folder, above, names, meta)
        if known_as is None and not kind.startswith("tensordict."):
            known_as = kind
        if known_as is None:
            return td
        entries = dict(td._kd_entries)
        return instance_of(known_as, BY_FULL_NAME, entries, td._kd_desc)

    def _below(self, folder: int, above: tuple[str, ...], name: str, known_as: str | None) -> Node:
        inside = (*above, name)
        with files.opened_folder(name, folder) as inner:
            return self._node(inner, inside, meta_in(inner, self._where(inside)), known_as)

    def _stack(
        self,
        folder: int,
        above: tuple[str, ...],
        members: list[str],
        meta: Meta,
        known_as: str | None,
    ) -> Node:
        built = [self._below(folder, above, name, known_as) for name in members]
        return _stacked(built, meta)

    def _level(
        self, folder: int, above: tuple[str, ...], names: list[str], meta: Meta
    ) -> AbstractContainer:
        where = self._where(above)
        if not isinstance(meta.get("shape"), list):
            raise FormatError(
                f"`{where}` is a `{_type_of(meta)}`, which only tensordict can read. Load it "
                "there, and convert it with `kd_core.convert.from_tensordict_library`."
            )
        batch = _sizes(meta["shape"], where)
        if isinstance(meta.get("_names"), list):
            batch = with_names(batch, checked_names(_list(meta["_names"]), batch))
        desc = describe(batch, device_of("cpu"))
        named = name_of if "_format_version" in meta else str
        lost = [key for key in _RESERVED if f"{key}{LEAF}" in names]
        if lost:
            raise FormatError(
                f"`{where}` has `{min(lost)}{LEAF}`, but its `{META}` does not name its dtype and "
                "shape. Save the entry under another key with tensordict."
            )
        entries: dict[str, Entry] = {}
        for key, value in meta.items():
            if not isinstance(value, dict):
                continue
            if "type" in value:
                inside = (*above, _listed(names, named(key), where))
                with files.opened_folder(inside[-1], folder) as inner:
                    entries[key] = self._entry(inner, inside, desc)
            else:
                entries[key] = self._leaf(folder, above, names, named(key), value)
        # Shapes are checked against the batch size as those of any mapping are.
        return _as_container(registry.nest_mapping(entries, desc, ()))

    def _entry(self, folder: int, above: tuple[str, ...], desc: Descriptor) -> Node:
        where = self._where(above)
        meta = meta_in(folder, where)
        kind = _type_of(meta).rpartition(".")[2]
        if kind not in _DATA:
            return self._node(folder, above, meta, None)
        if "data" not in meta:
            raise FormatError(
                f"`{where}` holds a pickle, which is not read. Load it with tensordict, and "
                "convert it with `kd_core.convert.from_tensordict_library`."
            )
        if kind == "NonTensorStack":
            rows = values_of_rows(meta["data"], desc.batch, f"`{where}`")
            return registry.wrap_rows(rows, None, desc)
        state = (True, desc.ndim > 0) if kind == "MetaData" else None
        return registry.wrap_data(meta["data"], desc, state)

    def _leaf(
        self, folder: int, above: tuple[str, ...], names: list[str], name: str, meta: Meta
    ) -> Tensor:
        where = self._where(above)
        dtype = DTYPES.get(str(meta.get("dtype")).removeprefix("torch."))
        if dtype is None:
            raise FormatError(f"`{where}` has an entry `{name}` of `{meta}`, which cannot be read.")
        if not meta.get("is_nested"):
            shape = _sizes(meta.get("shape"), where)
            return self._mapped(folder, above, names, name, dtype, shape)
        sizes_shape = _sizes(meta.get("shape"), where)
        sizes = self._mapped(folder, above, names, f"{name}{SIZES}", torch.int64, sizes_shape)
        count = sum(math.prod(row) for row in sizes.tolist())
        values = self._mapped(folder, above, names, name, dtype, (count,))
        check_rows(values, sizes)
        return strided_view(values, sizes)

    def _mapped(
        self,
        folder: int,
        above: tuple[str, ...],
        names: list[str],
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> Tensor:
        size = math.prod(shape) * WIRE[dtype].itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        name = _listed(names, f"{name}{LEAF}", self._where(above))
        with files.opened(name, folder, writable=self._shared) as file:
            if file.size < size:  # more are rows that a storage has had
                raise FormatError(
                    f"`{self._where((*above, name))}` must have {size} bytes, got {file.size}."
                )
            access = mmap.ACCESS_WRITE if self._shared else mmap.ACCESS_COPY
            memory = mmap.mmap(file.descriptor, size, access=access)
        if self._shared:
            record(memory, self._root, str(PurePath(*above, name)))
        return torch.frombuffer(memory, dtype=dtype).view(shape)


class _Consolidated:
    """Builds containers from the tree of a file of `consolidate`.

    Args:
        octets: the bytes of all tensors.
    """

    def __init__(self, octets: Tensor) -> None:
        self._octets = octets

    def node(self, tree: Meta, above: Descriptor, depth: int) -> Node:
        """Return the container of a level, or the rows of an entry that are not tensors."""
        if depth > MAX_DEPTH:
            raise FormatError(f"the file is nested more than {MAX_DEPTH} levels deep.")
        kind, about = str(tree["cls"]), _tree(tree["cls_metadata"])
        inner = {
            key: _tree(value)
            for key, value in tree.items()
            if isinstance(value, dict) and key not in _PARTS
        }
        data = {key: _list(row)[0] for key, row in _tree(tree["non_tensors"]).items()}
        if kind == "NonTensorStack":
            rows = values_of_rows(_rows(tree), above.batch, "an entry")
            return registry.wrap_rows(rows, None, above)
        if kind == "LazyStackedTensorDict":
            members = [self.node(inner[key], above, depth + 1) for key in sorted(inner, key=int)]
            made = _stacked(members, about)
        else:
            batch = _sizes(about["batch_size"], "the file")
            if about.get("names"):
                batch = with_names(batch, checked_names(_list(about["names"]), batch))
            place = None if about["device"] is None else device_of("cpu")
            desc = describe(batch, place)
            leaves: Mapping[str, Entry] = self._leaves(_tree(tree["leaves"]))
            nested = {key: self.node(value, desc, depth + 1) for key, value in inner.items()}
            values = {key: registry.wrap_data(value, desc) for key, value in data.items()}
            entries = {**leaves, **values, **nested}
            made = _as_container(registry.nest_mapping(entries, desc, ()))
            if kind.startswith("<class '"):
                found = dict(made._kd_entries)
                name = _type_of({"_type": kind})
                made = instance_of(name, BY_FULL_NAME, found, made._kd_desc)
        return made._kd_engine.lock_(made) if about.get("is_locked") and not depth else made

    def _leaves(self, rows: Meta) -> dict[str, Tensor]:
        made = {key: self._leaf(*_list(row)[:4]) for key, row in rows.items()}
        for key in [key for key in made if key.startswith(_VALUES)]:
            name = key.removeprefix(_VALUES)
            values, offsets = made.pop(key), made.pop(f"{_OFFSETS}{name}")
            lengths = made.pop(f"{_LENGTHS}{name}", None)
            if end_of(offsets, lengths) > len(values):
                raise FormatError(f"entry `{name}` has fewer values than its rows.")
            made[name] = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
        return made

    def _leaf(self, dtype: object, shape: object, start: object, stop: object) -> Tensor:
        kind = DTYPES.get(str(dtype).removeprefix("torch."))
        if kind is None or not isinstance(start, int) or not isinstance(stop, int):
            raise FormatError(f"a leaf of `{dtype}` cannot be read.")
        sizes = _sizes(shape, "the file")
        end = start + math.prod(sizes) * WIRE[kind].itemsize
        if not 0 <= start <= end <= min(stop, len(self._octets)):
            raise FormatError(f"a leaf of shape {sizes} needs the bytes {start} to {end}.")
        return self._octets[start:end].view(kind).view(sizes)


_PARTS: Final = frozenset({"leaves", "non_tensors", "cls_metadata"})
_VALUES: Final = "<NJT_VALUES>"
_OFFSETS: Final = "<NJT_OFFSETS>"
_LENGTHS: Final = "<NJT_LENGTHS>"


def _stacked(members: list[Node], about: Meta) -> AbstractContainer:
    """Return the lazy stack of members, with the dimension and the name that a file gives it."""
    dim, name = about.get("stack_dim"), about.get("stack_dim_name")
    if type(dim) is not int or not (name is None or isinstance(name, str)):
        raise FormatError(f"{dim!r} and {name!r} are not a stacked dimension and its name.")
    return name_stacked(_as_container(registry.lazy_stack(members, dim)), dim, name)


def _rows(tree: Meta) -> list[object]:
    """Return the values of the rows of a level, as nested lists."""
    found = {key: _list(row)[0] for key, row in _tree(tree["non_tensors"]).items()}
    found |= {key: _rows(_tree(tree[key])) for key in tree if key.isdecimal()}
    return [found[key] for key in sorted(found, key=int)]


def _tree(value: object) -> Meta:
    if not isinstance(value, dict):
        raise FormatError(f"expected an object of JSON, got `{value!r}`."[:200])
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise FormatError(f"expected a list of JSON, got `{value!r}`."[:200])
    return value


def _listed(names: list[str], name: str, where: str) -> str:
    """Return the name of a file or folder, which is one of those that there are."""
    if name not in names:
        raise FormatError(f"`{where}/{META}` names {name!r}, which does not exist.")
    return name


def name_of(key: str) -> str:
    """Return the name of the folder of a key, and of its file without `.memmap`.

    Since version 1 what a system may not take is written as in addresses: `a/b` is `a%2Fb`.
    """
    if not key.strip("."):
        return "%2E" * len(key) or "%"
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", key)


def _as_container(node: object) -> AbstractContainer:
    if not isinstance(node, AbstractContainer):
        raise FormatError("expected a container, got data that is not a tensor.")
    return node


def meta_in(folder: int, where: str) -> Meta:
    """Return what describes an open directory.

    Raises:
        FormatError: if it is not one of tensordict.
    """
    with files.opened(META, folder) as file:
        data = files.read(file, 0, min(file.size, MOST_BYTES))
    meta = parsed(data, f"`{where}/{META}`", "utf-8")
    if not isinstance(meta, dict) or "_type" not in meta:
        raise FormatError(f"`{where}/{META}` is not one of tensordict. Check the path.")
    return meta


def _type_of(meta: Meta) -> str:
    """Return the full name of a class, from text such as `<class 'tensordict._td.TensorDict'>`."""
    return str(meta["_type"]).removeprefix("<class '").removesuffix("'>")


def _sizes(value: object, where: str) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value):
        return tuple(value)
    raise FormatError(f"`{where}` has a shape {value!r}, which is not valid.")
