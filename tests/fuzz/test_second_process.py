"""Stores, arenas and shared containers in two processes, beside a plain copy of what they hold."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import cast

import pytest
import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.second_process import Key, Sample, Side, serve
from tests.fuzz.stored_trees import DTYPES, Content, Shape, content, leaf, tree
from torch import Tensor

from kd_core import (
    FormatError,
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    unravel_key_to_tuple,
)


class Failed(Exception):
    """What the other process raised."""


class Other:
    """The other process."""

    def __init__(self, requests: Connection) -> None:
        self._requests = requests

    def __call__(self, name: str, *arguments: object) -> object:
        self._requests.send((name, *arguments))
        assert self._requests.poll(60)
        how, result = self._requests.recv()
        if how == "error":
            raise Failed(*result)
        return result


@pytest.fixture
def other() -> Iterator[Other]:
    """Spawn a process that serves this one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    yield Other(ours)
    assert process.is_alive()
    process.kill()  # it takes seconds to end by itself
    process.join()


def container(rng: Random, batch: Shape) -> TensorDictBase:
    """Build a container of one of the kinds."""
    kind = rng.choice(["plain", "plain", "stack", "class"])
    if kind == "stack":
        members = [tree(rng, batch)]
        members += [member.clone().zero_() for member in members]
        return lazy_stack(members)
    if kind == "class":
        part = tree(rng, batch) if rng.random() < 0.5 else None
        return Sample(torch.rand(*batch, 2), part, name="b", batch_size=batch)
    return tree(rng, batch)


def leaves(td: TensorDictBase) -> dict[Key, Tensor]:
    """Return the tensors of a container, without its other data."""
    found: Iterable[tuple[object, object]] = td.items(include_nested=True, leaves_only=True)
    pairs = [(unravel_key_to_tuple(cast("Key", key)), value) for key, value in found]
    return {key: value for key, value in pairs if isinstance(value, Tensor)}


def call(side: Side, name: str, *arguments: object) -> object:
    return getattr(side, name)(*arguments)


class Life:
    """Two processes, one container, and a plain copy of it."""

    def __init__(self, rng: Random, seeds: Seeds, folder: Path, other: Other) -> None:
        self.seeds, self.rng, self.other, self.here = seeds, rng, other, Side()
        self.batch: Shape = rng.choice([(), (3,), (2, 2), (1,)])
        self.held = container(rng, self.batch)
        self.path = folder / rng.choice(["a.kd", "a.safetensors"])
        self.form = rng.choice(["stored", "arena", "arena", "shared"])
        getattr(self, f"begin_{self.form}")()

    def anyone(self) -> Callable[..., object]:
        """Return one of the two processes."""
        return self.other if self.rng.random() < 0.6 else partial(call, self.here)

    def begin_stored(self) -> None:
        self.anyone()("save", self.path, self.held)

    def begin_arena(self) -> None:
        self.path = self.path.with_suffix(".arena")
        if self.rng.random() < 0.3:
            self.here.take(self.held.memmap(self.path))
            assert self.other("take", self.here.live) is self.here.live.is_locked
            return
        self.anyone()("memmap", self.path, self.held)
        assert self.other("open", self.path) is False
        assert not self.here.open(self.path)

    def begin_shared(self) -> None:
        live = self.held.clone().share_memory_()
        if self.rng.random() < 0.3:
            live.lock_()
        assert live.is_shared() or live.is_empty()
        self.here.take(live)
        assert self.other("take", live) is live.is_locked

    def check(self) -> None:
        want = content(self.held)
        if self.form == "stored":
            assert self.other("saved", self.path, self.rng.choice(["fast", "full"])) == want
            assert self.here.saved(self.path, "full") == want
        else:
            assert self.other("content") == want
            assert self.here.content() == want
            assert self.other("refuses") is self.here.refuses()

    def step(self) -> None:
        names = {
            "stored": ["save", "append", "append", "compact", "kill", "kill"],
            "arena": ["write", "write", "write", "grow", "part", "seal", "kill_grow", "kill_seal"],
            "shared": ["write", "write", "part"],
        }
        name = self.rng.choice(names[self.form])
        for _ in range(4 if name == "kill" else 1):
            getattr(self, name)()

    def write(self) -> None:
        found = leaves(self.held)
        if not found:
            return
        key = self.rng.choice(list(found))
        value = leaf(tuple(found[key].shape), found[key].dtype)
        ways = ["update_", "set_", "leaf"]
        if isinstance(self.held, LazyStackedTensorDict):  # whose leaves are copies
            ways.remove("leaf")
        self.anyone()("write", key, value, self.rng.choice(ways))
        self.held.set_(key, value)

    def part(self) -> None:
        """Send a view; what is written there is seen in the whole."""
        if not self.held.batch_dims:
            return
        row = self.rng.randrange(self.held.batch_size[0])
        self.other("take", self.here.live[row])
        part = self.held[row]
        found = leaves(part)
        if found:
            key = self.rng.choice(list(found))
            value = leaf(tuple(found[key].shape), found[key].dtype)
            self.other("write", key, value, "set_")
            part.set_(key, value)
        assert self.other("content") == content(part)
        self.other("take", self.here.live)

    def grow(self) -> None:
        if type(self.held) is not TensorDict:
            return
        key = ("added", str(self.rng.randrange(100)))
        if key in self.held.keys(True):
            return
        self.other("open", self.path)  # what was sent is not the arena itself
        value = leaf((*self.batch, 2), self.rng.choice(DTYPES))
        self.anyone()("grow", key, value)
        self.held[key] = value
        self.here.refresh()
        self.other("refresh")

    def seal(self) -> None:
        self.anyone()("seal", self.path)
        self.form = "stored"

    def save(self) -> None:
        self.held = container(self.rng, self.batch)
        self.anyone()("save", self.path, self.held)

    def append(self) -> None:
        if self.path.suffix == ".safetensors" or not self.held.batch_dims:
            return
        more = self.held[: self.rng.randint(1, self.held.batch_size[0])].clone()
        self.anyone()("append", self.path, more)
        self.held = cat([self.held, more])

    def compact(self) -> None:
        if self.path.suffix != ".safetensors":
            self.anyone()("compact", self.path)

    def killed(self, name: str, *arguments: object) -> bool:
        """Kill a process while it does something; return whether it was done before."""
        delay = self.rng.random() * 0.006
        return bool(self.other("killed", delay, name, self.path, *arguments))

    def kill(self) -> None:
        """Kill a writer: the store is as before, or as the writer would have left it."""
        after, act = self.held, self.rng.choice(["save", "append", "compact"])
        if self.path.suffix == ".safetensors" or (act == "append" and not self.held.batch_dims):
            act = "save"
        if act == "save":
            after = container(self.rng, self.batch)
            done = self.killed("save", after)
        elif act == "append":
            after = cat([self.held, self.held])
            done = self.killed("append", self.held)
        else:
            done = self.killed("compact")
        self.settle(done, self.here.saved(self.path, "full"), after)

    def settle(self, done: bool, found: Content, after: TensorDictBase) -> None:
        """Note what is there after a process was killed: the old state or the new one."""
        old, new = content(self.held), content(after)
        assert found == new or (found == old and not done)
        self.seeds.count("killed before" if found == old != new else "killed after")
        self.held = after if found == new else self.held

    def kill_grow(self) -> None:
        if type(self.held) is not TensorDict or ("added", "k") in self.held.keys(True):
            return
        self.other("open", self.path)
        value = leaf((*self.batch, 2), self.rng.choice(DTYPES))
        delay = self.rng.random() * 0.006
        done = bool(self.other("killed", delay, "grow", ("added", "k"), value))
        self.here.open(self.path)
        self.other("open", self.path)
        after = self.held.clone()
        after["added", "k"] = value
        self.settle(done, self.here.content(), after)

    def kill_seal(self) -> None:
        done = self.killed("seal")
        try:
            self.here.open(self.path)
        except FormatError:  # it was sealed: `check` loads it
            self.form = "stored"
        else:
            assert not done


def test_two_processes_see_the_same(seeds: Seeds, tmp_path: Path, other: Other) -> None:
    for seed in seeds(8):
        rng = Random(seed)
        torch.manual_seed(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        life = Life(rng, seeds, folder, other)
        life.check()
        for _ in range(rng.randint(1, 5)):
            life.step()
            life.check()
            seeds.count("steps")
        seeds.count(life.form)
        shutil.rmtree(folder)
