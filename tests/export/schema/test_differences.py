"""What two files say differently, read from their schemas alone."""

from dataclasses import replace

import pytest

from kd_export import Axis, Entry, Schema, Vector
from kd_export._schema.differences import (
    Difference,
    Differences,
    content_differences,
    interface_differences,
)

X = Entry(("x",), "x", "float32", ("batch", 3), -1.0, 1.0)
H = Entry(("state", "h"), "h", "float32", ("batch", 5), 0.0, 0.0)
Y = Entry(("y",), "y", "float32", ("batch",))
SCHEMA = Schema(
    inputs=(X, H),
    outputs=(Y,),
    axes={"batch": Axis()},
    batch_dims=1,
    metadata={"epoch": 1},
    versions={"torch": "2.13.0"},
    weights="00",
    vectors=(Vector({"batch": 2}, 0, {"y": (0.5, 1.0)}),),
)


def found(other: Schema, *, digests: bool = True) -> list[tuple[object, ...]]:
    rows = [
        *interface_differences(SCHEMA, other),
        *content_differences(SCHEMA, other, digests=digests),
    ]
    return [(row.what, row.name, row.one, row.other) for row in rows]


def test_a_schema_does_not_differ_from_itself() -> None:
    assert found(SCHEMA) == []
    assert found(replace(SCHEMA, inputs=(replace(X, name="other"), replace(H, name="o")))) == []


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"inputs": (X,)}, ("input", "state.h", "float32 (batch, 5)", None)),
        ({"inputs": (H, X)}, ("order of inputs", "", "x, state.h", "state.h, x")),
        (
            {"inputs": (replace(X, dtype="int64"), H)},
            ("input", "x", "float32 (batch, 3)", "int64 (batch, 3)"),
        ),
        ({"axes": {"batch": Axis(1, 8)}}, ("axis", "batch", "1..", "1..8")),
        ({"state": {"state.h": "y"}}, ("next of state", "state.h", None, "y")),
        ({"batch_dims": 0}, ("batch dimensions", "", "1", "0")),
        ({"mode": "mean"}, ("mode", "", None, "mean")),
        ({"metadata": {"epoch": "1"}}, ("metadata", "epoch", "1", '"1"')),
        ({"metadata": {"epoch": 1, "a": None}}, ("metadata", "a", None, "null")),
        ({"versions": {}}, ("version", "torch", "2.13.0", None)),
        ({"weights": "01"}, ("weights", "", "00", "01")),
    ],
)
def test_each_part_is_compared(changes: dict[str, object], row: tuple[object, ...]) -> None:
    other = replace(SCHEMA, **changes)  # type: ignore[arg-type]  # fields by name
    assert found(other) == [row]


def test_digests_of_two_kinds_are_not_compared() -> None:
    assert found(replace(SCHEMA, weights="01"), digests=False) == []


def with_results(*numbers: float) -> Schema:
    return replace(SCHEMA, vectors=(Vector({"batch": 2}, 0, {"y": numbers}),))


def test_results_of_the_same_test_are_compared() -> None:
    assert found(with_results(0.5, 1.25)) == [("result", "y at batch=2", "1.0", "1.25")]
    assert found(with_results(0.5000001, 1.0)) == []
    assert found(with_results(0.75, float("nan"))) == [("result", "y at batch=2", "1.0", "nan")]


def test_results_of_other_inputs_are_not_compared() -> None:
    other = replace(with_results(9.0, 9.0), inputs=(replace(X, low=-2.0), H))
    assert found(other) == []


def test_a_long_value_is_cut_in_the_table_alone() -> None:
    row = Difference("metadata", "a\x1b[2J", "x" * 100, None)
    differences = Differences("a.pt2", "b.pt2", (row,))
    lines = str(differences).splitlines()
    assert max(map(len, lines)) < 100
    assert "\x1b" not in str(differences)
    assert differences.to_data()["rows"] == [
        {"what": "metadata", "name": "a\x1b[2J", "one": "x" * 100, "other": None}
    ]
    assert "<td>-</td>" in differences._repr_html_()
