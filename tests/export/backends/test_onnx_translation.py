"""What torch's translation to ONNX leaves to mend."""

from pathlib import Path

import pytest
import torch
from tests.export.models import Do, Keyed
from torch import Tensor, nn

import kd_export
from kd_export import NotExportable
from kd_nn import TensorDictModule


class Factors(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.lu_factor(x)[0]


def test_the_operator_and_the_line_are_named(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3), Factors())
    module = TensorDictModule(net, in_keys=["x"], out_keys=["y"])
    with pytest.raises(NotExportable) as raised:
        kd_export.save(module, tmp_path / "m.onnx", {"x": torch.randn(3, 3)}, dynamic=None)
    text = str(raised.value)
    assert text.startswith("ONNX cannot express `aten.linalg_lu_factor_ex.default` in `module.1`")
    assert "at `return torch.linalg.lu_factor(x)[0]` (`forward`, test_onnx_translation.py:" in text
    assert "No ONNX function found" in text
    assert "\x1b" not in text
    assert "Next steps" not in text


def test_sizes_that_nobody_knows_have_no_name(tmp_path: Path) -> None:
    """All of them were called `None`: then a runtime takes them for equal."""
    import onnx

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y]).relu().sum(0) + torch.cat([x, x]).relu().sum(0)

    module = Keyed(Do(forward), ["x", "y"], ["z"])
    example = {"x": torch.randn(3, 2), "y": torch.randn(5, 2)}
    dynamic = {"x": {0: "a"}, "y": {0: "b"}}
    path = tmp_path / "m.onnx"
    assert kd_export.save(module, path, example, dynamic=dynamic).ok
    graph = onnx.load(path).graph
    names = {
        dim.dim_param
        for value in graph.value_info
        for dim in value.type.tensor_type.shape.dim
        if dim.HasField("dim_param")
    }
    assert "None" not in names


class KeepsGrad(nn.Module):
    """Need a gradient of no operator: as tables that are interpolated anew do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.interpolate(self.table, size=(6, 6), mode="bilinear")


def test_translation_runs_without_gradients(tmp_path: Path) -> None:
    module = Keyed(KeepsGrad(), ["x"], ["y"])
    assert kd_export.save(module, tmp_path / "m.onnx", {"x": torch.randn(2, 2, 6, 6)}).ok
