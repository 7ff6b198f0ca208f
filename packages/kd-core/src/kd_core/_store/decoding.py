"""A container from the nodes of a manifest; see `encoding` for their form.

What a file says is checked as an argument of a user is: each shape, batch size, key and number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe, device_of
from kd_core._batch.names import checked_names, with_names
from kd_core._errors import (
    FormatError,
    KdError,
    KeyNotFound,
    MissingDependency,
    a_type,
    listed,
    walks_through_leaf,
)
from kd_core._keys import KeyPath, format_key, nearest_key, path_of, several
from kd_core._leaves.loops import leaf_fits
from kd_core._leaves.nested import strided_view
from kd_core._nodes import registry
from kd_core._protocol.primitives import AbstractContainer
from kd_core._protocol.validation import MAX_DEPTH
from kd_core._store.appending import check_parts, parts_of
from kd_core._store.canonical import RESTORE, parsed
from kd_core._store.dtypes import DTYPES
from kd_core._store.registered import class_defined, class_named, warn_unknown
from kd_core._store.segments import Spec
from kd_core._store.values import read

if TYPE_CHECKING:
    from kd_core._batch.descriptor import Descriptor
    from kd_core._nodes.entry import Entry
    from kd_core._types import NestedKey

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
            case _:
                raise _invalid(kind, value)

    def _level(self, entries: list[object], depth: int) -> None:
        for pair in entries:
            if pair.__class__ is not list or len(pair) != 2 or pair[0].__class__ is not str:
                raise _invalid("entry", pair)
            node = pair[1]
            # Tensors are the most frequent nodes: "io" in the benchmarks.
            if node.__class__ is dict and len(node) == 1 and "tensor" in node:
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
                    return _instance_of(name, version, entries, desc)
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
        return _as_container(registry.cat_rows(parts))

    def _stack(
        self, members: list[object], dim: int, name: str | None, wanted: Wanted, path: KeyPath
    ) -> AbstractContainer:
        built = [self._container(member, wanted, path) for member in members]
        stack = _as_container(registry.lazy_stack(built, dim))
        if name is not None:
            batch = stack._kd_desc.batch
            named = with_names(batch[dim : dim + 1], (name,))
            stack._kd_describe(stack._kd_desc.with_batch((*batch[:dim], *named, *batch[dim + 1 :])))
        return stack

    def _level(
        self, level: Mapping[Any, object], wanted: Wanted, path: KeyPath
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
                return registry.wrap_tensor(self._leaf(inside, leaf_node), above)
            case "rows", {"values": blob, **more}:
                desc = self._descriptor_of(more) if more else above
                values = _list_of(read(parsed(_bytes_of(self.leaf_of(blob)), "non-tensor data")))
                if len(values) != math.prod(desc.batch) or desc.batch[: above.ndim] != above.batch:
                    raise _does_not_fit(path)
                return registry.wrap_list(values, desc)
            case "data", {
                "constant": bool(constant),
                "of_batch": bool(of_batch),
                "value": data,
                **more,
            }:
                desc = self._descriptor_of(more) if more else above
                if desc.batch[: above.ndim] != above.batch:
                    raise _does_not_fit(path)
                return registry.restore_data(read(data), desc, constant, of_batch)
        raise _invalid(kind, value)

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
                    _check_rows(values, sizes)
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
                    self._ends[rows] = _end_of(offsets, lengths)
                if not 1 <= dim <= values.ndim or self._ends[rows] > values.shape[dim - 1]:
                    raise _invalid("jagged tensor", tuple(values.shape))
                ragged = id(values), *rows, dim
                if ragged not in self._ragged:
                    self._ragged[ragged] = torch.nested.nested_tensor_from_jagged(
                        values, offsets, lengths, jagged_dim=dim
                    )
                return self._ragged[ragged]
        raise _invalid("jagged", value)

    def _descriptor_of(self, level: Mapping[Any, object]) -> Descriptor:
        batch = _sizes_of(level.get("batch"))
        names, named = level.get("names"), level.get("device")
        if names is not None:
            batch = with_names(batch, checked_names(cast("list[str]", _list_of(names)), batch))
        if named is None and not self._everywhere:
            return describe(batch)
        return describe(batch, self._places(named) if self._places else device_of("cpu"))

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


def _instance_of(
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


def _list_of(value: object) -> list[object]:
    if not isinstance(value, list):
        raise _invalid("list", value)
    return value


def _nodes_of(pairs: Any, path: KeyPath) -> dict[str, Any]:
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


def _end_of(offsets: Tensor, lengths: Tensor | None) -> int:
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


def _check_rows(values: Tensor, sizes: Tensor) -> None:
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
