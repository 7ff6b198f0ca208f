"""Tensors without batch dimensions as pytree nodes: one child, which `vmap` does not map."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.compiler import is_compiling
from torch.utils import _pytree

from kd_core._batch.descriptor import describe
from kd_core._containers.unbatched import UnbatchedTensor, wrap_tensor
from kd_core._errors import InvalidValue
from kd_core._torch.vmap_dims import is_constant_of_vmap

if TYPE_CHECKING:
    from collections.abc import Iterable


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
