"""Trees of torch (`torch.utils._pytree`) as containers that remember their structure, and back.

The structure of the tree is non-tensor data of the container, under the key `STRUCTURE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, cast

from torch import Tensor

from kd_core._errors import InvalidValue, KeyCollision, a_type
from kd_core._keys import format_key
from kd_core._leaves.loops import find_entry
from kd_core._protocol.primitives import AbstractContainer
from kd_core._torch_private import torch_tree

STRUCTURE: Final = "_pytree_type"


class Structure(NamedTuple):
    """What a tree is beside its leaves.

    Attributes:
        spec: its nodes.
        paths: the key of each leaf.
    """

    spec: torch_tree.TreeSpec
    paths: tuple[tuple[str, ...], ...]


def tree_of_pytree(pytree: object) -> dict[tuple[str, ...], object]:
    """Return the leaves of a tree by their paths, and its structure.

    Raises:
        InvalidValue: if the tree is a single leaf.
        KeyCollision: if two leaves have the same path.
    """
    leaves, spec = torch_tree.tree_flatten_with_path(pytree)
    entries: dict[tuple[str, ...], object] = {}
    for path, leaf in leaves:
        key = tuple(name for part in path for name in _names_of(part))
        if not key:
            raise InvalidValue(
                f"`pytree` must be a tree of several leaves, got {a_type(pytree)}. Wrap "
                "it in a dict or a list."
            )
        if key in entries:
            raise KeyCollision(f"two leaves of the tree have the path {format_key(key)}.")
        entries[key] = leaf
    paths = tuple(entries)
    entries[(STRUCTURE,)] = Structure(spec, paths)
    return entries


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
        leaves.append(entry if isinstance(entry, Tensor) else entry._kd_item())
    return cast("object", torch_tree.tree_unflatten(leaves, structure.spec))
