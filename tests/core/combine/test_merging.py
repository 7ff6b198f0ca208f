"""Entries of several containers become those of one."""

import pytest

from kd_core import (
    ShapeMismatch,
    TensorDict,
    merge_tensordicts,
)


def test_merge_keeps_the_later_entry_and_the_sources() -> None:
    first = TensorDict({"a": 1, "in": {"b": 1}}).lock_()
    merged = merge_tensordicts(first, TensorDict({"in": {"c": 2}}), TensorDict({"a": 3}))
    assert merged.to_dict() == {"a": 3, "in": {"b": 1, "c": 2}}
    assert set(first.keys(True, True)) == {"a", ("in", "b")}


def test_merge_checks_batch_sizes() -> None:
    with pytest.raises(ShapeMismatch, match=r"the same, but the batch_size is \(3,\) in cont"):
        merge_tensordicts(TensorDict({}, [2]), TensorDict({}, [3]))
