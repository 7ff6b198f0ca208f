"""`strip` removes what tells of the machine and the data that a file was made with."""

import json
import warnings
import zipfile
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from tests.export.models import exported
from torch import Tensor, nn

import kd_export
from kd_export import UntrustedArtifact
from kd_export.cli import main, strip

HERE = Path(__file__).name.encode()
X = torch.arange(6.0).reshape(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def test_a_program_of_torch_runs_as_before(
    net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.pt2"
    torch.export.save(torch.export.export(net, (X,)), path, extra_files={"note.txt": "kept"})
    assert HERE in path.read_bytes()
    assert main(["strip", str(path), "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["bytes"]
    content = path.read_bytes()
    assert HERE not in content
    assert sizes == {"before": sizes["before"], "after": len(content)}
    assert sizes["after"] < sizes["before"]
    with zipfile.ZipFile(path) as archive:
        assert archive.read("model/data/sample_inputs/model.pt") == b""
    extra = {"note.txt": ""}
    program = torch.export.load(path, extra_files=extra)
    assert extra == {"note.txt": "kept"}
    assert torch.equal(program.module()(X), net(X))


def test_a_model_of_torch_runs_as_before(net: Net, tmp_path: Path) -> None:
    path = tmp_path / "theirs.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it calls inside
        torch.onnx.export(torch.export.export(net, (X,)), (), path, dynamo=True, verbose=False)
    assert HERE in path.read_bytes()
    strip(path)
    assert HERE not in path.read_bytes()
    session = onnxruntime.InferenceSession(path)
    (result,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    np.testing.assert_allclose(result, net(X).detach(), rtol=1e-5)


def test_what_we_write_holds_nothing_to_remove(tmp_path: Path) -> None:
    program = exported("nested")
    for name in ("ours.onnx", "ours.pt2"):
        path = tmp_path / name
        program.save(path)
        before = path.read_bytes()
        strip(path)
        assert (path.read_bytes() == before) is (name == "ours.onnx")  # the other is written anew
        assert kd_export.verify(path, trusted=True).ok


def test_a_forged_file_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "forged.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/archive_format", "pt2")
        archive.writestr("model/data/weights/evil.pkl", b"x")
    before = path.read_bytes()
    with pytest.raises(UntrustedArtifact, match=r"`model/data/weights/evil.pkl` is not part"):
        strip(path)
    assert path.read_bytes() == before
    assert main(["strip", str(path)]) == 4
    (tmp_path / "cut.onnx").write_bytes(b"\x0a\xff")
    assert main(["strip", str(tmp_path / "cut.onnx")]) == 2
    assert main(["strip", str(tmp_path / "model.xml")]) == 2
