"""In which order a container gets what a sequence writes: that of the first write of each key."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import Tensor

from kd_core import InvalidArgument, NestedKey, TensorDict, TensorDictBase, lazy_stack
from kd_nn import TensorDictModule, TensorDictModuleWrapper, TensorDictSequential
from kd_nn.fx import symbolic_trace

Path = tuple[str, ...]
State = dict[str, object]
PATHS: list[Path] = [("a",), ("b",), ("c",), ("n", "a"), ("n", "b"), ("m", "a"), ("m", "k", "a")]
DISCARDED: Path = ("_",)

pytestmark = pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")


def key_of(path: Path) -> NestedKey:
    return path[0] if len(path) == 1 else path


def total(*values: Tensor) -> Tensor:
    return sum((k + 1) * value for k, value in enumerate(values)) * 0.5 + 0.125  # type: ignore[return-value]  # never 0


def both(*values: Tensor) -> tuple[Tensor, Tensor]:
    return total(*values), total(*values) - 2


@dataclass
class Step:
    reads: list[Path]
    writes: list[Path]

    def build(self) -> TensorDictModule:
        function = total if len(self.writes) == 1 else both
        return TensorDictModule(
            function, list(map(key_of, self.reads)), list(map(key_of, self.writes))
        )

    def run(self, state: State) -> None:
        for path in self.writes:
            if path != DISCARDED:
                put(state, path)


@dataclass
class Steps:
    """A sequence; `selected` is None where all is visible."""

    steps: "list[Step | Steps]"
    selected: list[Path] | None
    wrapped: bool

    def written(self) -> list[Path]:
        found = [p for s in self.steps for p in (s.writes if isinstance(s, Step) else s.visible())]
        return [path for path in dict.fromkeys(found) if path != DISCARDED]

    def visible(self) -> list[Path]:
        return self.written() if self.selected is None else self.selected

    def build(self, **settings: object) -> TensorDictSequential:
        steps = [
            TensorDictModuleWrapper(step.build())
            if isinstance(step, Steps) and step.wrapped
            else step.build()
            for step in self.steps
        ]
        made = TensorDictSequential(*steps, **settings)  # type: ignore[arg-type]  # of many types
        if self.selected is not None:
            made.select_out_keys(*map(key_of, self.selected))
        return made

    def run(self, state: State) -> None:
        """Do to the keys of nested dicts what the rule says."""
        inside = copy.deepcopy(state)
        for step in self.steps:
            step.run(inside)
        for path in paths_of(inside):
            if path in self.visible():
                put(state, path)


def put(state: State, path: Path) -> None:
    for part in path[:-1]:
        state = cast(State, state.setdefault(part, {}))
    state[path[-1]] = None


def paths_of(state: State, head: Path = ()) -> Iterator[Path]:
    for name, below in state.items():
        if isinstance(below, dict):
            yield from paths_of(below, (*head, name))
        else:
            yield (*head, name)


def leaves_of(td: TensorDictBase) -> list[Path]:
    keys = td.keys(include_nested=True, leaves_only=True)
    return [(key,) if isinstance(key, str) else cast(Path, key) for key in keys]


def drawn(rng: random.Random, depth: int = 0) -> Steps:
    steps: list[Step | Steps] = []
    for _ in range(rng.randint(1, 6 - 2 * depth)):
        if depth < 2 and rng.random() < 0.3:
            steps.append(drawn(rng, depth + 1))
            continue
        reads = rng.sample([*PATHS, ("x",), ("n", "x")], rng.randint(1, 2))
        writes = rng.sample(PATHS, rng.randint(1, 2))
        if len(writes) == 2 and rng.random() < 0.2:
            writes[rng.randrange(2)] = DISCARDED
        steps.append(Step(reads, writes))
    made = Steps(steps, None, wrapped=depth > 0 and rng.random() < 0.2)
    if rng.random() < 0.4:
        written = made.written()
        made.selected = rng.sample(written, rng.randint(1, len(written)))
    return made


class Case:
    """A drawn sequence, what it reads, and what the rule says of the containers after a call."""

    def __init__(self, seed: int) -> None:
        self.steps = drawn(random.Random(seed))
        keys = self.steps.build().in_keys
        self.given = {key: torch.full((2,), k / 3) for k, key in enumerate(keys)}
        before: State = {}
        for key in keys:
            put(before, (key,) if isinstance(key, str) else cast(Path, key))
        after = copy.deepcopy(before)
        self.steps.run(after)
        self.in_place = list(paths_of(after))
        inside = copy.deepcopy(before)
        for step in self.steps.steps:
            step.run(inside)
        visible, given = self.steps.visible(), list(paths_of(before))
        heads = {path[0] for path in visible}  # nested containers are taken whole
        self.fresh = [
            path
            for path in paths_of(inside)
            if path in visible or (path[0] in heads and path in given)
        ]

    def container(self) -> TensorDict:
        td = TensorDict({}, [2])
        for key, value in self.given.items():
            td[key] = value
        return td

    def compare(self, model: Callable[..., object], expected: list[Path]) -> None:
        for _ in range(3):  # the first call is interpreted, later ones run a plan
            assert leaves_of(cast(TensorDictBase, model(self.container()))) == expected


def watch(*_: object) -> None:
    """See each call, so that all of them are interpreted."""


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_random_sequences_write_in_the_order_of_first_writes(first: int) -> None:
    for seed in range(first, first + 20):
        case = Case(seed)
        for tolerant in (False, True):
            model = case.steps.build(partial_tolerant=tolerant)
            case.compare(model, case.in_place)
            case.compare(lambda td, run=model: run(td, tensordict_out=TensorDict()), case.fresh)
            for inplace in (False, "empty"):
                other = case.steps.build(partial_tolerant=tolerant, inplace=inplace)
                case.compare(other, case.fresh)
                other[0].register_forward_hook(watch)
                case.compare(other, case.fresh)
            model[-1].register_forward_hook(watch)
            case.compare(model, case.in_place)
        stack = lazy_stack([case.container()[k] for k in range(2)])
        assert leaves_of(model(stack)[0]) == case.in_place


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_random_sequences_return_values_in_the_order_of_out_keys(first: int) -> None:
    for seed in range(first, first + 20):
        case = Case(seed)
        model = case.steps.build()
        written = model(case.container())
        for _ in range(3):
            values = model(*case.given.values())
            values = values if isinstance(values, tuple) else (values,)
            keys = [key for key in model.out_keys if key != "_"]
            for key, value in zip(keys, values, strict=True):
                torch.testing.assert_close(written[key], value)


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_traced_sequences_write_in_the_order_of_first_writes(first: int) -> None:
    count = 0
    for seed in range(first, first + 20):
        case = Case(seed)
        try:
            in_place = symbolic_trace(case.steps.build())
        except InvalidArgument:  # it has no program
            continue
        count += 1
        case.compare(in_place, case.in_place)
        traced = symbolic_trace(case.steps.build(inplace=False))
        case.compare(traced, case.fresh)
        case.compare(TensorDictSequential(traced, inplace=False), case.fresh)
    assert count > 5


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_compiled_sequences_write_in_the_order_of_first_writes(seed: int) -> None:
    case = Case(seed)
    for settings, expected in (({}, case.in_place), ({"inplace": False}, case.fresh)):
        torch.compiler.reset()
        model = case.steps.build(**settings)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert leaves_of(compiled(case.container())) == expected


def test_a_key_that_two_steps_write_stays_in_the_place_of_the_first() -> None:
    model = TensorDictSequential(
        TensorDictModule(both, ["x"], ["a", "b"]),
        TensorDictModule(total, ["b"], ["c"]),
        TensorDictModule(total, ["c"], ["a"]),
    )
    assert model.out_keys == ["b", "c", "a"]
    for _ in range(3):
        td = TensorDict({"x": torch.ones(1)}, [1])
        assert list(model(td).keys()) == ["x", "a", "b", "c"]
        returned = torch.cat([*model(x=torch.ones(1))])
        torch.testing.assert_close(returned, torch.cat([td[key] for key in ("b", "c", "a")]))


def test_selected_outputs_of_one_module_are_stored_as_they_are_made() -> None:
    module = TensorDictModule(both, ["x"], ["a", "b"]).select_out_keys("b", "a")
    for _ in range(3):
        assert list(module(TensorDict({"x": torch.ones(1)}, [1])).keys()) == ["x", "a", "b"]
        second, first = module(x=torch.ones(1))
        assert second == first - 2
