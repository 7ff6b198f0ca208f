"""Containers that tests share: one factory per kind, and a typed way to what is nested."""

from collections.abc import Callable
from typing import cast

from torch import Tensor

from kd_core import (
    LazyStackedTensorDict,
    NestedKey,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    lazy_stack,
)
from kd_core.testing import ContainerContract


def inner(td: TensorDictBase, key: NestedKey) -> TensorDictBase:
    """Read a nested container; a key does not tell a type checker that it is one."""
    found: object = td.get(key)
    assert isinstance(found, TensorDictBase)
    return found


class Reach(TensorClass):
    """The content of the contract, declared."""

    a: Tensor
    b: Tensor
    n: TensorDict
    word: str


class OpenReach(TypedTensorDict):
    """A part of the content, declared."""

    word: str


def dense() -> TensorDict:
    return TensorDict(ContainerContract.content(), [3, 4])


def stacked(dim: int) -> LazyStackedTensorDict:
    return lazy_stack(dense().unbind(dim), dim)


def declared() -> Reach:
    return Reach.from_dict(ContainerContract.content(), [3, 4])


FACTORIES = cast(
    "dict[str, Callable[[], TensorDictBase]]",
    {
        "dense": dense,
        "stacked_first": lambda: stacked(0),
        "stacked_last": lambda: stacked(1),
        "declared": declared,
        "typed": lambda: OpenReach.from_dict(ContainerContract.content(), [3, 4]),
    },
)
