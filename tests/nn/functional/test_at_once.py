"""Ensembles that run at once, beside the same copies one by one and under `vmap`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from kd_core import NestedKey, TensorDict
from kd_nn import (
    EnsembleModule,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
    set_skip_existing,
)

POINTWISE = (nn.ReLU, nn.Tanh, nn.SiLU, nn.GELU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)


def random_net(rng: random.Random, size: int) -> nn.Sequential:
    """Build a network of known layers that reads vectors of a size; some layers are shared."""
    layers: list[nn.Module] = []
    for _ in range(rng.randrange(6)):
        kind = rng.randrange(5)
        if kind < 2:
            wide = rng.randrange(1, 5)
            layers.append(nn.Linear(size, wide, bias=rng.random() < 0.7))
            size = wide
        elif kind == 2:
            layers.append(
                nn.LayerNorm(size, elementwise_affine=rng.random() < 0.7, bias=rng.random() < 0.5)
            )
        elif kind == 3:
            layers.append(rng.choice(POINTWISE)())
        else:
            inner = random_net(rng, size)
            layers.append(inner)
            size = next(
                (
                    each.out_features
                    for each in reversed([*inner.modules()])
                    if type(each) is nn.Linear
                ),
                size,
            )
    if layers and rng.random() < 0.2 and type(layers[-1]) in POINTWISE:
        layers.append(layers[-1])
    return nn.Sequential(*layers)


def one(ensemble: EnsembleModule, value: Tensor) -> Tensor:
    """Return the only output."""
    (output,) = ensemble._kd_forward_values(value)
    assert isinstance(output, Tensor)
    return output


def both(
    ensemble: EnsembleModule, value: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and gradients of an ensemble, as it runs and with its copies one by one."""
    found: list[list[Tensor]] = []
    for at_once in (True, False):
        with monkeypatch.context() as patch:
            if at_once:
                patch.setattr(torch, "vmap", None)
            else:
                patch.setattr(ensemble, "_kd_recurrent", True)
            leaf = value.clone().requires_grad_()
            output = one(ensemble, leaf)
        wanted = [leaf, *ensemble.parameters()]
        grads = torch.autograd.grad(output.square().sum(), wanted, materialize_grads=True)
        found.append([output, *grads])
    return found[0], found[1]


def test_random_networks_give_what_their_copies_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(150):
        size, count = rng.randrange(1, 5), rng.randrange(1, 4)
        net = random_net(rng, size).double()
        expand = rng.random() < 0.5
        ensemble = EnsembleModule(TensorDictModule(net, ["x"], ["y"]), count, expand_input=expand)
        shape = [rng.randrange(4) for _ in range(rng.randrange(3))] + [size]
        value = torch.randn(shape if expand else [count, *shape], dtype=torch.float64)
        ours, theirs = both(ensemble, value, monkeypatch)
        torch.testing.assert_close(ours, theirs)


def random_sequence(rng: random.Random, size: int) -> TensorDictSequential:
    """Build steps of known layers; each reads the input or what a former one wrote."""
    sizes = {"x": size}
    steps: list[TensorDictModule] = []
    for _ in range(rng.randrange(1, 5)):
        key = rng.choice([*sizes])
        name = rng.choice("xabcd")
        if rng.random() < 0.3 and sizes[key] % 2 == 0:
            other = rng.choice([each for each in "efgh" if each != name])
            mapping = rng.choice(["biased_softplus_1.0", "exp", "relu", "none"])
            steps.append(TensorDictModule(NormalParamExtractor(mapping), [key], [name, other]))
            sizes[name] = sizes[other] = sizes[key] // 2
        else:
            net = random_net(rng, sizes[key])
            steps.append(TensorDictModule(net, [key], [name]))
            sizes[name] = net(torch.zeros(1, sizes[key])).shape[-1]
    return TensorDictSequential(*steps)


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
def test_random_sequences_give_what_their_copies_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    torch.manual_seed(0)
    for _ in range(80):
        size, count = rng.randrange(1, 5), rng.randrange(1, 4)
        member = random_sequence(rng, size).double()
        if "x" not in member.in_keys:
            continue
        expand = rng.random() < 0.5
        ensemble = EnsembleModule(member, count, expand_input=expand)
        shape = [rng.randrange(4) for _ in range(rng.randrange(1, 3))] + [size]
        value = torch.randn(shape if expand else [count, *shape], dtype=torch.float64)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "vmap", None)
            ours = ensemble._kd_forward_values(value)
        monkeypatch.setattr(ensemble, "_kd_recurrent", True)
        torch.testing.assert_close(ours, ensemble._kd_forward_values(value))


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (5,), (2, 4, 1), (0, 4), (0,)])
def test_inputs_of_odd_shapes_fare_as_under_vmap(expand: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for net in (nn.Linear(4, 2), nn.LayerNorm((1, 4)), nn.Sequential(nn.Linear(1, 4), nn.ReLU())):
        ensemble = EnsembleModule(TensorDictModule(net, ["x"], ["y"]), 1, expand_input=expand)
        value = torch.randn(shape if expand else (1, *shape))
        results = [seen(ensemble, value)]
        handle = ensemble.__dict__["_kd_template"].module.register_forward_hook(lambda *_: None)
        results.append(seen(ensemble, value))
        handle.remove()
        assert str(results[0])[:60] == str(results[1])[:60]


def seen(ensemble: EnsembleModule, value: Tensor) -> object:
    try:
        return [tuple(each.shape) for each in ensemble._kd_forward_values(value)]  # type: ignore[attr-defined]  # tensors
    except (RuntimeError, ValueError) as error:
        return type(error), str(error)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows with each call of `vmap`."""
    calls: list[object] = []
    original = torch.vmap

    def vmap(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return original(*args, **kwargs)  # type: ignore[arg-type]  # what it was called with

    monkeypatch.setattr(torch, "vmap", vmap)
    return calls


class Marked(nn.Linear):
    """A layer of a user."""


class Noted(TorchFunctionMode):
    """Sees each function of torch."""

    names: list[str]

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:the copies start from equal values")
def test_hooks_patches_and_other_modules_run_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    value = torch.randn(3, 4)

    def vmapped(net: nn.Module, **settings: object) -> bool:
        keyed = TensorDictModule(net, ["x"], ["y"], **settings)  # type: ignore[arg-type]  # any option
        calls.clear()
        output = EnsembleModule(keyed, 2)(x=value)
        assert isinstance(output, Tensor)
        assert output.shape[:2] == (2, 3)
        return bool(calls)

    assert not vmapped(nn.Linear(4, 2))
    assert not vmapped(nn.Sequential(nn.Linear(4, 2), nn.ReLU(inplace=True)))
    assert vmapped(Marked(4, 2))
    assert vmapped(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0)))
    with_form = nn.Linear(4, 2)
    parametrize.register_parametrization(with_form, "weight", nn.Identity())
    assert vmapped(with_form)
    assert vmapped(nn.Linear(4, 2), method="forward")
    hooked, patched = nn.Linear(4, 2), nn.Linear(4, 2)
    hooked.register_forward_hook(lambda *_: None)
    patched.__dict__["forward"] = lambda value: value * 2
    assert vmapped(hooked)
    assert vmapped(nn.Sequential(nn.ReLU(), patched, nn.Linear(4, 2)))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert vmapped(nn.Linear(4, 2))
    handle.remove()
    mode = Noted()
    mode.names = []
    with mode:
        assert vmapped(nn.Linear(4, 2))
    assert "linear" in mode.names
    with set_skip_existing(True):
        assert vmapped(nn.Linear(4, 2))
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, value: value @ self.weight.mT)
        assert vmapped(nn.Linear(4, 2))
    assert not vmapped(nn.Linear(4, 2))


@dataclass
class Doubled:
    """A mapping of a user; as it is compared by value, it has no hash."""

    factor: float = 2.0

    def __call__(self, raw: Tensor) -> Tensor:
        return raw.exp() * self.factor


@pytest.mark.filterwarnings("ignore:the copies start from equal values")
def test_sequences_that_are_not_plain_run_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    value = torch.randn(3, 4)

    def steps(out: nn.Module, key: NestedKey = "h") -> list[TensorDictModule]:
        first = TensorDictModule(nn.Linear(4, 2), ["x"], [key])
        return [first, TensorDictModule(out, [key], ["loc", "scale"])]

    def vmapped(member: TensorDictSequential) -> bool:
        ensemble = EnsembleModule(member, 2)
        calls.clear()
        found = ensemble._kd_forward_values(value)
        ran = bool(calls)
        monkeypatch.setattr(ensemble, "_kd_recurrent", True)
        torch.testing.assert_close(found, ensemble._kd_forward_values(value))
        return ran

    plain = TensorDictSequential(*steps(NormalParamExtractor()))
    assert not vmapped(plain)
    assert vmapped(TensorDictSequential(*steps(NormalParamExtractor(lambda raw: raw.exp()))))
    assert vmapped(TensorDictSequential(*steps(NormalParamExtractor(Doubled()))))
    assert vmapped(TensorDictSequential(*steps(NormalParamExtractor(), ("n", "h"))))
    assert vmapped(TensorDictSequential(*steps(NormalParamExtractor()), partial_tolerant=True))
    assert vmapped(TensorDictSequential(*steps(NormalParamExtractor()))[:].select_out_keys("loc"))
    assert vmapped(TensorDictSequential(plain, TensorDictModule(nn.ReLU(), ["loc"], ["y"])))
    hooked = TensorDictSequential(*steps(NormalParamExtractor()))
    hooked[1].register_forward_hook(lambda *_: None)
    assert vmapped(hooked)
    subclass = type("Split", (NormalParamExtractor,), {})
    assert vmapped(TensorDictSequential(*steps(subclass())))
    with monkeypatch.context() as patch:
        forward = NormalParamExtractor.forward
        patch.setattr(NormalParamExtractor, "forward", lambda *args: forward(*args))
        assert vmapped(TensorDictSequential(*steps(NormalParamExtractor())))
    assert not vmapped(TensorDictSequential(*steps(NormalParamExtractor())))


def test_gradients_of_transforms_pass_through() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
    ensemble = EnsembleModule(TensorDictModule(net, ["x"], ["y"]), 3)
    value = torch.randn(5, 4)

    def total(each: Tensor) -> Tensor:
        return one(ensemble, each).square().sum()

    mapped = torch.vmap(torch.func.grad(total))(value)
    leaf = value.clone().requires_grad_()
    (slope,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(mapped, slope)


def test_autocast_gives_the_dtype_of_one_copy() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
    for each in (net, net[0], net[:2]):
        ensemble = EnsembleModule(TensorDictModule(each, ["x"], ["y"]), 3)
        value = torch.randn(5, 4)
        with torch.autocast("cpu", torch.bfloat16):
            output = ensemble(TensorDict({"x": value}, [5]))["y"]
            assert output.dtype is each(value).dtype


def test_copies_of_what_has_no_parameters_do_not_share_memory() -> None:
    value = torch.randn(3, 4)
    for count in (1, 3):
        output = one(EnsembleModule(TensorDictModule(nn.Identity(), ["x"], ["y"]), count), value)
        before = value.clone()
        output[0].zero_()
        assert torch.equal(value, before)
        assert all(torch.equal(each, value) for each in output[1:])
