import zipfile
from pathlib import Path

import pytest
import torch
from tests.export.models import Keyed, case, tutorial
from torch import nn

import kd_export
from kd_export import Axis, Schema, VerifyError
from kd_export._verify import trials


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("artefacts") / "model.pt2"
    model = case("tutorial")
    kd_export.save(model.module, target, model.example)
    return target


def test_stored_tests_need_no_module(path: Path) -> None:
    report = kd_export.verify(path, trusted=True)
    assert report.ok
    assert [row.sizes["batch"] for row in report.rows[::4]] == [1, 2, 3, 7]


def test_other_weights_are_found(path: Path) -> None:
    torch.manual_seed(1)
    report = kd_export.verify(path, tutorial().module, trusted=True)
    assert not report.ok
    assert report.largest > 0.01
    assert "MISMATCH" in str(report)


def test_stored_tests_find_other_weights(path: Path, tmp_path: Path) -> None:
    other, mixed = tmp_path / "other.pt2", tmp_path / "mixed.pt2"
    torch.manual_seed(1)
    kd_export.save(tutorial().module, other, {"x": torch.ones(1, 3)})
    with zipfile.ZipFile(path) as one, zipfile.ZipFile(other) as two:
        (schema,) = [one.read(n) for n in one.namelist() if n.endswith("kd_export.json")]
        rest = {n: two.read(n) for n in two.namelist() if not n.endswith("kd_export.json")}
    prefix = next(iter(rest)).split("/")[0]
    with zipfile.ZipFile(mixed, "w") as archive:
        for name, content in rest.items():
            archive.writestr(name, content)
        archive.writestr(f"{prefix}/extra/kd_export.json", schema)
    assert kd_export.verify(other, trusted=True).ok
    assert not kd_export.verify(mixed, trusted=True).ok


def test_sizes_that_are_not_stored_need_a_module(path: Path) -> None:
    with pytest.raises(VerifyError, match=r"no stored test for the batch sizes \(5,\)"):
        kd_export.verify(path, batch_sizes=[5], trusted=True)


def test_tolerance_can_be_given(path: Path) -> None:
    assert not kd_export.verify(path, atol=-1.0, rtol=0.0, trusted=True).ok


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


def test_axes_take_sizes_out_of_step() -> None:
    schema = Schema((), (), {"node": Axis(), "edge": Axis(2, 4)})
    assert list(trials(schema, (1, 2, 3))) == [
        {"node": 1, "edge": 3},
        {"node": 2, "edge": 2},
        {"node": 3, "edge": 3},
    ]


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
