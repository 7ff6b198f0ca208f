"""Random sequences of layers and distributions, beside the same made of plain tensors by hand.

A sequence computes parameters, draws or estimates values of distributions, and computes with
these. It is called again and again, while its settings and its weights change, with a container, by
position and by keyword. The reference builds each distribution anew from a dict of tensors, and
draws from generators of its own.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from tests.fuzz.conftest import Seeds
from torch import Tensor, distributions, nn
from torch.distributions import Distribution

from kd_core import TensorDict
from kd_nn import TensorDictModule
from kd_probabilistic import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_interaction_type,
)

Values: TypeAlias = dict[str, Tensor]
Estimates: TypeAlias = dict[InteractionType, Callable[[Distribution], Tensor]]
KINDS = [InteractionType.MEAN, InteractionType.MODE, InteractionType.MEDIAN, InteractionType.RANDOM]


def positive(x: Tensor) -> Tensor:
    return x.exp() + 0.1


def independent(loc: Tensor, scale: Tensor) -> Distribution:
    return distributions.Independent(distributions.Normal(loc, scale), 1)


@dataclass(frozen=True)
class Kind:
    """A distribution: how it is built, what its parameters must be, and its estimates."""

    build: Callable[..., Distribution]
    params: dict[str, Callable[[Tensor], Tensor]]
    estimates: Estimates


def mode(dist: Distribution) -> Tensor:
    return dist.mode


def mean(dist: Distribution) -> Tensor:
    return dist.mean


def median(dist: Distribution) -> Tensor:
    return dist.icdf(torch.tensor(0.5))


def log_prob(dist: Distribution, value: Tensor) -> Tensor:
    """Return the log-probability, also of no rows, which `Independent` refuses."""
    if isinstance(dist, distributions.Independent):
        each: Tensor = dist.base_dist.log_prob(value)
        return each.sum(-1)
    found: Tensor = dist.log_prob(value)
    return found


ALL: Estimates = {
    InteractionType.MEAN: mean,
    InteractionType.MODE: mode,
    InteractionType.MEDIAN: median,
}
MIDDLE: Estimates = {InteractionType.MEAN: mean, InteractionType.MODE: mode}
DISTRIBUTIONS = [
    Kind(distributions.Normal, {"loc": torch.neg, "scale": positive}, ALL),
    Kind(distributions.Laplace, {"loc": torch.neg, "scale": positive}, ALL),
    Kind(distributions.Exponential, {"rate": positive}, ALL),
    Kind(distributions.Bernoulli, {"logits": torch.neg}, {InteractionType.MODE: mode}),
    Kind(distributions.Gamma, {"concentration": positive, "rate": positive}, MIDDLE),
    Kind(independent, {"loc": torch.neg, "scale": positive}, MIDDLE),
]


@dataclass
class Step:
    """A distribution of a sequence: what it reads and writes, and its settings."""

    kind: Kind
    reads: str
    writes: str
    module: ProbabilisticTensorDictModule
    seed: int | None
    generator: torch.Generator | None = None

    def run(self, values: Values, asked: InteractionType | None) -> None:
        """Do by hand what the module does."""
        module = self.module
        dist = self.build(values)
        kind = asked or module.default_interaction_type
        if kind is InteractionType.RANDOM:
            with self.source():
                value = dist.rsample() if dist.has_rsample else dist.sample()
        else:
            value = self.kind.estimates[kind](dist)
        values[self.writes] = value
        if module.return_log_prob:
            values[f"{self.writes}_log_prob"] = log_prob(dist, value)

    def build(self, values: Values) -> Distribution:
        return self.kind.build(
            **{name: values[f"{self.writes}_{name}"] for name in self.kind.params}
        )

    @contextmanager
    def source(self) -> Iterator[None]:
        """Draw from the generator of the step."""
        if self.seed is None:
            yield
            return
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(self.seed)
        before = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        yield
        self.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


@dataclass
class World:
    """A sequence, and what it is made of."""

    layer: nn.Linear
    steps: list[Step]
    model: ProbabilisticTensorDictSequential
    history: list[str] = field(default_factory=list)

    def run(self, values: Values, asked: InteractionType | None) -> Values:
        """Compute by hand all that the sequence writes."""
        values = dict(values)
        for step in self.steps:
            hidden = self.layer(values[step.reads])
            for name, become in step.kind.params.items():
                values[f"{step.writes}_{name}"] = become(hidden)
            step.run(values, asked)
        return values


def keyed(name: str) -> str | tuple[str, str]:
    """Return where a value stands: those of parameters are nested."""
    head, _, tail = name.partition("_")
    return (
        (f"of {head}", tail)
        if tail in ("loc", "scale", "rate", "logits", "concentration")
        else name
    )


def a_world(rng: random.Random) -> World:
    layer = nn.Linear(2, 2)
    steps: list[Step] = []
    modules: list[nn.Module] = []
    reads = "x"
    for writes in ("u", "v", "w")[: rng.randint(1, 3)]:
        kind = rng.choice(DISTRIBUTIONS)
        become = tuple(kind.params.values())
        params = {name: keyed(f"{writes}_{name}") for name in kind.params}
        out = [*params.values()]
        modules.append(
            TensorDictModule(Several(layer, become), [reads], out)  # one layer for all
        )
        module = ProbabilisticTensorDictModule(
            params,
            [writes],
            distribution_class=kind.build,
            default_interaction_type=rng.choice([*kind.estimates, InteractionType.RANDOM]),
            return_log_prob=rng.random() < 0.5,
            cache_dist=rng.random() < 0.5,
            generator=(seed := rng.choice([None, rng.randrange(99)])),
        )
        modules.append(module)
        steps.append(Step(kind, reads, writes, module, seed))
        reads = rng.choice([reads, writes])
    return World(layer, steps, ProbabilisticTensorDictSequential(*modules))


class Several(nn.Module):
    """Computes all parameters of a distribution with one layer."""

    def __init__(self, layer: nn.Linear, become: tuple[Callable[[Tensor], Tensor], ...]) -> None:
        super().__init__()
        self.layer, self.become = layer, become

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        hidden = self.layer(x)
        found = tuple(become(hidden) for become in self.become)
        return found if len(found) > 1 else found[0]


def change(rng: random.Random, world: World) -> None:
    """Change a setting, the weights, or the sequence for a copy."""
    step = rng.choice(world.steps)
    what = rng.choice(["kind", "log_prob", "seed", "weights", "train", "copy", "pickle"])
    world.history.append(what)
    if what == "kind":
        step.module.default_interaction_type = rng.choice([*step.kind.estimates, *KINDS[3:]])
    elif what == "seed":
        step.seed, step.generator = rng.choice([None, rng.randrange(99)]), None
        step.module.generator = step.seed
    elif what == "weights":
        with torch.no_grad():
            world.layer.weight.add_(0.1)
    elif what == "train":
        world.layer.weight.requires_grad_(not world.layer.weight.requires_grad)
    elif what in ("copy", "pickle"):
        copied = copy.deepcopy if what == "copy" else again
        world.model = copied(world.model)
        leaves = [m for m in world.model.modules() if isinstance(m, ProbabilisticTensorDictModule)]
        for each, module in zip(world.steps, leaves, strict=True):
            each.module = module
        world.layer = next(m for m in world.model.modules() if isinstance(m, nn.Linear))


def again(model: ProbabilisticTensorDictSequential) -> ProbabilisticTensorDictSequential:
    made: ProbabilisticTensorDictSequential = pickle.loads(pickle.dumps(model))
    return made


def compare(world: World, rng: random.Random) -> None:
    """Call the sequence and the plain steps, and compare all that they write."""
    batch = rng.choice([(), (3,), (0,), (2, 3)])
    given = {"x": torch.randn(*batch, 2, requires_grad=rng.random() < 0.5)}
    every = [kind for kind in KINDS[:3] if all(kind in s.kind.estimates for s in world.steps)]
    asked = rng.choice([None, None, InteractionType.RANDOM, *every])
    seed = rng.randrange(1000)
    torch.manual_seed(seed)
    want = world.run(given, asked)
    follows = torch.rand(1)
    torch.manual_seed(seed)
    td = TensorDict(given, batch)
    with nullcontext() if asked is None else set_interaction_type(asked):
        form = rng.choice(["container", "keyword", "position"])
        if form == "container":
            assert world.model(td) is td
        else:
            out = world.model(x=given["x"]) if form == "keyword" else world.model(given["x"])
            found = [out] if isinstance(out, Tensor) else list(out)
            td.update(dict(zip(world.model.out_keys, found, strict=True)))
    assert torch.equal(torch.rand(1), follows), "the global generator stands elsewhere"
    for name, value in want.items():
        got = td[keyed(name)]
        torch.testing.assert_close(got, value, equal_nan=True)
        assert got.requires_grad == value.requires_grad
    check_dist(world, td, want)


def check_dist(world: World, td: TensorDict, want: Values) -> None:
    """Compare the distributions of a container that holds parameters and values."""
    for step in world.steps:
        dist = step.build(want)
        torch.testing.assert_close(step.module.get_dist(td).mean, dist.mean, equal_nan=True)
        found = step.module.log_prob(td)
        torch.testing.assert_close(found, log_prob(dist, want[step.writes]), equal_nan=True)


def test_sequences_draw_and_estimate_as_by_hand(seeds: Seeds) -> None:
    for seed in seeds(15):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        world = a_world(rng)
        for _ in range(rng.randint(3, 8)):
            compare(world, rng)
            change(rng, world)
            seeds.count("calls")
