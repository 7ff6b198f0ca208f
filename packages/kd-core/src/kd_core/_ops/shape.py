"""Shapes of the batch: `view`, `reshape`, `permute` and other methods named as in torch.

A container is treated as a tensor of shape `batch_size`: only batch dimensions change, and trailing
dimensions of leaves and further batch dimensions of nested containers are kept. The leaves are
views where torch makes views.

Each method resolves its arguments to a plan, then maps one function over the leaves. That function
makes the fastest torch call ("shape" in the benchmarks): it passes sizes as separate arguments, -1
for a single trailing dimension, and `x[None]` for `x.unsqueeze(0)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.caching import Plan, cached, plan
from kd_core._batch.shapes import (
    as_int,
    expanded,
    infer_sizes,
    numel,
    one_per_dim,
    sizes_of,
    wrap_dim,
    wrap_dims,
)
from kd_core._errors import InvalidArgument, InvalidValue, ShapeMismatch, wrong_type
from kd_core._protocol.primitives import AbstractContainer, map_by

if TYPE_CHECKING:
    from typing import Self

    from kd_core._types import Batch, LeafFn

    Sizes: TypeAlias = tuple[int | Sequence[int], ...]

W = TypeVar("W", bound=AbstractContainer)


class Shape(AbstractContainer):
    """The methods that change the shape of the batch."""

    __slots__ = ()

    def view(self, *shape: int | Sequence[int]) -> Self:
        """Return a view with another shape of the batch; storage is shared.

        Args:
            *shape: the new batch size; one size may be -1, it is worked out.

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
        how = _resize(self._desc.batch, shape, "view")
        try:
            return map_by(how, self)
        except RuntimeError as error:
            raise InvalidValue(
                f"the strides of an entry do not allow a view of batch_size {self._desc.batch} as "
                f"{how[1]} ({error}). Use `reshape`, which copies if needed."
            ) from error

    def reshape(self, *args: int | Sequence[int], shape: Sequence[int] | None = None) -> Self:
        """Reshape the batch dimensions; leaves are views where torch can make one.

        Args:
            *args: the new batch size; one size may be -1, it is worked out.
            shape: the same by keyword.

        Raises:
            ShapeMismatch: if the sizes do not fit the batch size.
        """
        if shape is not None:
            args = _sizes_or(args, shape, "shape")
        return map_by(_resize(self._desc.batch, args, "reshape"), self)

    def view_as(self, other: AbstractContainer | Tensor) -> Self:
        """Return a view whose batch has the shape of another container or tensor."""
        return self.view(_shape_like(other))

    def reshape_as(self, other: AbstractContainer | Tensor) -> Self:
        """Reshape the batch dimensions to the shape of another container or tensor."""
        return self.reshape(_shape_like(other))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Merge neighbouring batch dimensions into one.

        Args:
            start_dim: the first dimension to merge.
            end_dim: the last dimension to merge.

        Raises:
            InvalidValue: if `end_dim` comes before `start_dim`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).flatten().batch_size
            torch.Size([6])
        """
        return map_by(_flatten(self._desc.batch, start_dim, end_dim), self)

    def unflatten(self, dim: int, unflattened_size: Sequence[int]) -> Self:
        """Split one batch dimension into several; the inverse of `flatten`.

        Args:
            dim: the dimension to split.
            unflattened_size: its new sizes; one may be -1.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(6, 4)}, [6]).unflatten(0, (2, -1)).batch_size
            torch.Size([2, 3])
        """
        return map_by(_unflatten(self._desc.batch, dim, unflattened_size), self)

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Self:
        """Remove batch dimensions of size 1.

        Args:
            dim: the dimensions; one of another size is kept. `None`: all of size 1.
        """
        return map_by(_squeeze(self._desc.batch, dim), self)

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
        return map_by(_unsqueeze(self._desc.batch, dim), self)

    def permute(self, *args: int | Sequence[int], dims: Sequence[int] | None = None) -> Self:
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
        return map_by(_permute(self._desc.batch, _sizes_or(args, dims, "dims")), self)

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Exchange two batch dimensions."""
        return map_by(_transpose(self._desc.batch, dim0, dim1), self)

    def swapaxes(self, axis0: int, axis1: int) -> Self:
        """Exchange two batch dimensions; another name of `transpose`."""
        return self.transpose(axis0, axis1)

    def swapdims(self, dim0: int, dim1: int) -> Self:
        """Exchange two batch dimensions; another name of `transpose`."""
        return self.transpose(dim0, dim1)

    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Self:
        """Move batch dimensions to other positions, the rest keeping their order.

        Args:
            source: the dimensions to move.
            destination: the new position of each.

        Raises:
            InvalidValue: if the numbers of dimensions and positions differ.
        """
        return map_by(_movedim(self._desc.batch, source, destination), self)

    def moveaxis(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Self:
        """Move batch dimensions; another name of `movedim`."""
        return self.movedim(source, destination)

    def expand(self, *shape: int | Sequence[int]) -> Self:
        """Repeat batch dimensions of size 1 without copying.

        Args:
            *shape: the new batch size; -1 keeps a size, new dimensions come in front.

        Raises:
            ShapeMismatch: if a dimension larger than 1 would change.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(2, 4)}, [2]).expand(3, -1)["a"].shape
            torch.Size([3, 2, 4])
        """
        return map_by(_expand(self._desc.batch, shape), self)

    def expand_as(self, other: AbstractContainer | Tensor) -> Self:
        """Expand to the batch size of another container, or to the shape of a tensor."""
        return self.expand(_shape_like(other))

    def repeat(self, *repeats: int | Sequence[int]) -> Self:
        """Copy the batch several times along its dimensions, as `torch.Tensor.repeat` does.

        Args:
            *repeats: the number of copies for each batch dimension; additional numbers in front
                add new dimensions.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.tensor([1, 2])}, [2]).repeat(2)["a"]
            tensor([1, 2, 1, 2])
        """
        ndim = self._desc.ndim
        counts = one_per_dim(repeats, self._desc.batch, "repeat")
        if len(counts) < ndim:
            raise InvalidValue(
                f"`repeat` expected a count for each of the {ndim} batch dimensions, got {counts}. "
                "`tile` takes fewer."
            )
        return map_by(_repeat(self._desc.batch, counts), self)

    def tile(self, *dims: int | Sequence[int]) -> Self:
        """Copy the batch several times, like `repeat`; missing counts in front are 1."""
        counts = one_per_dim(dims, self._desc.batch, "tile")
        missing = self._desc.ndim - len(counts)
        return map_by(_repeat(self._desc.batch, (1,) * missing + counts), self)

    def repeat_interleave(
        self, repeats: int | Tensor, dim: int | None = None, *, output_size: int | None = None
    ) -> Self:
        """Copy each row several times, the copies side by side.

        Args:
            repeats: the number of copies, one number for all rows or one for each.
            dim: the batch dimension; `None`: flatten the batch first.
            output_size: the sum of `repeats`, if known; avoids a synchronisation with the device.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.tensor([1, 2])}, [2]).repeat_interleave(2, 0)["a"]
            tensor([1, 1, 2, 2])
        """
        if dim is None:
            return Shape.repeat_interleave(self.flatten(), repeats, 0, output_size=output_size)
        return map_by(_interleave(self._desc.batch, repeats, dim, output_size), self)

    def roll(self, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Self:
        """Shift rows along batch dimensions; rows beyond the end are reinserted in front.

        Args:
            shifts: the number of rows, one for each dimension.
            dims: the batch dimensions, one for each shift; `None`: flatten, shift and restore.
        """
        if dims is None and self._desc.ndim > 1:
            return self.flatten().roll(shifts, 0).unflatten(0, self._desc.batch)
        return map_by(_roll(self._desc.batch, shifts, 0 if dims is None else dims), self)

    def flip(self, *dims: int | Sequence[int]) -> Self:
        """Reverse the order of rows along batch dimensions; a copy, as in torch."""
        return map_by(_flip(self._desc.batch, dims), self)


def _sizes_or(given: Sizes, named: Sequence[int] | None, name: str) -> Sizes:
    """Return sizes or dimensions passed by position or by the keyword of torch."""
    if named is None:
        return given
    if given:
        raise InvalidArgument(f"expected `{name}` once, got it by position and by keyword.")
    return (named,)


@cached
def _resize(batch: Batch, shape: Sizes, name: str) -> Plan:
    new = infer_sizes(sizes_of(shape), numel(batch), f"batch_size {batch}")
    return plan(batch, _resized(batch, new, getattr(Tensor, name)), new)


def _resized(batch: Batch, new: Batch, call: Callable[..., Tensor]) -> LeafFn:
    """Return a `view` or `reshape` of the leading dimensions of a leaf."""
    ndim = len(batch)
    single = (*new, -1)

    def any_leaf(leaf: Tensor) -> Tensor:
        # Passing the shape as one argument is slower, in compiled code too.
        return call(leaf, *new, *leaf.shape[ndim:]) if new else call(leaf, leaf.shape[ndim:])

    def leaf_of_rows(leaf: Tensor) -> Tensor:
        if leaf.ndim == ndim + 1:
            try:
                return call(leaf, *single)
            except RuntimeError:
                pass  # -1 is ambiguous too where vmap maps over no rows
        return call(leaf, (*new, *leaf.shape[ndim:]))

    # -1 is ambiguous without elements, and comparing a traced size with 0 would add a guard.
    return any_leaf if is_compiling() or not numel(batch) else leaf_of_rows


@cached
def _flatten(batch: Batch, start_dim: int, end_dim: int) -> Plan:
    if not batch:
        return _unsqueeze(batch, 0)
    start, end = wrap_dim(start_dim, len(batch)), wrap_dim(end_dim, len(batch))
    if end < start:
        raise InvalidValue(
            f"`start_dim` of `flatten` must not be after `end_dim`, got {start_dim} and {end_dim}. "
            "Exchange them."
        )
    new = (*batch[:start], numel(batch[start : end + 1]), *batch[end + 1 :])
    return plan(batch, lambda leaf: leaf.flatten(start, end), new)


@cached
def _unflatten(batch: Batch, dim: int, sizes: Sequence[int]) -> Plan:
    at = wrap_dim(dim, len(batch))
    what = f"dimension {at} of batch_size {batch}"
    new = (*batch[:at], *infer_sizes(sizes_of([sizes]), batch[at], what), *batch[at + 1 :])
    return plan(batch, _resized(batch, new, Tensor.view), new)


@cached
def _squeeze(batch: Batch, dim: int | Sequence[int] | None) -> Plan:
    ndim = len(batch)
    dims = range(ndim) if dim is None else wrap_dims(sizes_of([dim]), ndim)
    dropped = tuple(i for i in dims if batch[i] == 1)
    new = tuple(size for i, size in enumerate(batch) if i not in dropped)
    if dropped == (0,):
        return plan(batch, lambda leaf: leaf[0], new)
    return plan(batch, lambda leaf: leaf.squeeze(dropped), new)


@cached
def _unsqueeze(batch: Batch, dim: int) -> Plan:
    at = wrap_dim(dim, len(batch) + 1)
    new = (*batch[:at], 1, *batch[at:])
    if at == 0:
        return plan(batch, lambda leaf: leaf[None], new)
    return plan(batch, lambda leaf: leaf.unsqueeze(at), new)


@cached
def _permute(batch: Batch, dims: Sizes) -> Plan:
    given = one_per_dim(dims, batch, "permute")
    order = wrap_dims(given, len(batch))
    if len(order) != len(batch):
        raise InvalidValue(
            f"`permute` expected each of the {len(batch)} batch dimensions once, got {given}. Use "
            "`apply` for trailing dimensions of entries."
        )
    return _permuted(batch, order)


def _permuted(batch: Batch, order: Batch) -> Plan:
    ndim = len(batch)
    single = (*order, ndim)

    def permute(leaf: Tensor) -> Tensor:
        if leaf.ndim == ndim + 1:
            return leaf.permute(*single)
        return leaf.permute((*order, *range(ndim, leaf.ndim)))

    return plan(batch, permute, tuple(batch[i] for i in order))


@cached
def _transpose(batch: Batch, dim0: int, dim1: int) -> Plan:
    one, two = wrap_dim(dim0, len(batch)), wrap_dim(dim1, len(batch))
    new = list(batch)
    new[one], new[two] = batch[two], batch[one]
    return plan(batch, lambda leaf: leaf.transpose(one, two), tuple(new))


@cached
def _movedim(batch: Batch, source: int | Sequence[int], destination: int | Sequence[int]) -> Plan:
    ndim = len(batch)
    sources = wrap_dims(sizes_of([source]), ndim)
    targets = wrap_dims(sizes_of([destination]), ndim)
    if len(sources) != len(targets):
        raise InvalidValue(
            f"`movedim` expected as many destinations as sources, got {source} and {destination}."
        )
    moved = dict(zip(targets, sources, strict=True))
    rest = [i for i in range(ndim) if i not in sources]
    order = tuple(moved[i] if i in moved else rest.pop(0) for i in range(ndim))
    return _permuted(batch, order)


@cached
def _expand(batch: Batch, shape: Sizes) -> Plan:
    new = expanded(batch, sizes_of(shape))
    ndim = len(batch)
    single = (*new, -1)

    def expand(leaf: Tensor) -> Tensor:
        extra = leaf.ndim - ndim
        return leaf.expand(*single) if extra == 1 else leaf.expand((*new, *[-1] * extra))

    return plan(batch, expand, new)


@cached
def _repeat(batch: Batch, counts: Batch) -> Plan:
    if any(count < 0 for count in counts):
        raise InvalidValue(f"counts must be non-negative, got {counts}.")
    ndim = len(batch)
    lead = len(counts) - ndim
    sizes = zip(counts[lead:], batch, strict=True)
    new = counts[:lead] + tuple(count * size for count, size in sizes)
    return plan(batch, lambda leaf: leaf.repeat((*counts, *[1] * (leaf.ndim - ndim))), new)


def _interleave(batch: Batch, repeats: int | Tensor, dim: int, output_size: int | None) -> Plan:
    at = wrap_dim(dim, len(batch))
    if not isinstance(repeats, Tensor) or not repeats.ndim:
        repeats = as_int(repeats)
    size = _output_size(repeats, batch[at], output_size)
    new = (*batch[:at], size, *batch[at + 1 :])
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
def _roll(batch: Batch, shifts: int | Sequence[int], dims: int | Sequence[int]) -> Plan:
    by = sizes_of([shifts])
    along = tuple(
        wrap_dim(dim, len(batch)) for dim in sizes_of([dims])
    )  # for a repeated one torch adds the shifts
    if len(by) != len(along):
        raise InvalidValue(f"`roll` expected one shift for each dimension, got {by} and {along}.")
    return plan(batch, lambda leaf: leaf.roll(by, along), batch)


@cached
def _flip(batch: Batch, dims: Sizes) -> Plan:
    along = wrap_dims(one_per_dim(dims, batch, "flip"), len(batch))
    return plan(batch, lambda leaf: leaf.flip(along), batch)


def _shape_like(other: AbstractContainer | Tensor) -> Batch:
    if isinstance(other, Tensor):
        return tuple(other.shape)
    if not isinstance(other, AbstractContainer):
        raise wrong_type("`other`", "a container or a tensor", other)
    return other._desc.batch
