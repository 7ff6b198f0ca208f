from pathlib import Path

import pytest
import torch
from tests.export.models import Do, Keyed, Scatter, case
from torch import Tensor, nn
from torch.export import Dim

import kd_export
from kd_core import TensorDict, TensorDictBase
from kd_export import ExportError, KeyMismatch, ShapeMismatch, Specialized
from kd_export._capture.dynamic_shapes import DynamicShapes, repeat_rows, widen
from kd_export._schema.linear_size import LinearSize
from kd_export._schema.schema import Axis

X = {"x": torch.ones(2, 3)}


def double() -> Keyed:
    return Keyed(Do(lambda x: x * 2), ["x"], ["y"])


def test_other_dimensions_can_be_named() -> None:
    program = kd_export.export(double(), X, dynamic={"x": {0: "row", -1: "column"}})
    assert program.schema.inputs[0].shape == ("row", "column")
    assert program.schema.outputs[0].shape == ("row", "column")
    assert program({"x": torch.ones(5, 7)})["y"].shape == (5, 7)


def test_names_and_ranges_go_together() -> None:
    dynamic: dict[str, tuple[int, int | None] | dict[int, str]] = {
        "x": {1: "column"},
        "column": (2, 9),
    }
    schema = kd_export.export(double(), X, dynamic=dynamic).schema
    assert schema.inputs[0].shape == (2, "column")
    assert schema.axes == {"column": Axis(2, 9)}


def test_nested_input_is_named_by_wire_name_or_key() -> None:
    model = case("nested")
    by_wire = kd_export.export(model.module, model.example, dynamic={"in.x": {0: "b"}})
    by_key = kd_export.export(model.module, model.example, dynamic={("in", "x"): {0: "b"}})
    assert by_wire.schema.inputs[0].shape == by_key.schema.inputs[0].shape == ("b", 3)


def test_size_of_an_output_is_told_in_axes() -> None:
    module = Keyed(Do(lambda x: torch.cat([x, x])), ["x"], ["y"])
    assert kd_export.export(module, X).schema.outputs[0].shape == ("2*batch", 3)


def test_two_axes_stay_apart() -> None:
    model = case("graph")
    program = kd_export.export(model.module, model.example, dynamic=model.dynamic)
    assert set(program.schema.axes) == {"node", "edge"}
    assert program.schema.input("edge.from").shape == ("edge",)
    assert isinstance(model.module.net, Scatter)


class Rows(nn.Module):
    """Sum the entries of each row of a ragged table, which offsets delimit, and pair columns."""

    def forward(self, offsets: Tensor, weights: Tensor, pairs: Tensor) -> tuple[Tensor, ...]:
        lengths = offsets[1:] - offsets[:-1]
        return lengths * weights, pairs.reshape(-1, 2, 3).sum(1)


def test_sizes_that_follow_from_others(tmp_path: Path) -> None:
    module = Keyed(Rows(), ["offsets", ("in", "w"), "pairs"], ["sums", "halves"])
    example = {"offsets": torch.tensor([0, 2]), "in.w": torch.ones(1), "pairs": torch.ones(2, 3)}
    program = kd_export.export(
        module,
        example,
        dynamic={"offsets": {0: "row+1"}, "in.w": {0: "row"}, "pairs": {0: "2 * p"}, "p": (1, 9)},
    )
    schema = program.schema
    assert [entry.shape for entry in schema.inputs] == [("row + 1",), ("row",), ("2*p", 3)]
    assert [entry.shape for entry in schema.outputs] == [("row",), ("p", 3)]
    assert schema.axes == {"row": Axis(), "p": Axis(1, 9)}
    for name in ("rows.pt2", "rows.onnx"):
        report = program.save(tmp_path / name)
        assert report.sizes["row"] == (1, 2, 3, 7, 33)
        session = kd_export.open(tmp_path / name, trusted=True)
        inputs = {"offsets": torch.arange(6), "in.w": torch.ones(5), "pairs": torch.ones(8, 3)}
        assert session.run(inputs)["sums"].tolist() == [1] * 5
        assert session.run(inputs)["halves"].shape == (4, 3)
        for key, size, message in (
            ("in.w", 6, r"for `in\.w`, got shape \(6,\)\. The axis `row` has size 5 in `offsets`"),
            ("pairs", 7, r"got shape \(7, 3\)\. 7 is not a value of `2\*p`"),
            ("pairs", 20, r"The axis `p` ranges over 1\.\.9"),
            ("offsets", 0, r"0 is not a value of `row \+ 1`"),
        ):
            wrong = inputs | {key: inputs[key][:1].repeat(size, *[1] * (inputs[key].dim() - 1))}
            with pytest.raises(ShapeMismatch, match=message):
                session.run(wrong)


def test_single_row_is_no_obstacle() -> None:
    program = kd_export.export(double(), {"x": torch.ones(1, 3)})
    assert program({"x": torch.ones(1, 3)})["y"].shape == (1, 3)


def test_empty_example_is_no_obstacle() -> None:
    assert kd_export.export(double(), {"x": torch.ones(0, 3)}).schema.axes["batch"].min == 1


def test_widened_size_is_no_size_of_a_weight() -> None:
    # With two rows, the rows and the two columns of the weight would look alike.
    shapes = DynamicShapes({("x",): {0: LinearSize("batch")}}, {"batch": Axis()})
    wide = widen({("x",): torch.ones(1, 3)}, shapes, [2])
    assert wide["x",].shape == (5, 3)


def test_broadcast_over_the_batch_is_not_mistaken_for_a_match() -> None:
    module = Keyed(Do(lambda x: x + torch.ones(2, 1)), ["x"], ["y"])
    with pytest.raises(Specialized, match="dimension 0 of `x`"):
        kd_export.export(module, X)


def test_rows_are_repeated() -> None:
    assert repeat_rows(torch.tensor([1, 2]), 0, 5).tolist() == [1, 2, 1, 2, 1]


def test_scalar_beside_a_batch_stays_fixed() -> None:
    module = Keyed(Do(lambda x, t: x * t), ["x", "t"], ["y"])
    schema = kd_export.export(module, {"x": torch.ones(2, 3), "t": torch.tensor(2.0)}).schema
    assert [entry.shape for entry in schema.inputs] == [("batch", 3), ()]


def test_module_may_ask_for_the_batch_size() -> None:
    module = double()
    module.forward = sized  # type: ignore[method-assign]  # reads the batch size of its input
    td = TensorDict({"x": torch.ones(4, 3)}, batch_size=[4])
    program = kd_export.export(module, td)
    assert program.schema.batch_dims == 1
    assert program({"x": torch.ones(7, 3)})["y"].shape == (7, 1)


def sized(td: TensorDictBase) -> TensorDictBase:
    x = td["x"]
    assert isinstance(x, Tensor)
    return td.set("y", x.new_ones(*td.batch_size, 1))


BAD = [
    ({"z": {0: "b"}}, KeyMismatch, "input `z` of `dynamic` not found; available inputs: `x`"),
    ({"x": {2: "b"}}, ShapeMismatch, r"from -2 to 1 of `x`, whose shape is \(2, 3\), got 2"),
    ({"x": {0: "a b"}}, ExportError, "'a b' cannot name dimension 0 of `x`.* `2\\*batch"),
    ({"x": {0: "a*b"}}, ExportError, "'a\\*b' cannot name dimension 0 of `x`"),
    ({"2*b": (1, 4)}, ExportError, "'2\\*b' cannot name an axis"),
    ({"x": {0: "2*b + 1"}}, ShapeMismatch, r"example: `x`\[0\] = 2 for `2\*b \+ 1`"),
    ({"x": {0: "b - 5"}}, ExportError, r"`b - 5`, .* negative .* range for it: `'b': \(5, None\)"),
    ({"x": {0: "b"}, "c": (1, 4)}, ExportError, "a range is given for `c`, which names no"),
    ({"a": (1, 4), "b": (1, 4)}, ExportError, "no dimension is named so"),
    ({"x": {0: Dim("b")}}, ExportError, r"Dim\('b', min=0\) cannot name dimension 0 of `x`"),
    ({"x": {0: Dim.AUTO}}, ExportError, r"AUTO\) cannot name dimension 0 of `x`"),
    ({"x": {0: None}}, ExportError, "None cannot name dimension 0 of `x`.* Leave out"),
    ({"x": {"0": "b"}}, ShapeMismatch, "of `x`, .*, got '0'"),
    ({"x": ("b", None)}, ExportError, "`x` cannot range over b..None.* named by a dict"),
    ({"x": {0: "b"}, "b": 5}, ExportError, "`b` cannot range over 5. Give"),
    ({"x": {0: "b"}, "b": (5, 2)}, ExportError, r"`b` cannot range over 5\.\.2"),
    ({"x": {0: "b"}, "b": (1, 2, 3)}, ExportError, r"`b` cannot range over \(1, 2, 3\)"),
    ({"x": {0: "b"}, "b": ("1", "2")}, ExportError, r"`b` cannot range over 1\.\.2"),
    (["batch"], ExportError, r"expected a name, a dict or `None` for `dynamic`, got \['batch'\]"),
    (True, ExportError, "expected a name, a dict or `None` for `dynamic`, got True"),
    ({"x": {0: "b", 1: "b"}}, ShapeMismatch, r"axis `b` has different sizes .*`x`\[1\] = 3"),
]


@pytest.mark.parametrize(("dynamic", "error", "message"), BAD)
def test_wrong_names_are_explained(
    dynamic: dict[str, dict[int, str]], error: type[ExportError], message: str
) -> None:
    with pytest.raises(error, match=message):
        kd_export.export(double(), X, dynamic=dynamic)


@pytest.mark.parametrize("bounds", [(11, 18), (4, 8)])
def test_an_example_outside_the_range_is_brought_into_it_and_said(
    bounds: tuple[int, int], tmp_path: Path
) -> None:
    module = Keyed(Do(lambda x: x[:, 2:].relu()), ["x"], ["y"])
    program = kd_export.export(
        module, {"x": torch.randn(5, 10)}, dynamic={"x": {0: "batch", 1: "width"}, "width": bounds}
    )
    low, high = bounds
    assert program.diagnostics == (
        "the example is not in the range: dimension 1 of `x` is 10, and `width` is "
        f"{low}..{high}. Its rows are repeated or left out to fit.",
    )
    assert program.save(tmp_path / "model.pt2").ok
    for width in (low - 1, high + 1):
        with pytest.raises(ShapeMismatch, match=f"`x`.* {width}"):
            program({"x": torch.randn(2, width)})
