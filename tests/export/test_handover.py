"""The folder that is handed over: what is in it, and what it says."""

import hashlib
import json
import re
from pathlib import Path

import pytest

import kd_export
from kd_export import Axis, BackendMissing, Entry, ExportError, NotExportable, Schema, Signal
from kd_export._clients import Interface
from kd_export._handover import LARGEST, hand_over, leapp, triton
from kd_export.cli import main

GOLDEN = Path(__file__).parent / "golden" / "gru.onnx"
SCHEMA = Schema(
    (
        Entry(("obs",), "obs", "float32", ("batch", 2), -1, 1, Signal(["hip", "knee"], "rad")),
        Entry(("task",), "task", "int64", ("batch",), 0, 3),
        Entry(("h",), "h", "float32", ("batch", 2)),
    ),
    (
        Entry(("action",), "action", "float32", ("batch", 1), signal=Signal(limits=(-1, 1))),
        Entry(("next", "h"), "next.h", "float32", ("batch", 2)),
    ),
    {"batch": Axis(1, 8)},
    state={"h": "next.h"},
    initial={"h": (0.5, -1.5)},
)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand in for the npm package."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "dist").mkdir()
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        (folder / "dist" / name).write_bytes(b"export const env = {};")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, web: Path) -> Path:
    folder = tmp_path_factory.mktemp("handover") / "new"
    hand_over(GOLDEN, folder, web=web)
    return folder


def test_each_file_has_its_digest(folder: Path) -> None:
    lines = (folder / "SHA256SUMS").read_text("utf-8").splitlines()
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "SHA256SUMS"
    }
    assert digests == found
    assert {"index.html", "gru.onnx", "gru.h", "gru_client.rs", "leapp.yaml"} <= found.keys()
    assert (folder / "triton/gru/1/model.onnx").read_bytes() == GOLDEN.read_bytes()


def test_the_page_asks_no_server_for_anything(folder: Path) -> None:
    text = (folder / "index.html").read_text("utf-8")
    assert len(text) < LARGEST
    assert not re.findall(r"https?:", text)
    assert "default-src 'none'" in text
    assert not re.findall(r"(?<![\w@])@[a-z_]+@", text)  # no mark is left
    content = re.findall(r'id="data">(.*?)</script>', text)[0]
    data = json.loads(content)
    assert [len(data["expected"]), data["inputs"][0]["name"]] == [50, "x"]


def test_a_name_cannot_end_a_script(tmp_path: Path, web: Path) -> None:
    """A file may have any words in it, and the page shows them as they are."""
    text = kd_export.inspect(GOLDEN).to_json()
    schema = json.loads(text)
    word = "</script><script>alert(1)</script>"
    schema["metadata"] = {"note": word}
    count = schema["inputs"][0]["shape"][-1]
    schema["inputs"][0]["signal"] = {"names": [f"{word}{place}" for place in range(count)]}
    from kd_export._schema.onnx_file import sealed

    evil = tmp_path / "evil.onnx"
    parts = sealed(memoryview(GOLDEN.read_bytes()), json.dumps(schema))
    evil.write_bytes(b"".join(parts))
    hand_over(evil, tmp_path / "out", web=web)
    page = (tmp_path / "out" / "index.html").read_text("utf-8")
    assert "<script>alert" not in page


def test_a_server_carries_the_state() -> None:
    text = triton(Interface.of(SCHEMA), "policy")
    assert "max_batch_size: 8" in text
    assert 'input_name: "h"' in text
    assert 'data_file: "h"' in text
    assert "oldest { max_candidate_sequences: 8 }" in text
    assert '{ name: "task" data_type: TYPE_INT64 dims: [ 1 ] reshape: { shape: [ ] } }' in text


def test_leapp_is_told_names_and_the_flow_of_the_state() -> None:
    data = json.loads(leapp(Interface.of(SCHEMA), "policy.onnx", b"", "policy"))
    assert data["pipeline"]["feedback_flow"] == {"policy/next.h": ["policy/h"]}
    assert data["pipeline"]["initial_values"] == "policy_initial_values.safetensors"
    obs = data["models"]["policy"]["inputs"][0]
    assert (obs["element_names"], obs["unit"]) == ([["hip", "knee"]], "rad")
    assert data["models"]["policy"]["outputs"][0]["limits"] == [[-1], [1]]


def test_what_cannot_be_handed_over_is_refused(tmp_path: Path, web: Path) -> None:
    with pytest.raises(NotExportable, match=r"written for `\.onnx` files, got `gru\.pt2`"):
        hand_over(GOLDEN.with_suffix(".pt2"), tmp_path, web=web)
    with pytest.raises(BackendMissing, match="Run `npm install onnxruntime-web` here"):
        hand_over(GOLDEN, tmp_path, web=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_lists_what_it_wrote(
    tmp_path: Path, web: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["handover", str(GOLDEN), "-o", str(tmp_path), "--web", str(web), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["gru.onnx"] == GOLDEN.stat().st_size


def test_the_header_of_a_program_in_c_is_not_replaced(tmp_path: Path) -> None:
    own = tmp_path / "gru.h"
    own.write_text("/* Written by kd-export. Do not edit.\n * of gru.c */\n")
    with pytest.raises(ExportError, match=r"is the header that `gru\.c` was saved with"):
        hand_over(GOLDEN, tmp_path)
    assert [*tmp_path.iterdir()] == [own]
