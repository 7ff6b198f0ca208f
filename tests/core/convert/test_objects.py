"""What Python objects become in `from_dict` and `from_any`, and come back as in `to_dict`."""

import collections
import types
from typing import Any

import numpy
import pytest
import torch

from kd_core import NonTensorStack, TensorClass, TensorDict

Pair = collections.namedtuple("Pair", "x y")
MAKERS: Any = [TensorDict.from_dict, TensorDict.from_any]


@pytest.mark.parametrize("make", MAKERS)
def test_tuples_are_containers(make: Any) -> None:
    td = make({"t": (1, torch.ones(2)), "p": Pair("a", (2, 3)), "n": {"e": ()}})
    assert list(td.keys(True, True)) == [
        ("t", "0"), ("t", "1"), ("p", "y", "0"), ("p", "y", "1"),
    ]  # fmt: skip
    assert td["p", "x"] == "a"
    assert list(make({"m": torch.zeros(3, 2).max(0)})["m"].keys()) == ["0", "1"]


@pytest.mark.parametrize("make", MAKERS)
def test_lists_of_one_type_of_numbers_are_tensors(make: Any) -> None:
    td = make({"i": [[1, 2], [3, 4]], "f": [1.5], "n": [numpy.float32(1), numpy.float32(2)]})
    assert [leaf.dtype for leaf in td.values()] == [torch.int64, torch.float32, torch.float32]


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5],
        [True, 2],
        [[1, 2.5], [1, 2]],
        [[1, 2], [3]],
        [[], [1]],
        [torch.tensor(1), torch.tensor(2)],
        [numpy.zeros(2), numpy.ones(2)],
        [TensorDict(a=1), TensorDict(a=2)],
    ],
)
@pytest.mark.parametrize("make", MAKERS)
def test_other_lists_keep_their_items(make: Any, values: list[Any]) -> None:
    found: Any = make({"v": values}).get("v")
    assert type(found) is NonTensorStack
    rows: Any = found.tolist()
    for one, other in zip(rows, values, strict=True):
        assert type(one) is type(other)
        assert str(one) == str(other)


@pytest.mark.parametrize("make", MAKERS)
def test_a_number_is_one_value_for_all_rows(make: Any) -> None:
    td = make({"n": 1, "below": {"x": 2.5}, "a": torch.zeros(2)}, batch_size=[2])
    assert td["n"] == 1
    assert td[0]["below", "x"] == 2.5
    assert make({"n": 1})["n"].shape == ()


def test_a_container_is_returned_as_it_is() -> None:
    td: Any = TensorDict({"a": torch.zeros(2)}, [2])
    assert TensorDict.from_dict(td) is td
    assert TensorDict.from_any(td, auto_batch_size=True) is td
    assert TensorDict.from_dict(td, batch_size=[]).batch_size == ()


def test_what_has_keys_and_pairs_are_mappings() -> None:
    parameters = torch.nn.ParameterDict({"a": torch.zeros(2)})
    assert TensorDict.from_dict(parameters)["a"] is parameters["a"]  # type: ignore[arg-type]  # as programs call it
    assert TensorDict.from_dict([("a", 1)])["a"] == 1  # type: ignore[arg-type]  # as programs call it
    assert TensorDict.from_tuple([1, 2])["1"] == 2  # type: ignore[arg-type]  # as programs call it


def test_mappings_that_are_not_dicts_are_values() -> None:
    values: list[Any] = [types.MappingProxyType({"b": 1}), collections.ChainMap({"b": 1})]
    for value in values:
        assert TensorDict({"m": value})["m"] is value
        assert TensorDict.from_any({"m": value})["m"] is value
    user: Any = collections.UserDict(b=1)
    assert TensorDict({"m": user})["m"] is user
    assert TensorDict.from_dict({"m": user})["m", "b"] == 1


def test_records_have_the_batch_size_of_their_array() -> None:
    records = numpy.rec.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f4")])
    for made in (TensorDict.from_any(records), TensorDict.from_struct_array(records)):
        assert made.batch_size == (1,)
    nested: Any = TensorDict.from_dict({"r": records})["r"]
    assert nested.batch_size == (1,)


def test_fields_are_converted_too() -> None:
    class Sample(TensorClass):
        x: Any

    assert Sample.from_dict({"x": (1, 2)}).x["1"] == 2
    assert list(Sample.from_dict({"x": [1, 2.5]}).x) == [1, 2.5]


def test_to_dict_returns_lists_and_arrays() -> None:
    td = TensorDict({"s": ["x", "y"], "n": {"a": [1.0, 2.0]}}, [2])
    plain: Any = td.to_dict(convert_tensors="numpy")
    assert type(plain["n"]["a"]) is numpy.ndarray
    assert type(plain["s"]) is list
    plain["s"][0] = "other"
    assert td["s"] == ["x", "y"]
    assert type(td.numpy()["s"]) is list
    named: Any = td.to_namedtuple()
    assert type(named.s) is list
    with pytest.raises(RuntimeError, match="requires grad"):
        TensorDict(a=torch.ones(1, requires_grad=True)).to_dict(convert_tensors="numpy")
