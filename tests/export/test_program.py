import copy
import functools
from pathlib import Path

import pytest
import torch
from tests.export.models import CASES, Case, Do, Keyed, case, exported, saved
from torch import Tensor, nn

import kd_export
from kd_core import TensorDict
from kd_export import (
    BackendMissing,
    DtypeMismatch,
    ExportError,
    KeyMismatch,
    NotExportable,
    ShapeMismatch,
    Specialized,
    UntrustedArtifact,
    VerifyError,
)
from kd_nn import TensorDictModule

X = {"x": torch.ones(2, 3)}


def do(function: object, in_keys: list[str], out_keys: list[str]) -> Keyed:
    return Keyed(Do(function), list(in_keys), list(out_keys))  # type: ignore[arg-type]  # a lambda


@pytest.mark.parametrize("name", CASES)
def test_saved_program_gives_what_the_module_gives(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    assert exported(name).save(path).ok
    assert kd_export.verify(path, trusted=True).ok
    assert kd_export.verify(path, reference=case(name).module, trusted=True).ok


def operators(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_graph_holds_the_operators_of_the_plain_module() -> None:
    model = case("tutorial")
    plain = torch.export.export(model.module.net, (torch.ones(2, 3),))
    program = kd_export.export(model.module, model.example)
    assert operators(program.exported_program) == operators(plain)


def test_module_is_not_touched() -> None:
    module = case("policy").module
    before = copy.deepcopy(module.state_dict())
    kd_export.export(module, {("obs", "x"): torch.ones(1, 3)})
    assert module.training
    assert all(part.training for part in module.modules())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(weight.requires_grad for weight in module.parameters())


EXAMPLES = [
    {("in", "x"): torch.ones(1, 3)},
    {"in.x": torch.ones(1, 3)},
    {"in": {"x": torch.ones(1, 3)}},
    TensorDict({"in": {"x": torch.ones(1, 3)}, "more": torch.ones(1)}, batch_size=[1]),
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_may_take_any_form(example: dict[str, Tensor]) -> None:
    program = kd_export.export(case("nested").module, example)
    assert program.schema.inputs[0].key == ("in", "x")
    assert program.schema.inputs[0].shape == ("batch", 3)
    assert program.schema.outputs[0].describe() == "float32 (batch, 2)"


def test_containers_batch_size_names_the_batch() -> None:
    model = do(lambda x, y: (x + y.sum(-1, keepdim=True),), ["x", "y"], ["z"])
    example = TensorDict({"x": torch.ones(1, 3), "y": torch.ones(1, 3)}, batch_size=[1, 3])
    schema = kd_export.export(model, example, dynamic="rows").schema
    assert [entry.shape for entry in schema.inputs] == [("rows", 3), ("rows", 3)]


def test_weights_keep_their_names() -> None:
    model = case("policy")
    program = kd_export.export(model.module, model.example)
    assert set(program.exported_program.state_dict) == set(model.module.state_dict())


def test_fixed_shapes() -> None:
    program = kd_export.export(case("tutorial").module, {"x": torch.ones(1, 3)}, dynamic=None)
    assert program.schema.axes == {}
    assert program.schema.inputs[0].shape == (1, 3)


def test_range_of_the_batch() -> None:
    program = kd_export.export(case("tutorial").module, X, dynamic={"batch": (2, 64)})
    assert str(program.schema.axes["batch"]) == "2..64"
    with pytest.raises(ShapeMismatch, match=r"The axis `batch` ranges over 2\.\.64"):
        program({"x": torch.ones(65, 3)})


def test_unselected_steps_are_left_out() -> None:
    model = case("tutorial").module
    program = kd_export.export(model, X, outputs=["hidden"])
    assert operators(program.exported_program) == ["aten.linear.default", "aten.relu.default"]
    assert [entry.wire for entry in program.schema.outputs] == ["hidden"]


def test_metadata_is_kept() -> None:
    program = kd_export.export(case("shared").module, X, metadata={"epoch": 3})
    assert program.schema.metadata == {"epoch": 3}


def test_plain_module_is_refused_with_the_remedy() -> None:
    with pytest.raises(NotExportable, match=r"`Linear` has no `in_keys`.*TensorDictModule"):
        kd_export.export(nn.Linear(3, 3), X)


def test_missing_example_names_the_nearest() -> None:
    with pytest.raises(
        KeyMismatch, match=r"`x` not found in the example; available keys: `y`"
    ) as caught:
        kd_export.export(case("shared").module, {"y": torch.ones(2, 3)})
    assert caught.value.key == ("x",)


def test_unknown_output_names_the_nearest() -> None:
    with pytest.raises(KeyMismatch, match=r"output `hiden` not found.*Did you mean `hidden`\?"):
        kd_export.export(case("tutorial").module, X, outputs=["hiden"])


def test_example_must_hold_tensors() -> None:
    with pytest.raises(
        DtypeMismatch, match="expected a tensor for `x` of the example, got a float"
    ):
        kd_export.export(case("shared").module, {"x": 1.0})


def test_inputs_without_a_common_size_need_names() -> None:
    module = do(lambda x, y: x + y.sum(), ["x", "y"], ["z"])
    with pytest.raises(ShapeMismatch, match=r"no common leading size \(`x`: 2, `y`: 5\)"):
        kd_export.export(module, {"x": torch.ones(2, 3), "y": torch.ones(5)})


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.reshape(2, 3) + 1,
        lambda x: x + torch.arange(int(x.shape[0]))[:, None],
        lambda x: x + torch.ones(2, 3),
    ],
)
def test_frozen_batch_is_an_error_that_names_key_and_dimension(function: object) -> None:
    with pytest.raises(Specialized, match=r"dimension 0 of `x` \(axis `batch`\)") as caught:
        kd_export.export(do(function, ["x"], ["y"]), X)
    assert caught.value.key == ("x",)
    assert caught.value.got == 2


def test_branch_on_data_is_explained() -> None:
    module = do(lambda x: x + 1 if x.sum() > 0 else x - 1, ["x"], ["y"])
    with pytest.raises(NotExportable, match=r"`Do` \(`net`\) decides by the values of a tensor"):
        kd_export.export(module, X)


def test_missing_output_is_named() -> None:
    module = do(lambda x: (x,), ["x"], ["y"])
    module.forward = lambda td: td  # type: ignore[method-assign]  # a module that writes nothing
    with pytest.raises(
        KeyMismatch, match=r"output `y` not found in the result of the module; available keys: `x`"
    ):
        kd_export.export(module, X)


def test_range_must_make_sense() -> None:
    with pytest.raises(ExportError, match=r"`batch` cannot range over 5\.\.3"):
        kd_export.export(case("shared").module, X, dynamic={"batch": (5, 3)})


def test_save_does_it_all(tmp_path: Path) -> None:
    model: Case = case("nested")
    report = kd_export.save(model.module, tmp_path / "model.pt2", model.example)
    assert report.ok
    assert len(report.rows) == 6  # four sizes, one well above them, and the example


def test_mismatch_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"before")
    program = kd_export.export(case("tutorial").module, X)
    weights = program.exported_program.state_dict
    weights["net.last.bias"] = nn.Parameter(weights["net.last.bias"].detach() + 1.0)
    with pytest.raises(kd_export.VerifyError, match=r"`model\.pt2` was not written"):
        program.save(path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_strict_capture_gives_the_same_graph() -> None:
    model = case("tutorial")
    one = kd_export.export(model.module, model.example)
    other = kd_export.export(model.module, model.example, strict=True)
    assert operators(one.exported_program) == operators(other.exported_program)
    assert one.schema == other.schema


class Caching(nn.Module):
    @functools.cached_property
    def factor(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_strict_capture_follows_what_a_module_caches() -> None:
    program = kd_export.export(Keyed(Caching(), ["x"], ["y"]), X, strict=True)
    assert operators(program.exported_program) == ["aten.mul.Tensor"]


def test_a_program_prints_its_table_and_what_was_mended() -> None:
    program = kd_export.export(Keyed(nn.Identity(), ["x"], ["y"]), X)
    lines = repr(program).splitlines()
    assert lines[0] == "KeyedProgram"
    assert lines[-1].startswith("note: the output `y` shares memory")
    assert "<td>y</td>" in program._repr_html_()


@pytest.mark.parametrize("name", ["gru", "graph", "transformer"])
def test_a_file_is_converted_without_its_module(name: str, tmp_path: Path) -> None:
    model, source, target = case(name), tmp_path / "model.pt2", tmp_path / "model.onnx"
    state = {("state", "h"): ("next", "h")} if name == "gru" else None
    kd_export.save(
        model.module,
        source,
        model.example,
        dynamic=model.dynamic,
        state=state,
        metadata={"epoch": 3},
    )
    report = kd_export.convert(source, target, trusted=True)
    assert report.ok
    assert kd_export.verify(target, model.module).ok
    told = {row.what for row in kd_export.diff(source, target).rows}
    assert told <= {"version", "result"}  # the tests of the target are made anew
    again = tmp_path / "again.pt2"
    assert kd_export.convert(source, again, trusted=True).ok
    assert kd_export.inspect(again).weights == kd_export.inspect(source).weights


def test_what_cannot_be_converted_is_refused_first(tmp_path: Path) -> None:
    source, target = saved("nested", tmp_path / "model.pt2"), tmp_path / "model.onnx"
    with pytest.raises(UntrustedArtifact, match="executes the program it holds"):
        kd_export.convert(source, target)
    with pytest.raises(BackendMissing, match=r"no backend found for `model\.tvm`"):
        kd_export.convert(source, tmp_path / "model.tvm", trusted=True)
    assert not target.exists()
    saved("nested", target)
    before = target.read_bytes()
    with pytest.raises(NotExportable, match=r"`model\.onnx` is ONNX, which cannot be turned back"):
        kd_export.convert(target, source)
    source.write_bytes(source.read_bytes()[:-10])
    with pytest.raises(ExportError, match="It may be truncated"):
        kd_export.convert(source, target, trusted=True)
    assert target.read_bytes() == before


class Counting(nn.Module):
    """It gives another result each time."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def test_a_module_that_changes_from_call_to_call_is_told_so(tmp_path: Path) -> None:
    module = TensorDictModule(Counting(), in_keys=["x"], out_keys=["y"])
    with pytest.raises(VerifyError, match="other values of `y` each time it is called"):
        kd_export.save(module, tmp_path / "model.pt2", {"x": torch.ones(2, 3)})


def test_an_opset_is_chosen(tmp_path: Path) -> None:
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    path = tmp_path / "model.onnx"
    assert kd_export.save(module, path, {"x": torch.ones(2, 3)}, batch_sizes=(2,), opset=18).ok
    assert kd_export.inspect(path).versions["opset"] == "18"
    model = pytest.importorskip("onnx").load(path)
    assert [one.version for one in model.opset_import if not one.domain] == [18]


def test_kernels_are_for_executorch_alone(tmp_path: Path) -> None:
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    program = kd_export.export(module, {"x": torch.ones(2, 3)})
    with pytest.raises(ExportError, match="`kernels` cannot be combined with ONNX"):
        program.save(tmp_path / "model.onnx", kernels="portable")
    with pytest.raises(ExportError, match="expected `xnnpack` or `portable` for `kernels`"):
        program.save(tmp_path / "model.pte", kernels="fast")


def test_an_opset_is_for_onnx_alone(tmp_path: Path) -> None:
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    example = {"x": torch.ones(2, 3)}
    with pytest.raises(ExportError, match="`opset` cannot be combined with"):
        kd_export.save(module, tmp_path / "model.pt2", example, opset=18)
    with pytest.raises(ExportError, match="`opset` must be a positive int, got 'new'"):
        kd_export.save(module, tmp_path / "model.onnx", example, opset="new")  # type: ignore[arg-type]  # the point of the test
