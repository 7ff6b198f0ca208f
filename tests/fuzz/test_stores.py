"""Random lives of stores: what is loaded is what was saved, and damage is an error."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from random import Random
from typing import TypeAlias

import torch
from tests.fuzz.conftest import Seeds
from torch import Tensor

from kd_core import FormatError, NonTensorStack, TensorDict, TensorDictBase, cat, store

Shape: TypeAlias = tuple[int, ...]
Content: TypeAlias = dict[tuple[str, ...], object]
KEYS = ["", "a", "A", "a/b", "../x", "x.y", "\u00e9", "e\u0301", "manifest.json", ".lock", "t0"]
KEYS += ["__metadata__", "k" * 300, "\0", "seg-0", " ", "\ud7ff", "batch_size", "_", "shape"]
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.uint64]
VALUES: list[object] = ["s", "", None, 3, -(2**70), 1.5, math.nan, math.inf, True, b"\0\xff"]
VALUES += [[1, "a", None], {"k": [1]}, ("a", 1), {"": {}}, []]


def leaf(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return a tensor of random bytes."""
    if dtype is torch.bool:
        return torch.randint(2, shape).bool()
    count = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def tree(rng: Random, batch: Shape, depth: int = 0) -> TensorDict:
    """Build a container with odd keys, dtypes and values."""
    td = TensorDict(batch_size=batch)
    for key in rng.sample(KEYS, rng.randint(0, 5)):
        kind = rng.random()
        if kind < 0.55 or (kind < 0.75 and depth == 3):
            shape = (*batch, *rng.choice([(), (2,), (0,), (1, 3)]))
            td[key] = leaf(shape, rng.choice(DTYPES))
        elif kind < 0.75:
            td[key] = tree(rng, (*batch, *rng.choice([(), (), (2,)])), depth + 1)
        elif kind < 0.85 or len(batch) != 1 or not batch[0]:
            td.set_non_tensor(key, rng.choice(VALUES))
        else:
            td[key] = NonTensorStack(*rng.choices(VALUES, k=batch[0]))
    return td


def content(td: TensorDictBase) -> Content:
    """Return all that a container holds, tensors as their bytes."""
    found: Content = {(): tuple(td.batch_size)}
    for key in td.keys():  # noqa: SIM118  # a container iterates over rows
        value: object = td.get(key)
        if isinstance(value, Tensor):
            bits = value.contiguous().reshape(-1).view(torch.uint8).tolist()
            found[(key,)] = value.dtype, tuple(value.shape), bits
        elif isinstance(value, TensorDictBase):
            found |= {(key, *path): part for path, part in content(value).items()}
        else:
            found[(key,)] = type(value).__name__, repr(td[key])
    return found


class Life:
    """A store, and the container that it is to hold."""

    def __init__(self, rng: Random, folder: Path) -> None:
        self.rng = rng
        self.batch: Shape = rng.choice([(), (3,), (2, 2), (0,), (1,)])
        self.form = rng.choice(["a.kd", "a.safetensors", "a.arena"])
        self.path = folder / self.form
        self.held = tree(rng, self.batch)
        if self.form == "a.arena":
            assert content(self.held.memmap(self.path)) == content(self.held)
        else:
            self.held.save(self.path)

    def load(self) -> TensorDictBase:
        if self.form == "a.arena":
            return TensorDict.load_memmap(self.path)
        return TensorDict.load(self.path, verify=self.rng.choice(["fast", "full"]))

    def step(self) -> None:
        """Do something to the store, and the same to the container."""
        if self.form == "a.arena":
            store.seal(self.path)
            self.form = "sealed"
        elif self.form == "sealed":
            self.load_values()
        else:
            getattr(self, self.rng.choice(["save", "append", "load_values", "load_a_part"]))()

    def save(self) -> None:
        self.held = tree(self.rng, self.batch)
        self.held.save(self.path)

    def append(self) -> None:
        if self.form != "a.kd" or not self.batch:
            return
        more = self.held[: self.rng.randint(0, self.batch[0])].clone()
        more.append_to(self.path)
        self.held = cat([self.held, more])
        if self.rng.random() < 0.5:
            store.compact(self.path)

    def load_values(self) -> None:
        other = self.held.clone().zero_()
        other.load_(self.path)
        assert content(other) == content(self.held)

    def load_a_part(self) -> None:
        for key in self.rng.sample(list(self.held.keys()), min(1, len(list(self.held.keys())))):
            part = TensorDict.load(self.path, keys=[key])
            assert content(part) == content(self.held.select(key))

    def damage(self) -> None:
        """Cut a file: an error, or it was not read."""
        files = [self.path] if self.path.is_file() else list(self.path.iterdir())
        file = self.rng.choice([f for f in files if f.stat().st_size])
        file.chmod(0o644)
        with file.open("r+b") as opened:
            opened.truncate(self.rng.randrange(file.stat().st_size))
        try:
            found = self.load()
        except FormatError:
            return
        assert content(found) == content(self.held)


def test_a_store_holds_what_was_put_there(seeds: Seeds, tmp_path: Path) -> None:
    for seed in seeds(60):
        rng = Random(seed)
        torch.manual_seed(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        life = Life(rng, folder)
        for _ in range(rng.randint(0, 4)):
            assert content(life.load()) == content(life.held)
            life.step()
            seeds.count("steps")
        assert content(life.load()) == content(life.held)
        life.damage()
        shutil.rmtree(folder)
