"""Policies of TorchRL, beside themselves without exploration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.policies.lacking import each_step_counts
from tests.tables import POLICIES, Record, beside_oracle
from torch import Tensor, nn

import kd_export
from kd_export.policies import Policy, from_torchrl

theirs: Any = pytest.importorskip("tensordict", reason="the lane `policies` installs it")
keyed: Any = pytest.importorskip("tensordict.nn")
modules: Any = pytest.importorskip("torchrl.modules", reason="the lane `policies` installs it")
specs: Any = pytest.importorskip("torchrl.data")
transforms: Any = pytest.importorskip("torchrl.envs.transforms")
OBSERVED = {"observation": torch.randn(64, 4, generator=torch.Generator())}


def net(out: int, inputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, out))


def plain() -> Policy:
    module = keyed.TensorDictModule(net(2), in_keys=["observation"], out_keys=["action"])
    return from_torchrl(module, OBSERVED)


def actor() -> Policy:
    sequence = keyed.TensorDictSequential(
        keyed.TensorDictModule(net(8), in_keys=["observation"], out_keys=["hidden"]),
        modules.Actor(nn.Linear(8, 2), in_keys=["hidden"]),
        modules.TanhModule(
            in_keys=["action"], low=torch.tensor([-2.0, 0.0]), high=torch.tensor([2.0, 1.0])
        ),
    )
    return from_torchrl(sequence, theirs.TensorDict(OBSERVED, batch_size=[64]))


def probabilistic(kind: Any, **settings: Any) -> Callable[[], Policy]:
    def made() -> Policy:
        head = nn.Sequential(net(4), modules.NormalParamExtractor())
        module = keyed.TensorDictModule(head, in_keys=["observation"], out_keys=["loc", "scale"])
        policy = modules.ProbabilisticActor(
            module,
            in_keys=["loc", "scale"],
            distribution_class=kind,
            distribution_kwargs=settings,
            return_log_prob=True,
        )
        return from_torchrl(policy, OBSERVED)

    return made


def discrete(kind: Any) -> Callable[[], Policy]:
    def made() -> Policy:
        module = keyed.TensorDictModule(net(5), in_keys=["observation"], out_keys=["logits"])
        policy = modules.ProbabilisticActor(module, in_keys=["logits"], distribution_class=kind)
        return from_torchrl(policy, OBSERVED)

    return made


def values(form: str) -> Callable[[], Policy]:
    def made() -> Policy:
        policy = keyed.TensorDictSequential(
            modules.QValueActor(net(5), in_keys=["observation"], action_space=form),
            modules.EGreedyModule(
                spec=specs.OneHot(5) if form == "one_hot" else specs.Categorical(5),
                eps_init=0.5,
            ),
        )
        return from_torchrl(policy, OBSERVED)

    return made


def recurrent(kind: str) -> Callable[[], Policy]:
    def made() -> Policy:
        torch.manual_seed(0)
        layer: Any
        if kind == "lstm":
            layer = modules.LSTMModule(
                input_size=4, hidden_size=16, in_key="observation", out_key="hidden"
            )
        else:
            layer = modules.GRUModule(
                input_size=4, hidden_size=16, num_layers=2, in_key="observation", out_key="hidden"
            )
        head = keyed.TensorDictModule(net(2, 16), in_keys=["hidden"], out_keys=["action"])
        return from_torchrl(keyed.TensorDictSequential(layer, head), OBSERVED)

    return made


def normalised() -> Policy:
    module = keyed.TensorDictModule(net(2, 6), in_keys=["vector"], out_keys=["action"])
    stack = transforms.Compose(
        transforms.DoubleToFloat(in_keys=["joints"]),
        transforms.ObservationNorm(
            loc=torch.tensor([1.0, -1.0, 0.0, 2.0]),
            scale=torch.tensor([2.0, 0.5, 1.0, 3.0]),
            in_keys=["joints"],
            standard_normal=True,
        ),
        transforms.CatTensors(in_keys=["joints", "goal"], out_key="vector", del_keys=False),
        transforms.RewardSum(),
    )
    example = {"joints": torch.randn(64, 4).double() * 3, "goal": torch.randn(64, 2)}
    return from_torchrl(module, example, transforms=stack)


def images() -> Policy:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 4, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    module = keyed.TensorDictModule(conv, in_keys=["pixels"], out_keys=["action"])
    example = {"pixels": torch.randint(0, 256, (16, 16, 16, 3)).to(torch.uint8)}
    return from_torchrl(module, example, transforms=transforms.ToTensorImage())


CASES: dict[str, Callable[[], Policy]] = {
    "module": plain,
    "actor tanh": actor,
    "normal": probabilistic(torch.distributions.Normal),
    "tanh normal": probabilistic(modules.TanhNormal, low=-2.0, high=1.0),
    "one hot": discrete(modules.OneHotCategorical),
    "categorical": discrete(torch.distributions.Categorical),
    "q one hot": values("one_hot"),
    "q categorical": values("categorical"),
    "lstm": recurrent("lstm"),
    "gru": recurrent("gru"),
    "transforms": normalised,
    "images": images,
}


@pytest.mark.parametrize("case", CASES)
def test_equals_itself_and_each_step_counts(
    case: str, tmp_path: Path, record_property: Record
) -> None:
    torch.manual_seed(0)
    policy = CASES[case]()
    report = kd_export.save(policy, tmp_path / "policy.onnx", batch_sizes=(2,))
    record_property(POLICIES, beside_oracle("torchrl", case, report))
    each_step_counts(policy, tmp_path)


def test_a_module_of_tensordict_is_exported_as_it_is(tmp_path: Path) -> None:
    module = keyed.TensorDictSequential(
        keyed.TensorDictModule(net(3), in_keys=["observation"], out_keys=["hidden"]),
        keyed.TensorDictModule(nn.Linear(3, 2), in_keys={"input": "hidden"}, out_keys=["action"]),
    )
    path = tmp_path / "policy.pt2"
    assert kd_export.save(module, path, OBSERVED, outputs=["hidden"], batch_sizes=(2,)).ok
    assert [entry.wire for entry in kd_export.inspect(path).outputs] == ["hidden"]
    x: Tensor = OBSERVED["observation"]
    session = kd_export.open(path, trusted=True)
    result = session.run({"observation": x})["hidden"]
    torch.testing.assert_close(result, module(theirs.TensorDict(observation=x))["hidden"])
