"""Policies of skrl, beside its own models and preprocessors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.policies.lacking import each_step_counts
from tests.tables import POLICIES, Record, beside_oracle
from torch import nn

import kd_export
from kd_export.policies import Policy, from_skrl

gymnasium: Any = pytest.importorskip("gymnasium", reason="the lane `policies` installs it")
models: Any = pytest.importorskip("skrl.models.torch", reason="the lane `policies` installs it")
scalers: Any = pytest.importorskip("skrl.resources.preprocessors.torch")
spaces = gymnasium.spaces
SEEN = spaces.Box(-5.0, 5.0, (4,), numpy.float32)
ARM = spaces.Box(-0.1, 0.2, (2,), numpy.float32)


def net(out: int, inputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 32), nn.ELU(), nn.Linear(32, out))


class Gaussian(models.GaussianMixin, models.Model):  # type: ignore[misc]  # they have no types here
    def __init__(self, clips: bool = False) -> None:
        models.Model.__init__(self, observation_space=SEEN, action_space=ARM, device="cpu")
        models.GaussianMixin.__init__(self, clip_mean_actions=clips)
        self.net = net(2)
        self.log_std = nn.Parameter(torch.zeros(2))

    def compute(self, inputs: Any, role: str = "") -> Any:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Fixed(models.DeterministicMixin, models.Model):  # type: ignore[misc]  # as above
    def __init__(self) -> None:
        models.Model.__init__(self, observation_space=SEEN, action_space=ARM, device="cpu")
        models.DeterministicMixin.__init__(self, clip_actions=True)
        self.net = net(2)

    def compute(self, inputs: Any, role: str = "") -> Any:
        return self.net(inputs["observations"]), {}


class Discrete(models.CategoricalMixin, models.Model):  # type: ignore[misc]  # as above
    def __init__(self) -> None:
        space = spaces.Discrete(5)
        models.Model.__init__(self, observation_space=SEEN, action_space=space, device="cpu")
        models.CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = net(5)

    def compute(self, inputs: Any, role: str = "") -> Any:
        return self.net(inputs["observations"]), {}


class Several(models.MultiCategoricalMixin, models.Model):  # type: ignore[misc]  # as above
    def __init__(self) -> None:
        space = spaces.MultiDiscrete([3, 4])
        models.Model.__init__(self, observation_space=SEEN, action_space=space, device="cpu")
        models.MultiCategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = net(7)

    def compute(self, inputs: Any, role: str = "") -> Any:
        return self.net(inputs["observations"]), {}


class Recurrent(models.GaussianMixin, models.Model):  # type: ignore[misc]  # as above
    """As skrl's own examples of recurrent models do it."""

    def __init__(self, kind: str) -> None:
        models.Model.__init__(self, observation_space=SEEN, action_space=ARM, device="cpu")
        models.GaussianMixin.__init__(self)
        torch.manual_seed(0)
        self.layer: Any = getattr(nn, kind)(4, 16, 1, batch_first=True)
        self.count = 2 if kind == "LSTM" else 1
        self.net = net(2, 16)
        self.log_std = nn.Parameter(torch.zeros(2))

    def get_specification(self) -> Any:
        return {"rnn": {"sequence_length": 8, "sizes": [(1, 3, 16)] * self.count}}

    def compute(self, inputs: Any, role: str = "") -> Any:
        x = inputs["observations"]
        states = tuple(inputs["rnn"])
        given = x.view(-1, 1, x.shape[-1])
        out, new = self.layer(given, states if self.count == 2 else states[0])
        kept = list(new) if self.count == 2 else [new]
        result = self.net(out.flatten(0, 1))
        return result, {"log_std": self.log_std, "rnn": kept}


class Agent:
    """The part of an agent that runs when it is evaluated."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._observation_preprocessor = scalers.RunningStandardScaler(size=SEEN, device="cpu")
        for _ in range(4):
            self._observation_preprocessor(torch.randn(64, 4) * 2 + 1, train=True)


def scaled(model: Callable[[], Any]) -> Callable[[], Policy]:
    return lambda: from_skrl(Agent(model()))


CASES: dict[str, Callable[[], Policy]] = {
    "gaussian": lambda: from_skrl(Gaussian()),
    "gaussian scaled": scaled(Gaussian),
    "gaussian clipped": scaled(lambda: Gaussian(clips=True)),
    "deterministic": scaled(Fixed),
    "categorical": scaled(Discrete),
    "multi-categorical": scaled(Several),
    "gru": scaled(lambda: Recurrent("GRU")),
    "lstm": scaled(lambda: Recurrent("LSTM")),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_model_and_each_step_counts(
    case: str, tmp_path: Path, record_property: Record
) -> None:
    torch.manual_seed(0)
    policy = CASES[case]()
    report = kd_export.save(policy, tmp_path / "policy.onnx", batch_sizes=(2,))
    record_property(POLICIES, beside_oracle("skrl", case, report))
    each_step_counts(policy, tmp_path)
