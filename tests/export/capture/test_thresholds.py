"""Sizes that are tried because of what a program holds, seen through `save` and its report."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.export.models import Do, Keyed
from torch import Tensor, nn

import kd_export
from kd_export import VerifyError

DYNAMIC = {"x": {0: "batch", 1: "time"}}
EXAMPLE = {"x": torch.linspace(-1.0, 1.0, 32).reshape(2, 4, 4)}


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
    return kd_export.save(module, path, EXAMPLE, dynamic=DYNAMIC).sizes["time"]


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
    report = kd_export.save(
        module, tmp_path / "m.pt2", EXAMPLE, dynamic={**DYNAMIC, "time": (1, 11)}
    )
    assert report.sizes["time"] == (1, 2, 3, 4, 7, 11)


def test_the_report_says_which_sizes_were_tried(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    report = kd_export.save(Keyed(Do(window), ["x"], ["y"]), path, EXAMPLE, dynamic=DYNAMIC)
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
        kd_export.save(Keyed(Do(forward), ["x"], ["y"]), path, EXAMPLE, dynamic=DYNAMIC)
    assert not path.exists()


def test_sizes_at_which_the_module_fails_are_named(tmp_path: Path) -> None:
    table = nn.Embedding(20, 4)
    module = Keyed(Do(lambda x: x + table(places(x))), ["x"], ["y"])
    report = kd_export.save(module, tmp_path / "m.pt2", EXAMPLE, dynamic=DYNAMIC)
    assert report.ok
    assert {19, 20} <= {*report.sizes["time"]}
    assert "note: not compared at batch=2, time=21: the module itself fails there." in str(report)


def test_inputs_that_would_be_large_are_not_tried(tmp_path: Path) -> None:
    module = Keyed(Do(lambda x: x + 1), ["x"], ["y"])
    report = kd_export.save(module, tmp_path / "m.pt2", {"x": torch.ones(2, 8192)})
    assert report.sizes["batch"] == (1, 2, 3, 7)
