"""Classes and keys as annotations name them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import pytest
import torch

from kd_core import (
    InvalidArgument,
    LazyStackedTensorDict,
    NestedKey,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    TensorDictBase,
)


@pytest.mark.parametrize(
    "kind", [TensorDict, TensorDictBase, LazyStackedTensorDict, PersistentTensorDict]
)
def test_a_container_takes_the_types_of_keys_and_entries(kind: Any) -> None:
    held = kind[str, torch.Tensor]
    assert held.__origin__ is kind

    class Own(held):  # type: ignore[valid-type, misc]  # an alias at run time
        pass

    assert issubclass(Own, kind)


def test_a_tensor_class_takes_options_or_the_types_of_its_variables() -> None:
    kind = TypeVar("kind")

    class Box(TensorClass, Generic[kind]):
        held: kind

    assert Box[int](held=1).held == 1
    with pytest.raises(InvalidArgument, match="names of options"):
        TensorClass[int]  # type: ignore[misc]  # is not generic


def test_a_value_is_a_key_or_not() -> None:
    keys = ["a", ("a",), ("a", ("b",))]
    assert [isinstance(key, NestedKey) for key in keys] == [True] * 3
    others = [1, None, ["a"]]
    assert [isinstance(key, NestedKey) for key in others] == [False] * 3
