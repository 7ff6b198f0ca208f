"""Recurrent layers are captured as they run, in every supported torch, and after every format."""

from pathlib import Path

import pytest
import torch
from tests.export.models import Keyed
from torch import Tensor, nn

import kd_export
from kd_nn import TensorDictSequential


class RowsFirst(nn.Module):
    """An LSTM whose state has the batch as its first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        y, (h, c) = self.cell(x, (h.transpose(0, 1), c.transpose(0, 1)))
        return y, h.transpose(0, 1), c.transpose(0, 1)


def test_a_state_that_is_not_contiguous_is_captured_before_and_after_onnx(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Keyed(RowsFirst(), ["x", "h", "c"], ["y", "new_h", "new_c"])
    example = {"x": torch.randn(2, 1, 3), "h": torch.randn(2, 1, 4), "c": torch.randn(2, 1, 4)}
    state = {"h": "new_h", "c": "new_c"}
    assert kd_export.save(module, tmp_path / "lstm.onnx", example, state=state).ok
    program = kd_export.export(module, example, state=state)
    assert program.schema.output("new_h").shape == ("batch", 1, 4)
    assert "while_loop" not in str(program.exported_program.graph)


class Layer(nn.Module):
    """The outputs of a recurrent layer alone."""

    def __init__(self, layer: nn.GRU | nn.LSTM) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[0]
        return result


@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 writes layers out step by step")
def test_layers_run_over_an_axis_of_time_of_any_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers: dict[str, nn.GRU | nn.LSTM] = {
        "gru": nn.GRU(3, 4, batch_first=True, bidirectional=True),
        "lstm": nn.LSTM(3, 4),
    }
    parts = [Keyed(Layer(layer), ["x"], [name]) for name, layer in layers.items()]
    module = TensorDictSequential(*parts)
    example = {"x": torch.randn(5, 5, 3)}
    program = kd_export.export(module, example, dynamic={"x": {0: "rows", 1: "columns"}})
    x = torch.randn(2, 40, 3)
    expected = {name: layer.eval()(x)[0].detach() for name, layer in layers.items()}
    for path in (tmp_path / "m.pt2", tmp_path / "m.onnx"):
        program.save(path)
        found = kd_export.open(path, trusted=True).run({"x": x})
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
