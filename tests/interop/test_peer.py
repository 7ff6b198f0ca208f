"""Containers of the package tensordict become ours and go back, and no tensor is copied."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same, containers
from tests.core.kinds import declared, inner

from kd_core import (
    InvalidArgument,
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
)
from kd_core.convert import from_tensordict_library, to_tensordict_library

theirs: Any = pytest.importorskip("tensordict")

KEYS = st.text(alphabet="xyz", min_size=1, max_size=3)


def sample() -> Any:
    td = theirs.TensorDict(
        {"a": torch.arange(3), "b": {"c": torch.ones(3, 2), "s": "word"}, "e": {}}, [3]
    )
    td["rows"] = theirs.NonTensorStack("x", "y", "z")
    td["b"] = td["b"].auto_batch_size_()
    return td


def ragged() -> Any:
    return theirs.lazy_stack([theirs.TensorDict({"a": torch.ones(size)}) for size in (2, 3)])


def test_a_container_keeps_everything_but_copies_nothing() -> None:
    source = sample()
    td = from_tensordict_library(source)
    assert isinstance(td, TensorDict)
    assert td.batch_size == (3,)
    assert td["a"] is source["a"]
    assert td["b", "c"] is source["b", "c"]
    assert td["b", "s"] == "word"
    assert td["rows"] == ["x", "y", "z"]
    assert isinstance(td.get("rows"), NonTensorStack)
    assert td[1]["rows"] == "y"
    assert inner(td, "e").is_empty()


def test_the_constructor_takes_one_as_any_mapping() -> None:
    source = sample()
    td = TensorDict(source, [3])
    assert td["a"] is source["a"]
    assert td["rows"] == ["x", "y", "z"]
    assert TensorDict(source).batch_size == ()
    nested = TensorDict({"n": source, "lazy": ragged()})
    assert inner(nested, "n").batch_size == (3,)
    assert isinstance(nested.get("lazy"), LazyStackedTensorDict)
    with pytest.raises(ValueError, match="batch_size"):
        TensorDict(source, [4])


def test_a_lazy_stack_stays_lazy() -> None:
    source = ragged()
    td = from_tensordict_library(source)
    assert isinstance(td, LazyStackedTensorDict)
    assert td[1]["a"] is source[1]["a"]
    back: Any = to_tensordict_library(td)
    assert isinstance(back, theirs.LazyStackedTensorDict)
    assert back.tensordicts[0]["a"] is source[0]["a"]
    last = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)], 1)
    back = to_tensordict_library(last)
    assert back.batch_size == (2, 3)


def test_a_tensor_class_becomes_a_plain_container() -> None:
    @theirs.tensorclass  # decorated at run time
    class Sample:
        x: torch.Tensor
        y: str

    make: Any = Sample
    source = make(torch.ones(2), "w", batch_size=[2])
    td = from_tensordict_library(source)
    assert td["x"] is source.x
    assert td["y"] == "w"
    assert TensorDict({"n": source})["n", "y"] == "w"
    back: Any = to_tensordict_library(declared())
    assert back.batch_size == (3, 4)


def test_device_is_kept() -> None:
    td = from_tensordict_library(theirs.TensorDict({"a": torch.ones(2)}, [2], device="cpu"))
    assert td.device == torch.device("cpu")
    back: Any = to_tensordict_library(td)
    assert back.device == torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(td=containers(KEYS))
def test_there_and_back(td: TensorDict) -> None:
    theirs_of = to_tensordict_library(td)
    back = from_tensordict_library(theirs_of)
    assert_same(back, td)
    leaves = dict(td.items(True, True))
    for key, leaf in back.items(True, True):
        assert leaf is leaves[key]


@pytest.mark.parametrize("value", [{}, 1, TensorDict(), torch.zeros(2)])
def test_another_value_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match="must be one of the package tensordict"):
        from_tensordict_library(value)


def test_a_tensor_without_batch_dimensions_has_none_here_too() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    source = theirs.TensorDict(
        a=torch.zeros(2), u=theirs.UnbatchedTensor(tensor), n={"u": theirs.UnbatchedTensor(tensor)}
    )
    source.batch_size = [2]
    for td in (from_tensordict_library(source), TensorDict(source, [2])):
        assert isinstance(td, TensorDict)
        assert isinstance(td["u"], torch.Tensor)
        assert td["u"].data_ptr() == tensor.data_ptr()
        assert td["n", "u"].shape == (2, 3)
        entry: object = td.get("u")
        assert isinstance(entry, UnbatchedTensor)
        assert entry.batch_size == (2,)
    alone = TensorDict({"u": theirs.UnbatchedTensor(tensor)}, [5])
    assert alone[0]["u"].shape == (2, 3)


def test_a_tensor_without_batch_dimensions_goes_back_as_one() -> None:
    td = TensorDict({"a": torch.zeros(4), "u": UnbatchedTensor(torch.ones(2, 3))}, [4])
    back: Any = to_tensordict_library(td)
    assert isinstance(back["u"], theirs.UnbatchedTensor)
    assert back.reshape(2, 2)["u"].shape == (2, 3)
    assert back["u"].data_ptr() == td["u"].data_ptr()
