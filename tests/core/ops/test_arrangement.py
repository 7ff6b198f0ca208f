"""Nested containers made, emptied and split."""

import pytest
import torch
from tests.core.kinds import inner
from torch import Tensor

from kd_core import InvalidArgument, KeyNotFound, Locked, TensorClass, TensorDict


def make() -> TensorDict:
    return TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2), "c": {"d": "x"}}}, [2])


def test_clear_leaves_a_container_of_the_same_batch_size() -> None:
    td = make()
    assert td.clear() is td
    assert td.is_empty()
    assert td.batch_size == (2,)
    with pytest.raises(Locked):
        make().lock_().clear()


def test_create_nested_makes_the_way() -> None:
    td = TensorDict(batch_size=[2], device="cpu").create_nested(("a", "b"))
    assert list(td.keys(True)) == ["a", ("a", "b")]
    assert inner(td, ("a", "b")).batch_size == (2,)
    assert inner(td, ("a", "b")).device == torch.device("cpu")


def test_filter_empty_removes_what_becomes_empty() -> None:
    td = make().exclude(("n", "b"), ("n", "c", "d"))
    assert list(td.filter_empty_().keys(True)) == ["a"]
    with pytest.raises(Locked):
        make().lock_().filter_empty_()


def test_filter_empty_that_is_refused_changes_nothing() -> None:
    class Step(TensorClass):
        a: TensorDict
        n: TensorDict

    a, n = TensorDict({"e": {}}, [2]), TensorDict({"e": {}}, [2])
    with pytest.raises(InvalidArgument, match="`a`"):
        Step(a, n, batch_size=2).filter_empty_()
    assert list(a.keys()) == list(n.keys()) == ["e"]


def test_split_keys_gives_each_set_and_the_rest() -> None:
    td = make()
    first, second, rest = td.split_keys(["a"], [("n", "c", "d"), ("n", "b")])
    assert first["a"] is td["a"]
    assert set(second.keys(True, True)) == {("n", "b")}
    assert second["n", "c", "d"] == "x"
    assert rest.is_empty()
    assert "n" not in rest
    assert set(td.keys(True)) == {"a", "n", ("n", "b"), ("n", "c"), ("n", "c", "d")}


def test_a_key_is_split_off_once() -> None:
    with pytest.raises(KeyNotFound, match="key `a` not found"):
        make().split_keys(["a"], ["a"])
    assert "a" not in make().split_keys(["a"], ["a", "z"], strict=False)[1]


def test_parts_of_what_is_locked_or_declared_are_free() -> None:
    class Pair(TensorClass):
        x: Tensor
        y: Tensor

    first, rest = Pair(torch.ones(1), torch.zeros(1)).lock_().split_keys(["x"])
    assert list(first.keys()) == ["x"]
    assert list(rest.keys()) == ["y"]
    assert not rest.is_locked
