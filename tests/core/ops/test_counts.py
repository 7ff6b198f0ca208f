"""Counts and tables of what a container holds."""

import pytest
import torch
from torch import Tensor

from kd_core import (
    KeyNotFound,
    NonTensorData,
    NonTensorStack,
    ShapeMismatch,
    TensorDict,
    lazy_stack,
)


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
    assert make().non_tensor_items() == ()
    [(key, wrapper)] = make().non_tensor_items(include_nested=True)
    assert key == ("n", "s")
    assert isinstance(wrapper, NonTensorData)
    assert wrapper.data == "text"


def test_summary_has_a_line_for_each_leaf_and_totals() -> None:
    table = make().summary()
    assert repr(table) == str(table)
    assert table._repr_html_().startswith("<table><tr><th>key</th><th>shape</th>")
    lines = table.splitlines()
    assert lines[0].split() == ["key", "shape", "dtype", "device", "bytes"]
    assert lines[2].split() == ["('n',", "'a')", "(2,", "3)", "float32", "cpu", "24"]
    assert lines[-1].split() == ["3", "tensors", "14", "numbers", "64"]
    assert len(lines) == 6
    assert len(TensorDict().summary().splitlines()) == 2


def test_questions_about_one_entry() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2)}, "s": "text"}, [2])
    assert td.entry_class("a") is Tensor
    assert td.entry_class("n") is TensorDict
    assert td.get_item_shape("a") == (2, 3)
    assert td.get_item_shape("s") == (2,)
    assert td.is_non_tensor("s")
    assert not td.is_non_tensor(("n", "b"))
    assert td.entry_class(("n", "z")) is type(None)
    for name in ("get_item_shape", "is_non_tensor"):
        with pytest.raises(KeyNotFound):
            getattr(td, name)(("n", "z"))


def test_a_ragged_stack_is_not_stacked_to_say_the_kind_of_an_entry() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (2, 3)])
    assert stack.entry_class("a") is Tensor
    assert not stack.is_non_tensor("a")


def test_floating_point_and_addresses() -> None:
    assert TensorDict({"a": 1.0}).is_floating_point()
    assert not TensorDict({"a": 1.0, "b": 1}).is_floating_point()
    assert TensorDict().is_floating_point()
    td = TensorDict({"a": torch.ones(2, 3)}, [2])
    assert td[1:].data_ptr()["a"].item() == td["a"].data_ptr() + 12
    assert td[1:].data_ptr(storage=True)["a"].item() == td["a"].data_ptr()


def test_ragged_entries_have_a_shape_and_a_line() -> None:
    rows = [
        TensorDict({"a": torch.ones(n, 4), "s": "x", "n": {"b": torch.ones(n)}}) for n in (2, 3)
    ]
    stack = lazy_stack(rows)
    assert stack.get_item_shape("a") == (2, -1, 4)
    assert lazy_stack([stack, stack]).get_item_shape(("n", "b")) == (2, 2, -1)
    assert (stack.get_item_shape("s"), stack.get_item_shape("n")) == ((2,), (2,))
    [(key, words)] = stack.non_tensor_items()
    assert key == "s"
    assert isinstance(words, NonTensorStack)
    assert words.tolist() == ["x", "x"]
    lines = TensorDict({"rows": stack}, [2]).summary().splitlines()
    assert lines[1].split() == ["('rows',", "'a')", "(2,", "-1,", "4)", "float32", "cpu", "80"]
    mixed = lazy_stack([TensorDict({"a": torch.ones(2)}), TensorDict({"a": 1.0})])
    with pytest.raises(ShapeMismatch, match=r"of `a` differ among the members: .* \(2,\), \(\)"):
        mixed.get_item_shape("a")
