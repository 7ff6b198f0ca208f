"""Policies of tianshou, beside their own forward and `map_action`."""

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
from torch.distributions import Independent, Normal

import kd_export
from kd_export.policies import Policy, from_tianshou

gymnasium: Any = pytest.importorskip("gymnasium", reason="the lane `policies` installs it")
pytest.importorskip("tianshou.data", reason="the lane `policies` installs it")
modelfree: Any = pytest.importorskip("tianshou.algorithm.modelfree")
reinforce: Any = pytest.importorskip("tianshou.algorithm.modelfree.reinforce")
sac: Any = pytest.importorskip("tianshou.algorithm.modelfree.sac")
ddpg: Any = pytest.importorskip("tianshou.algorithm.modelfree.ddpg")
dqn: Any = pytest.importorskip("tianshou.algorithm.modelfree.dqn")
qrdqn: Any = pytest.importorskip("tianshou.algorithm.modelfree.qrdqn")
common: Any = pytest.importorskip("tianshou.utils.net.common")
continuous: Any = pytest.importorskip("tianshou.utils.net.continuous")
discrete: Any = pytest.importorskip("tianshou.utils.net.discrete")
statistics: Any = pytest.importorskip("tianshou.utils.statistics")
spaces = gymnasium.spaces
SEEN = spaces.Box(-5.0, 5.0, (4,), numpy.float32)
ARM = spaces.Box(-0.1, 0.2, (2,), numpy.float32)


def body() -> Any:
    torch.manual_seed(0)
    return common.Net(state_shape=(4,), hidden_sizes=[32])


def strong(net: Any) -> Any:
    with torch.no_grad():
        for weight in net.parameters():
            weight *= 3
    return net


def gaussian(pair: Any) -> Any:
    return Independent(Normal(*pair), 1)


def ppo(bound: str | None, scaled: bool = True) -> Any:
    actor = continuous.ContinuousActorProbabilistic(
        preprocess_net=body(), action_shape=(2,), unbounded=bound is not None
    )
    return reinforce.ProbabilisticActorPolicy(
        actor=strong(actor),
        dist_fn=gaussian,
        action_space=ARM,
        observation_space=SEEN,
        action_scaling=scaled,
        action_bound_method=bound,
    )


def categorical() -> Any:
    actor = discrete.DiscreteActor(preprocess_net=body(), action_shape=5, softmax_output=False)
    return reinforce.DiscreteActorPolicy(
        actor=strong(actor), action_space=spaces.Discrete(5), observation_space=SEEN
    )


def soft() -> Any:
    actor = continuous.ContinuousActorProbabilistic(
        preprocess_net=body(), action_shape=(2,), unbounded=True, conditioned_sigma=True
    )
    return sac.SACPolicy(actor=strong(actor), action_space=ARM, observation_space=SEEN)


def fixed() -> Any:
    actor = continuous.ContinuousActorDeterministic(
        preprocess_net=body(), action_shape=(2,), max_action=1.5
    )
    # On purpose: actions beyond the bounds show whether they are clipped.
    with pytest.warns(UserWarning, match="action_scaling"):
        return ddpg.ContinuousDeterministicPolicy(
            actor=strong(actor), action_space=ARM, observation_space=SEEN
        )


def values() -> Any:
    torch.manual_seed(0)
    net = common.Net(state_shape=(4,), action_shape=5, hidden_sizes=[32])
    return dqn.DiscreteQLearningPolicy(
        model=strong(net), action_space=spaces.Discrete(5), observation_space=SEEN
    )


def recurrent() -> Any:
    torch.manual_seed(0)
    actor = continuous.RecurrentActorProb(
        layer_num=1, state_shape=(4,), action_shape=(2,), hidden_layer_size=16, unbounded=True
    )
    return reinforce.ProbabilisticActorPolicy(
        actor=strong(actor),
        dist_fn=gaussian,
        action_space=ARM,
        observation_space=SEEN,
        action_bound_method="tanh",
    )


def measured() -> Any:
    found = statistics.RunningMeanStd(clip_max=2.0)
    for _ in range(3):
        found.update(numpy.random.default_rng(0).normal(1.0, 2.0, (64, 4)).astype("f"))
    return found


CASES: dict[str, Callable[[], Policy]] = {
    "ppo clip": lambda: from_tianshou(ppo("clip")),
    "ppo tanh": lambda: from_tianshou(ppo("tanh")),
    "ppo bounded": lambda: from_tianshou(ppo(None)),
    "ppo normalised": lambda: from_tianshou(ppo("clip"), measured()),
    "categorical": lambda: from_tianshou(categorical(), measured()),
    "sac": lambda: from_tianshou(soft()),
    "ddpg": lambda: from_tianshou(fixed(), measured()),
    "dqn": lambda: from_tianshou(values()),
    "recurrent": lambda: from_tianshou(recurrent()),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_policy_and_each_step_counts(
    case: str, tmp_path: Path, record_property: Record
) -> None:
    policy = CASES[case]()
    assert isinstance(policy.module, nn.Module)
    report = kd_export.save(policy, tmp_path / "policy.onnx", batch_sizes=(2,))
    record_property(POLICIES, beside_oracle("tianshou", case, report))
    each_step_counts(policy, tmp_path)
