"""Random programs of locks: what is locked, and what may be unlocked, in both libraries."""

import gc
from random import Random
from typing import Any

import pytest
import torch
from tests.fuzz.conftest import Seeds

import kd_core

tensordict = pytest.importorskip("tensordict")


class Locks:
    """The containers of one library: some in others, some in several, some gone."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.alive: dict[int, Any] = {}

    def run(self, event: str, new: int, *ids: int) -> str:
        """Run an event; return what came of it, and what is locked."""
        told = "ok"
        try:
            self._run(event, new, *(self.alive[each] for each in ids))
        except RuntimeError as error:
            told = "Locked" if "lock" in str(error) else "refused"
        if event == "drop":
            del self.alive[ids[0]]
            gc.collect()
        return f"{told} {[(name, each.is_locked) for name, each in sorted(self.alive.items())]}"

    def _run(self, event: str, new: int, *given: Any) -> None:
        if event == "make":
            self.alive[new] = self.lib.TensorDict({"x": torch.zeros(2)}, [2])
        elif event == "nest":
            self.alive[new] = self.lib.TensorDict(dict(zip("ab", given, strict=False)), [2])
        elif event == "set":
            given[0]["y"] = torch.ones(given[0].batch_size)
        elif event == "delete":
            given[0].pop("a", None)
        elif event == "within":
            with given[0].unlock_():
                given[0]["z"] = torch.zeros(given[0].batch_size)
        elif event in ("lock_", "unlock_", "clone"):
            made = getattr(given[0], event)()
            if event == "clone":
                self.alive[new] = made


def program(rng: Random) -> list[tuple[Any, ...]]:
    """Return the events of a program, each with the numbers of its containers."""
    events: list[tuple[Any, ...]] = [("make", 0), ("make", 1), ("nest", 2, 0), ("nest", 3, 2, 1)]
    alive = [0, 1, 2, 3]
    for new in range(4, 24):
        event = rng.choice(["nest", "lock_", "lock_", "unlock_", "unlock_", "set", "delete"])
        event = rng.choice([event, event, "drop", "clone", "within", "make"])
        ids = [rng.choice(alive)]
        if event == "nest":
            ids += [rng.choice(alive)][: rng.randint(0, 1)]
            if ids[-1] in ids[:-1]:
                ids.pop()
        elif event == "make":
            ids = []
        elif event == "drop":
            alive.remove(ids[0])
        events.append((event, new, *ids))
        if event in ("nest", "make", "clone"):
            alive.append(new)
        if not alive:
            break
    return events


def test_random_programs_of_locks_do_the_same(request: pytest.FixtureRequest) -> None:
    seeds = Seeds(request.node.name)
    for seed in seeds(200):
        ours, theirs = Locks(kd_core), Locks(tensordict)
        events = program(Random(seed))
        for count, event in enumerate(events, 1):
            found, want = ours.run(*event), theirs.run(*event)
            if want.startswith("Locked") and found.startswith("Locked") and found != want:
                break  # an unlock that the peer refused has locked what was not locked
            seeds.count("events", 1)
            assert found == want, "\n".join(map(str, [*events[:count], found, want]))
