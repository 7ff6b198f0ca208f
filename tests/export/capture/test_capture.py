"""Capturing a module: what is refused is named, with the remedy; its steps are listed."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.export.models import Do, Keyed, case
from torch import Tensor, nn
from torch.export import ExportedProgram

from kd_core import TensorDict, TensorDictBase
from kd_export import (
    Axis,
    DtypeMismatch,
    Entry,
    KeyMismatch,
    NotExportable,
    Schema,
    diagnose,
    export,
    inspect,
    save,
    verify,
)
from kd_export import open as open_artifact
from kd_export._backends.pt2 import Pt2Backend
from kd_export.cli import main
from kd_nn import TensorDictModule, TensorDictSequential, WrapModule


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_branch_on_values_is_named(
    capfd: pytest.CaptureFixture[str], strict: bool, alone: bool
) -> None:
    step = TensorDictModule(Branching(), in_keys=["x"], out_keys=["y"])
    module = step if alone else TensorDictSequential(step)
    with pytest.raises(NotExportable, match=r"values of a tensor at `.*`.*torch.cond") as raised:
        export(module, {"x": torch.ones(3)}, strict=strict)
    assert "x.sum() > 0" in str(raised.value)
    assert "test_capture.py" in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_what_fails_in_the_module_is_said_in_one_sentence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    with pytest.raises(NotExportable, match=r"cannot be captured.*same reduction dim"):
        export(module, {"x": torch.ones(4, 7)})
    assert capfd.readouterr() == ("", "")


class Chatty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("called")
        return x + 1


def test_what_a_module_prints_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    export(TensorDictModule(Chatty(), in_keys=["x"], out_keys=["y"]), {"x": torch.ones(3)})
    assert "called" in capsys.readouterr().out


def test_a_lazy_layer_is_to_be_called_first() -> None:
    module = TensorDictModule(nn.LazyLinear(2), in_keys=["x"], out_keys=["y"])
    with pytest.raises(NotExportable, match=r"`module.weight` is not initialised.*Call the module"):
        export(module, {"x": torch.ones(4, 3)})
    module.module(torch.ones(4, 3))
    assert export(module, {"x": torch.ones(4, 3)})({"x": torch.ones(2, 3)})["y"].shape == (2, 2)


def parts(x: Tensor) -> tuple[TensorDict, Tensor]:
    return TensorDict({"a": x + 1, "deep": {"b": x * 2}}), x - 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_container_as_output_gives_all_its_tensors(tmp_path: Path, strict: bool) -> None:
    module, x = TensorDictModule(parts, in_keys=["x"], out_keys=["n", "y"]), torch.randn(4, 3)
    path = tmp_path / "m.pt2"
    assert save(module, path, {"x": x}, strict=strict).ok
    session = open_artifact(path, trusted=True)
    assert [entry.key for entry in session.schema.outputs] == [
        ("n", "a"),
        ("n", "deep", "b"),
        ("y",),
    ]
    out = session.run(TensorDict({"x": x[:2]}))
    assert torch.equal(out["n", "deep", "b"], x[:2] * 2)


def test_a_container_as_output_holds_tensors_and_nothing_else() -> None:
    empty = TensorDictModule(lambda x: (x, TensorDict({})), in_keys=["x"], out_keys=["y", "n"])
    with pytest.raises(KeyMismatch, match=r"output `n` is a container without tensors.*outputs="):
        export(empty, {"x": torch.ones(3)})
    words = TensorDictModule(lambda x: TensorDict({"a": x, "w": "up"}), ["x"], ["n"])
    with pytest.raises(DtypeMismatch, match=r"expected a tensor for the output `n\.w`.*outputs="):
        export(words, {"x": torch.ones(3)})
    assert export(words, {"x": torch.ones(3)}, outputs=[("n", "a")]).schema.outputs


def total(n: TensorDict) -> Tensor:
    return n["a"] + n["deep", "b"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_container_as_input_is_given_by_its_tensors(tmp_path: Path, nested: bool) -> None:
    inner = {"a": torch.randn(4, 3), "deep": {"b": torch.randn(4, 3)}}
    example = {"n": inner} if nested else TensorDict({"n": inner, "more": torch.ones(4)}, [4])
    module = TensorDictModule(total, in_keys=["n"], out_keys=["y"])
    path = tmp_path / "m.onnx"
    assert save(module, path, example).ok
    session = open_artifact(path)
    assert [entry.key for entry in session.schema.inputs] == [("n", "a"), ("n", "deep", "b")]
    half = TensorDict({"n": inner}, [4])[:2]
    torch.testing.assert_close(session.run(half)["y"], half["n", "a"] + half["n", "deep", "b"])
    assert verify(path, module).ok
    again = export(module, session.schema)
    assert [entry.key for entry in again.schema.inputs] == [("n", "a"), ("n", "deep", "b")]
    with pytest.raises(DtypeMismatch, match=r"expected a tensor for `n.w` of the example"):
        export(module, {"n": {**inner, "w": "up"}})


class ByDynamo(nn.Module):
    """Ask for what only one way of capturing knows."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting():
            raise ValueError("python cannot")
        return x + 1


def test_what_python_refuses_is_tried_by_dynamo() -> None:
    module = TensorDictModule(ByDynamo(), in_keys=["x"], out_keys=["y"])
    program = export(module, {"x": torch.ones(2, 3)})
    assert bool((program({"x": torch.ones(4, 3)})["y"] == 2).all())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_results_of_a_graph_among_the_attributes_are_copied() -> None:
    """The old weight norm keeps its weight as the result of its last call."""
    net = nn.utils.weight_norm(nn.Linear(3, 2))
    net(torch.ones(1, 3))
    module = TensorDictModule(net, in_keys=["x"], out_keys=["y"])
    x = torch.randn(4, 3)
    torch.testing.assert_close(export(module, {"x": x})({"x": x})["y"], net(x).detach())


def test_an_input_that_is_left_out_is_named() -> None:
    module = TensorDictModule(lambda x, mask: x * mask, in_keys=["x", "mask"], out_keys=["y"])
    with pytest.raises(KeyMismatch, match=r"`mask` not found in the example.*leave it out of its"):
        export(module, {"x": torch.ones(2, 3)})


def test_a_schema_is_an_example() -> None:
    module = TensorDictModule(lambda x, i: x[i] + 1, in_keys=[("in", "x"), "i"], out_keys=["y"])
    entries = (
        Entry(("in", "x"), "x", "float32", ("2*n", 3), -1.0, 1.0),
        Entry(("i",), "i", "int64", ("n",), 0, 1),
    )
    schema = Schema(entries, (), {"n": Axis(1, 9)})
    found = export(module, schema).schema
    assert [entry.shape for entry in found.inputs] == [("2*n", 3), ("n",)]
    assert found.axes == schema.axes
    again = export(module, found, dynamic=None)
    assert again.schema.input("in.x").shape == (6, 3)
    assert diagnose(module, schema, targets=[".pt2"]).ok
    with pytest.raises(KeyMismatch, match=r"`i` not found in the example; available keys: `in\.x`"):
        export(module, Schema(entries[:1], (), schema.axes))


def test_saving_in_one_call_copies_no_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[set[int]] = []
    write = Pt2Backend.write

    def spy(self: Pt2Backend, program: ExportedProgram, schema: Schema, path: Path) -> None:
        places.append({weight.data_ptr() for weight in program.parameters()})
        write(self, program, schema, path)

    monkeypatch.setattr(Pt2Backend, "write", spy)
    model = case("conv")
    own = {weight.data_ptr() for weight in model.module.parameters()}
    save(model.module, tmp_path / "m.pt2", model.example)
    export(model.module, model.example).save(tmp_path / "m.pt2")
    assert places[0] == own
    assert not places[1] & own
    assert model.module.training


@dataclass
class Pair:
    a: Tensor
    b: Tensor


SEVERAL = [[torch.ones(3), torch.ones(3)], (torch.ones(3),), Pair(torch.ones(3), torch.ones(3))]


@pytest.mark.parametrize("value", SEVERAL)
def test_several_tensors_in_another_thing_are_to_be_given_by_key(value: object) -> None:
    module = TensorDictModule(nn.Identity(), in_keys=["x"], out_keys=["y"])
    with pytest.raises(DtypeMismatch, match=r"got a \w+\. Give each of its tensors under a key"):
        export(module, {"x": value})


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
