from typing import Any

import pytest
import torch
from torch import Tensor

from kd_core import (
    NO_DEFAULT,
    InvalidArgument,
    KeyNotFound,
    KeyThroughLeaf,
    Locked,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

X = torch.ones(2, 3)


class Typed(TensorClass):
    a: Tensor
    n: TensorDict


def test_assign_replaces_a_container() -> None:
    td = TensorDict({"a": {"b": X}}, [2])
    td.assign({"a": {"c": X}, ("d", "e"): X})
    assert set(td.keys(True, True)) == {("a", "c"), ("d", "e")}


def test_assign_of_leaves_keeps_the_others() -> None:
    td = TensorDict({"a": X, "b": X}, [2])
    assert td.assign({"b": -X, "c": X}) is td
    assert list(td.keys()) == ["a", "b", "c"]
    assert (td["b"] == -1).all()


@pytest.mark.parametrize("wrong", ["c", ("n", "c")])
def test_assign_that_fails_changes_nothing(wrong: str | tuple[str, ...]) -> None:
    td = TensorDict({"a": X}, [2])
    with pytest.raises(ShapeMismatch, match="c"):
        td.assign({"a": -X, wrong: torch.ones(5)})
    assert list(td.keys()) == ["a"]
    assert (td["a"] == 1).all()


def test_assign_through_a_leaf_or_into_a_lock_is_refused() -> None:
    td = TensorDict({"a": X, "n": {"b": X}}, [2])
    with pytest.raises(KeyError, match="a"):
        td.assign({"b": X, ("a", "c"): X})
    assert "b" not in td
    td.lock_()
    with pytest.raises(Locked, match="set"):
        td.assign({"b": X})
    with pytest.raises(Locked, match="set"):
        td.assign({("n", "c"): X})


def test_data_is_set_and_read_as_such() -> None:
    td = TensorDict(batch_size=[2]).set_non_tensor(("n", "sizes"), [1, 2])
    assert td.get_non_tensor(("n", "sizes")) == [1, 2]
    assert td.get_non_tensor("missing", None) is None
    with pytest.raises(KeyNotFound):
        td.get_non_tensor("missing")


def test_a_nested_container_is_read_as_the_kind_that_it_is() -> None:
    td = TensorDict({"n": {"m": {"a": 1}}, "x": 1.0})
    assert td.nested(("n", "m"), TensorDict)["a"] == 1
    found: object = td.nested("n", TensorDict)
    assert found is td["n"]
    with pytest.raises(InvalidArgument, match="entry `x` must be a `TensorDict`, got a `Tensor`"):
        td.nested("x", TensorDict)
    with pytest.raises(KeyNotFound, match="`z` not found"):
        td.nested("z", TensorDict)


def test_set_takes_the_value_under_the_name_of_tensordict() -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    assert td.set("b", item=torch.ones(2))["b"].tolist() == [1, 1]
    kept = td["a"]
    td.set_("a", item=torch.ones(2))
    assert kept.tolist() == [1, 1]


@pytest.mark.parametrize("method", ["set", "set_"])
@pytest.mark.parametrize(
    ("given", "got"), [({}, "neither"), ({"value": torch.ones(2), "item": torch.ones(2)}, "both")]
)
def test_set_takes_one_value(method: str, given: dict[str, Tensor], got: str) -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    with pytest.raises(InvalidArgument, match=f"`{method}` expected one of .* got {got}"):
        getattr(td, method)("a", **given)
    assert td["a"].tolist() == [0, 0]


@pytest.mark.parametrize("key", ["x", ("n", "x"), ("x", "y")])
@pytest.mark.parametrize("kind", ["dense", "lazy", "typed"])
def test_no_default_asks_for_an_error(kind: str, key: str | tuple[str, ...]) -> None:
    td: Any = TensorDict({"a": X, "n": {"b": X}}, [2])
    if kind == "lazy":
        td = lazy_stack([td, td])
    if kind == "typed":
        td = Typed(a=X, n=td["n"], batch_size=[2])
    with pytest.raises(KeyNotFound, match="not found"):
        td.get(key, NO_DEFAULT)
    with pytest.raises(KeyNotFound, match="not found"):
        td.get_at(key, 0, NO_DEFAULT)
    assert torch.equal(td.get("a", NO_DEFAULT), td["a"])


def test_no_default_asks_for_an_error_below_options_too() -> None:
    ragged = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 2)])
    with pytest.raises(KeyNotFound, match="not found"):
        ragged.get("x", NO_DEFAULT, as_padded_tensor=True)


@pytest.mark.parametrize("how", [{}, {"as_list": True}, {"as_padded_tensor": True}])
@pytest.mark.parametrize("key", [("a", "x"), ("n", "b", "x"), ("n", ("b", "x"))])
@pytest.mark.parametrize("kind", ["dense", "lazy"])
def test_get_below_a_tensor_raises_unless_a_default_is_given(
    kind: str, key: tuple[str, ...], how: dict[str, bool]
) -> None:
    td: TensorDictBase = TensorDict({"a": X, "n": {"b": X}}, [2])
    if kind == "lazy":
        td = lazy_stack([td, td])
    with pytest.raises(KeyThroughLeaf, match="which is a tensor"):
        td.get(key, **how)
    assert td.get(key, None, **how) is None
    assert td.get(("n", "x"), **how) is None


def test_setdefault_stores_no_marker_of_a_missing_default() -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    assert torch.equal(td.setdefault("a", NO_DEFAULT), td["a"])
    for key in ("b", ("c", "d")):
        with pytest.raises(InvalidArgument, match="`NO_DEFAULT` cannot be stored"):
            td.setdefault(key, NO_DEFAULT)
    assert list(td.keys()) == ["a"]
