"""Functions that libraries import from tensordict without a promise of it.

Written on the public interface of kd; what is in `kd_nn` is found by name when it is needed.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

import torch
from torch import Size

import kd_core
from kd_core import (
    NestedKey,
    NonTensorDataBase,
    NotOffered,
    TensorClass,
    TensorDictBase,
    default_is_leaf,
    is_leaf_nontensor,
    is_tensorclass,
)
from kd_core._keys import is_key

if TYPE_CHECKING:
    from kd_core._types import Index

_ACCEPTED_CLASSES: Final = (torch.Tensor, TensorDictBase)
logger: Final = logging.getLogger("kd")
Buffer: Final = torch.nn.Buffer
T = TypeVar("T", bound=TensorDictBase)
# What annotations of programs name.
CompatibleType: Final = torch.Tensor | TensorDictBase
DeviceType: Final = torch.device | str | int
IndexType: Final = slice | str | torch.Tensor | list[object] | tuple[object, ...] | int | None
PYTREE_REGISTERED_TDS: Final = True
KEY_SEPARATOR: Final = "."
LOGGING_LEVEL: Final = "INFO"
BEST_ATTEMPT_INPLACE: Final = True  # `inplace=` of `set`, which adds what is not there
_STRDTYPE2DTYPE: Final = {
    str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}
_STR_DTYPE_TO_DTYPE: Final = _STRDTYPE2DTYPE
_DTYPE_TO_STR_DTYPE: Final = {each: name for name, each in _STRDTYPE2DTYPE.items()}


# Libraries ask these of their own types, too, all of which are leaves.


def _default_is_leaf(cls: type) -> bool:
    return default_is_leaf(cls) or not issubclass(cls, TensorDictBase | NonTensorDataBase)


def _is_leaf_nontensor(cls: type) -> bool:
    return is_leaf_nontensor(cls) or not issubclass(cls, TensorDictBase)


def _is_tensor_collection(cls: type) -> bool:
    return issubclass(cls, TensorDictBase | NonTensorDataBase)


# Methods of tensor classes whose annotations programs correct.


def _eq(self: TensorDictBase, other: object) -> object:
    return self == other


def _getitem(self: TensorDictBase, item: NestedKey | Index) -> object:
    return self[item]


_is_tensorclass = is_tensorclass
_TensorClassMeta = type(TensorClass)


# Libraries ask these whether an index is a key: the answer to a tuple that is not a key is `()`.


def _unravel_key_to_tuple(key: NestedKey) -> tuple[str, ...]:
    if type(key) is str:
        return (key,)
    return kd_core.unravel_key_to_tuple(key) if is_key(key) else ()


def unravel_key(key: NestedKey) -> NestedKey:
    """Return a key in its normal form; an empty tuple for a tuple that is not a key."""
    if type(key) is str:
        return key
    return () if isinstance(key, tuple) and not is_key(key) else kd_core.unravel_key(key)


unravel_key_to_tuple = _unravel_key_to_tuple
unravel_keys = unravel_key


def _zip_strict(*values: Iterable[object]) -> Iterator[tuple[object, ...]]:
    return zip(*values, strict=True)


def _is_non_tensor(cls: type) -> bool:
    return issubclass(cls, NonTensorDataBase)


def _getitem_batch_size(batch_size: Sequence[int], index: Index) -> Size:
    # one element seen under the sizes: no memory, and torch's own rules of indexing
    return torch.empty(1).expand(*batch_size)[index].shape


def _shape(value: torch.Tensor | TensorDictBase) -> Size:
    return value.shape


def _maybe_correct_neg_dim(dim: int, shape: Sequence[int] | None, ndim: int | None = None) -> int:
    count = len(shape or ()) if ndim is None else ndim
    positive = dim if dim >= 0 else dim + count
    if not 0 <= positive < count:
        raise IndexError(f"dimension {dim} is out of range for a container with shape {shape}.")
    return positive


def prod(sequence: Iterable[int]) -> int:
    """Return the product of sizes, 1 of none."""
    return math.prod(sequence)


def is_seq_of_nested_key(seq: object) -> bool:
    """Return whether a value is a sequence of keys."""
    return isinstance(seq, str | list | tuple) and all(map(is_key, seq))


_prod = prod
_is_nested_key = is_key
_is_seq_of_nested_key = is_seq_of_nested_key
_is_dataclass = is_dataclass


def _is_namedtuple(obj: object) -> bool:
    return isinstance(obj, tuple) and hasattr(obj, "_fields")


def _device(value: torch.Tensor | TensorDictBase) -> torch.device | None:
    return value.device


def _dtype(value: torch.Tensor) -> torch.dtype:
    return value.dtype


def _is_shared(value: torch.Tensor | TensorDictBase) -> bool:
    return value.is_shared()


def convert_ellipsis_to_idx(idx: object, batch_size: Sequence[int]) -> object:
    """Return an index with slices in place of the ellipsis."""
    items = idx if isinstance(idx, tuple) else (idx,)
    places = [at for at, item in enumerate(items) if item is Ellipsis]
    if not places:
        return idx
    at = places[0]
    missing = len(batch_size) - sum(item is not None for item in items) + 1
    return (*items[:at], *[slice(None)] * missing, *items[at + 1 :])


class _MembersOfStacks:
    """A leaf function: lazy stacks are entered by the positions of their members."""

    def __init__(self, leaf: Callable[[type], bool]) -> None:
        self.leaf = leaf

    def __call__(self, cls: type) -> bool:
        return self.leaf(cls)


_NESTED_TENSORS_AS_LISTS: Final = _MembersOfStacks(_default_is_leaf)
_NESTED_TENSORS_AS_LISTS_NONTENSOR: Final = _MembersOfStacks(_is_leaf_nontensor)


class _Dispatching(threading.local):
    """The switch of this thread, which compiled code can read and write."""

    def __init__(self) -> None:
        self.on = True


_DISPATCHING: Final = _Dispatching()


def dispatching() -> bool:
    """Return whether methods decorated by `dispatch` make a container of what is not one."""
    return _DISPATCHING.on


@contextmanager
def _set_dispatch_td_nn_modules(mode: bool) -> Iterator[None]:
    before, _DISPATCHING.on = _DISPATCHING.on, mode
    try:
        yield
    finally:
        _DISPATCHING.on = before


def _exclude_td_from_pytree() -> AbstractContextManager[None]:
    return nullcontext()


def _set_skip_existing_None(  # noqa: N802  # the name that users import
    *arguments: object, **keywords: object
) -> object:
    return import_module("kd_nn").set_skip_existing(None, *arguments, **keywords)


def _use_generator(generator: torch.Generator | None) -> AbstractContextManager[None]:
    return nullcontext() if generator is None else _drawing_from(generator)


@contextmanager
def _drawing_from(generator: torch.Generator) -> Iterator[None]:
    # distributions of torch draw from the global generator of a device and take no other
    with torch.random.fork_rng(
        devices=[generator.device] if generator.device.type == "cuda" else []
    ):
        state = torch.cuda if generator.device.type == "cuda" else torch
        state.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(state.get_rng_state())


SERVED: Final = frozenset(
    """
    Buffer T CompatibleType DeviceType IndexType prod _is_tensor_collection _eq _getitem
    unravel_key unravel_keys unravel_key_to_tuple NO_DEFAULT PYTREE_REGISTERED_TDS logger
    _default_is_leaf _is_leaf_nontensor _unravel_key_to_tuple _is_tensorclass _TensorClassMeta
    _zip_strict _is_non_tensor _getitem_batch_size _shape _ACCEPTED_CLASSES _maybe_correct_neg_dim
    is_seq_of_nested_key _NESTED_TENSORS_AS_LISTS _NESTED_TENSORS_AS_LISTS_NONTENSOR
    _set_dispatch_td_nn_modules _exclude_td_from_pytree _set_skip_existing_None _use_generator
    KEY_SEPARATOR LOGGING_LEVEL BEST_ATTEMPT_INPLACE _STRDTYPE2DTYPE _STR_DTYPE_TO_DTYPE
    _DTYPE_TO_STR_DTYPE _prod _is_nested_key _is_seq_of_nested_key _is_dataclass is_dataclass
    _is_namedtuple _device _dtype _is_shared convert_ellipsis_to_idx
    """.split()  # noqa: SIM905  # one list reads better in columns
)


def absent(name: str, reason: str) -> type:
    """Return a class in place of a name that kd leaves out: it can be imported, and not used."""

    def refuse(cls: type, *arguments: object, **keywords: object) -> NoReturn:
        raise NotOffered(reason)

    return type(name, (), {"__new__": refuse, "__doc__": reason, "__module__": "tensordict"})


def _expln() -> object:
    return import_module("kd_nn.distributions").mappings("expln")


def _traced() -> object:
    return import_module("kd_nn.fx").TracedModule


def _symbolic_trace() -> object:
    return import_module("kd_nn.fx").symbolic_trace


def _implement_for() -> object:
    return import_module("pyvers").implement_for


# Names whose value is found in another package when a program asks: package and value.
LATER: Final[dict[str, tuple[str, Callable[[], object]]]] = {
    "expln": ("kd_nn", _expln),
    "TDGraphModule": ("kd_nn", _traced),
    "symbolic_trace": ("kd_nn", _symbolic_trace),
    "implement_for": ("pyvers", _implement_for),
}
