"""Relations between sizes that a program rests on are shown, tried, or named in the refusal."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.export.models import Do, Keyed
from torch import Tensor

from kd_export import Specialized, VerifyError, export, save, verify

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


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("function", "columns", "dynamic"),
    [
        (smaller, 96, {"batch": (1, None)}),
        (smaller, 12, {"batch": (2, None)}),
        (smaller, 12, {"batch": (2, 60)}),
        (larger, 3, {"batch": (1, 16)}),
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


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.parametrize("strict", [False, True])
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
