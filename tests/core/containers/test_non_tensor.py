"""Data that is no tensor is carried along, one value for the whole batch."""

from collections.abc import Callable

import numpy
import pytest
import torch

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeyNotFound,
    KeySetMismatch,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    stack,
)


def make(word: object = "reach") -> TensorDict:
    return TensorDict({"x": torch.zeros(3, 2), "n": {"word": word}}, [3, 2])


@pytest.mark.parametrize(
    ("change", "batch"),
    [
        (lambda td: td[0], (2,)),
        (lambda td: td[:, None], (3, 1, 2)),
        (lambda td: td[torch.ones(3, dtype=torch.bool)], (3, 2)),
        (lambda td: td.reshape(-1), (6,)),
        (lambda td: td.split(2)[1], (1, 2)),
        (lambda td: td.unbind(1)[0], (3,)),
        (lambda td: stack([td, td], 0), (2, 3, 2)),
        (lambda td: td + 1, (3, 2)),
        (lambda td: td == td, (3, 2)),
        (lambda td: td.sum(0), (2,)),
        (lambda td: td.clone(), (3, 2)),
        (lambda td: td.apply(torch.neg), (3, 2)),
    ],
)
def test_operations_pass_it_through(
    change: Callable[[TensorDict], TensorDictBase], batch: tuple[int, ...]
) -> None:
    result = change(make())
    assert result["n", "word"] == "reach"
    assert isinstance(result, TensorDict)
    wrapper: object = result.get(("n", "word"))
    assert isinstance(wrapper, NonTensorData)
    assert wrapper.batch_size == batch


def test_brackets_give_the_value_and_get_the_wrapper() -> None:
    td = make()
    assert td["n", "word"] == "reach"
    wrapper: object = td.get(("n", "word"))
    assert isinstance(wrapper, NonTensorData)
    assert wrapper.data == "reach"
    assert id(wrapper) in map(id, td.values(True))


@pytest.mark.parametrize(
    "read",
    [
        lambda td: td.get("word"),
        lambda td: td.pop("word"),
        lambda td: td.popitem()[1],
        lambda td: td.setdefault("word", "other"),
        lambda td: td.setdefault("new", "reach"),
        lambda td: td.get_at("word", 0),
        lambda td: dict(td.items())["word"],
        lambda td: next(iter(td.values())),
    ],
)
def test_only_brackets_unwrap(read: Callable[[TensorDict], object]) -> None:
    wrapper = read(TensorDict({"word": "reach"}, [2]))
    assert isinstance(wrapper, NonTensorData)
    assert wrapper.data == "reach"


def test_it_is_not_a_leaf() -> None:
    td = TensorDict({"word": "reach", "a": 1.0, "n": {"word": "grasp", "b": 2.0}})
    assert list(td.keys(True, True)) == ["a", ("n", "b")]
    assert list(td.keys(leaves_only=True)) == ["a"]
    assert all(isinstance(leaf, torch.Tensor) for leaf in td.values(True, True))
    assert len(td.items(True, True)) == len(td.keys(True, True)) == 2
    assert "word" in td.keys(sort=True)
    assert "word" not in td.keys(True, True)
    data = td.keys(True, True, is_leaf=lambda kind: kind is NonTensorData)
    assert list(data) == ["word", "a", ("n", "word"), ("n", "b")]
    assert len(data) == 4


def test_a_wrapper_is_stored_as_it_is() -> None:
    td = make()
    td["data"] = NonTensorData(["a", 1], [3, 2])
    assert td["data"] == ["a", 1]
    td["other"] = NonTensorData("small")
    assert td[0]["other"] == "small"


def test_the_value_is_kept_by_reference() -> None:
    words = ["a", "b"]
    assert make(words)[0]["n", "word"] is words  # type: ignore[comparison-overlap]  # data, not a tensor


def test_a_wrapper_is_its_value_and_its_batch_size() -> None:
    assert NonTensorData("x", [2]) == NonTensorData("x", [2])
    assert NonTensorData("x", [2]) != NonTensorData("y", [2])
    assert NonTensorData("x", [2]) != NonTensorData("x", [3])
    assert NonTensorData("x") != "x"
    assert repr(NonTensorData("x", [2])) == "NonTensorData(data='x', batch_size=torch.Size([2]))"
    assert NonTensorData("x", [2], torch.device("cpu")).device == torch.device("cpu")


def test_a_wrapper_lists_its_value_once_for_each_row() -> None:
    assert NonTensorData("x", [2, 3]).tolist() == [["x"] * 3] * 2
    assert NonTensorData("x").tolist() == "x"


def test_it_is_not_written_to_some_rows() -> None:
    td = make()
    td[0] = make()[0]
    with pytest.raises(InvalidArgument, match=r"`\('n', 'word'\)`.*one value for the whole batch"):
        td[0] = make("grasp")[0]
    with pytest.raises(InvalidArgument, match="must be a tensor to be written in place"):
        td.set_(("n", "word"), "grasp")


def test_it_is_updated_in_place_with_the_same_only() -> None:
    td = make()
    td.update_({"n": {"word": "reach"}})
    with pytest.raises(InvalidArgument, match="must be a tensor to be written in place"):
        td.update_({"n": {"word": "grasp"}})
    td.update({"n": {"word": "grasp"}})
    assert td["n", "word"] == "grasp"


def test_a_path_does_not_go_through_it() -> None:
    with pytest.raises(KeyNotFound, match=r"goes through `\('n', 'word'\)`, which is a non-tensor"):
        make()["n", "word", "x"]


def test_data_and_a_leaf_do_not_match() -> None:
    other = TensorDict({"x": torch.zeros(3, 2), "n": {"word": torch.zeros(3, 2)}}, [3, 2])
    with pytest.raises(KeySetMismatch, match="must be a non-tensor entry in both"):
        make() + other


@pytest.mark.parametrize(
    "value", [["x", "y"], ("x", "y"), [torch.zeros(2), torch.zeros(3)], numpy.array(["x", "y"])]
)
def test_one_value_per_row_is_refused(value: object) -> None:
    with pytest.raises(InvalidValue, match=r"`s` must be .* got a `\w+` of 2 .* `NonTensorData`"):
        TensorDict({"s": value}, [2])
    td = TensorDict({"s": NonTensorData(value, [2]), "t": ["x", "y", "z"]}, [2])
    assert td["s"] is value
    assert td.set_non_tensor("u", value)[0]["u"] is value
