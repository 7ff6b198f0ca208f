"""A schema lists the steps that are in the program, with what they say of themselves."""

from pathlib import Path

import pytest
import torch
from tests.export.models import Do, Keyed
from torch import Tensor, nn

from kd_core import TensorDictBase
from kd_export import export, inspect
from kd_export.cli import main
from kd_nn import TensorDictModule, TensorDictSequential, WrapModule


class Clip(nn.Module):
    def __init__(self, said: str) -> None:
        super().__init__()
        self.said = said

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    def extra_repr(self) -> str:
        return self.said


def policy(said: str = "low=-1,\n  high=1") -> TensorDictSequential:
    """Build a policy with one step that no output needs."""
    network = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["n"], ["h"]),
        TensorDictModule(nn.Linear(4, 2), ["h"], ["unused"]),
        TensorDictModule(torch.tanh, ["h"], [("a", "raw")]),
    )
    return TensorDictSequential(
        TensorDictModule(torch.neg, [("obs", "v")], ["n"]),
        network,
        TensorDictModule(Clip(said), [("a", "raw")], ["action"]),
    ).select_out_keys("action")


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_steps_of_the_program_are_in_the_file(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"policy.{suffix}"
    export(policy(), {("obs", "v"): torch.randn(2, 3)}).save(path)
    assert [step.row() for step in inspect(path).steps] == [
        ("0", "neg", "obs.v", "n"),
        ("1.0", "Linear(in_features=3, out_features=4, bias=True)", "n", "h"),
        ("1.2", "tanh", "h", "a.raw"),
        ("2", "Clip(low=-1, high=1)", "a.raw", "action"),
    ]
    assert main(["inspect", str(path)]) == 0
    assert "Clip(low=-1, high=1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "shown"),
    [("", "Clip"), ("f=<function at 0x7f00>", "Clip"), ("x" * 900, f"Clip({'x' * 192}...")],
)
def test_settings_are_short_and_the_same_in_each_process(said: str, shown: str) -> None:
    steps = export(policy(said), {("obs", "v"): torch.randn(2, 3)}).schema.steps
    assert steps[-1].runs == shown


def test_one_module_is_one_step() -> None:
    alone = TensorDictModule(nn.ReLU(), ["x"], ["y"])
    (step,) = export(alone, {"x": torch.ones(2, 3)}).schema.steps
    assert step.row() == ("", "ReLU", "x", "y")

    def double(td: TensorDictBase) -> TensorDictBase:
        return td.set("y", 2 * td["x"])

    whole = WrapModule(double, in_keys=["x"], out_keys=["y"])
    (step,) = export(whole, {"x": torch.ones(2, 3)}).schema.steps
    assert step.row() == ("", "double", "x", "y")


def test_a_module_without_a_key_graph_lists_none() -> None:
    class Bare(nn.Module):
        in_keys, out_keys = ("x",), ("y",)

        def forward(self, td: TensorDictBase) -> TensorDictBase:
            return td.set("y", td["x"] + 1)

    assert export(Bare(), {"x": torch.ones(2, 3)}).schema.steps == ()


def test_a_changed_step_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = {"x": torch.ones(2, 3)}
    for name, net in (("a", nn.ReLU()), ("b", nn.GELU())):
        export(Keyed(Do(net), ["x"], ["y"]), example).save(tmp_path / f"{name}.onnx")
        export(TensorDictModule(net, ["x"], ["y"]), example).save(tmp_path / f"{name}{name}.onnx")
    assert main(["diff", str(tmp_path / "aa.onnx"), str(tmp_path / "bb.onnx")]) == 1
    shown = capsys.readouterr().out
    assert "ReLU: x -> y" in shown
    assert "GELU(approximate='none'): x -> y" in shown
