"""Policies of rsl_rl, beside its own models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.policies.lacking import each_step_counts
from tests.tables import POLICIES, Record, beside_oracle

import kd_export
from kd_export.policies import Policy, from_rsl_rl

theirs: Any = pytest.importorskip("tensordict", reason="the lane `policies` installs it")
models: Any = pytest.importorskip("rsl_rl.models", reason="the lane `policies` installs it")
GAUSSIAN = {"class_name": "GaussianDistribution"}
DEPENDENT = {"class_name": "HeteroscedasticGaussianDistribution"}
BETA = {"class_name": "BetaDistribution"}


def seen(**groups: int | tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    sizes = {name: (size,) if isinstance(size, int) else size for name, size in groups.items()}
    return theirs.TensorDict(
        {name: torch.randn(64, *size) * 2 + 1 for name, size in sizes.items()}, batch_size=[64]
    )


def model_of(kind: str, observed: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    groups = {"actor": list(observed.keys())}
    made = getattr(models, kind)(
        observed, groups, "actor", 3, hidden_dims=[32, 32], obs_normalization=True, **options
    )
    made.train()
    for _ in range(5):
        made.update_normalization(observed)
    with torch.no_grad():
        for weight in made.mlp.parameters():
            weight *= 2
    return made.eval()


def one(kind: str, **options: Any) -> Callable[[], Policy]:
    return lambda: from_rsl_rl(model_of(kind, seen(policy=5), **options), clip_actions=0.2)


def several() -> Policy:
    observed = seen(policy=5, history=7)
    return from_rsl_rl(model_of("MLPModel", observed, distribution_cfg=GAUSSIAN), observed)


def images() -> Policy:
    observed = seen(policy=5, camera=(1, 12, 12))
    settings = {"output_channels": [4], "kernel_size": 3, "stride": 2}
    model = model_of("CNNModel", observed, distribution_cfg=GAUSSIAN, cnn_cfg=settings)
    return from_rsl_rl(model, observed, clip_actions=0.3)


CASES: dict[str, Callable[[], Policy]] = {
    "mlp": one("MLPModel"),
    "mlp gaussian": one("MLPModel", distribution_cfg=GAUSSIAN),
    "mlp state-dependent": one("MLPModel", distribution_cfg=DEPENDENT),
    "mlp beta": one("MLPModel", distribution_cfg=BETA),
    "lstm": one("RNNModel", distribution_cfg=GAUSSIAN, rnn_hidden_dim=16),
    "gru": one("RNNModel", rnn_type="gru", rnn_hidden_dim=16, rnn_num_layers=2),
    "several groups": several,
    "images": images,
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_model_and_each_step_counts(
    case: str, tmp_path: Path, record_property: Record
) -> None:
    policy = CASES[case]()
    report = kd_export.save(policy, tmp_path / "policy.onnx", batch_sizes=(2,))
    record_property(POLICIES, beside_oracle("rsl_rl", case, report))
    each_step_counts(policy, tmp_path)
