"""Keyed modules on the device: plans, compiled code, ensembles, parameters as containers."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from tests.gpu.device import CPU, DEVICE, assert_alike, devices, on_cpu
from tests.nn.models import MODELS, Model
from tests.nn.plan.test_every_model import CALLS, FORMS, Way, check, close
from tests.nn.plans import module_calls
from torch import Tensor, nn

from kd_core import TensorDict, TensorDictBase, stack
from kd_nn import EnsembleModule, TensorDictModule, TensorDictParams, TensorDictSequential

pytestmark = pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")


class Placed(Model):
    """A model that lives on the device, and reads what is there."""

    def make(self) -> nn.Module:
        return super().make().to(DEVICE)

    def container(self) -> TensorDict:
        made = super().container()
        where = made.device

        def moved(leaf: Tensor) -> Tensor:
            return leaf.detach().to(DEVICE).requires_grad_(leaf.requires_grad)

        there = made.clear_device_().apply(moved)
        return there if where is None else there.to(DEVICE)


def placed(model: Model) -> Placed:
    return Placed(**{each.name: getattr(model, each.name) for each in fields(model)})


# One tells where it runs by a tensor on `meta`.
HERE = {name: placed(model) for name, model in MODELS.items() if model.device != "meta"}
CASES = [
    pytest.param(name, form, id=f"{name}, {form}")
    for name, model in HERE.items()
    for form in FORMS
    if model.by_tensors or form == "container"
]


# On the CPU `tests/nn/plan/test_every_model.py` compares them all: a tenth exercises this module.
@pytest.mark.parametrize(("name", "form"), CASES if DEVICE.type == "cuda" else CASES[::10])
def test_a_plan_does_what_the_interpreter_does_there_and_on_the_cpu(name: str, form: str) -> None:
    model = HERE[name]
    reference, planned = Way(model, interpreted=True), Way(model)
    for _ in range(CALLS):
        check(planned.call(form), reference.call(form), close)
    if model.planned:
        assert module_calls(lambda: planned.call(form), planned.module) == 0
    if name != "dropout":  # whose numbers each device draws itself
        far = Way(MODELS[name], interpreted=True)
        traces = [way.call(form) for way in (far, far, far, planned)]
        for what in ("same container", "gradients"):
            # Sums of other orders: three steps of attention or batch norm carry them on.
            assert_alike(on_cpu(traces[-1][what]), on_cpu(traces[0][what]), 1e-4)


# On the CPU, `tests/nn/plan/test_every_model.py` compiles all models.
ON_A_GPU = ["recurrent", "batch norm", "ensemble", "attention"] if DEVICE.type != "cpu" else []


@pytest.mark.parametrize("name", ["tutorial", *ON_A_GPU])
def test_compiled_does_what_the_interpreter_does(name: str) -> None:
    torch.compiler.reset()
    reference, compiled = Way(HERE[name], interpreted=True), Way(HERE[name], compiled=True)
    for form in FORMS:
        check(compiled.call(form), reference.call(form), close)


def sequence() -> TensorDictSequential:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 8), ["x"], ["h"]),
        TensorDictModule(nn.LayerNorm(8), ["h"], ["h"]),
        TensorDictModule(nn.Linear(8, 4), ["h"], [("out", "y")]),
    )


def test_parameters_are_a_container_that_moves_with_the_module() -> None:
    model = sequence()
    params = TensorDict.from_module(model)
    assert devices(params) == {CPU}
    model.to(DEVICE)
    there = TensorDict.from_module(model)
    assert devices(there) == {DEVICE}
    assert_alike(there.data.cpu(), params.data)
    held = TensorDictParams(params.clone()).to(DEVICE)
    assert isinstance(held, TensorDictParams)
    assert devices(held) == {DEVICE}
    assert all(isinstance(each, nn.Parameter) for each in held.parameters())


def test_a_module_runs_with_parameters_of_the_device() -> None:
    model = sequence()
    x = torch.rand(5, 3)
    expected = model(x=x)[-1]
    params = TensorDict.from_module(model).data.to(DEVICE)
    with params.to_module(model):
        found = model(x=x.to(DEVICE))[-1]
    assert found.device == DEVICE
    assert_alike(found, expected)
    assert devices(TensorDict.from_module(model)) == {CPU}


def test_values_are_copied_into_a_module_elsewhere() -> None:
    model, source = sequence().to(DEVICE), sequence()
    with torch.no_grad():
        for each in source.parameters():
            each.add_(1)
    before = TensorDict.from_module(model).data.clone()
    with TensorDict.from_module(source).data.to_module(model, inplace=True):
        assert {each.device for each in model.parameters()} == {DEVICE}
        assert_alike(TensorDict.from_module(model).data, TensorDict.from_module(source).data)
    assert_alike(TensorDict.from_module(model).data, before)


def test_parameters_follow_in_place() -> None:
    model, target = sequence().to(DEVICE), sequence().to(DEVICE)
    for each in target.parameters():
        each.data.zero_()
    latest, followers = TensorDict.from_module(model).data, TensorDict.from_module(target).data
    followers.lerp_(latest, 0.25)
    assert_alike(followers, latest * 0.25)
    assert all(each.device == DEVICE for each in target.parameters())


def test_an_ensemble_runs_on_the_device() -> None:
    torch.manual_seed(0)
    net = TensorDictModule(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), ["x"], ["y"])
    ensemble = EnsembleModule(net, 3)
    td = TensorDict({"x": torch.rand(5, 3)}, [5])
    expected = ensemble(td.clone())["y"]
    found = ensemble.to(DEVICE)(td.to(DEVICE))["y"]
    assert found.shape == (3, 5, 4)
    assert found.device == DEVICE
    assert_alike(found, expected)
    found.sum().backward()
    assert all(each.grad is not None for each in ensemble.parameters())


def train(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(5):
        td = model(TensorDict({"x": x}, [len(x)]))
        loss: Tensor = (td["out", "y"] - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_training_takes_the_same_steps(kind: Callable[..., torch.optim.Optimizer]) -> None:
    x = torch.rand(16, 3)
    here, there = sequence(), sequence().to(DEVICE)
    expected = train(here, x, kind(here.parameters(), lr=0.05))
    found = train(there, x.to(DEVICE), kind(there.parameters(), lr=0.05))
    assert found == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]


def test_inputs_elsewhere_raise_and_leave_the_container_as_it_was() -> None:
    model = sequence().to(DEVICE if DEVICE != CPU else "meta")
    td = TensorDict({"x": torch.rand(5, 3)}, [5])
    with pytest.raises(RuntimeError):
        model(td)
    assert list(td.keys()) == ["x"]


def test_functional_calls_under_vmap() -> None:
    model = sequence().to(DEVICE)
    params: TensorDictBase = TensorDict.from_module(model).data
    stacked = stack([params, params * 2])
    x = torch.rand(5, 3, device=DEVICE)

    def run(one: Any) -> Tensor:
        with one.to_module(model):
            result: Tensor = model(x=x)[-1]
            return result

    found = torch.vmap(run)(stacked)
    assert found.device == DEVICE
    assert_alike(found[0], model(x=x)[-1])
