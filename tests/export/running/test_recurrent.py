"""Recurrent layers are captured as they run, in every supported torch, and after every format."""

from pathlib import Path

import torch
from tests.export.models import Keyed
from torch import Tensor, nn

import kd_export


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
