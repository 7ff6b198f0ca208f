"""Data that is no tensor is carried along, one value for the whole batch."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from tests.core.kinds import inner
from torch.utils._pytree import tree_map

from kd_core import (
    InvalidArgument,
    KeyNotFound,
    KeySetMismatch,
    MetaData,
    NonTensorData,
    NonTensorDataBase,
    NonTensorStack,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    cat,
    is_non_tensor,
    is_tensor_collection,
    lazy_stack,
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
        (lambda td: cat([td, td], 0), (6, 2)),
        (lambda td: td + 1, (3, 2)),
        (lambda td: td > td, (3, 2)),
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
    assert make(NonTensorData(words))[0].get_non_tensor(("n", "word")) is words


def test_a_wrapper_is_its_value_and_its_batch_size() -> None:
    assert (NonTensorData("x", [2]) == NonTensorData("x", [2])).tolist() == [True, True]
    assert (NonTensorData("x", [2]) != NonTensorData("y", [2])).tolist() == [True, True]
    assert not (NonTensorData("x") == NonTensorData("y")).item()
    assert NonTensorData("x") != "x"
    assert NonTensorData(NonTensorData("x")).data == "x"
    assert repr(NonTensorData("x", [2])) == "NonTensorData(data='x', batch_size=torch.Size([2]))"
    assert NonTensorData("x", [2], torch.device("cpu")).device == torch.device("cpu")


def test_a_wrapper_lists_its_value_once_for_each_row() -> None:
    assert NonTensorData("x", [2, 3]).tolist() == [["x"] * 3] * 2
    assert NonTensorData("x").tolist() == "x"


def test_a_written_row_makes_it_one_value_for_each_row() -> None:
    td = make()
    td[0] = make()[0]
    assert td["n", "word"] == "reach"
    td[0] = make("grasp")[0]
    assert td["n", "word"] == [["grasp"] * 2, ["reach"] * 2, ["reach"] * 2]
    locked = TensorDict({"word": "reach", "x": torch.zeros(2)}, [2]).lock_()
    locked.set_at_("word", "grasp", 1)
    assert locked["word"] == ["reach", "grasp"]
    with pytest.raises(ShapeMismatch):
        TensorDict({"x": torch.zeros(2), "word": "a"}, [2])[0] = {"word": "b", "x": torch.zeros(9)}
    with pytest.raises(InvalidArgument, match="one value for the whole batch"):
        TensorDict({"unit": MetaData("m")}, [2])[0] = {"unit": "km"}


def test_a_field_that_was_none_takes_a_row() -> None:
    td = TensorDict({"word": None, "a": None, "x": torch.zeros(3)}, [3])
    td[1] = TensorDict({"word": "reach", "a": torch.ones(2), "x": 1.0})
    assert td["word"] == [None, "reach", None]
    assert td["x"].tolist() == [0, 1, 0]
    values = td.get_non_tensor("a")
    assert values[::2] == [None, None]  # type: ignore[index]  # a list
    assert torch.equal(values[1], torch.ones(2))  # type: ignore[index]  # a list


def test_it_is_written_for_all_rows() -> None:
    td = make()
    td.update_({"n": {"word": "reach"}})
    td.update_({"n": {"word": "grasp"}})
    assert td["n", "word"] == "grasp"
    assert td.set_(("n", "word"), "lift")["n", "word"] == "lift"
    with pytest.raises(ShapeMismatch):
        td.update_({"n": {"word": "drop"}, "x": torch.zeros(9)})
    assert td["n", "word"] == "lift"
    alone = TensorDict({"word": "reach"})
    assert alone.copy_(TensorDict({"word": "grasp"}))["word"] == "grasp"
    assert alone.set_("word", "lift").update_({"word": "drop"})["word"] == "drop"
    with pytest.raises(InvalidArgument, match="`word` holds one value, 'reach', which cannot be"):
        inner(make()[0, 0], "n").set_("word", "grasp")


def test_a_path_does_not_go_through_it() -> None:
    with pytest.raises(KeyNotFound, match=r"goes through `\('n', 'word'\)`, which is a non-tensor"):
        make()["n", "word", "x"]


def test_data_and_a_leaf_do_not_match() -> None:
    other = TensorDict({"x": torch.zeros(3, 2), "n": {"word": torch.zeros(3, 2)}}, [3, 2])
    with pytest.raises(KeySetMismatch, match="must be a non-tensor entry in both"):
        make() + other


@pytest.mark.parametrize("value", [numpy.str_("x"), "xy", {"x": 1}.items(), len])
def test_what_is_not_a_list_is_one_value(value: object) -> None:
    td = TensorDict({"s": value}, [2])
    assert td.get_non_tensor("s") is value
    assert td[0].get_non_tensor("s") is value


def test_values_of_one_row_do_not_collapse_when_stacked() -> None:
    rows = [TensorDict({"word": "to"}) for _ in range(2)]
    assert stack(rows).get_non_tensor("word") == ["to", "to"]
    assert stack(rows)[1].get_non_tensor("word") == "to"
    assert rows[0].unsqueeze(0).get_non_tensor("word") == ["to"]
    assert rows[0][None].get_non_tensor("word") == "to"
    assert rows[0].expand(2).get_non_tensor("word") == ["to", "to"]


def test_the_value_of_a_batch_stays_one_value_where_rows_are_not_stacked() -> None:
    td = make()
    assert cat(td.split(2)).get_non_tensor(("n", "word")) == "reach"
    assert td.reshape(6).get_non_tensor(("n", "word")) == "reach"
    assert td.expand(3, 2).get_non_tensor(("n", "word")) == "reach"
    rows = [["reach"] * 2] * 3
    assert stack(td.unbind(0)).get_non_tensor(("n", "word")) == rows
    assert lazy_stack(td.unbind(0)).get_non_tensor(("n", "word")) == rows
    assert td.unsqueeze(0).get_non_tensor(("n", "word")) == [rows]
    assert td.expand(2, 3, 2).get_non_tensor(("n", "word")) == [rows] * 2
    row = td[0, 0]
    for copy_ in (pickle.loads(pickle.dumps(row)), copy.deepcopy(row), tree_map(torch.clone, row)):
        assert stack([copy_, row]).get_non_tensor(("n", "word")) == ["reach", "reach"]


def test_a_wrapper_is_a_container_without_keys() -> None:
    for node in (NonTensorData("x", [2]), NonTensorStack("x", "y")):
        assert is_tensor_collection(node)
        assert is_tensor_collection(type(node))
        assert (node.batch_dims, node.names) == (1, [None])
        borrowed: Any = node  # type checkers know the methods of an entry only
        assert list(borrowed.keys()) == list(borrowed.items(True)) == []
        assert borrowed.select().tolist() == borrowed.exp().tolist() == (-node).tolist()
        assert (2 * node + 1).tolist() == node.tolist()
        assert borrowed.get("a") is None
        assert borrowed.get("a", 3) == 3
        assert borrowed.zero_() is node
        assert borrowed.is_locked is False
        with pytest.raises(AttributeError, match="has no attribute `nothing`"):
            borrowed.nothing()
    assert NonTensorData("x", [2]).get("data") == NonTensorData("x", [2]).to_dict() == "x"
    assert NonTensorStack("x", "y").to_dict() == ["x", "y"]


def test_a_wrapper_takes_the_value_of_another() -> None:
    td = TensorDict({"s": "x", "w": ["u", "v"]}, [2])
    word: Any = td.get("s")
    word.update(NonTensorData("y"))
    assert td["s"] == "y"
    words: Any = td.get("w")
    words.copy_(NonTensorStack("p", "q"))
    assert td["w"] == ["p", "q"]
    with pytest.raises(InvalidArgument, match="must be a non-tensor entry"):
        NonTensorData("x").update({"a": 1})  # type: ignore[arg-type]  # what is checked


def test_what_a_function_makes_shares_no_data() -> None:
    for value, new, old in (("x", "q", "x"), (["x", "y"], ["q", "y"], ["x", "y"])):
        td = TensorDict({"a": torch.zeros(2), "s": value}, [2])
        for made in (td.apply(torch.neg), td.named_apply(lambda _, leaf: -leaf), td + 1):
            made.set_("s", new)
            assert td["s"] == old


def test_values_of_batches_that_differ_become_one_per_row() -> None:
    both = cat([make("a"), make("b")])
    assert both.get_non_tensor(("n", "word")) == [["a"] * 2] * 3 + [["b"] * 2] * 3
    assert stack([make("a")[0], make("b")[0]]).get_non_tensor(("n", "word")) == [
        ["a"] * 2,
        ["b"] * 2,
    ]


def test_metadata_describes_rows_too() -> None:
    rows = [TensorDict({"unit": MetaData("m")}) for _ in range(2)]
    unit: object = stack(rows).get("unit")
    assert isinstance(unit, MetaData)
    assert unit.batch_size == (2,)
    assert unit.data == "m"
    assert isinstance(pickle.loads(pickle.dumps(unit)), MetaData)
    other = TensorDict({"unit": MetaData("s")})
    assert stack([rows[0], other]).get_non_tensor("unit") == ["m", "s"]
    assert repr(unit) == "MetaData(data='m', batch_size=torch.Size([2]))"


def test_a_wrapper_is_known_and_spread_over_rows() -> None:
    wrapper = NonTensorData("x", [2])
    assert is_non_tensor(wrapper)
    assert not is_non_tensor("x")
    assert isinstance(wrapper, NonTensorDataBase)
    assert wrapper.shape == (2,)
    assert wrapper.maybe_to_stack().tolist() == ["x", "x"]
    assert NonTensorData("x").maybe_to_stack() == NonTensorData("x")


def test_a_wrapper_given_to_set_non_tensor_is_not_wrapped_again() -> None:
    td = TensorDict(batch_size=[2]).set_non_tensor("s", NonTensorStack("a", "b"))
    assert td[1].get_non_tensor("s") == "b"


@pytest.mark.parametrize("form", [lambda nan: nan, lambda nan: {"loss": [nan, (nan, 1)]}])
def test_nan_is_the_same_value(form: Callable[[float], object]) -> None:
    mine, theirs = (TensorDict(x=NonTensorData(form(float("nan")), [2])) for _ in range(2))
    mine.batch_size = theirs.batch_size = [2]
    mine.update_(theirs)
    assert cat([mine, theirs])["x"] is mine["x"]
    before = mine.get("x")
    mine.update_({"x": form(float("nan"))})
    assert mine.get("x") is before


def test_a_wrapper_is_moved_as_a_tensor_of_its_batch() -> None:
    node = NonTensorData("x", [3])
    assert (node.ndim, node.dim(), node.numel(), len(node)) == (1, 1, 3, 3)
    assert [each.tolist() for each in node] == ["x"] * 3
    assert node[0] == NonTensorData("x")
    assert node[:2].batch_size == (2,)
    assert node.expand(2, 3).batch_size == (2, 3)
    assert NonTensorData("x").expand(2).tolist() == ["x", "x"]
    assert bool(NonTensorData("x", [0]))
    joined: object = torch.cat([node, NonTensorData("y", [1])])  # type: ignore[list-item]  # wrappers
    assert isinstance(joined, NonTensorStack)
    assert joined.tolist() == ["x", "x", "x", "y"]
    with pytest.raises(InvalidArgument, match="must have a batch dimension"):
        list(NonTensorData("x"))


def test_metadata_is_annotated_with_a_type() -> None:
    assert MetaData[str]("x") == MetaData("x")  # type: ignore[misc]  # for readers alone
