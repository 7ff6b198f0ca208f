"""Several entries stored at once, beside `assign` one key after the other."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, TensorDictBase

BATCH = 3
KEYS: tuple[NestedKey, ...] = (
    "a",
    "b",
    "next",
    ("next", "a"),
    ("next", "b"),
    ("next", "b", "c"),
    ("other", "a"),
    ("a", "b"),
    ("a",),
)


class Marked(str):
    """A key of another class."""

    __slots__ = ()


class Slow(TensorDict):
    """Overrides a primitive, so that every write passes it."""

    def _set_entry(self, key: str, value: object) -> None:
        super()._set_entry(f"{key}!", value)  # type: ignore[arg-type]  # what it was called with


def random_entries(rng: random.Random) -> dict[NestedKey, object]:
    """Return some entries, most of which fit."""
    entries: dict[NestedKey, object] = {}
    for key in rng.sample(KEYS, rng.randrange(1, 5)):
        value: object = torch.rand(BATCH, rng.randrange(1, 3))
        odd = rng.random()
        if odd < 0.05:
            value = torch.rand(())
        elif odd < 0.1:
            value = nn.Parameter(torch.rand(BATCH))
        elif odd < 0.15:
            value = rng.choice([1.0, "text", {"c": torch.rand(BATCH)}, TensorDict({}, [BATCH])])
        elif odd < 0.2 and isinstance(key, str):
            key = Marked(key)
        entries[key] = value
    return entries


def random_container(rng: random.Random) -> TensorDict:
    """Return a container with some of the keys."""
    td = TensorDict({}, [BATCH])
    for key in ("a", ("next", "a"), ("next", "c"), ("other", "z")):
        if rng.random() < 0.4:
            td.set(key, torch.rand(BATCH))
    if rng.random() < 0.1:
        td.lock_()
    elif rng.random() < 0.1 and "next" in td:
        td.nested("next", TensorDict).lock_()
    elif rng.random() < 0.1:
        return td.to("cpu")
    return td


def state_of(td: TensorDictBase) -> list[object]:
    """Return keys in their order, and what is stored there."""
    return [(key, *seen(value)) for key, value in td.items()]


def seen(value: object) -> tuple[object, ...]:
    if isinstance(value, TensorDictBase):
        return type(value), state_of(value)
    return type(value), id(value) if isinstance(value, Tensor) else None


def outcome(td: TensorDict, entries: dict[NestedKey, object]) -> object:
    try:
        td.assign(entries)
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        return type(error), str(error), state_of(td)
    return state_of(td), td._nested


def test_random_entries_are_stored_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    kinds = set()
    for _ in range(3000):
        td, entries = random_container(rng), random_entries(rng)
        twin = td.clone(False)
        if td.is_locked:
            twin.lock_()
        elif "next" in td and td.nested("next", TensorDict).is_locked:
            twin.nested("next", TensorDict).lock_()
        ours = outcome(td, entries)
        with monkeypatch.context() as patch:
            patch.setattr(TensorDict, "_set_levels", lambda *_: False)
            theirs = outcome(twin, entries)
        assert ours == theirs, (entries, ours, theirs)
        kinds.add(isinstance(ours, tuple) and len(ours))
    assert kinds == {2, 3}  # some are stored, others refused


def test_a_subclass_that_overrides_a_primitive_sees_each_write() -> None:
    value = torch.rand(BATCH)
    slow = Slow({}, [BATCH]).assign({"a": value, ("next", "b"): value})
    assert set(slow.keys()) == {"a!", "next!"}


def test_levels_that_are_there_keep_their_container() -> None:
    td = TensorDict({"next": {"a": torch.zeros(BATCH)}}, [BATCH])
    level, value = td.nested("next", TensorDict), torch.rand(BATCH)
    td.assign({("next", "b"): value, "c": value})
    assert td.nested("next", TensorDict) is level
    assert list(td.keys(True, True)) == [("next", "a"), ("next", "b"), "c"]
