"""Looking into stores, and the command line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kd_core import FormatError, TensorDict, lazy_stack, store
from kd_core.__main__ import main


def sample() -> TensorDict:
    rows = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    stack = lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])
    return TensorDict({"": torch.ones(2, 3), "rows": rows, "stack": stack, "w": ["p", "q"]}, [2])


LINES = """td [2]
  "": float32 [2, 3]
  rows: jagged float32, 2 rows
  stack: stack of 2 along dimension 0
    td []
      x: float32 [1]
    td []
      x: float32 [2]
  w: rows"""


@pytest.mark.parametrize("name", ["td.kd", "td.safetensors"])
def test_inspect_shows_what_is_there(name: str, tmp_path: Path) -> None:
    sample().save(tmp_path / name)
    info = store.inspect(tmp_path / name)
    assert "\n".join(info.lines) == LINES
    assert (info.leaves, info.parts, info.generation, len(info.files)) == (6, 1, 1, 1)
    assert store.check(tmp_path / name) == info


def test_inspect_shows_files_of_other_origins(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    info = store.inspect(tmp_path / "x.safetensors")
    assert (info.form, info.lines) == ("safetensors", ("td []", "  a: float32 [2]"))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "td.kd"
    for _ in range(2):
        TensorDict({"a": torch.arange(2)}, [2]).append_to(path)
    assert main(["inspect", str(path)]) == 0
    assert "2 parts" in capsys.readouterr().out
    assert main(["compact", str(path)]) == 0
    assert "generation 3, 1 file" in capsys.readouterr().out
    [segment, *_] = [path / name for name in store.inspect(path).files]
    segment.write_bytes(segment.read_bytes()[:-1] + b"\xff")
    assert main(["inspect", str(path)]) == 0
    assert main(["check", str(path)]) == 1
    assert "a checksum does not match" in capsys.readouterr().err
    assert main(["compact", str(path)]) == 1
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert main(["compact", str(tmp_path / "none")]) == 2


def test_check_names_what_is_damaged(tmp_path: Path) -> None:
    sample().save(tmp_path / "td.safetensors")
    data = (tmp_path / "td.safetensors").read_bytes()
    (tmp_path / "td.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FormatError, match=r"td\.safetensors` is damaged"):
        store.check(tmp_path / "td.safetensors")
