"""Random chains of probabilistic steps as plain data, run on nested dicts of tensors.

Each distribution is one of torch, built anew at each call. Nothing of kd is asked for a value: a
chain looks up tensors, draws or computes, adds up log-probabilities and stores what is visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import torch
from tests.fuzz.laws import Law, log_prob
from tests.fuzz.plain_models import (
    DISCARD,
    Graph,
    Key,
    Leaf,
    Misfit,
    Missing,
    Runner,
    State,
    every_leaf,
    flat,
    has,
    look_up,
    put,
)
from torch import Tensor
from torch.distributions import Distribution

Values: TypeAlias = dict[Key, Tensor]
Laws: TypeAlias = dict[Key, Distribution]


@dataclass
class Draw(Leaf):
    """A probabilistic step: a distribution of one value, or of several values.

    Attributes:
        laws: The law of each value, by the key of the value.
        params: The key of each parameter of each value, by its argument.
        log_probs: The keys of the log-probabilities; one for several values is their sum.
        several: Whether the values are those of a composite distribution.
        kind: Which value is taken outside a scope: "random", "mean", ...
        seed: The seed of its own generator.
        source: The key of the entry that holds a seed.
        summed: Whether the log-probabilities of several values are added up.
        scores: Whether it draws none, and scores those that are there if `returns` says so.
        samples: The sizes in front of its values.
    """

    laws: dict[Key, Law] = field(default_factory=dict)
    params: dict[Key, dict[str, Key]] = field(default_factory=dict)
    log_probs: list[Key] = field(default_factory=list)
    returns: bool = False
    several: bool = False
    kind: str = "random"
    seed: int | None = None
    source: Key | None = None
    scores: bool = False
    samples: tuple[int, ...] = ()
    caches: bool = False
    generator: torch.Generator | None = None
    summed: bool = False

    def visible(self) -> list[Key]:
        """Return the keys that are written: a value that is drawn at `_`, too."""
        return self.writes if self.selected is None else self.selected

    def settle(self) -> None:
        """Set what is read and written from the settings."""
        held = [key for params in self.params.values() for key in params.values()]
        if self.several:
            held = [key[:1] for key in held]
        self.reads = list(dict.fromkeys(held))
        if self.scores:
            self.reads = list(dict.fromkeys([*self.reads, *self.laws]))
            self.writes = [*self.log_probs] if self.returns else []
            return
        self.reads += [] if self.source is None else [self.source]
        self.writes = [*self.laws, *(self.log_probs if self.returns else [])]

    def dists(self, state: State) -> Laws:
        """Build the distributions of the parameters that are there."""
        found = {}
        for key, law in self.laws.items():
            given = {name: look_up(state, at) for name, at in self.params[key].items()}
            if not all(isinstance(value, Tensor) for value in given.values()):
                raise Missing(key)
            found[key] = law.make(cast("dict[str, Tensor]", given))
        return found

    def take(self, dists: Laws, state: State, asked: str | None) -> Values:
        """Draw or estimate each value."""
        kind = asked or self.kind
        if kind != "random":
            made = {key: self.laws[key].estimate(dist, kind) for key, dist in dists.items()}
            return {k: v.expand(torch.Size((*self.samples, *v.shape))) for k, v in made.items()}
        with self.drawing(state):
            size = torch.Size(self.samples)
            return {
                key: dist.rsample(size) if dist.has_rsample else dist.sample(size)
                for key, dist in dists.items()
            }

    def scored(
        self, dists: Laws, values: Values, batch: int, aggregate: bool | None = None
    ) -> Values | Tensor:
        """Return log-probabilities by key, or their sum."""
        parts = {key: log_prob(dist, values[key]) for key, dist in dists.items()}
        if not self.several:
            return {self.log_probs[0]: parts[next(iter(parts))]}
        if self.summed if aggregate is None else aggregate:
            return added(parts, dists, batch)
        keys = [suffixed(key) for key in parts] if self.summed else self.log_probs
        return dict(zip(keys, parts.values(), strict=True))

    @contextmanager
    def drawing(self, state: State) -> Iterator[None]:
        """Draw from the generator of the step."""
        if self.source is not None:
            generator = torch.Generator().manual_seed(int(cast(int, look_up(state, self.source))))
        elif self.seed is None:
            yield
            return
        else:
            if self.generator is None:
                self.generator = torch.Generator().manual_seed(self.seed)
            generator = self.generator
        before = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)
        if self.source is not None:
            self.advance(state, self.source, generator)

    def advance(self, state: State, source: Key, generator: torch.Generator) -> None:
        """Replace the seed by one that the generator draws: the next step draws other values."""
        seed = int(torch.empty((), dtype=torch.int64).random_(1 << 62, generator=generator))
        old = look_up(state, source)
        if isinstance(old, Tensor):
            put(state, source, torch.full_like(old, seed % (torch.iinfo(old.dtype).max + 1)))
        else:
            put(state, source, seed)


def suffixed(key: Key) -> Key:
    """Return where the log-probability of a value stands."""
    return (*key[:-1], f"{key[-1]}_log_prob")


def added(parts: Values, dists: Laws, batch: int) -> Tensor:
    """Add up log-probabilities, each over the dimensions that are not those of the batch."""
    total = torch.zeros(())
    for key, value in parts.items():
        for _ in range(len(dists[key].batch_shape) - batch):
            value = value.sum(-1)
        total = total + value
    return total


@dataclass
class Chain(Graph):
    """Steps in order; `probabilistic` ones offer the distribution of their last values."""

    probabilistic: bool = True
    composite: bool | None = None

    def draws(self) -> list[Draw]:
        """Return the probabilistic steps that the distribution may be about."""
        found: list[Draw] = []
        for step in self.steps:
            if isinstance(step, Chain) and step.probabilistic:
                found += step.draws()
            elif isinstance(step, Draw):
                found.append(step)
        return found

    def is_composite(self) -> bool:
        """Return whether `get_dist` is about all values."""
        if self.composite is not None:
            return self.composite
        draws = [step for step in self.steps if isinstance(step, Draw)]
        keys = [key for draw in draws for key in draw.laws]
        last = self.steps[-1]
        further = not (isinstance(last, Draw) or (isinstance(last, Chain) and last.probabilistic))
        distinct = DISCARD not in keys and len(set(keys)) == len(keys)
        return (len(draws) > 1 or further) and distinct

    def last(self) -> int:
        """Return the place of the last probabilistic step."""
        found = [
            idx
            for idx, step in enumerate(self.steps)
            if isinstance(step, Draw) or (isinstance(step, Chain) and step.probabilistic)
        ]
        return found[-1] if found else -1

    def settle(self) -> None:
        """Let the last probabilistic step score, if what it would draw is made before it."""
        if not self.probabilistic:
            return
        last = self.steps[self.last()]
        made = {key for step in self.steps[: self.last()] for key in step.visible()}
        if isinstance(last, Draw) and made.issuperset(last.laws):
            last.scores, last.selected = True, None
            last.settle()


@dataclass
class ChainRunner(Runner):
    """Runs a chain on a nested dict of tensors.

    Attributes:
        asked: Which value is taken of each distribution; None leaves it to the steps.
        skips: Whether steps are skipped whose outputs are all there.
    """

    asked: str | None = None
    skips: bool = False

    def is_done(self, step: Leaf | Graph, state: State) -> bool:
        """Return whether a step is skipped, since all that it writes is there."""
        made = [key for key in step.visible() if key != DISCARD]
        reads = step.in_keys()
        return self.skips and bool(made) and all(has(state, k) and k not in reads for k in made)

    def lacks(self, step: Leaf | Graph, state: State) -> bool:
        """Return whether something is missing: a seed counts where it is drawn from."""
        return any(not has(state, key) and self.needs(step, key) for key in step.in_keys())

    def needs(self, step: Leaf | Graph, key: Key) -> bool:
        """Return whether a step cannot do without what it reads."""
        if isinstance(step, Graph):
            return any(self.needs(each, key) for each in step.steps if key in each.in_keys())
        draws = isinstance(step, Draw) and (self.asked or step.kind) == "random"
        return draws or not isinstance(step, Draw) or key != step.source or step.scores

    def run(self, graph: Graph, state: State) -> None:
        """Run the steps, unless all is there."""
        if not self.is_done(graph, state):
            super().run(graph, state)

    @contextmanager
    def scope(self, graph: Graph, idx: int) -> Iterator[None]:
        """Take values as the last step of a chain does, before that step."""
        before = self.asked
        chain = graph if isinstance(graph, Chain) and graph.probabilistic else None
        if chain is not None and not chain.is_composite() and idx < chain.last():
            self.asked = before or chain.draws()[-1].kind
        try:
            yield
        finally:
            self.asked = before

    def carried(self, graph: Graph) -> list[Key]:
        """Return the seeds that draws replace, unless a choice of keys hides what else changes."""
        if graph.selected is not None:
            return []
        draws = [leaf for leaf in every_leaf(graph) if isinstance(leaf, Draw)]
        return [draw.source for draw in draws if draw.source is not None]

    def call(self, leaf: Leaf, state: State) -> None:
        """Run one step, unless all that it writes is there."""
        if self.is_done(leaf, state):
            return
        if not isinstance(leaf, Draw):
            super().call(leaf, state)
            return
        values = self.written(leaf, state)
        for key in leaf.visible():
            self.fits(values[key])
        for key in leaf.visible():
            put(state, key, values[key])

    def fits(self, value: object) -> None:
        """Raise unless a value has the batch."""
        for inner in flat(value).values():
            if tuple(cast(Tensor, inner).shape[: len(self.batch)]) != self.batch:
                raise Misfit

    def written(self, draw: Draw, state: State) -> Values:
        """Return all that a probabilistic step makes, by key."""
        if draw.scores and not draw.returns:
            return {}
        dists = draw.dists(state)
        if draw.scores:
            values = {key: cast(Tensor, look_up(state, key)) for key in draw.laws}
        else:
            values = draw.take(dists, state, self.asked)
        if not draw.writes[len(draw.laws) :] and not draw.scores:
            return values
        if draw.selected is not None and not set(draw.selected) & set(draw.log_probs):
            return values
        found = draw.scored(dists, values, len(self.batch) - len(draw.samples))
        if isinstance(found, Tensor):
            found = {draw.log_probs[0]: found}
        return found if draw.scores else {**values, **found}


@dataclass
class Walked:
    """A walk to the last distribution: the state, the distributions, and what was written.

    Attributes:
        keeps: Whether values that are there are not drawn again.
        all: Whether the distribution is about all values.
    """

    runner: ChainRunner
    state: State
    keeps: bool = False
    all: bool = False
    found: list[tuple[Draw, Laws]] = field(default_factory=list)
    written: list[Key] = field(default_factory=list)

    def visit(self, chain: Chain, scores: bool) -> None:
        """Run what the distribution needs, and take it."""
        if chain.is_composite():
            self.all = True
            self.every(chain, True, scores)
            return
        self.before(chain, chain.last())
        last = chain.steps[chain.last()]
        if isinstance(last, Chain):
            self.visit(last, scores)
        else:
            self.take(cast(Draw, last), False, scores)

    def parameters(self, chain: Chain) -> None:
        """Run what stands before the last step, as the last distribution takes values."""
        asked = self.runner.asked
        self.runner.asked = asked or chain.draws()[-1].kind
        end = len(chain.steps) - 1 if chain.is_composite() else chain.last()
        self.before(chain, end)
        last = chain.steps[end]
        if isinstance(last, Chain) and last.probabilistic:
            self.parameters(last)
        self.runner.asked = asked

    def before(self, chain: Chain, end: int) -> None:
        """Run the first steps."""
        for idx, step in enumerate(chain.steps[:end]):
            with self.runner.scope(chain, idx):
                if chain.tolerant and self.runner.lacks(step, self.state):
                    continue
                there = isinstance(step, Draw) and all(has(self.state, key) for key in step.laws)
                if not self.keeps or not there:
                    self.step(step)

    def every(self, chain: Chain, ends: bool, scores: bool) -> None:
        """Run all steps, and take all distributions."""
        for idx, step in enumerate(chain.steps):
            last = ends and idx == len(chain.steps) - 1
            if isinstance(step, Chain) and step.probabilistic:
                self.every(step, last, scores)
            elif isinstance(step, Draw):
                self.take(step, not last, scores)
            elif not (chain.tolerant and self.runner.lacks(step, self.state)):
                self.step(step)

    def take(self, draw: Draw, draws: bool, scores: bool) -> None:
        """Build a distribution, and draw its values if later steps need them."""
        self.found.append((draw, draw.dists(self.state)))
        lacks = [key for key in draw.laws if not has(self.state, key)]
        if lacks and scores and draws and self.all:
            raise Missing(lacks[0])
        if draws and (lacks or not self.keeps):
            self.step(draw)

    def step(self, step: Leaf | Graph) -> None:
        """Run a step."""
        if isinstance(step, Graph):
            self.runner.run(step, self.state)
        else:
            self.runner.call(step, self.state)
        self.written += [key for key in step.visible() if key != DISCARD]

    def all_laws(self) -> Laws:
        """Return the distributions of all values."""
        made: Laws = {}
        for _, dists in self.found:
            for key, dist in dists.items():
                if key == DISCARD or key in made:
                    raise Misfit
                made[key] = dist
        for dist in made.values():
            if tuple(dist.batch_shape[: len(self.runner.batch)]) != self.runner.batch:
                raise Misfit
        return made
