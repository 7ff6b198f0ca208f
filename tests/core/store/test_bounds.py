"""Hostile stores cost memory, steps and reads in proportion to their bytes, whatever they say."""

import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.core.store.forging import LEAF, Fault, body_of, forged_text, level, nested

from kd_core import FormatError, TensorDict, store
from kd_core._store import files
from kd_core._store.segments import BLOCK

COUNT = 500
ONE = level(batch=[1])


def many() -> list[str]:
    """Return many keys."""
    return [f"k{number}" for number in range(COUNT)]


def data(value: object, **more: object) -> object:
    return {"data": {"constant": False, "of_batch": True, "value": value, **more}}


def tensor(*sizes: int, name: str = "t0") -> object:
    return {"tensor": [0, name, "int64", sizes]}


def ragged(key: str) -> object:
    return [key, {"jagged": [LEAF, LEAF, None, 1]}]


TREES: dict[str, object] = {
    "parts": {"cat": [ONE] * COUNT},
    "members": {"lazy": {"dim": 0, "name": None, "members": [ONE] * COUNT}},
    "dimensions": level(batch=[1] * COUNT),
    "names": {"td": {"batch": [1] * COUNT, "names": many(), "entries": []}},
    "rows of a batch": level(["a", data(1)], batch=[2**40]),
    "a batch of its own": level(["a", data(1, batch=[2**40])]),
    "long value": level(["a", data("v" * 100_000)]),
    "values": level(["a", data([{"d": [["a", 1]]}] * COUNT)]),
    "large batch": level(batch=[2**62] * 3),
    "many containers": level(*[[key, level()] for key in many()]),
}
WITH_A_TENSOR: dict[str, object] = {
    "many entries": level(*[[key, LEAF] for key in many()]),
    "one key": level(*[["a", LEAF]] * COUNT),
    "long key": level(["k" * 100_000, LEAF]),
    "long name": level(["a", tensor(2, 2, name="t" * 100_000)]),
    "huge size": level(["a", tensor(2**62)]),
    "digits": level(["a", tensor(10**4000)]),
    "dimensions of a tensor": level(["a", tensor(*[1] * COUNT)]),
    "ragged": level(*map(ragged, many()), batch=[1]),
    "parts of one tensor": {"cat": [level(["a", LEAF], batch=[2])] * COUNT},
    "rows of one tensor": level(*[[key, {"rows": {"values": LEAF}}] for key in many()], batch=[2]),
}
FIELD = '"entries":[]'
TEXTS = {
    "64 deep": nested(63, level()),
    "65 deep": nested(65, level()),
    "100 000 deep": nested(100_000, level()),
    "parts in parts": '{"cat":[' * 50_000 + "]}" * 50_000,
    "field twice": f'{{"td":{{"batch":[],{",".join([FIELD] * COUNT)}}}}}',
}
ALL = {
    **{name: (json.dumps(tree), False) for name, tree in TREES.items()},
    **{name: (json.dumps(tree), True) for name, tree in WITH_A_TENSOR.items()},
    **{name: (text, False) for name, text in TEXTS.items()},
}


class Cost(NamedTuple):
    """What an act took."""

    memory: int
    """The bytes that Python held at once."""
    steps: int
    """The calls and returns of functions."""
    read: int
    """The bytes that were asked of files."""


def cost_of(act: Callable[[Path], object], path: Path) -> Cost:
    """Run an act that may be refused."""
    steps = read = 0
    real = files.read

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    def counted(file: files.OpenFile, start: int, count: int) -> bytes:
        nonlocal read
        content = real(file, start, count)
        read += len(content)
        return content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "read", counted)
        tracemalloc.start()
        sys.setprofile(count)
        try:
            act(path)
        except Fault:
            pass
        finally:
            sys.setprofile(None)
            memory = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    return Cost(memory, steps, read)


@pytest.mark.parametrize("name", ALL)
def test_a_hostile_tree_costs_what_its_bytes_do(name: str, tmp_path: Path) -> None:
    text, has_tensor = ALL[name]
    TensorDict({"a": torch.arange(4).view(2, 2)} if has_tensor else {}).save(tmp_path)
    body = json.dumps(body_of(tmp_path) | {"tree": None})
    forged_text(tmp_path, body.replace('"tree": null', f'"tree": {text}'))
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    for act in (TensorDict.load, store.inspect, store.compact):
        check_cost(cost_of(act, tmp_path), size)


def check_cost(found: Cost, size: int) -> None:
    """Check what a store of some bytes took."""
    assert found.memory <= 64 * size + 64_000 + BLOCK
    assert found.steps <= 4 * size + 1000
    assert found.read <= 3 * size


def test_a_file_that_says_it_is_larger_than_it_is_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    for length in (2**63, 10**8, 9):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(FormatError, match="is not a file of safetensors"):
            TensorDict.load(path)
        assert cost_of(TensorDict.load, path).memory < 16_000


def test_a_tensor_that_is_not_in_the_file_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    for count in (2**60, 2**70):
        row = {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}
        header = json.dumps({"a": row}).encode().ljust(120)
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(FormatError, match=r"must have \d+ bytes, got 128"):
            TensorDict.load(path)
        check_cost(cost_of(TensorDict.load, path), len(header))
