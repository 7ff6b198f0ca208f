import pytest
from hypothesis import given
from hypothesis import strategies as st

from kd_export import KeyMismatch
from kd_export._schema.files import argument_names, as_key, nest, unnest, wire_key, wire_name

KEYS = st.lists(st.text(max_size=4), min_size=1, max_size=3).map(tuple)


@given(KEYS)
def test_wire_name_is_reversible(key: tuple[str, ...]) -> None:
    assert wire_key(wire_name(key)) == key


@given(st.lists(KEYS, unique=True))
def test_wire_names_do_not_collide(keys: list[tuple[str, ...]]) -> None:
    assert len({wire_name(key) for key in keys}) == len(keys)


@given(st.lists(KEYS, unique=True))
def test_argument_names_are_unique_identifiers(keys: list[tuple[str, ...]]) -> None:
    names = argument_names(keys).values()
    assert len(set(names)) == len(keys)
    assert all(name.isidentifier() for name in names)


def test_nest_and_unnest_are_inverse() -> None:
    entries = {("a", "b"): 1, ("a", "c"): 2, ("d",): 3}
    assert unnest(nest(entries)) == entries


def test_nest_refuses_an_entry_below_a_value() -> None:
    with pytest.raises(KeyMismatch, match=r"`a\.b` lies below an entry that is itself a value"):
        nest({("a",): 1, ("a", "b"): 2})


@pytest.mark.parametrize("key", [3, (), ("a", 1)])
def test_key_must_be_strings(key: object) -> None:
    with pytest.raises(KeyMismatch, match="a key must be a string or a tuple of strings"):
        as_key(key)
