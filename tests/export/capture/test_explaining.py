"""Errors of a capture name the user's own modules and the argument that works."""

import ast
import logging
import re
from collections.abc import Callable, Mapping

import pytest
import torch
from tests.export.models import Do, Keyed
from torch import Tensor, nn

from kd_export import NotExportable, Specialized, export
from kd_nn import TensorDictModule, TensorDictSequential


class Positions(nn.Module):
    """Serve sequences of at most 512 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(512, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


X = torch.randn(3, 5, 4)
REMEDIES: list[tuple[nn.Module, Mapping[str, object], str]] = [
    (Positions(), {"x": {0: "batch", 1: "seq"}}, "'seq': (1, 512)"),
    (Positions(), {"x": {0: "batch", 1: "seq"}, "seq": (1, 4096)}, "'seq': (1, 512)"),
]


@pytest.mark.parametrize(("net", "dynamic", "part"), REMEDIES)
def test_the_argument_in_the_message_works(
    net: nn.Module, dynamic: Mapping[str, object], part: str
) -> None:
    module = Keyed(net, ["x"], ["y"])
    with pytest.raises(Specialized, match=r"dimension 1 of `x` \(axis `seq`\)") as raised:
        export(module, {"x": X}, dynamic=dynamic)  # type: ignore[arg-type]  # of several types
    assert raised.value.hint is not None
    pasted = ast.literal_eval(raised.value.hint.split("`")[1].removeprefix("dynamic="))
    assert part in raised.value.hint
    schema = export(module, {"x": X}, dynamic=pasted).schema
    assert schema.axes["seq"].max == 512


class Rectangle(nn.Module):
    """Multiply by the first 16 columns, which are not all of them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y[:, :16] if x.shape[0] <= 16 else y


def test_a_size_that_torch_leaves_in_its_fix_is_left_out() -> None:
    module = Keyed(Rectangle(), ["x", "y"], ["z"])
    example = {"x": torch.randn(8, 16), "y": torch.randn(16, 32)}
    free = {"x": {0: "a", 1: "b"}, "y": {0: "c", 1: "d"}}
    with pytest.raises(Specialized) as raised:
        export(module, example, dynamic=free)
    assert raised.value.hint is not None
    pasted = ast.literal_eval(raised.value.hint.split("`")[1].removeprefix("dynamic="))
    program = export(module, example, dynamic=pasted)
    assert {name: str(axis) for name, axis in program.schema.axes.items()} == {
        "a": "1..16", "b": "1..", "d": "17..",
    }  # fmt: skip
    shape = program({"x": torch.randn(4, 32), "y": torch.randn(32, 64)})["z"].shape
    assert shape == (4, 16)


@pytest.mark.parametrize(("size", "kept"), [(5, (6, 64)), (60, (1, 59)), (64, (1, 63))])
def test_the_larger_part_beside_a_size_is_kept(size: int, kept: tuple[int, int]) -> None:
    module = Keyed(Do(lambda x: x.sin() if x.shape[0] != size else x + 1), ["x"], ["y"])
    with pytest.raises(Specialized) as raised:
        export(module, {"x": torch.randn(30, 3)}, dynamic={"batch": (1, 64)})
    assert raised.value.hint is not None
    pasted = ast.literal_eval(raised.value.hint.split("`")[1].removeprefix("dynamic="))
    assert pasted["batch"] == kept
    assert export(module, {"x": torch.randn(30, 3)}, dynamic=pasted).schema.axes


def test_a_nested_key_is_written_as_it_is_pasted() -> None:
    module = TensorDictModule(Positions(), in_keys=[("in", "x")], out_keys=["y"])
    example = {("in", "x"): X}
    with pytest.raises(Specialized) as raised:
        export(module, example, dynamic={("in", "x"): {0: "batch", 1: "seq"}})
    assert raised.value.hint is not None
    pasted = ast.literal_eval(raised.value.hint.split("`")[1].removeprefix("dynamic="))
    assert export(module, example, dynamic=pasted).schema.axes["seq"].max == 512


def test_axes_that_must_be_one_are_named_so() -> None:
    module = TensorDictModule(lambda x, y: x @ y, in_keys=["x", "y"], out_keys=["z"])
    example = {"x": torch.randn(3, 4), "y": torch.randn(4, 5)}
    with pytest.raises(Specialized) as raised:
        export(module, example, dynamic={"x": {1: "a"}, "y": {0: "b"}})
    assert raised.value.hint is not None
    pasted = ast.literal_eval(raised.value.hint.split("`")[1].removeprefix("dynamic="))
    assert len(export(module, example, dynamic=pasted).schema.axes) == 1


@pytest.mark.parametrize(
    ("rows", "function", "message", "pasted"),
    [
        (
            (4, 5),
            lambda x, y: x + y[1:],
            r"dimension 0 of `y` \(axis `b`\) must be `a \+ 1`\.",
            {"x": {0: "a"}, "y": {0: "a + 1"}, "a": (1, 63)},
        ),
        (
            (8, 4),
            lambda x, y: x.reshape(-1, 2, 3).sum(1) + y.sum(),
            r"dimension 0 of `x` \(axis `a`\) must be a multiple of 2\.",
            {"x": {0: "2*a"}, "y": {0: "b"}, "b": (1, 64), "a": (1, None)},
        ),
    ],
)
def test_an_axis_that_follows_from_another_is_written_as_it_is_pasted(
    rows: tuple[int, int],
    function: Callable[..., Tensor],
    message: str,
    pasted: dict[str, dict[int, str] | tuple[int, int | None]],
) -> None:
    module = Keyed(Do(function), ["x", "y"], ["z"])
    example = {name: torch.randn(size, 3) for name, size in zip("xy", rows, strict=True)}
    with pytest.raises(Specialized, match=message) as raised:
        export(module, example, dynamic={"x": {0: "a"}, "y": {0: "b"}, "b": (1, 64)})
    assert raised.value.key in {("x",), ("y",)}
    assert raised.value.hint is not None
    assert ast.literal_eval(raised.value.hint.split("`")[1].removeprefix("dynamic=")) == pasted
    shapes = [entry.shape[0] for entry in export(module, example, dynamic=pasted).schema.inputs]
    assert [{0: size} for size in shapes] == [pasted["x"], pasted["y"]]


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_a_class_under_two_names_is_named() -> None:
    net = nn.Sequential(Branching(), nn.Linear(3, 3))
    net.again = net[0]
    module = TensorDictModule(net, in_keys=["x"], out_keys=["y"])
    with pytest.raises(NotExportable, match=r"^`Branching` \(`module\.0`\) decides by the values"):
        export(module, {"x": torch.ones(2, 3)})


def test_the_wrapped_class_is_named_and_its_place() -> None:
    net = nn.Sequential(nn.Linear(3, 3), Branching())
    module = TensorDictModule(net, in_keys=["x"], out_keys=["y"])
    with pytest.raises(NotExportable, match=r"^`Branching` \(`module\.1`\) decides by the values"):
        export(module, {"x": torch.ones(2, 3)})


def test_the_step_of_a_sequence_is_named() -> None:
    module = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["h"]),
        TensorDictModule(nn.Linear(3, 4), in_keys=["h"], out_keys=["y"]),
    )
    with pytest.raises(
        NotExportable, match=r"^`Linear` \(`module\.1\.module`\) cannot be captured"
    ):
        export(module, {"x": torch.ones(2, 3)})


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.cond(self.holds(x), self.then, self.other, (x,))
        return y

    def holds(self, x: Tensor) -> Tensor:
        return x.sum() > 0

    def then(self, x: Tensor) -> Tensor:
        return x.sin()

    def other(self, x: Tensor) -> Tensor:
        return x.cos()


class PerEntry(Conditional):
    def holds(self, x: Tensor) -> Tensor:
        return x > 0


class OtherDtype(Conditional):
    def other(self, x: Tensor) -> Tensor:
        return x.double()


class OtherArguments(Conditional):
    def other(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # on purpose
        return x + y


LIMITS = [
    (PerEntry, "Expected pred to be bool or single-element tensor"),
    (OtherDtype, "expected same dtype but got torch.float32 and torch.float64"),
    (
        OtherArguments,
        "failed to bind arguments|ObservedTypeError|missing required",
    ),  # of each torch
]


@pytest.mark.parametrize(("kind", "reason"), LIMITS)
def test_what_cond_refuses_is_said_with_the_line(
    kind: type[nn.Module], reason: str, logged: list[logging.LogRecord]
) -> None:
    with pytest.raises(NotExportable) as raised:
        export(Keyed(kind(), ["x"], ["y"]), {"x": torch.ones(2, 3)})
    line = "`y: Tensor = torch.cond(self.holds(x), self.then, self.other, (x,))` (`forward`, "
    assert str(raised.value).startswith(f"`{kind.__name__}` (`net`) cannot be captured at {line}")
    assert re.search(reason, str(raised.value))
    assert not [record for record in logged if record.levelno >= logging.WARNING]


def test_a_relation_does_not_contradict_the_remedy() -> None:
    table = torch.zeros(1024, 3)
    module = TensorDictModule(
        lambda x: x + table[: x.shape[0]] if x.shape[0] > 1 else x, in_keys=["x"], out_keys=["y"]
    )
    with pytest.raises(Specialized) as caught:
        export(module, {"x": torch.ones(2, 3)})
    assert "those where `batch <= 1024`" in str(caught.value)
    assert "'batch': (1, 1024)" in str(caught.value)
