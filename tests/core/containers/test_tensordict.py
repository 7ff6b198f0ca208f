"""What a `TensorDict` may be built from, edge by edge."""

import pickle
import re
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.core.kinds import inner
from torch import Tensor

from kd_core import (
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyCollision,
    NonTensorData,
    NonTensorStack,
    ShapeMismatch,
    TensorDict,
    lazy_stack,
    make_tensordict,
)


def test_nothing_is_an_empty_container() -> None:
    td = TensorDict()
    assert td.is_empty()
    assert td.batch_size == ()
    assert td.device is None


@pytest.mark.parametrize(
    "source",
    [
        {"a": 1.0},
        OrderedDict(a=1.0),
        UserDict(a=1.0),
        types.MappingProxyType({"a": 1.0}),
        TensorDict({"a": 1.0}),
    ],
    ids=lambda source: type(source).__name__,
)
def test_any_mapping_is_a_source(source: Mapping[str, object]) -> None:
    assert list(TensorDict(source).keys()) == ["a"]
    assert list(TensorDict({"n": source})["n"].keys()) == ["a"]  # type: ignore[attr-defined]  # nested


@pytest.mark.parametrize("source", [[1, 2], torch.zeros(3), 3, "text"])
def test_what_is_no_mapping_is_refused(source: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="must be a mapping or a container, got a"):
        TensorDict(source)


def test_tuple_keys_make_nested_containers() -> None:
    x = torch.zeros(3)
    td = TensorDict({("a", "b"): x, "c": x, ("a", ("d",)): {("e", "f"): x}}, [3])
    assert list(td.keys(True, True)) == ["c", ("a", "b"), ("a", "d", "e", "f")]  # tuples last
    assert inner(td, "a").batch_size == (3,)
    assert list(TensorDict(td).update({("z", "y"): x, "d": x}).keys()) == ["c", "a", "z", "d"]
    for value in (x, NonTensorData("x")):
        both: dict[Any, Any] = {"a": value, ("a", "b"): x}
        with pytest.raises(KeyCollision, match="makes `a` a container, and another key makes it"):
            TensorDict(both)


@pytest.mark.parametrize(
    "kind",
    [
        dict,
        UserDict,
        lambda made: TensorDict(made, [3]).lock_(),
        lambda made: lazy_stack([*TensorDict(made, [3])]),
    ],
)
def test_tuple_keys_reach_into_what_other_keys_give(kind: Callable[..., Any]) -> None:
    x = torch.zeros(3)
    given = kind({"b": x, "n": {"c": x}})
    keys = [("a", "b"), ("a", "n", "c"), ("a", "n", "d"), ("a", "z")]
    more: dict[Any, Any] = {"a": given, ("a", "z"): x, ("a", "n", "d"): x}
    again: dict[Any, Any] = {("a", "n", "d"): x, "a": given, ("a", ("z",)): x}
    for source in (more, again):
        assert sorted(TensorDict(source, [3]).keys(True, True)) == keys
        assert sorted(TensorDict({}, [3]).update(source).keys(True, True)) == keys
    row = TensorDict(more, [3]).clone()
    written: dict[Any, Any] = {"a": {"b": 1.0}, ("a", "z"): 2.0}
    row[0] = written
    assert [row["a", "b"][0].item(), row["a", "z"][0].item()] == [1, 2]
    assert sorted(given.keys()) == ["b", "n"]  # those of the program stay as they are
    twice: dict[Any, Any] = {"a": given, ("a", "b"): x}
    with pytest.raises(KeyCollision, match=r"`\('a', 'b'\)` is given twice"):
        TensorDict(twice, [3])


def test_a_container_as_source_gives_its_tensors_and_no_batch_size() -> None:
    td = TensorDict({"a": torch.zeros(3, 4)}, [3])
    assert TensorDict(td).batch_size == ()
    other = TensorDict(td, td.batch_size)
    assert other.batch_size == (3,)
    assert other["a"] is td["a"]
    other["b"] = torch.zeros(3)
    assert "b" not in td


def test_keywords_are_entries() -> None:
    td = TensorDict(a=torch.zeros(3), b={"c": torch.ones(3)}, batch_size=[3])
    assert set(td.keys(True, True)) == {"a", ("b", "c")}


def test_the_fourth_value_is_the_names() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3], "cpu", ["time"])
    assert td.names == ["time"]
    assert not td.is_locked


def test_names_of_parameters_are_keys_in_a_source() -> None:
    names = ("source", "batch_size", "device", "lock", "self", "entries")
    assert set(TensorDict(dict.fromkeys(names, 0.0)).keys()) == set(names)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bs", "Did you mean `batch_size=`?"),
        ("devices", "Did you mean `device=`?"),
        ("dtype", "Did you mean `.to(dtype)` of the container?"),
        ("a", "Put an entry of that name into the source."),
    ],
)
def test_a_keyword_beside_a_source_is_not_an_entry(name: str, meant: str) -> None:
    given: dict[str, Any] = {name: torch.zeros(3)}
    with pytest.raises(InvalidArgument, match=f"`{name}` is not a valid.*{re.escape(meant)}"):
        TensorDict({"x": torch.zeros(3)}, **given)
    with pytest.raises(ValueError, match="cannot be combined with a source"):
        TensorDict({}, **given)


@pytest.mark.parametrize("key", [1, None, ("a", 1), (), 2.5])
def test_a_key_that_is_no_string_is_refused(key: object) -> None:
    for source in ({key: torch.zeros(3)}, {key: 1.0}, {"n": {key: 1.0}}):
        with pytest.raises(
            InvalidKey, match=r"a key must be a string or a tuple of strings, got .* of type"
        ):
            TensorDict(source)  # type: ignore[misc]  # what is refused


@pytest.mark.parametrize("batch_size", [3, [3], (3,), torch.Size([3])])
def test_a_batch_size_is_an_integer_or_any_sequence(batch_size: int) -> None:
    assert TensorDict({"a": torch.zeros(3)}, batch_size).batch_size == torch.Size([3])


def test_the_batch_size_is_never_inferred() -> None:
    assert TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}).batch_size == ()


def test_a_batch_size_is_inferred_on_request() -> None:
    source = {"a": torch.zeros(3, 4, 2), "n": {"b": torch.zeros(3, 4)}}
    assert TensorDict.from_dict(source, auto_batch_size=True).batch_size == (3, 4)
    assert TensorDict.from_dict(source, batch_dims=1).batch_size == (3,)
    assert TensorDict.from_dict(source).batch_size == ()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(True, torch.bool), (3, torch.int64), (1.5, torch.float32)],
)
def test_a_number_becomes_a_tensor(value: object, dtype: torch.dtype) -> None:
    found = TensorDict({"a": value})["a"]
    assert isinstance(found, Tensor)
    assert found.shape == ()
    assert found.dtype is dtype


def test_lists_of_numbers_become_tensors() -> None:
    td = TensorDict({"a": [1, 2, 3], "b": [[1.0], [2.0], [3.0]]}, [3])
    torch.testing.assert_close(td["a"], torch.tensor([1, 2, 3]))
    assert td["b"].shape == (3, 1)


@pytest.mark.parametrize("value", ["text", None, object(), b"bytes", {1, 2}, len])
def test_anything_else_is_data(value: object) -> None:
    td = TensorDict({"a": value}, [3])
    assert td["a"] is value
    assert isinstance(td.get("a"), NonTensorData)


@pytest.mark.parametrize("batch_size", [[], [2]])
def test_lists_of_numbers_of_other_lengths_are_tensors_and_noted(
    batch_size: list[int], tmp_path: Path
) -> None:
    said = r"entry `\('n', 'a'\)` holds lists of numbers of different lengths, .*lazy_stack"
    with pytest.warns(UserWarning, match=said) as noted:
        td = TensorDict({"n": {"a": [[1, 2], [3]]}}, batch_size)
    assert noted[0].filename == __file__
    td.save(tmp_path / "td")
    for each in (td, TensorDict.load(tmp_path / "td")):
        values = each["n", "a"]
        assert [type(value) for value in values] == [Tensor, Tensor]
        assert [value.tolist() for value in values] == [[1, 2], [3]]
    assert TensorDict({"a": NonTensorStack([1, 2], [3])}, [2])["a"] == [[1, 2], [3]]


def test_arrays_keep_their_dtype() -> None:
    numpy = pytest.importorskip("numpy")
    td = TensorDict({"a": numpy.zeros(3), "b": numpy.int16(4), "c": numpy.ones(3, bool)})
    assert [leaf.dtype for leaf in td.values()] == [torch.float64, torch.int16, torch.bool]
    words = numpy.array(["x", "y"])
    assert TensorDict({"a": words})["a"] is words


def test_parameters_and_subclasses_are_leaves() -> None:
    class Own(Tensor):
        pass

    own = torch.zeros(3).as_subclass(Own)
    weight = torch.nn.Parameter(torch.zeros(3))
    td = TensorDict({"a": own, "b": weight}, [3])
    assert td["a"] is own
    assert td["b"] is weight
    assert type(td[0]["a"]) is Own


def test_every_entry_is_moved_to_the_device() -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3], device="meta")
    assert td.device == inner(td, "n").device == torch.device("meta")
    assert td["a"].device == td["n", "b"].device == torch.device("meta")
    td["c"] = torch.zeros(3)
    td["m"] = TensorDict({"d": torch.zeros(3)}, [3])
    assert td["c"].device == td["m", "d"].device == torch.device("meta")


def test_a_nested_container_with_fewer_batch_dimensions_grows() -> None:
    nested = TensorDict({"a": torch.zeros(3, 4), "deep": {"b": torch.zeros(3)}}, [])
    td = TensorDict({"n": nested}, [3])
    assert inner(td, "n").batch_size == inner(td, ("n", "deep")).batch_size == (3,)
    assert nested.batch_size == inner(nested, "deep").batch_size == ()
    assert td["n", "a"] is nested["a"]


def test_a_nested_container_with_more_batch_dimensions_keeps_them() -> None:
    nested = TensorDict({"a": torch.zeros(3, 4)}, [3, 4])
    td = TensorDict({"n": nested}, [3])
    assert inner(td, "n") is nested
    assert inner(td[0], "n").batch_size == (4,)


def test_a_nested_container_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ShapeMismatch, match=r"entry `n`: its shape must start with \(3,\), got \(2,\)"
    ):
        TensorDict({"n": TensorDict({}, [2])}, [3])
    with pytest.raises(ShapeMismatch, match=r"entry `\('n', 'a'\)`"):
        TensorDict({"n": {"a": torch.zeros(2)}}, [3])


def test_a_container_is_built_locked_on_request() -> None:
    td = TensorDict({"n": {"a": 1.0}}, lock=True)
    assert td.is_locked
    assert inner(td, "n").is_locked


def test_its_type_rebuilds_it_from_its_items() -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3])
    rebuilt = type(td)(dict(td.items()))  # type: ignore[arg-type]  # keys of one level are strings
    assert rebuilt["n", "b"] is td["n", "b"]
    assert rebuilt.batch_size == ()


def test_the_source_is_not_kept() -> None:
    source: dict[str, object] = {"a": torch.zeros(3)}
    td = TensorDict(source, [3])
    source["b"] = torch.ones(3)
    assert "b" not in td


def nested(depth: int) -> dict[str, object]:
    source: dict[str, object] = {"leaf": 1.0}
    for _ in range(depth):
        source = {"n": source}
    return source


def wrapped(depth: int) -> TensorDict:
    td = TensorDict({"leaf": 1.0})
    for _ in range(depth):
        td = TensorDict({"n": td})
    return td


def test_too_many_levels_are_refused() -> None:
    with pytest.raises(InvalidValue, match="nested at most 64 levels"):
        TensorDict(nested(2000))
    with pytest.raises(InvalidValue, match="nested at most 64 levels"):
        wrapped(65)
    with pytest.raises(InvalidValue, match="nested at most 64 levels"):
        TensorDict().set(("n",) * 66, 1.0)


def test_a_mapping_that_encloses_itself_is_refused() -> None:
    source: dict[str, object] = {}
    source["n"] = source
    with pytest.raises(InvalidValue, match="Check the value for a cycle"):
        TensorDict(source)


@pytest.mark.parametrize("path", ["up", ("m", "up"), ("new", "up")])
def test_a_container_that_would_enclose_itself_is_refused(path: str) -> None:
    td = TensorDict({"a": 1.0, "m": {"b": 2.0}})
    with pytest.raises(InvalidValue, match="would contain itself"):
        td[path] = td
    with pytest.raises(InvalidValue, match="would contain itself"):
        inner(td, "m").update({"up": td})
    assert set(td.keys(True)) == {"a", "m", ("m", "b")}


def test_a_hundred_thousand_keys_are_no_trouble() -> None:
    leaf = torch.zeros(3)
    td = TensorDict({str(i): leaf for i in range(100_000)}, [3])
    assert td["99999"] is leaf
    assert len(td.select("5", "6").keys()) == 2
    assert len(td.clone().keys()) == 100_000
    assert list(pickle.loads(pickle.dumps(td, 5)).keys()) == list(td.keys())


@pytest.mark.parametrize("array", [numpy.arange(3.0)[::-1], numpy.arange(3.0).astype(">f8")])
def test_arrays_that_torch_cannot_share_are_copied(array: numpy.ndarray[Any, Any]) -> None:
    assert TensorDict({"a": array})["a"].tolist() == array.tolist()


def test_all_options_are_taken_by_position() -> None:
    td = TensorDict({"a": {"b": torch.ones(3)}}, [3], "meta", ["n"], True, True)
    assert (td.device, td["a", "b"].device) == (torch.device("meta"),) * 2
    assert (td.names, td.is_locked) == (["n"], True)
    assert td.nested("a", TensorDict).device == torch.device("meta")
    made = TensorDict(a=torch.ones(2), batch_size=[2], device="cpu", non_blocking=True)
    assert (list(made.keys()), made.device) == (["a"], torch.device("cpu"))
    assert TensorDict({"non_blocking": "x"})["non_blocking"] == "x"
    with pytest.raises(ShapeMismatch):
        TensorDict({"a": torch.ones(2)}, [3], "cpu", None, True)


def test_a_subclass_may_pass_all_options_on_by_position() -> None:
    class Posed(TensorDict):
        def __init__(  # as programs write it
            self,
            source: Any = None,
            batch_size: Any = None,
            device: Any = None,
            names: Any = None,
            non_blocking: bool | None = None,
            lock: bool = False,
        ) -> None:
            super().__init__(source, batch_size, device, names, non_blocking, lock)
            self.auto_batch_size_(1)

    made = Posed({"a": torch.ones(3, 2)}, lock=False)
    assert made.batch_size == (3,)
    assert type(made[:2]) is type(made + 1) is Posed
    assert Posed({"a": torch.ones(3)}, [3], "meta", None, True)["a"].is_meta


def test_make_tensordict_takes_a_mapping_and_keywords() -> None:
    td = make_tensordict({"a": torch.ones(3, 2)}, b=torch.ones(3), auto_batch_size=True)
    assert td.batch_size == (3,)
    assert make_tensordict({"a": torch.ones(3)}, [3], "cpu").device == torch.device("cpu")
    with pytest.raises(KeyCollision):
        make_tensordict({"a": 1}, a=2)


def test_a_misspelt_batch_size_is_not_an_entry() -> None:
    with pytest.raises(InvalidArgument, match=r"`batchsize=\[3\]` would store.*`batch_size=\[3\]`"):
        TensorDict({"a": torch.zeros(3)}, batchsize=[3])
    assert TensorDict(batchsize=32)["batchsize"] == 32


@pytest.mark.parametrize("more", [{}, {"words": ["v", "w", "x"]}])
def test_nested_dicts_get_the_batch_size_that_their_own_leaves_share(
    more: dict[str, object],
) -> None:
    shared = {"d": torch.zeros(3, 2, 4), "e": torch.zeros(3, 2)}
    given = TensorDict({"d": torch.zeros(3, 2)}, [3])
    tree = {"a": torch.zeros(3), "b": {"c": shared}, "given": given} | more
    td = TensorDict.from_dict(tree, auto_batch_size=True)
    sizes = td.batch_size, inner(td, "b").batch_size, inner(td, ("b", "c")).batch_size
    assert sizes == ((3,), (3, 2), (3, 2))
    assert inner(td, "given") is given
    assert given.batch_size == (3,)
    flat = TensorDict.from_dict(tree, auto_batch_size=True, batch_dims=1)
    assert inner(flat, ("b", "c")).batch_size == (3,)
