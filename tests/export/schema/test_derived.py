"""Schemas of files that others wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.export import Dim

import kd_export
from kd_export import ExportError, NotExportable, Schema
from kd_export._schema import derived

FLOAT = TensorProto.FLOAT


def inspected(
    tmp_path: Path,
    *values: onnx.ValueInfoProto,
    weights: Sequence[onnx.TensorProto] = (),
    sparse: Sequence[onnx.SparseTensorProto] = (),
) -> Schema:
    outputs = [helper.make_tensor_value_info("out", FLOAT, None)]
    graph = helper.make_graph(
        [], "g", values, outputs, initializer=weights, sparse_initializer=sparse
    )
    onnx.save(helper.make_model(graph, producer_name="theirs"), tmp_path / "own.onnx")
    return kd_export.inspect(tmp_path / "own.onnx")


def test_sizes_become_axes(tmp_path: Path) -> None:
    shapes = [("n", 3), ("2*n + 1", None), ("None", "None"), ("a/b", 0), (), (-1,)]
    values = [
        helper.make_tensor_value_info(f"x{number}", TensorProto.INT64, shape)
        for number, shape in enumerate(shapes)
    ]
    schema = inspected(tmp_path, *values)
    assert [entry.shape for entry in schema.inputs] == [
        ("n", 3),
        ("2*n + 1", "size"),
        ("size_1", "size_2"),
        ("size_3", 0),
        (),
        ("size_4",),
    ]
    assert {str(axis) for axis in schema.axes.values()} == {"0.."}
    assert schema.output("out").describe() == "float32 (...,)"
    assert list(schema.versions) == ["theirs"]
    assert schema.derived


def test_weights_among_the_inputs_are_none(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, FLOAT, [1]) for name in ("x", "w", "s")]
    weight = helper.make_tensor("w", FLOAT, [1], [0.5])
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("s", FLOAT, [1], [1.0]),
        helper.make_tensor("", TensorProto.INT64, [1], [0]),
        [1],
    )
    schema = inspected(tmp_path, *values, weights=[weight], sparse=[sparse])
    assert [entry.name for entry in schema.inputs] == ["x"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (helper.make_tensor_value_info("x", TensorProto.STRING, [1]), "`x` .* data type 8"),
        (helper.make_tensor_value_info("x", FLOAT, None), "`x` .* has no shape"),
        (helper.make_tensor_sequence_value_info("x", FLOAT, [1]), "`x` .* is not a tensor"),
    ],
)
def test_what_is_not_a_tensor_is_refused(
    tmp_path: Path, value: onnx.ValueInfoProto, message: str
) -> None:
    with pytest.raises(NotExportable, match=message):
        inspected(tmp_path, value)


@pytest.mark.parametrize("data", [b"", b"\x08\x0a", b"\x3a\x02\x5a\x7f", b"\x3a\x03\x62\x01\x08"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "none.onnx"
    path.write_bytes(data)
    with pytest.raises(
        ExportError, match=r"is empty|no kd-export schema|not a whole ONNX|not a tensor"
    ):
        kd_export.inspect(path)


def test_a_model_of_endless_fields_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived, "_MOST_FIELDS", 1000)
    weight = helper.make_tensor("w", FLOAT, [1] * 10, [0.5])
    with pytest.raises(ExportError, match="too many fields"):
        inspected(tmp_path, weights=[weight] * 200)


def test_a_model_of_an_endless_name_is_refused(tmp_path: Path) -> None:
    weight = helper.make_tensor("w" * 100_000, FLOAT, [1], [0.5])
    with pytest.raises(ExportError, match="a name is too long"):
        inspected(tmp_path, weights=[weight])


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
