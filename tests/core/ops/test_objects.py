"""Containers from Python objects and back."""

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.kinds import Reach, declared, inner, stacked
from torch import Tensor

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeyCollision,
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

Pair = namedtuple("Pair", ["left", "right"])  # what users have


@dataclass
class Step:
    obs: Tensor
    info: object = None


class Point(TensorClass):
    x: Tensor
    y: Tensor


def test_any_object_of_parts_becomes_a_container() -> None:
    source = {"p": Pair(torch.zeros(2), {"q": 1}), "d": Step(torch.ones(2), (1, "word"))}
    td = TensorDict.from_any(source)
    assert td["p", "left"].shape == (2,)
    assert td["p", "right", "q"] == 1
    assert td["d", "info", "0"] == 1
    assert td["d", "info", "1"] == "word"


def test_lists_of_numbers_are_tensors_and_other_lists_have_a_value_for_each_item() -> None:
    held = Step(torch.ones(2), 1)
    td = TensorDict.from_any({"n": [1, 2], "l": [held, {"a": 1}], "s": ["x", 1]})
    assert td["n"].tolist() == [1, 2]
    assert td["l"] == [held, {"a": 1}]
    assert td["s"] == ["x", 1]
    for key in ("l", "s"):
        entry: object = td.get(key)
        assert isinstance(entry, NonTensorStack)
        assert entry.batch_size == (2,)
    assert TensorDict.from_any({"t": [torch.zeros(2)] * 3})["t"][2].tolist() == [0, 0]


def test_a_list_is_what_it_is_as_an_entry() -> None:
    words: object = TensorDict.from_any([1, "two"])
    assert isinstance(words, NonTensorStack)
    assert words.tolist() == [1, "two"]
    nested: object = TensorDict.from_any([[torch.zeros(2)], [torch.ones(2)]])
    assert isinstance(nested, NonTensorStack)
    assert nested.batch_size == (2, 1)
    numbers: object = TensorDict.from_any([[1, 2], [3, 4]])
    assert isinstance(numbers, torch.Tensor)
    assert numbers.tolist() == [[1, 2], [3, 4]]


def test_any_container_keeps_its_batch_size_and_tensors() -> None:
    source = TensorDict({"a": torch.zeros(3)}, [3])
    td = TensorDict.from_any(source, device="cpu")
    assert td.batch_size == (3,)
    assert td["a"] is source["a"]
    assert td is not source


def test_a_data_frame_is_a_container_with_a_row_for_each_of_its_rows() -> None:
    pandas: Any = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b.c": ["x", "y"]})
    td = TensorDict.from_any(frame)
    assert td.batch_size == (2,)
    words: object = td["b.c"]
    assert (td["a"].tolist(), words) == ([1, 2], ["x", "y"])
    nested = TensorDict.from_any({"frame": frame, "n": 1})
    assert nested.batch_size == ()
    assert inner(nested, "frame").batch_size == (2,)
    assert TensorDict.from_any(frame, batch_size=[]).batch_size == ()


@dataclass
class Output(dict[str, object]):
    """As the results of models of transformers are: a mapping of the fields with a value."""

    logits: Tensor
    past: Tensor | None = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def test_a_dataclass_has_its_fields_even_if_it_is_a_mapping_of_some() -> None:
    output = Output(torch.ones(2))
    assert dict(output) == {"logits": output.logits}
    td = TensorDict.from_dataclass(output)
    assert list(td.keys()) == ["logits", "past"]
    assert td["past"] is None


def test_a_container_is_what_it_is_made_of() -> None:
    dense = TensorDict({"a": torch.zeros(3)}, [3]).lock_()
    for source in (dense, lazy_stack([dense, dense]), NonTensorData("x")):
        assert TensorDict.from_any(source) is source


def test_a_list_of_containers_has_one_for_each_item() -> None:
    """They are sequences of their rows, which `torch.tensor` takes for lists."""
    parts = [TensorDict({"a": torch.zeros(3)}), lazy_stack([TensorDict({"a": torch.zeros(3)})])]
    for source in ([parts[0]] * 2, [parts[1]] * 2, [NonTensorData("x")]):
        made: object = TensorDict.from_any(source)
        assert isinstance(made, NonTensorStack)
        assert made.batch_size == (len(source),)


@pytest.mark.parametrize("value", [1, "word", torch.zeros(2), None, object()])
def test_a_value_without_parts_is_returned(value: object) -> None:
    assert TensorDict.from_any(value) is value


def test_batch_sizes_are_given_or_inferred_on_request() -> None:
    source = (torch.zeros(3, 4), torch.zeros(3, 5))
    assert TensorDict.from_tuple(source).batch_size == ()
    assert TensorDict.from_tuple(source, auto_batch_size=True).batch_size == (3,)
    assert TensorDict.from_tuple(source, batch_dims=0).batch_size == ()
    assert TensorDict.from_tuple(source, batch_size=[3]).batch_size == (3,)
    with pytest.raises(ShapeMismatch, match="entry `0`"):
        TensorDict.from_tuple(source, batch_size=[4])


def test_a_named_tuple_and_back() -> None:
    td = TensorDict.from_namedtuple(Pair(torch.zeros(2), Pair(torch.ones(2), "s")), batch_size=[2])
    back = cast("Pair", td.to_namedtuple())
    assert back.left is td["left"]
    assert back.right.right == "s"
    assert isinstance(td.to_namedtuple(Pair), Pair)
    assert type(back) is type(td.to_namedtuple())
    found = TensorDict.from_namedtuple(torch.arange(6).reshape(2, 3).min(dim=0))
    assert sorted(found.keys()) == ["indices", "values"]


def test_a_named_tuple_without_fields_is_an_empty_container() -> None:
    td = TensorDict({"n": {}})
    assert list(TensorDict.from_namedtuple(cast("Pair", td.to_namedtuple())).keys()) == ["n"]
    assert TensorDict.from_namedtuple(cast("Pair", TensorDict({}).to_namedtuple())).is_empty()


@pytest.mark.parametrize("key", ["a b", "_a", "class", "0", ""])
def test_a_key_that_is_not_a_field_name_is_refused(key: str) -> None:
    with pytest.raises(InvalidValue, match=r"rename_key_"):
        TensorDict({key: 1}).to_namedtuple()


def test_the_wrong_object_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="must be a named tuple"):
        TensorDict.from_namedtuple((1, 2))
    with pytest.raises(InvalidArgument, match="must be a tuple"):
        TensorDict.from_tuple({1, 2})  # type: ignore[arg-type]  # the error is the promise
    with pytest.raises(InvalidArgument, match="instance of a dataclass"):
        TensorDict.from_dataclass(Step)
    with pytest.raises(InvalidArgument, match="structured numpy array"):
        TensorDict.from_struct_array(torch.zeros(2))


def test_a_dataclass_shares_its_tensors() -> None:
    step = Step(torch.zeros(2), Step(torch.ones(2)))
    td = TensorDict.from_dataclass(step)
    assert td["obs"] is step.obs
    assert td["info", "info"] is None


def test_a_tensor_class_is_built_too() -> None:
    point = Point.from_any({"x": [1.0], "y": [2.0]}, batch_size=[1])
    assert isinstance(point, Point)
    assert point.y.item() == 2


def test_objects_are_dense_where_the_class_is_that_of_lazy_stacks() -> None:
    made = (
        LazyStackedTensorDict.from_any({"a": 1}),
        LazyStackedTensorDict.from_tuple((1, torch.ones(2))),
        LazyStackedTensorDict.from_pytree({"a": 1}),
        LazyStackedTensorDict.fromkeys(["a"]),
    )
    assert {type(each).__name__ for each in made} == {"TensorDict"}


def test_a_list_of_rows_is_a_lazy_stack_if_its_class_is() -> None:
    rows = LazyStackedTensorDict.from_list([{"x": 1}, {"x": 2, "y": 3}])
    assert isinstance(rows, LazyStackedTensorDict)
    assert rows["x"].tolist() == [1, 2]
    assert rows[1]["y"] == 3


def test_rows_are_stacked() -> None:
    rows = [{"a": torch.zeros(2), "n": {"b": 1}}, {"a": torch.ones(2), "n": {"b": 2}}]
    td = TensorDict.from_list(rows)
    assert isinstance(td, TensorDict)
    assert td["n", "b"].tolist() == [1, 2]
    assert isinstance(TensorDict.from_list(rows, lazy=True), LazyStackedTensorDict)
    assert TensorDict.from_list(rows, batch_size=[2]).batch_size == (2,)


def test_ragged_rows_become_a_lazy_stack_unless_refused() -> None:
    rows = [{"a": torch.zeros(2)}, {"a": torch.zeros(3)}]
    assert isinstance(TensorDict.from_list(rows), LazyStackedTensorDict)
    with pytest.raises(ShapeMismatch):
        TensorDict.from_list(rows, lazy=False)
    with pytest.raises(ShapeMismatch, match="number of rows, 2"):
        TensorDict.from_list(rows, batch_size=[3])
    with pytest.raises(InvalidValue, match="at least one row"):
        TensorDict.from_list([])


TREES = st.recursive(
    st.builds(torch.tensor, st.integers(-5, 5)),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(TREES.filter(lambda tree: not isinstance(tree, Tensor)))
def test_a_tree_comes_back(tree: object) -> None:
    back = TensorDict.from_pytree(tree).to_pytree()
    assert back == tree
    assert repr(back) == repr(tree)


def test_a_tree_follows_what_happened_to_its_leaves() -> None:
    td = TensorDict.from_pytree([torch.zeros(3), {"a": torch.ones(3)}], batch_size=[3])
    assert (td + 1)[0].to_pytree() == [torch.tensor(1.0), {"a": torch.tensor(2.0)}]
    td.del_("0")
    with pytest.raises(InvalidValue, match="leaf `0`, which it has lost"):
        td.to_pytree()


@pytest.mark.parametrize("wrap", [list, tuple, lambda leaves: {"x": leaves[0], "y": {"z": leaves}}])
def test_the_batch_size_of_a_tree_is_that_of_its_leaves(wrap: Any) -> None:
    tree = wrap([torch.ones(3, 4, 5), torch.ones(3, 4, 6)])
    whole = TensorDict.from_pytree(tree, auto_batch_size=True)
    assert whole.batch_size == (3, 4)
    assert TensorDict.from_pytree(tree, batch_dims=1).batch_size == (3,)
    assert TensorDict.from_pytree(tree).batch_size == ()
    assert str(whole[0].to_pytree()) == str(wrap([torch.ones(4, 5), torch.ones(4, 6)]))


def test_a_leaf_alone_is_a_tensor() -> None:
    leaf: Any = torch.zeros(2)
    assert TensorDict.from_pytree(leaf, auto_batch_size=True) is leaf
    number: Any = TensorDict.from_pytree(3)
    assert torch.equal(number, torch.tensor(3))


def test_containers_in_a_tree_stay_what_they_are() -> None:
    rows = lazy_stack(
        [TensorDict({"a": torch.zeros(1), "w": "v"}), TensorDict({"a": torch.ones(2)})]
    )
    for whole in (rows, TensorDict({"w": ["x", "y"]}, [2]).lock_(), TensorDict({}, [3])):
        assert TensorDict.from_pytree(whole, batch_size=[]) is whole
        assert TensorDict.from_pytree(whole.to_pytree()) is whole
    td: Any = TensorDict.from_pytree(
        {"x": rows, "y": [TensorDict({"w": "v"}, [3]), torch.zeros(3)]}
    )
    assert td["x"] is rows
    assert td["y", "0"].batch_size == (3,)
    tree: Any = (td + 1).to_pytree()
    assert isinstance(tree["x"], LazyStackedTensorDict)
    assert tree["y"][0]["w"] == "v"
    assert tree["y"][1].tolist() == [1, 1, 1]


def test_trees_that_have_no_keys_are_refused() -> None:
    for leaf in ("word", None):
        with pytest.raises(InvalidValue, match="several leaves"):
            TensorDict.from_pytree(leaf)
    with pytest.raises(KeyCollision, match="path `1`"):
        TensorDict.from_pytree({"1": 1, 1: 2})


@pytest.mark.parametrize("first", ["i4", "i8"])
def test_records_come_back_and_share_memory_where_torch_can(first: str) -> None:
    numpy = pytest.importorskip("numpy")
    kinds = [("a", first), ("b", "f8", (2,)), ("n", [("c", "i8"), ("d", "c8")])]
    array = numpy.zeros((3, 2), dtype=kinds)
    array["b"] = numpy.arange(12.0).reshape(3, 2, 2)
    td = TensorDict.from_struct_array(array)
    assert td.batch_size == (3, 2)
    if first == "i8":
        td["b"][0, 0] = -1
        assert array["b"][0, 0].tolist() == [-1, -1]
    back = td.to_struct_array()
    assert back.dtype == numpy.dtype(kinds)
    assert (back == array).all()
    assert TensorDict.from_struct_array(array[0, 0]).batch_size == ()


def test_records_hold_data_as_objects() -> None:
    pytest.importorskip("numpy")
    back = cast("dict[str, Tensor]", TensorDict({"s": "x", "a": [1, 2]}, [2]).to_struct_array())
    assert back["s"].tolist() == ["x", "x"]
    with pytest.raises(InvalidValue, match=r"entry `a` is of dtype `torch.bfloat16`"):
        TensorDict({"a": torch.zeros(2, dtype=torch.bfloat16)}).to_struct_array()
    with pytest.raises(InvalidValue, match="is empty"):
        TensorDict({"": 1}).to_struct_array()


def test_one_record_holds_the_object_itself() -> None:
    pytest.importorskip("numpy")
    array = TensorDict({"s": "x", "n": {"a": 1}}).to_struct_array()
    assert TensorDict.from_struct_array(array)["s"] == "x"


def test_keys_that_share_a_value() -> None:
    td = TensorDict.fromkeys(["a", ("b", "c")], torch.zeros(2))
    assert td["a"] is td["b", "c"]
    assert TensorDict.fromkeys("ab")["b"] == 0


@pytest.mark.parametrize("make", [declared, lambda: stacked(0)])
def test_a_schema_and_back(make: object) -> None:
    td = cast("TensorDictBase", make())  # type: ignore[operator]  # a factory
    schema = td.schema()
    zeros = TensorDict.from_schema(schema, td.batch_size)
    assert zeros.schema() == schema
    assert zeros["a"].shape == td["a"].shape
    assert bool((zeros.select("a") == 0).all())


def test_a_schema_says_what_is_ragged() -> None:
    td = TensorDict.from_list([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}])
    assert td.schema()["a"].kind == "ragged"
    with pytest.raises(InvalidArgument, match="schema of `a` must be one shape"):
        TensorDict.from_schema(td.schema())
    with pytest.raises(InvalidArgument, match=r"schema of `\('n', 'a'\)` must be a `LeafSchema`"):
        TensorDict.from_schema({"n": {"a": 3}})
    assert TensorDict.from_schema({"a": (torch.int8, [2])}, [3])["a"].shape == (3, 2)


def test_instances_keep_the_kinds_of_what_is_nested() -> None:
    td = TensorDict({"p": Point(torch.zeros(2), torch.zeros(2)), "n": {}})
    made = td.from_dict_instance({"p": {"x": 1, "y": 2}, "n": {"a": 1}, "new": {"b": 1}})
    assert isinstance(made.get("p"), Point)
    assert isinstance(inner(made, "new"), TensorDict)
    assert td["p", "x"].tolist() == [0, 0]
    assert isinstance(declared().from_dict_instance(declared().to_dict()), Reach)


def test_instances_read_nested_lists_as_rows() -> None:
    td = TensorDict({"n": {"s": ["a", "b"], "x": torch.zeros(2)}}, [2])
    for made in (
        td.from_dict_instance(td.to_dict(), batch_size=[2]),
        td.from_dict_instance(td.to_dict(), auto_batch_size=True),
        lazy_stack(td.unbind(0)).from_dict_instance(td.to_dict(), batch_size=[2]),
    ):
        assert type(made) is TensorDict
        assert made[1]["n", "s"] == "b"


def test_a_schema_says_where_entries_are(tmp_path: Path) -> None:
    schema: dict[NestedKey, object] = {"a": ((3,), torch.float32)}
    assert not TensorDict.from_schema(schema, [2]).is_locked
    mapped = TensorDict.from_schema(schema, [2], storage="memmap", prefix=tmp_path / "m")
    assert mapped.is_memmap()
    assert (tmp_path / "m").is_dir()
    assert TensorDict.from_schema(schema, [2], storage="shared").is_shared()
    with pytest.raises(InvalidValue, match="`storage` must be one of None, 'memmap'"):
        TensorDict.from_schema(schema, [2], storage="disk")
