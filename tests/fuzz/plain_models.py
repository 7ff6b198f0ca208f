"""Models of named steps as plain data, run on nested dicts: what the plans are compared with.

Nothing here knows kd: a step calls a module on values that it looks up, and stores what comes back.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

Key: TypeAlias = tuple[str, ...]
State: TypeAlias = dict[str, object]
DISCARD: Key = ("_",)


class Missing(Exception):
    """A step reads what is not there."""


class Misfit(Exception):
    """A step makes what does not fit the batch."""


@dataclass
class Leaf:
    """A step that calls one module.

    Attributes:
        net: The number of the module.
        reads: The key of each argument.
        names: The name of each argument, if they are passed by name.
        writes: The key of each output.
        selected: The outputs that are kept; None keeps all.
        bumps: How many hooks add 1 to the first visible output.
        counters: How many counting hooks are there.
        model: The keyed module made of this.
    """

    net: int
    reads: list[Key]
    names: list[str] | None
    writes: list[Key]
    selected: list[Key] | None = None
    bumps: int = 0
    counters: int = 0
    model: nn.Module | None = None

    def visible(self) -> list[Key]:
        """Return the keys that are written."""
        return [
            key
            for key in (self.writes if self.selected is None else self.selected)
            if key != DISCARD
        ]

    def in_keys(self) -> list[Key]:
        """Return the distinct keys that are read."""
        return list(dict.fromkeys(self.reads))


@dataclass
class Graph:
    """Steps in order; `tolerant` skips those whose inputs are missing."""

    steps: "list[Leaf | Graph]" = field(default_factory=list)
    tolerant: bool = False
    selected: list[Key] | None = None
    counters: int = 0
    model: nn.Module | None = None

    def written(self) -> list[Key]:
        """Return all that is written, each at its last place."""
        found: list[Key] = []
        for step in self.steps:
            keys = step.visible()
            found = [old for old in found if not any(holds(new, old) for new in keys)] + keys
        return found

    def visible(self) -> list[Key]:
        """Return what is left after a call, in order."""
        return self.written() if self.selected is None else self.selected

    def in_keys(self) -> list[Key]:
        """Return what is read and not written before."""
        found: list[Key] = []
        written: list[Key] = []
        for step in self.steps:
            found += [
                k for k in step.in_keys() if not any(holds(w, k) or holds(k, w) for w in written)
            ]
            written += step.visible()
        distinct = list(dict.fromkeys(found))
        return [k for k in distinct if not any(k != o and holds(o, k) for o in distinct)]

    def may_skip(self) -> bool:
        """Return whether a step may be left out."""
        return self.tolerant or any(isinstance(s, Graph) and s.may_skip() for s in self.steps)


def holds(outer: Key, inner: Key) -> bool:
    """Return whether a key is another one, or holds it."""
    return inner[: len(outer)] == outer


def look_up(state: State, key: Key) -> object:
    """Return the value at a key."""
    value: object = state
    for part in key:
        if not isinstance(value, dict) or part not in value:
            raise Missing(key)
        value = value[part]
    return value


def has(state: State, key: Key) -> bool:
    """Return whether there is a value at a key."""
    try:
        look_up(state, key)
    except Missing:
        return False
    return True


def put(state: State, key: Key, value: object) -> None:
    """Store a value at a key."""
    for part in key[:-1]:
        inner = state.get(part)
        if not isinstance(inner, dict):
            inner = state[part] = {}
        state = cast(State, inner)
    state[key[-1]] = value


def taken(state: State, keys: Iterable[Key]) -> State:
    """Return what another container gets that lacks these keys: nested containers are whole."""
    return {key[0]: state[key[0]] for key in keys if has(state, key)}


def copy_of(state: State) -> State:
    """Copy the dicts, not the values."""
    return {k: copy_of(v) if isinstance(v, dict) else v for k, v in state.items()}


def flat(value: object, head: Key = ()) -> dict[Key, object]:
    """Return the values of a nested dict by key."""
    if not isinstance(value, dict):
        return {head: value}
    return {k: v for name, inner in value.items() for k, v in flat(inner, (*head, name)).items()}


@dataclass
class Runner:
    """Runs a graph on a nested dict.

    Attributes:
        nets: The modules.
        batch: What the shape of each value must start with.
        seen: How many calls the counting hooks saw.
    """

    nets: list[Callable[..., object]]
    batch: tuple[int, ...]
    seen: int = 0

    def run(self, graph: Graph, state: State) -> None:
        """Run the steps, and store what is visible."""
        work = copy_of(state)
        for idx, step in enumerate(graph.steps):
            with self.scope(graph, idx):
                if graph.tolerant and self.lacks(step, work):
                    continue
                if isinstance(step, Graph):
                    self.seen += step.counters
                    self.run(step, work)
                else:
                    self.call(step, work)
        for key in [*graph.visible(), *self.carried(graph)]:
            if has(work, key):
                put(state, key, look_up(work, key))

    def scope(self, graph: Graph, idx: int) -> AbstractContextManager[None]:
        """Return what holds while a step runs."""
        return nullcontext()

    def carried(self, graph: Graph) -> list[Key]:
        """Return the keys that steps change beside those that they declare."""
        return []

    def lacks(self, step: Leaf | Graph, state: State) -> bool:
        """Return whether something is missing that a step needs."""
        return not all(has(state, key) for key in step.in_keys())

    def call(self, leaf: Leaf, state: State) -> None:
        """Call one module."""
        values = [look_up(state, key) for key in leaf.reads]
        self.seen += leaf.counters
        net = self.nets[leaf.net]
        named = leaf.names
        result = net(*values) if named is None else net(**dict(zip(named, values, strict=True)))
        outputs = list(result) if isinstance(result, tuple) else [result]
        if len(outputs) != len(leaf.writes) and set(leaf.writes) != {DISCARD}:
            raise ValueError("outputs and keys differ in number")
        made = {k: v for k, v in zip(leaf.writes, outputs, strict=False) if k in leaf.visible()}
        for value in made.values():
            for inner in flat(value).values():
                if tuple(cast(Tensor, inner).shape[: len(self.batch)]) != self.batch:
                    raise Misfit
        for key in leaf.visible():
            put(state, key, made[key])
        for key in leaf.visible()[:1] * leaf.bumps:
            bumped = look_up(state, key)
            if isinstance(bumped, Tensor):
                put(state, key, bumped + 1)


def every_leaf(graph: Graph) -> Iterator[Leaf]:
    """Yield all steps that call modules."""
    for step in graph.steps:
        if isinstance(step, Graph):
            yield from every_leaf(step)
        else:
            yield step


class Scale(nn.Module):
    """One output of any number of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        self.deeds: list[tuple[Callable[[nn.Module], None], nn.Module]] = []

    def forward(self, *values: Tensor) -> Tensor:
        """Add and scale; do first what is to be done to other modules."""
        while self.deeds:
            deed, target = self.deeds.pop()
            deed(target)
        return sum(values[1:], values[0]) * self.weight


class Named(Scale):
    """Takes its inputs by name."""

    def forward(self, *, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # other arguments
        """Subtract and scale."""
        return (x - y) * self.weight


class Two(Scale):
    """Two outputs."""

    def forward(self, *values: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # two outputs
        """Return two values."""
        one = super().forward(*values)
        return one, one.tanh()


class Tally(nn.Module):
    """Runs for its effect alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, value: Tensor) -> None:
        """Add up what is given."""
        with torch.no_grad():
            self.total.add_(value.detach().sum())  # type: ignore[operator]  # a buffer


class Shrink(nn.Module):
    """Makes what does not fit the batch."""

    def forward(self, value: Tensor) -> Tensor:
        """Add up the rows."""
        return value.sum(0)


def grow(value: Tensor) -> Tensor:
    """Undo the loss of the rows."""
    return value.expand(3, 2) + 1


def fold(value: State) -> Tensor:
    """Add up a container or a dict."""
    return cast(Tensor, value["a"]) + cast(Tensor, value["b"])


def pack(value: Tensor) -> State:
    """Return a nest of values."""
    return {"a": value, "b": value + 1}
