"""Policies of frameworks, by stand-ins: the steps that are built, and that they are all needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.export.policies.frameworks import (
    PPO,
    ActorCriticPolicy,
    Agent,
    Array,
    Box,
    Discrete,
    MLPModel,
    MultiBinary,
    MultiDiscrete,
    VecNormalize,
)

import kd_export
from kd_export import ExportError, NotExportable
from kd_export.policies import Policy, from_rsl_rl, from_sb3, from_skrl, from_tianshou, from_torchrl
from kd_nn import TensorDictModule, TensorDictSequential

SEEN = Box(-numpy.inf, numpy.inf, (3,))
ARM = Box([-0.1, -0.3], [0.2, 0.1], (2,))


def normalised() -> Policy:
    return from_sb3(PPO(SEEN, ARM, 2), VecNormalize([1.0, 0.0, -2.0], [4.0, 1.0, 0.25]))


def of_pixels(shape: tuple[int, ...], *, scaled: bool = True) -> Policy:
    class OfPixels(PPO):
        def predict(self, observation: Array, *rest: Any, **options: Any) -> tuple[Array, Any]:
            rows = observation.reshape(len(observation), -1).astype("float32")
            return super().predict(rows / 255 if scaled else rows, *rest, **options)

    model = OfPixels(Box(0, 255, shape, "uint8"), ARM, 2)
    model.policy = ActorCriticPolicy(math.prod(shape), 2)
    return from_sb3(model)


CASES: dict[str, tuple[Callable[[], Policy], list[str]]] = {
    "sb3 box": (lambda: from_sb3(PPO(SEEN, ARM, 2)), ["Features", "Actor", "Clip"]),
    "sb3 normalised": (
        normalised,
        ["Normalise", "Clip", "ToFloat", "Features", "Actor", "Clip"],
    ),
    "sb3 image": (
        lambda: of_pixels((3, 4, 5)),
        ["ScaleImage", "Features", "Actor", "Clip"],
    ),
    "sb3 image of channels last": (
        lambda: of_pixels((4, 5, 3)),
        ["ScaleImage", "Features", "Actor", "Clip"],
    ),
    "sb3 bytes that are no image": (
        lambda: of_pixels((4, 5, 2), scaled=False),
        ["ToFloat", "Features", "Actor", "Clip"],
    ),
    "sb3 discrete": (lambda: from_sb3(PPO(SEEN, Discrete(4), 4)), ["Features", "Actor", "ArgMax"]),
    "sb3 multi": (
        lambda: from_sb3(PPO(SEEN, MultiDiscrete([2, 3]), 5)),
        ["Features", "Actor", "ArgMax"],
    ),
    "sb3 binary": (lambda: from_sb3(PPO(SEEN, MultiBinary(3), 3)), ["Features", "Actor", "Above"]),
    "rsl_rl": (
        lambda: from_rsl_rl(MLPModel(4), clip_actions=0.3),
        ["Concatenate", "EmpiricalNormalization", "Sequential", "Clip"],
    ),
    "rsl_rl recurrent": (
        lambda: from_rsl_rl(MLPModel(4, width=8)),
        ["Concatenate", "EmpiricalNormalization", "Recurrent", "Sequential"],
    ),
    "skrl": (lambda: from_skrl(Agent()), ["Normalise", "Clip", "Compute", "Clip"]),
}


def steps_of(policy: Policy) -> list[TensorDictModule]:
    assert isinstance(policy.module, TensorDictSequential)
    return [step for step in policy.module if isinstance(step, TensorDictModule)]


@pytest.mark.parametrize("case", CASES)
def test_the_steps_give_what_the_framework_gives(case: str) -> None:
    make, names = CASES[case]
    policy = make()
    assert [type(step.module).__name__ for step in steps_of(policy)] == names
    observed = policy.example["observation"]
    assert isinstance(observed, torch.Tensor)
    reset = getattr(policy.oracle, "reset", None)
    for step in range(6):
        rows = observed[torch.randperm(len(observed))[:5]]
        expected = torch.as_tensor(policy.oracle(rows))
        given = policy(rows)
        assert isinstance(given, torch.Tensor)
        assert given.dtype == expected.dtype
        torch.testing.assert_close(given, expected)
        if step == 2 and reset is not None:
            mask = torch.tensor([True, False, False, True, False])
            reset(mask)
            policy.reset(mask)


def test_a_policy_is_saved_and_a_lost_step_is_named(tmp_path: Path) -> None:
    policy = normalised()
    path = tmp_path / "policy.pt2"
    assert kd_export.save(policy, path, batch_sizes=(2,), rollouts=3, steps=10).ok
    said = kd_export.inspect(path).metadata["action"]
    assert isinstance(said, dict)
    assert said["low"] == ARM.low.tolist()
    assert said["high"] == ARM.high.tolist()
    for place in (0, 1, 5):
        rest = steps_of(policy)
        lost = rest.pop(place)
        lacking = TensorDictSequential(*rest)
        lacking.select_out_keys("action")
        other = Policy(lacking, policy.example, oracle=policy.oracle)
        with pytest.raises(kd_export.VerifyError) as caught:
            kd_export.save(other, tmp_path / "no.pt2", batch_sizes=(2,), rollouts=3, steps=10)
        assert f"The module lacks `{lost.module!r}` on `" in str(caught.value)
        assert not (tmp_path / "no.pt2").exists()


@pytest.mark.parametrize(
    ("convert", "expected"),
    [
        (from_sb3, "a model of stable-baselines3"),
        (from_rsl_rl, "a model or a runner of rsl_rl"),
        (from_skrl, "an agent or a model of skrl"),
        (from_tianshou, "an algorithm or a policy of tianshou"),
    ],
)
def test_what_is_of_another_kind_is_refused(
    convert: Callable[[object], Policy], expected: str
) -> None:
    with pytest.raises(NotExportable, match=f"expected {expected}"):
        convert(torch.nn.Linear(2, 2))


def test_a_wrong_normaliser_is_refused() -> None:
    with pytest.raises(ExportError, match="expected a `VecNormalize`, got `int`"):
        from_sb3(PPO(SEEN, ARM, 2), 3)


def test_narrower_limits_than_those_of_the_clip_are_refused(tmp_path: Path) -> None:
    signals = {"action": kd_export.Signal(limits=(-0.1, 0.1))}
    with pytest.raises(ExportError, match=r"are -0\.1\.\.0\.1, but the policy gives -0\.1\.\.0\.2"):
        kd_export.save(from_sb3(PPO(SEEN, ARM, 2)), tmp_path / "a.pt2", signals=signals)
    assert not [*tmp_path.iterdir()]


def trained(before: object, seen: object, *, replays: bool) -> PPO:
    """A model as it is loaded: without an environment, with the last observations."""
    model: Any = PPO(Box(-1, 1, (3,)), ARM, 2)
    model._last_original_obs, model._last_obs = before, seen
    if replays:
        model.replay_buffer_class = None
    found: PPO = model
    return found


INSIDE = numpy.array([[0.5, 0.0, -1.0]], "float32")
OUTSIDE = numpy.array([[1.5, 0.0, -1.0]], "float32")


@pytest.mark.parametrize(
    ("before", "seen", "replays"),
    [
        (INSIDE, INSIDE, False),
        (INSIDE, None, False),
        (INSIDE, OUTSIDE, True),
        (INSIDE.astype("float64"), INSIDE, True),
    ],
)
def test_a_forgotten_normaliser_is_refused(before: object, seen: object, replays: bool) -> None:
    model = trained(before, seen, replays=replays)
    with pytest.raises(ExportError, match="was trained in a `VecNormalize`, and none is given"):
        from_sb3(model)
    assert len(steps_of(from_sb3(model, False))) == 3
    assert len(steps_of(from_sb3(model, VecNormalize([0.0] * 3, [1.0] * 3)))) == 6


@pytest.mark.parametrize(
    ("before", "seen", "replays"),
    [
        (None, INSIDE, False),
        (None, None, True),
        (INSIDE, None, True),
        (INSIDE, INSIDE, True),
        (OUTSIDE, OUTSIDE, True),
    ],
)
def test_a_model_without_a_trace_of_a_normaliser_is_taken(
    before: object, seen: object, replays: bool
) -> None:
    assert len(steps_of(from_sb3(trained(before, seen, replays=replays)))) == 3


def test_an_unknown_space_is_refused() -> None:
    class Graph:
        shape = ()

    model = PPO(SEEN, ARM, 2)
    model.action_space = Graph()
    with pytest.raises(ExportError, match="`Graph` is not a space that kd_export knows"):
        from_sb3(model)


def test_several_groups_need_an_example() -> None:
    model = MLPModel(4)
    model.obs_groups = ["policy", "history"]
    with pytest.raises(ExportError, match="reads several observations, policy, history"):
        from_rsl_rl(model)


def test_a_module_of_kd_needs_no_conversion() -> None:
    module = TensorDictModule(torch.nn.Linear(2, 2), in_keys=["x"], out_keys=["action"])
    with pytest.raises(NotExportable, match=r"to `kd_export\.save` as it is"):
        from_torchrl(module, {"x": torch.zeros(4, 2)})
