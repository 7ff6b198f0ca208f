"""The modules of kd_nn and kd_probabilistic, as an exporter sees them."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, LogNormal, Normal

import kd_export
from kd_core import TensorDict
from kd_export import KeyMismatch, NotExportable
from kd_nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from kd_probabilistic import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_interaction_type,
)

X = {"x": torch.ones(1, 3)}


def network() -> TensorDictSequential:
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["hidden"]),
        TensorDictModule(nn.ReLU(), in_keys=["hidden"], out_keys=["hidden"]),
        TensorDictModule(nn.Linear(4, 4), in_keys=["hidden"], out_keys=["latent"]),
        TensorDictModule(NormalParamExtractor(), in_keys=["latent"], out_keys=["loc", "scale"]),
    )


def actor(
    distribution: type[Distribution] = Normal,
    default: InteractionType = InteractionType.DETERMINISTIC,
) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        *network(),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=distribution,
            default_interaction_type=default,
        ),
    )


def operators(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_graph_has_the_nodes_of_a_plain_sequence() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), NormalParamExtractor())
    raw = torch.export.export(plain.eval(), (torch.ones(2, 3),))
    program = kd_export.export(network(), X).exported_program
    assert operators(program) == operators(raw)
    assert len(program.graph.nodes) == len(raw.graph.nodes)


def test_outputs_are_those_selected_in_their_order(tmp_path: Path) -> None:
    module = network().select_out_keys("scale", "hidden")
    program = kd_export.export(module, X)
    assert [entry.wire for entry in program.schema.outputs] == ["scale", "hidden"]
    assert program.save(tmp_path / "model.pt2").ok


def test_outputs_choose_the_steps() -> None:
    program = kd_export.export(network(), X, outputs=["hidden"])
    assert operators(program.exported_program) == ["aten.linear.default", "aten.relu.default"]


def test_inputs_choose_the_steps() -> None:
    example = {"hidden": torch.ones(1, 4)}
    program = kd_export.export(network(), example, inputs=["hidden"], outputs=["latent"])
    assert operators(program.exported_program) == ["aten.relu.default", "aten.linear.default"]


def test_no_step_left_is_explained() -> None:
    with pytest.raises(KeyMismatch, match=r"no part of the module fits .*`nope`"):
        kd_export.export(network(), X, outputs=["nope"])


def test_module_stays_as_it_was() -> None:
    module = network().select_out_keys("loc")
    kd_export.export(module, X)
    assert module.training
    assert module.out_keys == ["loc"]
    assert isinstance(module(x=torch.ones(2, 3)), torch.Tensor)


def test_two_batch_dimensions_of_which_the_first_is_dynamic(tmp_path: Path) -> None:
    td = TensorDict({"x": torch.ones(4, 5, 3)}, batch_size=[4, 5])
    program = kd_export.export(network(), td)
    assert program.schema.inputs[0].describe() == "float32 (batch, 5, 3)"
    assert program.save(tmp_path / "model.pt2").ok
    assert kd_export.verify(tmp_path / "model.pt2", network(), trusted=True).rows


@pytest.mark.parametrize("mode", [None, "deterministic", "mode", "mean", "median", "random"])
def test_each_interaction_mode_is_captured(mode: str | None, tmp_path: Path) -> None:
    module = actor(LogNormal)  # its mode, mean and median differ
    program = kd_export.export(module, X, mode=mode)
    assert program.schema.mode == mode
    assert program.save(tmp_path / "model.pt2").ok
    if mode in ("mode", "mean", "median"):
        with torch.no_grad(), set_interaction_type(mode):
            expected = module(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]))["action"]
        torch.testing.assert_close(program({"x": torch.ones(2, 3)})["action"], expected)


def test_scoped_mode_holds_for_the_verification_too(tmp_path: Path) -> None:
    with set_interaction_type("mean"):
        program = kd_export.export(actor(LogNormal), X)
    with set_interaction_type("mode"):
        assert program.save(tmp_path / "model.pt2").ok


def test_draw_is_refused_until_a_mode_is_given() -> None:
    module = actor(default=InteractionType.RANDOM)
    with pytest.raises(NotExportable, match=r"draws random numbers.*mode='deterministic'"):
        kd_export.export(module, X)
    assert kd_export.export(module, X, mode="deterministic").schema.mode == "deterministic"


def test_discrete_choice_is_verified_in_onnx(tmp_path: Path) -> None:
    module = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 5), in_keys=["x"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["choice"], distribution_class=Categorical
        ),
    ).select_out_keys("choice")
    report = kd_export.save(module, tmp_path / "model.onnx", X)
    assert report.largest == 0.0


def test_validation_of_distributions_is_back_after_export(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch switches validation off for good when something is compiled for the first time.
    monkeypatch.setattr(Distribution, "_validate_args", True)
    kd_export.export(actor(), X)
    with pytest.raises(ValueError, match="scale"):
        Normal(torch.zeros(1), -torch.ones(1))
