"""Switches that programs of tensordict set."""

import numpy
import pytest
import torch

from kd_core import (
    InvalidArgument,
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    capture_non_tensor_stack,
    get_defaults_to_none,
    lazy_legacy,
    lazy_stack,
    list_to_stack,
    set_capture_non_tensor_stack,
    set_get_defaults_to_none,
    set_lazy_legacy,
    set_list_to_stack,
    stack,
)


def test_switches_that_say_what_kd_does_do_nothing() -> None:
    set_list_to_stack(True).set()
    set_capture_non_tensor_stack(False).set()
    set_lazy_legacy(False).set()
    set_get_defaults_to_none(True)
    assert (list_to_stack(), capture_non_tensor_stack()) == (True, False)
    assert (lazy_legacy(), get_defaults_to_none()) == (False, True)
    with set_lazy_legacy(False), set_capture_non_tensor_stack(False).clone():
        assert TensorDict({"words": ["to", "be"]}, [2])[0]["words"] == "to"


def test_a_list_can_be_one_value_for_all_rows() -> None:
    @set_list_to_stack(False)
    def stored() -> TensorDict:
        assert not list_to_stack(allow_none=True)
        return TensorDict({"words": ["to", "be"], "x": [1, 2]}, [2])

    td = stored()
    assert list_to_stack()
    words: object = td.get("words")
    assert isinstance(words, NonTensorData)
    assert isinstance(words.data, numpy.ndarray)
    assert (words.data.tolist(), words.data.dtype.kind) == (["to", "be"], "U")
    assert words.batch_size == (2,)
    with set_list_to_stack(False):  # numbers beside words stay numbers
        mixed = TensorDict({"a": ["to", 1], "b": [["to"], ["b", "e"]], "c": ("to", "be")})
    assert [mixed[key].tolist() for key in ("a", "b")] == [["to", 1], [["to"], ["b", "e"]]]
    assert isinstance(mixed.get_non_tensor("c"), numpy.ndarray)
    assert torch.equal(td["x"], torch.tensor([1, 2]))
    setting = set_list_to_stack(False)
    with setting, setting:
        assert not list_to_stack()
    assert list_to_stack()


def test_stack_can_be_lazy() -> None:
    rows = [TensorDict({"a": 1}), TensorDict({"a": 2})]

    @set_lazy_legacy(True)
    def stacked() -> object:
        assert lazy_legacy()
        return torch.stack(rows)  # type: ignore[arg-type]  # mypy knows tensors alone

    for _ in range(2):
        assert isinstance(stacked(), LazyStackedTensorDict)
        assert not lazy_legacy()
    setting = set_lazy_legacy()
    with setting, set_lazy_legacy(False), setting.clone():
        assert isinstance(stack(rows, 0), LazyStackedTensorDict)
    assert isinstance(stack(rows, 0), TensorDict)


def test_equal_values_of_rows_become_one_if_that_is_asked_for() -> None:
    def row(word: str) -> TensorDict:
        return TensorDict({"word": word})

    with set_capture_non_tensor_stack(True):
        assert capture_non_tensor_stack()
        equal = stack([row("a"), row("a")])
        assert isinstance(equal.get("word"), NonTensorData)
        assert equal.batch_size == (2,)
        assert lazy_stack([row("a"), row("a")])["word"] == "a"
        assert stack([row("a"), row("b")])["word"] == ["a", "b"]
        assert row("a").expand(2)["word"] == row("a").unsqueeze(0)["word"] == "a"
        equal[0] = row("b")
        assert equal["word"] == ["b", "a"]
    assert not capture_non_tensor_stack()
    assert stack([row("a"), row("a")])["word"] == ["a", "a"]


def test_a_switch_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="must be `True`, got `False`"):
        set_get_defaults_to_none(False)
