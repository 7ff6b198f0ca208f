"""What `vmap` did to the tensors of a container between taking it apart and putting it together.

torch takes a container apart before it reads `in_dims` and `out_dims`, and counts them on each
tensor: -1 is the last feature of a leaf, not the last batch dimension. No argument tells a pytree
node what it is flattened for, but the tensors that come back do. What enters `vmap` is taken apart
outside of a level of functorch and put together inside, where a mapped tensor knows which of its
dimensions is hidden. What leaves it is taken apart and put together at one level; in between the
hidden dimension of each tensor becomes an ordinary one, in a view of the same strides.

While a graph is traced nothing of this is known, and dimensions are as torch counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.descriptor import Descriptor, describe
from kd_core._containers.unbatched import UnbatchedTensor, wrap_tensor
from kd_core._errors import InvalidValue
from kd_core._keys import format_key
from kd_core._nodes.entry import TensorData
from kd_core._protocol.primitives import AbstractContainer
from kd_core._torch_private import (
    get_unwrapped,
    is_batchedtensor,
    maybe_current_level,
    maybe_get_bdim,
    maybe_get_level,
    torch_tree,
)


class Mapped(NamedTuple):
    """A tensor as it was inside `vmap`.

    Attributes:
        hidden: the dimension that the level hides.
        shape: its shape with the hidden dimension.
        strides: its strides with the hidden dimension.
    """

    hidden: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Level(NamedTuple):
    """Where in nested transforms of functorch a container was taken apart.

    Attributes:
        number: the level.
        mapped: its tensors, as far as `vmap` maps them there.
    """

    number: int
    mapped: tuple[Mapped | None, ...]


class Moved(NamedTuple):
    """A dimension that `vmap` took from all tensors of a container, or gave to them.

    Attributes:
        dim: the dimension, counted from the first.
        given: whether the container left `vmap`, which gave the dimension back.
    """

    dim: int
    given: bool


def level_of(children: Iterable[object]) -> Level | None:
    """Return where a container of these children is taken apart; `None` outside of transforms."""
    number = maybe_current_level()
    if number is None or is_compiling():
        return None
    mapped = tuple(_as_mapped(tensor, number) for tensor in _tensors(children))
    return Level(number, mapped if any(mapped) else ())


def _as_mapped(tensor: Tensor, number: int) -> Mapped | None:
    if not is_mapped(tensor, number):
        return None
    inside = get_unwrapped(tensor)
    if inside.layout is not torch.strided or inside.is_nested:
        return None
    return Mapped(maybe_get_bdim(tensor), tuple(inside.shape), inside.stride())


def moved_by_vmap(children: list[object], before: Level | None, ndim: int) -> Moved | None:
    """Return which dimension `vmap` took or gave; `None` if something else made the children.

    Args:
        children: what the container is rebuilt from.
        before: where it was taken apart.
        ndim: how many batch dimensions it had then.

    Raises:
        InvalidValue: if the container has a batch, and the dimension is not one of it.
    """
    number = maybe_current_level()
    if number is None or is_compiling():
        return None
    if before is None or before.number != number:
        dims = [maybe_get_bdim(each) for each in _tensors(children) if is_mapped(each, number)]
        if dims and ndim and max(dims) >= ndim:
            raise _not_of_the_batch("in_dims", max(dims), ndim)
        return Moved(dims[0], given=False) if dims else None
    moved: Moved | None = None
    for tensor, mapped in zip(_tensors(children), before.mapped, strict=False):
        dim = -1 if mapped is None or is_mapped(tensor, number) else _put_back(tensor, mapped)
        if dim > ndim:
            raise _not_of_the_batch("out_dims", dim, ndim + 1)
        if dim >= 0 and moved is None:
            moved = Moved(dim, given=True)
    return moved


def stand_for_dims(children: list[object]) -> bool:
    """Return whether `vmap` fills a structure with zeros to compare it with `out_dims`.

    A container counts as one output there, as a tensor does: `out_dims=(0,)` is for all of it.
    So zeros are rebuilt to a tuple of one.
    """
    if not children or children[0].__class__ is not int or maybe_current_level() is None:
        return False
    return not is_compiling() and all(each.__class__ is int and each == 0 for each in children)


def is_mapped(tensor: Tensor, level: int) -> bool:
    """Return whether `vmap` hides a dimension of a tensor at a level."""
    return is_batchedtensor(tensor) and maybe_get_level(tensor) == level


def _put_back(tensor: Tensor, before: Mapped) -> int:
    """Return where the hidden dimension of a tensor is now; -1 if it is another tensor."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return -1
    sizes, strides, hidden = list(before.shape), list(before.strides), before.hidden
    size, stride = sizes.pop(hidden), strides.pop(hidden)
    shape, found = tuple(tensor.shape), tensor.stride()
    for dim in range(len(sizes) + 1):
        if shape == (*sizes[:dim], size, *sizes[dim:]) and found == (
            *strides[:dim],
            stride,
            *strides[dim:],
        ):
            return dim
    return -1


def _tensors(children: Iterable[object]) -> Iterator[Tensor]:
    """Iterate over the tensors of children that have all dimensions of their container."""
    for child in children:
        if isinstance(child, Tensor):
            yield child
        elif isinstance(child, AbstractContainer) and child._kd_owns_leaves:
            yield from _tensors(child._kd_entries.values())


def refuse_rows(key: str, moved: Moved) -> None:
    """Refuse data with one value per row, which `vmap` cannot map, where its rows would move."""
    if moved.dim:
        name = "out_dims" if moved.given else "in_dims"
        raise InvalidValue(
            f"non-tensor entry {format_key(key)} has one value per row, so `{name}` of `vmap` "
            f"must be 0, got {moved.dim}. `exclude` the entry, or `transpose` the container first."
        )


def _not_of_the_batch(name: str, dim: int, count: int) -> InvalidValue:
    return InvalidValue(
        f"`{name}` of `vmap` must be a batch dimension of a container, from 0 to {count - 1}, got "
        f"dimension {dim} of a leaf, which torch counts on each tensor. Count batch dimensions "
        "from the first, or pass a dict of tensors to map features."
    )


def _flatten_unbatched(entry: UnbatchedTensor) -> tuple[list[object], None]:
    return [entry._tensor], None


def _flatten_unbatched_with_keys(
    entry: UnbatchedTensor,
) -> tuple[list[tuple[torch_tree.KeyEntry, object]], None]:
    return [(torch_tree.GetAttrKey("data"), entry._tensor)], None


def _unflatten_unbatched(values: Iterable[object], constant: None) -> UnbatchedTensor:
    [tensor] = values
    return wrap_tensor(tensor, describe(()))  # type: ignore[arg-type]  # or what stands for one


def refuse_mapped(key: str, entry: object) -> None:
    """Refuse a tensor without batch dimensions whose first dimension `vmap` has mapped."""
    if isinstance(entry, UnbatchedTensor) and is_batchedtensor(entry._tensor):
        raise InvalidValue(
            f"entry {format_key(key)} is an `UnbatchedTensor`, whose first dimension `vmap` would "
            "map. `exclude` the entry, and pass the tensor with `in_dims=None`."
        )


def given_rows(entry: TensorData, dim: int, desc: Descriptor) -> Tensor | TensorData:
    """Return an entry that left `vmap`, which gave its tensor a dimension.

    It is one tensor for the whole batch still where torch repeated it along that dimension; else
    it has other values along one dimension of the batch, and becomes an entry with all of them.
    """
    tensor = entry._tensor
    if tensor.layout is torch.strided and not tensor.is_nested and tensor.stride(dim) == 0:
        return wrap_tensor(tensor.select(dim, 0), desc)
    features = tensor.movedim(dim, 0).shape[1:]
    rows = tensor.movedim(dim, 0)
    return rows[(slice(None), *(None,) * (desc.ndim - dim - 1))].expand(*desc.size, *features)


def _dump_unbatched(constant: object) -> None:
    """Convert the structure to a JSON value: there is none."""


torch_tree.register_pytree_node(
    UnbatchedTensor,
    _flatten_unbatched,
    _unflatten_unbatched,
    serialized_type_name="kd_core.UnbatchedTensor",
    to_dumpable_context=_dump_unbatched,
    from_dumpable_context=_dump_unbatched,
    flatten_with_keys_fn=_flatten_unbatched_with_keys,
)
