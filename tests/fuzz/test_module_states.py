"""Random modules beside plain dicts of their parameters and buffers.

What `from_module` collects, what `TensorDictParams` does to it, and what a module computes with it
are those of the dicts and of `torch.func.functional_call`. After each program the module is as it
was before, down to the order of its names.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

import pytest
import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.odd_modules import flat_state, odd_module, snapshot
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from kd_core import KeyNotFound, Locked, TensorDict, TensorDictBase, unravel_key_to_tuple
from kd_nn import TensorDictParams

State: TypeAlias = dict[str, Tensor]
Program: TypeAlias = Callable[[random.Random, nn.Module], None]


def flat(td: TensorDictBase) -> State:
    """Return the leaves of a container by dotted names."""
    found = td.keys(include_nested=True, leaves_only=True)
    paths = [unravel_key_to_tuple(key) for key in found]
    return {".".join(path): td[path] for path in paths}


def close(one: Tensor, other: Tensor) -> None:
    """Check that two results are equal but for rounding; random layers may make it large."""
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)


def nested(state: Mapping[str, Tensor]) -> TensorDict:
    """Build a container of leaves by dotted names."""
    return TensorDict({tuple(name.split(".")): leaf for name, leaf in state.items()})


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Check that two states have equal tensors."""
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert tensor.dtype is other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def identical(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Check that two states hold the same tensors; a buffer may be another view of its memory."""
    assert set(one) == set(other)
    for name, tensor in one.items():
        shared = isinstance(tensor, nn.Buffer) and tensor.data_ptr() == other[name].data_ptr()
        assert tensor is other[name] or shared, name


def installed(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Check that a module holds tensors; one without gradients is in a parameter of its own."""
    assert set(one) == set(other)
    for name, tensor in one.items():
        if tensor is not other[name]:
            assert isinstance(tensor, nn.Parameter), name
            assert not other[name].requires_grad, name
            assert tensor.data_ptr() == other[name].data_ptr(), name
            assert tensor.shape == other[name].shape, name


def changed(state: Mapping[str, Tensor], grows: bool = True) -> State:
    """Return other tensors; names that share one share one again."""
    made: dict[int, Tensor] = {}
    for tensor in state.values():
        new = tensor.detach().clone()
        if new.is_floating_point() and grows:
            new.add_(torch.rand(new.shape))
        made.setdefault(id(tensor), new.requires_grad_(tensor.requires_grad))
    return {name: made[id(tensor)] for name, tensor in state.items()}


def collect(rng: random.Random, module: nn.Module) -> None:
    """Collect the tensors of a module in all ways."""
    state = flat_state(module)
    locked, keeps = rng.random() < 0.5, rng.random() < 0.5
    td = TensorDict.from_module(module, lock=locked, filter_empty=keeps)
    identical(flat(td), state)
    assert td.is_locked is locked
    if not keeps:
        have = {name for name, _ in module.named_modules(remove_duplicate=False) if name}
        nodes = {".".join(unravel_key_to_tuple(k)) for k in td.keys(True)}
        assert have <= nodes
    saved = TensorDict.from_module(module, use_state_dict=True)
    pairs = zip(flat(saved).values(), module.state_dict().values(), strict=True)
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in pairs)
    assert not any(value.requires_grad for value in flat(saved).values())
    assert list(flat(saved)) == list(nested(module.state_dict()).flatten_keys(".").keys())
    params = TensorDict.from_module(module, as_module=True)
    identical(flat(params), state)


def stack_several(rng: random.Random, module: nn.Module) -> None:
    """Stack the tensors of copies, and run them at once."""
    count = rng.randint(1, 3)
    module = module if count == 1 else copy.deepcopy(module).double()  # to round less
    modules = [copy.deepcopy(module) for _ in range(count)]
    for other in modules:
        for tensor in other.parameters():
            if tensor.is_floating_point():
                tensor.data.add_(torch.rand(tensor.shape))
    states = [flat_state(other) for other in modules]
    before = [snapshot(other) for other in modules]
    lazy = rng.random() < 0.3
    stacked = TensorDict.from_modules(*modules, lazy_stack=lazy)
    want = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    same(flat(stacked), want)
    for name, leaf in flat(stacked).items():
        if not lazy:
            assert leaf.is_leaf, name
            assert leaf.requires_grad is states[0][name].requires_grad, name
    assert [snapshot(other) for other in modules] == before
    x = torch.randn(4, 3, dtype=torch.float32 if count == 1 else torch.float64)

    def call(td: TensorDictBase, x: Tensor) -> Tensor:
        with td.to_module(module):
            return cast(Tensor, module(x))

    if not want:
        return
    ours = vmap(call, (0, None), randomness="same")(nested(want).auto_batch_size_(1), x)
    close(ours, torch.stack([other(x) for other in modules]))
    params = TensorDict.from_modules(*modules, as_module=True)
    same(flat(params), want)


def derive(rng: random.Random, module: nn.Module) -> None:
    """Compare gradients of a function of the parameters."""
    state, x = changed(flat_state(module)), torch.randn(4, 3)
    first = {id(state[name]): name for name in reversed(order(module))}
    names = set(first.values()) if rng.random() < 0.5 else set(state)
    chosen = {
        name: value.detach()
        for name, value in state.items()
        if name in names and value.is_floating_point()
    }
    if not chosen:
        return

    def ours(td: TensorDict) -> Tensor:
        with td.to_module(module):
            return cast(Tensor, module(x)).tanh().sum()

    def theirs(values: State) -> Tensor:
        return (
            cast(Tensor, functional_call(module, by_slot(module, values), (x,), tie_weights=False))
            .tanh()
            .sum()
        )

    td = nested(chosen)
    same_values(flat(grad(ours)(td)), grad(theirs)(chosen))
    tangents = {name: torch.ones_like(value) for name, value in chosen.items()}
    found = jvp(ours, (td,), (nested(tangents),))
    want = jvp(theirs, (chosen,), (tangents,))
    close(found[0], want[0])
    close(found[1], want[1])


def by_slot(module: nn.Module, state: State) -> State:
    """Return one name for each slot, with the tensor that it takes: that of the first name.

    `functional_call` does not restore a slot that it is given under two names.
    """
    current, slots = flat_state(module), dict[tuple[int, str], str]()
    first = dict[int, Tensor]()
    for name in order(module):
        if name in state:
            head, _, last = name.rpartition(".")
            slots.setdefault((id(module.get_submodule(head)), last), name)
            first.setdefault(id(current[name]), state[name])
    return {name: first[id(current[name])] for name in slots.values()}


def order(module: nn.Module, head: str = "") -> list[str]:
    """Return the names of all tensors, level by level as the module has them."""
    own = {**module._parameters, **module._buffers}
    found = [head + name for name, tensor in own.items() if tensor is not None]
    for name, child in module._modules.items():
        if child is not None:
            found += order(child, f"{head}{name}.")
    return found


def same_values(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert set(one) == set(other)
    for name in one:
        close(one[name], other[name])


def run_inside(rng: random.Random, module: nn.Module) -> None:
    """Run with other tensors, and do in the block what a user does there."""
    state = flat_state(module)
    share = rng.choice([0.3, 1.0])
    part = {name: t for name, t in changed(state).items() if rng.random() < share}
    x = torch.randn(4, 3)

    class Stop(Exception):
        pass

    want = None
    if share == 1.0:
        want = functional_call(module, by_slot(module, part), (x,), tie_weights=False)
    try:
        with nested(part).to_module(module):
            if want is not None:
                close(module(x), want)
                act_inside(rng, module, part)
            with TensorDict.from_module(module).to_module(module):
                module(x)
            raise Stop
    except Stop:
        pass


def act_inside(rng: random.Random, module: nn.Module, values: State) -> None:
    """Do to a module with other tensors what is done to any."""
    act = rng.choice(["learn", "state", "copy", "collect"])
    if act == "learn":
        out = module(torch.randn(4, 3)).sum()
        if out.requires_grad:
            out.backward()
    if act == "state":
        same(module.state_dict(), {key: values[key] for key in module.state_dict()})
    if act == "copy":
        other = copy.deepcopy(module)
        same(flat_state(other), values)
        with nested(changed(values)).to_module(other):
            installed(flat_state(module), values)
    if act == "collect":
        installed(flat(TensorDict.from_module(module)), values)


def keep(rng: random.Random, module: nn.Module) -> None:
    """Keep the tensors as a module of their own, and compare its states."""
    params = TensorDictParams.of_module(module)
    assert list(params.state_dict()) == list(module.state_dict())
    identical(flat(params), flat_state(module))
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = getattr(params, kind)(), getattr(module, kind)()
        assert [(n, p.data_ptr()) for n, p in ours] == [(n, p.data_ptr()) for n, p in theirs]
    params = TensorDictParams.of_module(copy.deepcopy(module))
    other = copy.deepcopy(module)
    for _ in range(rng.randint(1, 4)):
        act = rng.choice(
            [
                copies,
                dtypes,
                freeze,
                load,
                soft,
                learn_apart,
                zeroed,
                kinds,
                locked,
                written,
                hooked,
            ]
        )
        params, other = act(rng, params, other)
        assert list(params.state_dict()) == list(other.state_dict())
        same(params.state_dict(), other.state_dict())
        same(flat(params), flat_state(other))
        for (name, p), (_, q) in zip(
            params.named_parameters(), other.named_parameters(), strict=True
        ):
            assert p.requires_grad is q.requires_grad, name
            assert (p.grad is None) is (q.grad is None), name


Both: TypeAlias = tuple[TensorDictParams, nn.Module]


def copies(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    way = rng.randrange(3)
    if way == 0:
        return copy.deepcopy(params), copy.deepcopy(other)
    params, other = zeroed(rng, params, other)  # pickles hold no gradients
    if way == 1:
        return pickle.loads(pickle.dumps(params)), other
    file = io.BytesIO()
    torch.save(params, file)
    file.seek(0)
    return torch.load(file, weights_only=False), other


def dtypes(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    to = rng.choice([torch.bfloat16, torch.float64, torch.float32])
    made, moved = params.to(to), other.to(to)
    assert made is params
    return params, moved


def freeze(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    on = rng.random() < 0.5
    if all(p.is_floating_point() or p.is_complex() for p in other.parameters()):
        params.requires_grad_(on)
        other.requires_grad_(on)
    return params, other


def load(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    state = {
        name: value + 1 if value.is_floating_point() else value
        for name, value in other.state_dict().items()
    }
    strict, assign = rng.random() < 0.5, rng.random() < 0.3
    if state and rng.random() < 0.3:
        del state[rng.choice(list(state))]
    if rng.random() < 0.2:
        state["nowhere"] = torch.ones(1)
    results: list[list[str]] = []
    for one in (params, other):
        values = {name: value.clone() for name, value in state.items()}
        try:
            one.load_state_dict(values, strict=strict, assign=assign)
            results.append([])  # parameters return themselves, a module the keys that differ
        except RuntimeError as error:
            results.append(str(error).splitlines()[1:])
    assert results[0] == results[1], results
    return params, other


def soft(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    """Move towards other values, as for a target network."""
    state = flat_state(other)
    target, seen = changed(state), set[int]()
    end = nested(target)
    with torch.no_grad():
        params.lerp_(TensorDictParams(end) if rng.random() < 0.5 else end, 0.25)
    for name in order(other):
        tensor = state[name]
        if id(tensor) not in seen and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.data.lerp_(target[name], 0.25)
        elif id(tensor) not in seen:
            tensor.data.copy_(target[name])
        seen.add(id(tensor))
    return params, other


def learn_apart(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    makers: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
        lambda some: torch.optim.SGD(some, 0.1, momentum=0.5),
        lambda some: torch.optim.Adam(some, 0.1),
    ]
    make = rng.choice(makers)
    for one in (params, other):
        used = [p for p in one.parameters() if p.requires_grad and p.is_floating_point()]
        if used:
            optimizer = make(used)
            for p in used:
                p.grad = torch.ones_like(p)
            optimizer.step()
    return params, other


def zeroed(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    params.zero_grad()
    other.zero_grad()
    return params, other


def locked(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    """Lock: values may change, entries may not. A deep copy is not locked."""
    params.lock_()
    if rng.random() < 0.5:
        params = copy.deepcopy(params)
        assert not params.is_locked
        params.lock_()
        other = copy.deepcopy(other)
    nodes = [params, *(n for n in params.modules() if isinstance(n, TensorDictParams))]
    level = rng.choice(nodes)
    assert level.is_locked
    names = [*level.keys(), "a"]  # a container iterates over rows
    for wrong in (
        lambda: level.set("nowhere", torch.ones(1)),
        lambda: level.update({"nowhere": torch.ones(1)}),
        lambda: level.pop(names[0]),
        lambda: level.rename_key_(names[0], "nowhere"),
    ):
        with pytest.raises((Locked, KeyNotFound)):
            wrong()
    with torch.no_grad():
        params.update_(params.clone())
    params, other = dtypes(rng, *load(rng, params, other))
    params.unlock_()
    return params, other


def written(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    """Put another tensor in the place of one."""
    names = [name for name in order(other) if "parametrizations" not in name]
    if not names:
        return params, other
    name = rng.choice(names)
    head, _, last = name.rpartition(".")
    owner, old = other.get_submodule(head), flat_state(other)[name]
    path = tuple(name.split("."))
    if last in owner._parameters:
        owner._parameters[last] = nn.Parameter(torch.ones_like(old.detach()), old.requires_grad)
        params[path] = nn.Parameter(torch.ones_like(old.detach()), old.requires_grad)
    else:
        owner._buffers[last] = torch.ones_like(old)
        params[path] = torch.ones_like(old)
    return params, other


def hooked(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    """Read through a hook, which writing and calling do not see."""
    seen = list[Tensor]()
    handle = params.register_get_post_hook(lambda _, leaf: seen.append(leaf))
    found = flat(params)
    assert len(seen) == len(found)
    handle.remove()
    flat(params)
    assert len(seen) == len(found)
    return params, other


def kinds(rng: random.Random, params: TensorDictParams, other: nn.Module) -> Both:
    return TensorDictParams(params, no_convert=True), other


PROGRAMS: list[Program] = [collect, stack_several, derive, run_inside, run_inside, keep, keep]


def test_modules_are_as_before(seeds: Seeds) -> None:
    for seed in seeds(25):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        module = odd_module(rng)
        for _ in range(3):
            program = rng.choice(PROGRAMS)
            before = snapshot(module)
            try:
                program(rng, module)
            except Exception as error:
                error.add_note(f"in `{program.__name__}` of {module}")
                raise
            assert snapshot(module) == before, program.__name__
            seeds.count(program.__name__)
