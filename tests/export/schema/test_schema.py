"""Schemas: their JSON form, and sizes that follow from an axis."""

import json
import math
import re
from dataclasses import replace
from importlib.resources import files

import pytest

from kd_export import (
    Axis,
    Budget,
    Entry,
    ExportError,
    KeyMismatch,
    Precision,
    Schema,
    SchemaVersion,
    Signal,
    Step,
    Vector,
)
from kd_export._schema.files import check_json
from kd_export._schema.schema import LinearSize

SCHEMA = Schema(
    inputs=(
        Entry(
            ("in", "x"),
            "in_x",
            "float32",
            ("batch", 3),
            -1.0,
            1.0,
            Signal(["a", "b", "c"], "m", "force", (None, [1, 2, None]), 50.0),
        ),
    ),
    outputs=(Entry(("out", "y"), "out.y", "int64", ("2*batch",)),),
    axes={"batch": Axis(1, 8)},
    mode="mean",
    metadata={"name": "policy", "step": 3, "tags": ["a", None]},
    versions={"torch": "2.13.0"},
    weights="00ff",
    vectors=(
        Vector({"batch": 2}, 0, {"out.y": (1, 2.5, True, math.inf)}),
        Vector({"batch": 1}, 1, {"out.y": (3,)}, inputs={"in.x": (0.5, -1, 0)}),
    ),
)


H = Entry(("h",), "h", "float32", ("batch", 2))
RECURRENT = replace(
    SCHEMA,
    inputs=(H, *SCHEMA.inputs),
    outputs=(H,),
    state={"h": "h"},
    initial={"h": (0.5, -math.inf)},
    steps=(Step("0.cell", "GRUCell(3, 2)", (("in", "x"), ("h",)), (("h",),)),),
    vectors=(),
    tolerance={"atol": 0.5},
    precision=Precision("int8", Budget(0.02, 0.005), ("0.cell",), 1024),
)


@pytest.mark.parametrize("schema", [SCHEMA, RECURRENT])
def test_json_round_trip(schema: Schema) -> None:
    assert Schema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize(
    "precision",
    [
        3,
        {"name": "int8"},
        {"name": "int8", "budget": {"max": -1}, "kept": [], "rows": 1},
        {"name": "int8", "budget": {"mx": 1}, "kept": [], "rows": 1},
        {"name": "int8", "budget": {"max": "nan"}, "kept": [], "rows": 1},
    ],
)
def test_a_damaged_precision_is_refused(precision: object) -> None:
    data = RECURRENT.to_data() | {"precision": precision}
    with pytest.raises(ExportError, match="the schema is damaged"):
        Schema.from_json(json.dumps(data))


@pytest.mark.parametrize("state", [{"x": "h"}, {"h": "x"}, {"in.x": "h"}, {"h": 1}, ["h"]])
def test_damaged_state_is_refused(state: object) -> None:
    data = RECURRENT.to_data() | {"state": state}
    with pytest.raises(ExportError, match="the schema is damaged"):
        Schema.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "initial", [{"in.x": [1, 2, 3]}, {"h": [1]}, {"h": "12"}, {"h": [1, "one"]}, {"z": []}, [1, 2]]
)
def test_damaged_start_of_a_state_is_refused(initial: object) -> None:
    data = RECURRENT.to_data() | {"initial": initial}
    with pytest.raises(ExportError, match="the schema is damaged"):
        Schema.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "step",
    [
        {"name": "0", "runs": "f", "reads": [[]], "writes": []},
        {"name": "0", "runs": "f", "reads": ["x"], "writes": []},
        {"name": 0, "runs": "f", "reads": [], "writes": []},
        {"name": "0", "runs": "f", "reads": []},
        "f",
    ],
)
def test_damaged_steps_are_refused(step: object) -> None:
    data = RECURRENT.to_data() | {"steps": [step]}
    with pytest.raises(ExportError, match="the schema is damaged"):
        Schema.from_json(json.dumps(data))


def test_json_is_strict() -> None:
    data = json.loads(SCHEMA.to_json())
    assert data["vectors"][0]["outputs"]["out.y"][-1] == "inf"
    assert data["inputs"][0]["key"] == ["in", "x"]
    assert data["inputs"][0]["wire"] == "in.x"


def test_newer_version_is_refused() -> None:
    data = SCHEMA.to_data() | {"version": 99}
    with pytest.raises(SchemaVersion, match="has version 99, this release reads 1"):
        Schema.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ExportError, match=r"schema"):
        Schema.from_json(text)


@pytest.mark.parametrize("field", ["inputs", "outputs", "axes", "vectors", "weights"])
@pytest.mark.parametrize("value", [None, 3, [3], {"a": 1}])
def test_damaged_field_is_refused(field: str, value: object) -> None:
    data = SCHEMA.to_data() | {field: value}
    with pytest.raises(ExportError, match="the schema is damaged"):
        Schema.from_json(json.dumps(data))


def test_entry_is_found_by_wire_name_and_by_key() -> None:
    assert SCHEMA.input("in.x") is SCHEMA.input(("in", "x")) is SCHEMA.inputs[0]


def test_unknown_entry_names_the_nearest() -> None:
    with pytest.raises(
        KeyMismatch, match=r"output `out\.z` not found.*Did you mean `out\.y`\?"
    ) as caught:
        SCHEMA.output("out.z")
    assert caught.value.key == ("out.z",)
    assert caught.value.expected == ("out.y",)


@pytest.mark.parametrize("value", [math.nan, (1,), {1: 2}, object(), [math.inf]])
def test_metadata_must_be_exact_json(value: object) -> None:
    with pytest.raises(ExportError, match="JSON cannot hold exactly"):
        check_json({"a": value})


def test_published_description_names_every_field() -> None:
    published = json.loads(files("kd_export").joinpath("schema_v1.json").read_text())
    data = SCHEMA.to_data()
    assert set(published["required"]) == set(data)
    assert set(published["properties"]) == set(RECURRENT.to_data())
    entry, vector = published["$defs"]["entry"], published["$defs"]["vector"]
    written = json.loads(SCHEMA.to_json())
    assert set(written["inputs"][0]) == set(entry["properties"])
    assert set(written["outputs"][0]) == set(entry["required"])
    drawn, held = written["vectors"]
    assert set(drawn) == set(vector["required"])
    signal = SCHEMA.inputs[0].signal
    assert signal is not None
    assert {"low", *signal.to_data()} == set(published["$defs"]["signal"]["properties"])
    assert set(held) == set(vector["properties"])
    assert published["properties"]["version"]["const"] == written["version"]


def test_a_dtype_is_one_that_torch_has() -> None:
    entry = Entry(("x",), "x", "float7", (2,))
    with pytest.raises(ExportError, match="expected a dtype, got 'float7'"):
        Schema.from_json(Schema((entry,), ()).to_json())


@pytest.mark.parametrize("size", ["rows", "n*m", "0*n", "n - 2", "2*rows", "n//2", "n + n", ""])
def test_axes_of_inputs_are_declared(size: str) -> None:
    entry = Entry(("x",), "x", "float32", (size,))
    with pytest.raises(ExportError, match=rf"unknown axis '{re.escape(size)}'"):
        Schema.from_json(Schema((entry,), (), {"n": Axis(), "m": Axis()}).to_json())


def test_a_schema_prints_as_a_table() -> None:
    assert repr(SCHEMA).splitlines() == [
        "Schema",
        "        key           wire name  dtype and shape",
        "input   ('in', 'x')   in.x       float32 (batch, 3)",
        "output  ('out', 'y')  out.y      int64 (2*batch,)",
    ]
    assert "<td>in.x</td>" in SCHEMA._repr_html_()


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("count", [100, 5000])
@pytest.mark.parametrize("field", ["inputs", "axes", "vectors", "weights", "versions", "mode"])
def test_a_damaged_schema_is_refused_at_once_whatever_it_holds(field: str, count: int) -> None:
    """The message does not repeat what the file holds."""
    deep = "[" * 300 + "]" * 300
    text = json.dumps(SCHEMA.to_data() | {field: "?"})
    text = text.replace('"?"', f"[{','.join([deep] * count)}]")
    with pytest.raises(ExportError, match=r"the schema is (damaged|not JSON)") as caught:
        Schema.from_json(text)
    assert len(str(caught.value)) < 1000


SIZES = [LinearSize("n", factor, offset) for factor in (1, 2, 3) for offset in (-2, 0, 1)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_size_is_read_as_it_is_written_and_solved_as_it_is_computed(size: LinearSize) -> None:
    assert LinearSize.parse(str(size)) == size
    values = {size.at(n): n for n in range(30)}
    for value in range(-3, 18):
        assert size.axis_at(value) == values.get(value)
    for other in SIZES:
        solved = size.solve(other)
        equal = {size.at(n): n for n in range(-50, 50)}
        if solved is not None:
            assert all(equal[other.at(m)] == solved.at(m) for m in range(9))
        else:
            assert any(other.at(m) not in equal for m in range(9))


@pytest.mark.parametrize(
    "text", ["", "2", "n*2", "-n", "0*n", "n+-1", "n + 1\n", "2**n", "n" * 300]
)
def test_other_texts_are_no_size(text: str) -> None:
    assert LinearSize.parse(text) is None
