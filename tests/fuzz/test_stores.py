"""Random lives of stores: what is loaded is what was saved, and damage is an error."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.stored_trees import Shape, content, tree

from kd_core import FormatError, TensorDict, TensorDictBase, cat, store


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
