"""Classes and keys as annotations name them."""

from __future__ import annotations

import torch

from kd_core import NestedKey, TensorDict


def test_a_container_takes_the_types_of_keys_and_entries() -> None:
    held = TensorDict[str, torch.Tensor]  # type: ignore[type-arg]  # for readers
    assert held.__origin__ is TensorDict  # type: ignore[attr-defined]  # of the alias


def test_a_value_is_a_key_or_not() -> None:
    keys = ["a", ("a",), ("a", ("b",))]
    assert [isinstance(key, NestedKey) for key in keys] == [True] * 3
    others = [1, None, ["a"]]
    assert [isinstance(key, NestedKey) for key in others] == [False] * 3
