"""Inputs that are made for a trial are like those of the example."""

from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

import kd_export
from kd_nn import TensorDictModule


def test_a_number_that_is_one_of_two_is_taken_from_rows_of_the_example(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def gated(x: Tensor, gate: Tensor) -> Tensor:
        seen.append(gate)
        return x * gate

    module = TensorDictModule(gated, in_keys=["x", "gate"], out_keys=["y"])
    example = {"x": torch.randn(8, 3), "gate": torch.tensor([[0.0, 2.5]] * 4).reshape(8, 1)}
    assert kd_export.save(module, tmp_path / "m.pt2", example).ok
    real = [gate for gate in seen if not isinstance(gate, FakeTensor)]
    assert len(real) > 3
    assert {number for gate in real for number in gate.flatten().tolist()} == {0.0, 2.5}
