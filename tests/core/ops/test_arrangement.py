"""Nested containers made, emptied and split."""

import pytest
import torch
from tests.core.kinds import inner
from torch import Tensor

from kd_core import (
    InvalidArgument,
    KeyCollision,
    KeyNotFound,
    Locked,
    TensorClass,
    TensorDict,
    lazy_stack,
)


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
    full, holds_empty = make().lock_(), TensorDict({"a": 1.0, "n": {}}).lock_()
    assert full.filter_empty_() is full  # there is nothing to remove
    with pytest.raises(Locked):
        holds_empty.filter_empty_()


def test_filter_empty_that_is_refused_changes_nothing() -> None:
    class Final(TensorClass, frozen=True):
        a: TensorDict
        n: TensorDict

    a, n = TensorDict({"e": {}}, [2]), TensorDict({"e": {}}, [2])
    with pytest.raises(Locked, match="the class is frozen"):
        Final(a, n, batch_size=2).filter_empty_()
    assert list(a.keys()) == list(n.keys()) == ["e"]


def test_filter_empty_leaves_fields_that_are_none() -> None:
    class Step(TensorClass):
        a: TensorDict
        n: TensorDict

    step = Step(TensorDict({"e": {}}, [2]), TensorDict({"x": torch.ones(2)}, [2]), batch_size=2)
    assert step.filter_empty_() is step
    assert list(step.keys()) == ["n"]
    assert step.a is None


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


def test_split_keys_in_place_leaves_the_rest() -> None:
    td = make()
    nested = inner(td, "n")
    part, rest = td.split_keys([("n", "b")], inplace=True)
    assert rest is td
    assert inner(td, "n") is nested
    assert list(td.keys(True, True)) == ["a"]
    assert list(part.keys(True, True)) == [("n", "b")]


def test_split_keys_in_place_is_all_or_nothing() -> None:
    td = make()
    before = list(td.keys(True))
    with pytest.raises(KeyNotFound, match="`z` not found"):
        td.split_keys(["a"], ["z"], inplace=True)
    assert list(td.keys(True)) == before
    with pytest.raises(Locked, match="split keys in place"):
        td.lock_().split_keys(["a"], inplace=True)


def test_split_keys_takes_a_default() -> None:
    part, _ = make().split_keys(["a", "z"], default="none")
    assert part.get_non_tensor("z") == "none"
    part, _ = make().split_keys(["z"], default=torch.zeros(2))
    assert part["z"].tolist() == [0, 0]


def test_what_is_left_of_a_tensor_class_is_an_instance_too() -> None:
    class Point(TensorClass):
        x: Tensor
        y: Tensor

    part, rest = Point(torch.zeros(2), torch.ones(2), batch_size=[2]).split_keys(["x"])
    assert type(part) is type(rest) is Point
    assert list(part.keys()) == ["x"]
    assert rest.y.tolist() == [1.0, 1.0]


def test_split_keys_reproduces_the_structure() -> None:
    part, rest = make().split_keys([("n", "b"), ("n", "c", "d")], reproduce_struct=True)
    assert set(part.keys(True)) == {"n", ("n", "b"), ("n", "c"), ("n", "c", "d")}
    assert set(rest.keys(True)) == {"a", "n", ("n", "c")}


def test_separates_removes_what_it_returns() -> None:
    td = make()
    part = td.separates("a", ("n", "c"))
    assert set(part.keys(True)) == {"a", "n", ("n", "c"), ("n", "c", "d")}
    assert list(td.keys(True)) == ["n", ("n", "b")]
    assert list(td.separates(("n", "b"), filter_empty=False).keys(True)) == ["n", ("n", "b")]
    assert list(td.keys()) == ["n"]


def test_separates_is_all_or_nothing() -> None:
    td = make()
    before = list(td.keys(True))
    with pytest.raises(KeyNotFound):
        td.separates("a", "z")
    assert list(td.keys(True)) == before
    assert list(td.separates("a", "z", strict=False).keys()) == ["a"]


def test_separates_reaches_the_members_of_a_stack() -> None:
    members = [make(), make()]
    stack = lazy_stack(members)
    part = stack.separates("a", "z", default=torch.arange(4).view(2, 2))
    assert part["z"].tolist() == [[0, 1], [2, 3]]
    assert "a" not in members[0]
    with pytest.raises(KeyNotFound):
        stack.separates(("n", "b"), "a")
    assert ("n", "b") in members[0].keys(True)


def test_rename_keys_renames_all_at_once() -> None:
    td = make()
    got = td.rename_keys({"a": "n", "n": ("x", "y")})
    assert list(got.keys(True, True)) == ["n", ("x", "y", "b")]
    assert got["n"] is td["a"]
    assert "a" in td
    assert list(td.rename_keys(lambda key: f"{key}_").keys(True, True)) == ["a_", ("n_", "b_")]


def test_what_rename_keys_refuses() -> None:
    with pytest.raises(KeyNotFound):
        make().rename_keys({"z": "y"})
    assert "y" not in make().rename_keys({"z": "y"}, strict=False)
    with pytest.raises(KeyCollision, match="cannot rename `a` to `n`"):
        make().rename_keys({"a": "n"})
    with pytest.raises(InvalidArgument, match="is renamed too"):
        make().rename_keys({"n": "m", ("n", "b"): "y"})
    with pytest.raises(InvalidArgument, match="a mapping of keys or a function"):
        make().rename_keys(["a"])  # type: ignore[arg-type]  # the error under test


def test_filter_non_tensor_data_keeps_the_levels() -> None:
    got = make().filter_non_tensor_data()
    assert list(got.keys(True)) == ["a", "n", ("n", "b"), ("n", "c")]


def test_filter_empty_keeps_what_members_of_a_stack_do_not_share() -> None:
    ragged = lazy_stack(
        [TensorDict({"a": torch.ones(2), "e": {}}), TensorDict({"b": torch.ones(2), "e": {}})]
    )
    hollow = lazy_stack([TensorDict({"e": {}}), TensorDict()])
    td = TensorDict({"s": ragged, "hollow": hollow}, [2])
    assert list(td.filter_empty_().keys()) == ["s"]
    stack = inner(td, "s")
    assert [list(member.keys()) for member in stack.unbind(0)] == [["a"], ["b"]]
