"""Directories of the layout of tensordict are written where the drop-in asks for them."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.core.content import assert_same
from tests.core.store.faults import CHANGING, calls, names_in
from torch import Tensor

from kd_core import (
    InvalidValue,
    KeyCollision,
    MetaData,
    NonTensorStack,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from kd_core._switches import set_files_of_tensordict


@pytest.fixture(autouse=True)
def files_of_tensordict() -> Iterator[None]:
    set_files_of_tensordict(True)
    yield
    set_files_of_tensordict(False)


class Pair(TensorClass):
    a: Tensor
    s: str


def sample() -> TensorDict:
    members = [TensorDict({"x": torch.ones(3) * n}, device="cpu") for n in range(2)]
    return TensorDict(
        {
            "a": torch.arange(4.0).view(2, 2),
            "n": {"b c/%": torch.ones(2, dtype=torch.bfloat16), "e": {}, "": torch.zeros(2, 0)},
            "p": Pair(a=torch.ones(2), s="word", batch_size=[2]),
            "l": lazy_stack(members),
            "j": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]),
            "w": NonTensorStack("u", None),
            "m": MetaData("m", batch_size=[2]),
        },
        [2],
        names=["time"],
        device="cpu",
    )


@pytest.mark.parametrize("call", ["memmap", "memmap_", "save"])
def test_what_is_written_is_loaded(call: str, tmp_path: Path) -> None:
    path = tmp_path / "above" / "td"
    made = getattr(sample(), call)(path)
    names = {"a.memmap", "j.memmap", "j.shape.memmap", "l", "m", "meta.json", "n", "p", "w"}
    assert set(names_in(path)) == names
    assert (path / "n" / "b%20c%2F%25.memmap").stat().st_size == 4
    for each in (made, TensorDict.load(path), TensorDict.load_memmap(path)):
        assert_same(each.exclude("j"), sample().exclude("j"))
        assert [row.sum() for row in each["j"].unbind()] == [6, 0]
    if call != "save":
        assert made.is_memmap()
        assert made.saved_path == path
        made["a"].fill_(7)
        assert TensorDict.load(path)["a"].sum() == 28


def test_what_was_there_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "td"
    mapped = lazy_stack([TensorDict(a=torch.ones(2), n={"b": n}) for n in range(3)]).memmap(path)
    (path / "own.txt").write_text("mine")
    lazy_stack([TensorDict(c=torch.ones(2)) for _ in range(2)]).memmap(path)
    assert names_in(path) == ["0", "1", "meta.json", "own.txt"]
    assert names_in(path / "0") == ["c.memmap", "meta.json"]
    assert mapped["n", "b"].tolist() == [0, 1, 2]
    TensorDict(c=torch.zeros(2)).save(path)
    assert names_in(path) == ["c.memmap", "meta.json", "own.txt"]


def test_the_same_structure_is_opened_by_memmap_like(tmp_path: Path) -> None:
    path = tmp_path / "td"
    TensorDict(a=torch.ones(2), n={"b": 1}).expand(3).memmap_like(path)["n", "b"].fill_(4)
    again = TensorDict(a=torch.ones(2), n={"b": 1}).expand(3).memmap_like(path)
    assert again["n", "b"].tolist() == [4, 4, 4]
    assert again["a"].sum() == 0
    with pytest.raises(InvalidValue, match="another structure"):
        TensorDict(a=torch.ones(2), n={"b": 1}).expand(4).memmap_like(path)


@pytest.mark.parametrize(
    "td",
    [
        TensorDict(t=MetaData((1, 2))),
        TensorDict(b=MetaData(b"octets")),
        TensorDict(x=MetaData(float("nan"))),
        TensorDict({"shape": torch.ones(1)}),
        TensorDict({"a" * 250: torch.ones(1)}),
        TensorDict({"a.memmap": {"b": 1}, "a": torch.ones(1)}),
        TensorDict(w=NonTensorStack([1], [2]), batch_size=[2]),
    ],
)
def test_what_the_layout_cannot_hold_is_in_a_store(td: TensorDict, tmp_path: Path) -> None:
    made = td.memmap(tmp_path / "td")
    assert "manifest.json" in names_in(tmp_path / "td")
    for each in (made, TensorDict.load(tmp_path / "td")):
        assert str(each.to_dict()) == str(td.to_dict())


def test_a_store_stays_one(tmp_path: Path) -> None:
    set_files_of_tensordict(False)
    TensorDict(a=1).save(tmp_path / "td")
    set_files_of_tensordict(True)
    TensorDict(a=2).save(tmp_path / "td")
    assert "meta.json" not in names_in(tmp_path / "td")
    assert TensorDict.load(tmp_path / "td")["a"] == 2


def test_entries_are_added(tmp_path: Path) -> None:
    path = tmp_path / "td"
    td = TensorDict({"a": torch.ones(2)}, [2]).memmap(path)
    other: TensorDictBase = TensorDict.load_memmap(path)
    td.make_memmap("b", (2, 3), dtype=torch.int64)[:] = 5
    td.make_memmap_from_tensor(("n", "o", "c"), torch.arange(2))
    assert td.is_locked
    assert list(other.memmap_refresh_().keys()) == ["a", "b", "n"]
    other["n", "o", "c"].add_(1)
    assert td["n", "o", "c"].tolist() == [1, 2]
    assert_same(TensorDict.load(path), td)
    assert (path / "n" / "o" / "c.memmap").exists()
    with pytest.raises(KeyCollision, match="exists"):
        other.make_memmap("b", (2,))
    with pytest.raises(ShapeMismatch, match="batch_size"):
        td.make_memmap("d", (3,))
    with pytest.raises(InvalidValue, match="keys of their own"):
        td.make_memmap("shape", (2,))


def test_a_call_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "td"
    TensorDict(a=torch.ones(2), n={"b": 1}).save(path)
    before = content(path)
    writes = tuple(set(CHANGING) - {"rename", "remove", "remove_empty_folder"})
    at, failed = 0, True
    while failed:
        at, failed = at + 1, False
        with calls(at, OSError(errno.ENOSPC, "full"), writes):
            try:
                TensorDict(a=torch.zeros(3), n={"c": 2}, o={"d": 1}).save(path)
            except OSError:
                failed = content(path) == before
    assert at > 8
    assert json.loads((path / "meta.json").read_text())["a"]["shape"] == [3]


def content(path: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() if each.is_file() else b"" for each in path.rglob("*")}
