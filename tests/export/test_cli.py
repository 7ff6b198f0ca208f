import json
import logging
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.export.models import case

import kd_export
from kd_core import TensorDict, store
from kd_export import Axis, Entry, KeyMismatch, Schema
from kd_export._clients import header
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
    assert "1e-05 + 0.0001 * abs(expected)" in text


def test_verify_applies_the_tolerance_that_is_given(folder: Path, capsys: Capture) -> None:
    assert main(["verify", str(folder / "model.onnx"), "--rtol", "1e-3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["rtol"], row["atol"]) for row in rows} == {(1e-3, 0.0)}


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
    assert "input `in.x` not found" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


def test_damaged_file_is_code_2(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff")
    assert main(["inspect", str(tmp_path / "model.onnx")]) == 2
    assert "may be truncated" in capsys.readouterr().err


def test_unknown_format_is_code_3(capsys: Capture) -> None:
    assert main(["inspect", "model.tvm"]) == 3
    assert "no backend found for `model.tvm`" in capsys.readouterr().err


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


def test_terminal_gets_a_bar_of_the_stages(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with store.progress():
        assert main(["verify", str(folder / "model.onnx"), "--json"]) == 0
    told = capsys.readouterr()
    assert "run `model.onnx`" in told.err
    assert json.loads(told.out)["ok"] is True
    assert logging.getLogger("kd_export").handlers == []


def test_bash_completes_commands_and_options(capsys: Capture) -> None:
    assert main(["completion", "bash"]) == 0
    ask = 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _kd_export; echo "${COMPREPLY[@]}"'
    lines = [capsys.readouterr().out]
    for words in ("ver", "verify m.onnx --b", "verify m", "completion zsh --j"):
        lines.append(f"COMP_WORDS=(kd-export {words}); {ask}")
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["verify", "--batch-sizes", "", "--json"]
    assert main(["completion", "fish"]) == 0
    assert "complete -c kd-export -n '__fish_seen_subcommand_from verify' -l rtol\n" in (
        capsys.readouterr().out
    )


def test_an_output_that_cannot_be_written_is_code_2(folder: Path, capsys: Capture) -> None:
    target = folder / "missing" / "out.safetensors"
    words = ["run", str(folder / "model.onnx"), "-i", str(folder / "in.safetensors")]
    assert main([*words, "-o", str(target)]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


PLAIN = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout

from importlib.machinery import PathFinder

class Filtered(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in ("numpy", "onnx", "onnxruntime", "onnxscript", "rich"):
            return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Filtered if f is PathFinder else f for f in sys.meta_path]
import warnings
warnings.simplefilter("ignore")
from kd_export.cli import main
for line in sys.stdin:
    told = io.StringIO()
    with redirect_stderr(told), redirect_stdout(io.StringIO()):
        code = main(json.loads(line))
    print(json.dumps([code, told.getvalue()]))
"""


def test_each_command_after_a_plain_installation(folder: Path, tmp_path: Path) -> None:
    """Without numpy, onnx, onnxruntime and rich: it works, or says what to install."""
    run = ["-i", str(folder / "in.safetensors"), "-o", str(tmp_path / "out.safetensors")]
    commands = [
        ["inspect", str(folder / "model.pt2")],
        ["inspect", str(folder / "model.onnx")],
        ["verify", str(folder / "model.pt2"), "--trusted"],
        ["verify", str(folder / "model.onnx")],
        ["run", str(folder / "model.onnx"), *run],
        ["run", str(folder / "model.pt2"), "--trusted", *run],
    ]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        input="\n".join(map(json.dumps, commands)),
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in found] == [0, 0, 0, 3, 3, 3]
    assert [re.findall(r"kd-export\[\w+\]", told) for _, told in found[3:]] == [
        ["kd-export[onnx]"], ["kd-export[onnx]"], ["kd-export[cli]"],
    ]  # fmt: skip


def test_only_a_regular_file_is_an_input(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["run", str(folder / "model.onnx"), "-i", "/dev/zero"]
    assert main([*words, "-o", str(tmp_path / "out.safetensors")]) == 2
    assert "`/dev/zero` is not a regular file" in capsys.readouterr().err


def test_convert_writes_another_format(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["convert", str(folder / "model.pt2"), str(tmp_path / "new.onnx")]
    assert main(words) == 4
    assert "executes the program" in capsys.readouterr().err
    assert main([*words, "--trusted", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["convert", *words[:0:-1], "--trusted"]) == 2
    assert "cannot be turned back" in capsys.readouterr().err


def test_diff_tells_what_differs(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    one, other = folder / "model.pt2", folder / "model.onnx"
    assert main(["diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == f"{one} and {one} do not differ\n"
    assert main(["diff", str(one), str(other), "--interface"]) == 0
    capsys.readouterr()
    assert main(["diff", str(one), str(other), "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["what"], row["name"], row["one"]) == ("version", "onnxscript", None)
    model = case("nested")
    for weight in model.module.parameters():
        weight.data += 1
    kd_export.save(model.module, tmp_path / "new.pt2", model.example, metadata={"epoch": 4})
    assert main(["diff", str(one), str(tmp_path / "new.pt2")]) == 1
    told = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["differs", "metadata", "weights", *["result"] * 5]
    assert main(["diff", str(one), str(tmp_path / "none.pt2")]) == 2


def test_bench_times_stored_and_other_sizes(folder: Path, capsys: Capture) -> None:
    files = [str(folder / f"model.{suffix}") for suffix in ("pt2", "onnx")]
    words = ["bench", *files, "--seconds", "0.001", "--trusted"]
    assert main(words) == 0
    tables = capsys.readouterr().out.splitlines()
    assert len(tables) == 1 + 2 * len(kd_export.inspect(files[0]).vectors)
    assert main([*words, "--batch-sizes", "2,50", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["sizes"]["batch"] for row in rows] == [2, 50, 2, 50]
    assert all(0 < row["best"] <= row["seconds"] for row in rows)
    assert main(["bench", files[0]]) == 4
    capsys.readouterr()
    for seconds in ("nan", "inf", "-1"):
        assert main(["bench", files[1], f"--seconds={seconds}"]) == 2
        assert f"got `{float(seconds)}`" in capsys.readouterr().err


PROGRAM = r"""
#include "policy.h"
#include "odd.h"
#include <string.h>

int main(void) {
  if (POLICY_INPUT_COUNT != 1 || POLICY_INPUT_IN_X != 0 || ODD_INPUT_COUNT != 4) return 1;
  if (strcmp(policy_inputs[POLICY_INPUT_IN_X].name, "in.x")) return 2;
  if (strcmp(policy_outputs[0].wire, "out.image") || policy_outputs[0].dims != 2) return 3;
  if (policy_input_in_x_shape[0].axis != 0 || policy_input_in_x_shape[1].size != 3) return 4;
  if (strcmp(policy_axes[0].name, "batch") || policy_axes[0].max != -1) return 5;
  if (strcmp(odd_inputs[0].name, "a\\\"?" "?/\n*/\303\251")) return 6;
  if (odd_inputs[0].next != 1 || odd_inputs[1].next != -1 || odd_inputs[3].dims != 0) return 7;
  const odd_dim *dim = odd_inputs[1].shape;
  if (dim[0].axis != 0 || dim[0].factor != 2 || dim[0].offset != -1) return 8;
  return odd_outputs[0].shape[0].axis == -2 ? 0 : 9;
}
"""


def test_a_header_compiles_as_c_and_cpp(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "policy.h"
    assert main(["header", str(folder / "model.onnx"), "-o", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["header", str(folder / "model.pt2")]) == 0
    assert "#ifndef MODEL_H" in capsys.readouterr().out
    target.write_text(header(kd_export.inspect(folder / "model.onnx"), "policy"))
    wires = [('a\\"??/\n*/\u00e9',), ("X",), ("x",), ("count",)]
    shapes = [("n",), ("2*n - 1", 3), (0,), ()]
    entries = [Entry(w, w[0], "int64", s) for w, s in zip(wires, shapes, strict=True)]
    outputs = (Entry(("y",), "y", "bool", ("n*n",)), Entry(("h",), "h", "int64", ("n",)))
    schema = Schema(tuple(entries), outputs, {"n": Axis(1, 1 << 40)}, state={entries[0].wire: "h"})
    (tmp_path / "odd.h").write_text(header(schema, "odd"), encoding="ascii")
    compiler = next((path for path in map(shutil.which, ("g++", "clang++")) if path), None)
    assert compiler is not None, "the tests need a C++ compiler, as AOTInductor does"
    for language in ("c", "c++"):
        (tmp_path / "main.c").write_text(PROGRAM)
        words = [compiler, "-x", language, "-Wall", "-Werror", "-Wno-unused-const-variable"]
        subprocess.run([*words, "main.c", "-o", "main"], cwd=tmp_path, check=True)
        assert subprocess.run([tmp_path / "main"], check=False).returncode == 0


def test_doctor_tells_what_to_install(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", ".pt2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["packages"]["torch"] == version("torch")
    assert {row["suffix"] for row in data["formats"]} >= {".pt2", ".onnx", ".aoti.pt2", ".xml"}
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor", ".xml"]) == 3
    told = capsys.readouterr()
    assert 'pip install "kd-export[openvino]"' in told.out
    assert told.err == "kd-export: not usable: .xml\n"
    assert main(["doctor"]) == 0
    assert main(["doctor", ".zip"]) == 3


FACTORY = """
import torch
from kd_nn import TensorDictModule

def policy():
    module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    return module, {"x": torch.zeros(1, 3)}, {"dynamic": {"rows": (1, 8)}}

def spectrum():
    return TensorDictModule(torch.fft.rfft, in_keys=["x"], out_keys=["y"]), {"x": torch.ones(2, 8)}

def broken():
    raise ValueError("no data here")

wrong = 3
surplus = (1, 2, {"batch": 3})
"""


def test_export_and_diagnose_take_own_code(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kd_test_train.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert main(["export", "kd_test_train:policy", "policy.pt2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert kd_export.inspect("policy.pt2").axes == {"rows": Axis(1, 8)}
    assert main(["diagnose", "kd_test_train:spectrum", "--targets", ".onnx"]) == 1
    assert "REFUSED" in capsys.readouterr().out
    for place, message in (
        ("kd_test_train", "expected `package.module:attribute`, got `kd_test_train`"),
        ("kd_test_other:f", "`kd_test_other` cannot be imported: ModuleNotFoundError"),
        ("kd_test_train:polcy", "has no `polcy`. Did you mean `policy`?"),
        ("kd_test_train:broken", "fails: ValueError: no data here"),
        ("kd_test_train:wrong", "expected `kd_test_train:wrong` to return `(module, example)`"),
        ("kd_test_train:surplus", "options that `export` does not take: {'batch': 3}"),
    ):
        assert main(["export", place, "other.pt2"]) == 2
        assert message in capsys.readouterr().err
    assert main(["export", "kd_test_train:policy", "policy.tvm"]) == 3
    assert not list(tmp_path.glob("other*"))


def test_help_shows_an_example_of_each_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    names = re.findall(r"^    (\w+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    assert len(names) == 15
    for name in names:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert f"  kd-export {name} " in capsys.readouterr().out


def test_a_file_cannot_command_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    """Nor can it name what a terminal cannot encode."""
    name = "a\x1b[2J\x07\ud800\u202e"
    entry, other = (Entry((name,), "n", "float32", shape) for shape in ((2,), (name,)))
    schema = Schema(
        (entry,), (other,), {name: Axis()}, metadata={name: name}, versions={name: name}
    )
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/archive_format", "pt2")
        archive.writestr("model/extra/kd_export.json", schema.to_json())
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert r"a\x1b[2J\x07\ud800\u202e" in shown
    with pytest.raises(KeyMismatch) as caught:
        schema.input("b")
    assert all(line.isprintable() for line in (*shown.splitlines(), str(caught.value)))


def test_no_arguments_print_the_help(capsys: Capture) -> None:
    assert main([]) == 0
    assert "print keys, shapes and versions" in capsys.readouterr().out


def test_the_package_runs_as_a_command(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kd_export", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("kd_export", run_name="__main__")
    assert capsys.readouterr().out.startswith("kd-export ")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["insepct", "x.onnx"], "inspect"),
        (["inspect", "x.onnx", "--jsn"], "--json"),
        (["completion", "fsh"], "fish"),
        (["client", "x.onnx", "--lagn", "c"], "--lang"),
    ],
)
def test_a_misspelt_word_gets_a_suggestion(words: list[str], meant: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"Did you mean `{meant}`?" in capsys.readouterr().err


def test_a_store_is_told_from_an_artefact(tmp_path: Path, capsys: Capture) -> None:
    TensorDict(a=torch.zeros(2)).save(tmp_path / "data.kd")
    assert main(["inspect", str(tmp_path / "data.kd")]) == 3
    error = capsys.readouterr().err
    assert "is a store of a container, not an exported program" in error
    assert f"python -m kd_core inspect {tmp_path / 'data.kd'}" in error
    TensorDict(a=torch.zeros(2)).save(tmp_path / "data.safetensors")
    assert main(["inspect", str(tmp_path / "data.safetensors")]) == 3
    error = capsys.readouterr().err
    assert "holds tensors, not an exported program" in error
    assert f"python -m kd_core inspect {tmp_path / 'data.safetensors'}" in error
