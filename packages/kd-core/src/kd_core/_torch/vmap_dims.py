"""What `vmap` maps: `in_dims` and `out_dims` checked against the batch dimensions of containers.

torch takes a container apart before it reads `in_dims` and `out_dims`, and counts them on each
tensor: -1 is the last feature of a leaf, not the last batch dimension, and a dimension beyond the
batch is one of the features. No hook tells a pytree node what it is flattened for, so the frame
that called `tree_flatten` is looked at. While a graph is traced there is no such frame.

A tensor without batch dimensions is a pytree node with one child, which `vmap` does not map.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, cast

from torch import Tensor
from torch._C._functorch import is_batchedtensor, maybe_current_level, maybe_get_level
from torch._functorch import vmap
from torch.compiler import is_compiling
from torch.utils import _pytree

from kd_core._batch.descriptor import describe
from kd_core._containers.non_tensor import NonTensorDataBase
from kd_core._containers.non_tensor_stack import NonTensorStack
from kd_core._containers.unbatched import UnbatchedTensor, wrap_tensor
from kd_core._errors import InvalidValue
from kd_core._keys import format_key
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType, FrameType

    from kd_core._types import Batch


class _Mapping:
    """One of the two functions of `vmap` that flatten containers.

    Attributes:
        dims: the local variable with the dimensions, named as the argument of `vmap`.
        tree: the local variable that is flattened.
        new: how many dimensions the result has beyond those of the flattened container.
    """

    __slots__ = ("dims", "new", "tree")

    def __init__(self, dims: str, tree: str, new: int) -> None:
        self.dims = dims
        self.tree = tree
        self.new = new


_MAPPINGS: Final[dict[CodeType, _Mapping]] = {
    vmap._process_batched_inputs.__code__: _Mapping("in_dims", "args", 0),
    vmap._unwrap_batched.__code__: _Mapping("out_dims", "batched_outputs", 1),
}
_FIRST: Final = 0
_RECURSION: Final = frozenset({"tree_flatten", "helper", "_tree_flatten_helper", "<listcomp>"})
"""The functions of `torch.utils._pytree` between the caller of `tree_flatten` and a node."""


def check_mapped_dims(container: AbstractContainer, depth: int = 2) -> None:
    """Refuse dimensions of a `vmap` that are not dimensions of the batch.

    Args:
        container: what is flattened.
        depth: how many frames above this one torch's own begin.

    Raises:
        InvalidValue: naming the dimension, the batch size and the remedy.
    """
    if is_compiling():
        return
    frame = _flattening(depth + 1)
    mapping = _MAPPINGS.get(frame.f_code)
    if mapping is None:
        return
    values = frame.f_locals
    count = container._desc.ndim + mapping.new
    dims = values[mapping.dims]
    if count and dims.__class__ is tuple and all(dim is None or dim is _FIRST for dim in dims):
        return  # whatever the tree, nothing but a first dimension is mapped
    for dim in _dims_for(container, dims, values[mapping.tree]):
        if dim.__class__ is int and not 0 <= dim < count:
            raise _not_of_the_batch(mapping.dims, dim, container._desc.batch, count)
        if dim.__class__ is int and dim:
            _refuse_rows(container, mapping.dims, dim)


def is_for_vmap(depth: int) -> bool:
    """Return whether `vmap` flattens a container; it is not known while a graph is traced.

    Args:
        depth: how many frames above this one torch's own begin.
    """
    return _flattening(depth + 1).f_code in _MAPPINGS


def is_constant_of_vmap(tensor: Tensor, depth: int = 3) -> bool:
    """Return whether `vmap` flattens a tensor without batch dimensions, which it must not map.

    Args:
        tensor: the tensor.
        depth: how many frames above this one torch's own begin.

    Raises:
        InvalidValue: if it comes out of `vmap` and was computed from what is mapped.
    """
    mapping = _MAPPINGS.get(_flattening(depth).f_code)
    if mapping is None:
        return False
    level = maybe_current_level()
    if mapping.new and level is not None and maybe_get_level(tensor) == level:
        raise InvalidValue(
            "an `UnbatchedTensor` that leaves `vmap` must not depend on what is mapped, as it has "
            "one value for all rows. Store the tensor itself, which becomes one value for each row."
        )
    return True


def _flattening(depth: int) -> FrameType:
    """Return the frame that called `tree_flatten`."""
    frame = sys._getframe(depth)
    while frame.f_code.co_name in _RECURSION and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _refuse_rows(container: AbstractContainer, name: str, dim: int) -> None:
    """Refuse data with one value per row, which `vmap` cannot map, where its rows would move."""
    for key, value in container._entries.items():
        if isinstance(value, AbstractContainer):
            _refuse_rows(value, name, dim)
        elif isinstance(value, NonTensorDataBase) and isinstance(value._constant(), NonTensorStack):
            raise InvalidValue(
                f"non-tensor entry {format_key(key)} has one value per row, so `{name}` of `vmap` "
                f"must be 0, got {dim}. `exclude` the entry, or `transpose` the container first."
            )


def _dims_for(container: AbstractContainer, dims: object, tree: object) -> Iterable[int]:
    """Return the dimensions that `vmap` was told for the tensors of a container."""
    if dims.__class__ is int:
        return (dims,)
    items, spec = _pytree.tree_flatten(tree, is_leaf=_is_container)
    each = _pytree._broadcast_to_and_flatten(dims, spec, is_leaf=_is_container) or ()
    return [
        dim
        for item, below in zip(items, each, strict=False)
        if item is container
        for dim in _pytree.tree_leaves(below)
    ]


def _is_container(value: object) -> bool:
    return isinstance(value, AbstractContainer)


def _not_of_the_batch(name: str, dim: int, batch: Batch, count: int) -> InvalidValue:
    if not count:
        remedy = "Give the container a batch with `auto_batch_size_`, or pass `None` for it."
    else:
        remedy = f"Pass {dim % count} for it." if -count <= dim < 0 else "Map a batch dimension."
    allowed = f"from 0 to {count - 1}" if count else "`None`"
    return InvalidValue(
        f"`{name}` of `vmap` must be a batch dimension of a container, {allowed} for one of "
        f"batch_size {tuple(batch)}, got {dim}. {remedy}"
    )


def _flatten_unbatched(entry: UnbatchedTensor) -> tuple[list[object], UnbatchedTensor | None]:
    """Return the tensor as a child; `vmap`, which would map it, gets the entry as a constant."""
    if is_compiling() or not is_constant_of_vmap(entry._tensor):
        return [entry._tensor], None
    return [], entry


def _flatten_unbatched_with_keys(
    entry: UnbatchedTensor,
) -> tuple[list[tuple[_pytree.KeyEntry, object]], UnbatchedTensor | None]:
    children, constant = _flatten_unbatched(entry)
    return [(_pytree.GetAttrKey("data"), child) for child in children], constant


def _unflatten_unbatched(
    values: Iterable[object], constant: UnbatchedTensor | None
) -> UnbatchedTensor:
    if constant is not None:
        return constant
    [tensor] = values
    if is_compiling() and isinstance(tensor, Tensor) and is_batchedtensor(tensor):
        raise InvalidValue(
            "an `UnbatchedTensor` cannot be passed to `vmap` in compiled code, which would map its "
            "first dimension. `exclude` the entry, and pass the tensor with `in_dims=None`."
        )
    return wrap_tensor(cast("Tensor", tensor), describe(()))  # or what stands for one


def _dump_unbatched(constant: object) -> None:
    """Convert the structure to a JSON value; `vmap`, which has another one, saves nothing."""


_pytree.register_pytree_node(
    UnbatchedTensor,
    _flatten_unbatched,
    _unflatten_unbatched,
    serialized_type_name="kd_core.UnbatchedTensor",
    to_dumpable_context=_dump_unbatched,
    from_dumpable_context=_dump_unbatched,
    flatten_with_keys_fn=_flatten_unbatched_with_keys,
)
