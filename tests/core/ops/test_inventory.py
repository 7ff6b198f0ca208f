"""Counts and tables of what a container holds."""

import torch

from kd_core import TensorDict, lazy_stack


def make() -> TensorDict:
    shared = torch.zeros(2, 3)
    return TensorDict({"b": shared, "n": {"a": shared, "i": torch.arange(2), "s": "text"}}, [2])


def test_counts() -> None:
    td = make()
    assert td.depth == 1
    assert TensorDict().depth == 0
    assert td.sorted_keys == ["b", "n"]
    assert (td.param_count(), td.param_count(count_duplicates=False)) == (14, 8)
    assert (td.bytes(), td.bytes(count_duplicates=False)) == (64, 40)


def test_members_of_a_stack_count() -> None:
    assert lazy_stack([make(), make()]).param_count() == 28


def test_data_is_listed() -> None:
    assert make().non_tensor_items() == []
    assert make().non_tensor_items(include_nested=True) == [(("n", "s"), "text")]


def test_summary_has_a_line_for_each_leaf_and_totals() -> None:
    lines = make().summary().splitlines()
    assert lines[0].split() == ["key", "shape", "dtype", "device", "bytes"]
    assert lines[2].split() == ["('n',", "'a')", "(2,", "3)", "float32", "cpu", "24"]
    assert lines[-1].split() == ["3", "tensors", "14", "numbers", "64"]
    assert len(lines) == 6
    assert len(TensorDict().summary().splitlines()) == 2
