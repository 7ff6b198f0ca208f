"""Nested keys: their normal forms, their text, and the nearest one."""

import pytest

from kd_core import (
    InvalidKey,
    NestedKey,
    format_key,
    nearest_key,
    unravel_key,
    unravel_key_list,
    unravel_key_to_tuple,
)


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
    with pytest.raises(
        InvalidKey, match=r"must be a string or a tuple of strings, but .* is of type"
    ):
        unravel_key(key)


@pytest.mark.parametrize("key", [(), ("a", ())])
def test_an_empty_tuple_is_refused(key: NestedKey) -> None:
    with pytest.raises(InvalidKey, match="at least one part"):
        unravel_key(key)


def test_a_list_of_keys_is_normalised() -> None:
    assert unravel_key_list([("a",), ("b", ("c",))]) == ["a", ("b", "c")]


def test_one_key_is_no_list_of_keys() -> None:
    with pytest.raises(InvalidKey, match="expected a list of keys, but the single key `abc` came"):
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
