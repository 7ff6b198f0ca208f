"""Lazy stacks whose entries cannot be stacked, as pytree nodes: their members are the children.

They are rebuilt as lazy stacks. `vmap` counts dimensions on each tensor, and those of a member lack
the stacked one; `pytree` refuses such stacks there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from kd_core._batch.names import names_of
from kd_core._containers.lazy_stack import restore_stack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kd_core._base import TensorDictBase
    from kd_core._containers.lazy_stack import LazyStackedTensorDict
    from kd_core._protocol.composite import Composite

Dumped: TypeAlias = dict[str, object]
"""A structure as JSON values."""


class Members(NamedTuple):
    """The structure of a stack without its members.

    Attributes:
        dim: the batch dimension along which they are stacked.
        name: the name of that dimension.
    """

    dim: int
    name: str | None


def structure_of(stack: Composite) -> Members:
    """Return the structure of a stack."""
    return Members(stack._dim, names_of(stack._desc.batch)[stack._dim])


def stack_of(cls: type, members: Iterable[object], structure: Members) -> LazyStackedTensorDict:
    """Rebuild a stack.

    Raises:
        InvalidArgument: if something other than a container was put in place of a member.
        ShapeMismatch: if the batch sizes of the members differ.
    """
    kind = cast("type[LazyStackedTensorDict]", cls)
    found = cast("list[TensorDictBase]", list(members))
    return restore_stack(kind, found, structure.dim, False, structure.name)


def dumped(structure: Members) -> Dumped:
    """Convert the structure to JSON values."""
    return {"dim": structure.dim, "name": structure.name}


def loaded(parts: Dumped) -> Members | None:
    """Return the structure of JSON values; `None` if they are those of another kind of node."""
    if "dim" not in parts:
        return None
    return Members(cast("int", parts["dim"]), cast("str | None", parts["name"]))
