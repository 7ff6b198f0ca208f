"""The keys that a sequence says follow every change of its steps.

After a direct write into `_modules` of a list of steps, keys are first read as a call reads them.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.key_edits import EDITS, World, expected

from kd_nn import TensorDictModule, TensorDictSequential
from kd_nn._dispatch import keys_of


def check(world: World) -> int:
    """Compare some of the modules with what is expected of them; return how many."""
    found = [module for module in world.readable() if world.rng.random() < 0.7]
    for module in found:
        if module in world.doubtful:
            world.doubtful.remove(module)
            read = tuple(list(keys_of(module, name)) for name in ("in_keys", "out_keys"))
            assert read == expected(module), (world.history, module)
        said = (module.in_keys, module.out_keys)
        assert said == expected(module), (world.history, module)
    return len(found)


def test_keys_are_those_of_the_steps_of_the_moment(seeds: Seeds) -> None:
    for seed in seeds(50):
        world = World(random.Random(seed))
        for _ in range(20):
            seeds.count("reads", check(world) + check(world))
            edit = world.rng.choice(EDITS)
            world.history.append(edit.__name__)
            edit(world)
            seeds.count(edit.__name__)


@pytest.fixture
def switching() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def edits_of(model: TensorDictSequential) -> list[Callable[[], object]]:
    """Return edits of which each changes one of three keys, through all of `ALLOWED`."""
    steps = [[TensorDictModule(torch.neg, [f"{k}{on}"], [f"y{k}"]) for on in (0, 1)] for k in "abc"]
    inner = model[1]
    assert isinstance(inner, TensorDictSequential)

    def first(on: int) -> None:
        model[0].in_keys = [f"a{on}"]

    def second(on: int) -> None:
        inner.module[0] = steps[1][on]  # type: ignore[index]  # a list here

    def third(on: int) -> None:
        model.module[2] = steps[2][on]  # type: ignore[index]  # a list here

    turns = [(first, 0), (second, 0), (third, 0), (first, 1), (second, 1), (third, 1)]
    return [lambda edit=edit, on=on: edit(on) for edit, on in turns]  # type: ignore[misc]  # bound in time


ALLOWED = {"111", "011", "001", "000", "100", "110"}


def read_until(done: threading.Event, model: TensorDictSequential, wrong: list[object]) -> None:
    while not done.is_set():
        try:
            keys = model.in_keys
        except Exception as error:
            wrong.append(error)
            return
        if "".join(str(key)[1] for key in keys) not in ALLOWED:
            wrong.append(keys)


def test_keys_read_while_another_thread_edits_are_of_one_moment(
    seeds: Seeds, switching: None
) -> None:
    for _ in seeds(1):
        a, b, c = (TensorDictModule(torch.neg, [f"{k}1"], [f"y{k}"]) for k in "abc")
        model = TensorDictSequential(a, TensorDictSequential(b), c)
        wrong: list[object] = []
        done = threading.Event()
        given = (done, model, wrong)
        threads = [threading.Thread(target=read_until, args=given) for _ in range(2)]
        for thread in threads:
            thread.start()
        edits = edits_of(model)
        for number in range(600):
            edits[number % 6]()
            if number % 6 == 5:
                assert model.in_keys == ["a1", "b1", "c1"]
        done.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        seeds.count("edits", 600)
