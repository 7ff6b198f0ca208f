"""Containers as nested groups of arrays, and what the arrays do not say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._convert.plain import load
from kd_core._errors import InvalidValue
from kd_core._keys import KeyPath, format_key
from kd_core._leaves.loops import same_data
from kd_core._leaves.packing import BITS
from kd_core._nodes import registry
from kd_core._nodes.entry import is_row_data, is_unbatched
from kd_core._protocol import AbstractContainer, refuse_unbatched
from kd_core._validation import values_of_rows

# What the plain values of a container do not say: batch sizes, key order, dtypes, shapes, data.
#
# Files keep it beside the values, as JSON, so that reading them returns an equal container.

Plain: TypeAlias = dict[str, object]
Tree: TypeAlias = dict[Any, object]
"""Entries by their keys, tuples of strings for nested ones, from which a container is built."""


class Leaf(NamedTuple):
    """A leaf and where it is."""

    path: KeyPath
    tensor: Tensor


def leaves_of(td: AbstractContainer, path: KeyPath = ()) -> Iterator[Leaf]:
    """Yield the leaves of a container, nested ones too.

    Raises:
        InvalidValue: if a leaf is nested, sparse or quantised, or has no data or batch dimensions.
    """
    for key, value in td._kd_entries.items():
        where = (*path, key)
        if isinstance(value, Tensor):
            if value.is_nested or value.layout is not torch.strided or value.is_quantized:
                raise InvalidValue(
                    f"entry {format_key(where)} must be a dense tensor, got layout "
                    f"`{value.layout}`. Convert it with `to_dense` or `to_padded_tensor`."
                )
            yield Leaf(where, value.detach())
        elif isinstance(value, AbstractContainer):
            yield from leaves_of(value, where)
        elif is_unbatched(value):
            refuse_unbatched(td, "written to this format", path)


def data_of(td: AbstractContainer, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object, bool]]:
    """Yield path and value of non-tensor data, and whether it has one value per row."""
    for key, value in td._kd_entries.items():
        where = (*path, key)
        if isinstance(value, AbstractContainer):
            yield from data_of(value, where)
        elif not isinstance(value, Tensor):
            yield where, value._kd_item(), is_row_data(value)


def layout_of(td: AbstractContainer) -> Plain:
    """Return what the values do not say, as values of JSON.

    Raises:
        InvalidValue: if a value of non-tensor data cannot be written as JSON.
    """
    levels: list[object] = []
    _list_levels(td, (), levels)
    leaves = [
        [leaf.path, str(leaf.tensor.dtype).removeprefix("torch."), list(leaf.tensor.shape)]
        for leaf in leaves_of(td)
    ]
    data = [[path, checked(path, value), rows] for path, value, rows in data_of(td)]
    return {"levels": levels, "leaves": leaves, "data": data}


def _list_levels(td: AbstractContainer, path: KeyPath, levels: list[object]) -> None:
    levels.append([path, list(td._kd_desc.batch), list(td._kd_entries)])
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            _list_levels(value, (*path, key), levels)


def checked(path: KeyPath, value: object) -> object:
    """Return a value that JSON keeps as it is.

    Raises:
        InvalidValue: if JSON does not keep it: the message names the entry.
    """
    try:
        same = same_data(json.loads(json.dumps(value)), value)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise InvalidValue(
            f"entry {format_key(path)} is non-tensor data that JSON cannot keep: {value!r}. Use "
            "strings, numbers, lists, dicts with string keys and `None`, or `exclude` the entry."
        )
    return value


def rebuilt(layout: Plain, read: Callable[[KeyPath], Tensor]) -> Tree:
    """Return nested dicts of entries, whose nested containers are built already.

    Args:
        layout: what `layout_of` returned, from JSON.
        read: returns the values of a leaf; their dtype and shape may be those of `stored`.
    """
    levels = {tuple(path): describe(tuple(batch)) for path, batch, _ in _rows(layout, "levels")}
    # In the order of the keys, each of which is filled below.
    content = {tuple(path): dict.fromkeys(keys) for path, _, keys in _rows(layout, "levels")}
    for path, dtype, shape in _rows(layout, "leaves"):
        leaf = restored(read(tuple(path)), getattr(torch, dtype), shape)
        content[tuple(path[:-1])][path[-1]] = leaf
    for path, value, rows in _rows(layout, "data"):
        level = tuple(path[:-1])
        desc = levels[level]
        if rows:
            values = values_of_rows(value, desc.batch, format_key(tuple(path)))
            content[level][path[-1]] = registry.wrap_list(values, desc)
        else:
            content[level][path[-1]] = registry.wrap_data(value, desc)
    for path in sorted(levels, key=len, reverse=True):
        if path:
            node: object = registry.nest_mapping(content[path], levels[path], path)
            content[path[:-1]][path[-1]] = node
    return {**content[()]}


def batch_of_layout(layout: Plain) -> tuple[int, ...]:
    """Return the batch size of the whole container."""
    return tuple(_rows(layout, "levels")[0][1])


def _rows(layout: Plain, name: str) -> list[list[Any]]:
    return cast("list[list[Any]]", layout[name])


def stored(leaf: Tensor) -> Tensor:
    """Return a leaf as numbers that every format has: bits of small floats, parts of complex."""
    leaf = leaf.detach().cpu().resolve_conj().resolve_neg()
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf)
    small = leaf.is_floating_point() and leaf.dtype not in (torch.float32, torch.float64)
    if small and leaf.dtype is not torch.float16:
        leaf = leaf.contiguous().view(BITS[leaf.element_size()])
    return leaf.contiguous()


def restored(values: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Return the leaf of a dtype and shape from what `stored` made of it."""
    if dtype.is_complex and not values.is_complex():
        real = torch.empty((), dtype=dtype).real.dtype
        parts = values.to(real).reshape(*shape, 2)
        return torch.complex(parts[..., 0], parts[..., 1])
    if values.dtype != dtype:
        bits = dtype.is_floating_point and not values.is_floating_point()
        values = values.contiguous().view(dtype) if bits else values.to(dtype)
    return values.reshape(shape)


# Containers as nested groups of arrays: stores of Zarr, and the names that HDF5 has too.
#
# A container is a group, a leaf an array, under names in which odd characters are escaped. An
# attribute of the root holds what the arrays do not say.

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
