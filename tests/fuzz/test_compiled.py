"""Random programs on containers, and modules that change, give compiled what they give eagerly."""

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import TypeAlias

import pytest
import torch
from tests.fuzz.comparing import differ
from tests.fuzz.conftest import Seeds
from tests.fuzz.subjects import read

from kd_core import TensorDict, TensorDictBase, cat, lazy_stack, stack
from kd_nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential

Step: TypeAlias = Callable[[TensorDictBase], TensorDictBase]

STEPS: dict[str, Step] = {
    "td + 1": lambda td: td + 1,
    "td * td": lambda td: td * td,
    "td.exp()": lambda td: td.exp(),
    "td.add_(1)": lambda td: td.clone().add_(1),
    "td[0:2]": lambda td: td[0:2],
    "td[..., None]": lambda td: td[..., None],
    "td[mask]": lambda td: td[torch.arange(td.batch_size[0]) > -1],
    "td[rows]": lambda td: td[torch.zeros(2, dtype=torch.int64)],
    "reshape": lambda td: td.reshape(-1),
    "flatten, unflatten": lambda td: td.flatten().unflatten(0, (-1, 1)),
    "permute": lambda td: td.permute(*reversed(range(td.ndim))),
    "unsqueeze": lambda td: td.unsqueeze(-1),
    "squeeze": lambda td: td.squeeze(),
    "expand": lambda td: td.expand(2, *td.batch_size),
    "sum": lambda td: td.sum(0) if td.ndim > 1 else td.sum(0, keepdim=True),
    "stack": lambda td: stack([td, td + 1]),
    "cat": lambda td: cat([td, td], 0),
    "split": lambda td: td.split(1)[0],
    "unbind": lambda td: stack(td.unbind(0)),
    "select": lambda td: td.select("a", ("n", "b")),
    "exclude": lambda td: td.exclude("c"),
    "set": lambda td: td.clone(recurse=False).set(("n", "new"), torch.zeros(td.batch_size)),
    "update": lambda td: td.clone(recurse=False).update({"a": torch.ones(td.batch_size)}),
    "rename": lambda td: td.clone(recurse=False).set("x", td["a"]).rename_key_("x", "y"),
    "apply": lambda td: td.apply(lambda x: x * 2),
    "where": lambda td: td.where(torch.ones(td.batch_size[:1], dtype=torch.bool), 0.0),
    "lazy_stack": lambda td: lazy_stack([td, td + 1]).contiguous(),
    "clamp": lambda td: td.clamp(-1, 1),
    "detach": lambda td: td.detach(),
    "double": lambda td: td.double(),
    "flip": lambda td: td.flip(0),
    "masked_fill": lambda td: td.masked_fill(torch.ones(td.batch_size[:1], dtype=torch.bool), 2.0),
}


# How many pieces there are of what a mask has chosen is not known in a graph, nor whether it is one
# row, which has a dimension less when it is squeezed.
APART = (
    {"td[mask]", "split"},
    {"td[mask]", "unbind"},
    {"td[mask]", "flatten, unflatten"},
    {"td[mask]", "squeeze"},
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def start(rng: Random) -> TensorDict:
    batch = rng.choice([(3,), (2, 3), (1, 2)])
    features = rng.choice([(), (2,)])
    return TensorDict(
        {
            "a": torch.linspace(-1, 1, torch.Size(batch).numel()).reshape(batch),
            "n": {"b": torch.ones(*batch, *features)},
            "c": torch.arange(torch.Size(batch).numel()).reshape(batch).float(),
            "word": "x",
        },
        batch,
    )


def altered(rng: Random, td: TensorDict) -> TensorDict:
    """Return a container for which code that is compiled for another must not go wrong.

    The order of keys stays: another one does not compile again, so results keep the first order.
    """
    how = rng.choice(["lock", "device", "names", "key", "word", "rows", "dtype", "none"])
    source = td.to_dict()
    if how == "key":
        source["more"] = torch.ones(td.batch_size)
    if how == "word":
        source["word"] = rng.choice(["y", "z"])
    if how == "dtype":
        source["a"] = source["a"].double()  # type: ignore[attr-defined]  # a tensor
    names = [rng.choice(["x", "y"]), *[None] * (td.ndim - 1)] if how == "names" else None
    new = TensorDict(source, td.batch_size, "cpu" if how == "device" else None, names=names)
    if how == "rows":
        new = cat([new, new], 0)
    return new.lock_() if how == "lock" else new


def outline(td: TensorDictBase) -> tuple[object, ...]:
    """Return what a container has beside its entries, of all levels."""
    below: list[object] = [td.get(key) for key in sorted(td.keys())]
    nodes = [outline(each) for each in below if isinstance(each, TensorDictBase)]
    return type(td), td.is_locked, td.device, tuple(td.batch_size), nodes


Program: TypeAlias = Callable[[TensorDictBase], object]


def choose(
    rng: Random, names: list[str], count: int, program: Program, inputs: list[TensorDict]
) -> None:
    """Append names of steps with which the program that runs them works on all inputs eagerly."""
    while len(names) < count:
        name = rng.choice(list(STEPS))
        if any({*names, name} >= pair for pair in APART):
            continue
        names.append(name)
        if not all(runs(program, each) for each in inputs):
            names.pop()


CHANGES = 4


def test_compiled_programs_follow_what_changes_between_calls(seeds: Seeds) -> None:
    for seed in seeds(2):
        rng = Random(seed)
        td = start(rng)
        names: list[str] = []

        def program(td: TensorDictBase, names: list[str] = names) -> object:
            for name in names:
                td = STEPS[name](td)
            return td, TensorDict({"made": td}, td.batch_size)

        inputs = [td, *(altered(rng, td) for _ in range(CHANGES))]
        choose(rng, names, 2, program, inputs)
        seeds.count("steps", len(names))
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        for each in inputs:
            before = each.clone()
            for found, want in zip(compiled(each), program(each), strict=True):  # type: ignore[call-overload]  # a pair
                assert differ(found, read(want), exact=False) is None, (names, each)
                assert outline(found) == outline(want), (names, each)
            assert differ(each, read(before), exact=True) is None, names


def runs(program: Program, td: TensorDictBase) -> bool:
    try:
        program(td)
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
        return False
    return True


def test_programs_compile_to_one_graph_and_agree(seeds: Seeds) -> None:
    for seed in seeds(3):
        rng = Random(seed)
        td = start(rng)
        names: list[str] = []

        def program(td: TensorDictBase, names: list[str] = names) -> TensorDictBase:
            for name in names:
                td = STEPS[name](td)
            return td

        choose(rng, names, 3, program, [td])
        seeds.count("steps", len(names))
        want = read(program(td))
        for _ in range(2):
            torch._dynamo.reset()
            found = torch.compile(program, backend="eager", fullgraph=True)(td)
            assert differ(found, want, exact=False) is None, names


class Declared(TensorDictModuleBase):
    """A module whose instances have no keys of their own."""

    in_keys = ["a"]  # noqa: RUF012  # as users write it
    out_keys = ["y", "z"]  # noqa: RUF012  # as users write it

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write as many multiples of what it reads as there are keys."""
        read = td[self.in_keys[0]]
        for number, key in enumerate(self.out_keys_source):
            td.set(key, read * (number + 2))
        return td


def two(x: torch.Tensor, by: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    return x * by, x + by


def halves(x: torch.Tensor, by: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    return x / by, x - by


def wrapped() -> TensorDictModule:
    return TensorDictModule(two, ["a"], ["y", "z"])


MODELS: dict[str, Callable[[], TensorDictModuleBase]] = {
    "declared": Declared,
    "wrapped": wrapped,
    "sequence": lambda: TensorDictSequential(wrapped(), Declared()),
}

Change: TypeAlias = Callable[[Random, TensorDictModuleBase], object]

ON_MODULES: dict[str, Change] = {
    "nothing": lambda rng, step: None,
    "select": lambda rng, step: step.select_out_keys(rng.choice(step.out_keys_source)),
    "reset": lambda rng, step: step.reset_out_keys(),
    "in_keys": lambda rng, step: setattr(step, "in_keys", [rng.choice(["a", "c"])]),
    "out_keys": lambda rng, step: setattr(step, "out_keys", rng.sample(["y", "z", "w"], 2)),
    "count": lambda rng, step: setattr(step, "count", rng.random()),
}
ON_WRAPPED: dict[str, Change] = {
    **ON_MODULES,
    "inplace": lambda rng, step: setattr(step, "inplace", rng.choice([True, False])),
    "module": lambda rng, step: setattr(step, "module", rng.choice([two, halves])),
    "kwargs": lambda rng, step: setattr(step, "method_kwargs", {"by": rng.choice([4.0, 5.0])}),
    "get_kwargs": lambda rng, step: setattr(step, "get_kwargs", {"default": None}),
}


def test_compiled_modules_follow_their_changes(seeds: Seeds) -> None:
    for seed in seeds(3):
        rng = Random(seed)
        kind = list(MODELS)[seed % len(MODELS)]
        model = MODELS[kind]()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        steps = list(model) if isinstance(model, TensorDictSequential) else [model]
        done: list[str] = []
        with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=256):
            for number in range(10):
                step = rng.choice(steps)
                assert isinstance(step, TensorDictModuleBase)
                changes = ON_MODULES if isinstance(step, Declared) else ON_WRAPPED
                # The first make more plans than one module may have.
                name = "count" if number < 5 else rng.choice(list(changes))
                changes[name](rng, step)
                done.append(name)
                given = TensorDict(a=torch.ones(2), c=torch.full((2,), 7.0), y=torch.zeros(2))
                want = copy.deepcopy(model)(given.copy())
                found = compiled(given.copy())
                assert differ(found, read(want), exact=False) is None, (kind, done)
        seeds.count("changes", len(done))
