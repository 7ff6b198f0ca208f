"""Random sequences over odd keys, beside a plain dict of values.

Keys are keywords of Python, names of generated code, text that is not a name, characters that
Python takes for each other, and members of enumerations and other subclasses of `str`. A model is
called with a container, by position and by keyword, again and again, so that its plans are used;
then outputs are selected. The reference looks up plain strings in a dict.
"""

import copy
import enum
import random
import unicodedata
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import pytest
import torch
from tests.fuzz.conftest import Seeds
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, unravel_key, unravel_key_to_tuple
from kd_nn import (
    DispatchError,
    KeyGraphWarning,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)

WORDS = """
a b class lambda self None tensordict forward module td args kwargs _x _x0 _v0 _v1 _root _td _step
_MISSING __import__ __class__ exec µ μ ﬁ fi ª Å Å 名前 é é 1x 0 a.b a-b a_b b_c x_y {x} %s \\ ' "
"""
PARTS = [*WORDS.split(), "", " ", "a b", "\n", "\t", '"""', "):", "# x", "';import os", "a\\"]

Values: TypeAlias = dict[NestedKey, Tensor]


class Loud(str):
    """Prints and represents itself as something else."""

    def __str__(self) -> str:
        return "loud"

    def __repr__(self) -> str:
        raise AssertionError("nobody may write out a key of this class")

    def __format__(self, spec: str) -> str:
        return "loud"


class Mixed(str, enum.Enum):  # noqa: UP042 - prints another text than a `StrEnum`
    """Members are strings and print as members."""


class Step:
    """A function of two values, and the keys that it reads and writes."""

    def __init__(self, reads: list[NestedKey], write: NestedKey, factor: float) -> None:
        self.reads, self.write, self.factor = reads, write, factor

    def __call__(self, /, *values: Tensor, **named: Tensor) -> Tensor:
        """Combine the values; their order matters."""
        result = torch.full((2,), self.factor)
        for value in (*values, *named.values()):
            result = 0.5 * result - value
        return result


class Draw:
    """Everything that chance decides."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def keys(self, count: int) -> list[NestedKey]:
        """Return keys of which none holds another."""
        found: list[NestedKey] = []
        while len(found) < count:
            depth = self.chance.choice([1, 1, 1, 2, 3])
            path = tuple(self.chance.choice(PARTS) for _ in range(depth))
            others = [unravel_key_to_tuple(key) for key in found]
            if path != ("_",) and not any(o[: len(path)] == path[: len(o)] for o in others):
                found.append(path[0] if depth == 1 else path)
        return found

    def dressed(self, key: NestedKey) -> NestedKey:
        """Return an equal key of another class, or nested otherwise."""
        path = tuple(self.part(part) for part in unravel_key_to_tuple(key))
        if len(path) == 1:
            return path[0] if self.chance.random() < 0.8 else path
        return path if self.chance.random() < 0.8 else (path[0], path[1:])

    def part(self, text: str) -> str:
        """Return a string of the same characters, of a class of its own now and then."""
        kind = self.chance.randrange(5)
        if kind == 0:
            return Loud(text)
        if kind < 3:
            base: Any = enum.StrEnum if kind == 1 else Mixed
            return cast(str, base("Word", {"WORD": text})["WORD"])
        return text

    def module(self, step: Step) -> TensorDictModuleBase:
        """Wrap a step, its keys by position or by odd names."""
        write = self.dressed(step.write)
        reads = [self.dressed(key) for key in step.reads]
        if self.chance.random() < 0.5:
            return TensorDictModule(step, reads, [write])
        names = self.chance.sample([part for part in PARTS if part.isascii()], len(reads))
        return TensorDictModule(step, dict(zip(map(self.part, names), reads, strict=True)), [write])

    def sequence(self, modules: Sequence[nn.Module]) -> TensorDictSequential:
        """Put modules in a row, some of them in sequences of their own, under odd names."""
        steps = list(modules)
        if len(steps) > 2 and self.chance.random() < 0.5:
            start = self.chance.randrange(len(steps) - 1)
            steps[start : start + 2] = [self.sequence(steps[start : start + 2])]
        if self.chance.random() < 0.5:
            return TensorDictSequential(*steps)
        taken = {*dir(nn.ModuleDict()), ""}
        names = [part for part in PARTS if "." not in part and part not in taken]
        named = map(self.part, self.chance.sample(names, len(steps)))
        return TensorDictSequential(dict(zip(named, steps, strict=True)))


class Program:
    """A model, and what a dict of plain keys says of it."""

    def __init__(self, draw: Draw) -> None:
        chance = draw.chance
        known = draw.keys(chance.randint(3, 8))
        self.steps = [
            Step(chance.sample(known, chance.randint(1, 2)), chance.choice(known), number + 1.0)
            for number in range(chance.randint(1, 5))
        ]
        self.inputs: list[NestedKey] = []
        self.outputs: list[NestedKey] = []
        for step in self.steps:
            self.inputs += [k for k in step.reads if k not in [*self.inputs, *self.outputs]]
            self.outputs = [k for k in self.outputs if k != step.write] + [step.write]
        self.given = {k: torch.tensor([float(n), -float(n)]) for n, k in enumerate(self.inputs)}
        self.made: Values = dict(self.given)
        for step in self.steps:
            self.made[step.write] = step(*(self.made[key] for key in step.reads))
        self.model = draw.sequence([draw.module(step) for step in self.steps])

    @property
    def names(self) -> list[str]:
        """The argument names of the inputs."""
        joined = ("_".join(unravel_key_to_tuple(key)) for key in self.inputs)
        return [unicodedata.normalize("NFKC", name) for name in joined]


def test_odd_keys_are_keys_like_any_other(seeds: Seeds) -> None:
    warnings.simplefilter("ignore", KeyGraphWarning)
    for seed in seeds(50):
        draw = Draw(seed)
        program = Program(draw)
        model = program.model
        assert [list(map(type, unravel_key_to_tuple(key))) for key in model.in_keys] == [
            [str] * len(unravel_key_to_tuple(key)) for key in program.inputs
        ]
        assert (model.in_keys, model.out_keys) == (program.inputs, program.outputs)
        pictures(model)
        for _ in range(3):
            call(program, draw, program.outputs, seeds)
        chosen = draw.chance.sample(program.outputs, draw.chance.randint(1, len(program.outputs)))
        model.select_out_keys(*map(draw.dressed, chosen))
        pictures(model)
        for _ in range(3):
            call(program, draw, chosen, seeds)
        if draw.chance.random() < 0.3:
            program.model = copy.deepcopy(model).reset_out_keys()
            call(program, draw, program.outputs, seeds)


def call(program: Program, draw: Draw, outputs: list[NestedKey], seeds: Seeds) -> None:
    """Call the model in every way and compare what comes out."""
    model, names = program.model, program.names
    wanted = [program.made[key] for key in outputs]
    td = TensorDict({}, [2])
    for key, value in program.given.items():
        td[draw.dressed(key)] = value
    assert model(td) is td
    left = {**program.given, **{key: program.made[key] for key in outputs}}
    found = {unravel_key(key): leaf for key, leaf in td.items(True, True)}
    assert found.keys() == left.keys()
    assert all(torch.equal(found[key], left[key]) for key in left)
    check(model(*program.given.values()), wanted)
    by_name = dict(zip(names, program.given.values(), strict=True))
    if len(set(names)) < len(names):
        refused(lambda: model(*[], **by_name), "cannot tell which key|misses")
    elif "self" in names:
        refused(lambda: model(**by_name), "cannot take `self` by keyword")
    else:
        check(model(**by_name), wanted)
    seeds.count("calls", 3)


def check(made: object, wanted: list[Tensor]) -> None:
    values = made if isinstance(made, tuple) else (made,)
    assert len(values) == len(wanted)
    assert all(
        isinstance(value, Tensor) and torch.equal(value, expected)
        for value, expected in zip(values, wanted, strict=True)
    )


def refused(run: Callable[[], object], message: str) -> None:
    with pytest.raises(DispatchError, match=message):
        run()


def pictures(model: TensorDictSequential) -> None:
    """Draw the key graph in every way."""
    graph = model.key_graph()
    assert graph.inputs == tuple(model.in_keys)
    ElementTree.fromstring(graph.to_svg())
    assert graph.to_mermaid().startswith("flowchart")
    assert len(repr(graph)) > 0
