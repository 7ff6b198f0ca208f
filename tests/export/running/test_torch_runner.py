"""The runner on tensors: written functions give what the program gives."""

from collections.abc import Callable

import pytest
import torch
from tests.export.models import CASES, Do, Keyed, exported
from torch import Tensor

import kd_export
from kd_export._running import torch_runner
from kd_export._running.torch_runner import StraightLine, digest_of, run_program


def test_a_digest_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of ctypes ends at 2 GiB."""
    held = {"w": torch.arange(1000), "empty": torch.empty(0), "b": torch.ones(3, 3).t()}
    whole = digest_of(held)
    monkeypatch.setattr(torch_runner, "CHUNK", 7)
    assert digest_of(held) == whole
    held["w"][-1] += 1
    assert digest_of(held) != whole


FUNCTIONS = [
    lambda x: x + 0.1,
    lambda x: x - 0.1,
    lambda x: x * 0.1,
    lambda x: x / 0.3,
    lambda x: x + 16777217,
    lambda x: 0.1 - x,
    lambda x: torch.add(x, x, alpha=0.1),
    lambda x: x**2.5,
    lambda x: x.sum() + 0.1,
    lambda x: x.masked_fill(x > 0, float("-inf")).softmax(-1),
    lambda x: x.to(torch.float16) + 0.1,
    lambda x: (x * 100).to(torch.int64) + 1,
    lambda x: x.to(torch.int64) / 3,
    lambda x: torch.stack([x, x], -1)[:, 1:, 0],
    lambda x: torch.arange(x.shape[0])[:, None] + x,
    lambda x: x.new_ones(x.shape[0] * 2, 1),
    lambda x: torch.where(x > 0, x, -x).cumsum(0),
    lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    lambda x: x.reshape(-1)[torch.tensor([0, 2])],
    lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    lambda x: torch.cat(torch.cat([x, x], -1).chunk(4, 1)[::-1], -1),
    lambda x: torch.cat([x.amax(-1), x.mean(-1)]).sort()[0],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_the_same_bits(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    program = kd_export.export(
        Keyed(Do(function), ["x"], ["y"]), {"x": torch.randn(4, 3, dtype=dtype)}
    )
    x = torch.randn(7, 3, dtype=dtype)
    result, expected = program({"x": x})["y"], function(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=0.0, atol=0.0, equal_nan=True)


def lines(name: str) -> StraightLine:
    program = exported(name)
    return run_program(program.exported_program, program.schema).lines


@pytest.mark.parametrize("name", CASES)
def test_source_is_one_statement_after_another(name: str) -> None:
    core = lines(name).source.split("\n\n")[0].splitlines()
    assert all(line.startswith("    ") and not line.startswith("     ") for line in core[1:])


def test_direct_way_serves_only_what_fits() -> None:
    direct = lines("gru").direct
    x, h = torch.ones(4, 3), torch.zeros(4, 5)
    result = direct({"x": x, "state.h": h})
    assert result is not None
    assert list(result) == ["y", "next.h"]
    others: list[dict[str, object]] = [
        {"x": x},
        {"x": x, "h": h},
        {"x": x, "state.h": h, "more": h},
        {"x": x.double(), "state.h": h},
        {"x": x.numpy(), "state.h": h},
        {"x": x[0], "state.h": h},
        {"x": x[:, :2], "state.h": h},
        {"x": x[:2], "state.h": h},
        {"x": torch.ones(3, 4).t(), "state.h": h},
        {"x": x[:0], "state.h": h[:0]},
    ]
    assert [direct(other) for other in others] == [None] * len(others)


def test_intermediate_results_are_freed() -> None:
    assert "    tanh = None\n" in lines("policy").source
