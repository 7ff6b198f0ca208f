"""Directories that the package tensordict wrote with `memmap`: read where they are, never written.

A folder is a container, with a `meta.json` that names its entries; a leaf is a file of bytes, data
that is not a tensor a folder. Classes are found among those that the program has defined, as for a
store. Pickles are refused.
"""

from __future__ import annotations

import math
import mmap
import os
from errno import EACCES, EPERM, EROFS
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._descriptor import describe, device_of
from kd_core._errors import FormatError, KdError
from kd_core._leaves.loops import strided_view
from kd_core._protocol import AbstractContainer
from kd_core._shapes import checked_names, with_names
from kd_core._store import files
from kd_core._store.codec import check_rows, instance_of
from kd_core._store.commit import MANIFEST, META
from kd_core._store.manifest import BY_FULL_NAME, MOST_BYTES, parsed
from kd_core._store.mapped_tensor import DTYPES, WIRE, record
from kd_core._validation import MAX_DEPTH, values_of_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry, Node

Meta = dict[str, object]

LEAF: Final = ".memmap"
INSIDE: Final = "_tensordict"
"""The folder with the entries of a tensor class."""

_RESERVED: Final = frozenset({"shape", "device", "_type"})
"""Keys whose leaves `meta.json` does not name, because it says something else there."""

_DATA: Final = frozenset({"NonTensorData", "MetaData", "NonTensorStack"})


def is_foreign(path: Path) -> bool:
    """Return whether a path is a directory of tensordict, and not a store."""
    if not (path / META).is_file() or (path / MANIFEST).exists():
        return False
    try:
        with files.opened_folder(path) as folder:
            return bool(_meta(folder, str(path)))
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
    try:
        try:
            return _Reader(path, shared).container()
        except OSError as error:
            if not shared or error.errno not in (EACCES, EPERM, EROFS):
                raise
        return _Reader(path, False).container()
    except FormatError:
        raise
    except KdError as error:
        raise FormatError(f"`{path}` is not valid: {error}") from error
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
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
            return _as_container(self._node(folder, (), _meta(folder, str(self._path)), None))

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
        entries = cast("dict[str, Entry]", dict(td._kd_entries))
        return instance_of(known_as, BY_FULL_NAME, entries, td._kd_desc)

    def _below(self, folder: int, above: tuple[str, ...], name: str, known_as: str | None) -> Node:
        inside = (*above, name)
        with files.opened_folder(name, folder) as inner:
            return self._node(inner, inside, _meta(inner, self._where(inside)), known_as)

    def _stack(
        self,
        folder: int,
        above: tuple[str, ...],
        members: list[str],
        meta: Meta,
        known_as: str | None,
    ) -> Node:
        built = [self._below(folder, above, name, known_as) for name in members]
        stack = _as_container(registry.lazy_stack(built, meta.get("stack_dim")))
        name, dim = meta.get("stack_dim_name"), meta.get("stack_dim")
        if isinstance(name, str) and isinstance(dim, int):
            batch = stack._kd_desc.batch
            named = with_names(batch[dim : dim + 1], (name,))
            stack._kd_describe(stack._kd_desc.with_batch((*batch[:dim], *named, *batch[dim + 1 :])))
        return stack

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
            batch = with_names(batch, checked_names(cast("list[str]", meta["_names"]), batch))
        desc = describe(batch, device_of("cpu"))
        # Since version 1 names of files are written as in addresses: `a/b` is `a%2Fb`.
        places = {unquote(name) if "_format_version" in meta else name: name for name in names}
        lost = [key for key in _RESERVED if f"{key}{LEAF}" in places]
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
                inside = (*above, _listed(places, key, where))
                with files.opened_folder(inside[-1], folder) as inner:
                    entries[key] = self._entry(inner, inside, desc)
            else:
                entries[key] = self._leaf(folder, above, places, key, value)
        # Shapes are checked against the batch size as those of any mapping are.
        return _as_container(registry.nest_mapping(entries, desc, ()))

    def _entry(self, folder: int, above: tuple[str, ...], desc: Descriptor) -> Node:
        where = self._where(above)
        meta = _meta(folder, where)
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
        self, folder: int, above: tuple[str, ...], places: Mapping[str, str], key: str, meta: Meta
    ) -> Tensor:
        where = self._where(above)
        dtype = DTYPES.get(str(meta.get("dtype")).removeprefix("torch."))
        if dtype is None:
            raise FormatError(f"`{where}` has an entry `{key}` of `{meta}`, which cannot be read.")
        if not meta.get("is_nested"):
            shape = _sizes(meta.get("shape"), where)
            return self._mapped(folder, above, places, key, dtype, shape)
        sizes_key, sizes_shape = f"{key}.shape", _sizes(meta.get("shape"), where)
        sizes = self._mapped(folder, above, places, sizes_key, torch.int64, sizes_shape)
        count = sum(math.prod(row) for row in sizes.tolist())
        values = self._mapped(folder, above, places, key, dtype, (count,))
        check_rows(values, sizes)
        return strided_view(values, sizes)

    def _mapped(
        self,
        folder: int,
        above: tuple[str, ...],
        places: Mapping[str, str],
        key: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> Tensor:
        size = math.prod(shape) * WIRE[dtype].itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        name = _listed(places, f"{key}{LEAF}", self._where(above))
        with files.opened(name, folder, writable=self._shared) as file:
            if file.size != size:
                raise FormatError(
                    f"`{self._where((*above, name))}` must have {size} bytes, got {file.size}."
                )
            access = mmap.ACCESS_WRITE if self._shared else mmap.ACCESS_COPY
            memory = mmap.mmap(file.descriptor, size, access=access)
        if self._shared:
            record(memory, self._root, str(PurePath(*above, name)))
        return torch.frombuffer(memory, dtype=dtype).view(shape)


def _listed(places: Mapping[str, str], key: str, where: str) -> str:
    """Return the name of the file or folder of a key, which is one of those in the folder."""
    if key not in places:
        raise FormatError(f"`{where}/{META}` names {key!r}, which is not there.")
    return places[key]


def _as_container(node: object) -> AbstractContainer:
    if not isinstance(node, AbstractContainer):
        raise FormatError("expected a container, got data that is not a tensor.")
    return node


def _meta(folder: int, where: str) -> Meta:
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
