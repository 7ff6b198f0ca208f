"""Compiled code on the device, traced and run by the backend `eager`: no breaks, same numbers."""

from collections.abc import Callable

import pytest
import torch
from tests.gpu.device import DEVICE, assert_alike
from torch import nn
from torch._dynamo.testing import CompileCounter

from kd_core import TensorDict, TensorDictBase, stack
from kd_nn import NormalParamExtractor, TensorDictModule, TensorDictSequential


def policy() -> TensorDictSequential:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 8), ["x"], ["h"]),
        TensorDictModule(nn.ReLU(), ["h"], ["h"]),
        TensorDictModule(nn.Linear(8, 4), ["h"], ["p"]),
        TensorDictModule(NormalParamExtractor(), ["p"], ["loc", ("out", "scale")]),
    ).to(DEVICE)


def arithmetic(td: TensorDictBase) -> TensorDictBase:
    return (td * 2 + td[0]).update({"z": td["x"].sum(-1)}).reshape(-1)


def moves(td: TensorDictBase) -> TensorDictBase:
    return stack([td, td.clone()]).to(DEVICE) + 1


PROGRAMS: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
    "policy": policy(),
    "arithmetic": arithmetic,
    "moves": moves,
}


def given() -> TensorDict:
    torch.manual_seed(0)
    return TensorDict({"x": torch.rand(5, 3, device=DEVICE)}, [5], device=DEVICE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_and_the_same_numbers(name: str) -> None:
    torch.compiler.reset()
    program, counter = PROGRAMS[name], CompileCounter()
    compiled = torch.compile(program, backend=counter, fullgraph=True)
    for _ in range(3):
        assert_alike(compiled(given()), program(given()))
    assert counter.frame_count == 1
