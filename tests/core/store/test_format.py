"""Stores of format version 1 stay readable, here and by a reader that follows the description."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.core.content import assert_same
from tests.core.store import described
from tests.core.store.trees import trees

from kd_core import MetaData, TensorDict, TensorDictBase, cat, lazy_stack, store

DATA = Path(__file__).with_name("data")


def rows(start: int) -> TensorDict:
    leaf = torch.arange(start, start + 2)
    tokens = [torch.arange(size) for size in (1, 3)]
    inner = {
        "../x": leaf.to(torch.bfloat16),
        "": leaf.to(torch.complex128) * 1j,
        "word": [f"w{start}", {"p": float("-inf"), "q": (b"\0", None)}],
    }
    entries = {
        "a": leaf.view(2, 1),
        "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
        "n": inner,
        "unit": MetaData("m"),
        "none": torch.zeros(2, 0, dtype=torch.float8_e5m2),
    }
    return TensorDict(entries, [2], names=["row"])


def stack() -> TensorDictBase:
    return lazy_stack([TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.zeros(2), "y": 1})])


def write() -> None:
    """Write the files of this test anew; a file of a released version must never change."""
    for start in (0, 7):
        rows(start).append_to(DATA / "v1" / "rows.kd")
    stack().save(DATA / "v1" / "stack.safetensors")


def test_rows_of_version_1_are_read() -> None:
    loaded = TensorDict.load(DATA / "v1" / "rows.kd", verify="full")
    expected = cat([rows(0), rows(7)])
    assert_same(loaded.exclude("tokens"), expected.exclude("tokens"))
    assert loaded.names == ["row"]
    assert [row.tolist() for row in loaded["tokens"].unbind()] == [[0], [0, 1, 2]] * 2


def test_a_file_of_version_1_is_read() -> None:
    loaded = TensorDictBase.load(DATA / "v1" / "stack.safetensors", verify="full")
    assert_same(loaded, stack())
    assert loaded[1]["y"] == 1


def read(node: Any) -> Any:
    """Return a node as what it holds, of some kinds."""
    [(kind, value)] = node.items()
    if kind == "td":
        return {key: read(inner) for key, inner in value["entries"]}
    if kind == "rows":
        return json.loads(read(value["values"]))
    return value[0] if kind == "tensor" else value


def test_the_description_is_enough_to_read_version_1(tmp_path: Path) -> None:
    shutil.copytree(DATA / "v1" / "rows.kd", tmp_path, dirs_exist_ok=True)
    (tmp_path / ".lock").touch()
    first, second = map(read, described.read_directory(tmp_path)["cat"])
    assert first["a"] == struct.pack("<2q", 0, 1)
    assert second["n"][""] == struct.pack("<4d", 0, 7, 0, 8)
    odd = {"d": [["p", {"f": "-inf"}], ["q", {"t": [{"b": "AA=="}, None]}]]}
    assert second["n"]["word"] == ["w7", odd]
    assert first["unit"]["value"] == "m"


@settings(deadline=None, max_examples=40)
@given(td=trees())
def test_the_description_is_enough_to_read_and_write_stores(
    td: TensorDictBase, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("stores")
    td.save(path / "td")
    td.save(path / "td.safetensors")
    td.memmap(path / "arena")
    tree = described.read_directory(path / "td")
    assert described.read_file(path / "td.safetensors") == tree
    assert described.read_directory(path / "arena") == tree
    described.write_directory(path / "other", [tree])
    described.write_file(path / "other.safetensors", tree)
    described.write_directory(path / "other.arena", [tree], sealed=False)
    for name in ("other", "other.safetensors"):
        assert_same(TensorDictBase.load(path / name, verify="full"), td)
    assert_same(TensorDictBase.load_memmap(path / "other.arena"), td)
    store.seal(path / "other.arena")
    assert described.read_directory(path / "other.arena") == tree


def test_the_description_is_enough_to_append(tmp_path: Path) -> None:
    for start in (0, 7):
        rows(start).append_to(tmp_path / "td")
    parts = described.read_directory(tmp_path / "td")["cat"]
    described.write_directory(tmp_path / "other", parts)
    for path in (tmp_path / "td", tmp_path / "other"):
        rows(9).append_to(path)
        store.compact(path)
        store.compact(path)  # so that what was replaced is removed
    assert described.read_directory(tmp_path / "other") == described.read_directory(tmp_path / "td")
