"""Random programs on containers give compiled, in one graph, what they give eagerly."""

from collections.abc import Callable, Iterator
from random import Random
from typing import TypeAlias

import pytest
import torch
from tests.fuzz.comparing import differ
from tests.fuzz.conftest import Seeds
from tests.fuzz.subjects import read

from kd_core import TensorDict, TensorDictBase, cat, lazy_stack, stack

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
    for seed in seeds(6):
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
    for seed in seeds(8):
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
