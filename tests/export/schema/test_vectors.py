from dataclasses import replace

import pytest

from kd_export import Axis, Entry, ExportError, Schema, ShapeMismatch, Vector
from kd_export._schema.schema import concrete, draw, positions, tolerance


def schema(*entries: Entry) -> Schema:
    return Schema(entries, (), {"batch": Axis()})


def test_same_seed_gives_the_same_numbers() -> None:
    one = schema(Entry(("x",), "x", "float32", ("batch", 2), -1.0, 3.0))
    assert draw(one, Vector({"batch": 2}, 5, {})) == draw(one, Vector({"batch": 2}, 5, {}))
    # Pinned: files written long ago hold results for these very numbers.
    assert draw(one, Vector({"batch": 1}, 0, {}))[0].numbers == pytest.approx(
        [2.3776874061, 2.0318176125]
    )


def test_floats_stay_in_the_range_of_the_example() -> None:
    entry = Entry(("x",), "x", "float64", (100,), 2.0, 3.0)
    (drawn,) = draw(schema(entry), Vector({}, 0, {}))
    assert drawn.shape == (100,)
    assert min(drawn.numbers) >= 2.0
    assert max(drawn.numbers) <= 3.0


def test_integers_stay_in_the_range_of_the_example() -> None:
    entry = Entry(("i",), "i", "int64", (50,), 3, 9)
    (drawn,) = draw(schema(entry), Vector({"batch": 1}, 0, {}))
    assert set(drawn.numbers) == {3, 4, 5, 6, 7, 8, 9}


def test_numbers_that_are_stored_are_not_drawn() -> None:
    entry = Entry(("i",), "i", "int64", ("batch",), 0, 9)
    vector = Vector({"batch": 3}, 0, {}, {"i": (9, 0, 9)})
    assert draw(schema(entry), vector)[0].numbers == (9, 0, 9)
    (kept,) = Schema.from_json(replace(schema(entry), vectors=(vector,)).to_json()).vectors
    assert kept == vector


def test_stored_numbers_fill_their_shape() -> None:
    entry = Entry(("i",), "i", "int64", ("batch",), 0, 9)
    forged = replace(schema(entry), vectors=(Vector({"batch": 2}, 0, {}, {"i": (1,)}),))
    with pytest.raises(ExportError, match="a stored test has 1 numbers for 'i'"):
        Schema.from_json(forged.to_json())


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ShapeMismatch, match="no size was given for the axis `batch`"):
        concrete(("batch", 3), {})


def test_positions_are_spread_evenly() -> None:
    assert positions(0) == []
    assert positions(3) == [0, 1, 2]
    assert positions(64) == list(range(0, 64, 2))


def test_tolerance_follows_the_dtype() -> None:
    assert tolerance("int64") == (0.0, 0.0)
    assert tolerance("float32") == (1e-4, 1e-5)
