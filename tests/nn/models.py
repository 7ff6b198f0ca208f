"""Models of every kind that keyed modules can form, each with what it reads.

Tests of the ways to run a model go over all of them; a new kind of step is added here once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from kd_core import NestedKey, TensorDict, TensorDictBase
from kd_nn import (
    EnsembleModule,
    NormalParamExtractor,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    WrapModule,
    dispatch,
)
from kd_nn import TensorDictModule as Mod
from kd_nn import TensorDictSequential as Seq

X: Final = torch.arange(6.0).reshape(2, 3) / 6


@dataclass(frozen=True)
class Model:
    """A model and what it reads.

    Attributes:
        build: Makes the model; torch is seeded before.
        entries: What the container of a call holds.
        batch_size: The batch size of that container.
        planned: Whether calls with tensors run a plan, so that a comparison means something.
        by_tensors: Whether it can be called with tensors.
        device: The device of that container.
    """

    build: Callable[[], nn.Module]
    entries: Mapping[str, object] = field(default_factory=lambda: {"x": X})
    batch_size: tuple[int, ...] = (2,)
    planned: bool = True
    by_tensors: bool = True
    device: str | None = None

    def make(self) -> nn.Module:
        """Return the model with the same weights each time."""
        torch.manual_seed(0)
        return self.build()

    def container(self) -> TensorDict:
        """Return a container of fresh tensors; those of floating point require gradients."""
        return TensorDict(_fresh(self.entries), self.batch_size, device=self.device)


def labelled(x: Tensor, label: object) -> Tensor:
    """Return another result where text comes in its container."""
    return x + len(label) if isinstance(label, str) else x - 1


def _fresh(entries: Mapping[str, object]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in entries.items():
        if isinstance(value, Mapping):
            made[key] = _fresh(value)
        elif isinstance(value, Tensor):
            made[key] = value.clone().requires_grad_(value.is_floating_point())
        else:
            made[key] = value
    return made


class Count(nn.Module):
    """Adds the calls up in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Silent(Count):
    """Runs for its effect alone."""

    def forward(self, x: Tensor) -> None:  # type: ignore[override]  # nothing comes back
        self.calls += x.detach().sum()


class Powers(nn.Module):
    """Has a method to call."""

    def power(self, x: Tensor, exponent: int = 1) -> Tensor:
        return x**exponent


class Opaque(nn.Module):
    """A keyed module by its attributes alone."""

    in_keys: ClassVar = ["a"]
    out_keys: ClassVar = ["o"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("o", tensordict["a"] + 100)


class Undeclared(TensorDictModuleBase):
    """Writes more than it declares."""

    in_keys = ["x"]  # noqa: RUF012 - a list, as users declare it
    out_keys = ["y"]  # noqa: RUF012 - likewise

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("y", -tensordict["x"]).set("extra", tensordict["x"] + 1)


class Residual(TensorDictModuleBase):
    """Computes from bare values, and says so."""

    in_keys = ["h", ("goal", "by")]  # noqa: RUF012 - a list, as users declare it
    out_keys = ["h"]  # noqa: RUF012 - likewise

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("h", tensordict["h"] + tensordict["goal", "by"])

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        h, by = values
        assert isinstance(h, Tensor)
        assert isinstance(by, Tensor)
        return (h + by,)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x - 1


def named(x: Tensor) -> dict[str, object]:
    return {"down": x - 1, "up": x + 1, "more": {"x": x}}


def add_in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.add_(1)


def pack(x: Tensor) -> TensorDict:
    return TensorDict({"b": x + 1, "c": x - 1})


def either(x: Tensor, by: Tensor | None) -> Tensor:
    return x if by is None else x * by


def tutorial() -> Seq:
    return Seq(
        Mod(nn.Linear(3, 4), ["x"], ["h"]),
        Mod(nn.ReLU(), ["h"], ["h"]),
        Seq(Mod(nn.Linear(4, 4), ["h"], ["p"])),
        Mod(NormalParamExtractor(), ["p"], ["loc", ("out", "scale")]),
    )


def chain() -> Seq:
    return Seq(
        Mod(torch.neg, ["x"], ["a"]), Mod(torch.exp, ["a"], ["b"]), Mod(split, ["a"], ["c", "d"])
    )


def inlined() -> Mod:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Identity())
    return Mod(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), inner, nn.ELU()), ["x"], ["y"])


def shared() -> Seq:
    linear = nn.Linear(3, 3)
    step = Mod(linear, ["y"], ["y"])
    return Seq(Mod(linear, ["x"], ["y"]), step, step, Mod(nn.Sequential(linear), ["y"], ["z"]))


def attention() -> Seq:
    query: dict[str, NestedKey] = {"query": "x", "key": "x", "value": ("memory", "v")}
    return Seq(
        Mod(nn.MultiheadAttention(4, 2, batch_first=True), query, ["h", "_"]),
        Mod(nn.LayerNorm(4), ["h"], ["y"]),
    )


def recurrent() -> Seq:
    return Seq(
        Mod(nn.LSTMCell(3, 4), {"input": "x"}, ["h", "c"]), Mod(nn.GRUCell(4, 4), ["h", "c"], ["g"])
    )


def tolerant_inside() -> Seq:
    inner = Seq(Mod(torch.neg, ["h"], ["a"]), Mod(torch.exp, ["q"], ["z"]), partial_tolerant=True)
    return Seq(Mod(torch.tanh, ["x"], ["h"]), inner)


def overwritten() -> Seq:
    return Seq(Mod(torch.neg, ["x"], ["y"]), Mod(torch.exp, ["q"], ["y"]), partial_tolerant=True)


def ensemble(expand_input: bool) -> Seq:
    net = Mod(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), ["h"], ["y"])
    return Seq(Mod(torch.neg, ["x"], ["h"]), EnsembleModule(net, 2, expand_input=expand_input))


def dead_norm() -> Seq:
    norm = Seq(Mod(nn.BatchNorm1d(3), ["x"], ["h"]), Mod(Count(), ["h"], ["dead"]))
    return Seq(norm, Mod(nn.BatchNorm1d(3), ["x"], ["z"]), selected_out_keys=["h"])


def wrapped_sequence() -> Seq:
    return Seq(TensorDictModuleWrapper(tutorial()), Mod(torch.neg, ["loc"], ["y"]))


def dead_input(depth: int) -> Seq:
    model = Seq(Mod(torch.neg, ["x"], ["a"]), Mod(torch.exp, ["z"], ["b"]))
    for _ in range(depth):
        model = Seq(model)
    return model.select_out_keys("a")


def dead_input_that_is_written_later() -> Seq:
    dead = Mod(torch.exp, ["z"], ["b"])
    return Seq(dead, Mod(torch.neg, ["x"], ["z"]), Mod(split, ["z"], ["y", "_"])).select_out_keys(
        "y"
    )


LABELLED: Final = {"x": X, "label": "cat"}


def strays() -> Seq:
    """Return a model whose first step leaves the device; the next one is told where it runs."""

    def stray(x: Tensor) -> Tensor:
        return torch.zeros(x.shape, device="cpu")

    def where(h: Tensor) -> Tensor:
        return torch.zeros(2, 4 if h.is_meta else 5, device="meta")

    return Seq(Mod(stray, ["x"], ["h"]), Mod(where, ["h"], ["y"]))


UNUSED: Final = {"x": X, "z": -X}
GOAL: Final = {"x": X, "goal": {"by": X * 2, "other": X}}

MODELS: Final[dict[str, Model]] = {
    "tutorial": Model(tutorial),
    "chain": Model(chain),
    "chain of named steps": Model(lambda: Seq({"one": chain()[0], "two": chain()[1]})),
    "selected": Model(lambda: chain().select_out_keys("d", "b")),
    "selected inside": Model(lambda: Seq(chain().select_out_keys("b", "a"), chain()[2:])),
    "selected outside": Model(lambda: Seq(Seq(chain()), selected_out_keys=["d"])),
    "alone": Model(lambda: Mod(nn.Linear(3, 4), ["x"], [("o", "y")])),
    "alone and selected": Model(lambda: Mod(split, ["x"], ["up", "down"]).select_out_keys("down")),
    "sequential of torch": Model(inlined),
    "shared weights": Model(shared),
    "parametrised": Model(lambda: Mod(weight_norm(nn.Linear(3, 4)), ["x"], ["y"])),
    "attention": Model(
        attention, {"x": torch.ones(2, 3, 4), "memory": {"v": torch.rand(2, 3, 4)}}, planned=False
    ),
    "recurrent": Model(recurrent),
    "embedding": Model(
        lambda: Seq(Mod(nn.Embedding(5, 3), ["i"], ["e"]), Mod(torch.sum, ["e"], ["s"])),
        {"i": torch.tensor([1, 4])},
        (),
    ),
    "dropout": Model(lambda: Seq(Mod(nn.Dropout(0.5), ["x"], ["a"]), chain()[1:])),
    "batch norm": Model(
        lambda: Seq(Mod(nn.BatchNorm1d(3), ["x"], ["h"]), Mod(Count(), ["h"], ["y"]))
    ),
    "batch norm that is not needed": Model(dead_norm),
    "effect alone": Model(lambda: Seq(Mod(Silent(), ["x"], ["_"]), chain())),
    "effect alone in what is not needed": Model(
        lambda: Seq(
            Seq(Mod(Silent(), ["x"], []), Mod(Count(), ["x"], ["y"])), chain()
        ).select_out_keys("d")
    ),
    "discarded output": Model(lambda: Seq(Mod(split, ["x"], ["_", "h"]), Mod(Count(), "h", "h"))),
    "in place": Model(lambda: Seq(Mod(add_in_place, ["x"], ["y"]), Mod(torch.neg, ["x"], ["z"]))),
    "input as output": Model(
        lambda: Seq(Mod(nn.Identity(), ["x"], ["y"]), Mod(split, "y", ["x", "z"]))
    ),
    "overwrites its input": Model(
        lambda: Seq(Mod(torch.neg, ["x"], ["x"]), Mod(torch.exp, ["x"], ["x"]))
    ),
    "method": Model(lambda: Mod(Powers(), "x", "y", method="power", method_kwargs={"exponent": 3})),
    "arguments by name": Model(lambda: Seq(Mod(torch.sub, {"other": "x", "input": "x"}, ["y"]))),
    "outputs by name": Model(lambda: Seq(Mod(named, ["x"], ["up", ("more", "x")]))),
    "renamed outputs": Model(
        lambda: Seq(Mod(named, ["x"], {"down": "x", "up": ("n", "up")}), Mod(torch.neg, "x", "y"))
    ),
    "list of outputs": Model(lambda: Seq(Mod(lambda x: [x + 1, x], ["x"], ["a", "b"]))),
    "number as output": Model(lambda: Seq(Mod(lambda x: 2.0, ["x"], ["n"])), batch_size=()),
    "text as output": Model(lambda: Seq(Mod(lambda x: "cat", ["x"], ["label"]))),
    "text as input": Model(
        lambda: Seq(Mod(labelled, ["x", "label"], ["y"])),
        LABELLED,
        planned=False,
    ),
    "values alone": Model(lambda: Seq(Mod(torch.neg, ["x"], ["h"]), Residual()), GOAL),
    "keyed by attributes": Model(lambda: Seq(chain()[:1], Opaque()), planned=False),
    "undeclared output": Model(lambda: Seq(Undeclared(), Mod(torch.exp, "y", "z")), planned=False),
    "container as output": Model(
        lambda: Seq(Mod(pack, ["x"], ["n"]), Mod(torch.neg, [("n", "b")], ["y"])), planned=False
    ),
    "container instead of its part": Model(
        lambda: Seq(Mod(torch.neg, ["x"], [("n", "a")]), Mod(pack, [("n", "a")], ["n"])),
        planned=False,
    ),
    "container as input": Model(
        lambda: Seq(Mod(lambda goal: goal["by"] + goal["other"], ["goal"], ["y"])),
        GOAL,
        planned=False,
    ),
    "container and its part as input": Model(
        lambda: Seq(
            Mod(lambda goal: goal["by"], ["goal"], ["y"]), Mod(torch.neg, ("goal", "by"), "z")
        ),
        GOAL,
        planned=False,
    ),
    "optional input": Model(
        lambda: Seq(Mod(torch.neg, "x", "h"), Mod(either, ["h", "by"], ["y"], strict=False)),
        planned=False,
    ),
    "tolerant": Model(lambda: Seq(chain()[0], Mod(torch.exp, "q", "z"), partial_tolerant=True)),
    "tolerant inside": Model(tolerant_inside, planned=False),
    "tolerant of a later writer": Model(overwritten),
    "input of a dead step": Model(lambda: dead_input(0), UNUSED),
    "input of a dead step inside": Model(lambda: dead_input(2), UNUSED),
    "input of a dead step, written later": Model(dead_input_that_is_written_later, UNUSED),
    "fresh container": Model(lambda: Seq(chain(), inplace=False)),
    "empty container": Model(lambda: Seq(chain(), inplace="empty")),
    "steps with other containers": Model(
        lambda: Seq(
            Mod(torch.neg, "x", "a", inplace=False), Mod(split, "a", ["b", "c"], inplace="empty")
        ),
        planned=False,
        by_tensors=False,
    ),
    "container with a device": Model(tutorial, device="cpu"),
    "output on another device": Model(strays, {"x": X.to("meta")}, device="meta"),
    "wrapper": Model(wrapped_sequence, planned=False),
    "function of a container": Model(
        lambda: Seq(
            WrapModule(lambda td: td.set("h", td["x"] + 1), in_keys="x", out_keys="h"),
            Mod(torch.neg, ["h"], ["y"]),
        ),
        planned=False,
    ),
    "another container": Model(
        lambda: Seq(WrapModule(lambda td: td[0]), Mod(torch.neg, ["x"], ["y"])),
        planned=False,
        by_tensors=False,
    ),
    "ensemble": Model(lambda: ensemble(True), planned=False),
    "ensemble of parts": Model(lambda: ensemble(False), planned=False),
    "no steps": Model(lambda: Seq()),
}
