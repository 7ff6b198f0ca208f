import copy
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.plain_models import (
    Key,
    Misfit,
    Runner,
    State,
    copy_of,
    every_leaf,
    flat,
    has,
    look_up,
    put,
)
from tests.fuzz.plan_events import (
    EVENTS,
    INTERNAL,
    KEYS,
    UNSEEN_BY_DYNAMO,
    World,
    a_graph,
    align,
    patches,
)
from torch import Tensor, nn

from kd_core import TensorDict
from kd_nn import TensorDictModule, TensorDictSequential


class Call:
    """One call of both models on the same values."""

    def __init__(self, world: World, rng: random.Random, form: str) -> None:
        self.world, self.form = world, form
        self.batch = (3,) if form == "container" else ()
        paths = KEYS if form == "container" else [*world.graph.in_keys()]
        if rng.random() < (0.5 if world.graph.may_skip() else 0.05) and self.may_lack():
            paths = rng.sample(paths, rng.randint(0, len(paths)))
        self.paths = paths
        self.given, self.state = self.values(rng.randrange(1000))
        both = (self.given, self.state)
        self.leaves = [cast("list[Tensor]", list(flat(state).values())) for state in both]

    def may_lack(self) -> bool:
        """Return whether inputs may be left out."""
        return self.form == "container" or (self.form == "keyword" and self.world.graph.tolerant)

    def values(self, seed: int) -> tuple[State, State]:
        """Return the same values twice, each wanting gradients."""
        made: tuple[State, State] = ({}, {})
        for state in made:
            torch.manual_seed(seed)
            for path in self.paths:
                for inner in [("n", "a"), ("n", "b")] if path == ("n",) else [path]:
                    put(state, inner, torch.randn(3, 2).requires_grad_())
        return made

    def plainly(self) -> Runner:
        """Run the plain model on `state`."""
        return self.run(self.state)

    def run(self, state: State) -> Runner:
        """Run the plain model."""
        world = self.world
        runner = Runner(world.twins, self.batch)
        runner.seen = world.graph.counters
        runner.run(world.graph, state)
        return runner

    def keyed(self, model: Callable[..., Any]) -> State:
        """Run the keyed model; return the given values and the results."""
        if self.form == "container":
            td = self.container = TensorDict(copy_of(self.given), [3])
            self.before = {path: (value, value.clone()) for path, value in self.content(td).items()}
            assert model(td) is td
            return cast(State, td.to_dict())
        given = [look_up(self.given, path) for path in self.paths]
        if self.form == "position":
            out = model(*given)
        else:
            out = model(**{"_".join(p): v for p, v in zip(self.paths, given, strict=True)})
        visible = self.world.graph.visible()
        results = [out] if len(visible) == 1 else out
        state = copy_of(self.given)
        for path, value in zip(visible, results, strict=True):
            if value is not None:
                put(state, path, value.to_dict() if isinstance(value, TensorDict) else value)
        return state

    def content(self, td: TensorDict) -> dict[Key, Tensor]:
        return cast("dict[Key, Tensor]", flat(td.to_dict()))

    def refused_for_parts(self) -> None:
        """Check that a part of a container that is replaced later could not be computed."""
        with pytest.raises(Exception) as caught:
            self.run(copy_of(self.given))
        assert not isinstance(caught.value, AssertionError)
        if self.form == "container":
            self.unchanged()
        align(self.world)

    def unchanged(self) -> None:
        """Check that the container is as it was, to the bit."""
        now = self.content(self.container)
        assert list(now) == list(self.before)
        for path, (value, bits) in self.before.items():
            assert now[path] is value
            assert torch.equal(value, bits)


def check(world: World, rng: random.Random, form: str, model: Any = None) -> bool:
    """Call both models and compare; tell whether they accepted the values."""
    call = Call(world, rng, form)
    if form == "position" and ("n",) in call.paths:
        return True
    world.seen.clear()
    world.expected.clear()
    refused: Exception | None = None
    try:
        runner = call.plainly()
    except Exception as error:
        refused = error
    # A part that is overwritten before its container is read may be computed or not.
    exact = not any(("n",) in leaf.reads + leaf.writes for leaf in every_leaf(world.graph))
    if refused is None:
        try:
            got = call.keyed(model or world.model())
        except Exception:
            if exact:
                raise
            call.refused_for_parts()
            return False
        compare(call, got, call.state)
        if exact:
            assert sorted(world.seen) == sorted(world.expected + ["counter"] * runner.seen)
            for mine, twin in world.pairs():
                agree(list(mine.buffers()), list(twin.buffers()))
        align(world)
        return True
    with pytest.raises(Exception) as caught:
        call.keyed(model or world.model())
    assert not isinstance(caught.value, INTERNAL), caught.value
    if form == "container":
        call.unchanged()
    if isinstance(refused, Misfit) and model is None:  # compiled code says it in its own words
        notes = getattr(caught.value, "__notes__", ())
        assert any(note.startswith("In step") for note in notes)
    align(world)  # which steps ran before the error is left open
    return False


def compare(call: Call, got: State, expected: State) -> None:
    """Compare results and gradients."""
    left, right = flat(got), flat(expected)
    assert set(left) == set(right)
    paths = sorted(right)
    agree([left[path] for path in paths], [right[path] for path in paths])
    if not torch.is_grad_enabled():
        return
    gradients = []
    for which, state in enumerate((got, expected)):
        made = [path for path in call.world.graph.visible() if has(state, path)]
        trees = [flat(look_up(state, path)) for path in made]
        chosen = [cast(Tensor, tree[key]) for tree in trees for key in sorted(tree)]
        nets = (pair[which] for pair in call.world.pairs())
        wrt = [*call.leaves[which], *(param for net in nets for param in net.parameters())]
        gradients.append(grad(chosen, wrt))
    agree(*gradients)


def grad(outputs: list[Tensor], wrt: list[Tensor]) -> list[Tensor | None]:
    total = sum(((k + 1) * out * out).sum() for k, out in enumerate(outputs))
    wanted = [tensor for tensor in wrt if tensor.requires_grad]
    if not isinstance(total, Tensor) or not total.requires_grad:
        return [None for _ in wanted]
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def agree(left: list[Any], right: list[Any]) -> None:
    for mine, twin in zip(left, right, strict=True):
        assert (mine is None) == (twin is None)
        if mine is not None:
            torch.testing.assert_close(mine, twin)


def copied(world: World, rng: random.Random) -> World:
    """Return the world, or a copy of it."""
    if rng.random() < 0.9:
        return world
    inner = (module for pair in world.pairs() for module in pair[0].modules())
    parametrised = any(hasattr(module, "parametrizations") for module in inner)
    if parametrised or rng.random() < 0.5:
        return copy.deepcopy(world)
    return cast(World, pickle.loads(pickle.dumps(world)))


def halved(value: Tensor) -> Tensor:
    return value.detach() * 0.5 if value.is_floating_point() else value.detach().clone()


def swapped(world: World, rng: random.Random) -> None:
    """Call both models with other parameters and buffers."""
    params = TensorDict.from_module(world.model()).apply(halved)
    held = {id(value) for value in world.model().state_dict(keep_vars=True).values()}
    states = [[net.state_dict(keep_vars=True) for net in pair] for pair in world.pairs()]
    with params.to_module(world.model()), torch.no_grad():
        for mine, twin in states:
            for name in [name for name, value in mine.items() if id(value) in held]:
                twin[name].copy_(halved(twin[name]))
        check(world, rng, "container")
    align(world)


FORMS = ["container", "keyword", "position"]


def run_program(seed: int, seeds: Seeds) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    world = World(a_graph(rng, 2))
    for _ in range(rng.randint(1, 6)):
        for form in rng.sample(FORMS, rng.randint(1, 2)):
            for _ in range(3):
                accepted = check(world, rng, form)
                seeds.count("accepted" if accepted else "refused")
        if rng.random() < 0.2:
            swapped(world, rng)
        event = rng.choice(EVENTS)
        world.history.append(event.__name__)
        event(world, rng)
        world = copied(world, rng)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_models_do_what_plain_python_does(seeds: Seeds) -> None:
    for seed in seeds(30):
        with patches():
            run_program(seed, seeds)


def test_compiled_models_do_what_plain_python_does(seeds: Seeds) -> None:
    seen = [event for event in EVENTS if event not in UNSEEN_BY_DYNAMO]
    for seed in seeds(1):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        torch.compiler.reset()
        world = World(a_graph(rng, 2))
        compiled = torch.compile(world.model(), backend="eager")
        for _ in range(3):
            for form in ["container", "keyword"]:
                check(world, rng, form, compiled)
            rng.choice(seen)(world, rng)
            seeds.count("events")


def call_until(done: threading.Event, model: TensorDictSequential, td: TensorDict) -> None:
    while not done.is_set():
        model(td.copy())


def test_keys_assigned_while_threads_call_are_used_afterwards(seeds: Seeds) -> None:
    for _ in seeds(8):
        step = TensorDictModule(torch.neg, ["a"], ["y"])
        model = TensorDictSequential(step, TensorDictModule(nn.Identity(), ["y"], ["z"]))
        td = TensorDict(a=torch.zeros(2), b=torch.ones(2))
        done = threading.Event()

        threads = [threading.Thread(target=call_until, args=(done, model, td)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(60):
            step.in_keys = ["ab"[number % 2]]
        done.set()
        for thread in threads:
            thread.join()
        for _ in range(3):
            assert model(td.copy())["z"].tolist() == [-1, -1]
