"""Sequences, what may happen to them, and their keys computed from scratch."""

import copy
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kd_core import KdError, NestedKey
from kd_nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
)

Both = tuple[list[NestedKey], list[NestedKey]]
KEYS: list[NestedKey] = ["a", "b", "c", "d", ("n", "a"), ("n", "b")]


class Duck(nn.Module):
    """A keyed module of somebody else: two lists, edited in place."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.in_keys = rng.sample(KEYS, 2)
        self.out_keys = rng.sample(KEYS, 1)


class Computed(TensorDictModuleBase):
    """A keyed module that computes its keys from an attribute of its class."""

    reads: ClassVar[list[NestedKey]] = ["a"]
    out_keys = ["d"]  # noqa: RUF012 - a list, as users declare it

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
        return list(self.reads)


class Own(TensorDictModule):
    """A class of the user, without keys of its own."""


class Reading(TensorDictModuleBase):
    """A class of the user that says the public keys of a sequence deep inside."""

    def __init__(self, inner: TensorDictSequential) -> None:
        super().__init__()
        self.nets = nn.ModuleList([inner])

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
        return cast(TensorDictSequential, self.nets[0]).in_keys

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
        return cast(TensorDictSequential, self.nets[0]).out_keys


class OwnSequence(TensorDictSequential):
    """A sequence of the user that reads one key more, which an attribute of its class names."""

    more: ClassVar[list[NestedKey]] = ["a"]

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
        return [*dict.fromkeys([*super().in_keys, *self.more])]


def expected(module: nn.Module) -> Both:
    """Return the keys of a module, from what it and those inside are at this moment."""
    if isinstance(module, TensorDictModuleWrapper):
        return expected(module.td_module)
    if isinstance(module, Reading):
        return expected(module.nets[0])
    if not isinstance(module, TensorDictSequential):
        return list(cast(Any, module).in_keys), list(cast(Any, module).out_keys)
    reads: list[NestedKey] = []
    writes: list[NestedKey] = []
    for step in module.module._modules.values():  # not `children`: a step may be there twice
        step_reads, step_writes = expected(step)
        reads += [key for key in step_reads if key not in writes and key not in reads]
        writes = [key for key in writes if key not in step_writes] + step_writes
    if isinstance(module, OwnSequence):
        reads += [key for key in module.more if key not in reads]
    selected = module.__dict__.get("_kd_selected")
    return reads, writes if selected is None else list(selected)


def a_leaf(rng: random.Random) -> nn.Module:
    kind = rng.randrange(10)
    if kind == 0:
        return Duck(rng)
    if kind == 1:
        return Computed()
    make = Own if kind == 2 else TensorDictModule
    reads = rng.sample(KEYS, rng.randint(1, 2))
    net: Any = rng.choice([torch.add, nn.Linear(1, 1), nn.Sequential(nn.Tanh())])
    return make(net, reads, rng.sample([*KEYS, "_"], rng.randint(1, 2)))


class World:
    """Sequences, some of which share steps."""

    def __init__(self, rng: random.Random) -> None:
        Computed.reads, OwnSequence.more = ["a"], ["a"]
        self.rng = rng
        self.roots: list[nn.Module] = []
        self.history: list[str] = []
        self.doubtful: set[nn.Module] = set()
        for _ in range(2):
            self.roots.append(self.a_sequence(2))

    def a_sequence(self, depth: int, apart_from: nn.Module | None = None) -> TensorDictSequential:
        rng = self.rng
        steps = [self.a_step(depth - 1, apart_from) for _ in range(rng.randint(1, 4))]
        kind = OwnSequence if rng.random() < 0.15 else TensorDictSequential
        named = {f"s{idx}": step for idx, step in enumerate(steps)}
        return kind(named) if rng.random() < 0.3 else kind(*steps)

    def a_step(self, depth: int, apart_from: nn.Module | None = None) -> nn.Module:
        """Return a new step or one that is there, but none that holds `apart_from`."""
        rng = self.rng
        if rng.random() < 0.25:
            known = [
                step
                for root in self.roots
                for step in root.modules()
                if hasattr(step, "in_keys") and not any(m is apart_from for m in step.modules())
            ]
            if known:
                return rng.choice(known)
        if depth and rng.random() < 0.4:
            inner = self.a_sequence(depth, apart_from)
            return Reading(inner) if rng.random() < 0.2 else inner
        step = a_leaf(rng)
        return TensorDictModuleWrapper(step) if rng.random() < 0.15 else step

    def every(self, kind: Any) -> list[Any]:
        """Return the modules of a kind, once each."""
        found = dict.fromkeys(module for root in self.roots for module in root.modules())
        return [module for module in found if isinstance(module, kind)]

    def one(self, kind: Any) -> Any:
        found = self.every(kind)
        return self.rng.choice(found) if found else None

    def holders(self) -> list[Any]:
        """Return the lists of steps."""
        return list(dict.fromkeys(model.module for model in self.every(TensorDictSequential)))

    def readable(self) -> list[Any]:
        return self.every((TensorDictSequential, TensorDictModuleWrapper, Reading))

    def doubt(self) -> None:
        """Note that a list of steps is written without an announcement."""
        self.doubtful.update(self.readable())


def rekey(world: World) -> None:
    step = world.one(TensorDictModule)
    if step and not isinstance(step, TensorDictSequential):  # its keys follow from its steps
        if world.rng.random() < 0.5:
            step.in_keys = world.rng.sample(KEYS, world.rng.randint(1, 2))
        else:
            step.out_keys = world.rng.sample(KEYS, world.rng.randint(1, 2))


def select(world: World) -> None:
    module = world.one(TensorDictModuleBase)
    known = [key for key in expected(module)[1] if key != "_"]
    try:
        if known and world.rng.random() < 0.7:
            module.select_out_keys(*world.rng.sample(known, 1))
        else:
            module.reset_out_keys()
    except (KdError, AttributeError):
        """The selection inside is void, or a foreign step has no such method."""


def edit_foreign(world: World) -> None:
    if duck := world.one(Duck):
        keys = world.rng.choice([duck.in_keys, duck.out_keys])
        new = world.rng.choice(KEYS)
        kind = world.rng.randrange(4)
        if kind == 0:
            duck.in_keys = [new]
        elif kind == 1 and len(keys) > 1:
            keys.pop()
        elif new not in keys and kind == 2:
            keys[0] = new
        elif new not in keys:
            keys.append(new)


def compute_others(world: World) -> None:
    kind = world.rng.choice([Computed, OwnSequence])
    setattr(kind, "reads" if kind is Computed else "more", [world.rng.choice(KEYS)])


def rewrap(world: World) -> None:
    if wrapper := world.one(TensorDictModuleWrapper):
        wrapper.td_module = world.a_step(1, wrapper)


def call_editors(world: World) -> None:
    """Edit by the methods of a sequence."""
    rng, model = world.rng, world.one(TensorDictSequential)
    model.reset_out_keys()
    step, kind = world.a_step(1, model.module), rng.randrange(6)
    if kind == 0:
        model.append(step)
    elif kind == 1:
        model.insert(rng.randint(0, len(model)), step)
    elif kind == 2:
        model.extend([step, a_leaf(rng)])
    elif len(model) == 0:
        return
    elif kind == 3:
        model[rng.randrange(len(model))] = step
    elif kind == 4:
        model.pop(rng.randrange(len(model)))
    else:
        del model[rng.randrange(len(model)) :]


def edit_holder(world: World) -> None:
    """Edit the list of torch that holds the steps."""
    rng, model = world.rng, world.one(TensorDictSequential)
    step, holder = world.a_step(1, model.module), model.module
    names = list(holder._modules)
    name = rng.choice([*names, f"m{rng.randrange(99)}"])
    edits: list[Callable[[], object]] = [
        lambda: holder.add_module(name, step),
        lambda: holder.register_module(name, step),
        lambda: setattr(holder, name, step),
        lambda: delattr(holder, rng.choice(names)) if names else None,
    ]
    if isinstance(holder, nn.ModuleDict):
        edits += [
            lambda: holder.__setitem__(name, step),
            lambda: holder.update({name: step, "last": step}),
            lambda: holder.pop(rng.choice(names)) if names else None,
            lambda: holder.__delitem__(rng.choice(names)) if names else None,
            lambda: holder.clear() if rng.random() < 0.2 else None,
        ]
    elif names == [str(idx) for idx in range(len(names))]:
        place = rng.randint(0, len(names))
        edits += [
            lambda: holder.insert(place, step),
            lambda: holder.append(step),
            lambda: holder.extend([step, a_leaf(rng)]),
            lambda: holder.__iadd__([step]),
        ]
        if place < len(names):
            edits += [
                lambda: holder.__setitem__(place, step),
                lambda: holder.__delitem__(place),
                lambda: holder.__delitem__(slice(place, place + 2)),
                lambda: holder.pop(place),
            ]
    rng.choice(edits)()


def write_members(world: World) -> None:
    """Write `_modules` of the list, as torch does when it swaps modules."""
    world.doubt()
    rng, model = world.rng, world.one(TensorDictSequential)
    held, step = model.module._modules, world.a_step(1, model.module)
    name = rng.choice([*held, "new"])
    writes: list[Callable[[], object]] = [
        lambda: held.__setitem__(name, step),
        lambda: held.pop(name, None),
        lambda: held.__delitem__(name) if name in held else None,
        lambda: held.update({name: step}),
        lambda: held.setdefault("other", step),
        lambda: held.__ior__({name: step}),
        lambda: held.popitem() if held else None,
        lambda: held.__setitem__(name, held.pop(name, step)),
        lambda: held.clear() if rng.random() < 0.2 else None,
    ]
    rng.choice(writes)()


def replace_tables(world: World) -> None:
    """Replace the list, or an attribute of it."""
    rng, model = world.rng, world.one(TensorDictSequential)
    steps, holder, kind = list(model.module._modules.values()), model.module, rng.randrange(7)
    if kind == 0:
        holder._modules = OrderedDict((str(i), step) for i, step in enumerate(reversed(steps)))
    elif kind == 1:
        holder.__dict__ = dict(holder.__dict__)
        holder._modules = dict(reversed(holder._modules.items()))
    elif kind == 2:
        model.module = nn.ModuleList(reversed(steps))
    elif kind == 3:
        model.module = nn.ModuleDict({f"k{idx}": step for idx, step in enumerate(steps)})
    elif kind == 4:
        model.module = rng.choice([copy.copy, copy.deepcopy])(holder)
    elif kind == 5:
        holder.__class__ = type("Sharded", (type(holder),), {})  # as `fully_shard` does
    else:
        other = rng.choice(world.holders())
        if not any(inside is model for inside in other.modules()):
            model.module = other


def swap_everywhere(world: World) -> None:
    """Swap modules of one kind in all lists, as quantisation does."""
    world.doubt()
    for holder in world.holders():
        for name, child in list(holder._modules.items()):
            if type(child) is TensorDictModule and world.rng.random() < 0.3:
                holder._modules[name] = a_leaf(world.rng)


def copied(world: World) -> None:
    """Replace a sequence by a copy, or keep both."""
    rng, root = world.rng, world.rng.choice(world.roots)
    makers: list[Callable[[nn.Module], nn.Module]] = [
        copy.copy,
        copy.deepcopy,
        lambda root: cast(nn.Module, cast(Any, root)._replicate_for_data_parallel()),
    ]
    made_here = ("Parametrized", "Sharded")  # classes that no pickle can name
    if not any(type(module).__name__.startswith(made_here) for module in root.modules()):
        makers.append(lambda root: cast(nn.Module, pickle.loads(pickle.dumps(root))))
    made = rng.choice(makers)(root)
    if len(world.roots) < 4:
        world.roots.append(made)
    else:
        world.roots[world.roots.index(root)] = made


def nothing(world: World) -> None:
    """Do what changes no key."""
    root = world.rng.choice(world.roots)
    root.train(not root.training)
    root.load_state_dict(root.state_dict())
    root.apply(lambda module: None).to(torch.float64)
    for linear in world.every(nn.Linear)[:1]:
        if not hasattr(linear, "parametrizations"):
            nn.utils.parametrize.register_parametrization(linear, "bias", nn.Identity())


EDITS: list[Callable[[World], None]] = [
    *[rekey, select, edit_foreign, compute_others, rewrap, call_editors, edit_holder],
    *[write_members, write_members, replace_tables, swap_everywhere, copied, nothing],
]
