"""Containers of the package tensordict, and back, without copying tensors.

A container of that package has imported it, so reading one imports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from torch import Tensor

from kd_core._batch.descriptor import describe, describe_on
from kd_core._convert.optional import load
from kd_core._errors import wrong_type
from kd_core._nodes import registry
from kd_core._nodes.entry import is_row_data, is_unbatched
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer
from kd_core._protocol.validation import is_foreign, is_foreign_unbatched, values_of_rows
from kd_core._torch_private import without_torch_function

if TYPE_CHECKING:
    from kd_core._batch.descriptor import Descriptor
    from kd_core._nodes.entry import Entry, Node

    Foreign: TypeAlias = Any

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
        return registry.wrap_list(rows, desc)
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
        return registry.wrap_tensor(leaf.as_subclass(Tensor), describe(()))


def _plain_list(values: object) -> object:
    return [_plain_list(value) for value in values] if isinstance(values, list) else values


def container_of(td: AbstractContainer) -> object:
    """Return a container of the package tensordict that shares the tensors of one of ours.

    Raises:
        MissingDependency: if that package is not installed.
    """
    return cast("object", _given_back(load("tensordict", "to_tensordict_library"), td))


def _given_back(library: Foreign, node: Node | AbstractContainer) -> Foreign:
    desc = node._kd_desc
    if isinstance(node, Composite):
        members = [_given_back(library, member) for member in node._members]
        return library.LazyStackedTensorDict(*members, stack_dim=node._dim)
    if not isinstance(node, AbstractContainer):
        if is_unbatched(node):
            return library.UnbatchedTensor(node._tensor)
        if is_row_data(node):
            return _rows(library, node._kd_item(), desc, len(desc.batch))
        return library.NonTensorData(node._kd_item(), batch_size=desc.batch, device=desc.device)
    made = library.TensorDict({}, batch_size=desc.batch, device=desc.device)
    for key, entry in node._kd_entries.items():
        made.set(key, entry if isinstance(entry, Tensor) else _given_back(library, entry))
    return made


def _rows(library: Foreign, values: object, desc: Descriptor, dims: int) -> Foreign:
    if dims == 0:
        return library.NonTensorData(values, batch_size=(), device=desc.device)
    inner = [_rows(library, value, desc, dims - 1) for value in cast("Sequence[object]", values)]
    return library.NonTensorStack(*inner, stack_dim=0)


registry.register("foreign_node", node_of)
registry.register("foreign_tensor", unbatched_of)
