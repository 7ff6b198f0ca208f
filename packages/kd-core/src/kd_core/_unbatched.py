"""`UnbatchedTensor`: an entry that is one tensor for the whole batch, without batch dimensions.

It is a leaf for everything that computes with values: arithmetic, casts, moves, gradients, writes
in place. It is a constant for everything that moves rows: these pass the same tensor on. What
computes along rows has no meaning for it; the operation refuses, or says by its batch function what
it does to a tensor without rows (`alone`).

Several of them become one only if they are known to be equal, so none is lost silently.
"""

from __future__ import annotations

import copy
import operator
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._descriptor import describe, describe_on, restored
from kd_core._errors import (
    InvalidValue,
    KeySetMismatch,
    a_type,
    not_valid,
    restores,
    shape_text,
    wrong_type,
)
from kd_core._keys import format_key
from kd_core._leaves.foreach import wraps_tensors
from kd_core._leaves.loops import Selection
from kd_core._leaves.packing import packed
from kd_core._nodes import TensorData, UnbatchedView, is_node, is_unbatched
from kd_core._shapes import Fresh, Reduced, batch_of
from kd_core._torch_private import (
    is_batchedtensor,
    is_gradtrackingtensor,
    make_subclass,
    storage_of,
)

if TYPE_CHECKING:
    from typing import Self, SupportsIndex

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry, Holders, Memo, PartsMemo
    from kd_core._types import BatchFn, BatchSize, DeviceLike, LeafFn, PartsFn


class UnbatchedTensor(TensorData, metaclass=ABCMeta):
    """An entry that is one tensor for the whole batch: its shape does not start with `batch_size`.

    `td["key"]` returns it as an instance of `torch.Tensor`, `td.get("key")` as this wrapper. Both
    compute as the tensor does, and what they give can be stored in the container again. Computed
    with a tensor that has the rows of the batch, the result is a plain tensor with these rows.

    Operations on the container that move rows (indexing, reshaping, splitting, repeating) pass the
    same tensor on; arithmetic, `apply`, `to`, `clone` and gradients act on it as on other tensors.
    Reductions along batch dimensions refuse it, because it has none. `stack` and `cat` keep one if
    all are equal, else they raise an error.

    `torch.vmap` maps leaves, and torch reads sizes before a container can tell it that this one has
    no rows: it says that sizes in the mapped dimension differ (or that a tensor has no dimension),
    and where they are equal by chance, the container refuses. Pass the tensor by itself with
    `in_dims=None`, or give the container a tree of `in_dims` with `None` for it.

    A write in place to the tensor of an indexed container is seen by the container that was
    indexed.

    Args:
        data: the tensor, kept by reference; a number, an array or a list of numbers is converted.
        batch_size: the batch size of the container that it belongs to; set when it is stored.
        device: the device of the container; the tensor is moved there.

    Raises:
        InvalidArgument: if `data` is not a tensor and cannot be converted to one.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, UnbatchedTensor
        >>> td = TensorDict(a=torch.zeros(10, 3), u=UnbatchedTensor(torch.ones(7)), batch_size=[10])
        >>> td[:2].reshape(2, 1)["u"].shape, (td + 1)["u"][0]
        (torch.Size([7]), tensor(2.))
        >>> td["double"] = td["u"] * 2
        >>> td[0]["double"].shape
        torch.Size([7])
        >>> td["scaled"] = td["a"] * td["u"].sum()
        >>> td[0]["scaled"]
        tensor([0., 0., 0.])
        >>> scale = torch.vmap(lambda row, u: row["a"] * u.sum(), in_dims=(0, None))
        >>> scale(td.select("a"), td["u"]).shape
        torch.Size([10, 3])
        >>> td.get("u")
        UnbatchedTensor(shape=torch.Size([7]), device=cpu, dtype=torch.float32, is_shared=False)
    """

    __slots__ = ("_kd_desc", "_seen", "_tensor")

    _kd_desc: Descriptor
    _tensor: Tensor
    _seen: Tensor | None
    _of_batch = True
    __array_priority__ = 1000  # arrays of numpy leave operators to it, as to a tensor

    def __init__(
        self, data: object, batch_size: BatchSize = (), device: DeviceLike | None = None
    ) -> None:
        self._kd_desc = describe_on(batch_of(batch_size), device)
        tensor = _converted(_unwrapped(data))
        place = self._kd_desc.device
        self._seen = None
        self._tensor = tensor if place is None or tensor.device == place else tensor.to(place)

    @property
    def data(self) -> Tensor:
        """The tensor itself; a write to it is a write to the entry."""
        return self._tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self._tensor.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self._tensor.device

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of the container that it belongs to."""
        return self._kd_desc.size

    def _computed(self, call: Callable[..., object], *args: object, **options: object) -> Self:
        """Return what a function gives for the tensors, as an entry of the same container."""
        return cast("Self", _computed(self._kd_desc, call, args, options))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch on the tensors; what it returns are entries again."""
        options = kwargs or {}
        desc = _first_desc((*args, *options.values()))
        if desc is None:
            return NotImplemented  # the class itself was passed
        return _computed(desc, func, args, options)

    def __getattr__(self, name: str) -> object:
        """Return an attribute or a method of the tensor."""
        if name.startswith("_"):
            raise AttributeError(f"`{type(self).__name__}` does not have the attribute `{name}`.")
        found: object = getattr(self._tensor, name)
        if callable(found):
            return partial(self._computed, found)
        return _rewrapped(found, self._kd_desc, ())

    def __array__(self, dtype: object = None, copy: bool | None = None) -> object:
        array: Any = self._tensor.numpy(force=True)  # numpy is not a dependency
        return array if dtype is None else array.astype(dtype)

    def __float__(self) -> float:
        return float(self._tensor)

    def __int__(self) -> int:
        return int(self._tensor)

    def __index__(self) -> int:
        return self._tensor.__index__()

    def __bool__(self) -> bool:
        return bool(self._tensor)

    def __complex__(self) -> complex:
        return complex(self._tensor)

    def __format__(self, spec: str) -> str:
        return format(self._tensor, spec) if spec else repr(self)

    def __len__(self) -> int:
        return len(self._tensor)

    def __iter__(self) -> Iterator[object]:
        return (_rewrapped(each, self._kd_desc, ()) for each in self._tensor)

    def __getitem__(self, index: object) -> object:
        return self._computed(operator.getitem, self, index)

    def __setitem__(self, index: object, value: object) -> None:
        self._tensor[_unwrapped(index)] = _unwrapped(value)  # type: ignore[index, assignment]  # torch checks both

    def __add__(self, other: object) -> Self:
        return self._computed(operator.add, self, other)

    def __radd__(self, other: object) -> Self:
        return self._computed(operator.add, other, self)

    def __sub__(self, other: object) -> Self:
        return self._computed(operator.sub, self, other)

    def __rsub__(self, other: object) -> Self:
        return self._computed(operator.sub, other, self)

    def __mul__(self, other: object) -> Self:
        return self._computed(operator.mul, self, other)

    def __rmul__(self, other: object) -> Self:
        return self._computed(operator.mul, other, self)

    def __truediv__(self, other: object) -> Self:
        return self._computed(operator.truediv, self, other)

    def __rtruediv__(self, other: object) -> Self:
        return self._computed(operator.truediv, other, self)

    def __floordiv__(self, other: object) -> Self:
        return self._computed(operator.floordiv, self, other)

    def __rfloordiv__(self, other: object) -> Self:
        return self._computed(operator.floordiv, other, self)

    def __mod__(self, other: object) -> Self:
        return self._computed(operator.mod, self, other)

    def __rmod__(self, other: object) -> Self:
        return self._computed(operator.mod, other, self)

    def __pow__(self, other: object) -> Self:
        return self._computed(operator.pow, self, other)

    def __rpow__(self, other: object) -> Self:
        return self._computed(operator.pow, other, self)

    def __matmul__(self, other: object) -> Self:
        return self._computed(operator.matmul, self, other)

    def __rmatmul__(self, other: object) -> Self:
        return self._computed(operator.matmul, other, self)

    def __and__(self, other: object) -> Self:
        return self._computed(operator.and_, self, other)

    def __rand__(self, other: object) -> Self:
        return self._computed(operator.and_, other, self)

    def __or__(self, other: object) -> Self:
        return self._computed(operator.or_, self, other)

    def __ror__(self, other: object) -> Self:
        return self._computed(operator.or_, other, self)

    def __xor__(self, other: object) -> Self:
        return self._computed(operator.xor, self, other)

    def __rxor__(self, other: object) -> Self:
        return self._computed(operator.xor, other, self)

    def __lshift__(self, other: object) -> Self:
        return self._computed(operator.lshift, self, other)

    def __rlshift__(self, other: object) -> Self:
        return self._computed(operator.lshift, other, self)

    def __rshift__(self, other: object) -> Self:
        return self._computed(operator.rshift, self, other)

    def __rrshift__(self, other: object) -> Self:
        return self._computed(operator.rshift, other, self)

    def __lt__(self, other: object) -> Self:
        return self._computed(operator.lt, self, other)

    def __le__(self, other: object) -> Self:
        return self._computed(operator.le, self, other)

    def __gt__(self, other: object) -> Self:
        return self._computed(operator.gt, self, other)

    def __ge__(self, other: object) -> Self:
        return self._computed(operator.ge, self, other)

    def __neg__(self) -> Self:
        return self._computed(operator.neg, self)

    def __abs__(self) -> Self:
        return self._computed(operator.abs, self)

    def __invert__(self) -> Self:
        return self._computed(operator.invert, self)

    def _kd_item(self) -> Tensor:
        if is_compiling() or not torch.is_tensor(self._tensor):  # or what `tree_map` put there
            return self._tensor
        seen = self._seen
        if seen is None or (
            isinstance(seen, _View) and seen._kd_in_graph is not self._tensor.requires_grad
        ):
            self._seen = seen = _shown(self._tensor, self._kd_desc)
        return seen

    def _with(self, tensor: Tensor, desc: Descriptor) -> Self:
        new = object.__new__(type(self))
        new._tensor, new._kd_desc, new._seen = tensor, desc._unlocked, None
        return new

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        return self._with(self._tensor, desc)

    def _kd_map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Self:
        desc = self._kd_desc
        if batch is None:
            new = memo[1] if memo is not None and memo[0] is desc else desc
            return self._with(fn(self._tensor), new)
        new = desc.with_batch(batch(desc.batch))
        return self._with(_without_rows(self._tensor, fn, batch), new)

    def _kd_map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[Self]:
        desc = self._kd_desc
        return [self._with(self._tensor, desc.with_batch(batch(desc.batch))) for batch in batches]

    def _kd_shallow(self) -> Self:
        return self  # its tensor is never exchanged

    def _kd_collect(self, leaves: list[Tensor]) -> None:
        leaves.append(self._tensor)

    def _kd_rebuild(self, leaves: Iterator[Tensor]) -> Self:
        return self._with(next(leaves), self._kd_desc)

    def _kd_collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        theirs.append(_tensor_beside(other, path))
        mine.append(self._tensor)

    def _kd_zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> Self:
        beside = _tensor_beside(other, path)
        if isinstance(fn, Selection):
            check_equal(self._tensor, beside, path)
            return self._with(self._tensor, self._kd_desc)
        return self._with(fn(self._tensor, beside), self._kd_desc)

    def _join(
        self,
        nodes: Sequence[Entry],
        call: Callable[..., Tensor],
        dim: int,
        desc: Descriptor,
        path: tuple[str, ...],
    ) -> Self:
        for node in nodes:
            check_equal(self._tensor, _tensor_beside(node, path), path)
        return self._with(self._tensor, desc)

    def _agrees(self, value: object) -> bool:
        other = value._tensor if is_unbatched(value) else value
        return isinstance(other, Tensor) and surely_equal(self._tensor, other)

    def _kd_below(self) -> tuple[()]:
        return ()

    def _kd_hold(self, count: int, by: Holders = ()) -> bool:
        return False  # it does not have a structure to lock

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self._with(copy.deepcopy(self._tensor, memo), self._kd_desc)

    def __reduce_ex__(
        self, protocol: SupportsIndex
    ) -> tuple[Callable[..., UnbatchedTensor], tuple[object, ...]]:
        desc = self._kd_desc
        tensor = packed(self._tensor, int(protocol))
        return restore_unbatched, (tensor, desc.batch, desc.device)

    def __repr__(self) -> str:
        from kd_core._display import describe_leaf  # loaded when something is printed

        held: object = self._tensor
        if not torch.is_tensor(held):  # what `tree_map` put in place of one
            return f"{type(self).__name__}({held!r})"
        _, _, described = describe_leaf(held).partition("(")
        return f"{type(self).__name__}({described}"


@UnbatchedTensor.register  # `isinstance` takes what `td[key]` returns for the entry
class _View(UnbatchedView):
    """An entry as an instance of `torch.Tensor`: what `td[key]` returns.

    Functions of torch are called with the tensor of the entry. What they return is of this class,
    too, so that it is known to have no batch dimensions when it is stored;
    `as_subclass(torch.Tensor)` is the plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch on the tensors; what it returns are views again."""
        options = kwargs or {}
        desc = _first_desc((*args, *options.values()))
        if desc is None:
            return NotImplemented  # the class itself was passed
        if func is Tensor.as_subclass:
            return _plain(func, args)
        return _views_of(_computed(desc, func, args, options), (*args, *options.values()))

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of the container that it was read from."""
        return self._kd_desc.size

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())


def _shown(tensor: Tensor, desc: Descriptor) -> Tensor:
    """Return a tensor as a view; plain, where torch makes no instances of classes."""
    if wraps_tensors(tensor) or is_batchedtensor(tensor) or is_gradtrackingtensor(tensor):
        return tensor
    requires_grad = tensor.requires_grad
    try:
        if requires_grad:  # part of the graph, for what calls no function of torch: `vmap`
            with torch.enable_grad():
                view = tensor.as_subclass(_View)
        else:
            view = make_subclass(_View, tensor)
    except (RuntimeError, NotImplementedError):  # of `vmap`
        return tensor
    view._kd_held, view._kd_desc = tensor, desc  # not the entry, which holds the view
    view._kd_in_graph = requires_grad
    return view


def _views_of(found: object, given: Sequence[object]) -> object:
    """Return entries as views; one that was given as it was given."""
    if is_unbatched(found):
        for each in given:
            if isinstance(each, UnbatchedView) and each._kd_tensor is found._tensor:
                return each  # written in place
        return found._kd_item()
    if isinstance(found, (list, tuple)) and any(map(is_unbatched, found)):
        return type(found)(_views_of(each, given) for each in found)
    return found


def _computed(
    desc: Descriptor,
    call: Callable[..., object],
    args: Sequence[object],
    options: Mapping[str, object],
) -> object:
    """Return what a function gives for the tensors of entries, as entries."""
    given = [_unwrapped(each) for each in args]
    named = {key: _unwrapped(each) for key, each in options.items()}
    return _rewrapped(call(*given, **named), desc, (*args, *options.values()))


def _plain(call: Callable[..., object], args: Sequence[object]) -> object:
    """Return what a function gives for the tensors of entries, as it is."""
    return call(*map(_unwrapped, args))


def _unwrapped(value: object) -> object:
    if isinstance(value, UnbatchedView):
        return value._kd_tensor
    if type(value) is list or type(value) is tuple:
        kind: type = type(value)
        return kind(map(_unwrapped, value))
    return value._tensor if is_unbatched(value) else value


def _rewrapped(
    value: object, desc: Descriptor, given: Sequence[object], one_of: bool = False
) -> object:
    """Return a result as an entry, unless it is an argument, or has the rows of the batch."""
    if isinstance(value, Tensor):
        if any(value is each for each in given) or _has_rows(value, desc, given, one_of):
            return value
        return wrap_tensor(value, desc)
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        parts = [_rewrapped(each, desc, given, one_of=True) for each in value]
        return type(value)(parts)
    return value


def _has_rows(value: Tensor, desc: Descriptor, given: Sequence[object], one_of: bool) -> bool:
    """Return whether a result has rows of the batch, which a tensor that was given brought.

    An entry whose own shape begins with the batch size, by chance, brings none. But of several
    results, such as gradients, one may be its own.
    """
    batch = desc.size
    ndim = len(batch)
    if not ndim or value.shape[:ndim] != batch:
        return False
    found = False
    for each in _flat(given):
        tensor = _unwrapped(each)
        if tensor is value:
            return False  # written in place
        if tensor is not each and isinstance(tensor, Tensor):
            if one_of and tensor.shape[:ndim] == batch:
                return False
        elif isinstance(each, Tensor) and each.shape[:ndim] == batch:
            found = True
    return found


def _flat(values: Iterable[object]) -> Iterator[object]:
    """Yield arguments, and those in a list or tuple."""
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _first_desc(values: Iterable[object]) -> Descriptor | None:
    """Return the descriptor of the first entry among arguments, which may be in a list."""
    for each in _flat(values):
        if isinstance(each, UnbatchedView):
            return each._kd_desc
        if is_unbatched(each):
            return each._kd_desc
    return None


@restores
def restore_unbatched(
    tensor: Tensor, batch: tuple[int, ...], device: torch.device | None
) -> UnbatchedTensor:
    """Rebuild an entry; called by pickle. `torch.load(map_location=)` may have moved the tensor."""
    desc = restored(batch, device)
    if not isinstance(tensor, Tensor):
        raise not_valid(f"expected a tensor, got {a_type(tensor)}")
    return wrap_tensor(tensor, desc if device is None else describe(desc.batch, tensor.device))


def wrap_tensor(tensor: Tensor, desc: Descriptor) -> UnbatchedTensor:
    """Wrap a tensor with an existing descriptor."""
    new = object.__new__(UnbatchedTensor)
    new._tensor, new._kd_desc, new._seen = tensor, desc._unlocked, None
    return new


def _without_rows(tensor: Tensor, fn: LeafFn, batch: BatchFn) -> Tensor:
    """Return what an operation on rows makes of a tensor without rows: mostly the tensor itself.

    A function that reduces features gets it as one row.
    """
    if isinstance(batch, Fresh):
        return tensor if batch.make is None else batch.make(tensor)
    if not isinstance(batch, Reduced):
        return tensor
    if batch.first is None:  # most operations say so before, and name the entry
        raise InvalidValue(
            "an `UnbatchedTensor` has no batch dimension along which values are computed. Leave "
            "the entry out with `exclude`, or give it the batch dimensions with `expand`."
        )
    if not batch.first:
        return fn(tensor)
    result = fn(tensor.reshape((1,) * batch.first + tensor.shape))
    return result.reshape(result.shape[batch.first :])


def surely_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether a tensor can stand for another one: it is known to have the same values.

    Compiled code does not compare values, and a tensor that requires gradients cannot stand for
    another one, which would lose its gradient.
    """
    if one is other:
        return True
    if one.shape != other.shape or one.dtype is not other.dtype or one.device != other.device:
        return False
    if is_compiling() or one.requires_grad or other.requires_grad:
        return False
    try:
        if one.is_meta or _place_of(one) == _place_of(other) or torch.equal(one, other):
            return True
        alike = (one == other) | ((one != one) & (other != other))  # not a number in both
        return bool(alike.all())
    except (RuntimeError, NotImplementedError):  # of `vmap`, fake, sparse
        return False


def _place_of(tensor: Tensor) -> object:
    """Return the storage of a dense tensor, and where its elements are in it."""
    if tensor.layout is not torch.strided or wraps_tensors(tensor):
        return id(tensor)
    return storage_of(tensor), tensor.storage_offset(), tensor.stride()


def check_equal(one: Tensor, other: Tensor, path: tuple[str, ...]) -> None:
    """Refuse to let one tensor stand for two that are not known to be equal.

    Raises:
        InvalidValue: if it is refused; the message names the entry.
    """
    if surely_equal(one, other):
        return
    reason = "different values"
    if one.shape != other.shape:
        reason = f"the shapes {shape_text(one.shape)} and {shape_text(other.shape)}"
    elif one.dtype is not other.dtype or one.device != other.device:
        reason = f"{one.dtype} on {one.device} and {other.dtype} on {other.device}"
    elif is_compiling():
        reason = "two tensors, whose values compiled code does not compare"
    elif one.requires_grad or other.requires_grad:
        reason = "two tensors of which one requires gradients"
    raise InvalidValue(
        f"entry {format_key(path)} is an `UnbatchedTensor`, of which the result has one, got "
        f"{reason}. Store one tensor in all containers, or give the entry the batch dimensions: "
        "`td[key] = td.get(key).data.expand(*td.batch_size, *td[key].shape)`. `lazy_stack` keeps "
        "all."
    )


def _tensor_beside(other: Entry, path: tuple[str, ...]) -> Tensor:
    """Return the tensor of the entry of the same key in another container.

    Raises:
        KeySetMismatch: if it is of another kind.
    """
    if is_unbatched(other):
        return other._tensor
    raise KeySetMismatch(
        f"entry {format_key(path)} must be an `UnbatchedTensor` in both containers or in none, got "
        f"{a_type(other)} beside one. Wrap it in `UnbatchedTensor`, or give the entry "
        "the batch dimensions: `td[key] = td.get(key).data.expand(*td.batch_size, *td[key].shape)`."
    )


def _converted(data: object) -> Tensor:
    if isinstance(data, Tensor):
        return data
    try:
        if not is_node(data):
            return torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise wrong_type("`data`", "a tensor, a number, or an array or list of numbers", data)
