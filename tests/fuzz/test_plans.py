"""Random models and what happens to them between calls, beside plain Python on nested dicts.

A model is called cold, when its plan is made and when the plan is warm, with a container, by
keyword and by position. Then something happens: a hook, an edit, a patch, a copy. Each module has
a twin that the plain model calls, so that effects such as the statistics of batch norm are
compared too, as are gradients, what hooks saw, and the container after an error.
"""

import copy
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.plain_models import (
    DISCARD,
    Graph,
    Key,
    Leaf,
    Misfit,
    Named,
    Runner,
    Scale,
    Shrink,
    State,
    Tally,
    Two,
    copy_of,
    every_leaf,
    flat,
    fold,
    grow,
    has,
    look_up,
    needed_calls,
    pack,
    put,
)
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict
from kd_nn import TensorDictModule, TensorDictSequential

KEYS: list[Key] = [("a",), ("b",), ("c",), ("n", "a"), ("n", "b")]
ONE_TO_ONE = 9
"""So many of the modules take one value and give one."""


def nets() -> list[Any]:
    return [
        nn.Linear(2, 2),
        nn.Tanh(),
        nn.ReLU(),
        nn.BatchNorm1d(2),
        nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sigmoid()),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU()),
        torch.neg,
        Scale(),
        nn.Sequential(nn.Identity(), Scale()),
        Scale(),
        Two(),
        Named(),
        Tally(),
        Shrink(),
        grow,
        fold,
        pack,
    ]


def a_leaf(rng: random.Random) -> Leaf:
    net = rng.choice([*range(ONE_TO_ONE), *range(ONE_TO_ONE), *range(ONE_TO_ONE, 17)])
    one, other = rng.choice(KEYS), rng.choice(KEYS)
    out, second = rng.sample(KEYS, 2)
    if net == 9:
        return Leaf(net, [one, other, one], None, [out])
    if net == 10:
        return Leaf(net, [one, other], None, [out, rng.choice([second, DISCARD])])
    if net == 11:
        return Leaf(net, [one, other], ["x", "y"], [out])
    if net == 12:
        return Leaf(net, [one], None, [DISCARD])
    if net == 15:
        return Leaf(net, [("n",)], None, [out])
    if net == 16:
        return Leaf(net, [one], None, [("n",)])
    return Leaf(net, [one], None, [out])


def a_graph(rng: random.Random, depth: int) -> Graph:
    graph = Graph(tolerant=rng.random() < 0.2)
    for _ in range(rng.randint(1, 4)):
        if depth and rng.random() < 0.3:
            graph.steps.append(a_graph(rng, depth - 1))
        elif graph.steps and rng.random() < 0.1:
            graph.steps.append(rng.choice(graph.steps))
        else:
            graph.steps.append(a_leaf(rng))
    choose(rng, graph, 0.3)
    return graph


def choose(rng: random.Random, graph: Graph | Leaf, probability: float) -> None:
    """Select some of the outputs, or all."""
    graph.selected = None
    known = graph.visible()
    if known and rng.random() < probability:
        graph.selected = rng.sample(known, rng.randint(1, len(known)))


def key(path: Key) -> NestedKey:
    return path[0] if len(path) == 1 else path


@dataclass
class Hook:
    """A hook that takes note of its calls and may change what it sees."""

    log: list[str]
    name: str
    factor: float = 1.0

    def after(self, _: object, args: object, out: object) -> object:
        self.log.append(self.name)
        return out * self.factor if self.factor != 1 and isinstance(out, Tensor) else None

    def before(self, _: object, args: tuple[object, ...]) -> object:
        self.log.append(self.name)
        if self.factor == 1 or not args or not all(isinstance(arg, Tensor) for arg in args):
            return None
        return tuple(cast(Tensor, arg) * self.factor for arg in args)


@dataclass
class Bump:
    """A hook on a keyed module that adds 1 to its first visible output."""

    leaf: Leaf

    def after(self, _: object, args: object, out: TensorDict) -> None:
        for path in self.leaf.visible()[:1]:
            if isinstance(value := out[cast(str, key(path))], Tensor):
                out[key(path)] = value + 1


@dataclass
class Flip:
    """A `forward` that was patched onto one module."""

    net: nn.Module

    def __call__(self, *args: Tensor) -> Tensor:
        return -cast(Tensor, type(self.net).forward(self.net, *args))


@dataclass
class World:
    """A plain model, the keyed modules made of it, and what the hooks of both saw."""

    graph: Graph
    mine: list[Any] = field(default_factory=nets)
    twins: list[Any] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.twins = copy.deepcopy(self.mine)
        self.build(self.graph)

    def build(self, node: Leaf | Graph) -> nn.Module:
        """Return the keyed module of a node, which is made once."""
        if node.model is None and isinstance(node, Leaf):
            reads = [key(path) for path in node.reads]
            named = dict(zip(node.names, reads, strict=True)) if node.names else reads
            writes = [key(path) for path in node.writes]
            node.model = TensorDictModule(self.mine[node.net], named, writes)
            self.select(node)
        elif node.model is None:
            steps = [self.build(step) for step in cast(Graph, node).steps]
            tolerant = cast(Graph, node).tolerant
            node.model = TensorDictSequential(steps, partial_tolerant=tolerant)
            self.select(node)
        return cast(nn.Module, node.model)

    def select(self, node: Leaf | Graph) -> None:
        """Select what the node says."""
        model = cast(TensorDictModule, node.model)
        if node.selected is None:
            model.reset_out_keys()
        else:
            model.select_out_keys(*[key(path) for path in node.selected])

    def model(self) -> TensorDictSequential:
        return cast(TensorDictSequential, self.graph.model)

    def pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return each module with its twin."""
        both = zip(self.mine, self.twins, strict=True)
        return [pair for pair in both if isinstance(pair[0], nn.Module)]

    def nodes(self, node: Leaf | Graph | None = None) -> list[Leaf | Graph]:
        """Return all nodes, the root first, shared ones once."""
        node = self.graph if node is None else node
        found = [node]
        for step in node.steps if isinstance(node, Graph) else []:
            found += [n for n in self.nodes(step) if not any(n is old for old in found)]
        return found

    def graphs(self) -> list[Graph]:
        return [node for node in self.nodes() if isinstance(node, Graph)]

    def agree_again(self) -> None:
        """Drop the selections that an edit made void, inner ones first."""
        for graph in reversed(self.graphs()):
            if graph.selected is not None and not set(graph.selected) <= set(graph.written()):
                graph.selected = None
                self.select(graph)


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
        self.leaves = [list(flat(state).values()) for state in (self.given, self.state)]

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
        world = self.world
        runner = Runner(world.twins, self.batch, needed_calls(world.graph))
        runner.seen = world.graph.counters
        runner.run(world.graph, self.state)
        return runner

    def keyed(self, model: Callable[..., Any]) -> State:
        """Run the keyed model; return the given values and the results."""
        if self.form == "container":
            td = self.container = TensorDict(copy_of(self.given), [3])
            self.before = {path: (value, value.clone()) for path, value in self.content(td).items()}
            assert model(td) is td
            return {k: v for k, v in td.to_dict().items()}
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

    def unchanged(self) -> None:
        """Check that the container is as it was, to the bit."""
        now = self.content(self.container)
        assert list(now) == list(self.before)
        for path, (value, bits) in self.before.items():
            assert now[path] is value
            assert torch.equal(value, bits)


INTERNAL = (NameError, AssertionError, SyntaxError, IndexError, UnboundLocalError)


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
    if refused is None:
        got = call.keyed(model or world.model())
        compare(call, got, call.state)
        # A part that is overwritten before its container is read may be computed or not.
        if not any(leaf.reads == [("n",)] for leaf in every_leaf(world.graph)):
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
    if isinstance(refused, Misfit):
        notes = getattr(caught.value, "__notes__", ())
        assert any(note.startswith("In step") for note in notes)
    align(world)  # which steps ran before the error is left open
    return False


def align(world: World) -> None:
    """Give the twins the state of the modules."""
    for mine, twin in world.pairs():
        twin.load_state_dict(mine.state_dict())


def compare(call: Call, got: State, expected: State) -> None:
    """Compare results and gradients."""
    left, right = flat(got), flat(expected)
    assert set(left) == set(right)
    paths = sorted(right)
    agree([left[path] for path in paths], [right[path] for path in paths])
    gradients = []
    for state, given, which in ((got, call.given, 0), (expected, call.state, 1)):
        chosen = [
            v
            for p in call.world.graph.visible()
            if has(state, p)
            for v in flat(look_up(state, p)).values()
        ]
        wrt = [
            *call.leaves[which],
            *(p for pair in call.world.pairs() for p in pair[which].parameters()),
        ]
        gradients.append(grad(cast("list[Tensor]", chosen), wrt))
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


Event = Callable[[World, random.Random], None]


def a_net(world: World, rng: random.Random, kinds: Any = nn.Module) -> tuple[Any, Any] | None:
    """Return a module with its twin, or a module inside both."""
    inner = [
        both
        for pair in world.pairs()
        for both in zip(pair[0].modules(), pair[1].modules(), strict=True)
        if isinstance(both[0], kinds)
    ]
    return rng.choice(inner) if inner else None


def hook(world: World, rng: random.Random) -> None:
    pair = a_net(world, rng)
    factor, kind = rng.choice([1.0, 2.0]), rng.choice(["before", "after"])
    for net, log in zip(pair or (), (world.seen, world.expected), strict=False):
        made = Hook(log, "hook", factor)
        if kind == "before":
            net.register_forward_pre_hook(made.before)
        else:
            net.register_forward_hook(made.after)


def count(world: World, rng: random.Random) -> None:
    """Count the calls of a keyed module."""
    node = rng.choice(world.nodes())
    node.counters += 1
    made = Hook(world.seen, "counter")
    if rng.random() < 0.5:
        cast(nn.Module, node.model).register_forward_pre_hook(made.before)
    else:
        cast(nn.Module, node.model).register_forward_hook(made.after)


def bump(world: World, rng: random.Random) -> None:
    leaf = rng.choice(list(every_leaf(world.graph)))
    leaf.bumps += 1
    cast(nn.Module, leaf.model).register_forward_hook(Bump(leaf).after)


def drop_hooks(world: World, rng: random.Random) -> None:
    for node in world.nodes():
        model = cast(nn.Module, node.model)
        node.counters = 0
        if isinstance(node, Leaf):
            node.bumps = 0
        model._forward_hooks.clear()
        model._forward_pre_hooks = type(model._forward_pre_hooks)()
    for pair in world.pairs():
        for net in (inner for both in pair for inner in both.modules()):
            net._forward_hooks = type(net._forward_hooks)()
            net._forward_pre_hooks.clear()


def rekey(world: World, rng: random.Random) -> None:
    leaf = rng.choice(list(every_leaf(world.graph)))
    model = cast(TensorDictModule, leaf.model)
    if rng.random() < 0.5 and leaf.reads != [("n",)]:
        leaf.reads = [rng.choice(KEYS) for _ in leaf.reads]
        reads = [key(path) for path in leaf.reads]
        model.in_keys = dict(zip(leaf.names, reads, strict=True)) if leaf.names else reads  # type: ignore[assignment]  # a mapping too
    elif leaf.writes not in ([("n",)], [DISCARD]):
        leaf.writes, leaf.selected = rng.sample(KEYS, len(leaf.writes)), None
        model.out_keys = [key(path) for path in leaf.writes]
        call_once(world)
        world.agree_again()


def call_once(world: World) -> None:
    """Call a model whose selection may be void: whatever it says, it is no fault of its own."""
    try:
        world.model()(TensorDict(copy_of(dict.fromkeys("abc", torch.ones(3, 2))), [3]))
    except INTERNAL as error:
        raise AssertionError("an error of generated code") from error
    except Exception:
        pass
    align(world)


def reselect(world: World, rng: random.Random) -> None:
    node = rng.choice(world.nodes())
    choose(rng, node, 0.7)
    world.select(node)
    world.agree_again()


def edit_steps(world: World, rng: random.Random) -> None:
    graph = rng.choice(world.graphs())
    model = cast(TensorDictSequential, graph.model)
    graph.selected = None
    world.select(graph)
    made = a_graph(rng, 0) if rng.random() < 0.3 else a_leaf(rng)
    step, place = world.build(made), rng.randrange(len(graph.steps))
    kind = rng.choice(["append", "insert", "set", "del"])
    if kind == "append":
        model.append(step)
        graph.steps.append(made)
    elif kind == "insert":
        model.insert(place, step)
        graph.steps.insert(place, made)
    elif kind == "set":
        model[place] = step
        graph.steps[place] = made
    elif len(graph.steps) > 1:
        del model[place]
        del graph.steps[place]
    world.agree_again()


def tolerate(world: World, rng: random.Random) -> None:
    graph = rng.choice(world.graphs())
    graph.tolerant = not graph.tolerant
    cast(TensorDictSequential, graph.model).partial_tolerant = graph.tolerant


def store_elsewhere(world: World, rng: random.Random) -> None:
    leaf = rng.choice(list(every_leaf(world.graph)))
    cast(TensorDictModule, leaf.model).inplace = rng.choice([True, False, "empty"])


def swap_net(world: World, rng: random.Random) -> None:
    leaf = rng.choice(list(every_leaf(world.graph)))
    if leaf.net < ONE_TO_ONE and leaf.net != 6:
        leaf.net = rng.choice([n for n in range(ONE_TO_ONE) if n != 6])
        cast(TensorDictModule, leaf.model).module = world.mine[leaf.net]


def patch_instance(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, (nn.Linear, nn.Tanh, nn.Sequential, Scale)) or ():
        if "forward" in net.__dict__:
            del net.forward
        elif type(net) not in (Two, Named):
            net.forward = Flip(net)


def patch_class(world: World, rng: random.Random) -> None:
    """Patch a class; `patches` undoes it."""
    kind = rng.choice([nn.Linear, nn.Tanh, nn.Sequential, nn.Sigmoid, Scale])
    name = rng.choice(["forward", "__call__", "_call_impl"])
    original = getattr(kind, name)
    PATCHED.append((kind, name, kind.__dict__.get(name)))

    def patched(self: nn.Module, *args: object) -> object:
        out = original(self, *args)
        return out * 3 if isinstance(out, Tensor) else out

    setattr(kind, name, patched)


PATCHED: list[tuple[type, str, object]] = []


@contextmanager
def patches() -> Iterator[None]:
    """Undo the patches of classes at the end."""
    try:
        yield
    finally:
        while PATCHED:
            kind, name, before = PATCHED.pop()
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


def change_class(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, (nn.Tanh, nn.Sigmoid)) or ():
        net.__class__ = nn.Sigmoid if type(net) is nn.Tanh else nn.Tanh


def replace_parameter(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, (nn.Linear, nn.BatchNorm1d)) or ():
        if "weight" in net._parameters:
            net._parameters["weight"] = nn.Parameter(net.weight.detach() + 1)


def make_buffer(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, (nn.Linear, nn.BatchNorm1d, Scale)) or ():
        if "weight" in net._parameters:
            weight = net.weight.detach().clone()
            del net.weight
            net.register_buffer("weight", weight)


def parametrise(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, nn.Linear) or ():
        if "weight" in net._parameters and "forward" not in net.__dict__:
            nn.utils.parametrizations.weight_norm(net)


def reorder(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, nn.Sequential) or ():
        members = list(net._modules.values())
        for name, member in zip(list(net._modules), reversed(members), strict=True):
            net._modules[name] = member


def train(world: World, rng: random.Random) -> None:
    mode = rng.random() < 0.5
    world.model().train(mode)
    for leaf in every_leaf(world.graph):
        if isinstance(world.twins[leaf.net], nn.Module):
            world.twins[leaf.net].train(mode)


EVENTS: list[Event] = [
    *[hook, count, bump, drop_hooks, rekey, reselect, edit_steps, tolerate, store_elsewhere],
    *[swap_net, patch_instance, patch_class, change_class, replace_parameter, make_buffer],
    *[parametrise, reorder, train],
]


def copied(world: World, rng: random.Random) -> World:
    """Return the world, or a copy of it."""
    if rng.random() < 0.9:
        return world
    parametrised = any(
        hasattr(m, "parametrizations") for p in world.pairs() for m in p[0].modules()
    )
    if parametrised or rng.random() < 0.5:
        return copy.deepcopy(world)
    return cast(World, pickle.loads(pickle.dumps(world)))


def swapped(world: World, rng: random.Random) -> None:
    """Call both models with other parameters."""
    params = TensorDict.from_module(world.model()).apply(lambda x: x.detach() * 0.5)
    held = {id(p) for p in world.model().parameters()}
    twins = [
        t
        for m, t in world.pairs()
        for p, t in zip(m.parameters(), t.parameters(), strict=True)
        if id(p) in held
    ]
    with params.to_module(world.model()), torch.no_grad():
        for twin in twins:
            twin.mul_(0.5)
        check(world, rng, "container")
        for twin in twins:
            twin.mul_(2)


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
    for seed in seeds(150):
        with patches():
            run_program(seed, seeds)


def test_compiled_models_do_what_plain_python_does(seeds: Seeds) -> None:
    for seed in seeds(3):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        torch.compiler.reset()
        world = World(a_graph(rng, 1))
        compiled = torch.compile(world.model(), backend="eager")
        for form in ["container", "keyword"]:
            check(world, rng, form, compiled)


def test_keys_assigned_while_threads_call_are_used_afterwards(seeds: Seeds) -> None:
    for _ in seeds(20):
        step = TensorDictModule(torch.neg, ["a"], ["y"])
        model = TensorDictSequential(step, TensorDictModule(nn.Identity(), ["y"], ["z"]))
        td = TensorDict(a=torch.zeros(2), b=torch.ones(2))
        done = threading.Event()

        def call(model: TensorDictSequential = model, done: threading.Event = done) -> None:
            while not done.is_set():
                model(td.copy())

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(60):
            step.in_keys = ["ab"[number % 2]]
        done.set()
        for thread in threads:
            thread.join()
        for _ in range(3):
            assert model(td.copy())["z"].tolist() == [-1, -1]
