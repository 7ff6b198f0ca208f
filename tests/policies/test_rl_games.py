"""Policies of rl_games, beside their players' `get_action`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.policies.lacking import each_step_counts
from tests.tables import POLICIES, Record, beside_oracle

import kd_export
from kd_export.policies import Policy, from_rl_games

gymnasium: Any = pytest.importorskip("gymnasium", reason="the lane `policies` installs it")
builder: Any = pytest.importorskip("rl_games.algos_torch.model_builder")
players: Any = pytest.importorskip("rl_games.algos_torch.players")
spaces = gymnasium.spaces
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
SEEN = spaces.Box(-5.0, 5.0, (4,), numpy.float32)
ARM = spaces.Box(-0.1, 0.3, (2,), numpy.float32)
SPACES = {
    "continuous": {
        "mu_activation": "None",
        "sigma_activation": "None",
        "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": 0},
        "fixed_sigma": True,
    }
}


def player_of(
    actions: Any, kind: str = "continuous", rnn: str | None = None, clips: bool = True
) -> Any:
    torch.manual_seed(0)
    network: dict[str, Any] = {
        "name": "actor_critic",
        "separate": False,
        "space": SPACES if kind == "continuous" else {kind: {}},
        "mlp": {"units": [32], "activation": "elu", "initializer": {"name": "default"}},
    }
    if rnn is not None:
        network["rnn"] = {"name": rnn, "units": 16, "layers": 1, "before_mlp": False}
    model = {"continuous": "continuous_a2c_logstd", "discrete": "discrete_a2c"}
    params = {
        "algo": {"name": f"a2c_{kind}"},
        "model": {"name": model.get(kind, "multi_discrete_a2c")},
        "network": network,
        "config": {
            "env_name": "none",
            "env_info": {"observation_space": SEEN, "action_space": actions, "agents": 1},
            "normalize_input": True,
            "device_name": "cpu",
            "clip_actions": clips,
        },
    }
    params["config"]["network"] = builder.ModelBuilder().load(params)
    kinds = {"continuous": players.PpoPlayerContinuous}
    made = kinds.get(kind, players.PpoPlayerDiscrete)(params)
    made.model.train()
    for _ in range(4):
        made.model.norm_obs(torch.randn(64, 4) * 2 + 1)
    made.model.eval()
    with torch.no_grad():
        for weight in made.model.a2c_network.parameters():
            weight *= 3
    return made


CASES: dict[str, Callable[[], Policy]] = {
    "continuous": lambda: from_rl_games(player_of(ARM)),
    "continuous free": lambda: from_rl_games(player_of(ARM, clips=False)),
    "discrete": lambda: from_rl_games(player_of(spaces.Discrete(5), "discrete")),
    "multi-discrete": lambda: from_rl_games(
        player_of(spaces.Tuple([spaces.Discrete(3), spaces.Discrete(4)]), "multi_discrete")
    ),
    "lstm": lambda: from_rl_games(player_of(ARM, rnn="lstm")),
    "gru": lambda: from_rl_games(player_of(ARM, rnn="gru")),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_get_action_and_each_step_counts(
    case: str, tmp_path: Path, record_property: Record
) -> None:
    policy = CASES[case]()
    report = kd_export.save(policy, tmp_path / "policy.onnx", batch_sizes=(2,))
    record_property(POLICIES, beside_oracle("rl_games", case, report))
    each_step_counts(policy, tmp_path)
