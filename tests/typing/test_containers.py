"""What a type checker knows of containers, as their users write them; mypy checks it."""

from typing import Generic, TypeVar, assert_type

import numpy as np
import torch
from torch import Tensor

from kd_core import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    cat,
    is_tensor_collection,
    lazy_stack,
    make_tensordict,
    stack,
)


def test_a_collection_may_be_a_wrapper_which_is_no_container() -> None:
    """What has keys is asked by `isinstance`."""
    found: object = TensorDict({"s": NonTensorData("word")}).get("s")
    assert is_tensor_collection(found)
    assert isinstance(found, NonTensorData)
    container: object = make()
    assert is_tensor_collection(container)
    container.keys()  # type: ignore[union-attr]  # a wrapper has none
    assert isinstance(container, TensorDictBase)
    assert list(container.keys()) == ["a", "b"]


def make() -> TensorDict:
    return TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(3)}}, batch_size=[3])


def entries_in_a_file(path: str) -> TensorDictBase:
    """What stays in a file is a container, with all methods: a checker alone reads this."""
    kept = TensorDict.from_h5(path, batch_size=[3])
    assert_type(kept, TensorDictBase)
    assert_type(make().to_h5(path), TensorDictBase)
    return kept.to_tensordict()


def test_a_key_gives_a_tensor_and_an_index_a_container() -> None:
    td = make()
    assert_type(td["a"], Tensor)
    assert_type(td["b", "c"], Tensor)
    assert_type(td.get("a"), Tensor | None)
    assert_type(td.get("a", 0), Tensor | int)
    assert_type(td[0], TensorDict)
    assert_type(td[1:, None], TensorDict)
    assert_type(td[td["a"] > 0], TensorDict)
    assert_type(td[[0, 1]], TensorDict)
    assert_type(td[np.array([0, 1])], TensorDict)
    assert_type(td[np.array([True, False, True])], TensorDict)
    assert_type(td[np.int64(1)], TensorDict)
    assert_type(next(iter(td)), TensorDict)


def test_operations_give_their_own_kind() -> None:
    td = make()
    assert_type(2 * td - td / 3, TensorDict)
    assert_type(-td, TensorDict)
    assert_type(td.apply(torch.abs), TensorDict)
    assert_type(td.split(1), tuple[TensorDict, ...])
    assert_type(td.split_keys(["a"]), tuple[TensorDict, ...])
    assert_type(stack([td, td]), TensorDict)
    assert_type(cat([td, td]), TensorDict)
    assert_type(lazy_stack([td, td]), LazyStackedTensorDict)
    assert_type(make_tensordict(a=1.0), TensorDict)
    with td.locked() as locked:
        assert_type(locked, TensorDict)


def test_updates_take_keys_of_any_form() -> None:
    td = make()
    x = torch.zeros(3)
    mixed: dict[str | tuple[str, ...], Tensor] = {"a": x, ("b", "c"): x}
    pairs = {("b", "d"): x, ("b", "e"): x}
    td.update({"a": x}).update(pairs).update(mixed).update(td)
    td.update_(pairs).replace(pairs)
    assert set(td["b"].keys()) == {"c", "d", "e"}  # type: ignore[attr-defined]  # a key hides it


class Sample(TensorClass):
    image: Tensor
    label: Tensor | None = None
    name: str = "x"


def test_fields_have_their_types() -> None:
    sample = Sample(torch.zeros(3, 2), batch_size=3)
    assert_type(sample.image, Tensor)
    assert_type(sample.label, Tensor | None)
    assert_type(sample.name, str)
    assert_type(sample[0], Sample)
    assert_type(stack([sample, sample]), Sample)
    assert_type(sample.to("cpu").clone().reshape(1, 3), Sample)


class Fast(TensorClass, autocast=True, kw_only=True):
    image: Tensor
    count: int = 0


class Open(TypedTensorDict):
    image: Tensor


def test_options_keep_the_types_of_fields() -> None:
    fast = Fast(image=torch.zeros(3), batch_size=[3])
    assert_type(fast.count, int)
    assert_type(fast[0], Fast)
    assert_type(fast.__replace__(count=2), Fast)
    assert_type(Fast.from_tensordict(make(), {"image": torch.zeros(3)}, safe=False), Fast)
    opened = Open(image=torch.zeros(3))
    assert_type(opened.image, Tensor)
    assert_type(opened + 1, Open)


def test_ragged_rows_are_read_by_type() -> None:
    rows = lazy_stack([make(), make()])
    assert_type(rows.get("a", as_list=True), list[Tensor])
    assert_type(rows.get("a", as_padded_tensor=True), Tensor)


T = TypeVar("T")


class Box(TensorClass, Generic[T]):
    item: Tensor
    label: T


def test_a_generic_class_knows_the_type_of_its_field() -> None:
    box = Box[str](item=torch.zeros(3), label="a", batch_size=[3])
    assert_type(box.label, str)
    assert_type(box[1:].label, str)
    assert_type(box == box, Box[str])
    assert (box.select("item") == box.select("item")).all()
