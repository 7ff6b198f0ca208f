"""Containers as pytree nodes: for `tree_map`, `vmap`, `torch.func` and `torch.export`.

Decisions that hold here:

- Children are the tensors, in the alphabetical order of their keys: the structure does not depend
  on the order in which keys were written. Those of a nested plain container stand in its place, for
  each node of a tree costs torch 8 us in a `vmap`. Nested containers of other kinds are children.
  Data that is no tensor belongs to the structure.
- The structure does not hold the batch size, so that it is the same for every size of a batch, and
  the same for a tree of integers (`in_dims` of a `vmap`) made from the container. What is kept is
  how many dimensions of one child, the *lead*, are beyond the batch; the batch size is read off the
  new lead. Inside a `vmap` over a dimension it shrinks by itself.
- Putting a container together again never fails, whatever stands in the place of the tensors.
- Kinds that store densely come back as themselves, others (lazy stacks) as a `TensorDict`.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.compiler import is_compiling
from torch.utils import _pytree

from kd_core import _registry
from kd_core._batch.descriptor import Descriptor, describe
from kd_core._containers.dense import Dense
from kd_core._containers.tensordict import TensorDict
from kd_core._errors import InvalidValue
from kd_core._protocol.primitives import AbstractContainer
from kd_core._torch.vmap_dims import check_mapped_dims

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kd_core._entry import Entry, Node
    from kd_core._types import Batch

    Dumped: TypeAlias = dict[str, object]


class Structure(NamedTuple):
    """What a container is besides its children; equal where keys and data are.

    A tuple of constants, because strict export writes it into the program as one.

    Attributes:
        keys: the keys of the children, in alphabetical order.
        data: keys and values of the entries that are no tensors.
        device: the device of the container, kept while all children are on it.
        lead: the position of the first child that has a shape, -1 if there is none.
        extra: how many dimensions of the lead are beyond the batch.
        batch: the batch size where there is no lead to read it from.
        ndim: the number of batch dimensions there were: beyond these, an empty child has its own.
        inner: for each key, the structure of a plain container whose children stand in its place,
            else `None`; nothing where no child is one.
    """

    keys: tuple[str, ...]
    data: tuple[tuple[str, object], ...]
    device: torch.device | None
    lead: int
    extra: int
    batch: Batch
    ndim: int
    inner: tuple[Structure | None, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        if self.keys != other.keys or self.inner != other.inner:
            return False
        return _same_data(dict(self.data), dict(other.data))

    def __ne__(self, other: object) -> bool:  # the tuple's own would be used
        return not self == other

    def __hash__(self) -> int:
        return hash(self.keys)

    def __repr__(self) -> str:
        return f"{list(self.keys)}, data={dict(self.data)}" if self.data else f"{list(self.keys)}"


def _same_data(mine: dict[str, object], theirs: dict[str, object]) -> bool:
    if mine.keys() != theirs.keys():
        return False
    return all(_same(value, theirs[key]) for key, value in mine.items())


def _same(left: object, right: object) -> bool:
    try:
        return left is right or bool(left == right)
    except (RuntimeError, ValueError):  # arrays have no single truth value
        return False


def _flatten(container: AbstractContainer) -> tuple[list[object], Structure]:
    children: list[object] = []
    if container._owns_leaves:
        structure = _take_apart(container, children)
    else:
        with _below_gradients(container):
            structure = _take_apart(container, children)
    if structure.lead >= 0:
        check_mapped_dims(container)
    return children, structure


def _below_gradients(container: AbstractContainer) -> AbstractContextManager[object]:
    """Return the context in which the entries of a container are read.

    What a stack makes inside of `torch.func.grad` is of the level of that transform, which torch
    then cannot wrap for it: where the members come from outside, they are stacked outside.
    """
    level = maybe_current_level()
    if level is None or is_compiling():
        return nullcontext()
    leaves: list[Tensor] = []
    container._collect(leaves)
    inside = any(torch._C._functorch.maybe_get_level(leaf) == level for leaf in leaves)
    return nullcontext() if inside else temporarily_pop_interpreter_stack()


def _take_apart(container: AbstractContainer, children: list[object]) -> Structure:
    """Append the children of a container, and those of the plain ones in it."""
    entries = container._entries
    desc = container._desc
    keys: list[str] = sorted(entries)
    if keys and getattr(container, "_nested", True) is False:
        # Tensors all: "vmap over 3 sets" in the benchmarks flattens each container twice.
        children += [entries[key] for key in keys]
        extra = entries[keys[0]].ndim - desc.ndim  # type: ignore[union-attr]  # a tensor
        return Structure(tuple(keys), (), desc.device, 0, extra, (), desc.ndim, ())
    names: list[str] = []
    inner: list[Structure | None] = []
    data: list[tuple[str, object]] = []
    lead, extra, nested = -1, 0, False
    for key in keys:
        value = entries[key]
        kind: type = value.__class__
        below = None
        if kind is TensorDict:
            nested = True
            below = _take_apart(value, children)  # type: ignore[arg-type]  # a container
            if lead < 0 <= below.lead:
                lead, extra = len(names), value._desc.ndim - desc.ndim  # type: ignore[union-attr]  # a container
        elif kind is int or kind is Tensor or _is_child(value):  # a `vmap` makes trees of integers
            children.append(value)
            shape = None if lead >= 0 or kind is int else _shape_of(value)
            if shape is not None:
                lead, extra = len(names), len(shape) - desc.ndim
        else:
            data.append((key, cast("Node", value)._item()))
            continue
        names.append(key)
        inner.append(below)
    batch = () if lead >= 0 else desc.batch
    below_keys = tuple(inner) if nested else ()
    return Structure(
        tuple(names), tuple(data), desc.device, lead, extra, batch, desc.ndim, below_keys
    )


def _is_child(value: object) -> bool:
    """Tell children from data; whatever a map put in the place of a tensor is a child."""
    if isinstance(value, Tensor) or isinstance(value, AbstractContainer):  # noqa: SIM101 - a union is slower
        return True
    return not hasattr(value, "_with_descriptor")


def _shape_of(value: object) -> Batch | None:
    """The shape that a child gives to its parent's batch: none from an empty container."""
    if value.__class__ is Tensor:
        return tuple(value.shape)
    if isinstance(value, AbstractContainer):
        return value._desc.batch if _holds_shape(value) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _holds_shape(container: AbstractContainer) -> bool:
    for value in container._entries.values():
        if value.__class__ is Tensor or isinstance(value, Tensor):
            return True
        if isinstance(value, AbstractContainer) and _holds_shape(value):
            return True
    return False


def _unflatten(
    cls: type[AbstractContainer], values: Iterable[object], structure: Structure
) -> Node:
    return _put_together(cls, iter(values), structure)


def _put_together(
    cls: type[AbstractContainer], values: Iterator[object], structure: Structure
) -> Node:
    keys, data, device, lead, extra, batch, ndim, inner = structure
    hollow: list[str] = []
    # To ask whether there is one for each costs 100 ns.
    if inner:
        entries = _branches(values, zip(keys, inner), hollow)  # noqa: B905  # as said above
    else:
        entries = dict(zip(keys, values))  # noqa: B905  # as said above
    if lead >= 0:
        first = entries[keys[lead]]
        shape: Batch = (first.shape if first.__class__ is Tensor else _shape_of(first)) or ()
        batch = tuple(shape[: len(shape) - extra]) if len(shape) > extra else ()
    if batch or device is not None:
        batch, device = _agreed(batch, device, entries.values())
    desc = describe(batch, device)
    nested = bool(inner or data)
    for key, value in entries.items():
        kind = value.__class__
        if kind is Tensor:
            continue
        nested = True
        if (kind is not TensorDict or not inner) and isinstance(value, AbstractContainer):
            hollow.append(key)
    for key in hollow:
        if _is_hollow(cast("AbstractContainer", entries[key])):
            entries[key] = _fitted(cast("AbstractContainer", entries[key]), batch, ndim)
    for key, constant in data:
        entries[key] = _registry.wrap_data(constant, desc)
    return _kind_of(cls, cast("dict[str, Entry]", entries), desc, nested)


def _branches(
    values: Iterator[object], below: Iterable[tuple[str, Structure | None]], hollow: list[str]
) -> dict[str, object]:
    """The entries of a container of which some are plain containers; note those without leaves."""
    entries: dict[str, object] = {}
    for key, structure in below:
        if structure is None:
            entries[key] = next(values)
            continue
        entries[key] = _put_together(TensorDict, values, structure)
        if structure.lead < 0:
            hollow.append(key)
    return entries


def _agreed(
    batch: Batch, device: torch.device | None, children: Iterable[object]
) -> tuple[Batch, torch.device | None]:
    """As much of the batch as all children start with, and the device that all are on."""
    for value in children:
        if batch:
            batch = _shared(batch, value)
        if device is not None and isinstance(value, Tensor) and value.device != device:
            device = None
    return batch, device


def _fitted(hollow: AbstractContainer, batch: Batch, ndim: int) -> AbstractContainer:
    """A container without leaves under the batch of its new parent."""
    # Not compared with its old batch: that would pin a size which an export left open.
    return hollow._map_each(_leaf, lambda own: batch + own[ndim:])


def _is_hollow(container: AbstractContainer) -> bool:
    for value in container._entries.values():
        if value.__class__ is Tensor or isinstance(value, Tensor):
            return False
        if _is_child(value) and not (isinstance(value, AbstractContainer) and _is_hollow(value)):
            return False
    return True


def _leaf(leaf: Tensor) -> Tensor:
    return leaf


def _shared(batch: Batch, value: object) -> Batch:
    """As much of the batch as a child starts with too."""
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
        return _registry.make_dense(entries, desc)
    new = object.__new__(cls)
    new._nested = nested
    new._entries = entries
    new._desc = desc
    return cast("Node", new)


def _flatten_with_keys(
    container: AbstractContainer,
) -> tuple[list[tuple[_pytree.KeyEntry, object]], Structure]:
    children, structure = _flatten(container)
    return list(zip(_paths(structure, ()), children, strict=True)), structure


class _Path(tuple[str, ...]):
    """A nested key; prints as torch names the inputs of an exported program after it."""

    __slots__ = ()

    def __str__(self) -> str:
        return "_".join(self)


def _paths(structure: Structure, head: tuple[str, ...]) -> Iterator[_pytree.KeyEntry]:
    for key, below in zip_longest(structure.keys, structure.inner):
        if below is not None:
            yield from _paths(below, (*head, key))
        else:
            yield _pytree.MappingKey(_Path((*head, key)) if head else key)


def _dump(structure: Structure) -> Dumped:
    """The structure as JSON can hold it: what an exported program is saved with."""
    return {
        "keys": list(structure.keys),
        "data": {key: _plain(key, value) for key, value in structure.data},
        "device": None if structure.device is None else str(structure.device),
        "lead": [structure.lead, structure.extra],
        "batch": [int(size) for size in structure.batch],
        "ndim": structure.ndim,
        "inner": [None if below is None else _dump(below) for below in structure.inner],
    }


def _plain(key: str, value: object) -> object:
    """A value that JSON gives back as it was.

    Raises:
        InvalidValue: naming the key of a value that it does not.
    """
    try:
        plain = json.loads(json.dumps(value))
        kept = type(plain) is type(value) and bool(plain == value)
    except (TypeError, ValueError):
        kept = False
    if not kept:
        raise InvalidValue(
            f"entry `{key}` holds a `{type(value).__name__}`, which a saved program cannot carry: "
            "only strings, numbers, `None`, and lists and dicts of these. `exclude` it before "
            "exporting."
        )
    return value


def _load(dumped: object) -> Structure:
    parts = cast("Dumped", dumped)
    device = cast("str | None", parts["device"])
    lead, extra = cast("list[int]", parts["lead"])
    return Structure(
        keys=tuple(cast("list[str]", parts["keys"])),
        data=tuple(cast("dict[str, object]", parts["data"]).items()),
        device=None if device is None else torch.device(device),
        lead=lead,
        extra=extra,
        batch=tuple(cast("list[int]", parts["batch"])),
        ndim=cast(int, parts["ndim"]),
        inner=tuple(
            None if below is None else _load(below)
            for below in cast("list[object]", parts["inner"])
        ),
    )


def _register(cls: type) -> None:
    """Make one container kind a pytree node."""
    public = takewhile(lambda part: not part.startswith("_"), cls.__module__.split("."))
    _pytree.register_pytree_node(
        cls,
        _flatten,
        partial(_unflatten, cls),
        serialized_type_name=".".join([*public, cls.__qualname__]),
        to_dumpable_context=_dump,
        from_dumpable_context=_load,
        flatten_with_keys_fn=_flatten_with_keys,
    )


_registry.on_new_kind(_register)
