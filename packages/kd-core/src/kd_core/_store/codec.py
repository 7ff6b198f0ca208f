"""A container as nodes of a manifest, and back.

What a file says is checked as an argument of a user is. Knows nodes and segments; must not know
files or commits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from kd_core import _registry as registry
from kd_core._descriptor import describe, device_of
from kd_core._errors import (
    FormatError,
    InvalidValue,
    KdError,
    KeyNotFound,
    MissingDependency,
    a_type,
    different_keys,
    listed,
    walks_through_leaf,
)
from kd_core._keys import KeyPath, format_key, nearest_key, path_of, several
from kd_core._leaves.loops import (
    leaf_fits,
    lengths_of,
    offsets_of,
    strided_parts,
    strided_view,
)
from kd_core._nodes import is_data, is_row_data, is_unbatched, rows_of_data
from kd_core._protocol import AbstractContainer, Composite
from kd_core._registry import CLASSES, class_named
from kd_core._shapes import checked_names, names_of, with_names, without_names
from kd_core._store.manifest import (
    BY_FULL_NAME,
    RESTORE,
    canonical,
    class_defined,
    full_name,
    parsed,
    read,
    warn_unknown,
    written,
)
from kd_core._store.mapped_tensor import DTYPES, NAMES, WIRE, MemoryMappedTensor, SealedTensor
from kd_core._store.segments import Spec
from kd_core._torch_private import ragged_dim
from kd_core._unbatched import wrap_tensor
from kd_core._validation import MAX_DEPTH

if TYPE_CHECKING:
    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry
    from kd_core._types import NestedKey


# A container as nodes of a manifest.
#
# A node is an object with one key, its kind:
#
# | kind | value |
# | --- | --- |
# | `td` | batch size, names of dimensions, device, and `[key, node]` for each entry |
# | `class` | its name, its version (0 if not registered), and what `td` has, perhaps a state |
# | `lazy` | dimension, its name, and the node of each member |
# | `cat` | the nodes of the parts, joined along the first dimension |
# | `tensor` | position of the segment, name in it, dtype, shape |
# | `jagged` | nodes of values, offsets and perhaps lengths, and the ragged dimension |
# | `strided` | nodes of the values of all rows and of the sizes of each: another nested tensor |
# | `unbatched` | the node of a tensor that does not start with the batch size |
# | `data` | non-tensor data of the whole batch |
# | `object` | the same with tensors in it, as the state of an optimizer has, and their nodes |
# | `rows` | the node of a tensor of bytes: non-tensor data of all rows, as canonical JSON |
#
# Keys are strings of JSON and nothing else.

Json = dict[str, Any]


class Encoder:
    """The nodes of one container, and the tensors that they refer to.

    Args:
        named: returns the name of a tensor from its path and its number; `None`: `t<number>`.
    """

    def __init__(self, named: Callable[[KeyPath, int], str] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.specs: dict[str, Spec] = {}
        self.rows: list[str] = []
        """The tensors that a new arena holds at once: those that describe rows (their non-tensor
        data, and where ragged ones are) and those without batch dimensions."""
        self._named = named
        self._places: list[list[object]] = []
        self._known: dict[int, str] = {}
        self._ragged: dict[int, tuple[Tensor, Json]] = {}
        self._kinds: dict[tuple[torch.dtype, torch.Size], Spec] = {}

    def node_of(self, td: AbstractContainer, path: KeyPath = ()) -> Json:
        """Return the node of a container.

        Raises:
            InvalidArgument: if a type cannot be saved.
            InvalidValue: if a value cannot be saved.
        """
        kind = type(td)
        if isinstance(td, Composite) and kind not in CLASSES:
            return {"lazy": self._stack(td, path)}
        if kind is dense_kind() or (kind not in CLASSES and _is_dense_elsewhere(td)):
            return {"td": self._level(td, path)}
        level = self._level(td, path)
        stored = CLASSES.get(kind)
        if stored is None:
            return {"class": [full_name(kind), BY_FULL_NAME, level]}
        if stored.state is not None:
            level["state"] = written(stored.state(td), path)
        return {"class": [stored.name, stored.version, level]}

    def _level(self, td: AbstractContainer, path: KeyPath) -> Json:
        desc = td._kd_desc
        entries = [
            [key, self._entry(value, (*path, key), desc)] for key, value in td._kd_entries.items()
        ]
        return {**self._batch_of(desc), "entries": entries}

    def _stack(self, td: Composite, path: KeyPath) -> Json:
        [name] = names_of(td._kd_desc.batch[td._dim : td._dim + 1])
        members = [self.node_of(member, path) for member in td._members]
        return {"dim": td._dim, "name": name, "members": members}

    def _entry(self, value: Entry, path: KeyPath, above: Descriptor) -> Json:
        if isinstance(value, Tensor):
            return self.leaf_node(value, path)
        if isinstance(value, AbstractContainer):
            return self.node_of(value, path)
        if is_unbatched(value):
            node = self.leaf_node(value._tensor, path)
            if "tensor" in node:  # no row, but neither is it filled later
                self.rows.append(self._known[id(value._tensor)])
            return {"unbatched": node}
        more = {} if value._kd_desc.batch == above.batch else self._batch_of(value._kd_desc)
        if is_row_data(value):
            blob = blob_of(written(rows_of_data(value), path))
            node = self.add(blob, path)
            self.rows.append(self._known[id(blob)])
            return {"rows": {**more, "values": node}}
        assert is_data(value)
        constant, of_batch = value._kd_state()
        tensors: list[Json] = []

        def number_of(tensor: Tensor) -> int:
            tensors.append(self.add(tensor, path))
            self.rows.append(self._known[id(tensor)])
            return len(tensors) - 1

        data = written(value._kd_item(), path, number_of=number_of)
        held: Json = {**more, "constant": constant, "of_batch": of_batch, "value": data}
        return {"object": {**held, "tensors": tensors}} if tensors else {"data": held}

    def leaf_node(self, leaf: Tensor, path: KeyPath) -> Json:
        """Return the node of a leaf, which may be a nested tensor."""
        return self._jagged(leaf, path) if leaf.is_nested else self.add(leaf, path)

    def _jagged(self, leaf: Tensor, path: KeyPath) -> Json:
        known = self._ragged.get(id(leaf))
        if known is not None:
            return known[1]
        if leaf.layout is torch.strided:
            values, sizes = strided_parts(leaf)
            node: Json = {"strided": [self.add(values, path), self.add(sizes, path)]}
            self.rows.append(self._known[id(sizes)])
            self._ragged[id(leaf)] = leaf, node
            return node
        parts: list[Tensor | None] = [leaf.values(), offsets_of(leaf), lengths_of(leaf)]
        nodes = [None if part is None else self.add(part, path) for part in parts]
        self.rows += [self._known[id(part)] for part in parts[1:] if part is not None]
        node = {"jagged": [*nodes, ragged_dim(leaf)]}
        self._ragged[id(leaf)] = leaf, node
        return node

    def add(self, leaf: Tensor, path: KeyPath) -> Json:
        """Return the node of a tensor, which is written with the others.

        Raises:
            InvalidValue: if it cannot be saved.
        """
        known = self._known.get(id(leaf))
        if known is None:
            _check_plain(leaf, path)
            number = len(self.tensors)
            known = f"t{number}" if self._named is None else self._named(path, number)
            self._known[id(leaf)] = known
            self.tensors[known] = leaf  # which also keeps its `id`
            kind = leaf.dtype, leaf.shape
            if kind not in self._kinds:
                self._kinds[kind] = Spec(leaf.dtype, tuple(leaf.shape))
            self.specs[known] = self._kinds[kind]
        place = place_of(self._segment_of(leaf), known, self.specs[known])
        self._places.append(place)
        return {"tensor": place}

    def _segment_of(self, leaf: Tensor) -> int:
        """Return the position of the segment that holds a tensor."""
        return 0

    def move_to(self, segment: int) -> None:
        """Write the position of a segment into all nodes of tensors."""
        for place in self._places:
            place[0] = segment

    def _batch_of(self, desc: Descriptor) -> Json:
        row: Json = {"batch": list(without_names(desc.batch))}
        if desc.named:
            row["names"] = list(names_of(desc.batch))
        if desc.device is not None:
            row["device"] = self._place(desc.device)
        return row

    def _place(self, device: torch.device) -> object:
        """Return what a node says of the device of its container."""
        return device.type


def place_of(segment: int, name: str, spec: Spec) -> list[object]:
    """Return the value of the node of a tensor."""
    return [segment, name, NAMES[spec.dtype], list(spec.shape)]


@cache
def dense_kind() -> type:
    """Return the class of plain dense containers."""
    return type(registry.make_dense({}, describe(())))


def _is_dense_elsewhere(td: AbstractContainer) -> bool:
    """Return whether results of a kind are plain containers, as of one in a file of HDF5."""
    return type(td._kd_like(dict(td._kd_entries), td._kd_desc.unlocked())) is dense_kind()


def blob_of(value: object) -> Tensor:
    """Return the canonical JSON of a value as a tensor of bytes."""
    return torch.frombuffer(bytearray(canonical(value)), dtype=torch.uint8)


_PLAIN: Final = frozenset({Tensor, Parameter, MemoryMappedTensor, SealedTensor})


def _check_plain(leaf: Tensor, path: KeyPath) -> None:
    if type(leaf) not in _PLAIN:
        raise InvalidValue(
            f"entry {format_key(path)} must be a plain tensor to be saved, got a "
            f"`{type(leaf).__qualname__}`. Convert it first."
        )
    if leaf.is_meta:
        raise InvalidValue(
            f"entry {format_key(path)} is on the meta device and does not have data. Fill it "
            "first, or `exclude` it."
        )
    if leaf.layout is not torch.strided or leaf.dtype not in WIRE:
        raise _not_dense(leaf, path)


def _not_dense(leaf: Tensor, path: KeyPath) -> InvalidValue:
    return InvalidValue(
        f"entry {format_key(path)} must be a dense or jagged tensor of numbers to be saved, got "
        f"dtype `{leaf.dtype}` and layout `{leaf.layout}`. Convert it, for example with "
        "`to_dense` or `dequantize`."
    )


# Whether a container can be joined behind another one, from their nodes alone.


def parts_of(tree: Any) -> list[Json]:
    """Return the nodes of the parts of a store, one unless something was appended.

    Raises:
        FormatError: if there is none.
    """
    if isinstance(tree, dict) and "cat" in tree:
        parts = tree["cat"]
        if len(tree) == 1 and isinstance(parts, list) and parts:
            return parts
        raise FormatError(f"{str(tree)[:80]!r} does not have the form of parts. {RESTORE}")
    return [tree]


def check_parts(parts: list[Json]) -> None:
    """Check that the parts of a store can be joined.

    Raises:
        FormatError: if they cannot, or one of them does not have the form of a container.
    """
    try:
        for part in parts[1:]:
            check_fits(part, parts[0])
    except (KdError, *MISSHAPEN) as error:
        raise FormatError(f"the parts of the tree cannot be joined: {error} {RESTORE}") from error


MISSHAPEN: Final = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
"""What code that expects the form of a node raises for another one."""


def check_fits(new: Json, old: Json, path: KeyPath = ()) -> None:
    """Check that rows of `new` can be joined behind those of `old`.

    Raises:
        InvalidValue: if a batch size, dtype, shape, class or value of the batch differs.
        KeySetMismatch: if the keys differ.
    """
    [(kind, mine)], [(known, theirs)] = new.items(), old.items()
    if kind != known:
        raise _differs("kind", known, kind, path)
    _CHECKS[kind](mine, theirs, path)


def _check_level(new: Json, old: Json, path: KeyPath) -> None:
    if not new["batch"]:
        where = format_key(path) if path else "the container"
        raise InvalidValue(
            f"{where} must have a batch dimension to be appended along. Pass `batch_size`, or "
            "`unsqueeze` it."
        )
    _check_same("batch size behind the first dimension", new["batch"][1:], old["batch"][1:], path)
    _check_same("names", new.get("names"), old.get("names"), path)
    mine, theirs = dict(new["entries"]), dict(old["entries"])
    if mine.keys() != theirs.keys():
        where = f" below key {format_key(path)}" if path else ""
        raise different_keys(mine, theirs, ("what is appended", "the store"), where)
    for key, node in mine.items():
        check_fits(node, theirs[key], (*path, key))


def on_device_of(new: Json, old: Json) -> None:
    """Let rows that fit those of a store have its devices: what is loaded is on the CPU."""
    [(kind, mine)], [(_, theirs)] = new.items(), old.items()
    if kind == "class":
        mine, theirs = mine[2], theirs[2]
    if kind not in ("td", "class", "data", "rows") or "batch" not in mine:
        return
    mine.pop("device", None)
    if "device" in theirs:
        mine["device"] = theirs["device"]
    if "entries" in mine:
        before = dict(theirs["entries"])
        for key, node in mine["entries"]:
            on_device_of(node, before[key])


def _check_class(new: list[Any], old: list[Any], path: KeyPath) -> None:
    _check_same("class", new[:2], old[:2], path)
    _check_same("state", new[2].get("state"), old[2].get("state"), path)
    _check_level(new[2], old[2], path)


def _check_stack(new: Json, old: Json, path: KeyPath) -> None:
    _check_same("dimension of the stack", new["dim"], 0, path)
    _check_same("dimension of the stack", new["dim"], old["dim"], path)
    _check_same("name", new["name"], old["name"], path)


def _check_tensor(new: list[Any], old: list[Any], path: KeyPath) -> None:
    _check_same("dtype", new[2], old[2], path)
    _check_same("shape behind the first dimension", new[3][1:], old[3][1:], path)


def _check_jagged(new: list[Any], old: list[Any], path: KeyPath) -> None:
    for mine, theirs in zip(new[:2], old[:2], strict=True):
        check_fits(mine, theirs, path)
    _check_same("ragged dimension", new[2:], old[2:], path)


def _check_data(new: Json, old: Json, path: KeyPath) -> None:
    if new["value"] != old["value"]:
        raise InvalidValue(
            f"entry {format_key(path)} holds one value for the whole batch, which must be equal to "
            f"that of the store, {old['value']!r}, got {new['value']!r}. Save one value for each "
            "row: `NonTensorStack`."
        )


def _check_unbatched(new: object, old: object, path: KeyPath) -> None:
    raise InvalidValue(
        f"entry {format_key(path)} is an `UnbatchedTensor`, one tensor for all rows, and rows of "
        "such a container cannot be appended. Save it in a store of its own, and append the rest."
    )


def _check_object(new: object, old: object, path: KeyPath) -> None:
    raise InvalidValue(
        f"entry {format_key(path)} holds one value with tensors for the whole batch, and rows of "
        "such a container cannot be appended. Save it in a store of its own, and append the rest."
    )


def _check_added_rows(new: object, old: object, path: KeyPath) -> None:
    pass  # rows of any values can be joined


_CHECKS: Final[dict[str, Callable[[Any, Any, KeyPath], None]]] = {
    "td": _check_level,
    "class": _check_class,
    "lazy": _check_stack,
    "tensor": _check_tensor,
    "jagged": _check_jagged,
    "strided": _check_jagged,
    "data": _check_data,
    "object": _check_object,
    "rows": _check_added_rows,
    "unbatched": _check_unbatched,
}


def _check_same(what: str, new: object, old: object, path: KeyPath) -> None:
    if new != old:
        raise _differs(what, old, new, path)


def _differs(what: str, expected: object, got: object, path: KeyPath) -> InvalidValue:
    where = f"entry {format_key(path)}" if path else "what is appended"
    return InvalidValue(
        f"{where} must have the {what} of the store, {expected!r}, got {got!r}. Convert it, or "
        "save it to another store."
    )


# A container from the nodes of a manifest, whose form is told above.
#
# What a file says is checked as an argument of a user is: each shape, batch size, key and number.

Reader: TypeAlias = Callable[[Mapping[str, Spec]], dict[str, Tensor]]
"""Returns tensors of one segment from what the manifest says of them."""

Wanted: TypeAlias = "dict[str, Wanted] | None"
"""Which keys of a level to read; `None`: all."""

_LARGEST: Final = 2**63 - 1


def wanted_of(keys: Iterable[NestedKey]) -> Wanted:
    """Return some keys as nested dicts."""
    tree: dict[str, Wanted] = {}
    for key in several(keys, "`keys`"):
        level: Wanted = tree
        *above, last = path_of(key)
        for part in above:
            level = None if level is None else level.setdefault(part, {})
        if level is not None:
            level[last] = None
    return tree


Specs: TypeAlias = list[dict[str, Spec]]
"""The tensors of each segment, in the order of the tree."""


def specs_of(tree: object, count: int) -> Specs:
    """Return the tensors that a tree refers to.

    Args:
        tree: the node of the whole container.
        count: the number of segments.

    Raises:
        FormatError: if a tensor is not valid, two nodes say different things of it, or two parts
            share a segment: joined, one segment could become any number of bytes.
    """
    found: Specs = [{} for _ in range(count)]
    for part in parts_of(tree):
        collector = _Collector()
        collector.add(part, 0)
        for segment, tensors in collector.found.items():
            if not 0 <= segment < count or found[segment]:
                raise _invalid("segment of a part", segment)
            found[segment] = tensors
    return found


class _Collector:
    """Collects the tensors of one part, by the positions of segments.

    Tensors of one dtype and shape share what is said of them: "io" in the benchmarks.
    """

    def __init__(self) -> None:
        self.found: defaultdict[int, dict[str, Spec]] = defaultdict(dict)
        self._kinds: dict[tuple[object, ...], Spec] = {}

    def add(self, node: object, depth: int) -> None:
        """Add the tensors of a node."""
        kind, value = _kind_of(node)
        if kind == "tensor":
            self._tensor(value)
            return
        if depth > _MOST_NODES_DEEP:
            raise _too_deep()
        match kind, value:
            case ("td", {"entries": list(entries)}) | ("class", [_, _, {"entries": list(entries)}]):
                self._level(entries, depth)
            case "unbatched", {"tensor": row}:
                self._tensor(row)
            case "unbatched", {"jagged": _} | {"strided": _}:
                self.add(value, depth + 1)
            case "jagged", [*parts, int()]:
                for part in parts:
                    if part is not None:
                        self.add(part, depth + 1)
            case "strided", [_, _] as parts:
                for part in parts:
                    self.add(part, depth + 1)
            case "rows", {"values": {"tensor": row}}:
                if not self._tensor(row):
                    raise _invalid("tensor of rows, which one node names", row)
            case "lazy", {"members": list(parts)}:
                for part in parts:
                    self.add(part, depth + 1)
            case "data", _:
                pass
            case "object", {"tensors": list(parts)}:
                for part in parts:
                    self.add(part, depth + 1)
            case _:
                raise _invalid(kind, value)

    def _level(self, entries: list[object], depth: int) -> None:
        for pair in entries:
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str:
                raise _invalid("entry", pair)
            node = pair[1]
            # Tensors are the most frequent nodes: "io" in the benchmarks.
            if type(node) is dict and len(node) == 1 and "tensor" in node:
                self._tensor(node["tensor"])
            else:
                self.add(node, depth + 1)

    def _tensor(self, row: object) -> bool:
        """Add a tensor; return whether no other node named it before."""
        # Without patterns and calls, which are slow: "io" in the benchmarks.
        if isinstance(row, list) and len(row) == 4:
            segment, name, dtype, sizes = row
            if type(segment) is int and type(name) is str and type(dtype) is str:
                if type(sizes) is not list:
                    raise _invalid("shape", sizes)
                for size in sizes:
                    if type(size) is not int or not 0 <= size <= _LARGEST:
                        raise _invalid("shape", sizes)
                kind = dtype, *sizes
                spec = self._kinds.get(kind)
                if spec is None:
                    spec = self._kinds[kind] = _spec_of(dtype, tuple(sizes))
                tensors = self.found[segment]
                if name not in tensors:
                    tensors[name] = spec
                    return True
                if tensors[name] is spec:
                    return False
        raise _invalid("tensor", row)


def _spec_of(dtype: str, shape: tuple[int, ...]) -> Spec:
    if dtype not in DTYPES:
        raise _invalid("dtype", dtype)
    return Spec(DTYPES[dtype], shape)


_MOST_NODES_DEEP: Final = 2 * MAX_DEPTH
"""Containers may be nested `MAX_DEPTH` levels deep, and members are levels of nodes."""


class Decoder:
    """Builds containers from nodes.

    Args:
        specs: the tensors of each segment; `specs_of` the tree.
        readers: what returns the tensors of each segment.
        places: returns the device that a node names; `None`: what is loaded is on the CPU, from
            wherever it was saved.
        everywhere: ask `places` for containers without a device, too.
    """

    def __init__(
        self,
        specs: Specs,
        readers: list[Reader],
        places: Callable[[object], torch.device] | None = None,
        *,
        everywhere: bool = False,
    ) -> None:
        self._specs = specs
        self._readers = readers
        self._places = places
        self._everywhere = everywhere
        self._known: list[dict[str, Tensor]] = [{} for _ in specs]
        self._ragged: dict[tuple[int, ...], Tensor] = {}
        self._ends: dict[tuple[int, int], int] = {}
        """Where rows end, by the ids of their offsets and lengths, which `_known` keeps alive."""

    def container_of(self, node: object, wanted: Wanted = None) -> AbstractContainer:
        """Return the container of a node.

        Args:
            node: the node.
            wanted: the keys to read.

        Raises:
            FormatError: if the node does not describe a container.
            KeyNotFound: if there is not a key of this name.
        """
        try:
            parts = parts_of(node)
            check_parts(parts)
            if wanted is None:  # all at once, which is faster: "io" in the benchmarks
                pairs = zip(self._readers, self._specs, strict=True)
                self._known = [reader(specs) for reader, specs in pairs]
            return self._joined([self._container(part, wanted, ()) for part in parts])
        except (KeyNotFound, FormatError, MissingDependency):
            raise
        except KdError as error:
            raise FormatError(f"the manifest is not valid: {error} {RESTORE}") from error
        except (RuntimeError, TypeError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            raise FormatError(f"the manifest is not valid: {reason}. {RESTORE}") from error

    def _container(self, node: object, wanted: Wanted, path: KeyPath) -> AbstractContainer:
        if len(path) > MAX_DEPTH:
            raise _too_deep()
        kind, value = _kind_of(node)
        match kind, value:
            case "td", dict(level):
                desc, entries = self._level(level, wanted, path)
                return _as_container(registry.make_dense(entries, desc))
            case "class", [name, version, dict(level)]:
                stored = class_named(name, version)
                desc, entries = self._level(level, wanted, path)
                if wanted is not None and len(entries) < len(level["entries"]):
                    return _as_container(registry.make_dense(entries, desc))
                if stored is None:
                    return instance_of(name, version, entries, desc)
                state = read(level["state"]) if "state" in level else None
                return _as_container(stored.build(entries, desc, state))
            case "lazy", {"dim": int(dim), "name": None | str() as name, "members": list(members)}:
                return self._stack(members, dim, name, wanted, path)
        raise _invalid(kind, value)

    def _joined(self, parts: list[AbstractContainer]) -> AbstractContainer:
        if len(parts) == 1:
            return parts[0]
        rows = sum(part._kd_desc.batch[0] for part in parts)
        if rows > _LARGEST:
            raise _invalid("number of rows", rows)
        return _as_container(parts[0]._kd_engine._kd_cat_once(parts))

    def _stack(
        self, members: list[object], dim: int, name: str | None, wanted: Wanted, path: KeyPath
    ) -> AbstractContainer:
        built = [self._container(member, wanted, path) for member in members]
        stack = _as_container(registry.lazy_stack(built, dim))
        return name_stacked(stack, dim, name)

    def _level(
        self, level: Mapping[object, Any], wanted: Wanted, path: KeyPath
    ) -> tuple[Descriptor, dict[str, Entry]]:
        desc = self._descriptor_of(level)
        nodes = _nodes_of(level["entries"], path)
        if wanted is not None:
            _check_there(wanted, nodes, path)
            return desc, {
                key: self._entry(node, wanted[key], desc, (*path, key))
                for key, node in nodes.items()
                if key in wanted
            }
        entries: dict[str, Entry] = {}
        batch, ndim, known, fits = desc.batch, desc.ndim, self._known, None
        for key, node in nodes.items():
            leaf = None
            if "tensor" in node:  # mostly: "io" in the benchmarks
                segment, name, _, _ = node["tensor"]
                spec = self._specs[segment][name]
                if spec is fits or spec.shape[:ndim] == batch:
                    fits, leaf = spec, known[segment].get(name)
            entries[key] = self._entry(node, None, desc, (*path, key)) if leaf is None else leaf
        return desc, entries

    def _entry(self, node: object, wanted: Wanted, above: Descriptor, path: KeyPath) -> Entry:
        kind, value = _kind_of(node)
        if wanted is not None and kind not in LEVELS:
            raise walks_through_leaf(
                format_key((*path, *wanted)), format_key(path), f"`{kind}` of the file"
            )
        if kind in _LEAVES:
            leaf = self._leaf(kind, value)
            if not leaf_fits(leaf, above):
                raise _does_not_fit(path)
            return leaf
        if kind in LEVELS:
            inner = self._container(node, wanted, path)
            if inner._kd_desc.batch[: above.ndim] != above.batch:
                raise _does_not_fit(path)
            return inner
        match kind, value:
            case "unbatched", _:
                inside, leaf_node = _kind_of(value)
                return wrap_tensor(self._leaf(inside, leaf_node), above)
            case "rows", {"values": blob, **more}:
                desc = self._descriptor_of(more) if more else above
                values = _list_of(read(parsed(_bytes_of(self.leaf_of(blob)), "non-tensor data")))
                if len(values) != math.prod(desc.batch) or desc.batch[: above.ndim] != above.batch:
                    raise _does_not_fit(path)
                return registry.wrap_rows(values, None, desc)
            case "data", dict():
                return self._data(value, above, path)
            case "object", {"tensors": list(parts), **more}:
                return self._data(more, above, path, [self.leaf_of(part) for part in parts])
        raise _invalid(kind, value)

    def _data(
        self,
        node: Mapping[object, object],
        above: Descriptor,
        path: KeyPath,
        tensors: Sequence[Tensor] = (),
    ) -> Entry:
        match node:
            case {
                "constant": bool(constant),
                "of_batch": bool(of_batch),
                "value": data,
                **more,
            }:
                desc = self._descriptor_of(more) if more else above
                if desc.batch[: above.ndim] != above.batch:
                    raise _does_not_fit(path)
                value = read(data, tensors=tensors)
                return registry.wrap_data(value, desc, (constant, of_batch))
        raise _invalid("data", node)

    def _leaf(self, kind: str, value: object) -> Tensor:
        if kind == "tensor":
            return self._tensor(value)
        return self._jagged(value) if kind == "jagged" else self._strided(value)

    def _strided(self, value: object) -> Tensor:
        match value:
            case [values_node, sizes_node]:
                values, sizes = self.leaf_of(values_node), self.leaf_of(sizes_node)
                ragged = id(values), id(sizes)
                if ragged not in self._ragged:
                    check_rows(values, sizes)
                    self._ragged[ragged] = strided_view(values, sizes)
                return self._ragged[ragged]
        raise _invalid("strided", value)

    def _jagged(self, value: object) -> Tensor:
        match value:
            case [values_node, offsets_node, lengths_node, int(dim)]:
                values, offsets = self.leaf_of(values_node), self.leaf_of(offsets_node)
                lengths = None if lengths_node is None else self.leaf_of(lengths_node)
                rows = id(offsets), id(lengths)
                if rows not in self._ends:
                    self._ends[rows] = end_of(offsets, lengths)
                if not 1 <= dim <= values.ndim or self._ends[rows] > values.shape[dim - 1]:
                    raise _invalid("jagged tensor", tuple(values.shape))
                ragged = id(values), *rows, dim
                if ragged not in self._ragged:
                    self._ragged[ragged] = torch.nested.nested_tensor_from_jagged(
                        values, offsets, lengths, jagged_dim=dim
                    )
                return self._ragged[ragged]
        raise _invalid("jagged", value)

    def _descriptor_of(self, level: Mapping[object, object]) -> Descriptor:
        batch = _sizes_of(level.get("batch"))
        names, named = level.get("names"), level.get("device")
        if names is not None:
            batch = with_names(batch, checked_names(_list_of(names), batch))
        if named is None and not self._everywhere:
            return describe(batch)
        return describe(batch, self._places(named) if self._places else device_of("cpu"))

    def any_leaf(self, node: object) -> Tensor:
        """Return the leaf of a node, which may be a nested tensor."""
        return self._leaf(*_kind_of(node))

    def leaf_of(self, node: object) -> Tensor:
        """Return the tensor of a node; two nodes of one tensor give the same one."""
        kind, row = _kind_of(node)
        if kind != "tensor":
            raise _invalid("tensor", node)
        return self._tensor(row)

    def _tensor(self, row: Any) -> Tensor:
        segment, name, _, _ = row  # as `specs_of` checked
        known: dict[str, Tensor] = self._known[segment]
        if name not in known:
            known |= self._readers[segment]({name: self._specs[segment][name]})
        return known[name]


_LEAVES: Final = frozenset({"tensor", "jagged", "strided"})
LEVELS: Final = frozenset({"td", "class", "lazy"})


def name_stacked(stack: AbstractContainer, dim: int, name: str | None) -> AbstractContainer:
    """Return a new lazy stack whose stacked dimension has a name, if there is one."""
    if name is not None:
        batch = stack._kd_desc.batch
        named = with_names(batch[dim : dim + 1], (name,))
        stack._kd_describe(stack._kd_desc.with_batch((*batch[:dim], *named, *batch[dim + 1 :])))
    return stack


def instance_of(
    name: object, version: object, entries: dict[str, Entry], desc: Descriptor
) -> AbstractContainer:
    """Return an instance of a class that is not registered, or a plain container and a warning."""
    cls = class_defined(name, version)
    if cls is not None:
        try:
            made = object.__new__(cls)._kd_like(entries, desc)
        except (AttributeError, KdError):  # what its `_kd_like` needs is not in a file
            made = None
        if type(made) is cls:
            return made
    warn_unknown(name)
    return _as_container(registry.make_dense(entries, desc))


def _as_container(node: object) -> AbstractContainer:
    if not isinstance(node, AbstractContainer):
        raise FormatError(f"expected a container, got {a_type(node)}. {RESTORE}")
    return node


def _sizes_of(sizes: object) -> tuple[int, ...]:
    if not isinstance(sizes, list):
        raise _invalid("shape", sizes)
    for size in sizes:
        if type(size) is not int or not 0 <= size <= _LARGEST:
            raise _invalid("shape", sizes)
    return tuple(sizes)


def _list_of(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _invalid("list", value)
    return value


def _nodes_of(pairs: list[tuple[str, object]], path: KeyPath) -> dict[str, Any]:
    """Return the nodes of a level, whose pairs `specs_of` checked."""
    nodes = dict(pairs)
    if len(nodes) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"key {format_key((*path, twice))} is given twice. {RESTORE}")
    return nodes


def _kind_of(node: object) -> tuple[str, object]:
    if isinstance(node, dict) and len(node) == 1:
        for kind in node:  # without a copy: "io" in the benchmarks
            return kind, node[kind]
    raise _invalid("node", node)


def _bytes_of(blob: Tensor) -> bytes:
    if blob.dtype is not torch.uint8 or blob.ndim != 1:
        raise _invalid("rows", blob.shape)
    return bytes(blob.tolist()) if blob.numel() < 1024 else blob.cpu().numpy().tobytes()


def end_of(offsets: Tensor, lengths: Tensor | None) -> int:
    """Return where the rows of a jagged tensor end, which torch does not check.

    Raises:
        FormatError: if a row starts before the first element, or ends before it starts.
    """
    if offsets.ndim != 1 or not len(offsets) or offsets.dtype not in (torch.int32, torch.int64):
        raise _invalid("tensor of offsets", tuple(offsets.shape))
    starts, ends = offsets[:-1], offsets[1:]
    sizes = ends - starts
    if lengths is not None:
        if lengths.shape != ends.shape or lengths.dtype != offsets.dtype:
            raise _invalid("tensor of lengths", tuple(lengths.shape))
        sizes = torch.minimum(sizes, lengths)
        ends = starts + lengths
    if bool((offsets < 0).any() | (sizes < 0).any() | (ends < starts).any()):
        raise _invalid("jagged tensor", tuple(offsets.shape))
    return int(ends.max()) if len(ends) else 0


def check_rows(values: Tensor, sizes: Tensor) -> None:
    """Check that rows of some sizes are all the values, which torch does not check."""
    if values.ndim != 1 or sizes.ndim != 2 or sizes.dtype is not torch.int64 or not sizes.shape[1]:
        raise _invalid("tensor of sizes", tuple(sizes.shape))
    rows = sizes.tolist()
    if any(size < 0 for row in rows for size in row) or sum(map(math.prod, rows)) != len(values):
        raise _invalid("nested tensor", tuple(values.shape))


def _check_there(wanted: dict[str, Wanted], keys: Collection[str], path: KeyPath) -> None:
    for key in wanted:
        if key not in keys:
            where = format_key((*path, key))
            near = nearest_key(key, keys)
            text = f"key {where} not found in the file; available keys: {listed(keys)}."
            raise KeyNotFound(text if near is None else f"{text} Did you mean {format_key(near)}?")


def _does_not_fit(path: KeyPath) -> FormatError:
    return FormatError(
        f"the shape of entry {format_key(path)} does not start with the batch size. {RESTORE}"
    )


def _too_deep() -> FormatError:
    return FormatError(f"containers are nested more than {MAX_DEPTH} levels deep. {RESTORE}")


def _invalid(kind: str, value: object) -> FormatError:
    return FormatError(f"{str(value)[:80]!r} is not a valid {kind} of a manifest. {RESTORE}")
