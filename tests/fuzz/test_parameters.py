"""Random modules that run with other parameters, beside plain loops and `functional_call`.

A module is a random tree with parts that are shared, tied, frozen, without values, recurrent,
normalising and parametrised. Its parameters and buffers are changed and moved as users do, and it
runs with random parts of other states, in blocks inside blocks, that may fail. The reference walks
over the entries by `getattr` and knows nothing of what an earlier block found.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import pytest
import torch
from tests.fuzz.conftest import Seeds
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from kd_core import KeyNotFound, TensorDict, TensorDictBase, unravel_key_to_tuple
from kd_nn import (
    EnsembleModule,
    TensorDictModule,
    TensorDictParams,
    make_functional,
    repopulate_module,
)

Slot: TypeAlias = tuple[int, str]
"""A dict of a module by its id, and a name there."""


class Scaled(nn.Module):
    """Has a weight, a buffer that is not saved, and a buffer without a value."""

    rest: Tensor | None
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))
        self.register_buffer("shift", torch.rand(3), persistent=False)
        self.register_buffer("rest", None)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.scale + self.get_buffer("shift")
        out = out if self.rest is None else out + self.rest
        return out if self.bias is None else out + self.bias


class Recurrent(nn.Module):
    """Runs a recurrent layer over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x)[0]
        return out


MAKERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(3, 3),
    lambda: nn.Linear(3, 3, bias=False),
    lambda: nn.LayerNorm(3),
    lambda: nn.BatchNorm1d(3),
    lambda: nn.Tanh(),
    lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    Scaled,
    Recurrent,
]


def a_module(rng: random.Random, depth: int = 2) -> nn.Module:
    """Build a random tree; some of its parts stand in two places."""
    if not depth:
        return rng.choice(MAKERS)()
    parts = [a_module(rng, rng.randrange(depth)) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        parts.append(rng.choice(parts))
    module: nn.Module = nn.Sequential(*parts)
    return TensorDictModule(module, ["x"], ["y"]) if rng.random() < 0.1 else module


def run(module: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    out: Tensor = module(x)
    return out


def stores(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Tensor | None]]]:
    for member in module.modules():
        yield member, member._parameters  # type: ignore[misc]  # torch types it so
        yield member, member._buffers


def held(module: nn.Module) -> dict[Slot, Tensor | None]:
    """Return what each slot of a module holds."""
    return {(id(s), name): value for _, s in stores(module) for name, value in s.items()}


def installed(now: Tensor | None, entry: Tensor | None) -> bool:
    """Return whether a slot holds an entry; one without gradients is in a parameter of its own."""
    if now is entry or now is None or entry is None:
        return now is entry
    same = now.data_ptr() == entry.data_ptr() and now.shape == entry.shape
    return isinstance(now, nn.Parameter) and not entry.requires_grad and same


def paths(td: TensorDictBase) -> list[tuple[str, ...]]:
    found = td.keys(include_nested=True, leaves_only=True)
    return [unravel_key_to_tuple(key) for key in found]


def store_of(module: nn.Module, path: tuple[str, ...]) -> dict[str, Tensor | None]:
    owner = module.get_submodule(".".join(path[:-1]))
    if path[-1] in owner._parameters:
        return owner._parameters  # type: ignore[return-value]  # torch types it so
    return owner._buffers


def position(module: nn.Module) -> Callable[[tuple[str, ...]], tuple[int, ...]]:
    """Return a function that says where the module has a name."""

    def place(path: tuple[str, ...]) -> tuple[int, ...]:
        found, member = [], module
        for name in path:
            found.append([*member._parameters, *member._buffers, *member._modules].index(name))
            member = member._modules.get(name) or member
        return tuple(found)

    return place


def expected(module: nn.Module, td: TensorDict) -> dict[Slot, Tensor | None]:
    """Return what each slot holds while the module runs with these entries."""
    now = held(module)
    after, first = dict(now), dict[int, Tensor]()
    done = set[Slot]()
    for path in sorted(paths(td), key=position(module)):
        store, entry = store_of(module, path), td[path]
        slot = (id(store), path[-1])
        if slot in done:
            continue
        done.add(slot)
        tensor = now[slot]
        after[slot] = entry if tensor is None else first.setdefault(id(tensor), entry)
    return after


def another(rng: random.Random, module: nn.Module) -> TensorDict:
    """Build other values for a random part of the slots of a module."""
    whole = TensorDict.from_module(module)
    share = rng.choice([0.3, 1.0, 1.0])
    keys = [path for path in paths(whole) if rng.random() < share]
    made: dict[int, Tensor] = {}
    td = TensorDict({})
    keeps = rng.random() < 0.5
    for path in keys:
        leaf = whole[path]
        new = leaf.detach() + (torch.rand(leaf.shape) if leaf.is_floating_point() else 1)
        if leaf.requires_grad and rng.random() < 0.8:
            new.requires_grad_()
        # Names that share a tensor may get one, or one each.
        td.set(path, made.setdefault(id(leaf), new) if keeps else new)
    order = rng.sample(keys, len(keys)) if rng.random() < 0.3 else keys
    return TensorDict({path: td[path] for path in order}) if keys else td


def check_blocks(rng: random.Random, seeds: Seeds, module: nn.Module, depth: int) -> None:
    """Run a module with other values, in blocks inside blocks, beside `functional_call`."""
    target = module
    if depth < 2 and rng.random() < 0.4:
        target = rng.choice([m for m in module.modules() if not isinstance(m, nn.GRU)])
    td = another(rng, target)
    before, want = held(module), {**held(module), **expected(target, td)}
    fails = rng.random() < 0.2

    class Stop(Exception):
        pass

    seeds.count("blocks")
    try:
        with td.to_module(target):
            now = held(module)
            assert now.keys() == want.keys()
            assert all(installed(now[slot], want[slot]) for slot in want)
            check_values(module)
            if depth:
                check_blocks(rng, seeds, module, depth - 1)
            now = held(module)
            assert all(installed(now[slot], want[slot]) for slot in want)
            if fails:
                raise Stop
    except Stop:
        assert fails
    after = held(module)
    assert all(after[slot] is before[slot] for slot in before)
    refuse(rng, target)


def check_values(module: nn.Module) -> None:
    """Compare values and gradients with a copy that has the same values for good."""
    x = torch.randn(4, 3)
    slots = [(s, name, value) for _, s in stores(module) for name, value in s.items()]
    tensors: list[Tensor] = [value for *_, value in slots if value is not None]
    other, own = copy.deepcopy((module, tensors))
    rebuild(other)
    wanted = [t for t in tensors if t.requires_grad]
    want, got = run(other, x), run(module, x)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if want.requires_grad:
        theirs = [t for t in own if t.requires_grad]
        mine = torch.autograd.grad(got.sum(), wanted, allow_unused=True)
        others = torch.autograd.grad(want.sum(), theirs, allow_unused=True)
        for one, two in zip(mine, others, strict=True):
            assert (one is None) == (two is None)
            if one is not None:
                torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    for mine_, theirs_ in zip(tensors, own, strict=True):
        assert torch.equal(mine_, theirs_)


def refuse(rng: random.Random, module: nn.Module) -> None:
    """Check that an entry without a place is refused, and nothing is changed."""
    before = held(module)
    td = another(rng, module)
    where = rng.choice([(), *paths(td)])[:-1]
    wrong = TensorDict({path: td[path] for path in paths(td)})
    wrong.set((*where, "nowhere"), torch.ones(1))
    with pytest.raises(KeyNotFound, match="nowhere"), wrong.to_module(module):
        pass
    assert all(tensor is before[slot] for slot, tensor in held(module).items())


def tie(rng: random.Random, module: nn.Module) -> None:
    """Let two slots of one shape share a tensor, or no longer."""
    slots = [(m, name, p) for m in module.modules() for name, p in m._parameters.items()]
    some = [slot for slot in slots if slot[2] is not None]
    if not some:
        return
    owner, name, one = rng.choice(some)
    assert one is not None
    fitting = [p for *_, p in some if p is not None and p.shape == one.shape]
    new = nn.Parameter(one.detach().clone()) if rng.random() < 0.5 else rng.choice(fitting)
    setattr(owner, name, new)


def replace(rng: random.Random, module: nn.Module) -> None:
    """Exchange a part of the tree: a new one, one from elsewhere, or none."""
    owners = [m for m in module.modules() if isinstance(m, nn.Sequential) and len(m)]
    if not owners:
        return
    owner = rng.choice(owners)
    inside = {id(m) for m in owner.modules()}
    elsewhere = [m for m in module.modules() if id(m) not in inside and not list(m.children())]
    leaves = [m for m in elsewhere if type(m) in (nn.Linear, nn.LayerNorm, nn.BatchNorm1d, Scaled)]
    new = rng.choice(leaves) if leaves and rng.random() < 0.5 else rng.choice(MAKERS)()
    owner[rng.randrange(len(owner))] = new


def fill(rng: random.Random, module: nn.Module) -> None:
    """Give slots without a value one, or take it away."""
    for member in module.modules():
        if isinstance(member, Scaled):
            member.rest = torch.rand(3) if rng.random() < 0.5 else None
            member.bias = nn.Parameter(torch.rand(3)) if rng.random() < 0.5 else None


def turn_into_buffer(rng: random.Random, module: nn.Module) -> None:
    """Turn a parameter into a buffer, or back."""
    for member in module.modules():
        if isinstance(member, Scaled) and rng.random() < 0.5:
            value = member.scale.detach().clone()
            del member.scale
            if rng.random() < 0.5:
                member.register_buffer("scale", value)
            else:
                member.scale = nn.Parameter(value)


def make_plain_again(rng: random.Random, module: nn.Module) -> None:
    """Take the parameters away from a module and give them back."""
    before = held(module)
    params = make_functional(module)
    if any(True for _ in params.keys(True, True)):
        with params.to_module(module):
            now = held(module)
            assert all(now[slot] is before[slot] for slot in before)
    repopulate_module(module, params)
    for member in module.modules():
        member.__dict__.pop("forward", None)
    after = held(module)
    assert all(after[slot] is before[slot] for slot in before)


def load(rng: random.Random, module: nn.Module) -> None:
    """Load another state, into the tensors or in their place."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=rng.random() < 0.5)


def convert(rng: random.Random, module: nn.Module) -> None:
    """Convert to another dtype and back, freeze parts, change the mode."""
    module.double().float()
    for parameter in module.parameters():
        parameter.requires_grad_(rng.random() < 0.8)
    module.train(rng.random() < 0.5)


EVENTS: list[Callable[[random.Random, nn.Module], None]] = [
    tie,
    tie,
    replace,
    fill,
    turn_into_buffer,
    make_plain_again,
    load,
    convert,
]


def test_modules_run_with_other_values(seeds: Seeds) -> None:
    for seed in seeds(25):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        module = a_module(rng)
        for _ in range(rng.randint(2, 5)):
            rng.choice(EVENTS)(rng, module)
            check_blocks(rng, seeds, module, rng.choice([0, 0, 1, 2]))


def train(module: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
    """Take three steps along the gradient."""
    optimizer = torch.optim.SGD([torch.zeros(1), *module.parameters()], lr=0.05, momentum=0.5)
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        out = call(torch.randn(4, 3))
        if out.requires_grad:
            torch.autograd.backward((out.tanh() ** 2).sum())
            optimizer.step()


def test_parameters_train_as_their_module_does(seeds: Seeds) -> None:
    for seed in seeds(8):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        module = a_module(rng)
        for _ in range(rng.randint(0, 3)):
            rng.choice(EVENTS)(rng, module)
        template, x = copy.deepcopy(module), torch.randn(4, 3)
        if rng.random() < 0.5:
            params = TensorDictParams.of_module(copy.deepcopy(module))
            assert len(list(params.parameters())) == len(list(module.parameters()))
        else:  # names that share a tensor get one each, of which the first counts
            split = TensorDict.from_module(module).apply(own)
            params = TensorDictParams(split, no_convert=True)
        if rng.random() < 0.5:
            params = copy.deepcopy(params) if rng.random() < 0.5 else copied_by_pickle(params)
        call = partial(call_with, params, template)
        train(module, module)
        train(params, call)
        torch.testing.assert_close(call(x), module(x), equal_nan=True)


def own(leaf: Tensor) -> Tensor:
    new = leaf.detach().clone()
    return nn.Parameter(new, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else new


def call_with(params: TensorDictParams, module: nn.Module, x: Tensor) -> Tensor:
    with params.to_module(module):
        out: Tensor = module(x)
    return out


def copied_by_pickle(params: TensorDictParams) -> TensorDictParams:
    made: TensorDictParams = pickle.loads(pickle.dumps(params))
    return made


def test_ensembles_run_as_their_members_do(seeds: Seeds) -> None:
    for seed in seeds(8):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        module = a_module(rng)
        for _ in range(rng.randint(0, 2)):
            rng.choice(EVENTS)(rng, module)
        ensemble = EnsembleModule(TensorDictModule(module, ["x"], ["y"]), 2).eval()
        assert len(list(ensemble.parameters())) == len(list(module.parameters()))
        x = torch.randn(4, 3)
        want = torch.stack([run(member_of(ensemble, module, number), x) for number in range(2)])
        torch.testing.assert_close(ensemble(x=x), want, equal_nan=True)


def member_of(ensemble: EnsembleModule, module: nn.Module, number: int) -> nn.Module:
    """Return a copy of a module with the tensors of a copy in an ensemble of it."""
    member = copy.deepcopy(module).eval()
    for first, *path in paths(ensemble.params):
        store_of(member, tuple(path))[path[-1]] = ensemble.params[(first, *path)][number]
    rebuild(member)
    return member


def rebuild(module: nn.Module) -> None:
    """Let recurrent layers compute with the weights that they have."""
    for member in module.modules():
        if isinstance(member, nn.GRU):
            member._flat_weights = [getattr(member, name) for name in member._flat_weights_names]
