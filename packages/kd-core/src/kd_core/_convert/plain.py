"""Values of other kinds: Python objects as nested dicts, and arrays of other libraries."""

from __future__ import annotations

import importlib
import json
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, cast
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._descriptor import describe, describe_on
from kd_core._errors import InvalidValue, KeyCollision, MissingDependency, a_type, wrong_type
from kd_core._keys import KeyPath, format_key
from kd_core._leaves.arrays import (
    columns_of_struct_array,
    is_frame,
    is_number,
    is_record,
    is_struct_array,
    shape_of_lists,
    values_of_rows,
)
from kd_core._leaves.loops import find_entry, same_data
from kd_core._leaves.packing import BITS
from kd_core._nodes import (
    Entry,
    Node,
    is_data,
    is_node,
    is_row_data,
    is_unbatched,
    kept_value,
    rows_of_data,
)
from kd_core._progress import advance, begin
from kd_core._protocol import AbstractContainer, Composite, refuse_unbatched
from kd_core._shapes import refuse_open
from kd_core._torch_private import torch_tree, without_torch_function
from kd_core._unbatched import wrap_tensor
from kd_core._validation import is_foreign, is_foreign_unbatched, records_as_node

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from kd_core._descriptor import Descriptor
    from kd_core._types import Batch

    Foreign: TypeAlias = Any
    W = TypeVar("W", bound=AbstractContainer)

    class AnyNamedTuple(Protocol):
        """An instance of a class that `collections.namedtuple` or `typing.NamedTuple` makes."""

        _fields: tuple[str, ...]

        def __iter__(self) -> Iterator[object]: ...


def tree_of(value: object, batch: Batch = ()) -> dict[str, object] | None:
    """Return an object of named or numbered parts as nested dicts; `None` for any other value.

    Args:
        value: the object.
        batch: the batch size that is given: under one a number is one value for all rows.
    """
    parts = _parts_of(value)
    return None if parts is None else {key: branch_of(part, batch) for key, part in parts}


def branch_of(value: object, batch: Batch = ()) -> object:
    """Return an object of named or numbered parts as nested dicts, any other value as it is.

    A list that holds numbers, tensors or objects has a value for each item. A data frame and an
    array of records become a container with a row for each of their rows.
    """
    if isinstance(value, (Tensor, str)):
        return value
    if isinstance(value, list):
        return entry_of_list(value) if any(map(_is_item, value)) else value
    if is_frame(value):
        columns, rows = registry.tree_of_frame(value, None, None)
        return registry.nest_mapping(columns, describe((rows,)), ())
    records = records_as_node(value)
    if records is not None:
        return records
    if batch and is_number(value):
        return registry.wrap_data(value, describe(batch))
    tree = tree_of(value, batch)
    return value if tree is None else tree


def with_branches(source: object, batch: Batch) -> object:
    """Return the source of a container with nested dicts in place of objects that have parts.

    A list of pairs, and what has `keys`, as a `ParameterDict` of torch, is a mapping, too.
    """
    if not isinstance(source, Mapping):
        if not (isinstance(source, list) or hasattr(source, "keys")):
            return source
        try:
            source = dict(cast("Mapping[str, object]", source))
        except (TypeError, ValueError):
            return source
    return {key: branch_of(value, batch) for key, value in source.items()}


def entry_of_list(values: list[object]) -> Entry:
    """Return a list of numbers of one type as a tensor, any other list as a value for each item."""
    shape = shape_of_lists(values)
    rows = values_of_rows(values, shape, "the list")
    kinds = {*map(type, rows)}
    if not kinds or (len(kinds) == 1 and is_number(rows[0])):
        try:  # dynamo of torch 2.10 traces no `suppress`
            return torch.tensor(values)
        except (TypeError, ValueError, RuntimeError):
            pass
    return registry.wrap_rows(rows, None, describe(shape))


def _parts_of(value: object) -> Iterator[tuple[str, object]] | None:
    """Return names and parts of an object; `None` for a value without parts."""
    if isinstance(value, (Tensor, AbstractContainer, str, bytes)) or is_node(value):
        return None
    if isinstance(value, (dict, UserDict)):
        return iter(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        names = getattr(type(value), "_fields", None) or map(str, range(len(value)))
        return zip(names, value, strict=True)
    if is_struct_array(value) and not is_record(value):
        return iter(columns_of_struct_array(value).items())
    return None


def _field_names(value: object) -> tuple[str, ...] | None:
    """Return the names of the fields of a tuple: of a named one, or of a result of torch."""
    of_torch = hasattr(type(value), "n_sequence_fields")  # `torch.max`, for example
    found: tuple[str, ...] | None
    found = getattr(type(value), "__match_args__" if of_torch else "_fields", None)
    return found


def _is_item(value: object) -> bool:
    """Return whether an item of a list is a number, a tensor or an object of parts, or holds one.

    Other lists, as those of texts, are rows where the batch size says so.
    """
    if isinstance(value, list):
        return any(map(_is_item, value))
    known = isinstance(value, (Tensor, Mapping, AbstractContainer)) or is_number(value)
    return known or _parts_of(value) is not None


def tree_of_dataclass(value: object) -> dict[str, object]:
    """Return a dataclass as nested dicts: its fields, of one that is a mapping as well, too.

    Raises:
        InvalidArgument: if it is not an instance of a dataclass.
    """
    if not is_dataclass(value) or isinstance(value, type):
        remedy = "Decorate its class with `@dataclass`, and pass an instance."
        raise wrong_type("`dataclass`", "an instance of a dataclass", value, remedy)
    return {field.name: branch_of(getattr(value, field.name)) for field in fields(value)}


def tree_of_tuple(value: object) -> dict[str, object]:
    """Return a tuple or a list as nested dicts: fields by name, others by position.

    Raises:
        InvalidArgument: if it is neither.
    """
    if not isinstance(value, (tuple, list)):
        raise wrong_type("`obj`", "a tuple", value, "Use `from_any` for other objects.")
    return tree_of(tuple(value) if isinstance(value, list) else value) or {}


def tree_of_named_tuple(value: object) -> dict[str, object]:
    """Return a named tuple as nested dicts.

    Raises:
        InvalidArgument: if it is not a named tuple.
    """
    names = _field_names(value)
    if not isinstance(value, tuple) or names is None:
        remedy = "Use `from_tuple` for a tuple without names."
        raise wrong_type("`named_tuple`", "a named tuple", value, remedy)
    return {key: branch_of(part) for key, part in zip(names, value, strict=True)}


def named_tuple_of(td: AbstractContainer, path: tuple[str, ...] = ()) -> AnyNamedTuple:
    """Return a container as a named tuple, nested ones as nested named tuples.

    Raises:
        InvalidValue: if a key is not a valid name of a field.
    """
    values: list[object] = []
    for key, value in td._kd_entries.items():
        if not key.isidentifier() or key.startswith("_"):
            raise InvalidValue(
                f"key {format_key((*path, key))} is not a valid name of a field of a named tuple. "
                "Rename it with `rename_key_`."
            )
        if isinstance(value, AbstractContainer):
            values.append(named_tuple_of(value, (*path, key)))
        else:
            values.append(plain_entry(value))
    try:
        made: AnyNamedTuple = _named_tuple_class(tuple(td._kd_entries))(*values)
    except ValueError as error:  # a keyword of Python
        raise InvalidValue(f"{error}. Rename the key with `rename_key_`.") from None
    return made


def plain_entry(entry: Entry) -> object:
    """Return an entry without its wrapper, values of rows as lists."""
    if not is_data(entry):
        return entry
    item = entry._kd_item()
    return _plain_list(item) if is_row_data(entry) else item


@cache
def _named_tuple_class(names: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple("GenericDict", names)  # as users of tensordict see it


def struct_array_of(td: AbstractContainer) -> NDArray[numpy.void]:
    """Return a container as a structured array of its batch size; nested ones are nested fields.

    Raises:
        InvalidValue: if numpy has no dtype for a leaf.
    """
    import numpy

    refuse_unbatched(td, "divided among records")
    refuse_open(td._kd_desc.batch)
    array = numpy.empty(td._kd_desc.batch, _record_dtype(td, ()))
    _fill_records(array, td)
    return array


def _record_dtype(td: AbstractContainer, path: tuple[str, ...]) -> list[tuple[object, ...]]:
    ndim = td._kd_desc.ndim
    spec: list[tuple[object, ...]] = []
    for key, value in td._kd_entries.items():
        where = (*path, key)
        if not key:
            raise InvalidValue(
                f"key {format_key(where)} is empty, which is not a valid name of a field of a "
                "structured array. Rename it with `rename_key_`."
            )
        if isinstance(value, AbstractContainer):
            spec.append((key, _record_dtype(value, where), tuple(value._kd_desc.batch[ndim:])))
        elif isinstance(value, Tensor):
            array = _array_of(value, where)
            spec.append((key, array.dtype, tuple(value.shape[ndim:])))
        elif is_data(value):
            spec.append((key, _text_dtype(rows_of_data(value)), ()))
    return spec


def _text_dtype(values: list[object]) -> object:
    """Return the dtype of a column of values: text of ten letters and more, or objects."""
    texts = [value for value in values if type(value) is str]
    if not texts or len(texts) < len(values):
        return object
    return f"<U{max(10, *map(len, texts))}"


def _fill_records(records: NDArray[Any], td: AbstractContainer) -> None:
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            _fill_records(records[key], value)
        elif isinstance(value, Tensor):
            records[key][...] = _array_of(value, (key,))
        elif is_data(value):
            _fill_objects(records[key], td._kd_desc.batch, rows_of_data(value))


def _fill_objects(column: NDArray[Any], batch: Sequence[int], values: list[object]) -> None:
    import numpy

    for index, value in zip(numpy.ndindex(*batch), values, strict=True):
        column[index] = value


def _array_of(leaf: Tensor, path: tuple[str, ...]) -> NDArray[Any]:
    try:
        return leaf.detach().cpu().numpy()
    except TypeError as error:
        raise InvalidValue(
            f"entry {format_key(path)} is of dtype `{leaf.dtype}`, which numpy does not have: "
            f"{error}. Convert it first, for example with `td.float()`."
        ) from None


# Trees of torch (`torch.utils._pytree`) as containers that remember their structure, and back.
#
# The structure of the tree is non-tensor data of the container, under the key `STRUCTURE`.

STRUCTURE: Final = "_pytree_type"


class Structure(NamedTuple):
    """What a tree is beside its leaves.

    Attributes:
        spec: its nodes.
        paths: the key of each leaf.
    """

    spec: torch_tree.TreeSpec
    paths: tuple[tuple[str, ...], ...]


def tree_of_pytree(pytree: object) -> dict[tuple[str, ...], object] | Tensor:
    """Return the leaves of a tree by their paths, and its structure; a tensor that is the tree.

    Containers in the tree are leaves.

    Raises:
        InvalidValue: if the tree is a single leaf, and neither a tensor nor a number.
        KeyCollision: if two leaves have the same path.
    """
    leaves, spec = torch_tree.tree_flatten_with_path(pytree, _is_container)
    entries: dict[tuple[str, ...], object] = {}
    for path, leaf in leaves:
        key = tuple(name for part in path for name in _names_of(part))
        if not key:
            return _as_leaf(leaf)
        if key in entries:
            raise KeyCollision(f"two leaves of the tree have the path {format_key(key)}.")
        entries[key] = leaf
    paths = tuple(entries)
    entries[(STRUCTURE,)] = registry.wrap_data(Structure(spec, paths), describe(()))
    return entries


def _is_container(value: object) -> bool:
    return isinstance(value, AbstractContainer)


def _as_leaf(pytree: object) -> Tensor:
    try:
        return pytree if isinstance(pytree, Tensor) else torch.as_tensor(pytree)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidValue(
            f"`pytree` must be a tensor or a tree of several leaves, got {a_type(pytree)}. Wrap it "
            "in a dict or a list."
        ) from None


def _names_of(part: object) -> Sequence[str]:
    """Return the names that a step of a path is: keys of containers are tuples."""
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            name = getattr(part, attribute)
            return name if isinstance(name, tuple) and name else (str(name),)
    return (str(part),)


def pytree_of(td: AbstractContainer) -> object | None:
    """Return the tree that a container was made from, with the current leaves.

    Returns `None` if it was not made from a tree.
    """
    node = td._kd_entries.get(STRUCTURE)
    structure = None if node is None or isinstance(node, Tensor) else node._kd_item()
    if not isinstance(structure, Structure):
        return None
    leaves: list[object] = []
    for path in structure.paths:
        entry = find_entry(td._kd_entries, path)
        if entry is None:
            raise InvalidValue(
                f"the container was made from a tree with a leaf {format_key(path)}, which it has "
                f"lost. Remove `{STRUCTURE}` from the container, then it becomes nested dicts."
            )
        leaves.append(entry if isinstance(entry, (Tensor, AbstractContainer)) else entry._kd_item())
    found: object = torch_tree.tree_unflatten(leaves, structure.spec)
    return found


# Optional libraries, imported when a format needs them.

Library: TypeAlias = Any
"""A module without types: most of these libraries ship none."""


def load(module: str, purpose: str) -> Library:
    """Return an optional module.

    Args:
        module: its dotted name; the package to install has the name of the first part.
        purpose: the method that needs it, for the message.

    Raises:
        MissingDependency: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependency(
            f"`{purpose}` requires {package}. Install it with `pip install {package}`."
        ) from error


# Containers of the package tensordict, and back, without copying tensors.
#
# A container of that package has imported it, so reading one imports nothing.

_ROWS: Final = "NonTensorStack"
_DATA: Final = "NonTensorDataBase"
_LAZY: Final = "LazyStackedTensorDict"


def node_of(value: Foreign) -> Node:
    """Return a container, or data, of the package tensordict as one of ours.

    Tensors are shared. Lazy stacks stay lazy, tensor classes become plain containers.

    Raises:
        InvalidArgument: if it is not a container of that package.
    """
    if not is_foreign(value):
        remedy = "Use `from_any` for other objects."
        raise wrong_type("the container", "one of the package tensordict", value, remedy)
    kinds = {kind.__name__ for kind in type(value).__mro__}
    desc = describe_on(tuple(value.batch_size), value.device)
    if _ROWS in kinds:
        rows = values_of_rows(_plain_list(value.tolist()), desc.batch, "the data")
        return registry.wrap_rows(rows, None, desc)
    if kinds & {_DATA, "NonTensorData"}:
        return registry.wrap_data(value.data, desc)
    if _LAZY in kinds:
        members = [node_of(member) for member in value.tensordicts]
        return registry.lazy_stack(members, value.stack_dim)
    entries: dict[str, Entry] = {
        str(key): _leaf_of(entry, desc) if isinstance(entry, Tensor) else node_of(entry)
        for key, entry in value.items()
    }
    return registry.make_dense(entries, desc)


def _leaf_of(leaf: Tensor, desc: Descriptor) -> Entry:
    return unbatched_of(leaf)._kd_with_descriptor(desc) if is_foreign_unbatched(leaf) else leaf


def unbatched_of(leaf: Tensor) -> Node:
    """Return a tensor without batch dimensions, which is one of a subclass there."""
    with without_torch_function():
        return wrap_tensor(leaf.as_subclass(Tensor), describe(()))


def _plain_list(values: object) -> object:
    return [_plain_list(value) for value in values] if isinstance(values, list) else values


def container_of(td: AbstractContainer) -> object:
    """Return a container of the package tensordict that shares the tensors of one of ours.

    Raises:
        MissingDependency: if that package is not installed.
    """
    return _given_back(load("tensordict", "to_tensordict_library"), td)


def _given_back(library: Foreign, node: Node | AbstractContainer) -> Foreign:
    desc = node._kd_desc
    if isinstance(node, Composite):
        members = [_given_back(library, member) for member in node._members]
        return library.LazyStackedTensorDict(*members, stack_dim=node._dim)
    if not isinstance(node, AbstractContainer):
        if is_unbatched(node):
            return library.UnbatchedTensor(node._tensor)
        if is_row_data(node):
            return _rows(library, node.tolist(), desc, len(desc.batch))
        return library.NonTensorData(node._kd_item(), batch_size=desc.batch, device=desc.device)
    made = library.TensorDict({}, batch_size=desc.batch, device=desc.device)
    for key, entry in node._kd_entries.items():
        made.set(key, entry if isinstance(entry, Tensor) else _given_back(library, entry))
    return made


def _rows(library: Foreign, values: object, desc: Descriptor, dims: int) -> Foreign:
    if dims == 0 or not isinstance(values, list):
        return library.NonTensorData(values, batch_size=(), device=desc.device)
    inner = [_rows(library, value, desc, dims - 1) for value in values]
    return library.NonTensorStack(*inner, stack_dim=0)


def _foreign_node(value: object) -> Node:
    return unbatched_of(value) if isinstance(value, Tensor) else node_of(value)


registry.register("foreign_node", _foreign_node)


# Arrays of other libraries, and the layout of containers beside them.


# What the plain values of a container do not say: batch sizes, key order, dtypes, shapes, data.
#
# Files keep it beside the values, as JSON, so that reading them returns an equal container.

Plain: TypeAlias = dict[str, Any]
Tree: TypeAlias = dict[Any, object]
"""Entries by their keys, tuples of strings for nested ones, from which a container is built."""


class Leaf(NamedTuple):
    """A leaf and where it is."""

    path: KeyPath
    tensor: Tensor


def leaves_of(td: AbstractContainer, path: KeyPath = ()) -> Iterator[Leaf]:
    """Yield the leaves of a container, nested ones too.

    Raises:
        InvalidValue: if a leaf is sparse or quantised, or has no data or batch dimensions, or is a
            nested tensor that is not jagged.
    """
    for key, value in td._kd_entries.items():
        where = (*path, key)
        if isinstance(value, Tensor):
            if value.is_nested and value.layout is torch.jagged:
                yield Leaf(where, value.detach())
                continue
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


def ragged_as_jagged(td: W) -> W:
    """Return a container whose lazy stacks are stacked, entries of different shapes as jagged ones.

    Raises:
        ShapeMismatch: if rows of an entry differ in more than their first dimension.
    """
    if isinstance(td, Composite):
        return td._kd_engine.densify(td, torch.jagged)
    below = [
        (key, value)
        for key, value in (td._kd_entries.items() if td._kd_nested else ())
        if isinstance(value, AbstractContainer)
    ]
    changed = {key: ragged_as_jagged(value) for key, value in below}
    if all(changed[key] is value for key, value in below):
        return td
    return registry.make_dense({**td._kd_entries, **changed}, td._kd_desc)


class Rows(NamedTuple):
    """A jagged tensor as the values of all rows, one behind the other, and their lengths."""

    values: Tensor
    lengths: Tensor


def rows_of_jagged(leaf: Tensor, path: KeyPath) -> Rows:
    """Return what a jagged tensor holds.

    Raises:
        InvalidValue: if rows differ in another dimension than their first one.
    """
    rows = leaf.unbind()
    if any(row.shape[1:] != rows[0].shape[1:] for row in rows):
        raise InvalidValue(
            f"entry {format_key(path)} must have rows that differ in their first dimension only. "
            "Convert it with `to_padded_tensor`."
        )
    values = torch.cat(rows) if rows else leaf.values()[:0]
    return Rows(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))


def jagged_of(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the jagged tensor of what `rows_of_jagged` made of it."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _shape_of(leaf: Leaf) -> list[int | None]:
    """Return the shape of a leaf, with `None` for the dimension whose size is that of each row."""
    tensor = leaf.tensor
    if not tensor.is_nested:
        return list(tensor.shape)
    rows = rows_of_jagged(tensor, leaf.path)
    return [len(rows.lengths), None, *rows.values.shape[1:]]


def data_of(td: AbstractContainer, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object, bool]]:
    """Yield path and value of non-tensor data, and whether it has one value per row."""
    for key, value in td._kd_entries.items():
        where = (*path, key)
        if isinstance(value, AbstractContainer):
            yield from data_of(value, where)
        elif not isinstance(value, Tensor):
            yield where, with_lists(kept_value(value)), is_row_data(value)


def with_lists(value: object) -> object:
    """Return a value with lists of numbers in place of tensors, as those of ragged rows."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [with_lists(each) for each in value] if isinstance(value, list) else value


def layout_of(td: AbstractContainer) -> Plain:
    """Return what the values do not say, as values of JSON.

    Raises:
        InvalidValue: if a value of non-tensor data cannot be written as JSON.
    """
    levels: list[object] = []
    _list_levels(td, (), levels)
    leaves = [
        [leaf.path, str(leaf.tensor.dtype).removeprefix("torch."), _shape_of(leaf)]
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


def rebuilt(
    layout: Plain, read: Callable[[KeyPath], Tensor], lengths: Callable[[KeyPath], Tensor]
) -> Tree:
    """Return nested dicts of entries, whose nested containers are built already.

    Args:
        layout: what `layout_of` returned, from JSON.
        read: returns the values of a leaf; their dtype and shape may be those of `stored`.
        lengths: returns the lengths of the rows of a jagged leaf.
    """
    levels = {
        tuple(path): describe(tuple(batch)) for path, batch, _ in _layout_rows(layout, "levels")
    }
    # In the order of the keys, each of which is filled below.
    content = {tuple(path): dict.fromkeys(keys) for path, _, keys in _layout_rows(layout, "levels")}
    for path, dtype, shape in _layout_rows(layout, "leaves"):
        where = tuple(path)
        if None in shape:
            count = lengths(where)
            sizes = [int(count.sum()), *shape[2:]]
            leaf = jagged_of(restored(read(where), getattr(torch, dtype), sizes), count)
        else:
            leaf = restored(read(where), getattr(torch, dtype), shape)
        content[tuple(path[:-1])][path[-1]] = leaf
    for path, value, rows in _layout_rows(layout, "data"):
        level = tuple(path[:-1])
        desc = levels[level]
        if rows:
            values = values_of_rows(value, desc.batch, format_key(tuple(path)))
            content[level][path[-1]] = registry.wrap_rows(values, None, desc)
        else:
            content[level][path[-1]] = registry.wrap_data(value, desc)
    for path in sorted(levels, key=len, reverse=True):
        if path:
            node: object = registry.nest_mapping(content[path], levels[path], path)
            content[path[:-1]][path[-1]] = node
    return {**content[()]}


def batch_of_layout(layout: Plain) -> tuple[int, ...]:
    """Return the batch size of the whole container."""
    return tuple(_layout_rows(layout, "levels")[0][1])


def _layout_rows(layout: Plain, name: str) -> list[list[Any]]:
    rows: list[list[Any]] = layout[name]
    return rows


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

VALUES: Final = "values"
LENGTHS: Final = "lengths"
"""The arrays of a jagged tensor, which is a group."""


def write_zarr(td: AbstractContainer, path: str | Path) -> None:
    """Write a store of Zarr."""
    zarr = load("zarr", "to_zarr")
    td = ragged_as_jagged(td)
    layout = layout_of(td)
    root = zarr.open_group(str(path), mode="w")
    _write_levels(root, td)
    leaves = [*leaves_of(td)]
    begin("write", len(leaves), "arrays")
    for where, leaf in leaves:
        if leaf.is_nested:
            rows = rows_of_jagged(leaf, where)
            _create_array(root, f"{_place(where)}/{VALUES}", stored(rows.values))
            _create_array(root, f"{_place(where)}/{LENGTHS}", rows.lengths)
        else:
            _create_array(root, _place(where), stored(leaf))
        advance()
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

    def read(where: KeyPath) -> Tensor:
        found = root[_place(where)]
        return torch.as_tensor((found[VALUES] if isinstance(found, zarr.Group) else found)[...])

    def lengths(where: KeyPath) -> Tensor:
        return torch.as_tensor(root[_place(where)][LENGTHS][...])

    return rebuilt(layout, read, lengths), batch_of_layout(layout)


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
