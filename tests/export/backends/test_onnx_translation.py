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
        factors: Tensor = torch.linalg.lu_factor(x)[0]
        return factors


def test_the_operator_and_the_line_are_named(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3), Factors())
    module = TensorDictModule(net, in_keys=["x"], out_keys=["y"])
    with pytest.raises(NotExportable) as raised:
        kd_export.save(module, tmp_path / "m.onnx", {"x": torch.randn(3, 3)}, dynamic=None)
    text = str(raised.value)
    assert text.startswith("ONNX cannot express `aten.linalg_lu_factor_ex.default` in `module.1`")
    assert "at `factors: Tensor = torch.linalg.lu_factor(x)[0]` (`forward`, test_onnx_" in text
    assert "No ONNX function found" in text
    assert "\x1b" not in text
    assert "Next steps" not in text


def test_sizes_that_nobody_knows_have_no_name(tmp_path: Path) -> None:
    """All of them were called `None`: then a runtime takes them for equal."""
    import onnx

    module = Keyed(Do(lambda x: (x.sum(1), x.nonzero())), ["x"], ["y", "places"])
    path = tmp_path / "m.onnx"
    assert kd_export.save(module, path, {"x": torch.randn(3, 5)}).ok
    graph = onnx.load(path).graph
    values = [*graph.value_info, *graph.output]
    dims = [dim for value in values for dim in value.type.tensor_type.shape.dim]
    assert "None" not in {dim.dim_param for dim in dims if dim.HasField("dim_param")}


class Attention(nn.Module):
    """With gradients, another kernel gives other strides, which a view does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(32, 96)
        self.bias = nn.Parameter(torch.zeros(17, 17))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        return y.transpose(1, 2).reshape(*x.shape[:2], -1)


def test_translation_runs_without_gradients(tmp_path: Path) -> None:
    module = Keyed(Attention(), ["x"], ["y"])
    assert kd_export.save(module, tmp_path / "m.onnx", {"x": torch.randn(2, 17, 32)}).ok
