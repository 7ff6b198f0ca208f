"""Entries of several containers become those of one."""

import pytest

from kd_core import (
    ShapeMismatch,
    TensorDict,
    merge_tensordicts,
)


def test_merge_keeps_the_first_entry_and_the_sources() -> None:
    first = TensorDict({"a": 1, "in": {"b": 1}}).lock_()
    others = TensorDict({"in": {"b": 2, "c": 2}, "d": 2}), TensorDict({"a": 3, "in": {"e": 3}})
    merged = merge_tensordicts(first, *others)
    assert merged.to_dict() == {"a": 1, "in": {"b": 1, "c": 2, "e": 3}, "d": 2}
    assert list(others[0].keys(True, True)) == [("in", "b"), ("in", "c"), "d"]
    assert set(first.keys(True, True)) == {"a", ("in", "b")}


def test_merge_checks_batch_sizes() -> None:
    with pytest.raises(ShapeMismatch, match=r"must be equal, got .* and \(3,\) in cont"):
        merge_tensordicts(TensorDict({}, [2]), TensorDict({}, [3]))


def test_a_callback_decides_what_stays() -> None:
    first = TensorDict({"a": 1.0, "n": {"b": 2.0, "c": 3.0}})
    second = TensorDict({"a": 10.0, "n": {"b": 20.0, "d": 30.0}})
    got = merge_tensordicts(first, second, callback_exist=lambda mine, theirs: theirs)
    assert got["a"] == 10
    assert got["n", "b"] == 20
    assert set(got.keys(True, True)) == {"a", ("n", "b"), ("n", "c"), ("n", "d")}
    assert first["a"] == 1
