"""Containers go through the object store of Ray, and between its actors."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.core.content import assert_same
from tests.core.store.trees import trees

from kd_core import TensorDict, TensorDictBase, cat

ray: Any = pytest.importorskip("ray")

from examples.actors.collectors import Collector  # noqa: E402  # they import ray
from examples.actors.engines import Actor, Here  # noqa: E402  # as above
from examples.actors.objects import Stored, get, look, put  # noqa: E402  # as above
from examples.actors.replay import train  # noqa: E402  # as above
from examples.learning.sac import build_actor  # noqa: E402  # isort keeps them together

STORE = 100 << 20
"""How many bytes the object store holds."""


@pytest.fixture(scope="module")
def spilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Ray puts what its store does not hold."""
    return tmp_path_factory.mktemp("spilled")


@pytest.fixture(scope="module", autouse=True)
def cluster(spilled: Path) -> Iterator[None]:
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=STORE,
        object_spilling_directory=str(spilled),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


class Worker:
    """What runs in an actor."""

    def __init__(self) -> None:
        self.kept = TensorDict()

    def double(self, td: TensorDictBase) -> TensorDictBase:
        return td * 2

    def keep(self, stored: Any) -> list[str]:
        self.kept = look(stored)
        return sorted(self.kept.keys())

    def first(self) -> float:
        return float(self.kept["a"].flatten()[0])

    def make(self, size: int) -> TensorDictBase:
        return TensorDict({"x": torch.zeros(size)})


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return [ray.remote(Worker).remote() for _ in range(2)]


def batch() -> TensorDict:
    entries = {
        "a": torch.arange(12.0).reshape(6, 2),
        "n": {"b": torch.arange(6), "w": list("abcdef")},
    }
    return TensorDict(entries, [6], names=["row"])


@settings(max_examples=60, deadline=None)
@given(trees())
def test_a_random_tree_comes_back(td: TensorDictBase) -> None:
    assert_same(ray.get(ray.put(td)), td)
    stored = put(td)
    for made in (get(stored), look(stored)):
        assert_same(made, td)


def test_one_object_for_each_dtype_is_read_where_it_lies() -> None:
    header, references = put(batch())
    assert len(references) == 3  # floats, integers, the bytes of words
    views = [look(Stored((header, references))) for _ in range(2)]
    assert views[0]["a"].data_ptr() == views[1]["a"].data_ptr()
    own = get(Stored((header, references)))
    own["a"].zero_()
    assert_same(views[0], batch())


def test_rows_and_columns_go_to_several_actors(workers: list[Any]) -> None:
    td = batch()
    parts = td.chunk(2)
    answers = [each.double.remote(part) for each, part in zip(workers, parts, strict=True)]
    assert_same(cat(ray.get(answers)), td.set("a", td["a"] * 2).set(("n", "b"), td["n", "b"] * 2))
    columns = batch().split_keys(["a"], [("n", "b")])
    answers = [each.double.remote(part) for each, part in zip(workers, columns, strict=False)]
    first, second = ray.get(answers)
    assert torch.equal(first["a"], batch()["a"] * 2)
    assert torch.equal(second["n", "b"], batch()["n", "b"] * 2)


def test_actors_look_at_the_same_memory(workers: list[Any]) -> None:
    stored = put(batch().set("a", torch.full((6, 2), 5.0)))
    assert ray.get([each.keep.remote(stored) for each in workers]) == [["a", "n"]] * 2
    assert ray.get([each.first.remote() for each in workers]) == [5.0, 5.0]


def test_more_than_the_store_holds_passes_through_it(workers: list[Any], spilled: Path) -> None:
    """At most four containers are on their way: Ray has nothing to put on the disk."""
    size, total, ahead = 8 << 20, 0, deque[Any]()
    for number in range(24):
        ahead.append(workers[number % 2].make.remote(size // 4))
        if len(ahead) == 4:
            total += ray.get(ahead.popleft())["x"].nbytes
    total += sum(ray.get(each)["x"].nbytes for each in ahead)
    assert total == 24 * size > STORE
    assert not [path for path in spilled.rglob("*") if path.is_file()]


def test_a_program_computes_what_it_computes_in_one_process() -> None:
    policy, history = train(Actor, 2)
    expected_policy, expected_history = train(Here, 2)
    assert history == expected_history
    for mine, expected in zip(policy.parameters(), expected_policy.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_weights_of_an_older_version_are_refused_by_all_later_calls() -> None:
    collector = Actor(Collector, 0)
    weights = TensorDict.from_module(build_actor()).data.to(torch.bfloat16)
    _, references = put(weights)
    assert len(references) == 1
    collector.ask("load", 1, weights)
    collector.ask("load", 1, weights)
    with pytest.raises(ValueError, match="version 1 must be newer than 1"):
        collector.ask("collect", 1)()
