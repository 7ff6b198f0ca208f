import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.export.models import case

import kd_export
from kd_export.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefacts")
    model = case("nested")
    program = kd_export.export(model.module, model.example, metadata={"epoch": 3})
    program.save(path / "model.pt2")
    program.save(path / "model.onnx")
    save_file({"in.x": torch.ones(4, 3)}, path / "in.safetensors")
    return path


Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_inspect_prints_keys_and_shapes(folder: Path, capsys: Capture, suffix: str) -> None:
    assert main(["inspect", str(folder / f"model.{suffix}")]) == 0
    text = capsys.readouterr().out
    assert "('in', 'x')" in text
    assert "float32 (batch, 2)" in text
    assert "metadata epoch" in text
    assert "batch 1.." in text


def test_inspect_gives_json(folder: Path, capsys: Capture) -> None:
    assert main(["inspect", "--json", str(folder / "model.onnx")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"]["inputs"][0]["key"] == ["in", "x"]
    assert len(data["file"]["sha256"]) == 64


def test_verify_prints_the_differences(folder: Path, capsys: Capture) -> None:
    assert main(["verify", str(folder / "model.onnx"), "--batch-sizes", "1,7"]) == 0
    text = capsys.readouterr().out
    assert "largest difference" in text
    assert "batch=7" in text
    assert "batch=2" not in text


def test_verify_tells_a_mismatch(folder: Path, capsys: Capture) -> None:
    words = ["verify", str(folder / "model.onnx"), "--rtol", "0", "--atol=-1", "--json"]
    assert main(words) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_run_writes_outputs_by_wire_name(folder: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / "out.safetensors"
    path = str(folder / f"model.{suffix}")
    words = ["run", path, "-i", str(folder / "in.safetensors"), "-o", str(target), "--trusted"]
    assert main(words) == 0
    result = load_file(target)
    expected = kd_export.open(path, trusted=True).run({"in.x": torch.ones(4, 3)})
    assert torch.equal(result["out.image"], expected["out.image"])


def test_untrusted_file_is_code_4(folder: Path, capsys: Capture) -> None:
    assert main(["verify", str(folder / "model.pt2")]) == 4
    assert "trusted" in capsys.readouterr().err


def test_wrong_input_is_code_1(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    save_file({"x": torch.ones(4, 3)}, tmp_path / "in.safetensors")
    words = ["run", str(folder / "model.onnx"), "-i", str(tmp_path / "in.safetensors")]
    assert main([*words, "-o", str(tmp_path / "out.safetensors")]) == 1
    assert "`in.x` is missing" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


def test_damaged_file_is_code_2(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff")
    assert main(["inspect", str(tmp_path / "model.onnx")]) == 2
    assert "may be truncated" in capsys.readouterr().err


def test_unknown_format_is_code_3(capsys: Capture) -> None:
    assert main(["inspect", "model.tvm"]) == 3
    assert "no backend serves `model.tvm`" in capsys.readouterr().err


def test_unknown_command_is_code_2(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["dance"])
    assert "invalid choice" in capsys.readouterr().err


def test_terminal_gets_a_table_without_colour(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["verify", str(folder / "model.onnx")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\x1b\[(3[0-9]|9[0-9])", text) is None
    assert "┃" in text


def test_an_output_that_cannot_be_written_is_code_2(folder: Path, capsys: Capture) -> None:
    target = folder / "missing" / "out.safetensors"
    words = ["run", str(folder / "model.onnx"), "-i", str(folder / "in.safetensors")]
    assert main([*words, "-o", str(target)]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
