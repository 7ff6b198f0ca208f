"""Further runtimes for an ONNX file: what each gives, and which setting makes it agree."""

import importlib.util
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import kd_export
from kd_export import BackendMissing, ExportError, Schema
from kd_export._backends import onnx
from kd_export._backends.onnx import Run
from kd_nn import TensorDictModule

INSTALLED = [
    name
    for name, package in (("reference", "onnx"), ("openvino", "openvino"), ("tract", "tract"))
    if importlib.util.find_spec(package)
]


@pytest.fixture(scope="module")
def module() -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return TensorDictModule(net, ["x"], [("out", "y")])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, module: TensorDictModule) -> Path:
    path = tmp_path_factory.mktemp("artefacts") / "policy.onnx"
    kd_export.save(module, path, {"x": torch.randn(4, 3)}, batch_sizes=(2,))
    return path


@pytest.mark.parametrize("name", INSTALLED)
def test_other_runtimes_agree(path: Path, module: TensorDictModule, name: str) -> None:
    report = kd_export.verify(path, also=[name])
    assert report.ok
    half = len(report.rows) // 2
    assert [row.sizes for row in report.rows[half:]] == [row.sizes for row in report.rows[:half]]
    # A processor with numbers of 16 bits makes OpenVINO need a setting, which the note names.
    assert all(row.note.startswith(f"(by {name}") for row in report.rows[half:])
    assert kd_export.verify(path, module, also=name).ok


def answering(
    offsets: Mapping[str, float], path: Path
) -> Callable[[bytes, Schema], Mapping[str, Run]]:
    """A runtime that is off by a number, by what is set in it."""
    own = kd_export.open(path).runner

    def off_by(offset: float) -> Run:
        return lambda arrays: [numpy.asarray(one) + numpy.float32(offset) for one in own(arrays)]

    return lambda model, schema: {word: off_by(offset) for word, offset in offsets.items()}


def test_the_setting_that_makes_a_runtime_agree_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = answering({"": 0.25, "PRECISION=f32": 0.0}, path)
    monkeypatch.setitem(onnx.RUNTIMES, "openvino", made)
    report = kd_export.verify(path, also=["openvino"])
    assert report.ok
    assert report.notes == ("openvino is off by 0.25 as it is: set PRECISION=f32.",)
    assert report.rows[-1].note == "(by openvino with PRECISION=f32)"


def test_a_runtime_that_differs_is_a_mismatch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(onnx.RUNTIMES, "tract", answering({"": 0.25}, path))
    report = kd_export.verify(path, also=["tract"])
    assert not report.ok
    assert all(row.ok == ("tract" not in row.note) for row in report.rows)


def test_a_runtime_that_cannot_load_the_file_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: bytes, schema: Schema) -> Mapping[str, Run]:
        raise ValueError("no such operator")

    monkeypatch.setitem(onnx.RUNTIMES, "tract", failing)
    report = kd_export.verify(path, also=["tract"])
    assert not report.ok
    assert "tract cannot load the file: no such operator" in report.notes[0]


def test_a_runtime_that_is_not_installed_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(model: bytes, schema: Schema) -> Mapping[str, Run]:
        raise BackendMissing("this needs `tract`, which is not installed.")

    monkeypatch.setitem(onnx.RUNTIMES, "tract", missing)
    with pytest.raises(BackendMissing, match="needs `tract`"):
        kd_export.verify(path, also=["tract"])


def test_runtimes_are_checked(path: Path, tmp_path: Path, module: TensorDictModule) -> None:
    with pytest.raises(ExportError, match=r"expected runtimes for `also`, got 'tracked'.*`tract`"):
        kd_export.verify(path, also=["tracked"])
    kd_export.save(module, tmp_path / "a.pt2", {"x": torch.randn(4, 3)}, batch_sizes=[2])
    with pytest.raises(ExportError, match=r"`also` cannot be combined with torch\.export"):
        kd_export.verify(tmp_path / "a.pt2", also=["reference"], trusted=True)
    with pytest.raises(ExportError, match=r"`threads` cannot.*torch\.set_num_threads"):
        kd_export.open(tmp_path / "a.pt2", trusted=True, threads=1)


def test_a_session_is_set_up(path: Path) -> None:
    session = kd_export.open(path, threads=1, providers=["CPUExecutionProvider"])
    x = {"x": numpy.ones((2, 3), numpy.float32)}
    assert numpy.allclose(session(x)["out.y"], kd_export.open(path).run(x)["out.y"])
    with pytest.raises(ExportError, match=r"got 'CPU'; available here: .*CPUExecutionProvider"):
        kd_export.open(path, providers=["CPU"])
    with pytest.raises(ExportError, match="`threads` must be a positive int, got 0"):
        kd_export.open(path, threads=0)


def test_a_session_is_callable_and_pickled_by_its_path(path: Path) -> None:
    session = kd_export.open(path, threads=1)
    again = pickle.loads(pickle.dumps(session))
    x = {"x": numpy.ones((2, 3), numpy.float32)}
    assert numpy.array_equal(again(x)["out.y"], session(x, ["out.y"])["out.y"])
    assert again.source == session.source
    with pytest.raises(ExportError, match="the session is not of a file"):
        pickle.dumps(kd_export.Session(session.schema, session.runner))
