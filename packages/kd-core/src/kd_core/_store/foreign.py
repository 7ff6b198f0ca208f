"""Directories that the package tensordict wrote with `memmap`: read once, to be saved anew.

A folder is a container, with a `meta.json` that names its entries; a leaf is a file of bytes, data
that is not a tensor a folder. Pickles in it are refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._errors import FormatError, KdError, with_article
from kd_core._nodes import registry
from kd_core._protocol.validation import MAX_DEPTH, values_of_rows
from kd_core._store import files
from kd_core._store.canonical import parsed
from kd_core._store.dtypes import DTYPES, WIRE
from kd_core._store.manifest import MOST_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from kd_core._batch.descriptor import Descriptor
    from kd_core._nodes.entry import Entry, Node

Meta = dict[str, object]

META: Final = "meta.json"


def read_directory(path: Path) -> Node:
    """Return the container in a directory of tensordict, in memory.

    Raises:
        FormatError: if it is not such a directory, or holds what cannot be read without a pickle.
    """
    try:
        with files.opened_folder(path) as folder:
            return _container(folder, str(path), 0)
    except KdError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"`{path}` is not valid: {error}") from error


def _container(folder: int, where: str, depth: int) -> Node:
    meta = _meta(folder, where)
    kind = _kind(meta)
    if depth > MAX_DEPTH:
        raise FormatError(f"`{where}` is nested more than {MAX_DEPTH} levels deep.")
    if kind == "LazyStackedTensorDict":
        names = [name for name in files.names_in(folder) if name != META]
        members = [
            _below(folder, name, where, depth)
            for name in sorted(names, key=lambda name: (len(name), name))
        ]
        return registry.lazy_stack(members, meta.get("stack_dim"))
    if kind != "TensorDict":
        raise FormatError(
            f"`{where}` is {with_article(kind)}, which only tensordict can read. Load it there, "
            "and convert it with `kd_core.convert.from_tensordict_library`."
        )
    desc = describe(_sizes(meta.get("shape"), where))
    entries: dict[str, Entry] = {}
    rest = set(files.names_in(folder)) - {META}
    for key, value in meta.items():
        if not isinstance(value, dict):
            continue
        _check_name(key, where)
        if "type" in value:
            entries[key] = _nested(folder, key, where, desc, depth)
            rest.discard(key)
        else:
            entries[key] = _leaf(folder, key, cast("Meta", value), where)
            rest.discard(f"{key}.memmap")
    if rest:
        raise FormatError(f"`{where}` has `{min(rest)}`, which its `{META}` does not name.")
    # Shapes are checked against the batch size as those of any mapping are.
    return registry.nest_mapping(entries, desc, ())


def _nested(folder: int, key: str, where: str, desc: Descriptor, depth: int) -> Node:
    with files.opened_folder(key, folder) as inner:
        meta = _meta(inner, f"{where}/{key}")
        kind = _kind(meta)
        if kind not in ("NonTensorData", "NonTensorStack"):
            return _container(inner, f"{where}/{key}", depth + 1)
    if "data" not in meta:
        raise FormatError(
            f"`{where}/{key}` holds a pickle, which is not read. Load it with tensordict, and "
            "convert it with `kd_core.convert.from_tensordict_library`."
        )
    if kind == "NonTensorData":
        return registry.wrap_data(meta["data"], desc)
    return registry.wrap_list(values_of_rows(meta["data"], desc.batch, f"`{where}/{key}`"), desc)


def _below(folder: int, name: str, where: str, depth: int) -> Node:
    with files.opened_folder(name, folder) as inner:
        return _container(inner, f"{where}/{name}", depth + 1)


def _leaf(folder: int, key: str, meta: Meta, where: str) -> Tensor:
    dtype = DTYPES.get(str(meta.get("dtype")).removeprefix("torch."))
    if dtype is None or meta.get("is_nested"):
        raise FormatError(f"`{where}` has an entry `{key}` of `{meta}`, which cannot be read.")
    shape = _sizes(meta.get("shape"), where)
    size = math.prod(shape) * WIRE[dtype].itemsize
    if not size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with files.opened(f"{key}.memmap", folder) as file:
        if file.size != size:
            raise FormatError(f"`{where}/{key}.memmap` must have {size} bytes, got {file.size}.")
        content = bytearray(files.read(file, 0, size))
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _meta(folder: int, where: str) -> Meta:
    with files.opened(META, folder) as file:
        data = files.read(file, 0, min(file.size, MOST_BYTES))
    meta = parsed(data, f"`{where}/{META}`", "utf-8")
    if not isinstance(meta, dict) or "_type" not in meta:
        raise FormatError(f"`{where}/{META}` is not one of tensordict. Check the path.")
    return meta


def _kind(meta: Meta) -> str:
    """Return the name of the class, from text such as `<class 'tensordict._td.TensorDict'>`."""
    return str(meta["_type"]).rpartition(".")[2].removesuffix("'>")


def _check_name(key: str, where: str) -> None:
    if not key or "/" in key or "\0" in key or key in (".", ".."):
        raise FormatError(f"`{where}` has a key {key!r}, which is not the name of a file.")


def _sizes(value: object, where: str) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value):
        return tuple(value)
    raise FormatError(f"`{where}` has a shape {value!r}, which is not valid.")
