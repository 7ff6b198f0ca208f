"""Random modules as users write them, and all that a module holds, to compare before and after.

Every module maps three columns to three columns.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

Found: TypeAlias = dict[str, object]
NAMES = ["shape", "keys", "data", "names", "device", "_w", "_hidden", "batch_size", "no_convert"]
NAMES += ["_kd_entries", "_data", "is_locked", "get", "items", "forward_", "T", "w", "lock"]


class Odd(nn.Module):
    """Has names that containers and modules use, or that start with `_`."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.chosen = rng.sample(NAMES, rng.randint(1, 4))
        for name in self.chosen:
            kind = rng.random()
            if kind < 0.4:
                self.register_parameter(name, nn.Parameter(torch.rand(3)))
            elif kind < 0.6:
                self.register_buffer(name, torch.rand(3), persistent=rng.random() < 0.5)
            elif kind < 0.7:
                self.register_parameter(name, None)
            elif kind < 0.8:
                self.register_buffer(name, None)
            else:
                self.add_module(name, nn.Linear(3, 3, bias=rng.random() < 0.5))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.chosen:
            part = getattr(self, name)
            if isinstance(part, Tensor):
                x = x * part
            elif part is not None:
                x = part(x)
        return x


class Guarded(nn.Module):
    """Converts what is assigned, and notes its names."""

    def __init__(self) -> None:
        self.__dict__["assigned"] = []
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.inner = nn.Linear(3, 3)
        self.scale = 2.0

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__["assigned"].append(name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value.detach())
        super().__setattr__(name, value)  # type: ignore[arg-type]  # any value

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        return 2 * self.weight if name == "doubled" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.doubled
        assert isinstance(doubled, Tensor)
        out: Tensor = self.inner(x) + doubled * self.scale
        return out


class Listed(nn.Module):
    """Keeps parameters and modules in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.rand(3), nn.Parameter(torch.rand(3))])
        self.named = nn.ParameterDict({"a": torch.rand(3), "b": torch.rand(3)})
        self.parts = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)])
        self.by_name = nn.ModuleDict({"one": self.parts[0], "two": nn.LayerNorm(3)})

    def forward(self, x: Tensor) -> Tensor:
        for part in [*self.parts, *self.by_name.values()]:
            x = part(x)
        out: Tensor = x * self.weights[0] + self.weights[1] * self.named["a"] - self.named["b"]
        return out


class Tied(nn.Module):
    """Uses one weight under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.same = self.encode.weight
        self.again = self.encode

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decode(self.again(self.encode(x))) @ self.same
        return out


class Attending(nn.Module):
    """Runs attention over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attend(x, x, x)[0]
        return out


class Typed(nn.Module):
    """Holds tensors of many dtypes, of which some have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Parameter(torch.rand(3), requires_grad=False)
        self.count = nn.Parameter(torch.tensor(2), requires_grad=False)
        self.turned = nn.Parameter(torch.rand(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.buffer = nn.Buffer(torch.rand(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.fixed + self.turned.real * self.count
        return torch.where(self.get_buffer("mask"), x, x * self.buffer)


class Symmetric(nn.Module):
    """Makes a matrix symmetric, and scales it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.mT) * self.scale


def _symmetric() -> nn.Module:
    made = nn.Linear(3, 3)
    parametrize.register_parametrization(made, "weight", Symmetric())
    return made


def _of_group_norm() -> nn.Module:
    return nn.Sequential(nn.GroupNorm(1, 3, affine=False), nn.Linear(3, 3), nn.PReLU())


MAKERS: list[Callable[[random.Random], nn.Module]] = [
    Odd,
    Odd,
    lambda _: Guarded(),
    lambda _: Listed(),
    lambda _: Tied(),
    lambda _: Attending(),
    lambda _: Typed(),
    lambda _: nn.Linear(3, 3),
    lambda _: nn.BatchNorm1d(3, track_running_stats=False),
    lambda _: nn.Identity(),
    lambda _: _of_group_norm(),
    lambda _: parametrizations.orthogonal(nn.Linear(3, 3)),
    lambda _: _symmetric(),
]


def odd_module(rng: random.Random, depth: int = 2) -> nn.Module:
    """Build a random tree, some parts of which stand in two places."""
    if not depth or rng.random() < 0.3:
        return rng.choice(MAKERS)(rng)
    parts = [odd_module(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        parts.append(rng.choice(parts))
    made: nn.Module = nn.Sequential(*parts)
    for part in made.modules():
        if rng.random() < 0.1:
            part.register_forward_hook(lambda *_: None)
            part.register_forward_pre_hook(lambda *_: None)
    for parameter in made.parameters():
        if rng.random() < 0.1:
            parameter.requires_grad_(False)
    return made


def snapshot(module: nn.Module) -> Found:
    """Return all that a module holds: what is where, in order, and the state of each tensor."""
    found: Found = {}
    for number, member in enumerate(module.modules()):
        for name, value in vars(member).items():
            if isinstance(value, dict):
                value = type(value), [(key, id(each)) for key, each in value.items()]
            elif isinstance(value, (list, set)):
                value = type(value), [each if isinstance(each, str) else id(each) for each in value]
            else:
                value = type(value), id(value)
            found[f"{number} {name}"] = value
        found[f"{number} class"] = id(member), type(member)
    for number, tensor in enumerate([*module.parameters(), *module.buffers()]):
        state = tensor.requires_grad, id(tensor.grad), tensor.dtype, tensor.data_ptr(), type(tensor)
        found[f"tensor {number}"] = state, tensor.is_leaf, id(tensor._backward_hooks)
    return found


def flat_state(module: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a module by their dotted names, shared ones under each name."""
    named = module.named_parameters(remove_duplicate=False)
    return {**dict(named), **dict(module.named_buffers(remove_duplicate=False))}
