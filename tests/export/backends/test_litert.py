"""LiteRT: in the lane `litert`, which installs it."""

import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.export.models import CASES, Do, Keyed, bounded, case
from tests.tables import REDUCTIONS, Record, reduced
from torch import nn

import kd_export
from kd_export import ExportError, NotExportable, ShapeMismatch, UntrustedArtifact, VerifyError

pytest.importorskip("litert_torch", reason="the lane `litert` installs it")


@pytest.mark.parametrize("name", [name for name in CASES if name != "graph"])
def test_file_gives_what_the_module_gives(name: str, tmp_path: Path) -> None:
    model, path = case(name), tmp_path / f"{name}.tflite"
    dynamic = bounded(model.dynamic, (1, 2), (2, 3))  # each size is a signature
    program = kd_export.export(model.module, model.example, dynamic=dynamic)
    assert program.save(path).ok
    assert kd_export.verify(path, model.module, trusted=True).ok


def test_what_the_runtime_does_not_compute_is_refused(tmp_path: Path) -> None:
    model = case("graph")
    program = kd_export.export(model.module, model.example, dynamic=None)
    with pytest.raises(VerifyError, match="STABLEHLO_SCATTER"):
        program.save(tmp_path / "graph.tflite")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, target = case("gru"), tmp_path_factory.mktemp("artefacts") / "gru.tflite"
    state = {("state", "h"): ("next", "h")}
    kd_export.save(model.module, target, model.example, dynamic={"batch": (1, 3)}, state=state)
    return target


def test_other_sizes_than_those_of_a_signature_are_refused(path: Path) -> None:
    session = kd_export.open(path, trusted=True)
    assert session.step({"x": torch.randn(3, 3)})["y"].shape[0] == 3
    session.reset()
    with pytest.raises(ShapeMismatch, match=r"The axis `batch` ranges over 1\.\.3\."):
        session.step({"x": torch.randn(4, 3)})


def test_nan_is_refused(path: Path) -> None:
    """LiteRT makes a number of it, such as -1 by an ELU."""
    session = kd_export.open(path, trusted=True)
    with pytest.raises(ExportError, match=r"`x` holds NaN.*nan_to_num.*\.onnx"):
        session.step({"x": torch.full((2, 3), math.nan)})


def test_threads_share_a_session(path: Path) -> None:
    session = kd_export.open(path, trusted=True)
    rows = [torch.full((3, 3), float(i)) for i in range(8)]
    h = torch.zeros(3, 5)
    alone = [session.run({"x": x, "state.h": h})["y"] for x in rows]

    def run(place: int) -> bool:
        x = rows[place % 8]
        return torch.equal(session.run({"x": x, "state.h": h})["y"], alone[place % 8])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(1000)))


def test_a_state_is_carried(path: Path) -> None:
    session, module = kd_export.open(path, trusted=True), case("gru").module
    state = torch.zeros(2, 5)
    for step in range(20):
        x = torch.randn(2, 3)
        result = session.step({"x": x})
        with torch.no_grad():
            y, state = module.net(x, state)
        torch.testing.assert_close(result["y"], y, rtol=1e-4, atol=1e-5)
        if step % 7 == 0:
            session.reset(torch.tensor([False, True]))
            state[1] = 0


def test_the_schema_is_read_without_trust(path: Path) -> None:
    schema = kd_export.inspect(path)
    assert schema.state == {"state.h": "next.h"}
    assert "ai-edge-litert" in schema.versions
    with pytest.raises(UntrustedArtifact):
        kd_export.open(path)


def test_changed_and_cut_files_are_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    changed = tmp_path / "changed.tflite"
    changed.write_bytes(content[:600] + bytes([content[600] ^ 1]) + content[601:])
    with pytest.raises(ExportError, match="weights"):
        kd_export.open(changed, trusted=True)
    for size in (0, 5, 100, len(content) // 2, len(content) - 3):
        changed.write_bytes(content[:size])
        with pytest.raises(ExportError):
            kd_export.inspect(changed)


def test_sizes_that_cannot_be_listed_are_refused(tmp_path: Path) -> None:
    module = Keyed(Do(lambda x: x * 2), ["x"], ["y"])
    for dynamic, told in (("batch", "`batch` has no maximum"), ({"batch": (1, 99)}, "99 of them")):
        program = kd_export.export(module, {"x": torch.ones(2, 3)}, dynamic=dynamic)
        with pytest.raises(NotExportable, match=f"{told}.*Pass ranges to `export`, such as"):
            program.save(tmp_path / "a.tflite")
    assert not list(tmp_path.iterdir())


def test_what_it_cannot_express_is_told(tmp_path: Path) -> None:
    module = Keyed(Do(torch.linalg.det), ["x"], ["y"])
    program = kd_export.export(module, {"x": torch.randn(1, 3, 3)}, dynamic=None)
    with pytest.raises(NotExportable, match="LiteRT cannot express the program"):
        program.save(tmp_path / "a.tflite")
    assert not list(tmp_path.iterdir())


def test_an_operator_that_it_lacks_is_told_without_a_path(tmp_path: Path) -> None:
    module = Keyed(Do(torch.sqrt), ["x"], ["y"])
    program = kd_export.export(module, {"x": torch.rand(1, 3).double()}, dynamic=None)
    with pytest.raises(NotExportable, match=r"no operator `sqrt` of `\(tensor<1x3xf64>\)`"):
        program.save(tmp_path / "a.tflite")


LIMITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda x: x.clamp(-1.5, 0.3),
    "clamp of tensors": lambda x: x.clamp(-torch.ones(3).double(), torch.ones(3).double()),
    "least": lambda x: x.clamp(min=0.1),
    "clamp_max": lambda x: torch.clamp_max(x, 0.1),
    "maximum": lambda x: torch.maximum(x, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)),
    "minimum": lambda x: torch.minimum(x, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)),
    "relu": lambda x: x.relu(),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_of_doubles_are_set(limit: str, tmp_path: Path) -> None:
    """As normalisers set them that hold float64; LiteRT computes such numbers in float32."""
    mean = torch.tensor([1.1, 2.2, 3.3], dtype=torch.float64)
    module = Keyed(Do(lambda x: LIMITS[limit]((x - mean) / 0.7).float()), ["x"], ["y"])
    path = tmp_path / "a.tflite"
    program = kd_export.export(module, {"x": torch.randn(2, 3)}, dynamic={"batch": (1, 2)})
    assert program.save(path).ok
    x = 9 * torch.randn(2, 3)
    result = kd_export.open(path, trusted=True).run({"x": x})["y"]
    torch.testing.assert_close(result, module.net(x), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def program() -> kd_export.KeyedProgram:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, 2))
    module = Keyed(net, ["x"], ["y"])
    return kd_export.export(module, {"x": torch.randn(1, 8)}, dynamic={"batch": (1, 2)})


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "fp16"])
def test_fewer_bits_stay_within_their_budget(
    program: kd_export.KeyedProgram, precision: str, tmp_path: Path, record_property: Record
) -> None:
    path, rows = tmp_path / "a.tflite", {"x": torch.randn(600, 8)}
    report = program.save(
        path, precision=precision, calibration=rows, budget={"max": 0.1, "rms": 0.02}
    )
    record_property(REDUCTIONS, reduced(".tflite", report))
    assert report.reduction is not None
    assert report.reduction.bytes < report.reduction.other_bytes
    assert len(report.reduction.layers) == 3
    assert kd_export.verify(path, trusted=True).ok


def test_a_budget_that_cannot_be_met_writes_nothing(
    program: kd_export.KeyedProgram, tmp_path: Path
) -> None:
    rows = {"x": torch.randn(64, 8)}
    with pytest.raises(VerifyError, match="int8-weights cannot meet the budget"):
        program.save(
            tmp_path / "a.tflite", precision="int8-weights", calibration=rows, budget={"max": 1e-9}
        )
    assert not list(tmp_path.iterdir())


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["kd_core"] = sys.modules["litert_torch"] = None
import numpy, kd_export
session = kd_export.open(sys.argv[1], trusted=True)
print(session.step({"x": numpy.ones((2, 3), "float32")})["y"].shape)
"""


def test_it_runs_where_torch_is_not(path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    assert told.stdout.splitlines()[-1] == "(2, 5)"
