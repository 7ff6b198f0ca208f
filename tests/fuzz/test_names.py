"""Names of dimensions: they change no result, and follow the dimensions that they were given to.

Each subject holds, for every dimension of its batch, an entry that says where along it a row is.
So a result shows which of the old dimensions each of its own is, whatever was done.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from random import Random
from typing import cast

import torch
from tests.fuzz import calculating, indexing, rearranging
from tests.fuzz.checking import attempt, expected, over_refused, refused_badly
from tests.fuzz.comparing import differ
from tests.fuzz.conftest import Seeds
from tests.fuzz.data import Batch
from tests.fuzz.registry import OPERATIONS
from tests.fuzz.subjects import Node, Subject, build, read
from torch import Tensor

from kd_core import TensorDictBase, lazy_stack

NAMES = ("time", "env", "agent")
BATCHES: tuple[Batch, ...] = ((3,), (2, 3), (3, 2), (2, 3, 2), (1, 3), (0, 2))
MODULES = {each.__name__ for each in (calculating, indexing, rearranging)}
# These take rows from anywhere, so that no dimension of the result need be an old one.
ANYWHERE = {"gather", "roll"}


def places(batch: Batch) -> dict[str, Tensor]:
    """Return where along each dimension each row is."""
    grid = [torch.arange(size) for size in batch]
    return {
        f"p{dim}": leaf.clone() for dim, leaf in enumerate(torch.meshgrid(*grid, indexing="ij"))
    }


def some_names(rng: Random, ndim: int) -> list[str | None]:
    chosen = rng.sample(NAMES, ndim)
    return [name if rng.random() < 0.8 else None for name in chosen]


def named(rng: Random, node: Node, names: list[str | None]) -> TensorDictBase:
    """Return a named container of a node, or a lazy stack of the same, in one of several ways."""
    td = build(node)
    dim = rng.randrange(len(node.batch))
    if rng.random() < 0.4 and node.batch[dim]:
        td.names = names
        td = lazy_stack(td.unbind(dim), dim)
    td.names = names
    how = rng.randrange(6)
    if how == 0:
        return cast("TensorDictBase", pickle.loads(pickle.dumps(td)))
    return copy.deepcopy(td) if how == 1 else td


def containers(result: object) -> Iterator[TensorDictBase]:
    if isinstance(result, TensorDictBase):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from containers(each)


def misnamed(td: TensorDictBase, names: list[str | None]) -> str | None:
    """Say which dimension has the name of another one."""
    real = [name for name in td.names if name is not None]
    if len(set(real)) < len(real) or not set(real) <= set(names):
        return f"the names are {td.names}"
    leaves = read(td).entries
    for dim, name in enumerate(td.names):
        for old, given in enumerate(names):
            place = leaves.get(f"p{old}")
            if name is None or given == name or not isinstance(place, Tensor):
                continue
            if place.numel() and not bool((place == place.narrow(dim, 0, 1)).all()):
                return f"dimension {dim} is named {name!r}, and has rows of dimension {old}"
    return None


def test_names_follow_their_dimensions_and_change_nothing(seeds: Seeds) -> None:
    tables = sorted(n for n, make in OPERATIONS.items() if make.__module__ in MODULES)
    for seed in seeds(400):
        rng = Random(seed)
        batch = rng.choice(BATCHES)
        node = Node(batch, {**places(batch), "n": Node(batch, dict(places(batch)))})
        names = some_names(rng, len(batch))
        name = rng.choice(tables)
        plain = Subject(node, build(node), "dense", ragged=False)
        call = OPERATIONS[name](rng, plain, name)
        if call.restructures:  # stacks refuse what changes the number of their members
            continue
        td = named(rng, node, names)
        seeds.count("calls")
        before = list(td.names)
        _, (want, refused) = expected(plain, call)
        got, error = attempt(lambda c=call, t=td: c.ours(t))  # type: ignore[misc]  # at once
        text = f"{call.text} of {batch} {before}"
        if error is not None:
            assert refused_badly(error, refused) is None, (text, error)
            assert list(td.names) == before, text
            assert over_refused(plain, call, error, refused) is None, (text, error)
            continue
        if refused is not None or call.writes or call.unchecked:
            continue
        assert not differ(got, want, call.exact), (text, differ(got, want, call.exact))
        for result in containers(got):
            if OPERATIONS[name].__module__ == calculating.__name__:
                assert result.names == before, text
            elif name not in ANYWHERE:
                assert misnamed(result, before) is None, (text, misnamed(result, before))
            below: object = result.get("n")
            if isinstance(below, TensorDictBase):
                assert below.names == result.names, text
