import pytest

from kd_export import Axis, Entry, Schema, ShapeMismatch
from kd_export._schema.vectors import concrete, draw, positions, tolerance


def schema(*entries: Entry) -> Schema:
    return Schema(entries, (), {"batch": Axis()})


def test_same_seed_gives_the_same_numbers() -> None:
    one = schema(Entry(("x",), "x", "float32", ("batch", 2), -1.0, 3.0))
    assert draw(one, {"batch": 2}, 5) == draw(one, {"batch": 2}, 5)
    # Pinned: files written long ago hold results for these very numbers.
    assert draw(one, {"batch": 1}, 0)[0].numbers == pytest.approx([2.3776874061, 2.0318176125])


def test_floats_stay_in_the_range_of_the_example() -> None:
    entry = Entry(("x",), "x", "float64", (100,), 2.0, 3.0)
    (drawn,) = draw(schema(entry), {}, 0)
    assert drawn.shape == (100,)
    assert min(drawn.numbers) >= 2.0
    assert max(drawn.numbers) <= 3.0


def test_integers_stay_below_every_dynamic_size() -> None:
    entry = Entry(("i",), "i", "int64", (50,), 0, 9)
    (drawn,) = draw(schema(entry), {"batch": 3}, 0)
    assert set(drawn.numbers) == {0, 1, 2}


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ShapeMismatch, match="no size was given for the axis `batch`"):
        concrete(("batch", 3), {})


def test_positions_are_spread_evenly() -> None:
    assert positions(0) == []
    assert positions(3) == [0, 1, 2]
    assert positions(64) == list(range(0, 64, 2))


def test_tolerance_follows_the_dtype() -> None:
    assert tolerance("int64", None, None) == (0.0, 0.0)
    assert tolerance("float32", None, 1.0) == (1e-4, 1.0)
