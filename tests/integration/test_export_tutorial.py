"""The export tutorial, from top to bottom, on our modules."""

from collections.abc import Callable
from operator import getitem
from pathlib import Path
from typing import ClassVar, cast

import pytest
import torch
from tests import children
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import Node

from kd_core import TensorDict, TensorDictBase
from kd_nn import NormalParamExtractor, dispatch
from kd_nn import TensorDictModule as Mod
from kd_nn import TensorDictSequential as Seq
from kd_probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

X = torch.tensor([[0.5, -1.0, 2.0]])


def make() -> Seq:
    torch.manual_seed(0)
    return Seq(
        Mod(nn.Linear(3, 4), in_keys=["x"], out_keys=["hidden"]),
        Mod(nn.ReLU(), in_keys=["hidden"], out_keys=["hidden"]),
        Mod(nn.Linear(4, 4), in_keys=["hidden"], out_keys=["latent"]),
        Mod(NormalParamExtractor(), in_keys=["latent"], out_keys=["loc", "scale"]),
    )


def operations(program: ExportedProgram) -> list[tuple[object, ...]]:
    """Return each operation with the constants it takes."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return [
        (str(node.target).removeprefix("aten."), *(a for a in node.args if not isinstance(a, Node)))
        for node in calls
        if node.target is not getitem
    ]


def outputs(program: ExportedProgram) -> list[str]:
    return [str(spec.arg.name) for spec in program.graph_signature.output_specs]


def test_four_outputs_in_order() -> None:
    model = make()
    hidden, latent, loc, scale = model(x=X)
    first, second = (cast(nn.Linear, model[idx].module) for idx in (0, 2))
    torch.testing.assert_close(hidden, first(X).relu())
    torch.testing.assert_close(latent, second(hidden))
    torch.testing.assert_close(loc, latent[:, :2])
    raw = latent[:, 2:] + 0.5254586935043335
    torch.testing.assert_close(scale, nn.functional.softplus(raw) + 0.01)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_graph_is_the_one_that_is_printed(strict: bool) -> None:
    program = export(make(), args=(), kwargs={"x": X}, strict=strict)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert names == [
        "p_module_0_module_weight",
        "p_module_0_module_bias",
        "p_module_2_module_weight",
        "p_module_2_module_bias",
        "x",
    ]
    assert operations(program) == [
        ("linear.default",),
        ("relu.default",),
        ("linear.default",),
        ("chunk.default", 2, -1),
        ("add.Tensor", 0.5254586935043335),
        ("softplus.default",),
        ("add.Tensor", 0.01),
        ("clamp_min.default", 0.0001),
    ]
    assert outputs(program) == ["relu", "linear_1", "getitem", "clamp_min"]


def test_exported_module_is_called_by_keyword_and_agrees() -> None:
    model = make()
    exported = export(model, args=(), kwargs={"x": X}).module()
    torch.testing.assert_close(exported(x=X), model(x=X), rtol=0, atol=0)


def test_nested_keys_by_keyword() -> None:
    nested = Seq(
        Mod(lambda x: x + 1, in_keys=[("some", "key")], out_keys=["hidden"]),
        Mod(lambda x: x - 1, in_keys=["hidden"], out_keys=[("some", "output")]),
    ).select_out_keys(("some", "output"))
    program = export(nested, args=(), kwargs={"some_key": X})
    assert program.graph_signature.user_inputs == ("some_key",)
    assert operations(program) == [("add.Tensor", 1), ("sub.Tensor", 1)]
    torch.testing.assert_close(program.module()(some_key=X), X)


SELECTIONS: dict[str, Callable[[], Seq]] = {
    "argument": lambda: Seq(*make(), selected_out_keys=["loc"]),
    "method": lambda: make().select_out_keys("loc"),
    "wrapped": lambda: Seq(make(), selected_out_keys=["loc"]),
}


@pytest.mark.parametrize("way", SELECTIONS)
def test_selected_output_is_a_tensor_and_the_graph_returns_it_alone(way: str) -> None:
    model = SELECTIONS[way]()
    loc = model(x=X)
    assert torch.equal(cast(Tensor, loc), make()(x=X)[2])
    program = export(model, args=(), kwargs={"x": X})
    assert outputs(program) == ["getitem"]


def test_dead_steps_are_not_in_the_graph() -> None:
    program = export(make().select_out_keys("hidden"), args=(), kwargs={"x": X})
    program.graph.eliminate_dead_code()  # torch keeps what a step computed for nobody
    assert operations(program) == [("linear.default",), ("relu.default",)]


def test_selection_is_reverted() -> None:
    assert len(make().select_out_keys("loc").reset_out_keys()(x=X)) == 4


LOADER = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("kd_"):
            raise ImportError(name + " must not be needed")

sys.meta_path.insert(0, Block())
import torch
x, expected = torch.load(sys.argv[2])
got = torch.export.load(sys.argv[1]).module()(x=x)
torch.testing.assert_close(got, expected)
assert not any(name.startswith("kd_") for name in sys.modules)
"""


def test_saved_program_runs_where_no_kd_package_can_be_imported(tmp_path: Path) -> None:
    model = make()
    torch.export.save(export(model, args=(), kwargs={"x": X}), tmp_path / "model.pt2")
    torch.save((X, tuple(out.detach() for out in model(x=X))), tmp_path / "data.pt")
    files = (tmp_path / "model.pt2", tmp_path / "data.pt")
    children.check_output("-W", "ignore", "-c", LOADER, *files, env={"PATH": ""})


class Custom(nn.Module):
    in_keys: ClassVar = ["x"]
    out_keys: ClassVar = ["y"]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("y", self.linear(tensordict["x"]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: Mod(nn.Linear(3, 4), ["x"], ["y"]),
    "sequence": make,
    "custom module": Custom,
    "probabilistic sequence": lambda: ProbabilisticTensorDictSequential(
        Mod(nn.Linear(3, 8), ["x"], ["p"]),
        Mod(NormalParamExtractor(), ["p"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["z"], distribution_class=torch.distributions.Normal
        ),
    ),
    "sequence with a custom module": lambda: Seq(Custom(), Mod(nn.ReLU(), ["y"], ["z"])),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_dynamic_batch_by_keyword(kind: str, strict: bool) -> None:
    model = MODELS[kind]()
    program = export(
        model,
        (),
        {"x": X.expand(4, 3)},
        dynamic_shapes={"x": {0: Dim("batch")}},
        strict=strict,
    )
    for batch in (1, 2, 9):
        x = torch.randn(batch, 3)
        torch.testing.assert_close(program.module()(x=x), model(x=x), rtol=0, atol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_export_after_eager_calls_and_with_two_inputs(strict: bool) -> None:
    model = Seq(Mod(torch.add, ["x", ("in", "y")], ["s"]), Mod(torch.neg, ["s"], ["t"]))
    model(X, X)
    model(TensorDict({"x": X, "in": {"y": X}}))
    batch = Dim("batch")
    program = export(
        model,
        (),
        {"x": torch.ones(4, 3), "in_y": torch.ones(4, 3)},
        dynamic_shapes={"x": {0: batch}, "in_y": {0: batch}},
        strict=strict,
    )
    s, t = program.module()(x=torch.ones(7, 3), in_y=torch.ones(7, 3))
    assert (s == 2).all()
    assert (t == -2).all()
