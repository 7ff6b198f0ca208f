"""Keyed modules of a GPU in files: captured there, compiled for it, and run from the file."""

from pathlib import Path

import pytest
import torch
from tests.gpu.device import DEVICE, assert_alike
from torch import nn

import kd_export
from kd_core import TensorDict
from kd_nn import TensorDictModule, TensorDictSequential

pytestmark = pytest.mark.filterwarnings("ignore")  # of inductor and the exporter


def model() -> TensorDictSequential:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 8), ["x"], ["h"]),
        TensorDictModule(nn.Tanh(), ["h"], ["h"]),
        TensorDictModule(nn.Linear(8, 4), ["h"], [("out", "y")]),
    ).to(DEVICE)


def given(rows: int = 4) -> TensorDict:
    torch.manual_seed(1)
    return TensorDict({"x": torch.rand(rows, 3, device=DEVICE)}, [rows])


def captured() -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model(), (), {"x": given()["x"]}, strict=False)


def test_torch_exports_and_loads_a_module_of_the_gpu(tmp_path: Path) -> None:
    torch.export.save(captured(), tmp_path / "plain.pt2")
    loaded = torch.export.load(tmp_path / "plain.pt2").module()
    assert_alike(loaded(x=given()["x"]), model()(x=given()["x"]))


def test_a_compiler_of_torch_makes_code_for_the_gpu(tmp_path: Path) -> None:
    path = torch._inductor.aoti_compile_and_package(
        captured(), package_path=str(tmp_path / "compiled.pt2")
    )
    loaded = torch._inductor.aoti_load_package(path)
    found = loaded(x=given()["x"])
    for mine, theirs in zip(found, model()(x=given()["x"]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("suffix", [".pt2", ".aoti.pt2", ".onnx"])
def test_a_file_of_a_module_of_the_gpu_runs_on_the_cpu(tmp_path: Path, suffix: str) -> None:
    inner = model()
    path = tmp_path / f"model{suffix}"
    kd_export.export(inner, given()).save(path)
    assert {each.device for each in inner.parameters()} == {DEVICE}
    found = kd_export.open(path, trusted=True).run(given().cpu())
    torch.testing.assert_close(
        torch.as_tensor(found["out", "y"]), inner(given())["out", "y"].cpu(), rtol=1e-4, atol=1e-4
    )
