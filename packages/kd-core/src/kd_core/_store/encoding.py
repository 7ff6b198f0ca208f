"""A container as nodes of a manifest.

A node is an object with one key, its kind:

| kind | value |
| --- | --- |
| `td` | batch size, names of dimensions, device, and `[key, node]` for each entry |
| `class` | its name, its version (0 if not registered), and what `td` has, perhaps a state |
| `lazy` | dimension, its name, and the node of each member |
| `cat` | the nodes of the parts, joined along the first dimension |
| `tensor` | position of the segment, name in it, dtype, shape |
| `jagged` | nodes of values, offsets and perhaps lengths, and the ragged dimension |
| `strided` | nodes of the values of all rows and of the sizes of each: another nested tensor |
| `unbatched` | the node of a tensor that does not start with the batch size |
| `data` | non-tensor data of the whole batch |
| `rows` | the node of a tensor of bytes: non-tensor data of all rows, as canonical JSON |

Keys are strings of JSON and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from kd_core._batch.descriptor import describe
from kd_core._batch.names import names_of, without_names
from kd_core._errors import InvalidValue
from kd_core._keys import KeyPath, format_key
from kd_core._leaves.nested import strided_parts
from kd_core._nodes import registry
from kd_core._nodes.entry import is_row_data, is_unbatched
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer
from kd_core._store.canonical import canonical
from kd_core._store.dtypes import NAMES, WIRE
from kd_core._store.mapped_tensor import MemoryMappedTensor, SealedTensor
from kd_core._store.registered import BY_FULL_NAME, CLASSES, full_name
from kd_core._store.segments import Spec
from kd_core._store.values import written
from kd_core._torch_private import ragged_dim

if TYPE_CHECKING:
    from kd_core._batch.descriptor import Descriptor
    from kd_core._nodes.entry import Entry, Node

Json = dict[str, object]


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
            return self._leaf(value, path)
        if isinstance(value, AbstractContainer):
            return self.node_of(value, path)
        if is_unbatched(value):
            node = self._leaf(value._tensor, path)
            if "tensor" in node:  # no row, but neither is it filled later
                self.rows.append(self._known[id(value._tensor)])
            return {"unbatched": node}
        more = {} if value._kd_desc.batch == above.batch else self._batch_of(value._kd_desc)
        if is_row_data(value):
            blob = blob_of(written(_row_values(value), path))
            node = self.add(blob, path)
            self.rows.append(self._known[id(blob)])
            return {"rows": {**more, "values": node}}
        constant, of_batch = registry.state_of_data(value)
        data = written(value._kd_item(), path)
        return {"data": {**more, "constant": constant, "of_batch": of_batch, "value": data}}

    def _leaf(self, leaf: Tensor, path: KeyPath) -> Json:
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
        lengths: Tensor | None = leaf.lengths()  # type: ignore[attr-defined]  # of a nested tensor
        parts: list[Tensor | None] = [leaf.values(), leaf.offsets(), lengths]  # type: ignore[attr-defined]  # as above
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


def _row_values(node: Node) -> object:
    """Return the values of all rows in one list."""
    return cast("tuple[object, tuple[object, ...]]", node.__reduce__())[1][0]


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
