"""Keyed modules beside the plain models that they are made of, and what happens to both.

Each module has a twin that the plain model calls. An event changes both alike.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tests.fuzz.plain_models import (
    DISCARD,
    Graph,
    Key,
    Leaf,
    Named,
    Scale,
    Shrink,
    Tally,
    Two,
    copy_of,
    every_leaf,
    fold,
    grow,
    pack,
)
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict
from kd_nn import TensorDictModule, TensorDictSequential

INTERNAL = (NameError, AssertionError, SyntaxError, IndexError, UnboundLocalError)
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
        return node.model

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


def align(world: World) -> None:
    """Give the twins the state of the modules."""
    for mine, twin in world.pairs():
        twin.load_state_dict(mine.state_dict())


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


def put_into_the_instance(world: World, rng: random.Random) -> None:
    """Put a tensor where torch looks first, in place of a parameter."""
    for net in a_net(world, rng, nn.Linear) or ():
        if "weight" in net._parameters:
            net.__dict__["weight"] = net.weight.detach() - 1


def read_otherwise(world: World, rng: random.Random) -> None:
    """Make a class read a parameter in another way; `patches` undoes it."""
    name = rng.choice(["bias", "__getattr__"])
    PATCHED.append((nn.Linear, name, nn.Linear.__dict__.get(name)))
    original = nn.Linear.__getattr__

    def read(net: nn.Module, name: str) -> object:
        found = original(net, name)
        return found + 1 if isinstance(found, Tensor) and name == "weight" else found

    setattr(nn.Linear, name, property(lambda net: None) if name == "bias" else read)


def meddle(world: World, rng: random.Random) -> None:
    """Let a module make an event happen to another one, in the middle of its next call."""
    pairs = [pair for pair in world.pairs() if isinstance(pair[0], Scale)]
    if not pairs:
        return
    deed, targets = rng.choice(list(DEEDS)), a_net(world, rng, (nn.Linear, nn.Tanh))
    for net, target in zip(rng.choice(pairs), targets or (), strict=False):
        cast(Any, net).deeds.append((DEEDS[deed], target))


def add_one(_: object, args: object, out: Tensor) -> Tensor:
    return out + 1


def hook_in_call(net: nn.Module) -> None:
    net.register_forward_hook(add_one)


def replace_in_call(net: nn.Module) -> None:
    if "weight" in net._parameters:
        net._parameters["weight"] = nn.Parameter(cast(Tensor, net.weight).detach() + 1)


def patch_in_call(net: nn.Module) -> None:
    if "forward" not in net.__dict__:
        setattr(net, "forward", Flip(net))  # noqa: B010 - methods are read-only to a type checker


DEEDS = {"hook": hook_in_call, "replace": replace_in_call, "patch": patch_in_call}


def change_class(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, (nn.Tanh, nn.Sigmoid)) or ():
        net.__class__ = nn.Sigmoid if type(net) is nn.Tanh else nn.Tanh


def replace_parameter(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, (nn.Linear, nn.BatchNorm1d)) or ():
        if "weight" in net._parameters:
            net._parameters["weight"] = nn.Parameter(net.weight.detach() + 1)


def make_buffer(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, (nn.Linear, nn.BatchNorm1d, Scale)) or ():
        # torch refuses a buffer beside an attribute that the instance itself holds.
        if "weight" in net._parameters and "weight" not in net.__dict__:
            weight = net.weight.detach().clone()
            del net.weight
            net.register_buffer("weight", weight)


def parametrise(world: World, rng: random.Random) -> None:
    for net in a_net(world, rng, nn.Linear) or ():
        plain = "__getattr__" not in nn.Linear.__dict__ and "weight" not in net.__dict__
        if plain and "weight" in net._parameters and "forward" not in net.__dict__:
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
    *[hook, count, bump, drop_hooks, rekey, reselect, edit_steps, tolerate],
    *[swap_net, patch_instance, patch_class, change_class, replace_parameter, make_buffer],
    *[parametrise, reorder, train, put_into_the_instance, read_otherwise, meddle],
]

UNSEEN_BY_DYNAMO: list[Event] = [
    *[hook, count, bump, drop_hooks, patch_class, read_otherwise, meddle, put_into_the_instance]
]
"""Code that is compiled asks neither for hooks that are added later nor for patches of a class."""
