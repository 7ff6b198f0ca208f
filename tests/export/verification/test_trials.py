"""Sizes and inputs that programs are tried on, seen through `save` and `verify`."""

from pathlib import Path

import pytest
import torch
from tests.export.models import Do, Keyed
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import kd_export
from kd_export import Axis, DtypeMismatch, Schema, ShapeMismatch, VerifyError
from kd_export._verification.trials import trial_sizes
from kd_nn import TensorDictModule


def test_axes_take_sizes_out_of_step() -> None:
    schema = Schema((), (), {"node": Axis(), "edge": Axis(2, 4)})
    assert list(trial_sizes(schema, (1, 2, 3))) == [
        {"node": 1, "edge": 3},
        {"node": 2, "edge": 2},
        {"node": 3, "edge": 3},
    ]


def seen_by(module: nn.Module) -> list[Tensor]:
    """Record what a module is called with outside of a capture."""
    calls: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not torch.compiler.is_exporting():
            calls.append(args[0])

    module.register_forward_pre_hook(record)
    return calls


class Picky(nn.Module):
    """Accept what a check accepts, in eager calls."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and not RULES[self.rule](x):
            raise ValueError(f"not {self.rule}")
        return x * 2


RULES = {
    "at least 5": lambda x: bool((x >= 5).all()),
    "a mask": lambda x: bool(x.any(-1).all()),
    "sorted": lambda x: bool((x.diff() >= 0).all()),
    "zero or infinite": lambda x: bool((x == 0).logical_or(x.isinf()).all()),
}
EXAMPLES = [
    ("at least 5", torch.tensor([[7, 9, 5], [6, 8, 9]])),
    ("a mask", torch.tensor([[1, 1, 1], [1, 1, 0]])),
    ("a mask", torch.tensor([[True, False], [True, True]])),
    ("sorted", torch.tensor([[0.0, 2.0, 5.0], [1.0, 1.5, 9.0]])),
    ("zero or infinite", torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])),
]


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_inputs_are_of_the_kind_of_the_example(
    tmp_path: Path, rule: str, example: Tensor, suffix: str
) -> None:
    module = Keyed(Picky(rule), ["x"], ["y"])
    path = tmp_path / f"model.{suffix}"
    assert kd_export.save(module, path, {"x": example}).ok
    assert kd_export.verify(path, trusted=True).ok
    assert kd_export.verify(path, module, batch_sizes=[5], trusted=True).ok


def test_indices_stay_below_an_axis_that_shrinks(tmp_path: Path) -> None:
    module = Keyed(Do(lambda nodes, index: nodes[index]), ["nodes", "index"], ["y"])
    example = {"nodes": torch.randn(6, 2), "index": torch.tensor([5, 0, 3])}
    dynamic = {"nodes": {0: "node"}, "index": {0: "pick"}}
    report = kd_export.save(module, tmp_path / "m.onnx", example, dynamic=dynamic)
    assert report.ok
    assert report.rows[0].sizes == {"node": 1, "pick": 2}


def test_lengths_stay_within_an_axis_that_shrinks(tmp_path: Path) -> None:
    class Last(nn.Module):
        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            if not torch.compiler.is_exporting() and int(length.min()) < 1:
                raise ValueError("a length of 0")
            return x.gather(1, length[:, None] - 1)

    module = Keyed(Last(), ["x", "length"], ["y"])
    example = {"x": torch.randn(3, 6), "length": torch.tensor([6, 2, 4])}
    dynamic = {"x": {0: "batch", 1: "time"}, "length": {0: "batch"}}
    assert kd_export.save(module, tmp_path / "m.onnx", example, dynamic=dynamic).ok


def test_rows_of_several_inputs_stay_together(tmp_path: Path) -> None:
    class Paired(nn.Module):
        def forward(self, x: Tensor, twice: Tensor) -> Tensor:
            if not torch.compiler.is_exporting() and not bool((twice == 2 * x).all()):
                raise ValueError("rows of two examples")
            return x + twice

    x = torch.arange(12).reshape(4, 3)
    module = Keyed(Paired(), ["x", "twice"], ["y"])
    assert kd_export.save(module, tmp_path / "m.pt2", {"x": x, "twice": 2 * x}).ok


def test_the_example_itself_is_always_compared(tmp_path: Path) -> None:
    module = Keyed(nn.Linear(3, 2), ["x"], ["y"])
    calls = seen_by(module.net)
    example = torch.randn(5, 3)
    report = kd_export.save(module, tmp_path / "m.pt2", {"x": example})
    assert "(the example)" in str(report)
    assert [row.sizes for row in report.rows if row.note] == [{"batch": 5}]
    assert sum(call.shape == (5, 3) and bool((call == example).all()) for call in calls) == 1


def test_vectors_can_be_given(tmp_path: Path) -> None:
    class Orthogonal(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting() and float((x @ x.mT - torch.eye(2)).norm()) > 0.1:
                raise ValueError("not orthogonal")
            return x.mT

    module, path = Keyed(Orthogonal(), ["x"], ["y"]), tmp_path / "m.onnx"
    example = {"x": torch.eye(2).expand(1, 2, 2)}
    turned = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).expand(4, 2, 2)
    report = kd_export.save(module, path, example, vectors=[example, {"x": turned}])
    assert [row.sizes["batch"] for row in report.rows] == [1, 4, 1]
    assert [row.sizes["batch"] for row in kd_export.verify(path).rows] == [1, 4]
    assert kd_export.verify(path, module, vectors=[{"x": turned[:3]}]).ok


def test_given_vectors_are_checked(tmp_path: Path) -> None:
    module, path = Keyed(nn.Linear(3, 2), ["x"], ["y"]), tmp_path / "m.pt2"
    program = kd_export.export(module, {"x": torch.ones(2, 3)})
    with pytest.raises(ShapeMismatch, match=r"expected float32 \(batch, 3\) for `x`"):
        program.save(path, vectors=[{"x": torch.ones(2, 4)}])
    with pytest.raises(DtypeMismatch, match=r"for `x` of a vector, got float64"):
        program.save(path, vectors=[{"x": torch.ones(2, 3).double()}])
    assert program.save(path).ok
    with pytest.raises(VerifyError, match="without a `reference`"):
        kd_export.verify(path, vectors=[{"x": torch.ones(2, 3)}], trusted=True)


def test_each_stored_size_can_be_asked_for(tmp_path: Path) -> None:
    """Two axes take sizes out of step: no stored test has both."""
    module, path = Keyed(Do(lambda x: x * 2), ["x"], ["y"]), tmp_path / "m.pt2"
    dynamic = {"x": {0: "row", 1: "column"}}
    program = kd_export.export(module, {"x": torch.randn(2, 3)}, dynamic=dynamic)
    assert program.save(path).ok
    report = kd_export.verify(path, batch_sizes=(1, 2), trusted=True)
    assert report.ok
    assert {1, 2} <= {row.sizes["row"] for row in report.rows}
    with pytest.raises(VerifyError, match="no stored test for column=4"):
        kd_export.verify(path, batch_sizes=(4,), trusted=True)


def test_a_number_that_is_one_of_two_is_taken_from_rows_of_the_example(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def gated(x: Tensor, gate: Tensor) -> Tensor:
        seen.append(gate)
        return x * gate

    module = TensorDictModule(gated, in_keys=["x", "gate"], out_keys=["y"])
    example = {"x": torch.randn(8, 3), "gate": torch.tensor([[0.0, 2.5]] * 4).reshape(8, 1)}
    assert kd_export.save(module, tmp_path / "m.pt2", example).ok
    real = [gate for gate in seen if not isinstance(gate, FakeTensor)]
    assert len(real) > 3
    assert {number for gate in real for number in gate.flatten().tolist()} == {0.0, 2.5}
