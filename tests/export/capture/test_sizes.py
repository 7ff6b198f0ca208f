"""Sizes: which are dynamic, what a program needs of them, and where it is tried for them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.export.models import Do, Keyed, Scatter, case
from torch import Tensor, nn
from torch.export import Dim

import kd_export
from kd_core import TensorDict, TensorDictBase
from kd_export import (
    ExportError,
    KeyMismatch,
    ShapeMismatch,
    Specialized,
    VerifyError,
    export,
    save,
    verify,
)
from kd_export._capture.sizes import Dynamic, DynamicShapes, axes_of_schema, repeat_rows, widen
from kd_export._schema.schema import Axis, LinearSize

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


smallest = cast("Callable[[int, int], int]", torch.sym_min)
largest = cast("Callable[[int, int], int]", torch.sym_max)
PAIR: dict[str, dict[int, str] | tuple[int, int]] = {"x": {0: "a"}, "y": {0: "b"}}
EXAMPLE = {"x": torch.randn(3, 2), "y": torch.randn(4, 2)}


def smaller(x: Tensor) -> Tensor:
    """Serve batches of which 16 elements are no more than all."""
    return x + torch.ones(x.shape[0], smallest(16, x.numel())).reshape(-1, 16).sum()


def larger(x: Tensor) -> Tensor:
    """Serve batches of up to 16 rows."""
    return x + torch.ones(largest(16, x.shape[0])).reshape(16).sum()


@pytest.mark.parametrize(
    ("function", "columns", "dynamic", "strict"),
    [
        (smaller, 96, {"batch": (1, None)}, False),
        (smaller, 96, {"batch": (1, None)}, True),
        (smaller, 12, {"batch": (2, None)}, False),
        (smaller, 12, {"batch": (2, 60)}, True),
        (larger, 3, {"batch": (1, 16)}, False),
    ],
)
def test_a_relation_that_always_holds_limits_nothing(
    function: Callable[[Tensor], Tensor],
    columns: int,
    dynamic: Mapping[str, tuple[int, int | None]],
    strict: bool,
) -> None:
    module = Keyed(Do(function), ["x"], ["y"])
    program = export(module, {"x": torch.randn(3, columns)}, dynamic=dynamic, strict=strict)
    assert program.schema.axes["batch"].max == dynamic["batch"][1]
    targets = {str(node.target) for node in program.exported_program.graph.nodes}
    assert not {name for name in targets if "_assert_scalar" in name}
    for rows in (dynamic["batch"][0], 5, 16):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(program({"x": x})["y"], function(x))
        torch.testing.assert_close(program.exported_program.module()(x=x)["y"], function(x))


@pytest.mark.parametrize("most", [17, None])
def test_a_relation_that_may_fail_is_named(most: int | None) -> None:
    module = Keyed(Do(larger), ["x"], ["y"])
    with pytest.raises(Specialized, match=r"those where `max\(16, batch\) == 16`"):
        export(module, {"x": torch.randn(3, 12)}, dynamic={"batch": (1, most)})


def test_sizes_that_a_module_refuses_are_refused(tmp_path: Path) -> None:
    module = Keyed(Do(smaller), ["x"], ["y"])
    # torch 2.15 takes what older versions assert, and the module fails at one row.
    with pytest.raises((Specialized, VerifyError), match=r"those where|fails at batch=1"):
        save(module, tmp_path / "m.pt2", {"x": torch.randn(3, 12)}, dynamic={"batch": (1, 60)})
    assert not list(tmp_path.iterdir())


def test_two_axes_are_weighed_together() -> None:
    def both(x: Tensor, y: Tensor) -> Tensor:
        rows = smallest(x.shape[0] + y.shape[0], 40)
        return x.sum() + torch.ones(rows).reshape(x.shape[0] + y.shape[0]).sum() + y.sum()

    module = Keyed(Do(both), ["x", "y"], ["z"])
    example = {"x": torch.randn(3, 2), "y": torch.randn(4, 2)}
    shapes = PAIR | {"a": (1, 20)}
    program = export(module, example, dynamic=shapes | {"b": (1, 20)})
    x, y = torch.randn(20, 2), torch.randn(20, 2)
    torch.testing.assert_close(program({"x": x, "y": y})["z"], both(x, y))
    assert export(module, example, dynamic=shapes | {"b": (1, 21)}).doubtful == (
        {"a": 20, "b": 21},
    )


def product(x: Tensor, y: Tensor) -> Tensor:
    """Decide by a relation of two sizes."""
    return x * 2 + y.sum() if x.shape[0] * y.shape[0] <= 500 else x * 3 + y.sum()


def same_either_way(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y.sum() if x.shape[0] * y.shape[0] <= 500 else x + x + y.sum()


def limited(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[0] * y.shape[0] > 500:
        raise ValueError("too large")
    return x * 2 + y.sum()


@pytest.mark.parametrize(("strict", "suffix"), [(False, "onnx"), (True, "pt2")])
def test_a_way_that_was_not_captured_is_found(tmp_path: Path, strict: bool, suffix: str) -> None:
    program = export(Keyed(Do(product), ["x", "y"], ["z"]), EXAMPLE, dynamic=PAIR, strict=strict)
    assert program.doubtful == ({"a": 9, "b": 56},)
    path = tmp_path / f"m.{suffix}"
    said = r"a=9, b=56 .*MISMATCH [\s\S]*\nnote: .* where `a\*b <= 500`"
    with pytest.raises(VerifyError, match=said):
        program.save(path)
    assert not path.exists()
    with pytest.raises(VerifyError, match="MISMATCH"):
        program(EXAMPLE)


def test_ranges_in_which_the_relation_holds_settle_it(tmp_path: Path) -> None:
    dynamic = PAIR | {"a": (1, 20), "b": (1, 25)}
    program = export(Keyed(Do(product), ["x", "y"], ["z"]), EXAMPLE, dynamic=dynamic)
    assert program.diagnostics == ()
    assert program.save(tmp_path / "m.pt2").ok


@pytest.mark.parametrize("function", [same_either_way, limited])
def test_a_relation_without_effect_is_noted(
    function: Callable[..., Tensor], tmp_path: Path
) -> None:
    program = export(Keyed(Do(function), ["x", "y"], ["z"]), EXAMPLE, dynamic=PAIR)
    assert "where `a*b <= 500`; it is also tried at a=9, b=56." in program.diagnostics[0]
    assert program.save(tmp_path / "m.pt2").ok
    assert verify(tmp_path / "m.pt2", trusted=True).ok
    torch.testing.assert_close(program(EXAMPLE)["z"], function(*EXAMPLE.values()))


def test_sizes_too_large_to_try_are_noted() -> None:
    def huge(x: Tensor, y: Tensor) -> Tensor:
        return x + 1 if x.shape[0] * y.shape[0] <= 10**9 else y

    program = export(Keyed(Do(huge), ["x", "y"], ["z"]), EXAMPLE, dynamic=PAIR)
    assert program.doubtful == ()
    assert program.diagnostics[0].endswith("no sizes are known where this is not so.")


DYNAMIC = {"x": {0: "batch", 1: "time"}}
ROWS = {"x": torch.linspace(-1.0, 1.0, 32).reshape(2, 4, 4)}


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def masked(x: Tensor, mask: Tensor) -> Tensor:
    heads = x[:, None]
    y: Tensor = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    return y[:, 0]


def window(x: Tensor) -> Tensor:
    i, j = places(x)[:, None], places(x)
    return masked(x, (i >= j) & (i - j < 6))


def window_by_subtraction(x: Tensor) -> Tensor:
    i, j = places(x)[:, None], places(x)
    return masked(x, (i >= j) & (i - 6 < j))


class Held(nn.Module):
    """A window that is a tensor, not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Buffer(torch.tensor(6))

    def forward(self, x: Tensor) -> Tensor:
        i, j = places(x)[:, None], places(x)
        return masked(x, (i - j).abs() < self.width)


class Table(nn.Module):
    """Positions that end, as those of BERT do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.table(places(x).clamp(max=100) % 7 * 6 // 7)
        return y


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "window": window,
    "window by subtraction": window_by_subtraction,
    "window that is held": Held(),
    "float positions": lambda x: x * (places(x).float() / 6.0).floor()[:, None],
    "buckets": lambda x: x + places(x).clamp(max=6)[:, None],
    "counted": lambda x: x * ((x[..., 0] > -9).long().cumsum(1) > 6)[..., None],
    "modulus": lambda x: x + (places(x) % 6)[:, None],
    "chosen": lambda x: torch.where(places(x)[:, None] < 6, x, -x),
    "slice of places": lambda x: x * (places(x) >= x.shape[1] - 6)[:, None],
}


def sizes_of(module: nn.Module, path: Path) -> tuple[int, ...]:
    return kd_export.save(module, path, ROWS, dynamic=DYNAMIC).sizes["time"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_around_the_numbers_of_a_program_are_tried(name: str, tmp_path: Path) -> None:
    function = FUNCTIONS[name]
    net = function if isinstance(function, nn.Module) else Do(function)
    assert {5, 6, 7, 13} <= {*sizes_of(Keyed(net, ["x"], ["y"]), tmp_path / "m.pt2")}


def test_a_program_without_such_numbers_is_tried_well_above_the_example(tmp_path: Path) -> None:
    module = Keyed(nn.Sequential(nn.Linear(4, 8), nn.Hardtanh(0, 6)), ["x"], ["y"])
    assert sizes_of(module, tmp_path / "m.pt2") == (1, 2, 3, 4, 7, 33)


def test_the_end_of_a_range_is_tried(tmp_path: Path) -> None:
    module = Keyed(nn.Linear(4, 8), ["x"], ["y"])
    report = kd_export.save(module, tmp_path / "m.pt2", ROWS, dynamic={**DYNAMIC, "time": (1, 11)})
    assert report.sizes["time"] == (1, 2, 3, 4, 7, 11)


def test_the_report_says_which_sizes_were_tried(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    report = kd_export.save(Keyed(Do(window), ["x"], ["y"]), path, ROWS, dynamic=DYNAMIC)
    assert "tried time: 1, 2, 3, 4, 5, 6, 7, 13, 33" in str(report)
    assert report.to_data()["sizes"] == {name: list(s) for name, s in report.sizes.items()}
    again = kd_export.verify(path, trusted=True)
    assert {5, 6, 13, 33} <= {*again.sizes["time"]}
    by_module = kd_export.verify(path, Keyed(Do(window), ["x"], ["y"]), trusted=True)
    assert {5, 6, 13, 33} <= {*by_module.sizes["time"]}
    target = kd_export.convert(path, tmp_path / "m.onnx", trusted=True)
    assert {5, 6, 13, 33} <= {*target.sizes["time"]}


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_what_differs_above_the_example_alone_is_found(tmp_path: Path, suffix: str) -> None:
    """A program that leaves a window out is right up to its width."""

    def forward(x: Tensor) -> Tensor:
        i, j = places(x)[:, None], places(x)
        width = 1000 if torch.compiler.is_exporting() else 12
        return masked(x, (i >= j) & (i - j < width))

    path = tmp_path / f"m.{suffix}"
    with pytest.raises(VerifyError, match="gives other results than the module"):
        kd_export.save(Keyed(Do(forward), ["x"], ["y"]), path, ROWS, dynamic=DYNAMIC)
    assert not path.exists()


def test_sizes_at_which_the_module_fails_are_named(tmp_path: Path) -> None:
    table = nn.Embedding(20, 4)
    module = Keyed(Do(lambda x: x + table(places(x))), ["x"], ["y"])
    report = kd_export.save(module, tmp_path / "m.pt2", ROWS, dynamic=DYNAMIC)
    assert report.ok
    assert {19, 20} <= {*report.sizes["time"]}
    assert "note: not compared at batch=2, time=21: the module itself fails there." in str(report)


def test_inputs_that_would_be_large_are_not_tried(tmp_path: Path) -> None:
    module = Keyed(Do(lambda x: x + 1), ["x"], ["y"])
    report = kd_export.save(module, tmp_path / "m.pt2", {"x": torch.ones(2, 8192)})
    assert report.sizes["batch"] == (1, 2, 3, 7)


class Halved(nn.Module):
    """Halve an image and double it again beside itself, as a UNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 2, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2, 1, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(self.down(x)) + x
        return result


Shapes = dict[str, tuple[int, int | None] | Mapping[int, str]]
PIXELS: Shapes = {"x": {0: "b", 2: "h", 3: "w"}, "h": (1, 1024)}
SERVED: list[tuple[nn.Module, tuple[int, ...], Dynamic[str], Shapes]] = [
    (Halved(), (1, 1, 8, 8), PIXELS,
     {"x": {0: "b", 2: "2*h", 3: "2*w"}, "b": (1, None), "h": (1, 512), "w": (1, None)}),
    (Do(lambda x: x.flatten()[:16].reshape(16)), (4, 6), "n", {"x": {0: "n"}, "n": (3, None)}),
    (Do(lambda x: x + torch.ones(2, 1)), (2, 3), {"x": {0: "a", 1: "b"}},
     {"x": {1: "b"}, "b": (1, None)}),
]  # fmt: skip


@pytest.mark.parametrize(("net", "shape", "dynamic", "served"), SERVED)
def test_sizes_as_allowed_are_those_that_the_module_serves(
    net: nn.Module, shape: tuple[int, ...], dynamic: Dynamic[str], served: Shapes
) -> None:
    module, example = Keyed(net, ["x"], ["y"]), {"x": torch.randn(shape)}
    with pytest.raises(Specialized) as raised:
        kd_export.export(module, example, dynamic=dynamic)
    assert raised.value.allowed is not None
    program = kd_export.export(module, example, dynamic=dynamic, sizes="as allowed")
    note = f"the sizes are those that the module serves: `dynamic={served}`."
    assert note in program.diagnostics
    found = axes_of_schema(program.schema)
    assert isinstance(found, dict)
    assert {("x" if name == ("x",) else name): size for name, size in found.items()} == served


def test_a_module_that_serves_one_size_only_keeps_that_of_the_example() -> None:
    module = Keyed(Do(lambda x: x.reshape(2, 3) + 1), ["x"], ["y"])
    program = kd_export.export(module, X, sizes="as allowed")
    assert program.schema.input("x").shape == (2, 3)
    assert "the sizes are those that the module serves: `dynamic=None`." in program.diagnostics


def test_the_report_of_save_says_which_sizes_are_served(tmp_path: Path) -> None:
    module = Keyed(Do(lambda x: x.reshape(2, 3) + 1), ["x"], ["y"])
    report = kd_export.save(module, tmp_path / "one.onnx", X, sizes="as allowed")
    assert "the sizes are those that the module serves: `dynamic=None`." in report.notes


def test_sizes_that_are_all_served_stay_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "double.onnx"
    assert kd_export.save(double(), path, X, sizes="as allowed").notes == ()
    assert kd_export.inspect(path).axes == {"batch": Axis()}


def test_sizes_must_be_a_word_that_is_known() -> None:
    with pytest.raises(ExportError, match=r"expected 'as allowed' or `None` for `sizes`, got 'a'"):
        kd_export.export(double(), X, sizes="a")
