"""Files of earlier versions must still open, verify and give the same numbers.

`golden` holds one file of each format, written with torch 2.10 (`.pt2`, `.onnx`), OpenVINO 2026.4
(`.xml`) or ExecuTorch 1.5 (`.pte`). Never replace one: add another when the schema, or what a
backend writes, changes.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.export.models import saved

import kd_export

GOLDEN = Path(__file__).parent / "golden"
RUNTIMES = {".pt2": "torch", ".onnx": "onnxruntime", ".xml": "openvino", ".pte": "executorch"}
FILES = sorted(path.name for path in GOLDEN.iterdir() if path.suffix in RUNTIMES)
X, H = torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(0, 1, 10).reshape(2, 5)
# What the module gave when it was exported.
Y = [[-0.1238, 0.2821, -0.0716, 0.0249, 0.3732], [0.2833, 0.0679, 0.4444, 0.3931, -0.0377]]


def skip_without_runtime(name: str) -> None:
    runtime = RUNTIMES[Path(name).suffix]
    if importlib.util.find_spec(runtime) is None:
        pytest.skip(f"the lane `formats` installs {runtime}")


@pytest.mark.parametrize("name", FILES)
def test_its_schema_is_read(name: str) -> None:
    schema = kd_export.inspect(GOLDEN / name)
    assert [entry.key for entry in schema.inputs] == [("x",), ("state", "h")]
    assert schema.output(("next", "h")).describe() == "float32 (batch, 5)"
    assert str(schema.axes["batch"]) == "1..64"
    assert schema.metadata == {"epoch": 3, "note": "é"}


@pytest.mark.parametrize("name", FILES)
def test_it_verifies_and_gives_the_same_numbers(name: str) -> None:
    skip_without_runtime(name)
    assert kd_export.verify(GOLDEN / name, trusted=True).ok
    found = kd_export.open(GOLDEN / name, trusted=True).run({"x": X, "state.h": H})
    torch.testing.assert_close(found["y"], torch.tensor(Y), atol=1e-3, rtol=0)


def test_a_new_file_has_the_same_interface(tmp_path: Path) -> None:
    new = saved("gru", tmp_path / "gru.pt2", dynamic={"batch": (1, 64)})
    assert kd_export.diff(GOLDEN / "gru.pt2", new, interface=True).same
