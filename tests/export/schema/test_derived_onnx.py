"""Schemas that are derived from models of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import kd_export
from kd_export import ExportError, NotExportable, Schema
from kd_export._schema import derived_onnx

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
    monkeypatch.setattr(derived_onnx, "_MOST_FIELDS", 1000)
    weight = helper.make_tensor("w", FLOAT, [1] * 10, [0.5])
    with pytest.raises(ExportError, match="too many fields"):
        inspected(tmp_path, weights=[weight] * 200)


def test_a_model_of_an_endless_name_is_refused(tmp_path: Path) -> None:
    weight = helper.make_tensor("w" * 100_000, FLOAT, [1], [0.5])
    with pytest.raises(ExportError, match="a name is too long"):
        inspected(tmp_path, weights=[weight])
