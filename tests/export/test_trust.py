"""Forged files must be refused before torch gets to see them, whatever the caller vouches for."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.export.models import case

import kd_export
from kd_export import ExportError, UntrustedArtifact
from kd_export._trust import disarm

Edit = Callable[[dict[str, bytes]], None]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("artefacts") / "model.pt2"
    model = case("nested")
    kd_export.save(model.module, path, model.example)
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"model/{name}", content)
    return buffer.getvalue()


def forged(files: dict[str, bytes], path: str, old: str, new: str) -> bytes:
    text = files[path].decode()
    assert old in text
    return packed(files | {path: text.replace(old, new).encode()})


MODEL = "models/model.json"
HARMFUL_TARGETS = ["os.system", "torch.os.system", "torch.serialization.load", "builtins.eval"]


@pytest.mark.parametrize("target", HARMFUL_TARGETS)
def test_only_operators_may_be_called(files: dict[str, bytes], target: str) -> None:
    data = forged(files, MODEL, "torch.ops.aten.linear.default", target)
    with pytest.raises(UntrustedArtifact, match=f"calls `{target}`, which is not an operator"):
        disarm(data)


HARMFUL_EXPRESSIONS = [
    "__import__('os').system('true')",
    "Symbol('s77').__class__",
    "Max('__import__(\\\"os\\\")', 1)",
    "eval('1')",
    "[s77]",
    "lambda: 1",
]


@pytest.mark.parametrize("expression", HARMFUL_EXPRESSIONS)
def test_sizes_are_arithmetic(files: dict[str, bytes], expression: str) -> None:
    model = json.loads(files[MODEL])
    tensor = model["graph_module"]["graph"]["tensor_values"]["in_x"]
    tensor["sizes"][0]["as_expr"]["expr_str"] = expression
    with pytest.raises(UntrustedArtifact, match="where a size expression should be"):
        disarm(packed(files | {MODEL: json.dumps(model).encode()}))


def test_ranges_are_arithmetic(files: dict[str, bytes]) -> None:
    model = json.loads(files[MODEL])
    model["range_constraints"] = {"__import__('os')": {"min_val": 1, "max_val": 2}}
    with pytest.raises(UntrustedArtifact, match="where a size expression should be"):
        disarm(packed(files | {MODEL: json.dumps(model).encode()}))


def test_arguments_are_plain_trees(files: dict[str, bytes]) -> None:
    data = forged(files, MODEL, "builtins.dict", "evil.Tree")
    with pytest.raises(UntrustedArtifact, match=r"arranges its arguments as a `evil\.Tree`"):
        disarm(data)


def test_pickled_weights_are_refused(files: dict[str, bytes]) -> None:
    buffer = io.BytesIO()
    torch.save(kd_export.Axis(1, 2), buffer)
    config = {"config": {"w": {"path_name": "weight_0", "use_pickle": True}}}
    for path, content in (
        ("data/weights/model.pt", buffer.getvalue()),
        ("data/constants/opaque_obj_0", b"x"),
        ("data/constants/custom_obj_0", b"x"),
        ("data/weights/model_weights_config.json", json.dumps(config).encode()),
    ):
        with pytest.raises(UntrustedArtifact, match="pickled"):
            disarm(packed(files | {path: content}))


def test_unknown_data_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(UntrustedArtifact, match="not part of an exported program"):
        disarm(packed(files | {"data/more/x.so": b"x"}))


def test_samples_and_guards_are_dropped(files: dict[str, bytes]) -> None:
    model = json.loads(files[MODEL])
    if "guards_code" in model:
        model["guards_code"] = ["__import__('os')"]
    kept = disarm(
        packed(
            files | {MODEL: json.dumps(model).encode(), "data/sample_inputs/model.pt": b"pickled"}
        )
    )
    with zipfile.ZipFile(kept) as archive:
        assert archive.read("model/data/sample_inputs/model.pt") == b""
        assert not json.loads(archive.read(f"model/{MODEL}")).get("guards_code")


def test_trust_does_not_reach_forgeries(files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "forged.pt2"
    path.write_bytes(forged(files, MODEL, "torch.ops.aten.linear.default", "os.system"))
    with pytest.raises(UntrustedArtifact, match="forged or damaged"):
        kd_export.open(path, trusted=True)


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_damaged_program_is_named_so(files: dict[str, bytes], content: bytes) -> None:
    with pytest.raises(ExportError, match="is not"):
        disarm(packed(files | {MODEL: content}))


def test_no_archive_is_named_so() -> None:
    with pytest.raises(ExportError, match=r"not a whole \.pt2 archive"):
        disarm(b"hello")
