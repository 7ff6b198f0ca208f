"""Entries that are added to an arena, by one process and seen by others."""

import errno
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from tests.core.content import assert_same
from tests.core.store.faults import Killed, calls, is_raised, names_in
from torch import Tensor

from kd_core import (
    FormatError,
    InvalidValue,
    KeyCollision,
    KeyNotFound,
    Locked,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    lazy_stack,
    store,
)
from kd_core._store import mapped_tensor


def sample() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(3), "n": {"b": torch.ones(3, 2), "w": ["x", "y", "z"]}}, [3]
    )


def test_an_entry_is_added_and_seen_by_others(tmp_path: Path) -> None:
    td = sample().memmap(tmp_path / "td")
    other = TensorDict.load_memmap(tmp_path / "td")
    a, b = td["a"], other["n", "b"]
    made = td.make_memmap("c", (3, 4), dtype=torch.int16)
    assert td["c"] is made
    assert made.dtype is torch.int16
    td.make_memmap_from_tensor(("n", "d"), torch.ones(3, 1, requires_grad=True))
    storage = torch.arange(6.0).untyped_storage()
    td.make_memmap_from_storage(("new", "deep", "e"), storage, torch.Size([3, 2]))
    made.fill_(7)
    assert "c" not in other
    assert other.memmap_refresh_() is other
    assert_same(other, td)
    assert other["c"].sum() == 84
    assert other["new", "deep", "e"].tolist() == [[0, 1], [2, 3], [4, 5]]
    other["c"].zero_()
    assert made.sum() == 0
    assert td["a"] is a
    assert other["n", "b"] is b
    assert td.is_memmap()
    with pytest.raises(Locked):
        td["new", "f"] = torch.zeros(3)
    store.seal(tmp_path / "td")
    assert_same(TensorDict.load(tmp_path / "td", verify="full"), td)


def test_an_entry_with_rows_of_several_sizes_is_added(tmp_path: Path) -> None:
    td = sample().memmap(tmp_path / "td")
    sizes = torch.tensor([[1, 2], [3, 2], [0, 2]])
    storage = torch.arange(8.0).untyped_storage()
    td.make_memmap_from_storage("filled", storage, sizes)
    td.make_memmap("zeros", sizes)[1].fill_(4)
    other = TensorDict.load_memmap(tmp_path / "td")
    values = [[row.tolist() for row in other[key].unbind()] for key in ("filled", "zeros")]
    assert values[0] == [[[0, 1]], [[2, 3], [4, 5], [6, 7]], []]
    assert values[1] == [[[0, 0]], [[4, 4], [4, 4], [4, 4]], []]
    with pytest.raises(ShapeMismatch, match=r"must start with \(3,\), got \(2,\)"):
        td.make_memmap("short", sizes[:2])


def test_an_empty_container_is_filled_entry_by_entry(tmp_path: Path) -> None:
    td = TensorDict({}, [3])
    td.memmap_(tmp_path / "td")
    assert td.saved_path == tmp_path / "td"
    assert td.is_memmap()
    td.make_memmap("x", torch.tensor([3, 0]))
    td.make_memmap("y", (3,))[1] = 5
    assert_same(TensorDict.load_memmap(tmp_path / "td"), td)
    again = pickle.loads(bytes(ForkingPickler.dumps(td)))
    again["y"][2] = 6
    assert td["y"].tolist() == [0, 5, 6]
    del td
    assert len(mapped_tensor._ROOTS) <= 1  # of `again`, which is not the whole of an arena


def test_damage_of_any_of_its_files_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "td"
    td = TensorDict({"a": torch.arange(2)}, [2]).memmap(path)
    td.make_memmap_from_tensor("b", torch.arange(2) + 5)
    store.seal(path)
    assert TensorDict.load(path, verify="full")["b"].tolist() == [5, 6]
    one, two = path.glob("seg-*")
    data = one.read_bytes()
    for at in range(len(data)):
        one.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        with pytest.raises(FormatError):
            TensorDict.load(path, verify="full")
    one.write_bytes(two.read_bytes())  # of the same shape: only the checksums tell
    with pytest.raises(FormatError, match="checksum"):
        store.check(path)
    one.unlink()
    with pytest.raises(FormatError, match="does not exist"):
        TensorDict.load(path)


def test_two_processes_add_entries_to_one_arena(tmp_path: Path) -> None:
    one = sample().memmap(tmp_path / "td")
    two = TensorDict.load_memmap(tmp_path / "td")
    one.make_memmap("x", (3,))
    two.make_memmap("y", (3,))
    with pytest.raises(KeyCollision, match=r"key `x` exists in the arena .*memmap_refresh_"):
        two.make_memmap("x", (3,))
    assert_same(
        one.memmap_refresh_().select("a", "x", "y"), two.memmap_refresh_().select("a", "x", "y")
    )


def test_what_cannot_be_added_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "td"
    td = sample().memmap(path)
    for act, error, message in (
        (lambda: td.make_memmap("a", (3,)), KeyCollision, "key `a` exists"),
        (lambda: td.make_memmap("n", (3,)), KeyCollision, "key `n` exists"),
        (lambda: td.make_memmap("x", (2,)), ShapeMismatch, r"must start with \(3,\), got \(2,\)"),
        (lambda: td.make_memmap(("a", "x"), (3,)), KeyNotFound, "is a tensor"),
        (lambda: td.make_memmap("x", (3, -1)), RuntimeError, "negative dimension"),
        (lambda: td.make_memmap("x", (3, 2**50)), OSError, "large|space"),
        (lambda: td[1:].make_memmap("x", (2,)), InvalidValue, "call the method on the outer"),
        (lambda: sample().make_memmap("x", (3,)), InvalidValue, "only the container that"),
        (lambda: sample().memmap_refresh_(), InvalidValue, "only the container that"),
        (
            lambda: td.make_memmap_from_tensor("x", torch.ones(3, 2).to_sparse()),
            InvalidValue,
            "must be a dense or jagged tensor",
        ),
    ):
        with pytest.raises(error, match=message):
            act()
    assert_same(TensorDict.load_memmap(path), td)
    assert_same(td, sample())
    sample().memmap(path)
    with pytest.raises(InvalidValue, match="was replaced by another one"):
        td.make_memmap("x", (3,))
    store.seal(path)
    with pytest.raises(FormatError, match="it is sealed"):
        td.make_memmap("x", (3,))
    with pytest.raises(FormatError, match="it is sealed"):
        td.memmap_refresh_()


def test_a_declared_class_gains_no_entry(tmp_path: Path) -> None:
    class Point(TensorClass):
        x: Tensor

    store.register_class(Point, "growing.Point")
    td = TensorDict({"p": Point(torch.ones(2))}).memmap(tmp_path / "td")
    with pytest.raises(InvalidValue, match="only a `TensorDict` gains entries, and `p` is"):
        td.make_memmap(("p", "y"), (2,))
    assert len(names_in(tmp_path / "td")) == 3


def test_names_locks_and_odd_keys_stay_as_they_are(tmp_path: Path) -> None:
    td = TensorDict({}, [2, 0], names=["time", "env"]).memmap(tmp_path / "td")
    for key in ("", "a/b", "../x", "\0", "\ud800", "__metadata__", "t0"):
        assert td.make_memmap(("n", key), (2, 0, 1)).shape == (2, 0, 1)
    loaded = TensorDict.load_memmap(tmp_path / "td")
    assert_same(loaded, td)
    for each in (td, loaded):
        inner: object = each.get("n")
        assert isinstance(inner, TensorDict)
        assert inner.names == ["time", "env"]
    outer = TensorDict({"inner": td}, [2]).lock_()
    with pytest.raises(Locked, match="locked with the one that encloses it"):
        td.make_memmap("x", (2, 0))
    assert_same(TensorDict.load_memmap(tmp_path / "td"), td)
    outer.unlock_()
    assert not td.is_locked
    td.make_memmap("x", (2, 0))
    assert_same(TensorDict.load_memmap(tmp_path / "td"), td)


def test_stacks_gain_no_entry(tmp_path: Path) -> None:
    stack = lazy_stack([TensorDict({"x": torch.ones(2)})]).memmap(tmp_path / "td")
    before = names_in(tmp_path / "td")
    with pytest.raises(InvalidValue, match="only a `TensorDict` gains entries, and it is"):
        stack.make_memmap("y", (1, 2))
    assert names_in(tmp_path / "td") == before


@pytest.mark.parametrize("error", [Killed, partial(OSError, errno.ENOSPC, "injected")])
def test_a_failure_at_any_call_keeps_the_arena(
    error: Callable[[], BaseException], tmp_path: Path
) -> None:
    for at in range(1, 40):
        path = tmp_path / f"{at}"
        td = sample().memmap(path)
        with calls(at, error()) as made:
            raised = is_raised(partial(td.make_memmap, "x", (3,)))
        found = TensorDict.load_memmap(path)
        assert set(found.keys()) in ({"a", "n"}, {"a", "n", "x"})
        assert ("x" in td) is not raised
        if not raised:
            assert "x" in found
            if at > made.count:
                break
        td.memmap_refresh_()
        assert_same(td, found)
        if "x" not in td:
            td.make_memmap("x", (3,))
        td.make_memmap("y", (3,))
        assert len(names_in(path)) == 5
    assert at > 4


def test_values_are_written_into_entries_in_place(tmp_path: Path) -> None:
    td = sample()
    td.save(tmp_path / "td")
    td.memmap(tmp_path / "arena")
    for name, options in (("load_", {"verify": "full"}), ("load_memmap_", {})):
        path = tmp_path / ("td" if name == "load_" else "arena")
        target = sample().apply(torch.zeros_like).lock_()
        leaf = target["n", "b"]
        assert getattr(target, name)(path, **options) is target
        assert target["n", "b"] is leaf
        assert_same(target, td.lock_())
        small = TensorDict({"a": torch.zeros(3, dtype=torch.int64)}, [3])
        with pytest.raises(Locked):
            getattr(small.clone().lock_(), name)(path)
        assert_same(getattr(small, name)(path), td)


def test_other_names_of_saving_and_loading(tmp_path: Path) -> None:
    td = sample()
    td.dumps(tmp_path / "td")
    assert_same(TensorDict.load(tmp_path / "td"), td)
    td.save(tmp_path / "one.safetensors")
    (tmp_path / "one.safetensors").rename(tmp_path / "one")
    assert_same(TensorDict.from_consolidated(tmp_path / "one"), td)


def test_an_arena_that_was_removed_gains_no_entry(tmp_path: Path) -> None:
    path = tmp_path / "td"
    td = sample().memmap(path)
    shutil.rmtree(path)
    for act in (lambda: td.make_memmap("x", (3,)), td.memmap_refresh_):
        with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
            act()
    assert not names_in(tmp_path)


def test_values_that_are_not_copied_are_zeros(tmp_path: Path) -> None:
    td = sample().memmap(tmp_path / "td")
    made = td.make_memmap_from_tensor("z", torch.ones(3), copy_data=False)
    assert made.tolist() == td["z"].tolist() == [0, 0, 0]
