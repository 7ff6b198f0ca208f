"""The parts of a store as one, on its nodes: classes and types need not be registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from kd_core._keys import KeyPath
from kd_core._store.canonical import parsed
from kd_core._store.decoding import Decoder
from kd_core._store.encoding import Encoder, Json, blob_of


class Joiner:
    """Joins nodes whose rows fit, as `check_fits` says.

    Args:
        decoder: reads the tensors of the nodes.
        encoder: takes the tensors of the result.
    """

    def __init__(self, decoder: Decoder, encoder: Encoder) -> None:
        self._decoder = decoder
        self._encoder = encoder
        self._joined: dict[tuple[object, ...], Tensor] = {}

    def node_of(self, nodes: list[Json], path: KeyPath = ()) -> Json:
        """Return the node of rows, joined along their first dimension; of one node a copy."""
        [kind] = nodes[0]
        values: list[Any] = [node[kind] for node in nodes]
        match kind:
            case "td":
                return {kind: self._level(values, path)}
            case "class":
                name, version, _ = values[0]
                return {kind: [name, version, self._level([level for *_, level in values], path)]}
            case "lazy":
                members = [self.node_of([member], path) for v in values for member in v["members"]]
                return {kind: {**values[0], "members": members}}
            case "tensor":
                return self._encoder.add(self._tensor(nodes), path)
            case "jagged":
                return {kind: self._jagged(values, path)}
            case "strided":
                parts = [[value[at] for value in values] for at in range(2)]
                return {kind: [self.node_of(part, path) for part in parts]}
            case "rows":
                return {kind: {**_batch_of(values), "values": self._rows(values, path)}}
            case _:
                return {kind: {**values[0], **_batch_of(values)}}

    def _level(self, levels: list[Any], path: KeyPath) -> Json:
        others = [dict(level["entries"]) for level in levels]
        entries = [
            [key, self.node_of([entries[key] for entries in others], (*path, key))]
            for key, _ in levels[0]["entries"]
        ]
        return {**levels[0], **_batch_of(levels), "entries": entries}

    def _tensor(self, nodes: list[Json]) -> Tensor:
        leaves = [self._decoder.leaf_of(node) for node in nodes]
        if len(leaves) == 1:
            return leaves[0]
        return self._once(("tensor", *map(id, leaves)), lambda: _cat(leaves))

    def _once(self, what: tuple[object, ...], join: Callable[[], Tensor]) -> Tensor:
        """Return what is joined; what is under two keys stays one."""
        if what not in self._joined:
            self._joined[what] = join()
        return self._joined[what]

    def _rows(self, values: list[Any], path: KeyPath) -> Json:
        blobs = [self._decoder.leaf_of(value["values"]) for value in values]
        if len(blobs) == 1:
            return self._encoder.add(blobs[0], path)
        rows: list[object] = []
        for blob in blobs:
            rows += cast("list[object]", parsed(blob.numpy().tobytes(), "non-tensor data"))
        return self._encoder.add(blob_of(rows), path)

    def _jagged(self, values: list[Any], path: KeyPath) -> list[object]:
        *parts, dim = values[0]
        if len(values) == 1:
            return [None if part is None else self.node_of([part], path) for part in parts] + [dim]
        data, offsets = ([self._decoder.leaf_of(value[at]) for value in values] for at in (0, 1))
        bounds = tuple(map(id, offsets))
        joined = [
            self._once((dim, *map(id, data), *bounds), lambda: _cat_filled(data, offsets, dim - 1)),
            self._once(("offsets", *bounds), lambda: _cat_offsets(offsets)),
        ]
        return [*(self._encoder.add(part, path) for part in joined), None, dim]


def _batch_of(values: list[Any]) -> Json:
    if "batch" not in values[0] or len(values) == 1:
        return {key: values[0][key] for key in ("batch", "names", "device") if key in values[0]}
    rest = values[0]["batch"][1:]
    return {**_batch_of(values[:1]), "batch": [sum(v["batch"][0] for v in values), *rest]}


def _cat_filled(data: list[Tensor], offsets: list[Tensor], dim: int) -> Tensor:
    """Return the values of the rows of jagged tensors, without those in front and behind."""
    parts = zip(data, offsets, strict=True)
    return torch.cat(
        [part.narrow(dim, int(ends[0]), int(ends[-1] - ends[0])) for part, ends in parts], dim
    )


def _cat_offsets(offsets: list[Tensor]) -> Tensor:
    joined, end = [offsets[0][:1] * 0], 0
    for ends in offsets:
        joined.append(ends[1:] - ends[0] + end)
        end += int(ends[-1] - ends[0])
    return torch.cat(joined)


def _cat(leaves: list[Tensor]) -> Tensor:
    """Return rows of contiguous tensors of one dtype as one tensor, also where torch cannot."""
    octets = torch.cat([leaf.view(-1).view(torch.uint8) for leaf in leaves])
    rows = sum(len(leaf) for leaf in leaves)
    return octets.view(leaves[0].dtype).view(rows, *leaves[0].shape[1:])
