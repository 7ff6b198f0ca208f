"""The single file form, and files of safetensors of other origins."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.core.content import assert_same
from tests.core.store.faults import calls, is_raised, names_in
from tests.core.store.trees import trees

from kd_core import (
    FormatError,
    KeyNotFound,
    TensorDict,
    TensorDictBase,
    from_safetensors,
    store,
    to_safetensors,
)
from kd_core._store import files


@settings(max_examples=25, deadline=None)
@given(td=trees())
def test_a_tree_comes_back_as_it_was(
    td: TensorDictBase, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    td.save(path)
    assert_same(TensorDictBase.load(path, verify="full"), td)
    with safe_open(path, "pt") as file:  # the library reads whatever we write
        assert sorted(file.keys()) == sorted(load_file(path))


def test_other_tools_see_keys(tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    td = TensorDict({"n": {"a": torch.arange(3), "b.c": torch.ones(2)}, "\0": torch.zeros(1)})
    td.save(path)
    found = load_file(path)
    assert sorted(found) == ["n.a", "n.b.c", "t2"]
    assert found["n.a"].tolist() == [0, 1, 2]


def test_names_of_tensors_never_collide(tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    td = TensorDict({"a.b": 1.0, "a": {"b": 2.0}, "t2": 3.0, "": 4.0, "__metadata__": 5.0})
    td.save(path)
    assert_same(TensorDict.load(path), td)
    assert len(load_file(path)) == 5


def test_files_of_other_origins_are_flat(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    tensors = {"a": torch.arange(3), "b.c": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(tensors, path, metadata={"format": "pt", "note": "é"})
    loaded = TensorDict.load(path)
    assert_same(loaded, TensorDict(tensors))
    assert list(TensorDict.load(path, keys=["b.c"]).keys()) == ["b.c"]
    with pytest.raises(KeyNotFound, match="key `x` not found"):
        TensorDict.load(path, keys=["x"])


def test_a_save_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    TensorDict({"a": torch.ones(3)}).save(path)
    old = TensorDict.load(path)
    TensorDict({"b": torch.zeros(3)}).save(path)
    assert old["a"].tolist() == [1, 1, 1]
    assert list(TensorDict.load(path).keys()) == ["b"]
    assert [each.name for each in tmp_path.iterdir()] == ["td.safetensors"]


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    left = tmp_path / f".td.safetensors.tmp-{'0' * 32}"
    others = [
        tmp_path / f".other.safetensors.tmp-{'0' * 32}",
        tmp_path / ".td.safetensors.tmp-mine",
    ]
    for each in (left, *others):
        each.write_bytes(b"x")
    TensorDict({"a": 1.0}).save(path)
    assert not left.exists()
    assert all(each.exists() for each in others)


def test_a_sweep_between_creation_and_lock_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, swept = tmp_path / "td.safetensors", files.lock, list[str]()

    def late(descriptor: int, *, wait: bool) -> None:
        if not swept:
            [left] = tmp_path.glob(".td.safetensors.tmp-*")
            swept.append(left.name)
            left.unlink()
        lock(descriptor, wait=wait)

    monkeypatch.setattr(files, "lock", late)
    TensorDict({"a": 1.0}).save(path)
    assert swept
    assert TensorDict.load(path, verify="full")["a"] == 1
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 9, b"\x02" + b"\0" * 7 + b"[]"])
def test_what_is_not_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"safetensors|must be an object"):
        TensorDict.load(path)


def test_names_of_other_tools_become_nested_keys(tmp_path: Path) -> None:
    path = tmp_path / "other.st"
    save_file({"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)}, path)
    td = from_safetensors(path, separator=".")
    assert td["layer", "weight"].shape == (2, 3)
    assert not td.is_locked
    assert list(from_safetensors(path).keys()) == ["layer.bias", "layer.weight"]
    to_safetensors(td, path)
    assert_same(from_safetensors(path), td)


def passes_of(save: Callable[[], object]) -> int:
    """Return how often a save takes its data."""
    ends = list[bool]()
    with store.progress(lambda done, total: ends.append(done == total)):
        save()
    return sum(ends)


def test_data_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    td = TensorDict({"a": torch.arange(3000), "b": torch.arange(30).view(5, 6).T})
    assert passes_of(partial(td.save, path)) == 1
    assert_same(TensorDict.load(path, verify="full"), td)


def test_checksums_with_more_or_fewer_digits_than_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("segments", "single"):
        monkeypatch.setattr(f"kd_core._store.{module}.BLOCK", 64)
    path, passes = tmp_path / "td.safetensors", list[int]()
    for length in range(64):
        td = TensorDict({"k" * length: torch.arange(800) * length, "note": "n" * (length % 7)})
        passes.append(passes_of(partial(td.save, path)))
        assert_same(TensorDict.load(path, verify="full"), td)
    assert set(passes) == {1, 2}
    assert passes.count(2) < 16


def test_a_header_that_moves_the_data_leaves_nothing_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, td = tmp_path / "td.safetensors", TensorDict({"a": torch.arange(20)})
    td.save(path)
    expected = path.read_bytes()
    likely = Mock(return_value=[10**200])
    monkeypatch.setattr("kd_core._store.single._likely_checksums", likely)
    assert passes_of(partial(td.save, path)) == 2
    assert path.read_bytes() == expected


def test_a_failure_at_any_call_of_a_second_pass_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, old, new = tmp_path / "td.safetensors", TensorDict({"a": 1.0}), TensorDict({"b": 2.0})
    old.save(path)
    monkeypatch.setattr("kd_core._store.single._likely_checksums", Mock(return_value=[10**200]))
    seen = list[str]()
    for at in range(1, 20):
        with calls(at, OSError(errno.EIO, "injected")) as made:
            raised = is_raised(partial(new.save, path))
        seen += made.names[at - 1 : at]
        if "rename" in made.names[: at - 1]:
            break
        assert raised
        assert_same(TensorDict.load(path, verify="full"), old)
        assert names_in(tmp_path) == [path.name]
    assert_same(TensorDict.load(path, verify="full"), new)
    assert seen.count("truncate") == 1


@pytest.mark.parametrize("name", ["td.safetensors", "td.kd"])
def test_a_save_that_is_not_durable_does_not_wait_for_the_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    td = TensorDict({"a": torch.arange(3)}, [3])
    td.save(tmp_path / name)
    waits: list[int] = []
    monkeypatch.setattr(os, "fsync", waits.append)
    (td + 1).save(tmp_path / name, durable=False)
    assert not waits
    loaded = TensorDict.load(tmp_path / name, verify="full")
    assert loaded["a"].tolist() == [1, 2, 3]
    td.save(tmp_path / name)
    assert waits
