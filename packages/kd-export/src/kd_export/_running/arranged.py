"""Nested dicts and containers on the quick way from a flat dict to another.

What is not arranged just as the schema says is left to the checks of the session, which tell why.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from kd_export._errors import Key, ShapeMismatch
from kd_export._running.backend import Direct
from kd_export._schema.schema import Schema
from kd_export._schema.wire import nest, wire_name

if TYPE_CHECKING:
    from torch import Tensor

    from kd_core import TensorDictBase


class Arranged:
    """A program that takes nested dicts and containers as quickly as it takes a flat dict.

    Beside a network of two layers, a call then takes half of what the checks make of it.
    """

    def __init__(self, schema: Schema, direct: Direct) -> None:
        self._direct = direct
        self._inputs = [(entry.key, entry.wire) for entry in schema.inputs]
        self._outputs = [(entry.key, entry.wire) for entry in schema.outputs]
        # Top-level keys alone are a flat dict, whose words are wire names.
        is_nested = any(len(key) > 1 for key, _ in self._inputs)
        self._tree = nest(dict(self._inputs)) if is_nested else None

    def run(self, x: object) -> object | None:
        """Run the program; ``None`` if the inputs are not what the quick way takes."""
        if x.__class__ is dict:
            flat: dict[str, object] = {}
            if self._tree is None or not _take(self._tree, x, flat):
                return None
            found = self._found(flat)
            return None if found is None else nest(found)
        container = as_container(x)
        if container is None:
            return None
        found = self._found({wire: container.get(key) for key, wire in self._inputs})
        return None if found is None else written_like(container, found)

    def _found(self, flat: dict[str, object]) -> dict[Key, object] | None:
        results = self._direct(flat)
        return None if results is None else {key: results[wire] for key, wire in self._outputs}


def _take(tree: Mapping[str, object], x: object, flat: dict[str, object]) -> bool:
    """Read the values of a nested dict that has just the keys of a tree of wire names."""
    if not isinstance(x, dict) or len(x) != len(tree):
        return False
    for part, below in tree.items():
        if part not in x:
            return False
        if below.__class__ is str:
            flat[below] = x[part]
        elif not _take(cast("Mapping[str, object]", below), x[part], flat):
            return False
    return True


def as_container(x: object) -> TensorDictBase | None:
    """Return the value if it is a container."""
    # It can only be one of kd_core's if kd_core has been imported.
    core = sys.modules.get("kd_core")
    return cast("TensorDictBase", x) if core is not None and core.is_tensor_collection(x) else None


def written_like(container: TensorDictBase, found: Mapping[Key, object]) -> TensorDictBase:
    """Write results into an empty container like another one.

    Raises:
        ShapeMismatch: If a result does not have the batch dimensions of the container.
    """
    result = container.empty()
    batch = tuple(container.batch_size)
    for key, value in found.items():
        try:
            result.set(key, value)
        except ValueError:
            shape = tuple(cast("Tensor", value).shape)
            if shape[: len(batch)] == batch:
                raise
            raise ShapeMismatch(
                f"the shape of output `{wire_name(key)}` must start with the batch size {batch} of "
                f"the container, got {shape}.",
                key=key,
                expected=batch,
                got=shape,
                hint="Pass a dict of the inputs, or a container of `batch_size=[]`.",
            ) from None
    return result
