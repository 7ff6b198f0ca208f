"""Containers as nested groups of arrays: stores of Zarr, and the names that HDF5 has too.

A container is a group, a leaf an array, under names in which odd characters are escaped. An
attribute of the root holds what the arrays do not say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from kd_core._convert.layout import Tree, batch_of_layout, layout_of, leaves_of, rebuilt, stored
from kd_core._convert.optional import load
from kd_core._protocol.primitives import AbstractContainer

Group: TypeAlias = Any

LAYOUT: Final = "kd_core"


def write_zarr(td: AbstractContainer, path: str | Path) -> None:
    """Write a store of Zarr."""
    zarr = load("zarr", "to_zarr")
    layout = layout_of(td)
    root = zarr.open_group(str(path), mode="w")
    _write_levels(root, td)
    for where, leaf in leaves_of(td):
        _create_array(root, _place(where), stored(leaf))
    root.attrs[LAYOUT] = layout


def _create_array(root: Group, name: str, leaf: Tensor) -> None:
    # A store of Zarr keeps whole arrays in one chunk each; an empty one has no chunk.
    chunks = tuple(max(size, 1) for size in leaf.shape)
    root.create_array(name, data=leaf.numpy(), chunks=chunks)


def read_zarr(path: str | Path) -> tuple[Tree, tuple[int, ...] | None]:
    """Return the entries of a store of Zarr, and its batch size if a container wrote it."""
    zarr = load("zarr", "from_zarr")
    root = zarr.open_group(str(path), mode="r")
    layout = root.attrs.get(LAYOUT)
    if layout is None:
        return {**_foreign(root, zarr.Group)}, None
    tree = rebuilt(layout, lambda where: torch.as_tensor(root[_place(where)][...]))
    return tree, batch_of_layout(layout)


def _write_levels(group: Group, td: AbstractContainer) -> None:
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            _write_levels(group.create_group(escaped(key)), value)


def _place(path: tuple[str, ...]) -> str:
    return "/".join(map(escaped, path))


def escaped(key: str) -> str:
    """Return a key as the name of a group or array: a folder, in some stores."""
    name = quote(key, safe=" ", errors="surrogatepass").replace(".", "%2E")
    return name or "%00"


def unescaped(name: str) -> str:
    """Return the key of the name of a group or array."""
    return "" if name == "%00" else unquote(name, errors="surrogatepass")


def _foreign(group: Group, kind: type) -> dict[str, object]:
    """Return the arrays of a file of another origin."""
    tree: dict[str, object] = {}
    for name in sorted(group):
        value = group[name]
        key = unescaped(name)
        if isinstance(value, kind):
            tree[key] = _foreign(value, kind)
            continue
        array = value[()] if value.shape == () else value[...]
        kind_of = getattr(getattr(array, "dtype", None), "kind", "")
        decoded = array.tolist() if kind_of == "O" else array
        tree[key] = decoded.decode() if isinstance(decoded, bytes) else decoded
    return tree
