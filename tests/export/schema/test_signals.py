"""What the numbers of entries mean: kept in the file, shown, compared, and checked for a robot."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import kd_export
from kd_export import (
    Axis,
    Entry,
    ExportError,
    KeyMismatch,
    Schema,
    ShapeMismatch,
    Signal,
    VerifyError,
)
from kd_export._clients import header
from kd_export._schema.onnx_file import plain_properties, sealed
from kd_export._schema.schema import check_limits, resolve_signals, space_signals
from kd_export.cli import main
from kd_nn import TensorDictModule

JOINTS = Signal(
    names=["hip", "knee", "ankle"],
    unit=["rad", "rad", "m"],
    kind="joint position",
    limits=(-1.5, [1.5, 2.0, None]),
    rate=50,
)


def schema(signal: Signal | None = JOINTS) -> Schema:
    entries = (Entry(("obs",), "obs", "float32", ("batch", 3), signal=signal),)
    outputs = (Entry(("action",), "action", "float32", ("batch", 2)),)
    return Schema(entries, outputs, {"batch": Axis()})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["obs"], out_keys=["action"])
    path = tmp_path_factory.mktemp("signals") / "policy.onnx"
    signals = {"obs": JOINTS, "action": Signal(kind="force", unit="N")}
    assert kd_export.save(module, path, {"obs": torch.zeros(2, 3)}, signals=signals).ok
    return path


def test_a_signal_survives_its_json_form() -> None:
    assert Schema.from_json(schema().to_json()) == schema()
    assert "signal" not in schema(None).to_json()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Signal(names=["a", "a"]), "a different name for each element"),
        (lambda: Signal(names="ab"), "a list of names"),
        (lambda: Signal(names=["a"], unit=["m", "s"]), "1 in `names`, 2 in `unit`"),
        (lambda: Signal(limits=(1.0, 1.0)), "a least value below the greatest"),
        (lambda: Signal(limits=(0, [1, -1])), "a least value below the greatest"),
        (lambda: Signal(limits=(0.0, math.inf)), "finite numbers, or None for no limit"),
        (lambda: Signal(limits=(0.0, True)), "finite numbers"),
        (lambda: Signal(rate=0), "a positive number of hertz"),
    ],
)
def test_a_wrong_signal_is_refused(make: Callable[[], Signal], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        make()


def test_a_signal_of_another_size_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match=r"3 elements, but the last dimension .* has 2"):
        resolve_signals(schema(), {"action": JOINTS})
    with pytest.raises(KeyMismatch, match="Did you mean `action`"):
        resolve_signals(schema(), {"actoin": Signal(unit="N")})
    with pytest.raises(ExportError, match="expected a `Signal` for 'action', got a dict"):
        resolve_signals(schema(), {"action": {"unit": "N"}})  # type: ignore[dict-item]  # the mistake


def test_a_property_that_contradicts_the_schema_is_found(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "policy.onnx"
    model = onnx.load(path)
    extra = model.metadata_props.add()
    extra.key, extra.value = "obs.color", "red"
    onnx.save(model, other)
    assert kd_export.verify(other).ok
    (names,) = [one for one in model.metadata_props if one.key == "obs.names"]
    names.value = "knee,hip,ankle"
    onnx.save(model, other)
    with pytest.raises(VerifyError, match=r"`obs\.names` .* 'knee,hip,ankle', but .*'hip,knee,ank"):
        kd_export.verify(other)
    assert main(["verify", str(other)]) == 1
    model.metadata_props.remove(names)
    onnx.save(model, other)
    assert kd_export.verify(other).ok


def test_limits_that_a_policy_exceeds_are_refused() -> None:
    known: dict[tuple[str, ...], Signal] = {("action",): Signal(limits=([-4, -3], 4))}

    def check(limits: tuple[float | None, float | None]) -> None:
        check_limits(resolve_signals(schema(), {"action": Signal(limits=limits)}), known)

    for limits in ((-4, 4), (-5, 9), (None, 4), (-4, None)):
        check(limits)
    with pytest.raises(ExportError, match=r"element 0 of `action` are -1\.\.1, .* gives -4\.\.4"):
        check((-1, 1))
    with pytest.raises(ExportError, match=r"element 1 of `action` are -2\.\.5, .* gives -3\.\.4"):
        check_limits(resolve_signals(schema(), {"action": Signal(limits=([-4, -2], 5))}), known)


def test_an_unknown_key_lists_the_entries() -> None:
    with pytest.raises(KeyMismatch, match="available entries: `obs`, `action`"):
        resolve_signals(schema(), {"x": Signal(unit="N")})


def test_a_damaged_signal_is_refused() -> None:
    data = json.loads(schema().to_json())
    for wrong in ({"names": ["a"]}, {"rate": -1}, {"color": "red"}, {"low": "x"}, 3):
        data["inputs"][0]["signal"] = wrong
        with pytest.raises(ExportError, match="the schema is damaged"):
            Schema.from_json(json.dumps(data))


def test_limits_of_spaces_hold_where_nothing_else_was_said() -> None:
    box = {"space": "Box", "shape": [2], "dtype": "float32", "low": -2, "high": [2, None]}
    image = {"space": "Box", "shape": [4, 4, 3], "dtype": "uint8", "low": 0, "high": 255}
    metadata = {
        "action": box,
        "observation": {"space": "Dict", "entries": {"camera": image}},
        "algorithm": "PPO",
    }
    known = space_signals(metadata)
    assert known["observation", "camera"] == Signal(kind="image", limits=(0, 255))
    found = resolve_signals(schema(), {"action": Signal(names=["left", "right"])}, known)
    assert found.output("action").signal == Signal(names=["left", "right"], limits=(-2, [2, None]))


def test_a_robot_with_another_order_is_refused() -> None:
    schema().check_names({"obs": ["hip", "knee", "ankle"]})
    with pytest.raises(
        KeyMismatch,
        match="element 1 is `knee` in the file and `ankle` on the robot, where `knee` is element 2",
    ):
        schema().check_names({"obs": ["hip", "ankle", "knee"]})
    with pytest.raises(KeyMismatch, match=r"`ankle` not found on the robot; `ankel` not found in"):
        schema().check_names({"obs": ["hip", "knee", "ankel"]})
    with pytest.raises(KeyMismatch, match="has 3 elements, the robot lists 4"):
        schema().check_names({"obs": ["hip", "knee", "ankle", "hip"]})
    with pytest.raises(KeyMismatch, match="does not say the names"):
        schema().check_names({"action": ["left", "right"]})


def test_open_compares_with_a_robot(path: Path) -> None:
    session = kd_export.open(path, robot={"obs": ["hip", "knee", "ankle"]})
    assert session.schema.input("obs").signal == JOINTS
    with pytest.raises(KeyMismatch, match=r"`policy\.onnx`: `obs` has another order"):
        kd_export.open(path, robot={"obs": ["knee", "hip", "ankle"]})


def test_inspect_shows_signals(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["obs", "1", "knee", "rad", "joint", "position", "-1.5..2", "50", "Hz"] in rows
    assert ["action", "all", "N", "force"] in rows


def test_a_model_has_plain_properties(path: Path) -> None:
    named = {one.key: one.value for one in onnx.load(path).metadata_props}
    assert named["obs.names"] == "hip,knee,ankle"
    assert named["obs.high"] == "1.5,2.0,"
    assert named["action.unit"] == "N"
    assert plain_properties(named["kd_export"]).items() <= named.items()


def test_sealing_again_keeps_one_of_each_property(path: Path) -> None:
    text = kd_export.inspect(path).to_json().replace("ankle", "heel")
    model = onnx.load_from_string(b"".join(sealed(memoryview(path.read_bytes()), text)))
    names = [one.key for one in model.metadata_props]
    assert len(set(names)) == len(names)
    assert {one.key: one.value for one in model.metadata_props}["obs.names"] == "hip,knee,heel"


def test_two_files_differ_in_a_name_at_its_place(path: Path, tmp_path: Path) -> None:
    text = kd_export.inspect(path).to_json().replace('"hip","knee"', '"knee","hip"')
    other = tmp_path / "other.onnx"
    other.write_bytes(b"".join(sealed(memoryview(path.read_bytes()), text)))
    found = kd_export.diff(path, other, interface=True)
    assert [(row.what, row.name, row.one, row.other) for row in found.rows] == [
        ("names of input", "obs[0]", "hip", "knee"),
        ("names of input", "obs[1]", "knee", "hip"),
    ]


def test_two_files_differ_in_plain_properties(path: Path, tmp_path: Path) -> None:
    other, model = tmp_path / "other.onnx", onnx.load(path)
    named = {one.key: one for one in model.metadata_props}
    named["obs.unit"].value = "degree"
    note = model.metadata_props.add()
    note.key, note.value = "licence", "MIT"
    onnx.save(model, other)
    found = kd_export.diff(path, other)
    assert [(row.what, row.name, row.one, row.other) for row in found.rows] == [
        ("property", "obs.unit", None, "degree"),
        ("property", "licence", None, "MIT"),
    ]
    assert kd_export.diff(path, other, interface=True).same


def test_the_header_has_elements(path: Path) -> None:
    text = header(kd_export.inspect(path), "policy")
    assert '{"knee", "rad", "joint position", -1.5, 2.0}' in text
    assert '{"ankle", "m", "joint position", -1.5, INFINITY}' in text
    assert "policy_input_obs_elements, 50.0}" in text
