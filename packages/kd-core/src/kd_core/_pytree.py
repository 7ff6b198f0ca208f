"""Containers as pytree nodes: for `tree_map`, `vmap`, `torch.func` and `torch.export`.

Decisions:

- The children are the tensors in the order of their keys, as those of a dict are, which the
  structure holds. The tensors of a nested container that is rebuilt as a `TensorDict` are children
  of the outermost one, because every node of a tree slows `vmap` ("vmap over 3 sets" in the
  benchmarks). Nested containers of other kinds are children. Non-tensor entries belong to the
  structure.
- The structure does not hold the batch size, so it is the same for every batch size, and the same
  for a tree of integers (`in_dims` of `vmap`) made from the container. It holds the number of
  trailing dimensions of one child, the *lead*; when the container is rebuilt, the batch size is
  read from the new lead. Under a `vmap` over a batch dimension the batch size loses that dimension.
- Rebuilding a container does not fail, whatever replaces the tensors.
- Every kind is rebuilt as itself. The children of a lazy stack are its stacked entries, of which it
  is rebuilt. Where `vmap` maps the stacked dimension, of tensors that a gradient transform tracks,
  and in traced code it becomes a `TensorDict`. Its members are the children if its entries cannot
  be stacked; see `Members`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core import _registry as registry
from kd_core._containers.dense import Dense
from kd_core._containers.lazy_stack import built_stack
from kd_core._containers.non_tensor import Constant, NonTensorDataBase, wrap_data
from kd_core._containers.non_tensor_stack import (
    HiddenRows,
    NonTensorStack,
    repeated_along,
    repeated_dims,
)
from kd_core._containers.stack_moves import plain_class
from kd_core._containers.tensordict import TensorDict
from kd_core._descriptor import Descriptor, describe
from kd_core._errors import InvalidValue, KdError, ShapeMismatch, a_type
from kd_core._keys import format_key
from kd_core._nodes import TensorData, is_node, is_unbatched
from kd_core._ops.modules import KINDS, StackedUninitialized
from kd_core._protocol import AbstractContainer, Composite, lock
from kd_core._shapes import as_named, names_of
from kd_core._torch_private import (
    get_unwrapped,
    is_batchedtensor,
    maybe_current_level,
    maybe_get_bdim,
    maybe_get_level,
    outside_of_transform,
    torch_tree,
)
from kd_core._unbatched import UnbatchedTensor, wrap_tensor

if TYPE_CHECKING:
    from typing import NotRequired, TypedDict, final

    from kd_core._base import TensorDictBase
    from kd_core._containers.lazy_stack import LazyStackedTensorDict
    from kd_core._nodes import Entry, Node
    from kd_core._shapes import Names
    from kd_core._types import Batch


# What `vmap` did to the tensors of a container between taking it apart and putting it together.
#
# torch takes a container apart before it reads `in_dims` and `out_dims`, and counts them on each
# tensor: -1 is the last feature of a leaf, not the last batch dimension. No argument tells a
# pytree node what it is flattened for, but the tensors that come back do. What enters `vmap` is
# taken apart outside of a level of functorch and put together inside, where a mapped tensor knows
# which of its dimensions is hidden. What leaves it is taken apart and put together at one level;
# in between the hidden dimension of each tensor becomes an ordinary one, in a view of the same
# strides.
#
# While a graph is traced nothing of this is known, and dimensions are as torch counts them.


class Mapped:
    """A tensor as it was inside `vmap`.

    Attributes:
        hidden: the dimension that the level hides; -1 if it hides none.
        shape: its shape with the hidden dimension.
        strides: its strides with the hidden dimension.
    """

    __slots__ = ("hidden", "shape", "strides")

    def __init__(self, hidden: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.hidden, self.shape, self.strides = hidden, shape, strides


class Level:
    """Where in nested transforms of functorch a container was taken apart.

    Attributes:
        number: the level.
        mapped: its tensors, as far as they have strides.
        of_numbers: whether its children are `in_dims` of `vmap` instead of tensors.
    """

    __slots__ = ("mapped", "number", "of_numbers")

    def __init__(
        self, number: int, mapped: tuple[Mapped | None, ...], of_numbers: bool = False
    ) -> None:
        self.number, self.mapped, self.of_numbers = number, mapped, of_numbers


class Moved:
    """A dimension that `vmap` took from all tensors of a container, or gave to them.

    Attributes:
        dim: the dimension, counted from the first.
        given: whether the container left `vmap`, which gave the dimension back.
    """

    __slots__ = ("dim", "given")

    def __init__(self, dim: int, given: bool) -> None:
        self.dim, self.given = dim, given


def current_level() -> int | None:
    """Return the level of the innermost transform; `None` outside, and where dynamo traces one."""
    return None if is_compiling() else maybe_current_level()


def level_of(children: list[object]) -> Level | None:
    """Return where a container of these children is taken apart; `None` outside of transforms."""
    number = current_level()
    if number is None:
        return None
    mapped = tuple(_as_mapped(tensor, number) for tensor in _tensors(children))
    if any(mapped):
        return Level(number, mapped)
    dims = [child for child in children if child is None or child.__class__ is int]
    return Level(number, (), of_numbers=bool(dims) and len(dims) == len(children))


def _as_mapped(tensor: Tensor, number: int) -> Mapped | None:
    hides = is_mapped(tensor, number)
    inside = get_unwrapped(tensor) if hides else tensor
    if type(inside) in KINDS:
        return None
    if inside.layout is not torch.strided or inside.is_nested:
        return None
    hidden = maybe_get_bdim(tensor) if hides else -1
    return Mapped(hidden, tuple(inside.shape), inside.stride())


def moved_by_vmap(children: list[object], before: Level | None, ndim: int) -> Moved | None:
    """Return which dimension `vmap` took or gave; `None` if something else made the children.

    Args:
        children: what the container is rebuilt from.
        before: where it was taken apart.
        ndim: how many batch dimensions it had then.

    Raises:
        InvalidValue: if the container has a batch, and the dimension is not one of it.
    """
    number = current_level()
    if number is None:
        return None
    if before is not None and before.number > number:
        return None  # of a gradient inside
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
    So zeros are rebuilt to a tuple of one. The same zeros are compared with a tree of `in_dims`
    inside of another `vmap`, which nothing tells apart: there, torch takes a tree of zeros that was
    made at that level alone, and the message for others is in `Structure.__repr__`.
    """
    if not children or children[0].__class__ is not int or current_level() is None:
        return False
    return all(each.__class__ is int and each == 0 for each in children)


def is_made_of_dims(child: object) -> bool:
    """Return whether a child is a zero, or what a container became that is rebuilt of zeros."""
    return child.__class__ is int or child.__class__ is tuple


def is_mapped(tensor: Tensor, level: int) -> bool:
    """Return whether `vmap` hides a dimension of a tensor at a level."""
    return is_batchedtensor(tensor) and maybe_get_level(tensor) == level


def _put_back(tensor: Tensor, before: Mapped) -> int:
    """Return where the hidden dimension of a tensor is now; -1 if it is another tensor."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return -1
    sizes, strides, hidden = list(before.shape), list(before.strides), before.hidden
    shape, found = tuple(tensor.shape), tensor.stride()
    if hidden < 0:
        return _repeated_along(shape, found, before)
    size, stride = sizes.pop(hidden), strides.pop(hidden)
    for dim in range(len(sizes) + 1):
        if shape == (*sizes[:dim], size, *sizes[dim:]) and found == (
            *strides[:dim],
            stride,
            *strides[dim:],
        ):
            return dim
    return -1


def _repeated_along(shape: tuple[int, ...], strides: tuple[int, ...], before: Mapped) -> int:
    """Return the dimension along which `vmap` repeated a tensor that it did not map.

    It is -1 if nothing was repeated, or if several dimensions would give the same tensor.
    """
    count = len(before.shape)
    found = [
        dim
        for dim in range(len(shape))
        if len(shape) == count + 1
        and (not strides[dim] or shape[dim] == 1)
        and shape[:dim] + shape[dim + 1 :] == before.shape
        and strides[:dim] + strides[dim + 1 :] == before.strides
    ]
    return found[0] if found and (len(found) == 1 or shape[found[0]] == 1) else -1


def _tensors(children: Iterable[object]) -> Iterator[Tensor]:
    """Iterate over the tensors of children that have all dimensions of their container."""
    for child in children:
        if isinstance(child, Tensor):
            yield child
        elif isinstance(child, AbstractContainer) and child._kd_owns_leaves:
            yield from _tensors(child._kd_entries.values())


def refuse_rows(key: str, moved: Moved | None) -> None:
    """Refuse data with one value per row where `vmap` maps another dimension than the first.

    Which one is not known where all leaves are in lazy stacks.
    """
    if moved is None:
        raise InvalidValue(
            f"non-tensor entry {format_key(key)} has one value per row, and `vmap` maps only lazy "
            "stacks beside it. `exclude` the entry, or call `contiguous` first."
        )
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
    """Refuse to convert the structure to a JSON value."""


torch_tree.register_pytree_node(
    UnbatchedTensor,
    _flatten_unbatched,
    _unflatten_unbatched,
    serialized_type_name="kd_core.UnbatchedTensor",
    to_dumpable_context=_dump_unbatched,
    from_dumpable_context=_dump_unbatched,
    flatten_with_keys_fn=_flatten_unbatched_with_keys,
)


# Lazy stacks whose entries cannot be stacked, as pytree nodes: their members are the children.
#
# They are rebuilt as lazy stacks. `vmap` counts dimensions on each tensor, and those of a member
# lack the stacked one: such stacks are refused there.

if TYPE_CHECKING:

    @final
    class DumpedMembers(TypedDict):
        """The structure of a stack as JSON values."""

        dim: int
        name: str | None

    @final
    class DumpedStructure(TypedDict):
        """The structure of another node as JSON values."""

        keys: list[str]
        data: dict[str, object]
        device: str | None
        lead: list[int]
        batch: list[int]
        ndim: int
        inner: list[DumpedStructure | None]
        names: NotRequired[list[str | None]]
        stacked: NotRequired[int]
        order: NotRequired[list[str]]


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
    level = current_level()
    if level is not None:
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


AnyStructure: TypeAlias = "Structure | Members"


_ONE_NUMBER: Final = (
    " of dimensions. Inside of another `vmap` these cannot be compared with a container: pass one "
    "number or `None` for all of it, or pass its tensors in a dict"
)


class Structure(NamedTuple):
    """The structure of a container without its children; equal if keys and data are equal.

    A tuple of constants, because strict export stores it in the program as a constant.

    Attributes:
        keys: the keys of the children, in the order of the container.
        data: keys and values of the non-tensor entries.
        device: the device of the container, kept while all children are on it.
        lead: the position of the first child that has a shape, -1 if there is none.
        extra: the number of trailing dimensions of the lead.
        batch: the batch size if there is no lead to read it from.
        ndim: the original number of batch dimensions; further ones belong to an empty child.
        inner: for each key, the structure of a nested container whose tensors are children of
            this one, else `None`; empty if there is none.
        names: the names of the batch dimensions, empty if there are none. They are kept while the
            number of dimensions is, and inside `vmap` but for that of the mapped dimension. A
            compiler drops them: strict export stores no named size.
        stacked: the dimension along which a lazy stack stacks its members, -1 for other kinds.
        level: where the outermost container was taken apart, in transforms of functorch.
        locked: whether the outermost container was locked; what `vmap` maps or returns stays so.
        waits: whether some children are tensors of lazy modules, without shapes.
        order: all keys in the order of the container; empty where those of the data are the last.
    """

    keys: tuple[str, ...]
    data: tuple[tuple[str, object], ...]
    device: torch.device | None
    lead: int
    extra: int
    batch: Batch
    ndim: int
    inner: tuple[Structure | None, ...]
    names: Names
    stacked: int = -1
    level: Level | None = None
    locked: bool = False
    waits: bool = False
    order: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        if self.keys != other.keys or self.inner != other.inner or self.stacked != other.stacked:
            return False
        return _same_data(dict(self.data), dict(other.data))

    def __ne__(self, other: object) -> bool:  # or that of `tuple` would be used
        return not self == other

    def __hash__(self) -> int:
        return hash(self.keys)

    def __repr__(self) -> str:
        # In messages of torch about `in_dims` and `out_dims`.
        text = f"{list(self.keys)}, data={dict(self.data)}" if self.data else f"{list(self.keys)}"
        return text + _ONE_NUMBER if self.level is not None and self.level.of_numbers else text


def _same_data(mine: dict[str, object], theirs: dict[str, object]) -> bool:
    if mine.keys() != theirs.keys():
        return False
    return all(_same(value, theirs[key]) for key, value in mine.items())


def _same(left: object, right: object) -> bool:
    try:
        return left is right or bool(left == right)
    except (RuntimeError, ValueError):  # arrays have no single truth value
        return False


def _flatten(container: AbstractContainer) -> tuple[list[object], AnyStructure]:
    children: list[object] = []
    if container._kd_owns_leaves:
        structure: AnyStructure = _take_apart(container, children)
    else:
        with _below_gradients(container):
            structure = _take_stack_apart(container, children)
    if container._kd_desc.frozen and isinstance(structure, Structure):
        structure = structure._replace(locked=True)
    if (
        isinstance(structure, Structure)
        and not is_compiling()
        and not KINDS.isdisjoint(map(type, children))
    ):
        structure = structure._replace(waits=True)
    level = level_of(children)
    return children, structure if level is None else structure._replace(level=level)


def _take_stack_apart(container: AbstractContainer, children: list[object]) -> AnyStructure:
    """Append the entries of a stack, or its members if the entries cannot be stacked."""
    try:
        structure = _take_apart(container, children)
    except KdError:
        if not isinstance(container, Composite) or is_compiling():
            raise
    else:
        if isinstance(container, Composite) and not is_compiling():
            data = tuple((key, _as_repeated(container, key, each)) for key, each in structure.data)
            return structure._replace(stacked=container._dim, data=data)
        return structure

    children[:] = container._members
    return structure_of(container)


def _as_repeated(stack: AbstractContainer, key: str, value: object) -> object:
    """Return data of a stack with rows that are repeated where those of all its members are.

    The entry of a stack joins the rows of its members, each for itself. `vmap` in chunks must know
    along which dimensions they were repeated.
    """
    node = value.node if isinstance(value, Constant) else None
    if not isinstance(node, NonTensorStack) or not isinstance(stack, Composite):
        return value
    dims = _repeated_in(stack, key)
    return Constant(repeated_along(node, dims)) if dims else value


def _repeated_in(container: AbstractContainer, key: str) -> set[int]:
    """Return the batch dimensions along which all members repeat the rows of an entry."""
    if not isinstance(container, Composite):
        return repeated_dims(container._kd_entries[key])
    found = [_repeated_in(member, key) for member in container._members]
    return {dim + (dim >= container._dim) for dim in set.intersection(*found)} if found else set()


def _below_gradients(container: AbstractContainer) -> AbstractContextManager[object]:
    """Return the context in which the entries of a container are read.

    Tensors that a lazy stack creates inside `torch.func.grad` belong to the level of that
    transform, and torch cannot wrap them for the same level. So members from outside are stacked
    outside.
    """
    level = current_level()
    if level is None:
        return nullcontext()
    found: list[Tensor] = []
    container._kd_collect(found)
    leaves = list(filter(torch.is_tensor, found))  # `in_dims` of `vmap` are integers
    inside = any(maybe_get_level(leaf) == level for leaf in leaves)
    return nullcontext() if inside else outside_of_transform()


def _take_apart(container: AbstractContainer, children: list[object], outer: int = 0) -> Structure:
    """Append the children of a container, and those of nested ones that become plain.

    Args:
        container: The container.
        children: Where to; a nested container may append to those of its parents.
        outer: How many of the batch dimensions are those of a parent.
    """
    entries: Mapping[str, Any] = container._kd_entries
    before, desc = len(children), container._kd_desc
    keys: list[str] = list(entries)
    if keys and not container._kd_nested:
        # The fast path for tensors only: "vmap over 3 sets" in the benchmarks.
        children += [entries[key] for key in keys]
        extra = entries[keys[0]].ndim - desc.ndim
        named = names_of(desc.batch) if desc.named and not is_compiling() else ()
        return Structure(tuple(keys), (), desc.device, 0, extra, (), desc.ndim, (), named)
    names: list[str] = []
    inner: list[Structure | None] = []
    data: list[tuple[str, object]] = []
    lead, extra, nested = -1, 0, False
    for key in keys:
        value = entries[key]
        kind: type = value.__class__
        below = None
        # `in_dims` of `vmap` are trees of integers.
        is_leaf = kind is Tensor or kind is int
        if not is_leaf and (kind is TensorDict or _becomes_plain(kind)):
            nested = True
            below = _take_apart(value, children, desc.ndim)
            if lead < 0 <= below.lead:
                lead, extra = len(names), value._kd_desc.ndim - desc.ndim
        elif is_leaf or _is_child(value):
            children.append(value)
            count = None if lead >= 0 or kind is int else _ndim_of(value)
            if count is not None:
                lead, extra = len(names), count - desc.ndim
        else:
            data.append((key, value._constant()))
            continue
        names.append(key)
        inner.append(below)
    batch = () if lead >= 0 else _kept(desc.batch, outer if len(children) == before else 0)
    below_keys = tuple(inner) if nested else ()
    named = names_of(desc.batch) if desc.named and not is_compiling() else ()
    made = Structure(
        tuple(names), tuple(data), desc.device, lead, extra, batch, desc.ndim, below_keys, named
    )
    now = [*names, *(key for key, _ in data)]
    return made if keys == now else made._replace(order=tuple(keys))


def _kept(batch: Batch, given: int) -> Batch:
    """Return a batch size without the sizes that the parent gives: of an export, none is kept."""
    return (0,) * given + tuple(batch[given:]) if given else batch


def _becomes_plain(kind: type) -> bool:
    """Return whether a container of this kind is rebuilt as a `TensorDict` of its own entries."""
    return (
        issubclass(kind, AbstractContainer) and kind._kd_owns_leaves and not issubclass(kind, Dense)
    )


def _is_child(value: object) -> bool:
    """Return whether a value is a child: whatever `tree_map` put in place of a tensor is one."""
    if isinstance(value, Tensor) or isinstance(value, AbstractContainer):  # noqa: SIM101 - a union is slower
        return True
    return not is_node(value) or is_unbatched(value)


def _ndim_of(value: object) -> int | None:
    """Return the length of `_shape_of` a value."""
    if isinstance(value, Tensor):
        return value.ndim
    shape = _shape_of(value)
    return None if shape is None else len(shape)


def _shape_of(value: object) -> Batch | None:
    """Return the shape that limits the batch of the parent; `None` for an empty container."""
    if isinstance(value, AbstractContainer):
        return value._kd_desc.batch if _holds_shape(value) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _holds_shape(container: AbstractContainer) -> bool:
    if isinstance(container, Composite):
        return any(map(_holds_shape, container._members))
    for value in container._kd_entries.values():
        if isinstance(value, Tensor):
            return True
        if isinstance(value, AbstractContainer) and _holds_shape(value):
            return True
    return False


def _unflatten(
    cls: type[AbstractContainer], values: Iterable[object], structure: AnyStructure
) -> Node | tuple[list[object]]:
    children = list(values)
    if stand_for_dims(children):
        return (children,)  # which nobody but torch sees
    if not isinstance(structure, Structure):
        if any(type(member) is tuple for member in children):  # those of members, made above
            return (children,)  # as above

        return stack_of(cls, children, structure)
    waiting = _stand_in_for(children) if structure.waits else None
    moved = moved_by_vmap(children, structure.level, structure.ndim)
    made: Node | None = None
    if not is_compiling():
        kinds = set(map(type, children))
        if kinds in (_TENSORS, _INTEGERS):
            made = _put_plain(cls, iter(children), structure, moved, kinds == _INTEGERS)
    if made is None:
        made = _put_together(cls, iter(children), structure, moved)
    if structure.stacked >= 0:
        made = _as_stack(cls, made, structure, moved, children)
    if waiting and isinstance(made, AbstractContainer):
        _set_waiting(made, waiting)
    if structure.locked and moved is not None and isinstance(made, AbstractContainer):
        lock(made)
    return made


def _stand_in_for(children: list[object]) -> dict[int, StackedUninitialized]:
    """Exchange the tensors of lazy modules, which `vmap` cannot map before they have a shape.

    Returns:
        Those tensors by the identity of what has a shape in their place.
    """
    level = current_level()
    waiting: dict[int, StackedUninitialized] = {}
    for number, child in enumerate(children):
        if not isinstance(child, Tensor):
            continue
        mapped = level is not None and is_mapped(child, level)
        inside = get_unwrapped(child) if mapped else child
        if isinstance(inside, StackedUninitialized):
            if mapped:
                inside._kd_level = level
            else:
                children[number] = child = inside.stand_in()
            waiting[id(child)] = inside
    return waiting


def _set_waiting(container: AbstractContainer, waiting: Mapping[int, StackedUninitialized]) -> None:
    """Write the tensors of lazy modules again."""
    for key, value in container._kd_entries.items():
        if isinstance(value, AbstractContainer):
            _set_waiting(value, waiting)
        elif id(value) in waiting:
            container._kd_set_entry(key, cast("Tensor", waiting[id(value)]))


def _as_stack(
    cls: type[AbstractContainer],
    made: Node,
    structure: Structure,
    moved: Moved | None,
    children: list[object],
) -> Node:
    """Return what was rebuilt of a lazy stack as one again, where it can be."""
    level = current_level()
    inside = [tensor for tensor in _tensors(children) if maybe_get_level(tensor) == level]
    if moved is None and not all(map(is_batchedtensor, inside)):
        # Inside `torch.func.grad`, which looks for the tensors that it tracks, none may be a view.
        return made
    from_outside = moved is None and level is not None and not inside
    with outside_of_transform() if from_outside else nullcontext():
        return _stacked_again(cls, made, structure, moved, children)


_TENSORS: Final = {Tensor}
_INTEGERS: Final = {int}
"""What the children of `in_dims` are, which `vmap` makes on each call."""


def _put_plain(
    cls: type[AbstractContainer],
    values: Iterator[object],
    structure: Structure,
    moved: Moved | None,
    hollow: bool,
) -> Node | None:
    """Rebuild a container of tensors alone, or of integers (`hollow`); return `None` if unsure.

    The fast path of `_put_together` ("vmap over 3 sets" in the benchmarks), for containers without
    data, device and names whose children have the batch of the lead.
    """
    keys, data, device, lead, extra, _, ndim, inner, names = structure[:9]
    if data or device is not None or names or lead < 0:
        return None
    if moved is not None and not moved.given and moved.dim >= ndim:
        return None
    entries: dict[str, Entry] = {}
    if inner:
        for key, below in zip(keys, inner):  # noqa: B905  # `strict` is slower
            value = (
                next(values)
                if below is None
                else _put_plain(TensorDict, values, below, moved, hollow)
            )
            if value is None:
                return None
            entries[key] = cast("Entry", value)
    else:
        entries = dict(zip(keys, cast("Iterator[Entry]", values)))  # noqa: B905  # as above
    batch: Batch = ()
    if not hollow:
        first = entries[keys[lead]]
        shape = first.shape if isinstance(first, Tensor) else first._kd_desc.batch
        batch = tuple(shape[: len(shape) - extra]) if len(shape) > extra else ()
        count = len(batch)
        for value in entries.values() if count else ():
            found = value.shape if isinstance(value, Tensor) else value._kd_desc.batch
            if found[:count] != batch:
                return None
    if structure.order:
        entries = {key: entries[key] for key in structure.order}
    return _kind_of(cls, entries, describe(batch), hollow or bool(inner))


def _stacked_again(
    cls: type[AbstractContainer],
    made: Node,
    structure: Structure,
    moved: Moved | None,
    children: list[object],
) -> Node:
    """Return a lazy stack of the rows of a dense container, where it has the stacked dimension."""
    desc, dim = made._kd_desc, structure.stacked
    if moved is None:
        dim += desc.ndim - structure.ndim  # further dimensions lead
    elif moved.given:
        dim += moved.dim <= dim
    elif moved.dim == dim or _holds_rows(structure):  # rows of data keep the mapped dimension
        return made
    else:
        dim -= moved.dim < dim
    if not 0 <= dim < desc.ndim or not desc.batch[dim] or is_compiling():
        return made
    if not all(isinstance(child, (Tensor, AbstractContainer)) for child in children):
        return made
    kind = plain_class(cast("type[LazyStackedTensorDict]", cls))  # the members ask for their own
    dense = cast("TensorDictBase", made)
    rows = list(dense._kd_engine.unbind(dense, dim))
    return built_stack(kind, rows, dim, names_of(desc.batch)[dim])


def _holds_rows(structure: Structure) -> bool:
    """Return whether data of a container, or of nested ones, has one value per row."""
    nodes = (each.node for _, each in structure.data if isinstance(each, Constant))
    if any(isinstance(node, (NonTensorStack, HiddenRows)) for node in nodes):
        return True
    return any(below is not None and _holds_rows(below) for below in structure.inner)


def _put_together(
    cls: type[AbstractContainer],
    values: Iterator[object],
    structure: Structure,
    moved: Moved | None,
) -> Node:
    keys, data, device, lead, extra, batch, ndim, inner, names, *_ = structure
    hollow: list[str] = []
    # `zip` without `strict`, which is slower: the lengths are equal.
    if inner:
        entries = _branches(values, zip(keys, inner), hollow, moved)  # noqa: B905  # as above
    else:
        entries = dict(zip(keys, values))  # noqa: B905  # as above
    if lead >= 0:
        first = entries[keys[lead]]
        shape: Batch = (first.shape if first.__class__ is Tensor else _shape_of(first)) or ()
        if moved is not None and not moved.given and moved.dim >= ndim:
            batch = tuple(shape[:ndim])  # a feature is mapped
        else:
            batch = tuple(shape[: len(shape) - extra]) if len(shape) > extra else ()
    if batch or device is not None:
        batch, device = _agreed(batch, device, entries.values())
    if names and not is_compiling():
        batch = _named(batch, names, moved)
    desc = describe(batch, device)
    nested = bool(inner or data)
    for key, value in entries.items():
        if value.__class__ is Tensor:
            continue
        nested = True
        if is_unbatched(value):
            if moved is not None and moved.given:
                entries[key] = given_rows(value, moved.dim, desc)
                continue
            if moved is not None or is_compiling():
                refuse_mapped(key, value)
            entries[key] = value._kd_with_descriptor(desc)
        elif not inner and isinstance(value, AbstractContainer):
            hollow.append(key)
    for key in hollow:
        below = entries[key]
        if isinstance(below, AbstractContainer) and _is_hollow(below):
            entries[key] = _fitted(below, batch, ndim, moved)
    standing = bool(data) and moved is None and any(map(is_made_of_dims, entries.values()))
    for key, constant in data:
        if standing and isinstance(constant, Constant):
            entries[key] = constant.node  # only torch sees it, to compare it with `out_dims`
            continue
        entries[key] = _data(key, constant, desc, ndim, moved, hollow=lead < 0)
    if structure.order:
        entries = {key: entries[key] for key in structure.order}
    return _kind_of(cls, cast("dict[str, Entry]", entries), desc, nested)


def _named(batch: Batch, names: Names, moved: Moved | None) -> Batch:
    """Return a batch size with the names that its dimensions had."""
    if moved is not None:
        after = moved.dim if moved.given else moved.dim + 1
        names = (*names[: moved.dim], *(None,) * moved.given, *names[after:])
    return tuple(map(as_named, batch, names)) if len(batch) == len(names) else batch


def _branches(
    values: Iterator[object],
    below: Iterable[tuple[str, Structure | None]],
    hollow: list[str],
    moved: Moved | None,
) -> dict[str, object]:
    """Rebuild the entries of a container and its nested ones; record those that may be hollow."""
    entries: dict[str, object] = {}
    for key, structure in below:
        if structure is None:
            entries[key] = value = next(values)
            if isinstance(value, AbstractContainer):
                hollow.append(key)
            continue
        entries[key] = _put_together(TensorDict, values, structure, moved)
        if structure.lead < 0:
            hollow.append(key)
    return entries


def _agreed(
    batch: Batch, device: torch.device | None, children: Iterable[object]
) -> tuple[Batch, torch.device | None]:
    """Return the leading batch dimensions shared by all children, and their common device."""
    for value in children:
        if batch:
            batch = _shared(batch, value)
        if device is not None and isinstance(value, Tensor) and value.device != device:
            device = None
    return batch, device


def _fitted(
    hollow: AbstractContainer, batch: Batch, ndim: int, moved: Moved | None
) -> AbstractContainer:
    """Return a container without leaves with the batch of its new parent."""
    # Comparing it with the old batch would specialise a size that is symbolic in an export.
    own = hollow._kd_desc
    further = own.batch[ndim:]
    if moved is not None and not moved.given and moved.dim >= ndim:  # as that of one with leaves
        at = moved.dim - ndim
        further = further[:at] + further[at + 1 :]
    desc = own.with_batch(batch + further)
    entries: dict[str, Entry] = {}
    for key, value in hollow._kd_entries.items():
        if isinstance(value, AbstractContainer):
            entries[key] = _fitted(value, batch, ndim, moved)
        elif isinstance(value, NonTensorDataBase):
            constant = _as_repeated(hollow, key, value._constant())
            entries[key] = _data(key, constant, desc, own.ndim, moved)
        elif is_unbatched(value):
            entries[key] = value._kd_with_descriptor(desc)
        else:
            entries[key] = value  # put in place of a tensor
    return hollow._kd_like(entries, desc)


def _data(
    key: str,
    constant: object,
    desc: Descriptor,
    ndim: int,
    moved: Moved | None,
    hollow: bool = False,
) -> Entry:
    """Rebuild a non-tensor entry from what the structure holds of it."""
    if not isinstance(constant, Constant):
        return wrap_data(constant, desc)
    node = constant.node
    if isinstance(node, (NonTensorStack, HiddenRows)):
        further = desc.ndim - node._kd_desc.ndim
        level = current_level()
        if further == -1 and level is not None:
            refuse_rows(key, moved)
            return HiddenRows.around(node, desc, level)
        hides = isinstance(node, HiddenRows) and (level is None or node._level >= level)
        if further == 1 and hides:
            refuse_rows(key, moved)
        elif further == 1 and moved is not None and moved.given:
            return node._given(moved.dim, desc)
        elif further == 1 and isinstance(node, HiddenRows):
            raise node.refusal()
        if not further and hollow and isinstance(node, HiddenRows):
            return node  # its container gets the batch of its parent later
    return node._restored(desc, ndim)


def _is_hollow(container: AbstractContainer) -> bool:
    if isinstance(container, Composite):
        return all(map(_is_hollow, container._members))
    for value in container._kd_entries.values():
        if isinstance(value, Tensor):
            return False
        if _is_child(value) and not (isinstance(value, AbstractContainer) and _is_hollow(value)):
            return False
    return True


def _shared(batch: Batch, value: object) -> Batch:
    """Return the leading batch dimensions that a child has too."""
    shape = _shape_of(value)
    if shape is None or shape[: len(batch)] == batch:
        return batch
    same = 0
    for mine, other in zip(batch, shape, strict=False):
        if mine != other:
            break
        same += 1
    return batch[:same]


def _kind_of(
    cls: type[AbstractContainer], entries: dict[str, Entry], desc: Descriptor, nested: bool
) -> Node:
    if not issubclass(cls, Dense):
        if cls._kd_tensor_class is not None:  # a lazy stack of its instances becomes one of them
            return object.__new__(cls._kd_tensor_class)._kd_like(entries, desc)
        return registry.make_dense(entries, desc)
    new = object.__new__(cls)
    new._kd_nested = nested
    new._kd_entries = entries
    new._kd_desc = desc
    return new


def _flatten_with_keys(
    container: AbstractContainer,
) -> tuple[list[tuple[torch_tree.KeyEntry, object]], AnyStructure]:
    children, structure = _flatten(container)
    if not isinstance(structure, Structure):
        return [(torch_tree.SequenceKey(i), each) for i, each in enumerate(children)], structure
    return list(zip(_paths(structure, ()), children, strict=True)), structure


class _Path(tuple[str, ...]):
    """A nested key, printed as torch prints a path of keys; exported programs use its `str`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "][".join(map(repr, self))

    def __str__(self) -> str:
        return "_".join(self)


def _paths(structure: Structure, head: tuple[str, ...]) -> Iterator[torch_tree.KeyEntry]:
    for key, below in zip_longest(structure.keys, structure.inner):
        if below is not None:
            yield from _paths(below, (*head, key))
        else:
            yield torch_tree.MappingKey(_Path((*head, key)) if head else key)


def _dump(structure: AnyStructure) -> DumpedStructure | DumpedMembers:
    """Convert the structure to JSON values, with which an exported program is saved."""
    if not isinstance(structure, Structure):
        return {"dim": structure.dim, "name": structure.name}
    return _dump_structure(structure)


def _dump_structure(structure: Structure) -> DumpedStructure:
    return {
        "keys": list(structure.keys),
        "data": {key: _plain(key, value) for key, value in structure.data},
        "device": None if structure.device is None else str(structure.device),
        "lead": [structure.lead, structure.extra],
        "batch": [int(size) for size in structure.batch],
        "ndim": structure.ndim,
        "inner": [None if below is None else _dump_structure(below) for below in structure.inner],
        "names": list(structure.names),
        "stacked": structure.stacked,
        "order": list(structure.order),
    }


def _plain(key: str, value: object) -> object:
    """Return a value that JSON restores unchanged.

    Raises:
        InvalidValue: if JSON does not restore it; the message names the key.
    """
    try:
        plain = json.loads(json.dumps(value))
        kept = type(plain) is type(value) and bool(plain == value)
    except (TypeError, ValueError):
        kept = False
    if not kept:
        raise InvalidValue(
            f"non-tensor entry `{key}` of a saved program must be a string, a number, `None`, or a "
            f"list or dict of these, got {a_type(value)}. `exclude` it before exporting."
        )
    return value


def _load(parts: DumpedStructure | DumpedMembers) -> AnyStructure:
    """Convert JSON values to a structure."""
    if "dim" in parts:
        return Members(parts["dim"], parts["name"])
    return _load_structure(parts)


def _load_structure(parts: DumpedStructure) -> Structure:
    device = parts["device"]
    lead, extra = parts["lead"]
    return Structure(
        keys=tuple(parts["keys"]),
        data=tuple(parts["data"].items()),
        device=None if device is None else torch.device(device),
        lead=lead,
        extra=extra,
        batch=tuple(parts["batch"]),
        ndim=parts["ndim"],
        inner=tuple(
            [None if below is None else _load_structure(below) for below in parts["inner"]]
        ),
        names=tuple(parts.get("names", ())),
        stacked=parts.get("stacked", -1),
        order=tuple(parts.get("order", ())),
    )


def _register(cls: type) -> None:
    """Register one kind of container as a pytree node."""
    public = takewhile(lambda part: not part.startswith("_"), cls.__module__.split("."))
    torch_tree.register_pytree_node(
        cls,
        _flatten,
        partial(_unflatten, TensorDict if getattr(cls, "_kd_is_linked", False) else cls),
        serialized_type_name=".".join([*public, cls.__qualname__]),
        to_dumpable_context=_dump,
        from_dumpable_context=_load,
        flatten_with_keys_fn=_flatten_with_keys,
    )


registry.on_new_kind(_register)
