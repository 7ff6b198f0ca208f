"""Clients compiled and run, each in its language: in the lane `formats`.

A language is tested where its compiler is installed, JavaScript where the lane has installed
onnxruntime-web by npm.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.export.test_clients import WORDS, stepped
from torch import Tensor, nn

import kd_export
from kd_export import Axis, Entry, Schema
from kd_export._clients import SUFFIXES, client
from kd_nn import TensorDictModule, TensorDictSequential

pytest.importorskip("openvino", reason="the lane `formats` installs it")

ONNX, RUNTIME = "./libonnxruntime.so.1", "-Wl,-rpath,$ORIGIN"
OPENVINO = Path(sys.modules["openvino"].__file__ or "").parent
WARNINGS = ("-O2", "-Wall", "-Wextra", "-Werror")
BUILDS = {
    (".onnx", "c"): ["gcc", "-std=c99", "-Wpedantic", *WARNINGS, "{}", ONNX, RUNTIME],
    (".onnx", "cpp"): ["g++", "-std=c++17", "-Wpedantic", *WARNINGS, "{}", ONNX, RUNTIME],
    (".onnx", "rust"): [
        *("rustc", "--edition", "2021", "-O", "-D", "warnings", "{}"),
        *("-C", f"link-arg={ONNX}", "-C", f"link-arg={RUNTIME}"),
    ],
    (".onnx", "python"): [],
    (".onnx", "js"): ["node"],
    (".xml", "cpp"): [
        *("g++", "-std=c++17", *WARNINGS, "{}", "-isystem", str(OPENVINO / "include")),
        *map(str, sorted((OPENVINO / "libs").glob("libopenvino.so.*"))),
        f"-Wl,-rpath,{OPENVINO / 'libs'}",
    ],
    (".xml", "python"): [],
    (".c", "c"): ["gcc", "-std=c99", *WARNINGS, "{}", "leg.o", "-lm"],
    (".c", "cpp"): ["g++", "-std=c++17", *WARNINGS, "{}", "leg.o", "-lm"],
}
WEB = os.environ.get("KD_NODE_MODULES")
"""Where the lane has installed onnxruntime-web."""
PRESENT = [
    pair
    for pair, words in BUILDS.items()
    if (not words or shutil.which(words[0])) and (pair[1] != "js" or WEB)
]


class Scaled(nn.Module):
    """Two inputs of different dtypes and ranks."""

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return x + 0.1 * task.to(torch.float32)[:, None]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        after = self.cell(x, h)
        return after, after


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one policy in each format that has clients."""
    folder = tmp_path_factory.mktemp("clients")
    torch.manual_seed(0)
    module = TensorDictSequential(
        TensorDictModule(Scaled(), in_keys=[("obs", "x"), "task"], out_keys=["in"]),
        TensorDictModule(Cell(), in_keys=["in", ("state", "h")], out_keys=["f", ("next", "h")]),
        TensorDictModule(nn.Linear(8, 3), in_keys=["f"], out_keys=["action"]),
    )
    example = {
        "obs": {"x": torch.randn(4, 6)},
        "task": torch.arange(4),
        "state": {"h": torch.zeros(4, 8)},
    }
    program = kd_export.export(
        module,
        example,
        state={("state", "h"): ("next", "h")},
        initial={("state", "h"): torch.linspace(-1, 1, 8)},
        outputs=["action", ("next", "h")],
    )
    for suffix in (".onnx", ".xml", ".c"):
        program.save(folder / f"leg{suffix}")
    subprocess.run(["gcc", "-std=c99", "-O2", "-c", "leg.c"], cwd=folder, check=True)
    import onnxruntime

    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    (folder / ONNX).symlink_to(library)
    if WEB is not None:
        (folder / "node_modules").symlink_to(WEB)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return numbers(stepped(folder / "leg.onnx"))


def numbers(lines: list[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Read what a client prints: step, place and number of each line."""
    rows = [line.split() for line in lines]
    assert {row[1] for row in rows} == {"action"}
    return np.array([[float(row[0]), float(row[2]), float(row[3])] for row in rows])


@pytest.mark.parametrize(("suffix", "language"), PRESENT)
def test_a_client_prints_what_the_runner_gives(
    suffix: str,
    language: str,
    folder: Path,
    expected: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> None:
    """Over 50 steps, with a reset before one."""
    file = f"leg{suffix}"
    name = f"client_{suffix[1:]}{SUFFIXES[language]}"
    (folder / name).write_text(client(kd_export.inspect(folder / file), file, language), "utf-8")
    words = BUILDS[suffix, language]
    run = [sys.executable, name, file]
    if language == "js":
        run = ["node", "leg_client.mjs", file]
        (folder / name).rename(folder / run[1])
    elif words:
        command = [name if word == "{}" else word for word in words]
        subprocess.run([*command, "-o", f"{name}.out"], cwd=folder, check=True)
        run = [f"./{name}.out", file]
    done = subprocess.run(run, cwd=folder, check=True, capture_output=True, text=True)
    found = numbers(done.stdout.splitlines())
    assert found.shape == (150, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


class Summed(nn.Module):
    """As many inputs as there are words, and an output for each of the last few."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        total = sum(x * (place + 1) for place, x in enumerate(inputs))
        assert isinstance(total, Tensor)
        return tuple(total * (place + 1) for place in range(4))


@pytest.mark.parametrize(("suffix", "language"), [one for one in PRESENT if one[0] != ".c"])
def test_names_may_be_any_words(suffix: str, language: str, folder: Path) -> None:
    file = f"words{suffix}"
    if not (folder / file).exists():
        outputs = [f"{word} " for word in WORDS[:2]] + ["hasOwnProperty", "1"]
        keys = [word for word in WORDS if suffix != ".xml" or "\b" not in word]  # XML has none
        module = TensorDictModule(Summed(), in_keys=keys, out_keys=outputs)
        example = {(word,): torch.randn(4, 2) for word in keys}
        kd_export.save(module, folder / file, example, batch_sizes=(2,))
    name = f"words_client{SUFFIXES[language]}"
    schema = kd_export.inspect(folder / file)
    (folder / name).write_text(client(schema, file, language), "utf-8")
    words = BUILDS[suffix, language]
    run = ["node", name, file] if language == "js" else [sys.executable, name, file]
    if words and language != "js":
        command = [name if word == "{}" else word for word in words]
        subprocess.run([*command, "-o", "words.out"], cwd=folder, check=True)
        run = ["./words.out", file]
    done = subprocess.run(run, cwd=folder, check=True, capture_output=True, encoding="utf-8")
    given, wanted = (text.split("\n") for text in (done.stdout, "\n".join(stepped(folder / file))))
    found = [line.rsplit(" ", 2) for line in given if line]
    truth = [line.rsplit(" ", 2) for line in wanted]
    assert [row[:2] for row in found] == [row[:2] for row in truth]
    numbers, others = ([float(row[2]) for row in rows] for rows in (found, truth))
    np.testing.assert_allclose(numbers, others, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("language", [one for suffix, one in PRESENT if suffix == ".onnx"])
def test_a_client_refuses_another_file(language: str, folder: Path) -> None:
    """A file with the same names, and one element more."""
    module = TensorDictModule(nn.Linear(7, 3), in_keys=[("obs", "x")], out_keys=["action"])
    other = folder / "other.onnx"
    if not other.exists():
        kd_export.save(module, other, {"obs": {"x": torch.zeros(2, 7)}})
    name = f"client_onnx{SUFFIXES[language]}"
    run = [f"./{name}.out", other.name]
    if language in ("python", "js"):
        run = [sys.executable, name, other.name]
    if language == "js":
        run = ["node", "leg_client.mjs", other.name]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True)
    assert done.returncode != 0
    assert "expected" in done.stderr or "the file is not the one" in done.stderr


@pytest.mark.parametrize(("suffix", "language"), [one for one in PRESENT if one[0] != ".c"])
def test_nan_is_refused_where_it_would_become_a_number(
    suffix: str, language: str, folder: Path
) -> None:
    """By files on integers, and by OpenVINO; in each language."""
    file = f"small{suffix}"
    if not (folder / file).exists():
        torch.manual_seed(0)
        module = TensorDictModule(nn.Linear(6, 3), in_keys=["x"], out_keys=["action"])
        kd_export.save(
            module,
            folder / file,
            {"x": torch.randn(4, 6)},
            precision="int8" if suffix == ".onnx" else None,
            calibration={"x": torch.randn(512, 6)} if suffix == ".onnx" else None,
            budget={"max": 0.5} if suffix == ".onnx" else None,
        )
    name = f"small_client{SUFFIXES[language]}"
    text = client(kd_export.inspect(folder / file), file, language)
    broken = text.replace("% 10007", "% 1").replace("/ 10007", "/ 0")  # 0 / 0
    assert broken != text
    (folder / name).write_text(broken, "utf-8")
    words = BUILDS[suffix, language]
    run = ["node", name, file] if language == "js" else [sys.executable, name, file]
    if words and language != "js":
        command = [name if word == "{}" else word for word in words]
        subprocess.run([*command, "-o", "small.out"], cwd=folder, check=True)
        run = ["./small.out", file]
    done = subprocess.run(run, cwd=folder, capture_output=True, encoding="utf-8")
    assert done.returncode != 0
    assert re.search("`?x`? holds NaN, which .* takes for a number", done.stderr)
    assert not done.stdout


def test_the_class_is_used_as_the_page_says(tmp_path: Path) -> None:
    """The C++ of "In the browser and in C++", beside the client of its file."""
    docs = Path(__file__).parents[2] / "docs" / "how-to" / "onnx-runtime.md"
    (fence,) = re.findall(r"^```cpp\n(.*?)^```", docs.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    inputs = (Entry(("obs", "state"), "obs.state", "float32", ("batch", 4)),)
    outputs = (Entry(("action",), "action", "float32", ("batch", 2)),)
    text = client(Schema(inputs, outputs, {"batch": Axis()}), "model.onnx", "cpp")
    own = tmp_path / "own.cpp"
    own.write_text(f"{text[: text.index('int main')]}int main() {{\n{fence}}}\n", "utf-8")
    options = ("-std=c++17", "-Wall", "-Wextra", "-fsyntax-only")
    subprocess.run(["g++", *options, str(own)], check=True)
