"""Inductor on the GPU, with and without CUDA graphs: one graph, no recompiling, same numbers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.gpu.device import DEVICE, TORCH, assert_alike
from tests.gpu.test_compiled import PROGRAMS, given, policy
from torch import Tensor, nn
from torch._dynamo.utils import counters

from kd_core import TensorDict, TensorDictBase
from kd_nn import EnsembleModule, TensorDictModule
from kd_probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

pytestmark = pytest.mark.filterwarnings("ignore")  # of inductor, about TensorFloat32 and others


def loose(found: object, expected: TensorDictBase) -> None:
    assert isinstance(found, TensorDictBase)
    for key, leaf in expected.items(True, True):
        torch.testing.assert_close(found[key], leaf, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_programs(name: str, mode: str | None) -> None:
    torch.compiler.reset()
    counters.clear()
    program: Callable[[TensorDictBase], TensorDictBase] = PROGRAMS[name]
    compiled = torch.compile(program, mode=mode, fullgraph=True)
    with torch.no_grad():
        for scale in range(6):
            TORCH.compiler.cudagraph_mark_step_begin()
            td = given() * scale
            found = compiled(td.clone())
            loose(found.clone(), program(td.clone()))
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_draws_are_scored() -> None:
    torch.compiler.reset()
    actor = ProbabilisticTensorDictSequential(
        policy(),
        ProbabilisticTensorDictModule(
            in_keys={"loc": "loc", "scale": ("out", "scale")},
            out_keys=["a"],
            distribution_class=torch.distributions.Normal,
            default_interaction_type="random",
            return_log_prob=True,
            log_prob_key="score",
        ),
    )
    compiled = torch.compile(actor, fullgraph=True)
    with torch.no_grad():
        td = compiled(given())
    assert td["a"].device == DEVICE
    torch.testing.assert_close(actor.log_prob(td.select("x", "a")), td["score"])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_training_step(mode: str | None) -> None:
    torch.compiler.reset()
    model, reference = policy(), policy()

    def loss_of(net: nn.Module, td: TensorDictBase) -> Tensor:
        loss: Tensor = net(td)["loc"].square().mean()
        return loss

    compiled = torch.compile(lambda td: loss_of(model, td), mode=mode)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    td = given()  # kept: CUDA graphs of torch do not stand that an input is freed in some calls
    for _ in range(5):
        for call, optimizer in ((compiled, mine), (partial(loss_of, reference), theirs)):
            TORCH.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            loss = call(td.clone(recurse=False))
            loss.backward()
            optimizer.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_compiled_ensemble() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    net = TensorDictModule(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), ["x"], ["y"])
    ensemble = EnsembleModule(net, 3).to(DEVICE)
    compiled = torch.compile(ensemble)
    found, expected = compiled(given()), ensemble(given())
    torch.testing.assert_close(found["y"], expected["y"], rtol=1e-4, atol=1e-4)


def test_compiled_code_takes_parameters_of_the_device() -> None:
    torch.compiler.reset()
    model = policy()
    params = TensorDict.from_module(model).data.clone()

    def run(one: TensorDictBase, td: TensorDictBase) -> TensorDictBase:
        with one.to_module(model):
            result: TensorDictBase = model(td)
            return result

    compiled = torch.compile(run)
    with torch.no_grad():
        for scale in (1, 2):
            one = params * scale
            loose(compiled(one, given()), run(one, given()))
    assert_alike(TensorDict.from_module(model).data, params)
