"""Entries that get another name, and those that move to another level with it."""

from collections.abc import Callable

import pytest
import torch

from kd_core import ShapeMismatch, TensorDict, TensorDictBase, lazy_stack


def dense() -> TensorDict:
    deeper = TensorDict({"y": torch.zeros(2, 3)}, [2, 3])
    return TensorDict({"x": torch.zeros(2), "s": ["a", "b"], "of all": "m", "n": deeper}, [2])


def stacked() -> TensorDictBase:
    return lazy_stack(dense().unbind(0))


def row() -> TensorDict:
    return dense()[0]


@pytest.mark.parametrize("make", [dense, stacked, row])
@pytest.mark.parametrize("key", ["x", "s"])
def test_what_rows_hold_does_not_move_to_a_level_of_more_rows(
    make: Callable[[], TensorDictBase], key: str
) -> None:
    td = make()
    refused = r"does not fit entry `\('n', '.'\)`: its shape must start"
    with pytest.raises(ShapeMismatch, match=refused):
        td.rename_key_(key, ("n", key))
    with pytest.raises(ShapeMismatch, match=refused):
        td.rename_keys({key: ("n", key)})
    assert list(td.keys(True)) == list(make().keys(True))
    assert td["s"] == make()["s"]


@pytest.mark.parametrize("make", [dense, stacked, row])
def test_one_value_of_all_rows_moves_to_any_level(make: Callable[[], TensorDictBase]) -> None:
    td = make().rename_key_("of all", ("n", "unit"))
    assert td["n", "unit"] in ("m", [["m"] * 3] * 2)


@pytest.mark.parametrize("make", [dense, stacked, row])
def test_values_of_rows_move_to_a_level_of_the_same_rows(
    make: Callable[[], TensorDictBase],
) -> None:
    td = make().rename_key_("s", ("m", "s"))
    assert td["m", "s"] == make()["s"]
