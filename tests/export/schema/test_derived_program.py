"""Schemas of `.pt2` files that torch wrote alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

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
