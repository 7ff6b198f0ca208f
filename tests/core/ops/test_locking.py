"""Locks: whose they are, what they cover, and when they end."""

import pickle
from pathlib import Path

import pytest
import torch
from tests.core.kinds import inner

from kd_core import LazyStackedTensorDict, Locked, TensorDict, lazy_stack


def make() -> TensorDict:
    return TensorDict({"a": 1.0, "n": {"b": 2.0, "m": {"c": 3.0}}})


def test_locking_twice_is_locking_once() -> None:
    td = make().lock_().lock_()
    assert not td.unlock_().is_locked
    assert not inner(td, ("n", "m")).is_locked


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_unlocking_unlocks_what_was_locked_on_its_own(outer: bool, stacked: bool) -> None:
    td = TensorDict({"s": lazy_stack([make(), make()])} if stacked else {"s": make()})
    # Levels of a stack are stacks, made anew, that would hold what is in the members.
    below = [] if stacked else [inner(td, ("s", "n", "m")), inner(td, ("s", "n"))]
    for level in [*below, inner(td, "s"), *([td] if outer else [])]:
        level.lock_()
    assert td.unlock_() is td
    for path in ("s", ("s", "n"), ("s", "n", "m")):
        assert not inner(td, path).is_locked
        level = inner(td, path)
        level["new"] = torch.zeros(level.batch_size)
    td.is_locked = True
    inner(td, "s").is_locked = True
    td.is_locked = False
    assert not inner(td, ("s", "n")).is_locked


def test_a_container_in_two_locked_ones_keeps_both_locked_while_both_exist() -> None:
    shared = TensorDict({"x": 1.0})
    first, second = TensorDict({"s": shared}).lock_(), TensorDict({"s": shared}).lock_()
    for td in (first, second, shared):
        with pytest.raises(Locked, match="cannot unlock"):
            td.unlock_()
    assert [td.is_locked for td in (first, second, shared)] == [True] * 3
    del second, td
    first.unlock_()
    shared["y"] = 2.0


def test_a_container_held_twice_by_one_is_free_with_that_one() -> None:
    shared = TensorDict({"x": 1.0})
    td = TensorDict({"a": {"s": shared}, "b": {"s": shared}, "s": shared}).lock_()
    with pytest.raises(Locked):
        inner(td, "a").unlock_()
    td.unlock_()
    assert not shared.is_locked
    assert not inner(td, "a").is_locked


@pytest.mark.parametrize("stacked", [False, True])
def test_what_a_container_held_that_is_gone_stays_locked_until_it_is_unlocked(
    stacked: bool,
) -> None:
    member = make()
    held = inner(member, "n")
    outer = lazy_stack([member, make()]) if stacked else TensorDict({"t": member})
    outer.lock_()
    with pytest.raises(Locked, match="cannot unlock"):
        held.unlock_()
    del outer, member
    with pytest.raises(Locked, match="cannot set"):
        held["new"] = 1.0
    with pytest.raises(Locked, match="cannot unlock"):
        inner(held, "m").unlock_()
    with held.unlock_():
        held["new"] = 1.0
        assert not inner(held, "m").is_locked
    assert held.is_locked
    assert not held.unlock_().is_locked


def test_the_lock_of_a_stack_that_was_read_ends_with_it() -> None:
    members = [make(), make()]
    lazy_stack(members).nested("n", LazyStackedTensorDict).lock_()
    assert inner(members[0], "n").is_locked
    inner(members[0], "n").unlock_()["new"] = 1.0
    stack = lazy_stack(members).lock_()
    read = stack.nested("n", LazyStackedTensorDict)
    with pytest.raises(Locked):
        read.unlock_()


def test_a_part_of_a_locked_container_is_locked_behind_a_pickle() -> None:
    td = TensorDict({"s": lazy_stack([make(), make()]), "t": make()}).lock_()
    for key in ("s", "t"):
        part = pickle.loads(pickle.dumps(inner(td, key)))
        assert part.is_locked
        assert inner(part, "n").is_locked
        assert not part.unlock_().is_locked
        assert not inner(part, "n").is_locked
    whole = pickle.loads(pickle.dumps(td)).unlock_()
    assert not any(inner(whole, key).is_locked for key in ("s", "t", ("t", "n")))
    parts = pickle.loads(pickle.dumps([inner(td, ("t", "n")), inner(td, "t")]))
    assert [part.is_locked for part in parts] == [True, True]
    assert not parts[1].unlock_()["n"].is_locked


def test_a_part_of_what_consolidate_locked_is_free_with_it() -> None:
    td = TensorDict({"t": make()}).consolidate()
    assert pickle.loads(pickle.dumps(inner(td, "t"))).is_locked
    assert not inner(pickle.loads(pickle.dumps(td)), "t").is_locked


def test_a_pickle_of_a_locked_container_and_its_part_keeps_what_holds_what() -> None:
    td = make().lock_()
    both = pickle.loads(pickle.dumps([td, inner(td, "n")]))
    assert both[0]["n"] is both[1]
    with pytest.raises(Locked):
        both[1].unlock_()
    both[0].unlock_()
    assert not both[1].is_locked


def test_a_locked_container_may_stand_in_an_unlocked_one() -> None:
    td = TensorDict({"locked": make().lock_()})
    td["free"] = 1.0
    with pytest.raises(Locked, match="locked by `lock_"):
        td["locked", "z"] = 1.0


def test_a_scope_in_a_locked_container_leaves_the_lock_of_that_one() -> None:
    td = make().lock_()
    with inner(td, "n").locked():
        assert inner(td, ("n", "m")).is_locked
    td.unlock_()
    assert not inner(td, "n").is_locked
    assert not inner(td, ("n", "m")).is_locked


@pytest.mark.parametrize("locked", [True, False])
def test_scopes_restore_what_was_also_after_an_error(locked: bool) -> None:
    td = make()
    if locked:
        td.lock_()
    for scope in (td.locked, td.unlocked):
        with scope() as same:
            assert same is td
        assert td.is_locked is locked
        with pytest.raises(ZeroDivisionError), scope():
            raise ZeroDivisionError
        assert td.is_locked is locked


@pytest.mark.parametrize("stacked", [False, True])
def test_a_lock_is_told_before_a_missing_key(stacked: bool) -> None:
    td = lazy_stack([make(), make()]).lock_() if stacked else make().lock_()
    with pytest.raises(Locked, match="rename `z`"):
        td.rename_key_("z", "y")
    with pytest.raises(Locked, match="remove `z`"):
        td.del_("z")


def test_a_message_tells_who_locked_and_the_way_out() -> None:
    td = make().lock_()
    with pytest.raises(Locked, match=r"cannot set `z`: .* by `lock_\(\)`.* `unlock_\(\)`.*clone"):
        td["z"] = 1.0
    with pytest.raises(Locked, match="by the lock of an enclosing container"):
        inner(td, "n")["z"] = 1.0


def test_the_way_out_is_one() -> None:
    td = make().lock_()
    free = inner(td, "n").clone(recurse=False)
    free["z"] = 1.0
    assert free["b"] is td["n", "b"]


def test_reading_and_results_need_no_lock() -> None:
    td = make().lock_()
    assert (td + 1)["n", "m", "c"] == 4
    assert td.to_dict()["a"] == 1
    torch.testing.assert_close(td.get(("n", "b")), torch.tensor(2.0))


def test_a_lock_covers_neither_batch_size_nor_names_nor_device() -> None:
    td = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3, 2)}}, [3]).lock_()
    td.batch_size = [3, 2]
    td.names = ["rows", None]
    assert (td.batch_size, td.names, td.is_locked) == ((3, 2), ["rows", None], True)
    assert td.clear_device_().auto_batch_size_(1).batch_size == (3,)
    with pytest.raises(Locked, match="`z`"):
        td["z"] = torch.ones(3)


def test_messages_name_what_locked_a_container_of_files(tmp_path: Path) -> None:
    for td in (make().memmap(tmp_path / "mapped"), make().memmap_(tmp_path / "own")):
        td["a"].fill_(2)
        with pytest.raises(Locked, match=r"locked by its memory map\. .*clone"):
            td["z"] = 1.0
        free = td.clone(recurse=False)
        free["z"] = 1.0
        assert free["a"] is td["a"]


def test_what_is_loaded_is_not_locked(tmp_path: Path) -> None:
    make().save(tmp_path / "saved")
    make().memmap(tmp_path / "mapped")
    for td in (TensorDict.load(tmp_path / "saved"), TensorDict.load_memmap(tmp_path / "mapped")):
        td["z"] = 1.0
        assert not td.is_locked
    assert "z" not in TensorDict.load(tmp_path / "saved")


def test_scopes_keep_what_locked_a_container(tmp_path: Path) -> None:
    td = make().memmap(tmp_path / "mapped")
    with td.unlocked():
        td["z"] = 1.0
    with td.unlock_():
        del td["z"]
    with pytest.raises(Locked, match=r"locked by its memory map\."):
        td["z"] = 1.0


@pytest.mark.parametrize("way", ["memmap_", "share_memory_"])
def test_views_of_rows_in_the_memory_of_others_are_locked(way: str) -> None:
    td = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3, 2)}}, [3, 2])
    inner(td, "n").batch_size = [3, 2]
    assert not td.lock_()[0].is_locked
    assert not inner(td, "n")[0].is_locked
    getattr(td.unlock_(), way)()
    nested = inner(td, "n")
    views = [td[0], td[0:2], td[..., 0], td[0:2, 0], td[None], td[0, 0], nested[0], next(iter(td))]
    views += [*td.unbind(0), *td.unbind(1), td.to_lazystack(1)]
    assert all(view.is_locked for view in views)
    with pytest.raises(Locked, match="memory"):
        td[0]["new"] = torch.ones(2)
    td[0].fill_(7)
    assert td["a"][0].tolist() == [7, 7]
    assert not any(copy.is_locked for copy in (td[[0, 1]], td[torch.tensor([0])]))
    assert not any(row.is_locked for row in td.unlock_())


def test_rows_of_a_locked_stack_are_locked_on_their_own() -> None:
    members = [TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2]) for _ in range(2)]
    stack = lazy_stack(members).lock_()
    rows = [stack[:1], stack[:, 0], stack[None], stack[...], stack[[0]], stack[:1, :1]]
    rows += [*stack.unbind(0), stack[torch.tensor([True, False])]]
    assert all(row.is_locked for row in rows)
    assert not stack[0, 0].is_locked
    part = stack[:1].unlock_()
    part["new"] = torch.zeros(1, 2)
    assert stack.is_locked
    assert "new" not in members[0]
    stack[0, 0].fill_(7)
    assert members[0]["a"].tolist() == [7, 1]
    assert not any(row.is_locked for row in (stack.unlock_()[:1], stack[0, 0]))


def test_a_stack_of_locked_members_is_locked_until_one_is_free() -> None:
    members = [make().lock_(), make().lock_()]
    stack = lazy_stack(members)
    states = [stack.is_locked]
    members[0].unlock_()
    states.append(stack.is_locked)
    assert states == [True, False]
    members[0].lock_()
    stack.unlock_()
    assert not any(member.is_locked for member in members)
    stack["new"] = torch.zeros(2)
    outer = TensorDict({"n": members[0]}).lock_()
    members[1].lock_()
    with pytest.raises(Locked):
        stack.unlock_()
    assert members[1].is_locked
    stack.is_locked = True
    assert outer.is_locked


def test_results_of_three_operands_and_norms_are_locked_as_the_container_is() -> None:
    td = TensorDict({"a": torch.ones(3, 2)}, [3]).lock_()
    rows = torch.ones(3)
    results = (td.lerp(td, rows), td.addcmul(td, rows), td.addcdiv(rows, td), td.norm())
    assert all(result.is_locked for result in results)
    free = (td.where(rows > 0, td, pad=0), td.expand_as(td), td.norm(0), td.clamp(rows, rows))
    assert not any(result.is_locked for result in free)
