"""Filling leaves with values, and creating containers of new leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core import _registry as registry
from kd_core._descriptor import describe, describe_on, device_of
from kd_core._errors import InvalidArgument, KeySetMismatch, listed
from kd_core._keys import path_of
from kd_core._leaves.loops import finder
from kd_core._leaves.writes import (
    Write,
    check_write,
    collect_writes,
    copy_over,
    copy_pairs,
    putting_back,
    write_all,
)
from kd_core._ops.access import add_writes, sources_of
from kd_core._ops.binary import binary_, blended, unary_
from kd_core._ops.description import put_on
from kd_core._ops.indexing import check_mask, from_the_first
from kd_core._protocol import AbstractContainer, Composite, check_has, is_frozen, level_at, lock
from kd_core._shapes import Fresh, has_names, names_of, sizes_of, with_names, without_names
from kd_core._types import NO_DEFAULT

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._nodes import AnyKey, Entry, Source
    from kd_core._types import Batch, DeviceLike, NestedKey, NoDefault

    W = TypeVar("W", bound=AbstractContainer)
    F = TypeVar("F", bound=AbstractContainer)


class Filling(AbstractContainer):
    """The methods that fill leaves, and that create containers of new leaves.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, 3)}, [2])
        >>> td.lock_().zero_()["a"], td.new_full((1,), 5.0)["b"]
        (tensor([0., 0.]), tensor([[5., 5., 5.]]))
        >>> td.masked_fill(torch.tensor([True, False]), 7.0)["a"]
        tensor([7., 0.])
        >>> torch.ones_like(td)["b"].sum()
        tensor(6.)
    """

    __slots__ = ()

    def zero_(self) -> Self:
        """Write zeros into every leaf; return self."""
        return unary_(self, Tensor.zero_, torch._foreach_zero_, refuse_overlap=False)

    @overload
    def fill_(self, value: Tensor | complex) -> Self: ...
    @overload
    def fill_(self, key: NestedKey, value: Tensor | complex) -> Self: ...
    def fill_(self, *given: object, **named: object) -> Self:
        """Write a number, or a 0-d tensor, into every leaf, or into those at a key; return self.

        Args:
            *given: the key of a leaf or a nested container, if only that is filled; the number.
            **named: the same by keyword, `key` and `value`.

        Raises:
            KeyNotFound: if there is no such entry.
            InvalidValue: if a leaf cannot hold the number; then nothing is written.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2])
            >>> td.fill_(1.0).fill_("a", 2.0)["a"], td["b"]
            (tensor([2., 2.]), tensor([1., 1.]))
        """
        key, value = _key_and_value(*given, **named)
        if key is None:
            return binary_(self, value, Tensor.fill_, refuse_overlap=isinstance(value, Tensor))
        path = path_of(cast("NestedKey", key))
        check_has(self, path)
        _fill_entry(level_at(self, path[:-1]), path, value)
        return self

    def copy_(
        self, tensordict: Source[AnyKey] | AbstractContainer, non_blocking: bool = False
    ) -> Self:
        """Copy the values of a container or mapping into this container; return self.

        The source may have fewer keys.

        Dtypes and devices are converted; values of rows that are not tensors are copied with their
        rows. Nothing is written if anything does not fit.

        Raises:
            InvalidArgument: if one value that is not a tensor differs.
            KeyNotFound: if the source has a key that does not exist here.
            ShapeMismatch: if a value cannot be broadcast to its leaf.
        """
        if not isinstance(tensordict, AbstractContainer):
            return _copy_some(self, tensordict, non_blocking)
        try:
            mine, theirs = collect_writes(self, tensordict)
        except KeySetMismatch:
            return _copy_some(self, tensordict, non_blocking)
        if non_blocking or not copy_pairs(mine, theirs):
            leaves = len(mine) - mine.rows
            for target, value in () if is_compiling() else zip(mine, theirs, strict=True):
                check_write(target, value, finder(self._kd_entries, target))
            write = _non_blocking_copy if non_blocking else copy_over
            if is_compiling():
                binary_(self, tensordict, write)
            else:
                with putting_back(mine, theirs):
                    binary_(self, tensordict, write)
            copy_pairs(mine[leaves:], theirs[leaves:])
        return self

    def masked_fill(self, mask: Tensor, value: float) -> Self:
        """Return the container with a value where a mask is true.

        Args:
            mask: booleans over the first batch dimensions; where these do not fit, over the last.
            value: what is written.

        Raises:
            ShapeMismatch: if the mask fits neither.
        """
        mask = from_the_first(check_mask(mask), self._kd_desc.batch)
        return blended(self, torch.masked_fill, mask, value)

    def masked_fill_(self, mask: Tensor, value: float) -> Self:
        """Write a value where a mask is true, which fits as for `masked_fill`; return self.

        Raises:
            InvalidValue: if a leaf cannot hold the value, or cannot be written to; then
                nothing is written.
        """
        mask = from_the_first(check_mask(mask), self._kd_desc.batch)
        return binary_(self, mask, lambda leaf, chosen: leaf.masked_fill_(chosen, value))

    def new_zeros(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool = False,
        empty_lazy: bool = False,
    ) -> Self:
        """Create a container of zeros with the same keys and another batch size.

        Values of rows that are not tensors are `None` in the new rows. The last dimensions keep
        their names.

        Args:
            *size: the batch size; trailing dimensions of leaves are kept.
            dtype: the dtype of all leaves; `None`: keep that of each leaf.
            device: the device of all leaves; `None`: keep that of each leaf, and give the container
                none.
            requires_grad: record operations on the leaves.
            layout: the layout of the leaves.
            pin_memory: create leaves on the CPU in pinned memory.
            empty_lazy: return a lazy stack without entries for a lazy stack.
        """
        given = requires_grad, layout, pin_memory, empty_lazy
        return _fresh(self, size, Tensor.new_zeros, dtype, device, *given)

    def new_ones(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool = False,
        empty_lazy: bool = False,
    ) -> Self:
        """Create a container of ones with the same keys and another batch size; see `new_zeros`."""
        given = requires_grad, layout, pin_memory, empty_lazy
        return _fresh(self, size, Tensor.new_ones, dtype, device, *given)

    def new_empty(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool = False,
        empty_lazy: bool = False,
    ) -> Self:
        """Create a container of uninitialised leaves; see `new_zeros`."""
        given = requires_grad, layout, pin_memory, empty_lazy
        return _fresh(self, size, Tensor.new_empty, dtype, device, *given)

    def new_full(
        self,
        size: int | Sequence[int],
        fill_value: float,
        *,
        dtype: torch.dtype | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool = False,
        empty_lazy: bool = False,
    ) -> Self:
        """Create a container of one value with the same keys and another batch size.

        Args:
            size: the batch size; trailing dimensions of leaves are kept.
            fill_value: the value.
            dtype: the dtype of all leaves; `None`: keep that of each leaf.
            device: the device of all leaves; `None`: keep that of each leaf, and give the container
                none.
            requires_grad: record operations on the leaves.
            layout: the layout of the leaves.
            pin_memory: create leaves on the CPU in pinned memory.
            empty_lazy: return a lazy stack without entries for a lazy stack.
        """
        make = partial(Tensor.new_full, fill_value=fill_value)
        given = requires_grad, layout, pin_memory, empty_lazy
        return _fresh(self, (size,), make, dtype, device, *given)

    def new_tensor(
        self,
        data: object,
        *,
        dtype: torch.dtype | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Self:
        """Create a container of the same keys, each leaf from data: `torch.Tensor.new_tensor`.

        Args:
            data: what all leaves hold, whose shape becomes the batch size; or a container with the
                data of each leaf.
            dtype: the dtype of all leaves; `None`: keep that of each leaf.
            device: the device of all leaves; `None`: keep that of each leaf, and give the container
                none.
            requires_grad: record operations on the leaves.
            pin_memory: create leaves on the CPU in pinned memory.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 3), "b": torch.zeros(2).int()}, [2]).new_tensor(
            ...     [1.0, 2.0]
            ... )["b"]
            tensor([1, 2], dtype=torch.int32)
        """
        where = None if device is None or device is NO_DEFAULT else device_of(device)

        def make(leaf: Tensor, values: object) -> Tensor:
            source = values.detach() if isinstance(values, Tensor) else torch.as_tensor(values)
            new = source.to(where or leaf.device, dtype or leaf.dtype, copy=True)
            return (new.pin_memory() if pin_memory else new).requires_grad_(requires_grad)

        if isinstance(data, AbstractContainer):
            made = self._kd_zip_each(data, make)
            batch = data._kd_desc.batch
        else:
            values = torch.as_tensor(data)
            batch = tuple(values.shape)
            made = self._kd_map_each(
                lambda leaf: make(leaf, values), Fresh(batch, self._kd_desc.ndim)
            )
            where = where or values.device
        if device is None:
            put_on(made, None)  # nested containers, too
        where = None if device is None else where or made._kd_desc.device
        return made._kd_with_descriptor(describe(batch, where))


def _copy_some(td: W, source: object, non_blocking: bool) -> W:
    """Write the values of a source, which may have fewer keys."""
    writes: list[Write] = []
    for each in sources_of(source, {}):
        add_writes(writes, td, each)
    write_all(writes, non_blocking)
    return td


def fill_like(fn: Callable[..., Tensor]) -> Callable[..., object]:
    """Convert `torch.zeros_like` or a similar function to a function of containers.

    The result of a container that is locked is locked.
    """

    def filled(
        input: AbstractContainer, *args: object, device: DeviceLike | None = None, **options: object
    ) -> AbstractContainer:
        if device is None and not args and not options:
            return input._kd_map_each(fn)
        if device is None:
            return input._kd_map_each(lambda leaf: fn(leaf, *args, **options))
        made = input._kd_map_each(lambda leaf: fn(leaf, *args, device=device, **options))
        return made._kd_with_descriptor(describe_on(made._kd_desc.batch, device))

    def locked_as(
        input: AbstractContainer, *args: object, device: DeviceLike | None = None, **options: object
    ) -> AbstractContainer:
        made = filled(input, *args, device=device, **options)
        return lock(made) if is_frozen(input) else made

    return locked_as


def _key_and_value(*given: object, **named: object) -> tuple[object, object]:
    """Return the key, `None` if there is none, and the value, as `fill_` takes them."""
    names = ("key", "value") if len(given) + len(named) > 1 else ("value",)
    found = {**dict(zip(names, given, strict=False)), **named}
    if len(given) + len(named) != len(names) or found.keys() != set(names):
        raise InvalidArgument(
            f"`fill_` expected a value, or a key and a value, got {len(given)} arguments and "
            f"{listed(named)} by keyword."
        )
    return found.get("key"), found["value"]


def _fill_entry(level: AbstractContainer, path: tuple[str, ...], value: object) -> None:
    """Fill what is at the last key of a path in one level; data that is not a tensor stays."""
    alone: AbstractContainer = _only(level, path[-1])
    binary_(alone, value, Tensor.fill_, refuse_overlap=isinstance(value, Tensor))


def _only(level: F, key: str) -> F:
    """Return a container of one entry, members kept."""
    if isinstance(level, Composite):
        return level._by_member(lambda member: _only(member, key))
    return level._kd_like({key: level._kd_entries[key]}, level._kd_desc.unlocked())


def _fresh(
    td: F,
    size: Sequence[int | Sequence[int]],
    make: Callable[..., Tensor],
    dtype: torch.dtype | None,
    device: DeviceLike | NoDefault | None,
    requires_grad: bool,
    layout: torch.layout,
    pin_memory: bool,
    empty_lazy: bool,
) -> F:
    """Return a container of new leaves, which `make` creates from each leaf and a shape."""
    batch, ndim = sizes_of(size), td._kd_desc.ndim
    if empty_lazy and isinstance(td, Composite) and batch[td._dim : td._dim + 1] > (0,):
        inner = (*batch[: td._dim], *batch[td._dim + 1 :])
        first = td._members[0]
        depth = first._kd_desc.ndim
        rows = [_without_leaves(first, inner, depth) for _ in range(batch[td._dim])]
        return registry.lazy_stack(rows, td._dim)
    where = None if device is NO_DEFAULT else device
    options: dict[str, object] = {"requires_grad": True} if requires_grad else {}
    if layout is not torch.strided:
        options["layout"] = layout
    if pin_memory:
        options["pin_memory"] = True
    made = td._kd_map_each(
        lambda leaf: make(leaf, (*batch, *leaf.shape[ndim:]), dtype=dtype, device=where, **options),
        Fresh(
            _with_last_names(batch, td._kd_desc.batch),
            ndim,
            lambda leaf: make(leaf, leaf.shape, dtype=dtype, device=where, **options),
        ),
    )
    if device is NO_DEFAULT:
        return made
    if device is None:
        put_on(made, None)  # nested containers, too
        return made
    return made._kd_with_descriptor(describe_on(made._kd_desc.batch, device))


def _without_leaves(td: AbstractContainer, batch: Batch, ndim: int) -> AbstractContainer:
    """Return a container of no leaves, whose nested ones have none either."""
    entries: dict[str, Entry] = {
        key: _without_leaves(value, batch, ndim)
        for key, value in td._kd_entries.items()
        if isinstance(value, AbstractContainer)
    }
    return td._kd_like(entries, describe((*batch, *without_names(td._kd_desc.batch)[ndim:])))


def _with_last_names(batch: Batch, named: Batch) -> Batch:
    """Return a batch size whose last dimensions have the names of the last ones of another."""
    if not has_names(named):
        return batch
    names = [None] * (len(batch) - len(named)) + list(names_of(named))
    return with_names(batch, tuple(names[len(names) - len(batch) :]))


def _non_blocking_copy(leaf: Tensor, source: Tensor) -> Tensor:
    return leaf.copy_(source, non_blocking=True)
