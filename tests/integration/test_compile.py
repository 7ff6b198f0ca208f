"""`torch.compile(fullgraph=True)` of container operations: one graph, and equal values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kd_core import TensorDict, cat, stack
from kd_core.testing import assert_close

Step = Callable[[TensorDict], TensorDict]

STEPS: dict[str, Step] = {
    "construct": lambda td: TensorDict({"x": td["a"], "y": {"z": td["b", "c"]}}, [10]),
    "write": lambda td: td.copy().set(("b", "d"), td["a"] * 2),
    "select": lambda td: td.select("a"),
    "index": lambda td: td[2:6],
    "reshape": lambda td: td.reshape(5, 2)[0],
    "stack": lambda td: stack([td, td]),
    "cat": lambda td: cat([td, td[:3]]),
    "add a number": lambda td: td + 1,
    "multiply containers": lambda td: td * td.exp(),
    "reduce": lambda td: td.sum(0),
    "apply": lambda td: td.apply(torch.sin),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def batch() -> TensorDict:
    return TensorDict({"a": torch.randn(10, 3), "b": {"c": torch.randn(10, 4)}}, [10])


@pytest.mark.parametrize("name", STEPS)
def test_an_operation_is_one_graph(name: str) -> None:
    td = batch()
    compiled = torch.compile(STEPS[name], fullgraph=True, backend="eager")
    assert_close(compiled(td), STEPS[name](td))


def test_an_unrelated_key_does_not_recompile() -> None:
    calls = 0

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        nonlocal calls
        calls += 1
        return graph.forward

    td = batch()
    compiled = torch.compile(
        lambda td: td["a"] + td["b", "c"].sum(), fullgraph=True, backend=counting
    )
    before = compiled(td)
    td["unrelated"] = torch.zeros(10)
    torch.testing.assert_close(compiled(td), before)
    del td["unrelated"]
    torch.testing.assert_close(compiled(td), before)
    assert calls == 1
