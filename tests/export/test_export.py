"""What `diagnose` finds, format by format, and the options that calls share."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.export.models import Do, Keyed, case
from torch import nn

from kd_export import (
    BackendMissing,
    Diagnosis,
    ExportError,
    Finding,
    NotExportable,
    diagnose,
    export,
    save,
)
from kd_nn import TensorDictModule


def test_each_format_is_tried_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    module = Keyed(Do(torch.fft.rfft), ["x"], ["y"])
    found = diagnose(module, {"x": torch.randn(2, 8)}, targets=[".pt2", ".onnx", ".tvm"])
    assert [row.ok for row in found.rows] == [True, False, False]
    assert found.rows[0].message.startswith("largest difference ")
    kinds = [type(row.error) for row in found.rows]
    assert kinds == [type(None), NotExportable, BackendMissing]
    error = found.rows[1].error
    assert isinstance(error, ExportError)
    assert error.key == ("y",)
    assert not found.ok
    assert not list(tmp_path.rglob("model*"))


def test_a_module_that_cannot_be_captured_has_one_finding() -> None:
    module = Keyed(nn.Dropout(), ["x"], ["y"])
    module.net.forward = torch.rand_like
    found = diagnose(module, {"x": torch.randn(2, 8)})
    assert [row.target for row in found.rows] == ["export"]
    assert "draws random numbers" in found.rows[0].message


def test_options_are_those_of_export() -> None:
    model = case("graph")
    found = diagnose(model.module, model.example, targets=[".pt2"], dynamic=model.dynamic)
    assert found.ok
    assert not diagnose(model.module, model.example, targets=[".pt2"]).ok
    recurrent = case("gru")
    wrong = diagnose(recurrent.module, recurrent.example, targets=[".pt2"], state={"x": "y"})
    assert "the state `x`" in wrong.rows[0].message


def test_a_diagnosis_prints_one_line_a_format() -> None:
    error = ExportError("first\nsecond")
    found = Diagnosis((Finding(".pt2", "fine"), Finding(".onnx", str(error), error)), ("mended.",))
    assert str(found).splitlines()[1:] == [
        ".pt2    ok       fine",
        ".onnx   REFUSED  first",
        "note: mended.",
    ]
    assert found.to_data()["ok"] is False
    assert "<p>note: mended.</p>" in found._repr_html_()
    assert not Diagnosis(()).ok


@pytest.mark.parametrize(
    ("call", "wrong", "near"),
    [
        (export, "dynamics", "dynamic"),
        (export, "rtol", None),  # an option of `save` alone
        (diagnose, "output", "outputs"),
        (save, "rtoll", "rtol"),
    ],
)
def test_an_option_that_is_not_one_is_refused_with_the_nearest(
    call: Callable[..., object], wrong: str, near: str | None, tmp_path: Path
) -> None:
    module = TensorDictModule(nn.Linear(2, 1), ["x"], ["y"])
    target = (tmp_path / "model.pt2",) if call is save else ()
    text = rf"^{call.__name__}\(\) got an unexpected keyword argument '{wrong}'"
    text += "$" if near is None else rf"\. Did you mean `{near}`\?$"
    with pytest.raises(TypeError, match=text):
        call(module, *target, {"x": torch.zeros(1, 2)}, **{wrong: 1})
    assert not list(tmp_path.iterdir())
