import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from tests.export.models import case
from torch.export import ExportedProgram

import kd_export
from kd_export import BackendMissing, Runner, Schema
from kd_export._running import session as registry
from kd_export._running.torch_runner import run_program


class Toy:
    """A format that keeps programs in memory and writes the schema alone."""

    name = "toy"
    suffixes: tuple[str, ...] = (".toy", ".toy.json")
    executes = False

    def __init__(self) -> None:
        self.programs: dict[str, ExportedProgram] = {}

    def read_schema(self, file: BinaryIO) -> Schema:
        return Schema.from_json(file.read())

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        return schema

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        self.programs[schema.weights] = program
        path.write_text(schema.to_json(), encoding="utf-8")

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> Runner:
        return run_program(self.programs[json.loads(file.read())["weights"]], schema)

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        return None


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_known", dict(registry._known))


def test_registered_format_is_saved_verified_and_opened(tmp_path: Path) -> None:
    kd_export.register_backend(Toy())
    model = case("nested")
    for name in ("model.toy", "model.toy.json"):
        assert kd_export.save(model.module, tmp_path / name, model.example).ok
        assert kd_export.verify(tmp_path / name).ok
        session = kd_export.open(tmp_path / name)
        assert session.run({"in.x": torch.ones(2, 3)})["out.image"].shape == (2, 2)
    assert kd_export.backends()[".toy"] == "toy"


class Point:
    name = ".point"
    value = "tests.export.running.test_backend:toy"


toy = Toy()


def test_entry_point_adds_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str) -> Sequence[Point]:
        assert group == "kd_export.backends"
        return [Point()]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert registry.backend_for(Path("model.point")).name == "toy"


def test_unknown_format_lists_the_known(tmp_path: Path) -> None:
    model = case("nested")
    with pytest.raises(
        BackendMissing, match=r"no backend found for `m\.tvm`; available suffixes: .*`\.onnx`"
    ):
        kd_export.save(model.module, tmp_path / "m.tvm", model.example)


def test_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(BackendMissing, match=r'pip install "kd-export\[onnx\]"'):
        registry.require("kd_no_such_package", "onnx")
