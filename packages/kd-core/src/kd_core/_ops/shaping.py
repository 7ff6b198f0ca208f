"""Shapes of the batch: `view`, `reshape`, `permute` and other methods named as in torch.

A container is treated as a tensor of shape `batch_size`: only batch dimensions change, and trailing
dimensions of leaves and further batch dimensions of nested containers are kept. The leaves are
views where torch makes views.

Each method resolves its arguments to a plan (`resize_plan` and its kin), then maps one function
over the leaves. With `inplace=True` this container takes the result as its content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._errors import InvalidArgument, InvalidValue, OutOfRange, ShapeMismatch, wrong_type
from kd_core._keys import format_key
from kd_core._leaves.loops import finder
from kd_core._naming import also_named
from kd_core._ops.description import become, check_names
from kd_core._ops.scopes import made_by, moved, recording
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    engine,
    locked_as,
    set_names,
    unlock,
)
from kd_core._shapes import (
    Expanded,
    Grown,
    Plan,
    Resized,
    Spread,
    Viewed,
    as_int,
    batch_of,
    cached,
    expanded,
    fitted,
    infer_sizes,
    kept,
    names_of,
    numbered,
    numbers_of,
    numel,
    one_per_dim,
    plan,
    resized,
    sizes_of,
    without_names,
    wrap_dim,
    wrap_dims,
)
from kd_core._torch_private import traced_as

if TYPE_CHECKING:
    from types import EllipsisType
    from typing import Self, TypeVar

    from kd_core._types import Batch, BatchSize, Dims, Sizes

    T = TypeVar("T")
    W = TypeVar("W", bound=AbstractContainer)


# What the arguments of a shape method mean for one batch size: plans, cached.
#
# The function of a leaf makes the fastest torch call ("shape" in the benchmarks): it passes sizes
# as separate arguments, -1 for a single trailing dimension, and `x[None]` for `x.unsqueeze(0)`.


def distinct_dims(dims: Dims, batch: Batch) -> Batch:
    """Return one dimension, or several, by number or name, counted from the front."""
    return wrap_dims(numbers_of(dims, batch), len(batch))


def _resizing(batch: Batch, new: Batch, name: str) -> Plan:
    """Return the plan of a `view` or `reshape`; it adds no guard on a traced size."""
    ndim = len(batch)

    def resize_leaf(leaf: Tensor) -> Tensor:
        # Passing the shape as one argument is slower, in compiled code too.
        call: Callable[..., Tensor] = getattr(leaf, name)
        sizes = leaf.shape[ndim:]
        return call(*new, *sizes) if new else call(sizes)

    return resize_leaf, new, lambda shape: new + shape[ndim:]  # as `plan`, inlined for dynamo


def _fast_resizing(batch: Batch, new: Batch, name: str) -> Plan:
    """Return the same with a faster function of a leaf where sizes are numbers."""
    general = _resizing(batch, new, name)
    # -1 is ambiguous without elements, and comparing a traced size with 0 would add a guard.
    if is_compiling() or not numel(batch):
        return general
    ndim = len(batch)
    call: Callable[..., Tensor] = getattr(Tensor, name)
    single = (*new, -1)

    def resize_leaf(leaf: Tensor) -> Tensor:
        further = leaf.ndim - ndim
        if further == 1:
            try:
                return call(leaf, *single)
            except RuntimeError:
                pass  # -1 is ambiguous too where vmap maps over no rows
        elif not further and new:
            return call(leaf, *new)
        return call(leaf, (*new, *leaf.shape[ndim:]))

    return resize_leaf, new, (Viewed if name == "view" else Resized)(new, ndim)


@cached
def resize_plan(batch: Batch, shape: Sizes, name: str) -> Plan:
    new = fitted(batch, shape)
    if not is_compiling() and new == batch:  # comparing traced sizes would add a guard
        return kept(batch)
    return _fast_resizing(batch, new, name)


@cached
def flatten_plan(batch: Batch, start_dim: int | str, end_dim: int | str) -> Plan:
    if not batch:
        return unsqueeze_plan(batch, 0)
    start, end = wrap_dim(start_dim, batch), wrap_dim(end_dim, batch)
    if end < start:
        raise InvalidValue(
            f"`start_dim` of `flatten` must not be after `end_dim`, got {start_dim} and {end_dim}. "
            "Exchange them."
        )
    new = (*batch[:start], numel(batch[start : end + 1]), *batch[end + 1 :])
    return lambda leaf: leaf.flatten(start, end), new, Resized(new, len(batch))


@cached
def unflatten_plan(batch: Batch, dim: int | str, sizes: Sequence[int]) -> Plan:
    at = wrap_dim(dim, batch)
    what = f"dimension {at} of batch_size {batch}"
    split = infer_sizes(sizes_of([sizes]), batch[at], what)
    if split:  # the last one has the name
        split = (*split[:-1], resized(batch[at], split[-1]))
    new = (*batch[:at], *split, *batch[at + 1 :])
    return _fast_resizing(batch, new, "view")


@cached
def squeeze_plan(batch: Batch, dim: Dims | None) -> Plan:
    ndim = len(batch)
    dims = range(ndim) if dim is None else distinct_dims(dim, batch)
    dropped = tuple(i for i in dims if batch[i] == 1)
    if not dropped:
        return kept(batch)
    new = tuple(size for i, size in enumerate(batch) if i not in dropped)
    if dropped == (0,):
        return plan(batch, lambda leaf: leaf[0], new)
    return plan(batch, lambda leaf: leaf.squeeze(dropped), new)


@cached
def unsqueeze_plan(batch: Batch, dim: int) -> Plan:
    at = wrap_dim(dim, len(batch) + 1)
    new = (*batch[:at], 1, *batch[at:])
    grown = Grown(new, len(batch))
    if at == 0:
        return lambda leaf: leaf[None], new, grown
    return lambda leaf: leaf.unsqueeze(at), new, grown


@cached
def permute_plan(batch: Batch, dims: tuple[Dims, ...]) -> Plan:
    given = one_per_dim([numbered(each, batch) for each in dims], batch, "permute")
    order = wrap_dims(given, len(batch))
    if len(order) != len(batch):
        raise InvalidValue(
            f"`permute` expected each of the {len(batch)} batch dimensions once, got {given}. Use "
            "`apply` for trailing dimensions of entries."
        )
    return _permuted(batch, order)


def _permuted(batch: Batch, order: Batch) -> Plan:
    ndim = len(batch)
    if order == (*range(ndim),):
        return kept(batch)
    single = (*order, ndim)

    def permute_leaf(leaf: Tensor) -> Tensor:
        if leaf.ndim == ndim + 1:
            return leaf.permute(*single)
        return leaf.permute((*order, *range(ndim, leaf.ndim)))

    return plan(batch, permute_leaf, tuple(batch[i] for i in order))


@cached
def transpose_plan(batch: Batch, dim0: int | str, dim1: int | str) -> Plan:
    one, two = wrap_dim(dim0, batch), wrap_dim(dim1, batch)
    if one == two:
        return kept(batch)
    new = list(batch)
    new[one], new[two] = batch[two], batch[one]
    return plan(batch, lambda leaf: leaf.transpose(one, two), tuple(new))


@cached
def movedim_plan(batch: Batch, source: Dims, destination: Dims) -> Plan:
    ndim = len(batch)
    sources, targets = distinct_dims(source, batch), distinct_dims(destination, batch)
    if len(sources) != len(targets):
        raise InvalidValue(
            f"`movedim` expected as many destinations as sources, got {source} and {destination}."
        )
    moved = dict(zip(targets, sources, strict=True))
    rest = [i for i in range(ndim) if i not in sources]
    order = tuple(moved[i] if i in moved else rest.pop(0) for i in range(ndim))
    return _permuted(batch, order)


@cached
def expand_plan(batch: Batch, shape: Sizes) -> Plan:
    new = expanded(batch, sizes_of(shape))
    ndim = len(batch)
    lead = len(new) - ndim
    sizes = without_names(new)
    new = (*new[:lead], *map(resized, batch, new[lead:]))
    single = (*sizes, -1)

    def expand_leaf(leaf: Tensor) -> Tensor:
        extra = leaf.ndim - ndim
        return leaf.expand(*single) if extra == 1 else leaf.expand((*sizes, *[-1] * extra))

    return expand_leaf, new, (Spread if lead else Expanded)(new, ndim)


@cached
def repeat_plan(batch: Batch, counts: Batch) -> Plan:
    if any(count < 0 for count in counts):
        raise InvalidValue(f"counts must be non-negative, got {counts}.")
    ndim = len(batch)
    lead = len(counts) - ndim
    sizes = zip(counts[lead:], batch, strict=True)
    new = counts[:lead] + tuple(resized(size, count * size) for count, size in sizes)
    return plan(batch, lambda leaf: leaf.repeat((*counts, *[1] * (leaf.ndim - ndim))), new)


def repeat_interleave_plan(
    batch: Batch, repeats: int | Tensor, dim: int | str, output_size: int | None
) -> Plan:
    at = wrap_dim(dim, batch)
    if not isinstance(repeats, Tensor) or not repeats.ndim:
        repeats = as_int(repeats)
    size = _output_size(repeats, batch[at], output_size)
    new = (*batch[:at], resized(batch[at], size), *batch[at + 1 :])
    return plan(batch, lambda leaf: leaf.repeat_interleave(repeats, at, output_size=size), new)


def _output_size(repeats: int | Tensor, size: int, given: int | None) -> int:
    """Return the number of rows after each was repeated; on a GPU a given number is not checked."""
    if given is not None and isinstance(repeats, Tensor) and not repeats.is_cpu:
        return as_int(given)
    rows = _repeated_size(repeats, size)
    if given is not None and as_int(given) != rows:
        raise InvalidValue(f"`output_size` must be the sum of `repeats`, {rows}, got {given}.")
    return rows


def _repeated_size(repeats: int | Tensor, size: int) -> int:
    if not isinstance(repeats, Tensor):
        if repeats < 0:
            raise InvalidValue(f"`repeats` must be non-negative, got {repeats}.")
        return size * repeats
    if repeats.ndim > 1 or (repeats.ndim == 1 and repeats.shape[0] not in (1, size)):
        raise ShapeMismatch(
            f"`repeats` must hold one count for each of the {size} rows, got shape "
            f"{tuple(repeats.shape)}."
        )
    return int(repeats.expand(size).sum())


@cached
def roll_plan(batch: Batch, shifts: int | Sequence[int], dims: Dims) -> Plan:
    by, given = sizes_of([shifts]), numbers_of(dims, batch)
    along = tuple(wrap_dim(dim, batch) for dim in given)  # of one given twice torch adds the shifts
    if len(by) != len(along):
        raise InvalidValue(f"`roll` expected one shift for each dimension, got {by} and {along}.")
    return plan(batch, lambda leaf: leaf.roll(by, along), batch)


@cached
def flip_plan(batch: Batch, dims: tuple[Dims, ...]) -> Plan:
    given = [numbered(each, batch) for each in dims]
    along = wrap_dims(one_per_dim(given, batch, "flip"), len(batch))
    return plan(batch, lambda leaf: leaf.flip(along), batch)


@recording
class Shape(AbstractContainer):
    """The methods that change the shape of the batch."""

    __slots__ = ()

    def _kd_traced_resized(self, shape: Sizes, name: str) -> Self:
        """Reshape as dynamo traces it: new sizes are constants, and methods add no guards."""
        desc = self._kd_desc
        after = desc.traced_reshaped(shape)
        new, ndim = after.batch, len(desc.batch)
        if desc.constants_of((*desc.batch, *new)) is not None and new == desc.batch:
            return self  # as `resize_plan` says; comparing traced sizes would add a guard

        def resize_leaf(leaf: Tensor) -> Tensor:  # as of `resize_plan`, inlined
            sizes = (*new, *leaf.shape[ndim:])
            return leaf.view(sizes) if name == "view" else leaf.reshape(sizes)

        result = self._kd_map_each(resize_leaf, lambda batch: new + batch[ndim:], (desc, after))
        return locked_as(self, result)

    def view(
        self,
        *shape: int | Sequence[int] | torch.dtype,
        size: Sequence[int] | None = None,
        batch_size: BatchSize | None = None,
    ) -> Self:
        """Return a view with another shape of the batch; storage is shared.

        Args:
            *shape: the new batch size, one size may be -1, it is worked out; or a dtype of the same
                width, as which all leaves are read.
            size: the new batch size by keyword.
            batch_size: the batch size of a view as a dtype; without a dtype it does nothing.

        Raises:
            ShapeMismatch: if the sizes do not fit the batch size.
            InvalidValue: if the strides of a leaf do not allow the view; use `reshape` then.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3])
            >>> td.view(-1)["a"].shape
            torch.Size([6, 4])
        """
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            viewed = _view_as_dtype(self, shape[0])
            if batch_size is None:
                return viewed
            after = viewed._kd_desc.unlocked().with_batch(batch_of(batch_size))
            return viewed._kd_with_descriptor(after)
        if size is not None:
            shape = _sizes_or(shape, size, "size")
        sizes: Sizes = shape  # type: ignore[assignment]  # a dtype stands alone
        how = None if is_dynamo_compiling() else resize_plan(self._kd_desc.batch, sizes, "view")
        try:
            if how is None:
                return self._kd_traced_resized(sizes, "view")
            result = moved(how, self)
            if result is not self or self._kd_owns_leaves:
                return result
            same = sizes_of(sizes) == self._kd_desc.size  # without -1
            return self if same else locked_as(self, self._kd_shallow())
        except RuntimeError as error:
            raise InvalidValue(
                "the strides of an entry do not allow a view of batch_size "
                f"{self._kd_desc.batch} as {fitted(self._kd_desc.batch, sizes)} ({error}). Use "
                "`reshape`, which copies if needed."
            ) from error

    def _kd_traced_reshape(
        self,
        *args: int | Sequence[int],
        shape: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        inplace: bool = False,
    ) -> Self:
        if shape is not None:
            args = _sizes_or(args, shape, "shape")
        if size is not None:
            args = _sizes_or(args, size, "size")
        result = self._kd_traced_resized(args, "reshape")
        return become(self, result, "reshape in place") if inplace else result

    @traced_as(_kd_traced_reshape)
    def reshape(
        self,
        *args: int | Sequence[int],
        shape: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        inplace: bool = False,
    ) -> Self:
        """Reshape the batch dimensions; leaves are views where torch can make one.

        Args:
            *args: the new batch size; one size may be -1, it is worked out.
            shape: the same by keyword.
            size: another name of `shape`.
            inplace: change this container instead of making a new one.

        Raises:
            ShapeMismatch: if the sizes do not fit the batch size.
        """
        if shape is not None:
            args = _sizes_or(args, shape, "shape")
        if size is not None:
            args = _sizes_or(args, size, "size")
        plan = resize_plan(self._kd_desc.batch, args, "reshape")
        return _moved_in_place(plan, self, "reshape in place") if inplace else moved(plan, self)

    def view_as(self, other: AbstractContainer | Tensor) -> Self:
        """Return a view whose batch has the shape of another container or tensor."""
        return engine(self).view(self, _shape_like(other))

    def reshape_as(self, other: AbstractContainer | Tensor) -> Self:
        """Reshape the batch dimensions to the shape of another container or tensor."""
        return engine(self).reshape(self, _shape_like(other))

    def flatten(
        self, start_dim: int | str = 0, end_dim: int | str = -1, *, inplace: bool = False
    ) -> Self:
        """Merge neighbouring batch dimensions into one.

        Args:
            start_dim: the first dimension to merge.
            end_dim: the last dimension to merge.
            inplace: change this container instead of making a new one.

        Raises:
            InvalidValue: if `end_dim` comes before `start_dim`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).flatten().batch_size
            torch.Size([6])
        """
        batch = self._kd_desc.batch
        if not self._kd_owns_leaves and wrap_dim(start_dim, batch) == wrap_dim(end_dim, batch):
            return self
        plan = flatten_plan(batch, start_dim, end_dim)
        return _moved_in_place(plan, self, "flatten in place") if inplace else moved(plan, self)

    def unflatten(
        self, dim: int | str, unflattened_size: Sequence[int], *, inplace: bool = False
    ) -> Self:
        """Split one batch dimension into several; the inverse of `flatten`.

        Args:
            dim: the dimension to split.
            unflattened_size: its new sizes; one may be -1.
            inplace: change this container instead of making a new one.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(6, 4)}, [6]).unflatten(0, (2, -1)).batch_size
            torch.Size([2, 3])
        """
        plan = unflatten_plan(self._kd_desc.batch, dim, unflattened_size)
        return _moved_in_place(plan, self, "unflatten in place") if inplace else moved(plan, self)

    def squeeze(self, dim: Dims | None = None) -> Self:
        """Remove batch dimensions of size 1.

        Args:
            dim: the dimensions; one of another size is kept. `None`: all of size 1.
        """
        return moved(squeeze_plan(self._kd_desc.batch, dim), self)

    def unsqueeze(self, dim: int) -> Self:
        """Insert a batch dimension of size 1.

        Args:
            dim: the position of the new dimension; a negative one counts from the end.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 4)}, [2]).unsqueeze(-1)["a"].shape
            torch.Size([2, 1, 4])
        """
        return moved(unsqueeze_plan(self._kd_desc.batch, dim), self)

    def permute(self, *args: Dims, dims: Sequence[int | str] | None = None) -> Self:
        """Reorder the batch dimensions.

        Args:
            *args: all batch dimensions in the new order.
            dims: the same, passed by keyword.

        Raises:
            InvalidValue: if a dimension is missing.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).permute(1, 0)["a"].shape
            torch.Size([3, 2, 4])
        """
        result = moved(permute_plan(self._kd_desc.batch, _sizes_or(args, dims, "dims")), self)
        if result is not self or self._kd_owns_leaves:
            return result
        return locked_as(self, self._kd_shallow())

    def transpose(self, dim0: int | str, dim1: int | str) -> Self:
        """Exchange two batch dimensions."""
        return moved(transpose_plan(self._kd_desc.batch, dim0, dim1), self)

    def swapaxes(self, axis0: int | str, axis1: int | str) -> Self:
        """Exchange two batch dimensions; another name of `transpose`."""
        return engine(self).transpose(self, axis0, axis1)

    @also_named(dim0="axis0", dim1="axis1")
    def swapdims(self, axis0: int | str, axis1: int | str) -> Self:
        """Exchange two batch dimensions; another name of `transpose`."""
        return engine(self).transpose(self, axis0, axis1)

    def movedim(self, source: Dims, destination: Dims) -> Self:
        """Move batch dimensions to other positions, the rest keeping their order.

        Args:
            source: the dimensions to move.
            destination: the new position of each.

        Raises:
            InvalidValue: if the numbers of dimensions and positions differ.
        """
        return moved(movedim_plan(self._kd_desc.batch, source, destination), self)

    def moveaxis(self, source: Dims, destination: Dims) -> Self:
        """Move batch dimensions; another name of `movedim`."""
        return engine(self).movedim(self, source, destination)

    def expand(self, *shape: int | Sequence[int], size: Sequence[int] | None = None) -> Self:
        """Repeat batch dimensions of size 1 without copying.

        Args:
            *shape: the new batch size; -1 keeps a size, new dimensions come in front.
            size: the same by keyword.

        Raises:
            ShapeMismatch: if a dimension larger than 1 would change.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 4)}, [2]).expand(3, -1)["a"].shape
            torch.Size([3, 2, 4])
        """
        if size is not None:
            shape = _sizes_or(shape, size, "size")
        return moved(expand_plan(self._kd_desc.batch, shape), self)

    def expand_as(self, other: AbstractContainer | Tensor) -> Self:
        """Expand to the batch size of another container, or to the shape of a tensor."""
        result = engine(self).expand(self, _shape_like(other))
        if isinstance(other, AbstractContainer) and result._kd_desc.frozen:
            return unlock(result) if result is not self else self._kd_shallow()
        return result

    def repeat(self, *repeats: int | Sequence[int], inplace: bool = False) -> Self:
        """Copy the batch several times along its dimensions, as `torch.Tensor.repeat` does.

        Args:
            *repeats: the number of copies for each batch dimension; additional numbers in front
                add new dimensions.
            inplace: change this container instead of making a new one.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.tensor([1, 2])}, [2]).repeat(2)["a"]
            tensor([1, 2, 1, 2])
        """
        ndim = self._kd_desc.ndim
        counts = one_per_dim(repeats, self._kd_desc.batch, "repeat")
        if len(counts) < ndim:
            raise InvalidValue(
                f"`repeat` expected a count for each of the {ndim} batch dimensions, got {counts}. "
                "`tile` takes fewer."
            )
        plan = repeat_plan(self._kd_desc.batch, counts)
        made = _repeated(self, plan, counts)
        result = moved(plan, self) if made is None else made
        return become(self, result, "repeat in place") if inplace else result

    def tile(self, *args: int | Sequence[int], dims: Sequence[int] | None = None) -> Self:
        """Copy the batch several times, like `repeat`; missing counts in front are 1."""
        counts = one_per_dim(_sizes_or(args, dims, "dims"), self._kd_desc.batch, "tile")
        missing = self._kd_desc.ndim - len(counts)
        return moved(repeat_plan(self._kd_desc.batch, (1,) * missing + counts), self)

    def repeat_interleave(
        self,
        repeats: int | Tensor,
        dim: int | str | None = None,
        *,
        output_size: int | None = None,
        inplace: bool = False,
    ) -> Self:
        """Copy each row several times, the copies side by side.

        Args:
            repeats: the number of copies, one number for all rows or one for each.
            dim: the batch dimension; `None`: flatten the batch first.
            output_size: the sum of `repeats`, if known; avoids a synchronisation with the device.
            inplace: change this container instead of making a new one.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.tensor([1, 2])}, [2]).repeat_interleave(2, 0)["a"]
            tensor([1, 1, 2, 2])
        """
        flatten = dim is None or (not self._kd_desc.ndim and dim in (0, -1))  # as a 0-dim tensor
        flat = engine(self).flatten(self) if flatten else self
        at = 0 if dim is None else dim
        how = repeat_interleave_plan(flat._kd_desc.batch, repeats, at, output_size)
        made = _interleaved(flat, how, repeats, at)
        result = moved(how, flat) if made is None else made
        return become(self, result, "repeat rows in place") if inplace else result

    def roll(
        self,
        shifts: int | Sequence[int],
        dims: Dims | None = None,
        *,
        inplace: bool = False,
    ) -> Self:
        """Shift rows along batch dimensions; rows beyond the end are reinserted in front.

        Args:
            shifts: the number of rows, one for each dimension.
            dims: the batch dimensions, one for each shift; `None`: flatten, shift and restore.
            inplace: change this container instead of making a new one.
        """
        if dims is None and self._kd_desc.ndim > 1:
            of = engine(self)
            result = of.unflatten(of.roll(of.flatten(self), shifts, 0), 0, self._kd_desc.batch)
        elif dims is None and not self._kd_desc.ndim and len(sizes_of([shifts])) == 1:
            result = self._kd_map_each(torch.clone)
        else:
            along = 0 if dims is None else dims
            result = moved(roll_plan(self._kd_desc.batch, shifts, along), self)
        return become(self, result, "roll in place") if inplace else result

    def flip(self, *args: Dims, dims: Dims | None = None) -> Self:
        """Reverse the order of rows along batch dimensions; a copy, as in torch."""
        return moved(flip_plan(self._kd_desc.batch, _sizes_or(args, dims, "dims")), self)


def _moved_in_place(how: Plan, td: W, action: str) -> W:
    """Let a container take what a plan makes of it as its content; return it."""
    # Of a copy: a lazy stack with a new dimension has what it was made of as its member.
    return become(td, moved(how, td._kd_shallow()), action)


def _stacked(td: W, how: Plan, members: Sequence[AbstractContainer], dim: int) -> W:
    """Return a lazy stack in place of what a plan makes of another."""
    if isinstance(td, Composite) and td._kd_desc.open:  # a plan knows no sizes of new members
        return td._of(members, dim)
    return made_by(how, td, registry.lazy_stack(members, dim))


def _repeated(td: W, how: Plan, counts: Batch) -> W | None:
    """Return a lazy stack of repeated members; `None` where nothing or a new dimension is made."""
    if not isinstance(td, Composite):
        return None
    dim = td._dim
    if len(counts) != td._kd_desc.ndim or not all(counts):
        return None
    inner = (*counts[:dim], *counts[dim + 1 :])
    members = [
        member._kd_engine.repeat(member, inner) if inner else member._kd_map_each(torch.clone)
        for _ in range(counts[dim])
        for member in td._members
    ]
    return _stacked(td, how, members, dim)


def _interleaved(td: W, how: Plan, repeats: int | Tensor, dim: int | str) -> W | None:
    """Return a lazy stack of members, each several times, or of members of repeated rows."""
    if not isinstance(td, Composite):
        return None
    at = wrap_dim(dim, td._kd_desc.batch)
    if not how[1][at]:
        return None
    if at != td._dim:
        inner = at - (at > td._dim)
        members = [each._kd_engine.repeat_interleave(each, repeats, inner) for each in td._members]
        return _stacked(td, how, members, td._dim)
    counts = torch.as_tensor(repeats).expand(len(td._members)).tolist()
    members = [
        member._kd_map_each(torch.clone)
        for member, count in zip(td._members, counts, strict=True)
        for _ in range(count)
    ]
    return _stacked(td, how, members, at)


def _sizes_or(given: tuple[T, ...], named: T | None, name: str) -> tuple[T, ...]:
    """Return sizes or dimensions passed by position or by the keyword of torch."""
    if named is None:
        return given
    if given:
        raise InvalidArgument(f"expected `{name}` once, got it by position and by keyword.")
    return (named,)


def _shape_like(other: AbstractContainer | Tensor) -> Batch:
    if isinstance(other, Tensor):
        return tuple(other.shape)
    if not isinstance(other, AbstractContainer):
        raise wrong_type("`other`", "a container or a tensor", other)
    return other._kd_desc.batch


def _view_as_dtype(td: W, dtype: torch.dtype) -> W:
    """Read the bytes of every leaf as another dtype."""
    batch = td._kd_desc.batch

    def view(leaf: Tensor) -> Tensor:
        try:
            seen = leaf.view(dtype)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise _cannot_view(td, leaf, dtype, reason) from None
        if seen.shape[: len(batch)] != leaf.shape[: len(batch)]:
            raise _cannot_view(td, leaf, dtype, "the last batch dimension would change")
        return seen

    return td._kd_map_each(view)


def _cannot_view(
    td: AbstractContainer, leaf: Tensor, dtype: torch.dtype, reason: str
) -> InvalidValue:
    name = format_key(finder(td._kd_entries, leaf)())
    return InvalidValue(
        f"entry {name} of {leaf.dtype} cannot be viewed as {dtype}: {reason.rstrip('.')}. Cast it "
        "with `to`, or `unsqueeze` its last dimension."
    )


# The number, the orientation and the names of batch dimensions.


@recording
class Dimensions(AbstractContainer):
    """The methods that add batch dimensions, turn the batch, or name its dimensions.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([[1, 2], [3, 4]])}, [2, 2])
        >>> td.rot90()["a"].tolist(), td.fliplr()["a"].tolist()
        ([[2, 4], [1, 3]], [[2, 1], [4, 3]])
        >>> td[0].atleast_3d().batch_size, td.broadcast_to((5, 2, 2)).batch_size
        (torch.Size([1, 2, 1]), torch.Size([5, 2, 2]))
    """

    __slots__ = ()

    def atleast_1d(self) -> Self:
        """Return the container, with one batch dimension at least: `torch.atleast_1d`."""
        return moved(_atleast(self._kd_desc.batch, 1), self)

    def atleast_2d(self) -> Self:
        """Return the container with two batch dimensions at least, new ones in front."""
        return moved(_atleast(self._kd_desc.batch, 2), self)

    def atleast_3d(self) -> Self:
        """Return the container with three batch dimensions at least: `torch.atleast_3d`.

        As in torch, one batch dimension becomes the middle one, and two become the first two.
        """
        return moved(_atleast(self._kd_desc.batch, 3), self)

    def broadcast_to(self, shape: Sequence[int]) -> Self:
        """Repeat batch dimensions of size 1 without copying: `expand` with one argument.

        One value that is not a tensor stays one; `expand` makes one value per row of it.

        Args:
            shape: the new batch size; -1 keeps a size, new dimensions come in front.
        """
        leaf, new, _ = expand_plan(self._kd_desc.batch, (shape,))
        return moved((leaf, new, Expanded(new, self._kd_desc.ndim)), self)

    def fliplr(self) -> Self:
        """Reverse the order along the second batch dimension; a copy, as in torch.

        Raises:
            OutOfRange: if there are fewer than two batch dimensions.
        """
        _check_ndim(self, 2, "fliplr")
        return moved(flip_plan(self._kd_desc.batch, (1,)), self)

    def flipud(self) -> Self:
        """Reverse the order along the first batch dimension; a copy, as in torch.

        Raises:
            OutOfRange: if there is no batch dimension.
        """
        _check_ndim(self, 1, "flipud")
        return moved(flip_plan(self._kd_desc.batch, (0,)), self)

    def rot90(self, k: int = 1, dims: Sequence[int | str] = (0, 1)) -> Self:
        """Return the batch rotated by 90 degrees in a plane of two dimensions; a copy, as in torch.

        Args:
            k: the number of turns, from the first dimension towards the second.
            dims: the two batch dimensions.

        Raises:
            OutOfRange: if there are fewer than two batch dimensions.
        """
        _check_ndim(self, 2, "rot90")
        return moved(_rot90(self._kd_desc.batch, k, tuple(dims)), self)

    @property
    def names(self) -> list[str | None]:
        """The name of each batch dimension, `None` for one without a name.

        Setting it names the dimensions of nested containers, too; `None` removes all names.

        Raises:
            InvalidValue: if there is not one for each dimension, or one is given twice.
            Locked: if the container, or one below, is locked.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["time", "env"])
            >>> td.transpose(0, 1).names, td[0].names, td.sum("time")["a"]
            (['env', 'time'], ['env'], tensor([2., 2., 2.]))
        """
        return list(names_of(self._kd_desc.batch))

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        name_dims(self, names)

    def refine_names(self, *names: str | EllipsisType | None) -> Self:
        """Name dimensions that have no name; return self.

        Args:
            *names: one for each dimension: its name, a name for one without, or `None` to leave it.
                One `...` stands for all dimensions that are not listed.

        Raises:
            InvalidValue: if a dimension has another name already.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["time", None])
            >>> td.refine_names(..., "env").names
            ['time', 'env']
        """
        old = names_of(self._kd_desc.batch)
        given = _filled(names, len(old))
        for dim, (mine, new) in enumerate(zip(old, given, strict=False)):
            if mine is not None and new is not None and mine != new:
                raise InvalidValue(
                    f"dimension {dim} is named `{mine}` and cannot be refined to `{new}`. Use "
                    "`rename`."
                )
        pairs = zip(old, given, strict=False)
        name_dims(
            self, [mine if new is None else new for mine, new in pairs] + [*given[len(old) :]]
        )
        return self

    def rename(self, *names: str | None, **changes: str | None) -> Self:
        """Return a container with other names of dimensions; tensors are shared.

        Args:
            *names: the new name of each dimension.
            **changes: new names by old name.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["time", "env"])
            >>> td.rename(time="step").names
            ['step', 'env']
        """
        return self._kd_shallow().rename_(*names, **changes)

    def rename_(self, *names: str | None, **changes: str | None) -> Self:
        """Change the names of dimensions in place; return self. See `rename`."""
        old = names_of(self._kd_desc.batch)
        if names and changes:
            raise InvalidArgument("names by position cannot be combined with names by keyword.")
        unknown = [name for name in changes if name not in old]
        if unknown:
            raise InvalidValue(f"no batch dimension is named `{unknown[0]}`; the names are {old}.")
        if names == (None,):
            names = (None,) * len(old)
        changed = [changes.get(name or "", name) for name in old] if changes else names or old
        name_dims(self, changed)
        return self


def name_dims(td: AbstractContainer, names: Sequence[str | None] | None) -> None:
    """Set the names of all batch dimensions of a container; a lock does not cover them."""
    set_names(td, check_names(names, td._kd_desc.batch))


def _check_ndim(td: AbstractContainer, ndim: int, name: str) -> None:
    if td._kd_desc.ndim < ndim:
        raise OutOfRange(
            f"`{name}` requires at least {ndim} batch dimension{'s' if ndim > 1 else ''}, got "
            f"batch_size {td._kd_desc.batch}. Use `unsqueeze` first."
        )


@cached
def _atleast(batch: Batch, ndim: int) -> Plan:
    missing = ndim - len(batch)
    if missing <= 0:
        return kept(batch)
    behind = int(ndim == 3 and bool(batch))
    new = (1,) * (missing - behind) + batch + (1,) * behind
    at = len(batch)
    return plan(batch, lambda leaf: leaf.reshape((*new, *leaf.shape[at:])), new)


@cached
def _rot90(batch: Batch, k: int, dims: tuple[int | str, ...]) -> Plan:
    turns = as_int(k) % 4
    plane = distinct_dims(dims, batch)
    if len(plane) != 2:
        raise InvalidValue(f"`dims` of `rot90` must be two dimensions, got {dims}.")
    new = list(batch)
    if turns % 2:
        new[plane[0]], new[plane[1]] = new[plane[1]], new[plane[0]]
    return plan(batch, lambda leaf: leaf.rot90(turns, plane), tuple(new))


def _filled(names: Sequence[Any], ndim: int) -> tuple[str | None, ...]:
    """Return names with `...` replaced by as many `None` as there are dimensions left."""
    if names.count(...) > 1:
        raise InvalidArgument("names must hold at most one `...`.")
    if ... not in names:
        return tuple(names)  # checked when they are set
    at = names.index(...)
    rest = (None,) * (ndim - len(names) + 1)
    return (*names[:at], *rest, *names[at + 1 :])
