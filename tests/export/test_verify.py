import dataclasses
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.export.models import Keyed, saved, tutorial
from torch import nn

import kd_export
from kd_export import ExportError, VerifyError
from kd_export._schema.onnx_file import schema_field
from kd_export._schema.schema import draw
from kd_nn import TensorDictModule


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("tutorial", tmp_path_factory.mktemp("artefacts") / "model.pt2")


def test_stored_tests_need_no_module(path: Path) -> None:
    report = kd_export.verify(path, trusted=True)
    assert report.ok
    assert [row.sizes["batch"] for row in report.rows[::4]] == [1, 2, 3, 7, 33]


def test_other_weights_are_found(path: Path) -> None:
    torch.manual_seed(1)
    report = kd_export.verify(path, tutorial().module, trusted=True)
    assert not report.ok
    assert report.largest > 0.01
    assert "MISMATCH" in str(report)


def rewritten(path: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Write a `.pt2` anew with another schema."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in files if name.endswith("kd_export.json")]
    schema = json.loads(files[name])
    edit(schema)
    files[name] = json.dumps(schema).encode()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target


@pytest.fixture
def mixed(path: Path, tmp_path: Path) -> Path:
    """A file of other weights under the schema of the first."""
    torch.manual_seed(1)
    kd_export.save(tutorial().module, tmp_path / "other.pt2", {"x": torch.ones(1, 3)})
    first = kd_export.inspect(path).to_data()
    return rewritten(tmp_path / "other.pt2", tmp_path / "mixed.pt2", lambda s: s.update(first))


def test_the_digest_finds_other_weights(mixed: Path) -> None:
    assert kd_export.verify(mixed.with_name("other.pt2"), trusted=True).ok
    with pytest.raises(VerifyError, match=r"weights or the graph in `mixed\.pt2` are not those"):
        kd_export.verify(mixed, trusted=True)


def test_stored_tests_find_other_weights(mixed: Path) -> None:
    digest = kd_export.inspect(mixed.with_name("other.pt2")).weights
    forged = rewritten(mixed, mixed, lambda schema: schema.update(weights=digest))
    assert not kd_export.verify(forged, trusted=True).ok


def test_every_output_is_compared_at_every_size(path: Path) -> None:
    schema = kd_export.inspect(path)
    rows = {(row.output, row.sizes["batch"]) for row in kd_export.verify(path, trusted=True).rows}
    assert rows == {(e.wire, size) for e in schema.outputs for size in (1, 2, 3, 7, 33)}


def without_numbers(schema: dict[str, Any]) -> None:
    for vector in schema["vectors"]:
        vector["outputs"] = {}


def without_one(schema: dict[str, Any]) -> None:
    del schema["vectors"][0]["outputs"]["hidden"]


def renamed(schema: dict[str, Any]) -> None:
    schema["outputs"][0].update(key=["other"], wire="other")


def with_another_size(schema: dict[str, Any]) -> None:
    schema["vectors"][0]["sizes"] = {"rows": 1}


@pytest.mark.parametrize("edit", [without_numbers, without_one, renamed, with_another_size])
def test_a_stored_test_must_be_whole(
    path: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None]
) -> None:
    forged = rewritten(path, tmp_path / "model.pt2", edit)
    with pytest.raises(ExportError, match=r"the schema is damaged.*a stored test has"):
        kd_export.verify(forged, trusted=True)


def cut_short(schema: dict[str, Any]) -> None:
    schema["vectors"][0]["outputs"]["hidden"] = []


def test_too_few_numbers_are_a_mismatch(path: Path, tmp_path: Path) -> None:
    report = kd_export.verify(rewritten(path, tmp_path / "m.pt2", cut_short), trusted=True)
    assert [row.output for row in report.rows if not row.ok] == ["hidden"]


def test_without_stored_tests_there_is_nothing_to_verify(path: Path, tmp_path: Path) -> None:
    forged = rewritten(path, tmp_path / "model.pt2", lambda schema: schema.update(vectors=[]))
    with pytest.raises(VerifyError, match="no stored test for any output"):
        kd_export.verify(forged, trusted=True)


def test_sizes_that_are_not_stored_need_a_module(path: Path) -> None:
    with pytest.raises(VerifyError, match=r"no stored test for batch=5; stored are: batch=1; b"):
        kd_export.verify(path, batch_sizes=[1, 5], trusted=True)


def test_a_range_without_the_usual_sizes_is_verified(tmp_path: Path) -> None:
    program = kd_export.export(tutorial().module, {"x": torch.ones(4, 3)}, dynamic={"b": (11, 90)})
    assert program.save(tmp_path / "model.pt2").ok
    report = kd_export.verify(tmp_path / "model.pt2", trusted=True)
    assert [row.sizes["b"] for row in report.rows[::4]] == [11, 12, 13, 17, 69, 90]
    assert kd_export.verify(tmp_path / "model.pt2", batch_sizes=[1, 2], trusted=True).ok


def test_of_a_random_program_shapes_are_compared(tmp_path: Path) -> None:
    module = Keyed(nn.Identity(), ["x"], ["y"])
    module.net = Noise()
    path = tmp_path / "model.pt2"
    program = kd_export.export(module, {"x": torch.ones(2, 3)}, mode="random")
    assert program.save(path).ok
    report = kd_export.verify(path, trusted=True)
    assert report.ok
    assert "random: shapes compared" in str(report)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def test_a_test_of_absurd_size_is_refused_at_once(tmp_path: Path) -> None:
    """An ONNX file asks for no trust, and may claim any shape."""
    path = tmp_path / "model.onnx"
    saved("nested", path)
    schema = kd_export.inspect(path).to_data()
    schema["inputs"][0]["shape"] = ["batch", 10**9]  # type: ignore[index, call-overload]  # JSON
    path.write_bytes(schema_field(json.dumps(schema)) + path.read_bytes())
    with pytest.raises(ExportError, match="does not fit the program"):
        kd_export.verify(path)
    with pytest.raises(ExportError, match=r"needs 1,000,000,000 numbers, more than 33,554,432"):
        draw(kd_export.inspect(path), kd_export.Vector({"batch": 1}, 0, {}))


def test_tolerance_can_be_given(path: Path) -> None:
    assert not kd_export.verify(path, atol=-1.0, rtol=0.0, trusted=True).ok


@pytest.mark.parametrize("stored", [True, False])
def test_a_tolerance_that_is_given_is_all_that_applies(tmp_path: Path, stored: bool) -> None:
    """An absolute one that nobody saw made `rtol=1e-9` mean nothing."""
    path, module = tmp_path / "near.onnx", TensorDictModule(Near(1.0, 0.25), ["x"], ["y"])
    kd_export.save(module, path, {"x": torch.ones(2, 1)})
    other = rewritten_numbers(path, lambda number: number + 1e-7)
    reference = None if stored else TensorDictModule(Near(1.0, 0.25 + 1e-7), ["x"], ["y"])
    path = other if stored else path
    assert kd_export.verify(path, reference).ok
    assert not kd_export.verify(path, reference, rtol=1e-9).ok
    assert kd_export.verify(path, reference, rtol=1e-6).ok
    assert kd_export.verify(path, reference, atol=1e-6).ok
    report = kd_export.verify(path, reference, rtol=1e-9)
    assert "0 + 1e-09 * abs(expected)" in str(report)
    assert {(row.rtol, row.atol) for row in report.rows} == {(1e-9, 0.0)}
    assert "1e-05 + 0.0001 * abs(expected)" in str(kd_export.verify(path, reference))


def rewritten_numbers(path: Path, change: Callable[[float], float]) -> Path:
    """Write a file whose stored numbers are others."""
    schema = kd_export.inspect(path)
    vectors = tuple(
        dataclasses.replace(
            vector, outputs={name: tuple(map(change, row)) for name, row in vector.outputs.items()}
        )
        for vector in schema.vectors
    )
    text = dataclasses.replace(schema, vectors=vectors).to_json()
    made = path.with_name(f"other_{path.name}")
    made.write_bytes(schema_field(text) + path.read_bytes())
    return made


class Near(nn.Module):
    """Gives zeros that are off by an error, beside a constant."""

    def __init__(self, beside: float, error: float = 0.0) -> None:
        super().__init__()
        self.row = nn.Buffer(torch.tensor([error, beside]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0], 2) + self.row


@pytest.mark.parametrize(
    ("beside", "error", "atol", "ok"),
    [
        (1.0, 0.9e-5, None, True),
        (1.0, 2e-5, None, False),
        (5.0, 4e-5, None, True),  # rounding errors are as large as in deep networks
        (5.0, 4e-5, 1e-5, False),
        (5.0, 6e-5, None, False),
        (-torch.inf, 2e-5, None, False),
        (torch.finfo().min, 0.9e-4, None, True),
        (torch.finfo().min, 2e-4, None, False),  # a mask does not make all numbers equal
    ],
)
def test_the_tolerance_grows_with_the_largest_number_within_bounds(
    tmp_path: Path, beside: float, error: float, atol: float | None, ok: bool
) -> None:
    path, example = tmp_path / "near.pt2", {"x": torch.ones(2, 1)}
    kd_export.save(TensorDictModule(Near(beside), ["x"], ["y"]), path, example)
    off = TensorDictModule(Near(beside, error), ["x"], ["y"])
    assert kd_export.verify(path, off, trusted=True, atol=atol).ok is ok


def test_module_that_fails_at_a_size_is_explained(tmp_path: Path) -> None:
    module = Keyed(nn.Flatten(0), ["x"], ["y"])
    module.net = NeedsTwo()
    program = kd_export.export(module, {"x": torch.ones(2, 3)}, dynamic={"batch": (2, 9)})
    assert program.save(tmp_path / "model.pt2").ok
    with pytest.raises(VerifyError, match=r"the module itself fails at batch=1.*\(2, None\)"):
        kd_export.export(module, {"x": torch.ones(2, 3)}).save(tmp_path / "model.pt2")


class NeedsTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and x.shape[0] < 2:
            raise ValueError("needs two rows")
        return x + 1


def test_not_a_number_equals_itself(tmp_path: Path) -> None:
    module = Keyed(nn.LogSigmoid(), ["x"], ["y"])
    module.net = Nan()
    report = kd_export.save(module, tmp_path / "model.pt2", {"x": torch.ones(2, 3)})
    assert report.largest == 0.0
    assert kd_export.verify(tmp_path / "model.pt2", trusted=True).ok


class Nan(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - 1).log()


def test_report_is_data_too(path: Path) -> None:
    data = kd_export.verify(path, trusted=True).to_data()
    assert data["ok"] is True
    assert data["path"] == str(path)


def test_a_report_names_its_file(path: Path) -> None:
    report = kd_export.verify(path, trusted=True)
    assert str(report).splitlines()[0] == repr(report).splitlines()[0] == str(path)
    assert str(path) in report._repr_html_()


def test_a_tolerance_of_save_is_in_the_file(tmp_path: Path) -> None:
    """What was accepted when the file was written is accepted when it is checked."""
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    path = tmp_path / "model.pt2"
    kd_export.save(module, path, {"x": torch.ones(2, 3)}, batch_sizes=(2,), rtol=0.5, atol=0.25)
    schema = kd_export.inspect(path)
    assert dict(schema.tolerance) == {"rtol": 0.5, "atol": 0.25}
    report = kd_export.verify(path, trusted=True)
    assert {(row.rtol, row.atol) for row in report.rows} == {(0.5, 0.25)}
    stricter = kd_export.verify(path, trusted=True, atol=0.0)
    assert {(row.rtol, row.atol) for row in stricter.rows} == {(0.0, 0.0)}


@pytest.mark.parametrize("tolerance", [{"rtol": -1}, {"most": 0.1}, {"atol": "much"}])
def test_a_damaged_tolerance_is_refused(path: Path, tmp_path: Path, tolerance: object) -> None:
    target = tmp_path / "damaged.pt2"
    rewritten(path, target, lambda schema: schema.update(tolerance=tolerance))
    with pytest.raises(ExportError, match="the schema is damaged"):
        kd_export.inspect(target)
