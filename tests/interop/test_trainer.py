"""The trainer of transformers trains on containers and on rows of one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kd_core import TensorDict, stack

transformers: Any = pytest.importorskip("transformers")


class Model(nn.Module):
    """Two numbers to one, with the loss that a trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute the loss."""
        logits = self.layer(x)
        return {"loss": (logits.squeeze(-1) - labels).square().mean(), "logits": logits}


def rows() -> TensorDict:
    x = torch.randn(16, 2)
    return TensorDict({"x": x, "labels": x.sum(-1)}, [16])


def whole(features: Sequence[Any]) -> Any:
    batch = features if isinstance(features, TensorDict) else stack(features)
    return batch.to_dict()  # a trainer rebuilds mappings without their batch size


@pytest.mark.parametrize("collator", [None, whole])
def test_a_trainer_trains(tmp_path: Path, collator: object) -> None:
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=4,
        learning_rate=0.1,
        disable_tqdm=True,
    )
    model = Model()
    before = model.layer.weight.clone()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows(), eval_dataset=rows(), data_collator=collator
    )
    trainer.train()
    assert not torch.equal(before, model.layer.weight)
    assert trainer.evaluate()["eval_loss"] >= 0
