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


def captured(module: nn.Module, device: torch.device = DEVICE) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, (), {"x": given()["x"].to(device)}, strict=False)


def compile_and_run(name: str, folder: str) -> None:
    """Compile a module, load what was made, and compare; run in a process of its own."""
    device = torch.device("cpu") if "cpu" in name else DEVICE
    module = (model() if name == "keyed" else Plain()).to(device)
    path = torch._inductor.aoti_compile_and_package(
        captured(module, device), package_path=f"{folder}/{name}.pt2"
    )
    found = torch._inductor.aoti_load_package(path)(x=given()["x"].to(device))
    found = found if isinstance(found, (tuple, list)) else [found]
    expected = model()(x=given()["x"])[-1].to(device)
    torch.testing.assert_close(found[-1], expected, rtol=1e-4, atol=1e-4)


def save_and_run(name: str, folder: str) -> None:
    """Save a module of the GPU, and run the file on the CPU."""
    inner = model()
    path = Path(folder) / name
    kd_export.export(inner, given()).save(path)
    assert {each.device for each in inner.parameters()} == {DEVICE}
    found = kd_export.open(path, trusted=True).run(given().cpu())
    torch.testing.assert_close(
        torch.as_tensor(found["out", "y"]), inner(given())["out", "y"].cpu(), rtol=1e-4, atol=1e-4
    )


def outcome(call: str, name: str, folder: Path) -> int:
    """Return how a process ends that calls a function of this module.

    A crash of the loader of torch would end all tests, and is that of plain modules too.
    """
    code = f"from tests.gpu.metal import test_exported as t; t.{call}({name!r}, {str(folder)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(call, name, done.returncode, done.stderr[-2000:])
    return done.returncode


def test_torch_exports_and_loads_a_module_of_the_gpu(tmp_path: Path) -> None:
    torch.export.save(captured(model()), tmp_path / "plain.pt2")
    loaded = torch.export.load(tmp_path / "plain.pt2").module()
    assert_alike(loaded(x=given()["x"]), model()(x=given()["x"]))


def test_a_compiler_of_torch_makes_code_for_the_gpu(tmp_path: Path) -> None:
    plain = outcome("compile_and_run", "plain", tmp_path)
    assert plain <= 0, "torch compiles the plain module, or its loader crashes"
    assert outcome("compile_and_run", "keyed", tmp_path) == plain


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_file_of_a_module_of_the_gpu_runs_on_the_cpu(tmp_path: Path, suffix: str) -> None:
    save_and_run(f"model{suffix}", str(tmp_path))


def test_compiled_code_of_a_module_of_the_gpu_runs_on_the_cpu(tmp_path: Path) -> None:
    plain = outcome("compile_and_run", "plain_cpu", tmp_path)
    assert plain <= 0, "torch compiles the plain module, or its loader crashes"
    assert outcome("save_and_run", "model.aoti.pt2", tmp_path) == plain
