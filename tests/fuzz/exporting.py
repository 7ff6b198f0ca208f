"""Random sequences of all kinds of steps that an exporter may meet, and values for their inputs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias, cast

import torch
from tests.fuzz.plain_models import DISCARD, Key, State, put
from tests.fuzz.plan_events import key
from torch import Tensor, nn
from torch.distributions import Categorical, Laplace, Normal

from kd_core import TensorDict, unravel_key_to_tuple
from kd_nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from kd_probabilistic import CompositeDistribution, ProbabilisticTensorDictModule

Value: TypeAlias = "Tensor | str | dict[str, Tensor]"
Given: TypeAlias = dict[Key, Value]

GIVEN: list[Key] = [("a",), ("b",), ("n", "a"), ("n", "b")]
WRITTEN: list[Key] = [*GIVEN, ("c",), ("d",), ("n", "c"), ("m", "k", "z"), ("m", "y")]
WHOLE: list[Key] = [("n",), ("q",), ("m", "q")]
WORDS: dict[Key, str] = {("mode",): "abs", ("n", "mode"): "negative"}


class Mixed(nn.Module):
    """Any number of inputs, some outputs."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.outputs, self.weight = outputs, nn.Parameter(torch.rand(2) + 0.5)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Add up and scale."""
        total = sum(((i + 1) * v for i, v in enumerate(values)), torch.zeros(())) * self.weight
        made = tuple((total + i).tanh() for i in range(self.outputs))
        return made if len(made) > 1 else made[0]


def named(*, x: Tensor, y: Tensor) -> Tensor:
    return x - 2 * y


def optional(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x * 2 if y is None else x - y


def by_word(x: Tensor, mode: str) -> Tensor:
    return x.abs() if mode == "abs" else -x


def fold(value: State) -> Tensor:
    return cast(Tensor, value["a"]) * 2 + cast(Tensor, value["b"])


def turned(value: State) -> State:
    return {"b": value["a"], "a": cast(Tensor, value["b"]) + 1}


def pack(x: Tensor) -> State:
    return {"a": x, "b": x + 1}


OF_CONTAINERS: list[Callable[..., object]] = [fold, turned, pack]


class Whole(nn.Module):
    """Parameters of a composite distribution, as a nested dict."""

    def __init__(self, kinds: dict[Key, type]) -> None:
        super().__init__()
        self.kinds, self.weight = kinds, nn.Parameter(torch.rand(2) + 0.5)

    def forward(self, x: Tensor) -> State:
        """Return the parameters of each."""
        made: State = {}
        for place, (name, kind) in enumerate(self.kinds.items()):
            value = x * self.weight + place
            plain = {"logits": value}
            put(made, name, plain if kind is Categorical else {"loc": value, "scale": value.exp()})
        return made


class Maker:
    """Makes random sequences; `known` are the keys that are given or written."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.known, self.count = rng, [*GIVEN], 0

    def read(self) -> Key:
        return self.rng.choice(self.known)

    def module(
        self, function: Callable[..., object], reads: list[Key], writes: list[Key], **options: Any
    ) -> TensorDictModule:
        self.known += [k for k in writes if k not in self.known and k not in (*WHOLE, DISCARD)]
        return TensorDictModule(function, [*map(key, reads)], [*map(key, writes)], **options)

    def step(self) -> list[nn.Module]:
        """Return one step, or a distribution after what computes its parameters."""
        rng = self.rng
        one, two = rng.sample(WRITTEN, 2)
        kind = rng.choice(
            ["mix", "same", "two", "named", "optional", "word", "whole", "one", "all"]
        )
        if kind == "mix":
            return [self.module(Mixed(), [self.read() for _ in range(rng.randint(1, 3))], [one])]
        if kind == "same":
            one = self.read()
            return [self.module(Mixed(), [one], [one])]
        if kind == "two":
            writes = [one, rng.choice([two, DISCARD])]
            return [self.module(Mixed(2), [self.read(), self.read()], writes)]
        if kind == "named":
            reads = {"x": key(self.read()), "y": key(self.read())}
            self.known.append(one)
            return [TensorDictModule(named, reads, [key(one)])]
        if kind == "optional":
            other = rng.choice([("gone",), ("n", "gone"), self.read()])
            return [self.module(optional, [self.read(), other], [one], strict=False)]
        if kind == "word":
            return [self.module(by_word, [self.read(), rng.choice([*WORDS])], [one])]
        if kind == "whole":
            return [self.whole()]
        return self.one_value() if kind == "one" else self.several_values()

    def whole(self) -> nn.Module:
        """Return a step that reads or writes a container."""
        function = self.rng.choice(OF_CONTAINERS)
        write = self.rng.choice(WHOLE if function is not fold else WRITTEN)
        made = self.module(function, [("n",) if function is not pack else self.read()], [write])
        self.known += [] if function is fold else [(*write, "a"), (*write, "b")]
        return made

    def one_value(self) -> list[nn.Module]:
        """Return a normal extractor, and a distribution of one value."""
        self.count += 1
        rng, head = self.rng, self.rng.choice([(), ("p",)])
        params: list[Key] = [(*head, f"loc{self.count}"), (*head, f"scale{self.count}")]
        net = nn.Sequential(nn.Linear(2, 4), NormalParamExtractor())
        first = self.module(net, [self.read()], params)
        write = rng.choice(WRITTEN)
        self.known.append(write)
        return [
            first,
            ProbabilisticTensorDictModule(
                dict(zip(("loc", "scale"), map(key, params), strict=True)),
                [key(write)],
                distribution_class=rng.choice([Normal, Laplace]),
                return_log_prob=rng.random() < 0.5,
            ),
        ]

    def several_values(self) -> list[nn.Module]:
        """Return a composite distribution, and what computes its parameters."""
        self.count += 1
        rng = self.rng
        names: list[Key] = [("u",), ("g", "v")][: rng.randint(1, 2)]
        kinds = {name: rng.choice([Normal, Categorical]) for name in names}
        keys = [key((*rng.choice([(), ("g",)]), f"s{self.count}{i}")) for i in range(len(names))]
        options: dict[str, Any] = {}
        if rng.random() < 0.5:
            options["log_prob_keys"] = [("l", f"{self.count}{i}") for i in range(len(names))]
        settings = {
            "distribution_map": {key(name): kind for name, kind in kinds.items()},
            "name_map": dict(zip(map(key, names), keys, strict=True)),
        }
        first = TensorDictModule(Whole(kinds), [key(self.read())], [f"params{self.count}"])
        return [
            first,
            ProbabilisticTensorDictModule(
                {"params": f"params{self.count}"},
                keys,
                distribution_class=CompositeDistribution,
                distribution_kwargs=settings,
                return_log_prob=rng.random() < 0.6,
                **options,
            ),
        ]

    def sequence(self, depth: int = 2) -> TensorDictSequential:
        rng, steps = self.rng, list[nn.Module]()
        for _ in range(rng.randint(1, 3)):
            inner = depth and rng.random() < 0.25
            steps += [self.sequence(depth - 1)] if inner else self.step()
        made = TensorDictSequential(*steps)
        if rng.random() < 0.3:
            made.select_out_keys(*rng.sample(made.out_keys, rng.randint(1, len(made.out_keys))))
        return made


def a_model(rng: Random) -> TensorDictSequential:
    """Return a random sequence, whole or a part of it."""
    made = Maker(rng).sequence()
    part = rng.random()
    if part < 0.15:
        made = made[rng.randrange(len(made)) :]
    elif part < 0.25:
        made = made[: rng.randint(1, len(made))]
    elif part < 0.4:
        wanted = rng.sample(made.out_keys, rng.randint(1, len(made.out_keys)))
        made = made.select_subsequence(out_keys=wanted)
    return made.eval()


def inputs(model: TensorDictSequential, batch: int, rng: Random) -> Given | None:
    """Return values for what a model reads, and not for all that it can do without.

    None if it reads what only a step that was cut off can make.
    """
    torch.manual_seed(batch)
    found: Given = {}
    for path in map(unravel_key_to_tuple, model.in_keys):
        left_out = key(path) in model._kd_optional_in_keys and rng.random() < 0.5
        if path[-1].startswith("params"):
            return None
        if left_out:
            continue
        if path in WHOLE:
            found[path] = {"a": torch.randn(batch, 2), "b": torch.randn(batch, 2)}
        else:
            value = torch.randn(batch, 2)
            found[path] = WORDS.get(path, value.exp() if "scale" in path[-1] else value)
    return found


def container(given: Given, batch: int) -> TensorDict:
    td = TensorDict({}, [batch])
    for path, value in given.items():
        if isinstance(value, str):
            td.set_non_tensor(key(path), value)
        else:
            td.set(key(path), TensorDict(value, [batch]) if isinstance(value, dict) else value)
    return td
