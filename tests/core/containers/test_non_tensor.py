"""Data that is not a tensor is carried along, one value for the whole batch."""

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
    NestedKey,
    NonTensorData,
    NonTensorDataBase,
    NonTensorStack,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    cat,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
    pad,
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


@pytest.mark.parametrize("given", [[5], [1], [3, 4], [2, 3, 2], []])
@pytest.mark.parametrize(
    "store",
    [
        lambda word: TensorDict({"word": word}, [3, 2]),
        lambda word: TensorDict({"n": {"word": word}}, [3, 2])["n"],
        lambda word: TensorDict(batch_size=[3, 2]).set("word", word),
        lambda word: TensorDict(batch_size=[3, 2]).update({"word": word}),
    ],
)
def test_a_wrapper_takes_the_batch_size_of_its_container(
    store: Callable[[NonTensorData], TensorDictBase], given: list[int]
) -> None:
    word = NonTensorData(["a", "b"], batch_size=given)
    td = store(word)
    found: object = td.get("word")
    assert isinstance(found, NonTensorData)
    assert (found.batch_size, found.data) == ((3, 2), ["a", "b"])
    assert word.batch_size == tuple(given)


def test_values_of_rows_keep_their_rows() -> None:
    with pytest.raises(ShapeMismatch, match=r"batch_size \(3,\) does not fit entry `word`"):
        TensorDict({"word": NonTensorStack("a", "b")}, [3])


def test_an_array_of_words_that_does_not_fit_is_one_value() -> None:
    words = numpy.array(["a", "b"])
    td = TensorDict({"word": words, "n": {"word": words}}, [3])
    found: object = td["word"]
    below: object = td[0]["n", "word"]
    assert found is below is words


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


@pytest.mark.parametrize("nan", [float("nan"), numpy.float64("nan"), numpy.array([float("nan")])])
def test_nan_is_not_equal_to_nan(nan: object) -> None:
    td = TensorDict(one=NonTensorData(nan), n=TensorDict({"rows": NonTensorStack(nan, 1)}, [2]))
    assert not (td == td)["one"].any()
    assert (td != td)["one"].all()
    assert (td == td)["n", "rows"].tolist() == [False, True]


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


def entry_of(td: TensorDictBase, key: NestedKey) -> NonTensorDataBase:
    entry: object = td.get(key)
    assert isinstance(entry, NonTensorDataBase)
    return entry


def test_an_entry_is_locked_with_its_container() -> None:
    td = TensorDict({"s": "a", "w": ["x", "y", "z"], "n": {"s": "b"}}, [3])
    entries = [entry_of(td, "s"), entry_of(td, "w"), entry_of(td, ("n", "s"))]
    td.lock_()
    assert [entry.is_locked for entry in entries] == [True] * 3
    with pytest.raises(RuntimeError, match="Unlock the outer one"):
        entries[0].unlock_()
    with td.unlock_():
        assert [entry.is_locked for entry in entries] == [False] * 3
    assert [entry.is_locked for entry in entries] == [True] * 3
    loaded = [pickle.loads(pickle.dumps(td)), copy.deepcopy(td)]
    assert [entry_of(each, "w").is_locked for each in loaded] == [True, False]
    assert [entry_of(each.unlock_(), "w").is_locked for each in loaded] == [False] * 2
    assert not entry_of(td.clone(), "w").is_locked


def test_an_entry_that_a_write_to_rows_replaces_follows_the_lock() -> None:
    td = TensorDict({"a": torch.zeros(2), "s": "a"}, [2]).lock_()
    td[0] = TensorDict({"a": torch.ones(()), "s": "b"})
    assert td["s"] == ["b", "a"]
    assert entry_of(td, "s").is_locked
    assert not entry_of(td.unlock_(), "s").is_locked


def test_an_entry_alone_is_locked_and_unlocked() -> None:
    for entry in (NonTensorData("a", [2]), NonTensorStack("a", "b")):
        assert entry.lock_() is entry
        assert entry.is_locked
        assert not entry.clone().is_locked
        assert not entry.unlock_().is_locked
        made: object = getattr(entry, "memmap")()  # noqa: B009  # not a method to type checkers
        assert isinstance(made, NonTensorDataBase)
        assert [made.is_locked, entry.is_locked, made.unlock_().is_locked] == [True, False, False]


def test_data_in_a_memory_map_is_on_no_device() -> None:
    td = TensorDict({"a": torch.zeros(2), "s": "a", "w": ["x", "y"]}, [2]).memmap()
    assert str(td.device) == "cpu"
    assert [entry_of(td, key).device for key in ("s", "w")] == [None, None]
    assert [entry_of(td, key).is_locked for key in ("s", "w")] == [True, True]


@pytest.mark.parametrize("entry", [NonTensorData("a", [2]), NonTensorStack("a", "b")])
def test_arithmetic_leaves_an_entry_as_it_is(entry: NonTensorDataBase) -> None:
    values = entry.tolist()
    for made in (entry + 1, 2 * entry, entry & 1, entry | 1, entry ^ 1, 2**entry, -entry):
        assert type(made) is type(entry)
        assert made is not entry
        assert made.tolist() == values
    same: NonTensorDataBase = entry
    same += 1
    same /= 2
    same **= 2
    assert same is entry
    assert (entry + TensorDict({"other": torch.ones(2)}, [2])).tolist() == values


def test_a_value_of_a_whole_batch_is_not_written_at_some_rows() -> None:
    entry = NonTensorData("a", [3])
    entry[0] = NonTensorData("a")
    entry[0] = "a"
    with pytest.raises(ValueError, match="one value for the whole batch"):
        entry[0] = "b"
    assert entry.tolist() == ["a"] * 3


@pytest.mark.parametrize("entry", [NonTensorData("a", [2]), NonTensorStack("a", "b")])
def test_an_entry_has_no_keys(entry: NonTensorDataBase) -> None:
    values = entry.tolist()
    assert "data" not in entry
    for error in (KeyError, ValueError):
        with pytest.raises(error, match="has no keys"):
            entry["key"]
        with pytest.raises(error, match="has no keys"):
            entry["key"] = 1
    with pytest.raises(KeyError, match="has no keys"):
        del entry["key"]
    of_kind = AttributeError if isinstance(entry, NonTensorData) else KeyError
    with pytest.raises(of_kind, match="holds `data` alone"):
        entry.set("key", torch.ones(2))
    assert entry.tolist() == values


def test_the_value_is_set_under_the_key_data() -> None:
    assert NonTensorData("a", [2]).set("data", "b").tolist() == ["b", "b"]
    assert NonTensorStack("a", "b").set("data", ["c", "d"]).tolist() == ["c", "d"]
    rows = NonTensorStack("a", "b")
    assert rows.set("data", NonTensorStack("e", "f")) is rows
    assert rows.tolist() == ["e", "f"]


def test_rows_that_are_added_have_no_value() -> None:
    td = pad(TensorDict({"a": torch.zeros(2), "s": "a", "m": MetaData("m")}, [2]), [1, 1])
    assert td["s"] == [None, "a", "a", None]
    assert td["m"] == "m"
    assert td["a"].shape == (4,)


def test_shape_operations_in_place_change_the_entry() -> None:
    entry = NonTensorStack.from_list([["a", "b"], ["c", "d"]])
    assert entry.flatten(inplace=True) is entry
    assert entry.tolist() == ["a", "b", "c", "d"]
    assert entry.batch_size == (4,)
    assert entry.view(2, 2, batch_size=[2]).shape[0] == 2


def test_names_of_dimensions_are_those_of_the_container() -> None:
    td = TensorDict({"s": "a", "w": [["x", "y"]]}, [1, 2])
    renamed = td.rename("t", "e")
    assert [entry_of(renamed, key).names for key in ("s", "w")] == [["t", "e"]] * 2
    assert [entry_of(td, key).names for key in ("s", "w")] == [[None, None]] * 2
    td.names = ["t", "e"]
    assert [entry_of(td, key).names for key in ("s", "w")] == [["t", "e"]] * 2
    td["v"] = NonTensorData("b", [1, 2])
    assert entry_of(td, "v").names == ["t", "e"]
    assert entry_of(td[0], "w").names == ["e"]


def test_another_batch_size_is_that_of_an_empty_copy() -> None:
    entry: object = getattr(NonTensorData("a", [2]), "empty")(batch_size=[3])  # noqa: B009  # as above
    assert isinstance(entry, NonTensorData)
    assert entry.tolist() == ["a"] * 3


def test_an_entry_is_made_of_a_container_alone() -> None:
    with pytest.raises(RuntimeError, match="must be a container"):
        NonTensorData.from_tensordict(NonTensorData("a"))  # type: ignore[arg-type]  # what is refused


class Uncopied:
    def __deepcopy__(self, memo: dict[int, object]) -> "Uncopied":
        raise TypeError("no copies")


def test_a_clone_has_values_of_its_own() -> None:
    td: Any = TensorDict({"n": {"d": NonTensorData({"t": torch.ones(2), "l": [1]})}}, [2])
    td["rows"] = NonTensorStack([1], [2])
    cloned: Any = td.clone()
    cloned["n", "d"]["l"].append(2)
    cloned["n", "d"]["t"].zero_()
    cloned["rows"][0].append(3)
    assert td["n", "d"]["l"] == [1]
    assert td["n", "d"]["t"].tolist() == [1, 1]
    assert td["rows"] == [[1], [2]]
    assert td.clone(recurse=False)["n", "d"] is td["n", "d"]


def test_a_clone_shares_values_that_cannot_be_copied() -> None:
    value = Uncopied()
    td: Any = TensorDict({"d": NonTensorData(value), "rows": NonTensorStack(value, 1)}, [2])
    assert td.clone()["d"] is value
    assert td.clone()["rows"][0] is value
    assert lazy_stack([td, td]).clone()[0]["d"] is value


def test_unsqueeze_of_torch_keeps_one_value() -> None:
    word: Any = NonTensorData("to", batch_size=[3, 2])
    found: Any
    for found in (torch.unsqueeze(word, 0), torch.unsqueeze(input=word.lock_(), dim=-3)):
        assert type(found) is NonTensorData
        assert found.batch_size == (1, 3, 2)
        assert found.data == "to"
    assert found.is_locked
    assert word.unsqueeze(0).tolist() == [word.tolist()]


def test_the_answers_of_a_comparison_can_be_written() -> None:
    td = TensorDict({"w": "a", "m": MetaData("b")}, [3])
    same = (td == td).zero_()
    same[0] = True
    assert same["w"].tolist() == same["m"].tolist() == [True, False, False]


def test_rows_that_are_set_have_a_value_of_their_own() -> None:
    td = TensorDict({"w": "a"}, [3])
    td[0] = TensorDict({"w": "a"})
    assert isinstance(td.get("w"), NonTensorData)
    td.set_at_("w", "a", 0)
    assert isinstance(td.get("w"), NonTensorStack)
    assert td["w"] == ["a", "a", "a"]


def test_one_value_that_is_written_without_an_index_stays_one() -> None:
    td = TensorDict({"w": "a"}, [3])
    same = td.select("w")
    td[()] = TensorDict({"w": "b"}, [3])
    assert td["w"] == same["w"] == "b"
    assert td.set_at_("w", "c", ())["w"] == "c"
    td[()] = {"w": ["x", "y", "z"]}
    assert td["w"] == ["x", "y", "z"]


def test_an_empty_copy_shares_the_values_that_it_keeps() -> None:
    td = TensorDict({"w": "a", "n": {"w": ["x", "y", "z"]}}, [3])
    made = td.empty(recurse=True)
    made.set_("w", "b").set_(("n", "w"), "v")
    assert td["w"] == "b"
    assert td["n", "w"] == ["v"] * 3
    assert td.empty(recurse=True, batch_size=[]).batch_size == ()
    word: Any = td.get("w")
    assert word.batch_size == (3,)


def test_a_state_dict_is_loaded_into_values() -> None:
    source = TensorDict({"x": torch.ones(2), "w": "a", "n": {"w": ["b", "c"]}}, [2])
    td = TensorDict({"x": torch.zeros(2), "w": "y", "n": {"w": ["y", "z"]}}, [2]).lock_()
    td.load_state_dict(source.state_dict())
    assert td["w"] == "a"
    assert td["n", "w"] == ["b", "c"]
    chat = TensorDict({"w": NonTensorData(["y"])}, [2])
    chat.load_state_dict(TensorDict({"w": NonTensorData(["a", "b"])}, [2]).state_dict())
    assert chat["w"] == ["a", "b"]
    with pytest.raises(InvalidArgument, match="holds one value for the whole batch"):
        td.load_state_dict(TensorDict({**source, "w": ["a", "b"]}, [2]).state_dict())


def test_what_is_stacked_in_values_of_rows() -> None:
    rows = NonTensorStack("a", "b")
    assert rows.stack_dim == 0
    for row, value in zip(rows.tensordicts, ("c", "d"), strict=True):
        row.set("data", value)
    assert rows.tolist() == ["c", "d"]
    assert is_tensorclass(rows.tensordicts[0])
    assert not is_tensorclass(rows)


def test_one_value_is_an_instance_of_a_tensor_class() -> None:
    class Sample(TensorClass):
        x: torch.Tensor

    nodes: list[object] = [NonTensorData("x"), MetaData("x", [2])]
    for node in nodes:
        assert isinstance(node, TensorClass)
        assert issubclass(type(node), TensorClass)
        assert not isinstance(node, (TensorDictBase, Sample))
    rows: object = NonTensorStack("x", "y")
    assert not isinstance(rows, TensorClass)
