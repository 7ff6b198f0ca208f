"""Containers on a server of Redis, which this file starts."""

import itertools
import pickle
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.content import assert_same

from kd_core import (
    InvalidValue,
    LazyStackedTensorDictStore,
    Locked,
    NonTensorStack,
    TensorDict,
    TensorDictStore,
    lazy_stack,
)

redis: Any = pytest.importorskip("redis")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    program = shutil.which("redis-server")
    assert program, "install redis-server"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    folder: Path = tmp_path_factory.mktemp("redis")
    command = [program, "--port", str(port), "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        client = redis.Redis(port=port)
        for _ in itertools.count():
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert server.poll() is None
                time.sleep(0.05)
        yield port
        server.terminate()


def sample() -> TensorDict:
    inner = {"b": torch.zeros(3), "": torch.ones(3, 0), "x/y": torch.ones(3, dtype=torch.bool)}
    leaves = {
        "a": torch.arange(6.0).view(3, 2),
        "n": inner,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "word": "w",
        "rows": NonTensorStack("x", "y", "z"),
    }
    return TensorDict(leaves, [3])


@pytest.fixture
def stored(port: int) -> TensorDictStore:
    made = sample().to_store(port=port)
    assert isinstance(made, TensorDictStore)
    return made


def again(td: TensorDictStore, port: int) -> TensorDictStore:
    return TensorDictStore.from_store(td_id=td.td_id, port=port)


def test_it_holds_what_was_sent(stored: TensorDictStore, port: int) -> None:
    for td in (stored, again(stored, port), pickle.loads(pickle.dumps(stored))):
        assert type(td) is TensorDictStore
        assert_same(td.to_local(), sample())
        assert list(td.keys()) == list(sample().keys())


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td["a"].fill_(7),
        lambda td: td["a"][1:].zero_(),
        lambda td: td["a"].T[0].zero_(),
        lambda td: td.set("a", torch.ones(3, 2)),
        lambda td: td.set("a", torch.ones(3, 5)),
        lambda td: td.set_("a", torch.ones(3, 2)),
        lambda td: td.set_at_("a", torch.ones(2), 1),
        lambda td: td.__setitem__(0, td[2]),
        lambda td: td.__setitem__(("n", "new"), torch.ones(3)),
        lambda td: td.__setitem__(("new", "deep", "k"), torch.ones(3)),
        lambda td: td.get("n").update({"b": torch.ones(3)}),
        lambda td: td.update_({"a": torch.ones(3, 2)}),
        lambda td: td.exclude("word", "rows").zero_(),
        lambda td: td.del_("a"),
        lambda td: td.set("a", TensorDict({"k": torch.ones(3)}, [3])),
        lambda td: td.set("n", torch.ones(3)),
        lambda td: td.set("word", "another"),
        lambda td: td[1:]["a"].fill_(3),
    ],
)
def test_a_write_is_sent(
    write: Callable[[Any], object], stored: TensorDictStore, port: int
) -> None:
    expected = sample()
    write(expected)
    write(stored)
    assert_same(stored.to_local(), expected)
    assert_same(again(stored, port).to_local(), expected)


def test_writers_of_other_rows_do_not_disturb(stored: TensorDictStore, port: int) -> None:
    mine, other = stored["a"], again(stored, port)["a"]
    mine[0].fill_(8)
    other[2].fill_(9)
    assert stored["a"].tolist() == [[8, 8], [2, 3], [9, 9]]


def test_locks_and_results(stored: TensorDictStore) -> None:
    stored.lock_()
    with pytest.raises(Locked):
        stored["new"] = torch.ones(3)
    stored.unlock_()
    for made in (stored[1:], stored + 0, stored.clone(), torch.stack([stored, stored])):  # type: ignore[list-item]  # torch takes containers
        assert type(made) is TensorDict  # type: ignore[comparison-overlap, unreachable]  # types say less than the run
    with pytest.raises(InvalidValue, match="must be a dense tensor"):
        stored["s"] = torch.eye(3).to_sparse()
    stored.clear_redis()
    assert stored.is_empty()
    stored.close()


def test_a_stack_of_members_of_different_shapes(port: int) -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (2, 3)])
    made = stack.to_store(port=port)
    assert isinstance(made, LazyStackedTensorDictStore)
    made[0]["a"].fill_(5)
    made[1] = TensorDict({"a": torch.zeros(3)})
    same = LazyStackedTensorDictStore.from_store(td_id=made.td_id, port=port)
    assert [member["a"].tolist() for member in same.to_local().unbind(0)] == [[5, 5], [0, 0, 0]]
    assert type(pickle.loads(pickle.dumps(made))) is LazyStackedTensorDictStore
    made.clear_redis()
    made.close()
