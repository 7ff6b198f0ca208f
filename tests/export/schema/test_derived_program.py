"""Schemas of `.pt2` files that torch wrote alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import kd_export
from kd_export import NotExportable

X = torch.ones(2, 3)


def written(path: Path, module: nn.Module, *args: object, **kwargs: object) -> Path:
    torch.export.save(torch.export.export(module, args, kwargs).run_decompositions(), path)
    return path


class Nested(nn.Module):
    def forward(self, x: Tensor, d: dict[str, Tensor]) -> dict[str, object]:
        return {"y": x + 1, "n": {"a.b": x * 2, "l": [x - 1, d["k"]]}, "again": (x + 1,)}


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x + 1, {"y": x * 2}


class Counting(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: int) -> Tensor:
        return x * factor


class Halting(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + 1, None


def test_a_dict_gives_its_outputs_their_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "m.pt2", Nested(), X, d={"k": torch.arange(3.0)})
    keys = [("y",), ("n", "a.b"), ("n", "l", "0"), ("n", "l", "1"), ("again", "0")]
    assert [entry.key for entry in kd_export.inspect(path).outputs] == keys
    session = kd_export.open(path, trusted=True)
    out = session.run({"x": X, "d_k": torch.arange(3.0)})
    assert list(out) == ["y", "n.a%2Eb", "n.l.0", "n.l.1", "again.0"]
    assert torch.equal(out["n.a%2Eb"], X * 2)


def test_other_results_are_called_as_in_the_graph(tmp_path: Path) -> None:
    schema = kd_export.inspect(written(tmp_path / "m.pt2", Pair(), X))
    assert [entry.key for entry in schema.outputs] == [("add",), ("mul",)]


@pytest.mark.parametrize(
    ("module", "args", "message"),
    [
        (Counting(), (X,), "changes a buffer"),
        (Overwriting(), (X.clone(),), "changes an input"),
        (Scaled(), (X, 2), "takes or gives what is not a tensor"),
        (Halting(), (X,), "takes or gives what is not a tensor"),
    ],
)
def test_what_no_runner_does_is_said(
    tmp_path: Path, module: nn.Module, args: tuple[object, ...], message: str
) -> None:
    path = written(tmp_path / "m.pt2", module, *args)
    for use in (kd_export.inspect, lambda path: kd_export.open(path, trusted=True)):
        with pytest.raises(NotExportable, match=rf"the program {message}.*torch.export.load"):
            use(path)


class Either(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y.sum() if x.shape[0] * y.shape[0] <= 500 else x * 3 + y.sum()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.linear(x) + y
        return result


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_for_some_sizes_is_refused(tmp_path: Path, strict: bool) -> None:
    path = tmp_path / "theirs.pt2"
    rows = Dim("a", min=1), Dim("b", min=1)
    shapes = tuple({0: row} for row in rows)
    example = torch.randn(3, 2), torch.randn(4, 2)
    program = torch.export.export(Either(), example, dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, path)
    assert [entry.shape[1] for entry in kd_export.inspect(path).inputs] == [2, 2]
    with pytest.raises(NotExportable, match=r"only where `.*size\(\)\[0\].* <= 500`"):
        kd_export.open(path, trusted=True)
    with pytest.raises(NotExportable, match=r"Run it by torch alone"):
        kd_export.convert(path, tmp_path / "ours.onnx", trusted=True)


@pytest.mark.parametrize("strict", [False, True])
def test_sizes_that_are_equal_are_one_axis(tmp_path: Path, strict: bool) -> None:
    path = tmp_path / "theirs.pt2"
    rows = {0: Dim.AUTO}
    both = Both()
    program = torch.export.export(both, (X, X + 1), dynamic_shapes=(rows, rows), strict=strict)
    assert program._guards_code
    torch.export.save(program, path)
    session = kd_export.open(path, trusted=True)
    torch.testing.assert_close(session.run({"x": X, "y": X})["add"], both(X, X))
    with pytest.raises(kd_export.ShapeMismatch):
        session.run({"x": X, "y": X[:1].repeat(3, 1)})
