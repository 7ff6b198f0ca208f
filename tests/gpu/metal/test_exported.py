"""Keyed modules of a GPU in files: captured there, compiled for it, and run from the file."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.gpu.device import DEVICE, assert_alike
from torch import Tensor, nn

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


class Plain(nn.Module):
    """What the keyed model computes, without keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def captured(module: nn.Module) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, (), {"x": given()["x"]}, strict=False)


def compile_and_run(name: str, folder: str) -> None:
    """Compile a module, load what was made, and compare; run in a process of its own."""
    module = Plain() if name == "plain" else model()
    path = torch._inductor.aoti_compile_and_package(
        captured(module), package_path=f"{folder}/{name}.pt2"
    )
    found = torch._inductor.aoti_load_package(path)(x=given()["x"])
    found = found if isinstance(found, (tuple, list)) else [found]
    torch.testing.assert_close(found[-1], model()(x=given()["x"])[-1], rtol=1e-4, atol=1e-4)


def test_torch_exports_and_loads_a_module_of_the_gpu(tmp_path: Path) -> None:
    torch.export.save(captured(model()), tmp_path / "plain.pt2")
    loaded = torch.export.load(tmp_path / "plain.pt2").module()
    assert_alike(loaded(x=given()["x"]), model()(x=given()["x"]))


def test_a_compiler_of_torch_makes_code_for_the_gpu(tmp_path: Path) -> None:
    # A crash of the loader of torch would end all tests, and is that of plain modules too.
    code = "import sys; from tests.gpu.metal.test_exported import compile_and_run as run; "
    outcomes = {}
    for name in ("plain", "keyed"):
        command = [sys.executable, "-c", f"{code}run({name!r}, {str(tmp_path)!r})"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        outcomes[name] = done.returncode
        print(name, done.returncode, done.stderr[-2000:])
    assert outcomes["keyed"] == outcomes["plain"]
    assert outcomes["plain"] <= 0, "torch compiles the plain module, or its loader crashes"


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
