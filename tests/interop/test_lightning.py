"""The trainer of Lightning moves, measures and trains on containers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kd_core import TensorClass, TensorDict, TensorDictBase

lightning: Any = pytest.importorskip("pytorch_lightning")


class Pairs(TensorClass):
    """Inputs and targets."""

    x: Tensor
    y: Tensor


def plain() -> TensorDictBase:
    x = torch.randn(8, 2)
    words = [f"row {row}" for row in range(8)]
    return TensorDict({"x": x, "y": x.sum(-1), "n": {"word": words}}, [8])


def declared() -> TensorDictBase:
    x = torch.randn(8, 2)
    return Pairs(x, x.sum(-1), batch_size=[8])


def model() -> Any:
    """Return a module of Lightning that notes the batches that it receives."""

    class Regression(lightning.LightningModule):  # type: ignore[misc]  # of any type
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.batches: list[TensorDictBase] = []

        def training_step(self, batch: TensorDictBase) -> Tensor:
            self.batches.append(batch)
            error = self.layer(batch["x"]).squeeze(-1) - batch["y"]
            loss: Tensor = error.square().mean()
            self.log("loss", loss)  # which asks the batch for its size
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Regression()


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:The .*does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("make", [plain, declared])
def test_a_trainer_trains(make: Any, tmp_path: Any) -> None:
    data, net = make(), model()
    before = net.layer.weight.clone()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(net, DataLoader(data, batch_size=4))
    assert [type(batch) for batch in net.batches] == [type(data)] * 4
    assert all(batch.batch_size == (4,) for batch in net.batches)
    assert not torch.equal(before, net.layer.weight)
