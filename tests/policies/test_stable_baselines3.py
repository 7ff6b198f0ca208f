"""Every kind of policy of stable-baselines3, beside its own `predict`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.policies.lacking import each_step_counts
from tests.tables import POLICIES, Record, beside_oracle
from torch import nn

import kd_export
from kd_export.policies import from_sb3

gymnasium: Any = pytest.importorskip("gymnasium", reason="the lane `policies` installs it")
stable_baselines3: Any = pytest.importorskip("stable_baselines3")
sb3_contrib: Any = pytest.importorskip("sb3_contrib")
vec_env: Any = pytest.importorskip("stable_baselines3.common.vec_env")
spaces = gymnasium.spaces
BOX = spaces.Box(-5.0, 5.0, (4,), numpy.float32)
LAST = spaces.Box(0, 255, (36, 38, 3), numpy.uint8)
FIRST = spaces.Box(0, 255, (3, 36, 38), numpy.uint8)
SEVERAL = spaces.Dict({"camera": LAST, "gear": spaces.Discrete(4), "joints": BOX})
ARM = spaces.Box(numpy.array([-0.1, -0.5], "f"), numpy.array([0.1, 0.2], "f"))
WIDE = spaces.Box(-2.0, 3.0, (2,), numpy.float32)
ACTIONS = {
    "arm": ARM,
    "discrete": spaces.Discrete(5),
    "multi": spaces.MultiDiscrete([3, 4]),
    "binary": spaces.MultiBinary(3),
}


class Env(gymnasium.Env):  # type: ignore[misc]  # it has no types here
    """Random observations of a space; the reward tells nothing."""

    def __init__(self, observations: Any, actions: Any) -> None:
        self.observation_space, self.action_space = observations, actions
        observations.seed(0)
        self.count = 0

    def reset(self, **options: Any) -> Any:
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observation_space.sample(), 1.0, self.count % 9 == 0, False, {}


def normalised(env: Env) -> Any:
    """The environment within `VecNormalize`, after a few steps."""
    keys = None
    if isinstance(env.observation_space, spaces.Dict):
        keys = ["joints"]
    wrapped = vec_env.VecNormalize(
        vec_env.DummyVecEnv([lambda: env]), norm_obs_keys=keys, clip_obs=2.0
    )
    wrapped.seed(0)
    wrapped.reset()
    for _ in range(20):
        wrapped.step(numpy.stack([env.action_space.sample()]))
    return wrapped


def kind_of(space: Any) -> str:
    if isinstance(space, spaces.Dict):
        return "MultiInputPolicy"
    return "CnnPolicy" if len(space.shape or ()) == 3 else "MlpPolicy"


CASES: dict[str, tuple[str, Any, Any, bool, dict[str, Any]]] = {
    "ppo box arm": ("PPO", BOX, ARM, False, {}),
    "ppo box normalised": ("PPO", BOX, ARM, True, {}),
    "ppo discrete": ("PPO", BOX, ACTIONS["discrete"], False, {}),
    "ppo multi normalised": ("PPO", BOX, ACTIONS["multi"], True, {}),
    "ppo binary": ("PPO", BOX, ACTIONS["binary"], False, {}),
    "ppo integer observations": ("PPO", spaces.Discrete(6), ARM, False, {}),
    "ppo several integers": ("PPO", spaces.MultiDiscrete([3, 5]), ARM, False, {}),
    "ppo bits": ("PPO", spaces.MultiBinary(5), ARM, False, {}),
    "ppo images last": ("PPO", LAST, ARM, False, {}),
    "ppo images first": ("PPO", FIRST, ACTIONS["discrete"], False, {}),
    "ppo dict": ("PPO", SEVERAL, ARM, False, {}),
    "ppo dict normalised": ("PPO", SEVERAL, ACTIONS["discrete"], True, {}),
    "ppo gsde": ("PPO", BOX, ARM, True, {"use_sde": True}),
    "ppo gsde squashed": (
        "PPO",
        BOX,
        ARM,
        False,
        {"use_sde": True, "policy_kwargs": {"squash_output": True}},
    ),
    "ppo matrix": ("PPO", BOX, spaces.Box(-0.1, 0.1, (2, 3), numpy.float32), False, {}),
    "a2c box": ("A2C", BOX, ARM, True, {}),
    "a2c multi": ("A2C", BOX, ACTIONS["multi"], False, {}),
    "sac box": ("SAC", BOX, WIDE, False, {}),
    "sac normalised": ("SAC", BOX, WIDE, True, {}),
    "sac gsde": ("SAC", BOX, WIDE, False, {"use_sde": True}),
    "sac images": ("SAC", LAST, WIDE, False, {"buffer_size": 50}),
    "sac dict": ("SAC", SEVERAL, WIDE, False, {"buffer_size": 50}),
    "td3 normalised": ("TD3", BOX, WIDE, True, {}),
    "ddpg box": ("DDPG", BOX, WIDE, False, {}),
    "dqn box": ("DQN", BOX, ACTIONS["discrete"], True, {}),
    "dqn images": ("DQN", FIRST, ACTIONS["discrete"], False, {"buffer_size": 50}),
    "qrdqn": ("QRDQN", BOX, ACTIONS["discrete"], False, {}),
    "tqc": ("TQC", BOX, WIDE, True, {}),
    "trpo": ("TRPO", BOX, ARM, False, {}),
    "crossq": ("CrossQ", BOX, WIDE, False, {}),
    "maskable": ("MaskablePPO", BOX, ACTIONS["discrete"], False, {}),
    "recurrent box": ("RecurrentPPO", BOX, ARM, True, {}),
    "recurrent discrete": ("RecurrentPPO", BOX, ACTIONS["discrete"], False, {}),
    "recurrent layers": (
        "RecurrentPPO",
        BOX,
        ARM,
        False,
        {"policy_kwargs": {"n_lstm_layers": 2, "lstm_hidden_size": 32}},
    ),
    "recurrent images": ("RecurrentPPO", LAST, ARM, False, {}),
    "recurrent dict": ("RecurrentPPO", SEVERAL, ARM, False, {}),
}


def model_of(case: str) -> Any:
    name, observations, actions, normalise, options = CASES[case]
    algorithm = getattr(stable_baselines3, name, None) or getattr(sb3_contrib, name)
    kind = kind_of(observations).replace(
        "Policy", "LstmPolicy" if "Recurrent" in name else "Policy"
    )
    env = Env(observations, actions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = algorithm(kind, normalised(env) if normalise else env, seed=1, **options)
    with torch.no_grad():  # far from what was initialised, so that limits matter
        for weight in model.policy.parameters():
            weight += 0.3 * torch.randn_like(weight) * weight.abs().mean().clamp(min=0.05)
        heads = getattr(model.policy, "action_net", None) or getattr(
            getattr(model.policy, "actor", None), "mu", None
        )
        if heads is not None:  # so that it is not almost linear
            [*(part for part in heads.modules() if isinstance(part, nn.Linear))][-1].weight *= 30
    return model


@pytest.mark.parametrize("case", CASES)
def test_equals_predict_and_each_step_counts(
    case: str, tmp_path: Path, record_property: Record
) -> None:
    torch.manual_seed(0)
    policy = from_sb3(model_of(case))
    report = kd_export.save(policy, tmp_path / "policy.onnx", batch_sizes=(2,))
    record_property(POLICIES, beside_oracle("stable-baselines3", case, report))
    each_step_counts(policy, tmp_path)
    # What runs in python is the same, row by row.
    oracle: Any = policy.oracle
    oracle.reset()
    observations = {key: x for key, x in policy.example.items() if key not in policy.state}
    single = next(iter(observations.values()))
    given = single if len(observations) == 1 else {key[-1]: x for key, x in observations.items()}
    for _ in range(2):
        expected = torch.as_tensor(oracle(given))
        torch.testing.assert_close(policy(given), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("PPO", {"n_steps": 16, "batch_size": 16}), ("SAC", {"learning_starts": 50})],
)
def test_a_saved_model_tells_of_its_normaliser(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    algorithm = getattr(stable_baselines3, name)
    path = tmp_path / "model.zip"
    tight = spaces.Box(-0.01, 0.01, (3,), numpy.float32)
    env = normalised(Env(tight, WIDE))
    algorithm("MlpPolicy", env, seed=0, **options).learn(16).save(path)
    with pytest.raises(kd_export.ExportError, match="was trained in a `VecNormalize`"):
        from_sb3(algorithm.load(path))
    assert "Normalise" in str(from_sb3(algorithm.load(path), env).module)
    assert "Normalise" not in str(from_sb3(algorithm.load(path), False).module)
    algorithm("MlpPolicy", Env(tight, WIDE), seed=0, **options).learn(16).save(path)
    assert "Normalise" not in str(from_sb3(algorithm.load(path)).module)
    assert from_sb3(algorithm.load(path), False).notes == ()


def test_the_report_says_where_a_normaliser_cannot_be_known(tmp_path: Path) -> None:
    for name, doubt in (("SAC", True), ("TD3", True), ("PPO", False)):
        algorithm, path = getattr(stable_baselines3, name), tmp_path / f"{name}.zip"
        model = algorithm("MlpPolicy", Env(BOX, WIDE), seed=0)
        assert from_sb3(model).notes == ()  # which has its environment
        model.save(path)
        report = kd_export.save(from_sb3(algorithm.load(path)), tmp_path / "a.onnx", steps=2)
        assert any("does not tell whether" in note for note in report.notes) is doubt
        assert from_sb3(algorithm.load(path), False).notes == ()
