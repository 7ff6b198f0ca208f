"""Reductions: over everything, over batch dimensions, over features, or to one tensor.

Each generated method of `_ops.reduction` is one call of `reduced`. Without `dim` each leaf is
reduced to one number, and the batch size is (). `dim` names batch dimensions; `"feature"` means all
trailing dimensions. `reduce=True` reduces all leaves to one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._errors import InvalidArgument, InvalidValue, KdError, ShapeMismatch, wrong_type
from kd_core._leaves.foreach import is_ragged
from kd_core._leaves.loops import all_plain, flat_values, reduced_rows
from kd_core._nodes import is_node
from kd_core._ops.access import renamed
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    leaves_of,
    locked_as,
    name_in,
    refuse_unbatched,
    unbatched_in,
)
from kd_core._shapes import (
    EVERYTHING,
    EVERYTHING_KEPT,
    SAME_SHAPE,
    Reduced,
    numbers_of,
    wrap_dim,
)

if TYPE_CHECKING:
    from typing import Self

    from kd_core._ops.access import KeyFn
    from kd_core._types import Batch, BatchFn, LeafFn

    R = TypeVar("R")
    W = TypeVar("W", bound=AbstractContainer)
    E = TypeVar("E", bound=AbstractContainer)
    S = TypeVar("S", bound=AbstractContainer)


SomeDim: TypeAlias = "int | str | Sequence[int | str]"
"""Batch dimensions or their names, or `"feature"` for all trailing dimensions."""

Dim: TypeAlias = "SomeDim | None"
"""Batch dimensions, `"feature"`, or `None` for everything."""

_Reduce: TypeAlias = Callable[..., Tensor]


@overload
def reduced(
    td: W, fn: _Reduce, dim: Dim, keepdim: bool, reduce: Literal[False], name: KeyFn | None = None
) -> W: ...
@overload
def reduced(
    td: W, fn: _Reduce, dim: Dim, keepdim: bool, reduce: bool, name: KeyFn | None = None
) -> W | Tensor: ...
def reduced(
    td: W, fn: _Reduce, dim: Dim, keepdim: bool, reduce: bool, name: KeyFn | None = None
) -> W | Tensor:
    """Reduce every leaf, or all leaves together.

    Args:
        td: the container.
        fn: `fn(leaf)` reduces everything, `fn(leaf, dims, keepdim=)` one dimension or a tuple.
        dim: the dimensions to reduce.
        keepdim: keep reduced dimensions with size 1.
        reduce: reduce all leaves to one tensor.
        name: a function from each key to its name in the result; `None`: keep the names.

    Raises:
        OutOfRange: if `dim` is not a batch dimension.
        InvalidArgument: if the arguments cannot be combined.
    """
    if name is not None:
        return _under_names(td, fn, dim, keepdim, reduce, name)
    if reduce:
        return _together(td, fn, dim, keepdim)
    try:
        if type(dim) is int and not keepdim:  # here, not in `_each`: "sum(0)" in the benchmarks
            axis = dim if 0 <= dim < td._kd_desc.ndim else wrap_dim(dim, td._kd_desc.batch)
            return td._kd_map_each(along_batch(td, lambda leaf: fn(leaf, axis)), Reduced((axis,)))
        return _each(td, fn, dim, keepdim)
    except RuntimeError as error:
        _explain(td, fn, error)
        raise


def _each(td: W, fn: _Reduce, dim: Dim, keepdim: bool) -> W:
    if dim is None and fn is logsumexp and not any(map(is_ragged, leaves_of(td))):
        dim = tuple(range(td._kd_desc.ndim)) or None  # alone of all, it keeps the features
    if dim is None:
        if keepdim:
            whole = over_everything(td, fn)
            return td._kd_map_each(lambda leaf: whole(leaf).view((1,) * leaf.ndim), EVERYTHING_KEPT)
        made = td._kd_map_each(over_everything(td, fn), EVERYTHING)
        if getattr(fn, "func", fn) is norm:  # alone of all
            return locked_as(td, made)
        return made
    if isinstance(dim, str) and not _is_named(td, dim):
        ndim = feature_start(td, dim)
        over = Reduced(first=ndim)
        return td._kd_map_each(lambda leaf: _over_features(td, leaf, fn, ndim, keepdim), over)
    dims = batch_dims_of(td, dim)
    along = along_batch(td, lambda leaf: fn(leaf, dims, keepdim=keepdim))
    return td._kd_map_each(along, without(dims, keepdim))


def _explain(td: AbstractContainer, fn: _Reduce, error: RuntimeError) -> None:
    """Raise the error that names the leaf that torch does not reduce."""
    if isinstance(error, KdError) or is_compiling():
        return
    for leaf in leaves_of(td):
        try:
            fn(leaf)
        except RuntimeError:
            raise InvalidValue(
                f"{name_in(td, leaf)} of {leaf.dtype} cannot be reduced: {str(error).rstrip('.')}. "
                "Cast it first, as `float()` does, or `select` other keys."
            ) from error


def _vector_of(leaf: Tensor) -> Tensor:
    """Return all elements of a leaf as a vector."""
    if not is_ragged(leaf):
        return leaf.reshape(-1)
    return flat_values(leaf)


def over_everything(td: AbstractContainer, fn: Callable[[Tensor], R]) -> Callable[[Tensor], R]:
    """Return a function of a whole leaf that takes the rows of a nested tensor as one vector."""
    if not td._kd_nested or (td._kd_owns_leaves and all_plain(td._kd_entries)):
        return fn
    return lambda leaf: fn(_vector_of(leaf) if is_ragged(leaf) else leaf)


def along_batch(td: AbstractContainer, fn: Callable[[Tensor], R]) -> Callable[[Tensor], R]:
    """Return a function along batch dimensions that refuses a nested tensor and names it."""
    if not td._kd_nested or (td._kd_owns_leaves and all_plain(td._kd_entries)):
        return fn
    refuse_unbatched(td, "combined along one")

    def along(leaf: Tensor) -> R:
        if is_ragged(leaf):
            raise InvalidValue(
                f"{name_in(td, leaf)} is ragged: rows of different lengths cannot be combined "
                'along the batch dimension. Pass `dim="feature"` to reduce each row, or call '
                "`to_padded_tensor` first."
            )
        return fn(leaf)

    return along


def _under_names(td: W, fn: _Reduce, dim: Dim, keepdim: bool, reduce: bool, name: KeyFn) -> W:
    if reduce:
        raise InvalidArgument(
            "`key_transform` cannot be combined with `reduce=True`: one tensor has no keys."
        )
    return renamed(reduced(td, fn, dim, keepdim, False), name)


def batch_dims_of(td: AbstractContainer, dim: int | str | Sequence[int | str]) -> tuple[int, ...]:
    """Return batch dimensions, counted from the front.

    Raises:
        OutOfRange: if one is not a batch dimension.
        InvalidValue: if there are none, or one is given twice.
    """
    batch = td._kd_desc.batch
    given = numbers_of(dim, batch)
    dims = tuple([wrap_dim(each, batch) for each in given])
    if not dims or len(set(dims)) < len(dims):
        raise InvalidValue(
            f"`dim` must be one or more distinct dimensions, got {dim}. Leave `dim` out to reduce "
            "over everything."
        )
    return dims


def _is_named(td: AbstractContainer, name: str) -> bool:
    """Return whether a string must be the name of a batch dimension; `"feature"` never is."""
    return name != "feature" and td._kd_desc.named


def feature_start(td: AbstractContainer, dim: str) -> int:
    """Return the first trailing dimension."""
    if dim != "feature":
        raise InvalidValue(
            f'`dim` must be integers (batch dimensions) or "feature" (all trailing dimensions), '
            f"got {dim!r}."
        )
    return td._kd_desc.ndim


def without(dims: tuple[int, ...], keepdim: bool) -> Reduced:
    """Return the batch shape after a reduction of some dimensions."""
    return Reduced(dims, keepdim)


def _over_features(
    td: AbstractContainer, leaf: Tensor, fn: _Reduce, ndim: int, keepdim: bool
) -> Tensor:
    """Reduce the trailing dimensions; a leaf without them counts as one feature."""
    if is_ragged(leaf):
        return reduced_features(td, [leaf], lambda row: fn(row, (0,)), keepdim)
    flat = leaf.unsqueeze(-1) if leaf.ndim == ndim else leaf.flatten(ndim)
    result = fn(flat, (ndim,))
    if not keepdim:
        return result
    return result.reshape((*leaf.shape[:ndim], *(1,) * (leaf.ndim - ndim)))


def reduced_features(
    td: AbstractContainer, leaves: Sequence[Tensor], fn: LeafFn, keepdim: bool = False
) -> Tensor:
    """Reduce the elements of each row, or of all rows where there is no batch dimension.

    Args:
        td: the container, for messages.
        leaves: tensors that are reduced together, nested ones among them.
        fn: a reduction of a vector.
        keepdim: keep the reduced dimensions of the first leaf with size 1.

    Raises:
        InvalidValue: if torch cannot reduce a row, as one without elements.
    """
    ndim = td._kd_desc.ndim
    try:
        if ndim:
            result = reduced_rows(leaves, fn)
        else:
            result = fn(torch.cat(list(map(_vector_of, leaves))))
    except (IndexError, RuntimeError) as error:
        raise InvalidValue(
            f"{name_in(td, leaves[0])} cannot be reduced row by row: {str(error).rstrip('.')}. "
            "Remove rows without elements, or call `to_padded_tensor` first."
        ) from error
    return result.reshape((*result.shape, *(1,) * (leaves[0].ndim - ndim))) if keepdim else result


def _together(td: AbstractContainer, fn: _Reduce, dim: Dim, keepdim: bool) -> Tensor:
    leaves: list[Tensor] = []
    everything = dim is None  # and no dimension is kept of the one vector of all elements

    def note(leaf: Tensor) -> Tensor:
        leaves.append(leaf)
        return leaf

    if everything:
        _collect_once(td, leaves)
    else:
        refuse_unbatched(td, "reduced together with others along dimensions")
        td._kd_map_each(note, SAME_SHAPE)
    if not leaves:
        raise InvalidValue(
            "`reduce=True` requires at least one tensor, got a container without tensors."
        )
    if everything:
        return fn(torch.cat(list(map(_vector_of, leaves))))
    if isinstance(dim, int):
        axis = wrap_dim(dim, td._kd_desc.batch)
        return fn(torch.cat(leaves, axis), axis, keepdim=keepdim)
    if not isinstance(dim, str) or keepdim:
        raise InvalidArgument(
            "`reduce=True` cannot be combined with batch dimensions or `keepdim`. Leave `dim` out, "
            'or pass `dim="feature"` and reduce the batch dimensions of the result.'
        )
    ndim = feature_start(td, dim)
    if any(map(is_ragged, leaves)):
        return reduced_features(td, leaves, lambda row: fn(row, (0,)))
    flat = [leaf.unsqueeze(-1) if leaf.ndim == ndim else leaf.flatten(ndim) for leaf in leaves]
    return fn(torch.cat(flat, ndim), (ndim,))


def _collect_once(td: AbstractContainer, leaves: list[Tensor]) -> None:
    """Append all leaves; a stack has one tensor without batch dimensions for all members."""
    shared = unbatched_in(td)
    if not shared:
        td._kd_collect(leaves)
        return
    _collect_rows(td, leaves)
    for path in shared:
        entry = td._kd_read(path)
        if is_node(entry):
            entry._kd_collect(leaves)


def _collect_rows(td: AbstractContainer, leaves: list[Tensor]) -> None:
    """Append the leaves that have batch dimensions."""
    if isinstance(td, Composite):
        for member in td._members:
            _collect_rows(member, leaves)
        return
    for value in td._kd_entries.values():
        if isinstance(value, AbstractContainer):
            _collect_rows(value, leaves)
        elif isinstance(value, Tensor):
            leaves.append(value)


def prod(
    leaf: Tensor,
    dims: tuple[int, ...] | int | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch.prod`, over several dimensions too."""
    if dims is None:
        return torch.prod(leaf, dtype=dtype)
    for dim in (dims,) if isinstance(dims, int) else sorted(dims, reverse=True):
        leaf = torch.prod(leaf, dim, keepdim, dtype=dtype)
    return leaf


def logsumexp(
    leaf: Tensor, dims: tuple[int, ...] | int | None = None, keepdim: bool = False
) -> Tensor:
    """Compute `torch.logsumexp`, over everything too."""
    return torch.logsumexp(leaf, tuple(range(leaf.ndim)) if dims is None else dims, keepdim)


def norm(
    leaf: Tensor,
    dims: tuple[int, ...] | int | None = None,
    keepdim: bool = False,
    ord: float = 2,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch.linalg.vector_norm`: of all values as one vector, not of matrices."""
    length: Tensor
    if dims is None and dtype is None and ord == 2:  # passing arguments is slow: "norm"
        length = torch.linalg.vector_norm(leaf)
    else:
        length = torch.linalg.vector_norm(leaf, ord, dims, keepdim, dtype=dtype)
    return length


# Extreme values with their indices, of every leaf.

V = TypeVar("V")
How: TypeAlias = tuple[bool, bool]
"""Whether all leaves are reduced together, and whether indices are wanted."""


class Extremes(NamedTuple, Generic[V]):
    """The extreme values along a dimension and their indices, as type checkers see them.

    They are of the type that torch returns for a tensor, such as `torch.return_types.max`, which
    takes two containers as well. Traced code, which cannot build one, has this class.
    """

    values: V
    indices: V


Along: TypeAlias = Callable[..., "tuple[Tensor, Tensor]"]


def extreme(
    td: E, over_all: Callable[..., Tensor], along: Along, dim: Dim, keepdim: bool, how: How
) -> E | Tensor | Extremes[E] | Extremes[Tensor]:
    """Return the extreme values of each leaf, with their indices where one dimension is given.

    Args:
        td: the container.
        over_all: the function over several dimensions.
        along: the function along one dimension, which returns indices, too.
        dim: the dimension, or several.
        keepdim: keep the dimension with size 1.
        how: whether all leaves are reduced together, and whether the indices are wanted.
    """
    reduce, return_indices = how
    alone = not (isinstance(dim, (tuple, list)) or (isinstance(dim, str) and dim == "feature"))
    if dim is None or not (alone or return_indices):
        return reduced(td, over_all, dim, keepdim, reduce)
    if not alone:
        raise InvalidArgument(
            "`dim` must be one integer or name, because the result has indices. Use `amin` or "
            "`amax` for several dimensions or for features."
        )
    (axis,) = batch_dims_of(td, dim)
    along_axis = partial(_call, along, axis, keepdim)
    if reduce:
        of_all = _joined(td, axis)
        found_all = _as_torch(along, *along_axis(of_all))
        return found_all if return_indices else found_all.values
    found = pairs(td, along, along_batch(td, along_axis), without((axis,), keepdim))
    return found if return_indices else found.values


def running(
    td: E, along: Along, dim: int | str, how: How
) -> E | Tensor | Extremes[E] | Extremes[Tensor]:
    """Return the extreme values so far along a batch dimension; see `extreme`."""
    reduce, return_indices = how
    if not isinstance(dim, (int, str)):
        raise wrong_type("`dim`", "an integer or a name", dim)
    (axis,) = batch_dims_of(td, dim)
    if reduce:
        of_all = _as_torch(along, *along(_joined(td, axis), axis))
        return of_all if return_indices else of_all.values
    found = pairs(td, along, along_batch(td, lambda leaf: along(leaf, axis)), SAME_SHAPE)
    return found if return_indices else found.values


def pairs(
    td: E, along: Along, fn: Callable[[Tensor], tuple[Tensor, Tensor]], batch: BatchFn
) -> Extremes[E]:
    """Apply a function that returns values and indices; `along` is that of torch."""
    found: list[tuple[Tensor, Tensor]] = []

    def values(leaf: Tensor) -> Tensor:
        found.append(fn(leaf))
        return found[-1][0]

    first = td._kd_map_each(values, batch)
    places = iter(found)
    return _as_torch(along, first, td._kd_map_each(lambda leaf: next(places)[1], batch))


def _call(along: Along, axis: int, keepdim: bool, leaf: Tensor) -> tuple[Tensor, Tensor]:
    return along(leaf, axis, keepdim)


def _as_torch(along: Along, values: V, indices: V) -> Extremes[V]:
    if is_compiling():
        return Extremes(values, indices)
    kind = getattr(torch.return_types, along.__name__)
    found: Extremes[V] = kind((values, indices))
    return found


def _joined(td: AbstractContainer, axis: int) -> Tensor:
    """Return all leaves behind one another along a batch dimension."""
    leaves: list[Tensor] = []

    def noted(leaf: Tensor) -> Tensor:
        leaves.append(leaf)
        return leaf

    td._kd_map_each(noted, SAME_SHAPE)
    if not leaves:
        raise InvalidValue(
            "`reduce=True` requires at least one tensor, got a container without tensors."
        )
    return torch.cat(leaves, axis)


# Functions of all values along dimensions: extreme values, scans, truth, quantiles, softmax.


class Statistics(AbstractContainer):
    """The methods for extreme values, cumulative results, truth, quantiles and softmax.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([0.0, 1.0, 2.0, 3.0])}, [4])
        >>> td.quantile(0.5)["a"], td.quantile([0.0, 1.0], 0)["a"]
        (tensor(1.5000), tensor([0., 3.]))
        >>> td.softmax(0)["a"].sum()
        tensor(1.)
        >>> td = TensorDict({"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([5.0, 4.0])}, [2])
        >>> td.max().to_dict(), td.max(reduce=True)
        ({'a': tensor(3.), 'b': tensor(5.)}, tensor(5.))
        >>> td.max(0).indices.to_dict()
        {'a': tensor(1), 'b': tensor(0)}
        >>> (td > 0).all(), (td > 4).any(0)["b"]
        (True, tensor(True))
    """

    __slots__ = ()

    @overload
    def quantile(
        self,
        q: float | Sequence[float] | Tensor,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: Literal[False] = False,
        key_transform: KeyFn | None = None,
    ) -> Self: ...

    @overload
    def quantile(
        self,
        q: float | Sequence[float] | Tensor,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: Literal[True],
    ) -> Tensor: ...

    def quantile(
        self,
        q: float | Sequence[float] | Tensor,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: bool = False,
        key_transform: KeyFn | None = None,
    ) -> Self | Tensor:
        """Compute quantiles: `torch.quantile`, over several dimensions too.

        Args:
            q: a number between 0 and 1, or several: these become the first batch dimension.
            dim: batch dimensions, `"feature"`, or `None` for everything.
            keepdim: keep the reduced dimensions with size 1.
            interpolation: between two values: "linear", "lower", "higher", "midpoint" or
                "nearest".
            reduce: reduce all leaves to one tensor.
            key_transform: a function from each key to its name in the result.
        """
        several = not isinstance(q, (int, float)) and not (isinstance(q, Tensor) and not q.ndim)
        at = torch.as_tensor(q)
        if at.ndim > 1:
            raise ShapeMismatch(f"`q` must be one number or a vector, got shape {tuple(at.shape)}.")
        fn = partial(_quantile, q=at, interpolation=interpolation)
        if reduce or not several:
            return reduced(self, fn, dim, keepdim, reduce, key_transform)
        lead = tuple(at.shape)
        result = _with_lead(self, fn, dim, keepdim, lead)
        return result if key_transform is None else renamed(result, key_transform)

    def softmax(self, dim: int | str, dtype: torch.dtype | None = None) -> Self:
        """Return the softmax along a batch dimension or over the features: `torch.softmax`.

        Args:
            dim: a batch dimension or its name, or `"feature"` for all trailing dimensions together.
            dtype: the dtype to which leaves are cast first.
        """
        return _along(self, partial(torch.softmax, dtype=dtype), dim)

    def log_softmax(self, dim: int | str, dtype: torch.dtype | None = None) -> Self:
        """Return the logarithm of `softmax`: `torch.log_softmax`."""
        return _along(self, partial(torch.log_softmax, dtype=dtype), dim)

    @overload
    def min(self, dim: None = None, *, reduce: Literal[False] = False) -> Self: ...
    @overload
    def min(self, dim: None = None, *, reduce: Literal[True]) -> Tensor: ...
    @overload
    def min(
        self, dim: int | str, keepdim: bool = False, *, return_indices: Literal[True] = True
    ) -> Extremes[Self]: ...
    @overload
    def min(
        self, dim: SomeDim, keepdim: bool = False, *, return_indices: Literal[False]
    ) -> Self: ...
    @overload
    def min(
        self, dim: int | str, keepdim: bool = False, *, reduce: bool, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]: ...
    def min(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        reduce: bool = False,
        return_indices: bool = True,
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]:
        """Return the smallest value of every leaf; along a batch dimension, its index too.

        Args:
            dim: a batch dimension or its name; `None`: over everything.
            keepdim: keep the dimension with size 1.
            reduce: reduce all leaves to one tensor; along `dim` they stand behind one another.
            return_indices: whether the indices are wanted; without them, `dim` may be several
                batch dimensions, or `"feature"`.

        Returns:
            With `dim` two containers, `values` and `indices`, in the type that torch returns; else
            a container, or a tensor.
        """
        return extreme(self, torch.amin, torch.min, dim, keepdim, (reduce, return_indices))

    @overload
    def max(self, dim: None = None, *, reduce: Literal[False] = False) -> Self: ...
    @overload
    def max(self, dim: None = None, *, reduce: Literal[True]) -> Tensor: ...
    @overload
    def max(
        self, dim: int | str, keepdim: bool = False, *, return_indices: Literal[True] = True
    ) -> Extremes[Self]: ...
    @overload
    def max(
        self, dim: SomeDim, keepdim: bool = False, *, return_indices: Literal[False]
    ) -> Self: ...
    @overload
    def max(
        self, dim: int | str, keepdim: bool = False, *, reduce: bool, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]: ...
    def max(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        reduce: bool = False,
        return_indices: bool = True,
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]:
        """Return the largest value of every leaf; along a batch dimension, its index too.

        Args:
            dim: a batch dimension or its name; `None`: over everything.
            keepdim: keep the dimension with size 1.
            reduce: reduce all leaves to one tensor; along `dim` they stand behind one another.
            return_indices: whether the indices are wanted; without them, `dim` may be several
                batch dimensions, or `"feature"`.

        Returns:
            With `dim` two containers, `values` and `indices`, in the type that torch returns; else
            a container, or a tensor.
        """
        return extreme(self, torch.amax, torch.max, dim, keepdim, (reduce, return_indices))

    @overload
    def all(self, dim: None = None) -> bool: ...
    @overload
    def all(self, dim: SomeDim, keepdim: bool = False) -> Self: ...
    def all(self, dim: Dim = None, keepdim: bool = False) -> bool | Self:
        """Return whether all values are true: of all leaves, or along dimensions.

        Args:
            dim: batch dimensions, or `"feature"`; `None`: over everything.
            keepdim: keep the reduced dimensions with size 1.

        Returns:
            Without `dim` a bool, else a container.
        """
        if dim is not None:
            return reduced(self, torch.all, dim, keepdim, False)
        leaves: list[Tensor] = []
        self._kd_collect(leaves)
        for leaf in leaves:
            if not leaf.all():
                return False
        return True

    @overload
    def any(self, dim: None = None) -> bool: ...
    @overload
    def any(self, dim: SomeDim, keepdim: bool = False) -> Self: ...
    def any(self, dim: Dim = None, keepdim: bool = False) -> bool | Self:
        """Return whether any value is true: of all leaves, or along dimensions; see `all`."""
        if dim is not None:
            return reduced(self, torch.any, dim, keepdim, False)
        leaves: list[Tensor] = []
        self._kd_collect(leaves)
        for leaf in leaves:
            if leaf.any():
                return True
        return False

    def cumsum(self, dim: int | str) -> Self:
        """Return the cumulative sums along a batch dimension.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.ones(3)}, [3]).cumsum(0)["a"]
            tensor([1., 2., 3.])
        """
        (axis,) = batch_dims_of(self, dim)
        return self._kd_map_each(along_batch(self, lambda leaf: leaf.cumsum(axis)), SAME_SHAPE)

    def cumprod(self, dim: int | str) -> Self:
        """Return the cumulative products along a batch dimension."""
        (axis,) = batch_dims_of(self, dim)
        return self._kd_map_each(along_batch(self, lambda leaf: leaf.cumprod(axis)), SAME_SHAPE)

    @overload
    def cummax(self, dim: int | str, *, return_indices: Literal[True] = True) -> Extremes[Self]: ...
    @overload
    def cummax(self, dim: int | str, *, return_indices: Literal[False]) -> Self: ...
    @overload
    def cummax(
        self, dim: int | str, *, reduce: bool, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]: ...
    def cummax(
        self, dim: int | str, *, reduce: bool = False, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]:
        """Return the largest value so far along a batch dimension, and its index.

        Args:
            dim: the batch dimension, or its name.
            reduce: take all leaves behind one another, as one tensor.
            return_indices: whether the indices are wanted; else one container is returned.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.tensor([1, 3, 2])}, [3])
            >>> td.cummax(0).values["a"], td.cummax(0).indices["a"]
            (tensor([1, 3, 3]), tensor([0, 1, 1]))
        """
        return running(self, torch.cummax, dim, (reduce, return_indices))

    @overload
    def cummin(self, dim: int | str, *, return_indices: Literal[True] = True) -> Extremes[Self]: ...
    @overload
    def cummin(self, dim: int | str, *, return_indices: Literal[False]) -> Self: ...
    @overload
    def cummin(
        self, dim: int | str, *, reduce: bool, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]: ...
    def cummin(
        self, dim: int | str, *, reduce: bool = False, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]:
        """Return the smallest value so far along a batch dimension, and its index; see `cummax`."""
        return running(self, torch.cummin, dim, (reduce, return_indices))


def _along(td: S, fn: partial[Tensor], dim: int | str) -> S:
    """Apply a function that keeps shapes along one dimension."""
    if dim != "feature":
        (axis,) = batch_dims_of(td, dim)
        if isinstance(td, Composite) and axis != td._dim:
            inner = axis - (axis > td._dim)
            return td._by_member(lambda member: _along(member, fn, inner))
        made = td._kd_map_each(along_batch(td, lambda leaf: fn(leaf, axis)), SAME_SHAPE)
        return made._kd_engine.to_lazystack(made, axis) if isinstance(td, Composite) else made
    refuse_unbatched(td, "combined along the features of others")
    ndim = td._kd_desc.ndim

    def over_features(leaf: Tensor) -> Tensor:
        if is_ragged(leaf):
            from kd_core._leaves.loops import mapped_rows

            return mapped_rows(leaf, lambda row: fn(row, 0), together=not ndim)
        if leaf.ndim == ndim:
            return fn(leaf.unsqueeze(-1), ndim).squeeze(-1)
        return fn(leaf.flatten(ndim), ndim).reshape(leaf.shape)

    return td._kd_map_each(over_features, SAME_SHAPE)


def _quantile(
    leaf: Tensor,
    dims: tuple[int, ...] | int | None = None,
    keepdim: bool = False,
    *,
    q: Tensor,
    interpolation: str,
) -> Tensor:
    """Compute `torch.quantile`, over several dimensions too."""
    q = q.to(leaf.device, leaf.dtype)
    if dims is None:
        return torch.quantile(leaf, q, interpolation=interpolation)
    along = (dims,) if isinstance(dims, int) else dims
    rest = [size for axis, size in enumerate(leaf.shape) if axis not in along]
    flat = leaf.movedim(along, tuple(range(-len(along), 0))).reshape(*rest, -1)
    result = torch.quantile(flat, q, -1, interpolation=interpolation)
    if not keepdim:
        return result
    kept = [1 if axis in along else size for axis, size in enumerate(leaf.shape)]
    return result.reshape((*q.shape, *kept))


def _with_lead(td: S, fn: partial[Tensor], dim: Dim, keepdim: bool, lead: Batch) -> S:
    """Reduce every leaf with a function that puts a dimension in front of the result."""
    refuse_unbatched(td, "given another one, of several quantiles")
    if dim is None:
        whole = over_everything(td, fn)
        if keepdim:
            over = Reduced(EVERYTHING_KEPT.dims, keepdim=True, lead=lead)
            return td._kd_map_each(lambda leaf: whole(leaf).view((*lead, *(1,) * leaf.ndim)), over)
        return td._kd_map_each(whole, Reduced(first=0, lead=lead))
    if dim == "feature":
        ndim = td._kd_desc.ndim
        return td._kd_map_each(
            _over_all_features(td, fn, ndim, keepdim), Reduced(first=ndim, lead=lead)
        )
    dims = batch_dims_of(td, dim)
    over = Reduced(dims, keepdim, lead=lead)
    return td._kd_map_each(along_batch(td, lambda leaf: fn(leaf, dims, keepdim)), over)


def _over_all_features(
    td: AbstractContainer, fn: partial[Tensor], ndim: int, keepdim: bool
) -> LeafFn:
    def over(leaf: Tensor) -> Tensor:
        if is_ragged(leaf):
            return reduced_features(td, [leaf], lambda row: fn(row, 0), keepdim)
        if leaf.ndim == ndim:
            return fn(leaf.unsqueeze(-1), (ndim,))
        return fn(leaf, tuple(range(ndim, leaf.ndim)), keepdim)

    return over
