"""`UnbatchedTensor`: an entry that is one tensor for the whole batch, without batch dimensions.

It is a leaf for everything that computes with values: arithmetic, casts, moves, gradients, writes
in place. It is a constant for everything that moves rows: these pass the same tensor on. What
computes along rows has no meaning for it; the operation refuses, or says by its batch function what
it does to a tensor without rows (`alone`).

Several of them become one only if they are known to be equal, so none is lost silently.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core import _registry as registry
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
from kd_core._nodes import TensorData, is_node, is_unbatched
from kd_core._shapes import Fresh, Reduced, batch_of

if TYPE_CHECKING:
    from typing import Self, SupportsIndex

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry, Memo, PartsMemo
    from kd_core._types import BatchFn, BatchSize, DeviceLike, LeafFn, PartsFn


class UnbatchedTensor(TensorData):
    """An entry that is one tensor for the whole batch: its shape does not start with `batch_size`.

    `td["key"]` returns the tensor, `td.get("key")` this wrapper. Operations that move rows
    (indexing, reshaping, splitting, repeating) pass the same tensor on; arithmetic, `apply`, `to`,
    `clone` and gradients act on it as on other tensors. Reductions along batch dimensions refuse
    it, because it has none. `stack` and `cat` keep one if all are equal, else they raise an error.

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
        >>> td[0]["u"] is td["u"]
        True
        >>> td.get("u")
        UnbatchedTensor(shape=torch.Size([7]), device=cpu, dtype=torch.float32, is_shared=False)
    """

    __slots__ = ("_kd_desc", "_tensor")

    _kd_desc: Descriptor
    _tensor: Tensor
    _of_batch = True

    def __init__(
        self, data: object, batch_size: BatchSize = (), device: DeviceLike | None = None
    ) -> None:
        self._kd_desc = describe_on(batch_of(batch_size), device)
        tensor = data._tensor if is_unbatched(data) else _converted(data)
        place = self._kd_desc.device
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

    def _computed(self, method: str, *args: object, **options: object) -> Self:
        """Return what a method of the tensor gives, as an entry of the same container."""
        given = [_unwrapped(each) for each in args]
        named = {key: _unwrapped(each) for key, each in options.items()}
        return cast(
            "Self", _rewrapped(getattr(self._tensor, method)(*given, **named), self._kd_desc)
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch on the tensors; what it returns are entries again."""
        desc = _first_desc((*args, *(kwargs or {}).values()))
        if desc is None:
            return NotImplemented  # the class itself was passed
        named = {key: _unwrapped(each) for key, each in (kwargs or {}).items()}
        return _rewrapped(func(*map(_unwrapped, args), **named), desc)

    def __getattr__(self, name: str) -> object:
        """Return an attribute or a method of the tensor."""
        if name.startswith("_"):
            raise AttributeError(f"`{type(self).__name__}` does not have the attribute `{name}`.")
        found: object = getattr(self._tensor, name)
        return (
            partial(self._computed, name) if callable(found) else _rewrapped(found, self._kd_desc)
        )

    def __array__(self, dtype: object = None, copy: bool | None = None) -> object:
        array = cast("Any", self._tensor.numpy(force=True))  # numpy is not a dependency
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

    def __len__(self) -> int:
        return len(self._tensor)

    def __iter__(self) -> Iterator[object]:
        return (_rewrapped(each, self._kd_desc) for each in self._tensor)

    def __getitem__(self, index: object) -> object:
        return self._computed("__getitem__", index)

    def __setitem__(self, index: object, value: object) -> None:
        self._tensor[_unwrapped(index)] = _unwrapped(value)  # type: ignore[index, assignment]  # torch checks both

    def __add__(self, other: object) -> Self:
        return self._computed("__add__", other)

    def __radd__(self, other: object) -> Self:
        return self._computed("__radd__", other)

    def __sub__(self, other: object) -> Self:
        return self._computed("__sub__", other)

    def __rsub__(self, other: object) -> Self:
        return self._computed("__rsub__", other)

    def __mul__(self, other: object) -> Self:
        return self._computed("__mul__", other)

    def __rmul__(self, other: object) -> Self:
        return self._computed("__rmul__", other)

    def __truediv__(self, other: object) -> Self:
        return self._computed("__truediv__", other)

    def __rtruediv__(self, other: object) -> Self:
        return self._computed("__rtruediv__", other)

    def __floordiv__(self, other: object) -> Self:
        return self._computed("__floordiv__", other)

    def __rfloordiv__(self, other: object) -> Self:
        return self._computed("__rfloordiv__", other)

    def __mod__(self, other: object) -> Self:
        return self._computed("__mod__", other)

    def __rmod__(self, other: object) -> Self:
        return self._computed("__rmod__", other)

    def __pow__(self, other: object) -> Self:
        return self._computed("__pow__", other)

    def __rpow__(self, other: object) -> Self:
        return self._computed("__rpow__", other)

    def __matmul__(self, other: object) -> Self:
        return self._computed("__matmul__", other)

    def __rmatmul__(self, other: object) -> Self:
        return self._computed("__rmatmul__", other)

    def __and__(self, other: object) -> Self:
        return self._computed("__and__", other)

    def __rand__(self, other: object) -> Self:
        return self._computed("__rand__", other)

    def __or__(self, other: object) -> Self:
        return self._computed("__or__", other)

    def __ror__(self, other: object) -> Self:
        return self._computed("__ror__", other)

    def __xor__(self, other: object) -> Self:
        return self._computed("__xor__", other)

    def __rxor__(self, other: object) -> Self:
        return self._computed("__rxor__", other)

    def __lshift__(self, other: object) -> Self:
        return self._computed("__lshift__", other)

    def __rlshift__(self, other: object) -> Self:
        return self._computed("__rlshift__", other)

    def __rshift__(self, other: object) -> Self:
        return self._computed("__rshift__", other)

    def __rrshift__(self, other: object) -> Self:
        return self._computed("__rrshift__", other)

    def __lt__(self, other: object) -> Self:
        return self._computed("__lt__", other)

    def __le__(self, other: object) -> Self:
        return self._computed("__le__", other)

    def __gt__(self, other: object) -> Self:
        return self._computed("__gt__", other)

    def __ge__(self, other: object) -> Self:
        return self._computed("__ge__", other)

    def __neg__(self) -> Self:
        return self._computed("__neg__")

    def __abs__(self) -> Self:
        return self._computed("__abs__")

    def __invert__(self) -> Self:
        return self._computed("__invert__")

    def _kd_item(self) -> Tensor:
        return self._tensor

    def _with(self, tensor: Tensor, desc: Descriptor) -> Self:
        new = object.__new__(self.__class__)
        new._tensor, new._kd_desc = tensor, desc._unlocked
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

    def _kd_hold(self, count: int) -> None:
        pass  # it does not have a structure to lock

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

        _, _, described = describe_leaf(self._tensor).partition("(")
        return f"{type(self).__name__}({described}"


def _unwrapped(value: object) -> object:
    if isinstance(value, UnbatchedTensor):
        return value._tensor
    if value.__class__ is list or value.__class__ is tuple:
        kind: type = value.__class__
        return kind(map(_unwrapped, value))
    return value


def _rewrapped(value: object, desc: Descriptor) -> object:
    if isinstance(value, Tensor):
        return wrap_tensor(value, desc)
    if isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
        parts = [_rewrapped(each, desc) for each in value]
        return type(value)(parts)
    return value


def _first_desc(values: Iterable[object]) -> Descriptor | None:
    """Return the descriptor of the first entry among arguments, which may be in a list."""
    for value in values:
        inner = value if isinstance(value, (list, tuple)) else (value,)
        for each in inner:
            if isinstance(each, UnbatchedTensor):
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
    new._tensor, new._kd_desc = tensor, desc._unlocked
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
    # The storage itself: where there is no data, all addresses are 0.
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()


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
        "`td[key] = td[key].expand(*td.batch_size, *td[key].shape)`. `lazy_stack` keeps all."
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
        "the batch dimensions: `td[key] = td[key].expand(*td.batch_size, *td[key].shape)`."
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


registry.register("wrap_tensor", wrap_tensor)
