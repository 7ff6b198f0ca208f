"""A right file is not refused for what the module itself is uncertain about; a wrong one is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kd_export import VerifyError, export, save
from kd_export._backends import onnx
from kd_nn import TensorDictModule


class Residual(nn.Module):
    """Blocks without normalisation, whose numbers grow until float32 is far from exact."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + 3 * torch.relu(block(x)) - x.mean(-1, keepdim=True)
        return x


def keyed(module: Callable[[Tensor], Tensor]) -> TensorDictModule:
    return TensorDictModule(module, in_keys=["x"], out_keys=["y"])


def test_deep_blocks_without_normalisation_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = export(keyed(Residual(32)), {"x": torch.randn(8, 64)})
    for suffix in (".pt2", ".onnx"):
        assert program.save(tmp_path / f"m{suffix}").ok, suffix


def test_integers_that_a_rounding_decides_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(64, 512)
    module = keyed(lambda x: (net(x) * 1e6).round().to(torch.int64))
    assert save(module, tmp_path / "m.onnx", {"x": torch.randn(64, 64)}).ok


def test_a_wrong_file_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of the runtime are changed, as a wrong translation would change them."""
    run = onnx.OnnxRunner.__call__

    def wrong(self: onnx.OnnxRunner, *args: object) -> object:
        return [result * 1.01 for result in run(self, *args)]  # type: ignore[arg-type, operator]  # passed on

    program = export(keyed(Residual(4)), {"x": torch.randn(8, 64)})
    monkeypatch.setattr(onnx.OnnxRunner, "__call__", wrong)
    with pytest.raises(VerifyError, match=r"0\.01 of the expected number[\s\S]*pass `rtol=`"):
        program.save(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
    assert program.save(tmp_path / "m.onnx", rtol=0.02).ok
