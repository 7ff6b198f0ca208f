"""`Policy`: one object that `save` and `export` take, and that runs."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

import kd_export
from kd_export import DtypeMismatch, ExportError, KeyMismatch, ShapeMismatch
from kd_export.policies import Clip, Policy
from kd_nn import TensorDictModule, TensorDictSequential


def clipped() -> Policy:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    module = TensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["action"]),
        TensorDictModule(Clip(-0.1, 0.1), in_keys=["action"], out_keys=["action"]),
    )
    return Policy(
        module,
        {"observation": torch.randn(16, 3)},
        oracle=lambda x: net(x).detach().clamp(-0.1, 0.1),
        metadata={"robot": "arm"},
    )


class Carried:
    def __init__(self, cell: nn.GRUCell) -> None:
        self.cell = cell
        self.state: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        state = torch.ones(len(x), 4) if self.state is None else self.state
        self.state = self.cell(x, state).detach()
        return self.state

    def reset(self, mask: Tensor | None = None) -> None:
        if mask is None or self.state is None:
            self.state = None
        else:
            self.state = torch.where(mask[:, None], 1.0, self.state)


def recurrent() -> Policy:
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 4)
    module = TensorDictSequential(
        TensorDictModule(cell, in_keys=["observation", "h"], out_keys=["new"]),
        TensorDictModule(lambda h: h.clone(), in_keys=["new"], out_keys=["action"]),
    )
    example = {"observation": torch.randn(16, 3), "h": torch.zeros(16, 4)}
    return Policy(module, example, oracle=Carried(cell), state={"h": "new"}, initial={"h": 1.0})


@pytest.mark.parametrize("make", [clipped, recurrent])
def test_a_policy_is_saved_as_it_is(make: object, tmp_path: Path) -> None:
    policy = clipped() if make is clipped else recurrent()
    report = kd_export.save(policy, tmp_path / "policy.pt2", batch_sizes=(2,), rollouts=3)
    assert sum("beside the oracle" in row.note for row in report.rows) == 3
    schema = kd_export.inspect(tmp_path / "policy.pt2")
    assert dict(schema.metadata) == policy.metadata


def test_options_stand_beside_a_policy(tmp_path: Path) -> None:
    policy = clipped()
    path = tmp_path / "policy.pt2"
    kd_export.save(policy, path, batch_sizes=(2,), metadata={"epoch": 3}, rollouts=3, steps=2)
    assert dict(kd_export.inspect(path).metadata) == {"robot": "arm", "epoch": 3}


def test_an_exported_policy_is_compared_when_it_is_saved(tmp_path: Path) -> None:
    policy = clipped()
    policy.oracle = lambda x: x[:, :2] * 0
    program = kd_export.export(policy)
    with pytest.raises(kd_export.VerifyError, match="other actions than the oracle"):
        program.save(tmp_path / "policy.pt2", batch_sizes=(2,))


def test_a_policy_runs_on_what_it_is_given() -> None:
    policy = clipped()
    x = torch.randn(5, 3)
    assert torch.equal(policy(x), policy.oracle(x))  # type: ignore[arg-type]  # a tensor
    result = policy(x.numpy())
    assert isinstance(result, numpy.ndarray)
    assert numpy.array_equal(result, policy.oracle(x))  # type: ignore[arg-type]  # as above
    assert torch.equal(policy({"observation": x}), policy.oracle(x))  # type: ignore[arg-type]  # the point of the test


def test_a_policy_carries_its_state() -> None:
    policy = recurrent()
    oracle = policy.oracle
    assert isinstance(oracle, Carried)
    for step in range(4):
        x = torch.randn(3, 3)
        torch.testing.assert_close(policy(x), oracle(x))
        if step == 1:
            mask = torch.tensor([True, False, True])
            policy.reset(mask)
            oracle.reset(mask)
    policy.reset()
    oracle.reset()
    x = torch.randn(7, 3)
    torch.testing.assert_close(policy(x), oracle(x))


def test_a_single_observation_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match=r"`observation\[None\]` for one"):
        clipped()(torch.zeros(3))


def test_a_missing_observation_is_named() -> None:
    with pytest.raises(KeyMismatch, match="`observation` not found; available keys: `state`"):
        clipped()({"state": torch.zeros(2, 3)})


def test_an_oracle_must_be_callable() -> None:
    policy = clipped()
    with pytest.raises(ExportError, match="expected a callable for `oracle`"):
        Policy(policy.module, policy.example, oracle="predict")  # type: ignore[arg-type]  # the point of the test


def test_a_module_alone_needs_an_example(tmp_path: Path) -> None:
    with pytest.raises(
        DtypeMismatch, match=r"of tensors, got None\. Pass a dict with `observation`"
    ):
        kd_export.save(clipped().module, tmp_path / "policy.pt2")


def test_a_policy_prints_what_it_maps() -> None:
    assert repr(clipped()) == "Policy(`observation` -> `action`)"
