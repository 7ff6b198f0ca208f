"""The keyed models that every backend meets, each with an example."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import kd_export
from kd_core import TensorDictBase
from kd_export._capture.sizes import Dynamic
from kd_nn import EnsembleModule, NormalParamExtractor, TensorDictModule

Key = str | tuple[str, ...]
Keys = list[Key]
Range = tuple[int, int]


class Keyed(nn.Module):
    """A keyed module written by hand: reads its in_keys, writes its out_keys."""

    def __init__(self, net: nn.Module, in_keys: Keys, out_keys: Keys) -> None:
        super().__init__()
        self.net: nn.Module = net
        self.in_keys = in_keys
        self.out_keys = out_keys

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        results = self.net(*(td.get(key) for key in self.in_keys))
        if isinstance(results, Tensor):
            results = (results,)
        for key, value in zip(self.out_keys, results, strict=True):
            td.set(key, value)
        return td


class Do(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> object:
        return self.function(*tensors)


class Cell(nn.Module):
    """A recurrent policy of two actions, and its next state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 8)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        after = self.cell(x, h)
        return after[:, :2].tanh(), after


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.last = nn.Linear(4, 4)
        self.extract = NormalParamExtractor()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.body(x)
        latent = self.last(hidden)
        return hidden, latent, *self.extract(latent)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        new = self.cell(x, h)
        return new.tanh(), new


class LongMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 5)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        new_h, new_c = self.cell(x, (h, c))
        return new_h.tanh(), new_h, new_c


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


class Counter(nn.Module):
    """A module that keeps state in a buffer, which no export may drop."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


class Scatter(nn.Module):
    """One round of message passing: edges read two nodes and are summed at the second."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(6, 4)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = self.message(torch.cat([nodes[source], nodes[target]], -1))
        total = nodes.new_zeros(nodes.shape[0], 4)
        return total.index_add(0, target, messages)


class Policy(nn.Module):
    """A normaliser from data, a network, and actions kept within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]))
        self.register_buffer("std", torch.tensor([1.0, 2.0, 3.0]))
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        actions: Tensor = self.net((x - self.mean) / self.std)
        return actions.clamp(-1.0, 1.0)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def convolution() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    with torch.no_grad():
        net(torch.randn(16, 1, 6, 6))
    return net


@dataclass
class Case:
    """A model, an example of its input, and what is dynamic about it."""

    module: Keyed
    example: dict[str | tuple[str, ...], Tensor]
    dynamic: Dynamic[Key] = "batch"
    outputs: Keys = field(default_factory=list)


def tutorial() -> Case:
    module = Keyed(Heads(), ["x"], ["hidden", "latent", "loc", "scale"])
    return Case(module, {"x": torch.randn(1, 3)})


def nested() -> Case:
    module = Keyed(nn.Linear(3, 2), [("in", "x")], [("out", "image")])
    return Case(module, {("in", "x"): torch.randn(1, 3)})


def in_place() -> Case:
    return Case(Keyed(nn.Linear(3, 3), ["x"], ["x"]), {"x": torch.randn(1, 3)})


def conv() -> Case:
    return Case(Keyed(convolution(), ["image"], ["code"]), {"image": torch.rand(1, 1, 6, 6)})


def gru() -> Case:
    module = Keyed(Recurrent(), ["x", ("state", "h")], ["y", ("next", "h")])
    return Case(module, {"x": torch.randn(1, 3), ("state", "h"): torch.zeros(1, 5)})


def lstm() -> Case:
    keys: Keys = ["x", ("state", "h"), ("state", "c")]
    module = Keyed(LongMemory(), keys, ["y", ("next", "h"), ("next", "c")])
    example: dict[str | tuple[str, ...], Tensor] = {"x": torch.randn(1, 3)}
    return Case(module, example | {key: torch.zeros(1, 5) for key in keys[1:]})


def ensemble() -> Case:
    member = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    return Case(Keyed(EnsembleModule(member, 3), ["x"], ["y"]), {"x": torch.randn(1, 3)})


def transformer() -> Case:
    return Case(Keyed(Encoder(), ["x"], ["y"]), {"x": torch.randn(1, 5, 8)})


def shared() -> Case:
    return Case(Keyed(Shared(), ["x"], ["y"]), {"x": torch.randn(1, 3)})


def graph() -> Case:
    module = Keyed(Scatter(), ["nodes", ("edge", "from"), ("edge", "to")], ["sum"])
    example: dict[str | tuple[str, ...], Tensor] = {
        "nodes": torch.randn(4, 3),
        ("edge", "from"): torch.tensor([0, 1, 2, 3, 0, 2]),
        ("edge", "to"): torch.tensor([1, 2, 3, 0, 2, 0]),
    }
    dynamic: dict[Key, dict[int, str]] = {
        "nodes": {0: "node"},
        ("edge", "from"): {0: "edge"},
        ("edge", "to"): {0: "edge"},
    }
    return Case(module, example, dynamic)


def policy() -> Case:
    return Case(Keyed(Policy(), [("obs", "x")], ["action"]), {("obs", "x"): torch.randn(1, 3)})


CASES = {
    make.__name__: make
    for make in (
        tutorial, nested, in_place, conv, gru, lstm, ensemble, transformer, shared, graph, policy,
    )
}  # fmt: skip


def case(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


@functools.cache
def exported(name: str) -> kd_export.KeyedProgram:
    """Export a model, once in a process: tests look at the program and write it, in any format."""
    model = case(name)
    return kd_export.export(model.module, model.example, dynamic=model.dynamic)


def bounded(dynamic: Dynamic[Key], alone: Range, named: Range) -> Dynamic[Key]:
    """Give every axis a range, one that is the only one and those that are named by dimension."""
    if isinstance(dynamic, str):
        return {dynamic: alone}
    assert dynamic is not None
    axes = {name for dims in dynamic.values() if isinstance(dims, dict) for name in dims.values()}
    found: dict[Key, tuple[int, int | None] | Mapping[int, str]] = {**dynamic}
    return found | dict.fromkeys(axes, named)


def saved(name: str, path: Path, *, dynamic: Dynamic[Key] | None = None) -> Path:
    """Export a model in the format of the file name; return the path."""
    if dynamic is None:
        exported(name).save(path)
    else:
        model = case(name)
        kd_export.save(model.module, path, model.example, dynamic=dynamic)
    return path
