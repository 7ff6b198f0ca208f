"""Random calls of methods with `dispatch`, beside a plain function with the same parameters."""

from __future__ import annotations

import inspect
from random import Random
from typing import TypeAlias

import pytest
import torch
from tests.fuzz.conftest import Seeds
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, TensorDictBase, unravel_key_to_tuple
from kd_nn import (
    DispatchError,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
)

Call: TypeAlias = tuple[list[Tensor], dict[str, Tensor]]
NESTED: list[NestedKey] = [("n", "a"), ("n", "b"), ("n", "m", "c"), ("x", "y"), ("self", "x")]
FLAT = "a b x_y n_a input tensordict_out args kwargs separator module key name who self_ value"
KEYS: list[NestedKey] = [*NESTED, *FLAT.split()]
SEPARATORS = ["_", "_", "__", "_of_"]


class Sum(nn.Module):
    """Adds what it reads, each times its place, and writes the sum and its negative."""

    def __init__(self, reads: list[NestedKey], writes: list[NestedKey]) -> None:
        super().__init__()
        self.in_keys, self.out_keys = reads, writes
        self.sources, self.goals = reads, writes

    def total(self, td: TensorDictBase) -> TensorDictBase:
        total = sum(((i + 1) * td[key] for i, key in enumerate(self.in_keys)), torch.zeros(()))
        for i, key in enumerate(self.out_keys):
            td[key] = total * (i + 1)
        return td


def class_with(separator: str, named: bool) -> type[Sum]:
    """Return a class whose `forward` is decorated in one of the ways."""

    class Dispatched(Sum):
        if named:

            @dispatch(separator=separator, source="sources", dest="goals")
            def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
                return self.total(tensordict)
        else:

            @dispatch(separator=separator)
            def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
                return self.total(tensordict)

    return Dispatched


def subject(rng: Random) -> tuple[nn.Module, list[NestedKey], list[str], int]:
    """Return a module, what it reads, by which names, and how much it writes."""
    kind = rng.choice(["class", "module", "sequence"])
    separator = rng.choice(SEPARATORS) if kind == "class" else "_"
    reads = apart(rng.sample(KEYS, rng.randint(1, 5)), separator)
    writes: list[NestedKey] = rng.sample(["out", ("o", "p"), ("o", "q"), "z"], rng.randint(1, 3))
    names = names_of(reads, separator)
    if kind == "class":
        return class_with(separator, rng.random() < 0.5)(reads, writes), reads, names, len(writes)

    def outputs(*values: Tensor) -> tuple[Tensor, ...] | Tensor:
        total = sum(((i + 1) * value for i, value in enumerate(values)), torch.zeros(()))
        made = tuple(total * (i + 1) for i in range(len(writes)))
        return made if len(writes) > 1 else made[0]

    module: nn.Module = TensorDictModule(outputs, reads, writes)
    module = TensorDictSequential(module) if kind == "sequence" else module
    return module, reads, names, len(writes)


def names_of(keys: list[NestedKey], separator: str) -> list[str]:
    return [separator.join(unravel_key_to_tuple(key)) for key in keys]


def apart(keys: list[NestedKey], separator: str) -> list[NestedKey]:
    """Leave out keys that hold each other, and those whose names collide."""
    kept: list[NestedKey] = []
    for key in keys:
        path = unravel_key_to_tuple(key)
        paths = [unravel_key_to_tuple(other) for other in kept]
        nested = any(path[: len(p)] == p or p[: len(path)] == path for p in paths)
        if not nested and separator.join(path) not in names_of(kept, separator):
            kept.append(key)
    return kept


def plain(names: list[str]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def random_call(rng: Random, names: list[str], shape: tuple[int, ...]) -> Call:
    """Return a call that is mostly right: some arguments are missing, doubled or unknown."""

    def value() -> Tensor:
        return torch.randint(9, shape).float()

    split = rng.randint(0, len(names))
    args = [value() for _ in names[:split]]
    kwargs = {name: value() for name in names[split:]}
    for change in rng.sample(["", "", "", "missing", "doubled", "unknown", "extra"], 1):
        if change == "missing" and kwargs:
            kwargs.pop(rng.choice(list(kwargs)))
        if change == "doubled" and split:
            kwargs[rng.choice(names[:split])] = value()
        if change == "unknown":
            kwargs[rng.choice(["nope", names[0] + "_", "self_", "A"])] = value()
        if change == "extra":
            args.append(value())
    order = list(kwargs)
    rng.shuffle(order)
    return args, {name: kwargs[name] for name in order}


def check_call(
    module: nn.Module, keys: list[NestedKey], names: list[str], call: Call, writes: int
) -> bool:
    """Compare one call with tensors; return whether it was a right one."""
    args, kwargs = call
    signature = plain(names)
    written = type(module).__module__ == __name__  # by a user
    own = inspect.signature(module) if isinstance(module, TensorDictModuleBase) else signature
    assert list(own.parameters) == names
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        # A method that somebody wrote gets what is given, and fails at what it does not find.
        with pytest.raises((DispatchError, KeyError) if written else DispatchError):
            module(*args, **kwargs)
        return False
    assert dict(own.bind(*args, **kwargs).arguments).keys() == bound.keys()
    total = sum(((i + 1) * bound[name] for i, name in enumerate(names)), torch.zeros(()))
    found = module(*args, **kwargs)
    outputs = (found,) if isinstance(found, Tensor) else found
    assert isinstance(found, Tensor) is (writes == 1)
    assert len(outputs) == writes
    for i, output in enumerate(outputs):
        torch.testing.assert_close(output, total * (i + 1))
    td = TensorDict(dict(zip(keys, bound.values(), strict=True)))
    by_keyword = td.clone()
    assert module(td) is td
    torch.testing.assert_close(module(tensordict=by_keyword).to_dict(), td.to_dict())
    return True


def test_a_random_call_binds_as_a_plain_function(seeds: Seeds) -> None:
    for seed in seeds(60):
        rng = Random(seed)
        torch.manual_seed(seed)
        module, reads, names, writes = subject(rng)
        for _ in range(6):
            shape = rng.choice([(), (2,), (2, 3), (0,)])
            call = random_call(rng, names, shape)
            right = check_call(module, reads, names, call, writes)
            seeds.count("right calls" if right else "wrong calls")
