"""Random chains of probabilistic steps, and the keyed modules that are made of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import torch
from tests.fuzz.chains import Chain, Draw, suffixed
from tests.fuzz.laws import LAWS, Law
from tests.fuzz.plain_models import DISCARD, Graph, Key, Leaf
from tests.fuzz.plan_events import key
from torch import Tensor, nn

from kd_nn import TensorDictModule, TensorDictSequential
from kd_probabilistic import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)

GIVEN: list[Key] = [("a",), ("n", "a"), ("n", "b")]
VALUES: list[Key] = [("u",), ("v",), ("n", "w"), ("m", "k", "z"), ("a",)]
KINDS = ["random", "random", "mean", "mode", "median", "deterministic"]


class Mix(nn.Module):
    """Computes each parameter of distributions from what it reads."""

    def __init__(self, names: list[tuple[Law, str]], scale: float) -> None:
        super().__init__()
        self.names = names
        self.weight = nn.Parameter(torch.full((2,), scale))

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Add up what is read, and make it what each parameter must be."""
        total = sum((v * (i + 1) for i, v in enumerate(values)), torch.zeros(())) * self.weight
        total = total.tanh()
        made = tuple(law.params[name](total) + 0.01 * i for i, (law, name) in enumerate(self.names))
        return made if len(made) > 1 else made[0]


class Plain(nn.Module):
    """Adds up what it reads."""

    def forward(self, *values: Tensor) -> Tensor:
        """Add up."""
        return sum((v * (i + 2) for i, v in enumerate(values)), torch.zeros(()))


@dataclass
class World:
    """A chain, and the keyed modules made of it."""

    chain: Chain
    nets: list[Any]
    twins: list[Any] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.twins = copy.deepcopy(self.nets)
        self.build(self.chain)

    @property
    def model(self) -> ProbabilisticTensorDictSequential:
        """Return the keyed module of the chain."""
        return cast(ProbabilisticTensorDictSequential, self.chain.model)

    def build(self, node: Leaf | Graph) -> nn.Module:
        """Make the keyed module of a node."""
        if isinstance(node, Draw):
            node.model = drawing(node)
        elif isinstance(node, Leaf):
            reads, writes = [key(k) for k in node.reads], [key(k) for k in node.writes]
            node.model = TensorDictModule(self.nets[node.net], reads, writes)
        else:
            steps = [self.build(step) for step in node.steps]
            if isinstance(node, Chain) and node.probabilistic:
                node.model = ProbabilisticTensorDictSequential(
                    *steps, return_composite=node.composite, partial_tolerant=node.tolerant
                )
                for step, module in zip(node.steps, node.model._kd_named_steps(), strict=True):
                    step.model = module[1]
            else:
                node.model = TensorDictSequential(*steps, partial_tolerant=node.tolerant)
        if node.selected is not None:
            cast(Any, node.model).select_out_keys(*[key(k) for k in node.selected])
        return cast(nn.Module, node.model)


def drawing(draw: Draw) -> ProbabilisticTensorDictModule:
    """Make the keyed module of a probabilistic step."""
    options: dict[str, Any] = {}
    generator: Any = draw.seed if draw.source is None else key(draw.source)
    if draw.several:
        in_keys: Any = {"params": key(next(iter(next(iter(draw.params.values())).values()))[:1])}
        names = {k: next(iter(draw.params[k].values()))[1:-1] for k in draw.laws}
        options["distribution_class"] = CompositeDistribution
        options["distribution_kwargs"] = {
            "distribution_map": {key(names[k]): law.build for k, law in draw.laws.items()},
            "name_map": {key(names[k]): key(k) for k in draw.laws},
        }
        if len(draw.log_probs) == 1 and draw.summed:
            options["log_prob_key"] = key(draw.log_probs[0])
        else:
            options["log_prob_keys"] = [key(k) for k in draw.log_probs]
    else:
        ((at, law),) = draw.laws.items()
        in_keys = {name: key(k) for name, k in draw.params[at].items()}
        options["distribution_class"] = law.build
        if draw.log_probs != [suffixed(at)]:
            options["log_prob_key"] = key(draw.log_probs[0])
    return ProbabilisticTensorDictModule(
        in_keys,
        [key(k) for k in draw.laws],
        default_interaction_type=draw.kind,
        return_log_prob=draw.returns,
        cache_dist=draw.caches,
        num_samples=draw.samples or None,
        generator=generator,
        **options,
    )


@dataclass
class Maker:
    """Makes random chains.

    Attributes:
        known: The keys that are written so far, or given.
        nets: The modules so far.
    """

    rng: Random
    known: list[Key] = field(default_factory=lambda: [*GIVEN])
    nets: list[Any] = field(default_factory=list)
    count: int = 0

    def some_key(self) -> Key:
        """Return a key to read: mostly one that is there."""
        rng = self.rng
        return rng.choice(self.known) if rng.random() < 0.97 else rng.choice(VALUES)

    def mix(self, names: list[tuple[Law, str]], writes: list[Key]) -> Leaf:
        """Return a step that computes parameters."""
        reads = [self.some_key() for _ in range(self.rng.randint(1, 2))]
        self.nets.append(Mix(names, self.rng.choice([0.5, 1.0])))
        return Leaf(len(self.nets) - 1, reads, None, writes)

    def plain(self) -> Leaf:
        """Return a step that adds up."""
        self.nets.append(Plain())
        reads = [self.some_key() for _ in range(self.rng.randint(1, 3))]
        write = self.rng.choice([*VALUES, ("o",), ("n", "o")])
        self.known.append(write)
        return Leaf(len(self.nets) - 1, reads, None, [write])

    def draw(self) -> list[Leaf]:
        """Return a probabilistic step, mostly after one that computes its parameters."""
        rng = self.rng
        self.count += 1
        several = rng.random() < 0.25
        keys = rng.sample(VALUES, rng.randint(1, 2) if several else 1)
        if not several and rng.random() < 0.05:
            keys = [DISCARD]
        laws = {k: rng.choice(LAWS) for k in keys}
        params: dict[Key, dict[str, Key]] = {}
        for place, (k, law) in enumerate(laws.items()):
            head: Key = rng.choice([(f"p{self.count}",), ("n", f"p{self.count}"), ()])
            if several:
                head = (f"q{self.count}", *rng.choice([(f"c{place}",), ("c", f"d{place}")]))
            params[k] = {
                name: (*head, name if several or rng.random() < 0.5 else f"{name}{self.count}")
                for name in law.params
            }
        draw = Draw(-1, [], None, [], laws=laws, params=params, several=several)
        self.settings(draw, keys)
        draw.settle()
        if rng.random() < 0.05 and DISCARD not in keys:
            draw.selected = rng.sample(draw.writes, rng.randint(1, len(draw.writes)))
        names = [(laws[k], name) for k, held in params.items() for name in held]
        writes = [at for held in params.values() for at in held.values()]
        made: list[Leaf] = [] if rng.random() < 0.03 else [self.mix(names, writes)]
        self.known += [k for k in keys if k != DISCARD]
        if not several:
            self.known += [at for at in writes if rng.random() < 0.3]
        if draw.returns and rng.random() < 0.2:
            self.known.append(draw.log_probs[0])
        return [*made, draw]

    def settings(self, draw: Draw, keys: list[Key]) -> None:
        """Choose the settings of a probabilistic step."""
        rng = self.rng
        draw.returns = rng.random() < 0.6
        draw.kind = rng.choice(
            [k for k in KINDS if all(able(law, k) for law in draw.laws.values())]
        )
        draw.log_probs = [suffixed(k) for k in keys]
        if rng.random() < 0.4:
            draw.log_probs = [rng.choice([(f"lp{i}",), ("n", f"lp{i}")]) for i in range(len(keys))]
        if draw.several and rng.random() < 0.5:
            draw.summed, draw.log_probs = True, [rng.choice([("lp",), ("sum", "lp")])]
        draw.seed = rng.choice([None, None, rng.randrange(99)])
        draw.source = ("seed",) if rng.random() < 0.15 else None
        draw.caches = rng.random() < 0.3

    def chain(self, depth: int = 1, probabilistic: bool = True) -> Chain:
        """Return a chain of steps, some of them chains."""
        rng = self.rng
        steps: list[Leaf | Graph] = []
        for _ in range(rng.randint(1, 3)):
            if depth and rng.random() < 0.3:
                steps.append(self.chain(depth - 1, rng.random() < 0.7))
            elif rng.random() < 0.3:
                steps.append(self.plain())
            else:
                steps += self.draw()
        if probabilistic and not any(
            isinstance(s, Draw) or (isinstance(s, Chain) and s.probabilistic) for s in steps
        ):
            steps += self.draw()
        made = Chain(steps, tolerant=rng.random() < 0.2, probabilistic=probabilistic)
        made.composite = rng.choice([None, None, None, True, False]) if probabilistic else None
        made.settle()
        if rng.random() < (0.25 if depth else 0.15):
            visible = made.visible()
            made.selected = rng.sample(visible, rng.randint(1, len(visible)))
        return made


def able(law: Law, kind: str) -> bool:
    """Return whether a law has an estimate."""
    return kind == "random" or kind in law.estimates


def a_world(rng: Random) -> World:
    """Return a random chain with its module."""
    maker = Maker(rng)
    chain = maker.chain()
    return World(chain, maker.nets)


def inputs(batch: tuple[int, ...], grad: bool) -> dict[Key, Tensor]:
    """Return what is given to a chain."""
    return {k: torch.randn(*batch, 2, requires_grad=grad) for k in GIVEN}
