"""Arenas: filled in place, seen by all mappings, and sealed."""

import copy
import errno
import gc
import os
import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import children
from tests.core.content import assert_same
from tests.core.kinds import inner
from tests.core.store.faults import Killed, calls, is_raised, names_in

from kd_core import (
    FormatError,
    InvalidValue,
    Locked,
    MemoryMappedTensor,
    NonTensorStack,
    TensorDict,
    lazy_stack,
    store,
)
from kd_core._store import mapped_tensor


def sample() -> TensorDict:
    nested = {"b": torch.ones(3, 2), "w": ["x", "y", "z"], "none": torch.zeros(3, 0)}
    return TensorDict({"a": torch.arange(3), "n": nested, "unit": "m"}, [3])


def test_writes_are_seen_by_other_mappings(tmp_path: Path) -> None:
    td = sample()
    mine = td.memmap(tmp_path / "td")
    other = TensorDict.load_memmap(tmp_path / "td")
    assert_same(other, td)
    mine["a"][1] = 7
    other["n", "b"].zero_()
    assert other["a"].tolist() == [0, 7, 2]
    assert mine["n", "b"].sum() == 0
    assert td["a"].tolist() == [0, 1, 2]
    with pytest.raises(Locked):
        mine["new"] = torch.zeros(3)


def test_a_container_becomes_an_arena_in_place(tmp_path: Path) -> None:
    td = sample()
    nested = td.get("n")
    assert td.memmap_(tmp_path / "td") is td
    assert td.get("n") is nested
    assert td.is_locked
    td["a"].fill_(5)
    assert TensorDict.load_memmap(tmp_path / "td")["a"].tolist() == [5, 5, 5]
    for again in (td.memmap_(), td.memmap_(tmp_path / "td")):
        assert again is td
        assert td.saved_path == (tmp_path / "td").resolve()
        assert td["a"].tolist() == [5, 5, 5]
    td.memmap_(tmp_path / "other")["a"].fill_(6)
    assert TensorDict.load_memmap(tmp_path / "td")["a"].tolist() == [5, 5, 5]
    assert TensorDict.load_memmap(tmp_path / "other")["a"].tolist() == [6, 6, 6]


TEMPORARY = """
import os, sys, torch
from kd_core import TensorDict
from kd_core._store.mapped_tensor import place_of
td = TensorDict({"a": torch.zeros(3)}, [3])
made = td.memmap(), td.memmap_like(), td.memmap_()
if os.fork() == 0:
    sys.exit()  # runs what was registered for the end of a process
os.wait()
assert all(each.is_memmap() and each.saved_path is None for each in made)
paths = [place_of(each["a"]).path for each in made]
assert all(map(os.path.isdir, paths))
print(*paths)
"""


def test_what_is_on_the_meta_device_describes_an_arena(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.empty(3, 2, device="meta"), "n": {"b": torch.ones(3)}}, [3])
    made = td.memmap_like(tmp_path / "td")
    assert made.is_memmap()
    assert made.device == torch.device("cpu")
    assert made["a"].tolist() == [[0, 0]] * 3
    assert td["a"].is_meta


def test_only_a_memory_map_has_a_saved_path(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    assert not hasattr(td, "saved_path")
    with pytest.raises(AttributeError, match="Call `memmap` first"):
        td.memmap(tmp_path / "td").clone().saved_path  # noqa: B018  # what is read raises


def test_an_early_result_is_waited_for(tmp_path: Path) -> None:
    td: Any = TensorDict({"a": torch.zeros(3)}, [3])
    for name in ("memmap", "memmap_like", "save"):
        made = getattr(td, name)(tmp_path / name, return_early=True, num_threads=2)
        assert made.result()["a"].tolist() == [0, 0, 0]
        assert "a" in getattr(td, name)(tmp_path / name, return_early=True)


def test_an_arena_without_a_path_lasts_as_long_as_its_process() -> None:
    paths = children.check_output("-c", TEMPORARY).split()
    assert len(set(paths)) == 3
    assert not any(map(os.path.exists, paths))


def test_another_process_opens_an_arena_without_a_path() -> None:
    td = sample().memmap()
    assert td.saved_path is None  # what is removed with its process is not saved
    place = mapped_tensor.place_of(td["a"])
    assert place is not None
    TensorDict.load_memmap(place.path)["a"].fill_(5)
    assert td["a"].tolist() == [5, 5, 5]


def test_an_arena_like_a_container_holds_zeros_and_its_data(tmp_path: Path) -> None:
    row = TensorDict({"x": torch.ones(100), "y": torch.ones((), dtype=torch.bfloat16)})
    row.expand(1000).memmap_like(tmp_path / "rows")
    loaded = TensorDict.load_memmap(tmp_path / "rows")
    assert loaded.batch_size == (1000,)
    assert loaded["x"].sum() == 0
    assert loaded["y"].dtype is torch.bfloat16
    tokens = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    ragged = TensorDict({"tokens": tokens}, [2]).memmap_like(tmp_path / "ragged")
    assert [row.tolist() for row in ragged["tokens"].unbind()] == [[0, 0], [0, 0, 0]]
    words = sample().memmap_like(tmp_path / "words")
    assert words["n", "w"] == ["x", "y", "z"]
    assert words["a"].tolist() == [0, 0, 0]


def test_members_of_a_stack_are_in_one_arena(tmp_path: Path) -> None:
    stack = lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 3)])
    mapped = stack.memmap(tmp_path / "td")
    mapped[1]["x"].fill_(4)
    assert TensorDict.load_memmap(tmp_path / "td")[1]["x"].tolist() == [4, 4, 4]
    assert mapped.saved_path == tmp_path / "td"


def test_where_leaves_are_is_known(tmp_path: Path) -> None:
    td = sample().select("a").memmap(tmp_path / "td")
    assert td.is_memmap()
    assert td.saved_path == (tmp_path / "td").resolve()
    assert td[1:].saved_path == td.saved_path
    assert not td.clone().is_memmap()
    assert not TensorDict().is_memmap()
    del td
    gc.collect()
    assert not mapped_tensor._LIVE


def test_an_arena_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "td"
    sample().memmap(path)["a"].fill_(3)
    assert TensorDict.load(path)["a"].tolist() == [3, 3, 3]
    with pytest.raises(FormatError, match=r"is an arena that is not sealed.*store.seal"):
        TensorDict.load(path, verify="full")
    with pytest.raises(InvalidValue, match=r"not all values of its rows.*store.seal"):
        sample().append_to(path)
    with pytest.raises(FormatError, match="is an arena that is not sealed"):
        store.compact(path)
    store.seal(path)
    assert TensorDict.load(path, verify="full")["a"].tolist() == [3, 3, 3]
    assert len(names_in(path)) == 3  # without the file of the arena
    with pytest.raises(FormatError, match="is sealed"):
        store.seal(path)
    sample().append_to(path)
    assert TensorDict.load(path, verify="full").batch_size == (6,)


def test_a_write_after_the_seal_is_refused(tmp_path: Path) -> None:
    td = sample().memmap(tmp_path / "td")
    a, octets = td["a"], td["a"].numpy()
    store.seal(tmp_path / "td")
    row = sample()[0].exclude("n", "unit")
    for write in (
        lambda: td["a"].fill_(9),
        lambda: a.__setitem__(0, 9),
        lambda: a[1:].zero_(),
        lambda: a.detach().zero_(),
        lambda: a.data.zero_(),
        lambda: a[1:].detach()[1:].zero_(),
        lambda: torch.add(a, 1, out=a),
        lambda: torch._foreach_add_([a], 1),
        lambda: td.set_("a", torch.zeros(3)),
        lambda: td.__setitem__(0, row),
        lambda: td.update_({"a": torch.zeros(3)}),
        td.zero_,
    ):
        with pytest.raises(InvalidValue, match=r"was sealed.* its tensors must not change"):
            write()
    octets[0] = 9  # which torch does not see
    store.check(tmp_path / "td")
    assert TensorDict.load(tmp_path / "td")["a"].tolist() == [0, 1, 2]
    assert torch.zeros(3, dtype=torch.int64).copy_(a).tolist() == [9, 1, 2]
    assert (td["a"] + 1).add_(1).tolist() == [11, 3, 4]
    assert td.clone()["a"].zero_().sum() == 0
    assert copy.deepcopy(a).zero_().sum() == 0
    td.save(tmp_path / "other")


def test_a_saved_store_is_opened_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "td"
    sample().save(path)
    sample().append_to(path)
    kept = TensorDict.load_memmap(path, mode="r")
    kept["a"].fill_(8)
    store.check(path)
    opened = TensorDict.load_memmap(path)
    assert opened["a"].tolist() == [0, 1, 2, 0, 1, 2]
    opened["a"].fill_(5)
    opened["new"] = torch.zeros(6)
    assert TensorDict.load_memmap(path)["a"].tolist() == [5] * 6
    assert TensorDict.load(path)["a"].tolist() == [5] * 6
    store.seal(path)
    assert TensorDict.load(path, verify="full")["a"].tolist() == [5] * 6


def test_data_that_is_there_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    first = sample().memmap_like(path)
    first["a"].fill_(4)
    assert sample().memmap_like(path)["a"].tolist() == [4, 4, 4]
    store.seal(path)
    again = sample().memmap_like(path)
    again["a"][0] = 5
    assert TensorDict.load_memmap(path)["a"].tolist() == [5, 4, 4]
    with pytest.raises(InvalidValue, match=r"would be lost.*load_memmap.*overwrite=True"):
        TensorDict({"a": torch.zeros(4)}).memmap_like(path)
    for act in ("memmap", "memmap_", "memmap_like"):
        with pytest.raises(RuntimeError, match="exists already"):
            getattr(sample(), act)(path, existsok=False)
        (tmp_path / act).mkdir()
        getattr(sample(), act)(tmp_path / act, existsok=False)  # no store is there
    assert again["a"].tolist() == [5, 4, 4]
    assert sample().memmap_like(path, overwrite=True)["a"].tolist() == [0, 0, 0]
    (tmp_path / "empty").mkdir()
    assert sample().memmap(tmp_path / "empty", existsok=False).is_memmap()
    with pytest.raises(ValueError, match="got a directory"):
        sample().save(path, archive=True)


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "injected")], ids=str)
def test_a_failure_at_any_call_keeps_what_was_there(error: BaseException, tmp_path: Path) -> None:
    old = TensorDict({"old": torch.ones(5)})
    for at in range(1, 40):
        path = tmp_path / f"{at}"
        old.save(path)
        with calls(at, error) as made:
            raised = is_raised(partial(sample().memmap_like, path, overwrite=True))
        if raised:
            assert_same(TensorDict.load(path, verify="full"), old)
        else:
            assert_same(TensorDict.load_memmap(path).select("unit"), sample().select("unit"))
            if at > made.count:
                break
        old.save(path)
        old.save(path)
        assert len(names_in(path)) == 4
    assert at > 4


@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, "injected")], ids=str)
def test_a_failure_at_any_call_of_a_seal_keeps_the_arena(
    error: BaseException, tmp_path: Path
) -> None:
    for at in range(1, 40):
        path = tmp_path / f"{at}"
        sample().memmap(path)
        with calls(at, error) as made:
            raised = is_raised(partial(store.seal, path))
        if not raised:
            break
        if made.names[: at - 1].count("rename") == 2:
            assert_same(TensorDict.load(path, verify="full"), sample())
        else:
            assert_same(TensorDict.load_memmap(path), sample())
    assert at > 4


def test_systems_that_cannot_allocate_write_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.posix_fallocate")
    row = TensorDict({"x": torch.ones(1000)})
    row.expand(700).memmap_like(tmp_path / "td")[-1] = row
    store.seal(tmp_path / "td")
    assert TensorDict.load(tmp_path / "td", verify="full")["x"].sum() == 1000


def test_other_processes_map_the_same_file(tmp_path: Path) -> None:
    td = sample().memmap(tmp_path / "td")
    pickled = bytes(ForkingPickler.dumps(td[1:]))
    assert len(pickled) < 3000
    other = pickle.loads(pickled)
    other["a"].fill_(8)
    assert td["a"].tolist() == [0, 8, 8]
    del td, other
    gc.collect()
    assert not mapped_tensor._LIVE
    again = pickle.loads(pickled)  # as in a process that has not mapped it yet
    again["n", "b"].fill_(6)
    assert TensorDict.load_memmap(tmp_path / "td")["n", "b"].tolist() == [[1, 1], [6, 6], [6, 6]]


def test_leaves_in_an_arena_are_shared_as_they_are(tmp_path: Path) -> None:
    td = sample().select("a", ("n", "b")).memmap(tmp_path / "td")
    assert td.is_memmap()
    assert not td.is_shared()
    td.share_memory_()
    td["a"].fill_(4)
    assert TensorDict.load_memmap(tmp_path / "td")["a"].tolist() == [4, 4, 4]


def test_all_leaves_are_in_one_mapping(tmp_path: Path) -> None:
    count = 70_000  # a process may have some 65 000 mappings
    td = TensorDict(dict(zip(map(str, range(count)), torch.arange(count).unbind(), strict=True)))
    loaded = td.memmap(tmp_path / "td")
    assert len(mapped_tensor._LIVE) == 1
    assert loaded.saved_path == tmp_path / "td"
    assert torch.equal(torch.stack(list(loaded.values())), torch.arange(count))


def test_what_is_not_a_store_is_not_sealed(tmp_path: Path) -> None:
    for act in (store.seal, store.compact):
        for path in (tmp_path, tmp_path / "td"):
            with pytest.raises(FileNotFoundError, match="there is not a store"):
                act(path)
        assert not names_in(tmp_path)


def test_a_locked_container_is_mapped_and_a_mapped_one_stays(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3)}}, [3]).lock_()
    assert td.memmap_() is td
    leaf = td["a"]
    assert td.is_locked
    assert td.is_memmap()
    assert td.memmap_()["a"] is leaf
    assert td.memmap()["a"] is leaf
    assert td.memmap(copy_existing=True)["a"] is leaf
    assert td.memmap_(tmp_path / "other").saved_path == tmp_path / "other"
    assert inner(td, "n").is_locked


def test_a_part_of_a_locked_container_is_not_mapped_alone() -> None:
    td = TensorDict({"n": {"b": torch.ones(3)}}, [3]).lock_()
    with pytest.raises(Locked):
        inner(td, "n").memmap_()


def test_an_empty_container_that_is_mapped_is_on_the_cpu() -> None:
    assert TensorDict({}, [3]).memmap_().device == torch.device("cpu")


def test_entries_of_a_map_are_mapped_tensors_and_added_ones_hold_their_values() -> None:
    td = TensorDict({"a": torch.ones(3)}, [3]).memmap_()
    assert td.entry_class("a") is MemoryMappedTensor
    assert td.clone().entry_class("a") is torch.Tensor
    assert td.make_memmap_from_tensor("b", torch.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=str)
def test_words_stay_on_the_device_that_the_container_had(device: torch.device | None) -> None:
    def made() -> TensorDict:
        words = NonTensorStack("a", "b")
        return TensorDict({"a": torch.zeros(2), "n": {"w": words}, "w": words}, [2], device)

    for mapped in (made().memmap(), made().memmap_(), made().memmap_like(), made().memmap()[:1]):
        assert mapped.device == torch.device("cpu")
        assert [attrgetter("device")(mapped.get(key)) for key in ("w", ("n", "w"))] == [device] * 2
