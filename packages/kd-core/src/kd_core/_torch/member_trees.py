"""Lazy stacks whose entries cannot be stacked, as pytree nodes: their members are the children.

They are rebuilt as lazy stacks. `vmap` counts dimensions on each tensor, and those of a member lack
the stacked one: such stacks are refused there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.names import names_of
from kd_core._containers.lazy_stack import built_stack
from kd_core._errors import KdError, ShapeMismatch
from kd_core._torch.vmap_dims import Level, is_mapped
from kd_core._torch_private import maybe_current_level

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
        ndim: how many batch dimensions a member has.
        level: where the stack was taken apart, in transforms of functorch.
    """

    dim: int
    name: str | None
    ndim: int = -1
    level: Level | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Members):
            return NotImplemented
        return self.dim == other.dim and self.name == other.name

    def __ne__(self, other: object) -> bool:  # or that of `tuple` would be used
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:2])


def structure_of(stack: Composite) -> Members:
    """Return the structure of a stack."""
    name = names_of(stack._kd_desc.batch)[stack._dim]
    return Members(stack._dim, name, stack._members[0]._kd_desc.ndim)


def stack_of(cls: type, members: Iterable[object], structure: Members) -> LazyStackedTensorDict:
    """Rebuild a stack.

    Raises:
        InvalidArgument: if something other than a container was put in place of a member.
        ShapeMismatch: if the batch sizes of the members differ, or `vmap` maps the stack.
    """
    kind = cast("type[LazyStackedTensorDict]", cls)
    found = cast("list[TensorDictBase]", list(members))
    stack = built_stack(kind, found, structure.dim, structure.name)
    level = maybe_current_level()
    if level is not None and not is_compiling():
        before = structure.level
        if before is None or before.number != level:
            leaves: list[Tensor] = []
            stack._kd_collect(leaves)
            values: list[object] = [*leaves]  # or what `tree_map` put in place of them
            mapped = any(is_mapped(leaf, level) for leaf in values if isinstance(leaf, Tensor))
        else:
            mapped = found[0]._kd_desc.ndim == structure.ndim + 1
        if mapped:
            raise _is_ragged(stack)
    return stack


def _is_ragged(stack: LazyStackedTensorDict) -> KdError:
    """Return the error for a stack that `vmap` would map."""
    for key in stack._kd_entries:
        try:
            stack._kd_entries[key]
        except KdError as error:
            return error
    return ShapeMismatch(
        "`vmap` cannot map a lazy stack whose members have other keys. Map one over its members, "
        "or `densify` it first."
    )


def dumped(structure: Members) -> Dumped:
    """Convert the structure to JSON values."""
    return {"dim": structure.dim, "name": structure.name}


def loaded(parts: Dumped) -> Members | None:
    """Return the structure of JSON values; `None` if they are those of another kind of node."""
    if "dim" not in parts:
        return None
    return Members(cast("int", parts["dim"]), cast("str | None", parts["name"]))
