"""Nothing is left behind: objects and bytes per cycle, and what `del` frees at once."""

import gc
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random

import pytest
from tests.fuzz.checking import Call, attempt
from tests.fuzz.conftest import Seeds
from tests.fuzz.modules import EVENTS, inputs, model
from tests.fuzz.registry import OPERATIONS
from tests.fuzz.subjects import subject
from tests.fuzz.test_operations import MODULES
from torch import nn

from kd_core import TensorDictBase

CYCLES = 12
ROUNDS = 8
# A few objects come and go with what Python itself keeps: frames, free lists, interned strings.
OBJECTS = CYCLES // 2
# Of single calls of torch itself, some tens of bytes are counted and never given back.
BYTES = CYCLES * 500


@contextmanager
def without_collection() -> Iterator[None]:
    """Free what is free only by its count of references."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def _apart() -> None:
    """Leave out of all counts, and of each collection, what was there before."""
    gc.collect()
    gc.freeze()


def kept(cycle: Callable[[], object]) -> tuple[int, int]:
    """Return how many objects and bytes more there are after some cycles.

    A leak shows in every round; what Python and torch keep for themselves, such as free lists, does
    not. Rounds go on while there is growth.
    """
    for _ in range(3):
        cycle()
    objects: list[int] = []
    size: list[int] = []
    tracemalloc.start()
    try:
        for number in range(ROUNDS):
            if number > 2 and min(objects) <= OBJECTS and min(size) <= BYTES:
                break
            before = held()
            for _ in range(CYCLES):
                cycle()
            after = held()
            objects.append(after[0] - before[0])
            size.append(after[1] - before[1])
    finally:
        tracemalloc.stop()
    return min(objects), min(size)


def held() -> tuple[int, int]:
    gc.collect()
    return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]


def one_call(seed: int, name: str) -> None:
    """Make a container, do one thing to it, and drop it."""
    rng = Random(seed)
    one = subject(rng)
    call = OPERATIONS[name](rng, one, name)
    attempt(lambda: call.ours(one.td))


def references(holder: object, held: Iterable[object]) -> list[weakref.ref[object]]:
    return [weakref.ref(each) for each in (holder, *held)]


def done(call: Call, td: TensorDictBase) -> None:
    attempt(lambda: call.ours(td))


def test_operations_keep_no_object_and_no_byte(seeds: Seeds) -> None:
    assert MODULES
    names = sorted(OPERATIONS)
    for seed in seeds(20):
        name = Random(seed).choice(names)
        objects, size = kept(lambda seed=seed, name=name: one_call(seed, name))  # type: ignore[misc]  # defaults bind the loop variables
        seeds.count("calls", CYCLES)
        assert (objects > OBJECTS, size > BYTES) == (False, False), (name, objects, size)


def left_by(seed: int) -> str | None:
    """Do one thing to a container and drop it; say what is still alive."""
    rng = Random(seed)
    name = rng.choice(sorted(OPERATIONS))
    one = subject(rng)
    call = OPERATIONS[name](rng, one, name)
    found = references(one.td, one.node.tensors())
    done(call, one.td)
    text = call.text
    del one, call
    alive = [each() for each in found if each() is not None]
    return f"{name}: {text} keeps {len(alive)} objects" if alive else None


def test_dropped_containers_and_their_tensors_are_freed_at_once(seeds: Seeds) -> None:
    with without_collection():
        for seed in seeds(400):
            # Once more: torch keeps the frames of some errors that it raises the first time.
            left = left_by(seed) and left_by(seed)
            seeds.count("calls")
            assert left is None, left


def life(seed: int) -> nn.Module:
    """Return a model after some events."""
    rng = Random(seed)
    made, td = model(rng), inputs()
    for _ in range(3):
        name = rng.choice(list(EVENTS))
        EVENTS[name](made, td)
    return made


@pytest.mark.usefixtures("quiet")
def test_models_keep_no_object_and_no_byte(seeds: Seeds) -> None:
    for seed in seeds(5):
        objects, size = kept(lambda seed=seed: life(seed))  # type: ignore[misc]  # bound in time
        seeds.count("models", CYCLES)
        assert (objects > OBJECTS, size > BYTES) == (False, False), (objects, size)


@pytest.mark.usefixtures("quiet")
def test_dropped_models_and_their_weights_are_freed_at_once(seeds: Seeds) -> None:
    with without_collection():
        for seed in seeds(30):
            made = life(seed)
            found = references(made, made.parameters())
            del made
            seeds.count("models")
            assert [each() for each in found if each() is not None] == []


@pytest.fixture
def quiet() -> Iterator[None]:
    """Let models warn of keys that nobody reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
