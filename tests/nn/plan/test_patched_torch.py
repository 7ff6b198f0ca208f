"""A patch of torch, and what stands where torch looks first, count from the first call on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch
from tests.nn.plans import module_calls
from torch import Tensor, nn

from kd_core import TensorDict
from kd_nn import EnsembleModule, TensorDictModule

X = torch.linspace(-1, 1, 6).view(2, 3)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.ReLU(), nn.Linear(3, 3))


@contextmanager
def patched(kind: type, name: str) -> Iterator[None]:
    """Make a function of a class return three times as much, but for keyed modules."""
    before, original = kind.__dict__.get(name), getattr(kind, name)

    def three_times(self: nn.Module, *args: object, **kwargs: object) -> object:
        out = original(self, *args, **kwargs)
        return out * 3 if isinstance(out, Tensor) and not hasattr(self, "in_keys") else out

    setattr(kind, name, three_times)
    try:
        yield
    finally:
        if before is None:
            delattr(kind, name)
        else:
            setattr(kind, name, before)


PATCHES = [
    (kind, name)
    for kind in (nn.Linear, nn.Tanh, nn.Sequential)
    for name in ("forward", "__call__", "_call_impl")
] + [(nn.Module, "__call__"), (nn.Module, "_call_impl"), (nn.Module, "__getattr__")]


@pytest.mark.parametrize(("kind", "name"), PATCHES)
def test_a_patch_before_the_first_plan_counts(kind: type, name: str) -> None:
    net = make()
    module = TensorDictModule(net, ["x"], ["y"])
    with patched(kind, name):
        for _ in range(4):
            assert torch.equal(module(TensorDict(x=X))["y"], cast(nn.Module, module.module)(X))
    for _ in range(4):
        assert torch.equal(module(TensorDict(x=X))["y"], net(X))


def test_a_model_is_planned_once_the_patch_of_all_modules_is_gone() -> None:
    module = TensorDictModule(make(), ["x"], ["y"])
    with patched(nn.Module, "__call__"):
        for _ in range(4):
            module(x=X)
    for _ in range(3):
        module(x=X)
    assert module_calls(lambda: module(x=X)) == 0


@pytest.mark.parametrize(("kind", "name"), PATCHES)
def test_an_ensemble_runs_patched_layers(kind: type, name: str) -> None:
    ensemble = EnsembleModule(TensorDictModule(make(), ["x"], ["y"]), 2)
    template = ensemble.__dict__["_kd_template"]
    with patched(kind, name):
        expected = []
        for idx in range(2):
            with ensemble.params[idx].to_module(template):
                expected.append(template(x=X))
        assert torch.allclose(cast(Tensor, ensemble(x=X)), torch.stack(expected))


def in_the_instance(linear: nn.Linear, patch: pytest.MonkeyPatch) -> None:
    linear.__dict__["weight"] = torch.ones(3, 3)


def in_place_of_another_attribute(linear: nn.Linear, patch: pytest.MonkeyPatch) -> None:
    del linear.in_features  # so that it has as many attributes as before
    linear.__dict__["weight"] = torch.ones(3, 3)


def a_property(linear: nn.Linear, patch: pytest.MonkeyPatch) -> None:
    weight = property(lambda self: torch.ones(self.out_features, self.in_features))
    patch.setattr(nn.Linear, "weight", weight, raising=False)


def a_property_in_place_of_another(linear: nn.Linear, patch: pytest.MonkeyPatch) -> None:
    patch.delattr(nn.Linear, "extra_repr")
    a_property(linear, patch)


def a_property_of_all_modules(linear: nn.Linear, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.Module, "bias", property(lambda self: torch.ones(3)), raising=False)


def read_otherwise(linear: nn.Linear, patch: pytest.MonkeyPatch) -> None:
    before = nn.Module.__getattr__

    def read(module: nn.Module, name: str) -> object:
        found = before(module, name)
        return found * 2 if isinstance(found, Tensor) else found

    patch.setattr(nn.Module, "__getattr__", read)


def read_otherwise_of_one_class(linear: nn.Linear, patch: pytest.MonkeyPatch) -> None:
    def read(module: nn.Module, name: str) -> object:
        found = object.__getattribute__(module, name)
        return torch.ones(3) if name == "bias" else found

    patch.setattr(nn.Linear, "__getattribute__", read)


Change = Callable[[nn.Linear, pytest.MonkeyPatch], None]
CHANGES: list[Change] = [
    *[in_the_instance, in_place_of_another_attribute, a_property, a_property_in_place_of_another],
    *[a_property_of_all_modules, read_otherwise, read_otherwise_of_one_class],
]


@pytest.mark.parametrize("calls", [0, 1, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_reads_attributes_where_torch_does(
    change: Change, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make()
    module = TensorDictModule(net, ["x"], ["y"])
    ensemble = EnsembleModule(TensorDictModule(make(), ["x"], ["y"]), 2)
    for _ in range(calls):
        module(x=X)
    with monkeypatch.context() as patch:
        change(cast(nn.Linear, net[0]), patch)
        for _ in range(4):
            assert torch.equal(cast(Tensor, module(x=X)), net(X))
        template = ensemble.__dict__["_kd_template"]
        with ensemble.params[1].to_module(template):
            expected = template(x=X)
        assert torch.allclose(cast(Tensor, ensemble(x=X))[1], expected)


def test_an_entry_of_a_relu_is_read_where_torch_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TensorDictModule(nn.ReLU(), ["x"], ["y"])
    for _ in range(4):
        module(x=X)
    monkeypatch.setattr(nn.ReLU, "inplace", property(lambda self: True), raising=False)
    x = X.clone()
    assert module(x=x) is x


def test_a_module_that_is_compiled_once_more_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(3, 3)
    module = TensorDictModule(linear, ["x"], ["y"])
    linear._compiled_call_impl = None  # as torch's own `Module` has it: not compiled
    for _ in range(4):
        module(x=X)
    linear._compiled_call_impl = torch.neg  # as `compile` does
    assert torch.equal(cast(Tensor, module(x=X)), -X)
