"""Policies of lerobot, beside their own `select_action` between their processors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.policies.lacking import each_step_counts
from tests.tables import POLICIES, Record, beside_oracle

import kd_export
from kd_export.policies import Policy, from_lerobot

pytest.importorskip("lerobot", reason="the lane `policies` installs it")
act: Any = importlib.import_module("lerobot.policies.act.modeling_act")
tdmpc: Any = importlib.import_module("lerobot.policies.tdmpc.modeling_tdmpc")
factory: Any = importlib.import_module("lerobot.policies.factory")
types: Any = importlib.import_module("lerobot.configs.types")
control: Any = importlib.import_module("lerobot.utils.control_utils")
STATE, AROUND = "observation.state", "observation.environment_state"
CAMERA = "observation.images.top"
SHAPES = {STATE: (4,), AROUND: (3,), CAMERA: (3, 32, 32), "action": (2,)}
KINDS = {STATE: "STATE", AROUND: "ENV", CAMERA: "VISUAL", "action": "ACTION"}


def features(*names: str) -> dict[str, Any]:
    feature, kind = types.PolicyFeature, types.FeatureType
    return {name: feature(type=kind[KINDS[name]], shape=SHAPES[name]) for name in names}


def statistics(*names: str) -> dict[str, dict[str, torch.Tensor]]:
    """Statistics of a data set."""
    source = torch.Generator().manual_seed(3)
    found = {}
    for name in names:
        shape = (3, 1, 1) if name == CAMERA else SHAPES[name]
        mean = torch.rand(shape, generator=source) if name == CAMERA else torch.ones(shape) * 2
        width = torch.rand(shape, generator=source) + 0.5
        low, high = mean - 2 * width, mean + 2 * width
        inner = {"q01": low + 0.1, "q99": high - 0.1, "q10": low + 0.2, "q90": high - 0.2}
        found[name] = {"mean": mean, "std": width, "min": low, "max": high} | inner
    return found


def processed(model: Any, names: tuple[str, ...]) -> tuple[Any, Any, Any]:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight *= 1.5
    model.eval()
    stats = statistics(*names, "action")
    return model, *factory.make_pre_post_processors(model.config, dataset_stats=stats)


def of_act(*names: str, norm: str = "MEAN_STD", **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    mode = types.NormalizationMode[norm]
    small = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1}
    config = act.ACTConfig(
        input_features=features(*names),
        output_features=features("action"),
        normalization_mapping={"VISUAL": mode, "STATE": mode, "ENV": mode, "ACTION": mode},
        **{"chunk_size": 6, "n_action_steps": 4, **small, **options},
        pretrained_backbone_weights=None,
        device="cpu",
    )
    return processed(act.ACTPolicy(config), names)


class Eye(torch.nn.Module):
    """Sees in a moment what a ResNet sees in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Conv2d(3, 512, 16, stride=16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"feature_map": self.net(x).tanh()}


def with_small_eye(*names: str) -> tuple[Any, Any, Any]:
    made = of_act(*names)
    made[0].model.backbone = Eye()
    return made


def of_tdmpc(**options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    config = tdmpc.TDMPCConfig(
        input_features=features(STATE, AROUND),
        output_features=features("action"),
        normalization_mapping={
            name: types.NormalizationMode[mode]
            for name, mode in (("STATE", "MEAN_STD"), ("ENV", "MIN_MAX"), ("ACTION", "MIN_MAX"))
        },
        **{"n_action_repeats": 2, "use_mpc": False, **options},
        device="cpu",
    )
    return processed(tdmpc.TDMPCPolicy(config), (STATE, AROUND))


CASES: dict[str, Callable[[], Policy]] = {
    "act": lambda: from_lerobot(*of_act(STATE, AROUND)),
    "act ranges": lambda: from_lerobot(*of_act(STATE, AROUND, norm="MIN_MAX")),
    "act ensemble": lambda: from_lerobot(
        *of_act(STATE, AROUND, n_action_steps=1, temporal_ensemble_coeff=0.3)
    ),
    "act chunk": lambda: from_lerobot(*of_act(STATE, AROUND, norm="QUANTILES"), chunk="action"),
    "act camera": lambda: from_lerobot(*with_small_eye(STATE, CAMERA)),
    "tdmpc": lambda: from_lerobot(*of_tdmpc()),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_select_action_and_each_step_counts(
    case: str, tmp_path: Path, record_property: Record
) -> None:
    policy = CASES[case]()
    report = kd_export.save(policy, tmp_path / "policy.onnx", batch_sizes=(2,))
    record_property(POLICIES, beside_oracle("lerobot", case, report))
    assert each_step_counts(policy, tmp_path)


def beside(policy: Policy, processed: tuple[Any, Any, Any], steps: int = 7) -> float:
    """Step a policy beside `predict_action` of lerobot on one robot; return the difference."""
    model, before, after = processed
    model.reset()
    policy.reset()
    source = torch.Generator().manual_seed(1)
    apart = 0.0
    for _ in range(steps):
        seen = {}
        for key, value in policy.example.items():
            if key[0] == "observation" and isinstance(value, torch.Tensor):
                chosen = torch.randint(len(value), (1,), generator=source)
                seen[".".join(map(str, key))] = value[chosen].numpy()
        row = {name: value[0] for name, value in seen.items()}
        expected = control.predict_action(row, model, torch.device("cpu"), before, after, False)
        given: Any = policy(seen)
        apart = max(apart, float((torch.as_tensor(given) - expected).abs().max()))
    return apart


def test_one_robot_steps_as_predict_action() -> None:
    for options in ({}, {"n_action_steps": 1}, {"n_action_steps": 6}):
        made = of_act(STATE, AROUND, CAMERA, norm="QUANTILE10", **options)
        assert beside(from_lerobot(*made), made) < 1e-4


def test_an_element_that_never_changed_is_normalised() -> None:
    stats = statistics(STATE, AROUND, "action")
    stats[STATE]["max"][-1] = stats[STATE]["min"][-1]
    model = of_act(STATE, AROUND, norm="MIN_MAX")[0]
    made = model, *factory.make_pre_post_processors(model.config, dataset_stats=stats)
    assert beside(from_lerobot(*made), made) < 1e-4


def test_renamed_observations_have_the_name_of_the_robot() -> None:
    model, before, after = of_act(STATE, AROUND, CAMERA)
    before.steps[0].rename_map = {"observation.images.wrist": CAMERA}
    policy = from_lerobot(model, before, after)
    assert ("observation", "images", "wrist") in policy.example
    assert beside(policy, (model, before, after)) < 1e-4


def test_the_oracle_leaves_the_policy_as_it_was() -> None:
    made = of_act(STATE, AROUND)
    policy = from_lerobot(*made)
    row = {STATE: numpy.ones(4, "f"), AROUND: numpy.ones(3, "f")}
    run = made[0], torch.device("cpu"), *made[1:], False
    first = [control.predict_action(dict(row), *run) for _ in range(6)]
    made[0].reset()
    for action in first:
        policy.oracle({name: torch.as_tensor(value)[None] * 2 for name, value in row.items()})
        assert torch.equal(control.predict_action(dict(row), *run), action)


def test_the_file_says_where_its_chunks_are(tmp_path: Path) -> None:
    made = of_act(STATE, AROUND)
    for chunk, shape in (("state", (3, 2)), ("action", (3, 4, 2))):
        path = tmp_path / f"{chunk}.onnx"
        kd_export.save(from_lerobot(*made, chunk=chunk), path, rollouts=1, steps=6)
        schema = kd_export.inspect(path)
        told = {"kept in": chunk, "steps": 4, "predicted": 6}
        assert schema.metadata["chunk"] == told
        assert bool(schema.state) == (chunk == "state")
        session = kd_export.open(path)
        seen = {STATE: numpy.ones((3, 4), "f"), AROUND: numpy.ones((3, 3), "f")}
        assert session.step(seen)["action"].shape == shape


def test_what_is_not_converted_is_refused() -> None:
    model, before, after = of_act(STATE, AROUND)
    with pytest.raises(kd_export.ExportError, match="expected a policy of lerobot, got `Linear`"):
        from_lerobot(torch.nn.Linear(1, 1), before, after)
    with pytest.raises(kd_export.ExportError, match=r"a pipeline .* for `preprocessor`, got None"):
        from_lerobot(model, None, after)
    with pytest.raises(kd_export.ExportError, match="expected 'state' or 'action' for `chunk`"):
        from_lerobot(model, before, after, chunk="no")
    with pytest.raises(kd_export.ExportError, match="`UnnormalizerProcessorStep` of the preproc"):
        from_lerobot(model, after, before)
    planner = of_tdmpc(use_mpc=True, n_action_repeats=1)
    with pytest.raises(kd_export.ExportError, match=r"`TDMPCPolicy` .* draws random numbers"):
        from_lerobot(*planner)
    with pytest.raises(kd_export.ExportError, match="has no chunks: leave `chunk` out"):
        from_lerobot(*of_tdmpc(), chunk="action")
    before.steps[3]._tensor_stats[STATE].pop("std")
    with pytest.raises(kd_export.ExportError, match=r"`observation.state` .* no statistics"):
        from_lerobot(model, before, after)
