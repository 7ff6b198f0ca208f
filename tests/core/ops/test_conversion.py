"""Containers as state dicts, arrays and lists."""

import io
from collections import OrderedDict
from typing import Any, cast

import pytest
import torch

from kd_core import (
    InvalidArgument,
    KeyCollision,
    KeySetMismatch,
    Locked,
    NonTensorStack,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    UnknownField,
)


@pytest.fixture
def td() -> TensorDict:
    inner = TensorDict({"b": torch.ones(3, 2, 4)}, [3, 2])
    return TensorDict({"a": torch.zeros(3), "n": inner, "s": "text"}, [3])


def test_a_state_survives_a_file(td: TensorDict) -> None:
    file = io.BytesIO()
    torch.save(td.state_dict(), file)
    file.seek(0)
    fresh = td.clone().zero_()
    leaf = fresh["n", "b"]
    assert fresh.lock_().load_state_dict(torch.load(file)) is fresh
    assert fresh["n", "b"] is leaf
    assert bool((fresh == td).all())


def test_a_state_shares_tensors(td: TensorDict) -> None:
    assert td.state_dict()["a"] is td["a"]
    assert td.state_dict()["n.b"] is td["n", "b"]
    assert td.state_dict(flatten=False)["s"] == "text"


def test_levels_say_what_they_are_beside_their_items(td: TensorDict) -> None:
    state = td.state_dict(flatten=False, prefix="p.")
    assert list(state) == ["p.a", "p.n", "p.s"]
    assert vars(state)["_metadata"] == {"p": {"batch_size": (3,), "device": None}}
    below = td.state_dict(flatten=False)["n"]
    assert isinstance(below, OrderedDict)
    assert vars(below)["_metadata"] == {"": {"batch_size": (3, 2), "device": None}}
    assert TensorDict().load_state_dict(td.state_dict(flatten=False), assign=True)["n"].shape == (
        3,
        2,
    )


def test_keys_must_agree(td: TensorDict) -> None:
    state = td.state_dict(flatten=False)
    state["extra"] = state.pop("a")
    with pytest.raises(KeySetMismatch, match="lacks `a`, and the container lacks `extra`"):
        td.load_state_dict(state)
    td["n", "b"].zero_()
    td.load_state_dict({**state, "n": {"b": torch.ones(3, 2, 4)}}, strict=False)
    assert td["n", "b"].sum() == 24


@pytest.mark.parametrize("flatten", [True, False])
def test_a_loose_load_adds_what_the_container_lacks(td: TensorDict, flatten: bool) -> None:
    state = td.clone().fill_(7).state_dict(flatten=flatten)
    mine = torch.zeros(3)
    loaded = TensorDict({"a": mine, "n": {"own": torch.zeros(3, 2)}})
    assert loaded.load_state_dict(state, strict=False) is loaded
    assert loaded.batch_size == (3,)
    assert loaded["a"] is mine
    assert mine.tolist() == [7, 7, 7]
    inner: object = loaded.get("n")
    assert isinstance(inner, TensorDict)
    assert inner.batch_size == (3, 2)
    assert list(inner.keys()) == ["own", "b"]
    assert inner["b"] is not td["n", "b"]
    assert loaded["s"] == "text"
    assert TensorDict().load_state_dict(state, strict=False).batch_size == (3,)


def test_entries_of_a_state_dict_keep_their_order() -> None:
    td = TensorDict(obs=torch.zeros(2), n={"a": torch.zeros(2)}, index=torch.zeros(2))
    for options in ({"strict": False}, {"assign": True}):
        loaded = TensorDict().load_state_dict(td.state_dict(), **options)
        assert list(loaded.keys()) == ["obs", "n", "index"]


def test_a_loose_load_that_fails_adds_nothing(td: TensorDict) -> None:
    state = td.state_dict()
    short = TensorDict({"a": torch.zeros(2), "n": {"own": torch.zeros(3, 2)}})
    with pytest.raises(ShapeMismatch, match="does not fit entry `a`"):
        short.load_state_dict(state, strict=False)
    assert set(short.keys(True, True)) == {"a", ("n", "own")}
    assert short.batch_size == ()
    with pytest.raises(Locked, match="add entries of a state dict"):
        TensorDict().lock_().load_state_dict(state, strict=False)


def test_a_failing_load_changes_nothing(td: TensorDict) -> None:
    state = td.clone().fill_(7).state_dict(flatten=False)
    with pytest.raises(ShapeMismatch, match=r"shape \(5,\) to `\('n', 'b'\)`"):
        td.load_state_dict({**state, "s": "other", "n": {"b": torch.ones(5)}})
    assert td["s"] == "text"
    with pytest.raises(ShapeMismatch, match=r"batch_size \(4,\), and the container of \(3,\)"):
        td.load_state_dict({**state, "__batch_size": torch.Size([4])})
    with pytest.raises(InvalidArgument, match="state of `n` must be a mapping"):
        td.load_state_dict({**state, "n": 1})
    assert td["a"].tolist() == [0, 0, 0]


def test_assigning_takes_structure_and_tensors(td: TensorDict) -> None:
    target = TensorDict({"old": 1})
    assert target.load_state_dict(td.state_dict(), assign=True) is target
    assert target["a"] is td["a"]
    assert target.batch_size == (3,)
    assert target["s"] == "text"
    inner: object = target.get("n")
    assert isinstance(inner, TensorDict)
    assert inner.batch_size == (3, 2)
    with pytest.raises(Locked, match="replace entries"):
        target.lock_().load_state_dict(td.state_dict(), assign=True)


class Sample(TensorClass):
    x: torch.Tensor
    name: str = "a"


class Final(TensorClass, frozen=True):
    x: torch.Tensor
    name: str = "a"


def test_assigning_keeps_names_and_kinds() -> None:
    sample = Sample(x=torch.zeros(2), batch_size=[2])
    td = TensorDict({"p": sample}, [2], names=["time"])
    other = TensorDict({"p": Sample(x=torch.ones(2), name="b", batch_size=[2])}, [2])
    td.load_state_dict(other.state_dict(), assign=True)
    assert td.names == ["time"]
    assert (td.nested("p", Sample).x.tolist(), td.nested("p", Sample).name) == ([1, 1], "b")


def test_fields_are_assigned_all_or_none() -> None:
    sample = Sample(x=torch.zeros(2), batch_size=[2])
    longer = Sample(x=torch.ones(3), name="b", batch_size=[3])
    with pytest.raises(KeySetMismatch, match="lacks `x`"):
        sample.load_state_dict({"name": "b"}, assign=True)
    with pytest.raises(UnknownField, match="`z`"):
        sample.load_state_dict({"x": torch.ones(2), "name": "b", "z": torch.ones(2)}, assign=True)
    assert (sample.x.tolist(), sample.name) == ([0, 0], "a")
    assert sample.load_state_dict(longer.state_dict(), assign=True) is sample
    assert (sample.batch_size, sample.x.tolist(), sample.name) == ((3,), [1, 1, 1], "b")
    final = Final(x=torch.zeros(2), batch_size=[2])
    with pytest.raises(Locked, match="frozen"):
        final.load_state_dict(longer.state_dict(), assign=True)
    assert (final.batch_size, final.x.tolist()) == ((2,), [0, 0])


def test_data_that_a_state_of_tensors_lacks_stays() -> None:
    sample = Sample(x=torch.zeros(2), name="b", batch_size=[2])
    sample.load_state_dict({"x": torch.ones(2)}, assign=True)
    assert (sample.x.tolist(), sample.name) == ([1, 1], "b")


def test_other_keys_get_a_remedy(td: TensorDict) -> None:
    with pytest.raises(KeySetMismatch, match="lacks `a`, and the container lacks `b`"):
        td.load_state_dict({"b.n": 1, "n.b": td["n", "b"]})
    with pytest.raises(KeySetMismatch, match=r"`assign=True` to take all\.$"):
        td.load_state_dict({"a": 1})


def test_parameters_load_in_place() -> None:
    td = TensorDict({"w": torch.nn.Parameter(torch.zeros(2))})
    td.load_state_dict({"w": torch.ones(2)})
    assert td["w"].tolist() == [1, 1]
    assert td["w"].requires_grad


def test_arrays_and_lists(td: TensorDict) -> None:
    pytest.importorskip("numpy")
    arrays = td.numpy()
    arrays["a"][0] = 5  # type: ignore[index]  # nested
    assert td["a"][0] == 5
    assert arrays["n"]["b"].shape == (3, 2, 4)  # type: ignore[index]  # nested
    assert td.to_dict(convert_tensors=True)["a"] == [5, 0, 0]


def test_rows_as_lists(td: TensorDict) -> None:
    rows = td.select("a", "s").tolist(convert_tensors=True)
    assert rows == [{"a": 0, "s": "text"}] * 3
    assert TensorDict({"a": 1}).tolist(convert_tensors=True) == {"a": 1}
    kept = td.tolist(convert_nodes=False)
    assert isinstance(kept, list)
    assert isinstance(kept[0], TensorDict)
    assert kept[0]["n", "b"].shape == (2, 4)
    assert isinstance(td.tolist()[0]["a"], torch.Tensor)  # type: ignore[index]  # nested


def test_rows_of_nested_containers_come_first_on_request(td: TensorDict) -> None:
    nested = td.to_dict(convert_tensors=True, tolist_first=True)["n"]
    assert nested == [[{"b": [1.0] * 4}] * 2] * 3
    assert td.to_dict(convert_tensors=True)["n"] == {"b": [[[1.0] * 4] * 2] * 3}


def test_empty_batches_and_none() -> None:
    assert TensorDict({"a": torch.zeros(2, 0)}, [2, 0]).tolist() == [[], []]
    td = TensorDict({"a": None, "b": {"c": None}})
    assert td.to_dict(retain_none=False) == {"b": {}}


def test_numpy_of_a_leaf_that_requires_grad_raises_as_torch_does() -> None:
    td = TensorDict({"a": 1.0, "b": {"w": torch.ones(2, requires_grad=True)}})
    with pytest.raises(RuntimeError, match="requires grad") as caught:
        td.numpy()
    assert "entry `('b', 'w')`" in caught.value.__notes__[0]
    assert td.detach().numpy()["b"]["w"].tolist() == [1, 1]  # type: ignore[index]  # nested


def test_a_flat_state_comes_back(td: TensorDict) -> None:
    td["n.x"] = torch.ones(3)
    td["n", "deep"] = TensorDict({"e": torch.full((3, 2), 4.0)}, [3, 2])
    state = td.state_dict(flatten=True)
    assert list(state) == ["a", "n.b", "n.deep.e", "n.x"]
    fresh = td.clone().zero_()
    assert fresh.load_state_dict(state, from_flatten=True) is fresh
    assert bool((fresh == td).all())
    with pytest.raises(KeySetMismatch, match="lacks `deep`"):
        fresh.load_state_dict(
            {k: v for k, v in state.items() if "deep" not in k}, from_flatten=True
        )
    del state["n.x"]  # to an empty container it is an entry of `n`
    made = TensorDict().load_state_dict(state, assign=True)
    assert made["n", "deep", "e"].sum() == 24
    assert made["s"] == "text"
    assert made.batch_size == (3,)
    assert cast(Any, made.get("n")).batch_size == (3, 2)
    made.zero_().load_state_dict({**state, "a": torch.ones(3)})
    assert made["a"].sum() == 3


def test_a_state_is_added_to_a_destination() -> None:
    td = TensorDict({"w": torch.nn.Parameter(torch.ones(2)), "n": {"b": 1}})
    state: dict[str, object] = {"before": 1}
    assert td.state_dict(state, "net.") is state
    assert sorted(state) == ["before", "net.n.b", "net.w"]
    nested = td.state_dict({"before": 1}, "net.", flatten=False)
    assert sorted(nested) == ["before", "net.n", "net.w"]
    assert not state["net.w"].requires_grad  # type: ignore[attr-defined]  # a tensor
    assert td.state_dict(keep_vars=True)["w"] is td["w"]
    with pytest.raises(KeyCollision, match=r"`a\.b` is given twice"):
        TensorDict({"a": {"b": 1}, "a.b": 2}).state_dict(flatten=True)


def test_a_linked_list_writes_rows() -> None:
    td = TensorDict({"a": torch.arange(3)}, [3])
    rows = cast("list[object]", td.tolist(as_linked_list=True, convert_tensors=True))
    rows[0] = {"a": torch.tensor(9)}
    assert td["a"].tolist() == [9, 1, 2]
    rows.append({"a": 3})
    assert td.batch_size == (3,)
    copied = type(rows)(row for row in rows)  # as `dataclasses.asdict` does
    copied[1] = "no row"
    assert td["a"].tolist() == [9, 1, 2]


def test_lists_of_rows_first_hold_a_word_for_each_row() -> None:
    td = TensorDict({"a": torch.zeros(2), "s": "word"}, [2])
    assert td.to_dict(tolist_first=True)["s"] == ["word", "word"]
    assert td.to_dict()["s"] == "word"


def test_rows_of_words_are_not_contiguous() -> None:
    td = TensorDict({"a": torch.zeros(2), "s": "word"}, [2])
    assert td.is_contiguous()
    td["w"] = NonTensorStack("x", "y")
    assert not td.is_contiguous()
    assert not TensorDict({"n": td}).is_contiguous()
