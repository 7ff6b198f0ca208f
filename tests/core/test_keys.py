"""Nested keys: their normal forms, their text, and the nearest one."""

from collections.abc import Callable

import pytest
import torch
from tests.strings import STRINGS, Mixed
from torch import nn

from kd_core import (
    InvalidKey,
    KeyCollision,
    NestedKey,
    TensorDict,
    TensorDictBase,
    format_key,
    lazy_stack,
    nearest_key,
    unravel_key,
    unravel_key_list,
    unravel_key_to_tuple,
)

X = torch.ones(3)


@pytest.mark.parametrize(("a", "b"), STRINGS)
def test_a_subclass_of_str_becomes_a_plain_string(a: str, b: str) -> None:
    assert [type(part) for part in unravel_key_to_tuple((a, (b,)))] == [str, str]
    assert type(unravel_key(a)) is str
    assert format_key((a, b)) == "`('a', 'b')`"
    assert format_key(a) == "`a`"


MADE: dict[str, Callable[[str, str], TensorDictBase]] = {
    "built": lambda a, b: TensorDict({a: X, b: {a: X}}, [3]),
    "built of many": lambda a, b: TensorDict({f"k{i}": X for i in range(40)} | {a: X}, [3]),
    "built by keyword": lambda a, b: TensorDict(**{a: X}, batch_size=[3]),  # type: ignore[arg-type]  # any
    "from a dict": lambda a, b: TensorDict.from_dict({a: X, b: {a: X}}, auto_batch_size=True),
    "from a module": lambda a, b: TensorDict.from_module(nn.ModuleDict({a: nn.Linear(1, 1)})),
    "set": lambda a, b: TensorDict({}, [3]).set(a, X).set((b, a), X),
    "assign": lambda a, b: TensorDict({}, [3]).assign({a: X, (b, a): X}),
    "assign leaves": lambda a, b: TensorDict({}, [3]).assign({a: X, b: X}),
    "update": lambda a, b: TensorDict({}, [3]).update({a: X, b: {a: X}}),
    "update leaves": lambda a, b: TensorDict({}, [3]).update({a: X, b: X}),
    "select": lambda a, b: TensorDict({"a": X, "b": {"a": X}}, [3]).select(a, (b, a)),
    "exclude": lambda a, b: TensorDict({"a": X, "b": {"a": X, "c": X}}, [3]).exclude(a, (b, a)),
    "rename": lambda a, b: TensorDict({"c": X}, [3]).rename_key_("c", a),
    "flatten": lambda a, b: TensorDict({"b": {"": X, "c": X}}, [3]).flatten_keys(a),
    "data": lambda a, b: TensorDict({}, [3]).set_non_tensor(a, "text"),
    "lazy": lambda a, b: lazy_stack([TensorDict({}), TensorDict({})]).set(a, torch.ones(2)),
}


@pytest.mark.parametrize(("a", "b"), STRINGS)
@pytest.mark.parametrize("way", MADE)
def test_no_container_holds_a_subclass_of_str(way: str, a: str, b: str) -> None:
    made = MADE[way](a, b)
    keys = list(made.keys(True))
    assert keys
    assert {type(part) for key in keys for part in unravel_key_to_tuple(key)} == {str}


@pytest.mark.parametrize(("a", "b"), STRINGS)
def test_a_subclass_of_str_finds_the_entry(a: str, b: str) -> None:
    td = TensorDict({"a": X, "b": {"a": 2 * X}}, [3])
    assert td[a] is td["a"]
    assert td[b, a] is td.get((b, a)) is td["b", "a"]
    assert a in td
    assert (b, a) in td.keys(True)
    td[a] = 3 * X
    assert (td.pop(a) == 3).all()
    del td[b, a]
    assert list(td.keys(True)) == ["b"]


def test_a_string_of_numpy_becomes_a_plain_one() -> None:
    name = pytest.importorskip("numpy").str_("a")
    td = TensorDict({name: X, "b": {name: X}}, [3])
    assert [unravel_key(key) for key in td.keys(True)] == ["a", "b", ("b", "a")]
    assert type(next(iter(td.keys()))) is str
    assert td[name] is td["a"]


def test_keys_of_the_same_characters_collide() -> None:
    class Other(str):
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return self is other

    with pytest.raises(KeyCollision, match=r"key `a` is given twice\. Pass each key once"):
        TensorDict({Other("a"): X, "a": X})


def test_an_enumeration_names_keys_in_compiled_code() -> None:
    def step(td: TensorDict) -> TensorDict:
        td[Mixed.A] = td[Mixed.B] + 1
        return td.set(("n", Mixed.B), td[Mixed.A])

    made = torch.compile(step, backend="eager", fullgraph=True)(TensorDict({"b": X}))
    keys = list(made.keys(True, True))
    assert keys == ["b", "a", ("n", "b")]
    assert type(keys[1]) is str


@pytest.mark.parametrize(
    ("key", "normal"),
    [
        ("a", "a"),
        (("a",), "a"),
        ((("a",),), "a"),
        (("a", "b"), ("a", "b")),
        (("a", ("b", ("c",))), ("a", "b", "c")),
        ("", ""),
        ("a.b", "a.b"),
    ],
)
def test_a_key_has_one_normal_form(key: NestedKey, normal: NestedKey) -> None:
    assert unravel_key(key) == normal
    assert unravel_key_to_tuple(key) == (normal if isinstance(normal, tuple) else (normal,))


@pytest.mark.parametrize("key", [3, None, ["a"], ("a", 3), ("a", None), b"a"])
def test_what_is_no_key_is_refused(key: NestedKey) -> None:
    with pytest.raises(InvalidKey, match=r"must be a string or a tuple of strings, got .* of type"):
        unravel_key(key)


@pytest.mark.parametrize("key", [(), ("a", ())])
def test_an_empty_tuple_is_refused(key: NestedKey) -> None:
    with pytest.raises(InvalidKey, match="at least one part"):
        unravel_key(key)


def test_a_list_of_keys_is_normalised() -> None:
    assert unravel_key_list([("a",), ("b", ("c",))]) == ["a", ("b", "c")]


def test_one_key_is_no_list_of_keys() -> None:
    expected = "^incompatible function arguments: expected a list of keys, got the single key `abc`"
    with pytest.raises(InvalidKey, match=expected):
        unravel_key_list("abc")


@pytest.mark.parametrize(("key", "text"), [(("a",), "`a`"), (("a", ("b",)), "`('a', 'b')`")])
def test_messages_write_keys_in_backticks(key: NestedKey, text: str) -> None:
    assert format_key(key) == text


@pytest.mark.parametrize(
    ("key", "candidates", "nearest"),
    [
        ("obervation", ["action", "observation"], "observation"),
        (("agent", "observatoin"), [("agent", "observation"), "agent"], ("agent", "observation")),
        ("observation", [("agent", "observation"), "action"], ("agent", "observation")),
        ("x", ["action"], None),
        ("x", [], None),
        ("obs", ["action", "observation"], "observation"),
        ("observation", ["action", "obs"], "obs"),
        ("obs", ["o", "x"], None),
    ],
)
def test_the_nearest_key_is_found(
    key: NestedKey, candidates: list[NestedKey], nearest: NestedKey | None
) -> None:
    assert nearest_key(key, candidates) == nearest


def test_a_key_of_another_case_is_near() -> None:
    assert nearest_key("X", ["action", "x"]) == "x"
    assert nearest_key(("Obs", "A"), [("obs", "a"), "b"]) == ("obs", "a")


def test_programs_may_ask_whether_a_value_is_a_key() -> None:
    asked = ("a", ("a", "b"), 1, None, ["a"])
    assert [isinstance(value, NestedKey) for value in asked] == [True, True, False, False, False]
