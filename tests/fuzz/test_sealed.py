"""Random lives of an arena: written through old and new handles, sealed, opened, made again.

What the files hold is what was written while they were open. A write through a handle of a sealed
arena is refused, and damages nothing; a store that is there is not wiped unless that is asked.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeAlias

import pytest
import torch
from tests.fuzz.conftest import Seeds

from kd_core import FormatError, InvalidValue, TensorDict, TensorDictBase, store

Key: TypeAlias = "str | tuple[str, ...]"
ROWS = 3
KEYS: list[Key] = ["a", ("n", "b"), "c"]


def sample(rng: Random, *, other: bool = False) -> TensorDict:
    td = TensorDict({"a": torch.zeros(ROWS, 2), "n": {"b": torch.zeros(ROWS)}}, [ROWS])
    td["c"] = torch.zeros(ROWS, 1 + other, dtype=torch.int64)
    for key in KEYS:
        td[key].fill_(rng.randrange(100))
    return td


class Handle:
    """A container in the arena, tensors taken from it, and whether they may be written to."""

    def __init__(self, td: TensorDictBase) -> None:
        self.td, self.open, self.sealed = td, True, False
        self.leaves = {key: td[key] for key in KEYS}
        self.views = {key: td[key].view(-1) for key in KEYS}


WRITES: list[Callable[[TensorDictBase, Key, float], object]] = [
    lambda td, key, value: td.set_(key, torch.full_like(td[key], value)),
    lambda td, key, value: td.set_at_(key, value, slice(None)),
    lambda td, key, value: td.select(key).fill_(value),
    lambda td, key, value: td.update_(td.select(key).apply(lambda x: x * 0 + value)),
    lambda td, key, value: td.select(key).copy_(td.select(key).apply(lambda x: x * 0 + value)),
    lambda td, key, value: td[key].fill_(value),
    lambda td, key, value: td[key].mul_(0).add_(value),
    lambda td, key, value: td[key].__setitem__(..., value),
    lambda td, key, value: torch._foreach_copy_([td[key]], [torch.full_like(td[key], value)]),
    lambda td, key, value: [part.fill_(value) for part in td[key].unbind(0)],
    lambda td, key, value: [one[key].fill_(value) for one in td.unbind(0)],
    lambda td, key, value: td[key].view(-1).fill_(value),
    lambda td, key, value: td[key].detach().fill_(value),
]


class Life:
    """An arena, its handles, and what its files are to hold."""

    def __init__(self, rng: Random, path: Path, seeds: Seeds) -> None:
        self.rng, self.path, self.seeds = rng, path, seeds
        self.held = sample(rng)
        self.sealed = False
        self.handles = [Handle(self.held.clone().memmap(path))]

    def check(self) -> None:
        """Compare the files with what they are to hold."""
        found = TensorDict.load(self.path, verify="full" if self.sealed else "fast")
        kept = TensorDict.load_memmap(self.path, mode="r")
        for key in KEYS:
            assert torch.equal(found[key], self.held[key])
            assert torch.equal(kept[key], self.held[key])
        if self.sealed:
            store.check(self.path)
        for handle in self.handles:
            for key in KEYS if handle.open else []:
                assert torch.equal(handle.td[key], self.held[key])

    def step(self) -> None:
        name = self.rng.choice(
            ["write"] * 4
            + ["write_to_leaf", "write_to_view", "seal", "reopen", "like", "other", "overwrite"]
        )
        self.seeds.count(name)
        getattr(self, name)()

    def write_to_view(self) -> None:
        """Write through a view of a leaf that was taken before, which may map dropped files."""
        handle, key, value = self.rng.choice(self.handles), self.rng.choice(KEYS), 7
        handle.views[key].fill_(value)
        if handle.open:
            self.held[key].fill_(value)

    def write_to_leaf(self) -> None:
        """Write to a leaf that was taken before."""
        handle, key, value = self.rng.choice(self.handles), self.rng.choice(KEYS), 8
        try:
            handle.leaves[key].fill_(value)
        except InvalidValue:
            assert not handle.open
            self.seeds.count("refused")
            return
        if handle.open:
            self.held[key].fill_(value)

    def write(self) -> None:
        """Write through some handle, old or new."""
        rng, handle = self.rng, self.rng.choice(self.handles)
        key, value, write = rng.choice(KEYS), rng.randrange(100), rng.choice(WRITES)
        before, told = handle.td[key].clone(), ""
        try:
            write(handle.td, key, value)
        except InvalidValue as error:
            told = str(error)
        if handle.open:
            assert not told
            self.held[key].fill_(value)
        assert told or not handle.sealed
        if told:
            self.seeds.count("refused")
            assert "was sealed" in told
            assert torch.equal(handle.td[key], before)
        # Else it wrote to files that were replaced, which nothing reads any more.

    def replaced(self) -> None:
        for handle in self.handles:
            handle.open = False

    def seal(self) -> None:
        if self.sealed:
            with pytest.raises(FormatError, match="sealed"):
                store.seal(self.path)
            return
        store.seal(self.path)
        self.sealed = True
        for handle in self.handles:
            handle.sealed = handle.sealed or handle.open
        self.replaced()

    def reopen(self) -> None:
        made = TensorDict.load_memmap(self.path)
        self.sealed = False
        self.handles.append(Handle(made.lock_() if self.rng.random() < 0.5 else made))

    def like(self) -> None:
        """A program that starts again makes the arena again, and finds its data."""
        self.sealed = False
        self.handles.append(Handle(sample(self.rng).memmap_like(self.path)))

    def other(self) -> None:
        """Nothing of another structure takes its place."""
        made = sample(self.rng, other=True)
        one = self.rng.choice([made, made[:2], made.select("a")])
        with pytest.raises(InvalidValue, match="overwrite=True"):
            one.memmap_like(self.path)

    def overwrite(self) -> None:
        made = sample(self.rng)
        self.replaced()
        self.sealed = False
        if self.rng.random() < 0.5:
            self.handles.append(Handle(made.memmap_like(self.path, overwrite=True)))
            self.held = made.clone().zero_()
        else:
            self.handles.append(Handle(made.memmap(self.path)))
            self.held = made.clone()


def test_an_arena_holds_what_was_written_before_its_seal(seeds: Seeds, tmp_path: Path) -> None:
    for seed in seeds(20):
        rng = Random(seed)
        path = tmp_path / str(seed)
        life = Life(rng, path, seeds)
        for _ in range(rng.randint(3, 14)):
            life.step()
            life.check()
        shutil.rmtree(path)
