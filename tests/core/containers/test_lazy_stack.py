"""What is particular to lazy stacks: members that differ, and rows that go to them."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from tests.core.kinds import inner

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeyNotFound,
    KeySetMismatch,
    LazyStackedTensorDict,
    Locked,
    NonTensorData,
    NonTensorStack,
    OutOfRange,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    cat,
    dense_stack_tds,
    lazy_stack,
    maybe_dense_stack,
)
from kd_core import (
    stack as stack_dense,
)
from kd_core.testing import assert_close


def members(*lengths: int) -> list[TensorDict]:
    return [TensorDict({"a": torch.full((n,), float(n)), "b": torch.tensor(n)}) for n in lengths]


def ids(*things: object) -> list[int]:
    return [id(thing) for thing in things]


def test_a_row_of_a_ragged_stack_is_written() -> None:
    rows = [TensorDict({"a": torch.ones(n), "word": f"row {n}"}) for n in (2, 3)]
    td = lazy_stack(rows)
    td[0] = TensorDict({"a": torch.zeros(2), "word": "row 1"})
    assert rows[0]["a"].tolist() == [0, 0]
    assert rows[0]["word"] == "row 1"
    with pytest.raises(ShapeMismatch, match="`a`"):
        td[0] = TensorDict({"a": torch.zeros(3), "word": "row 3"})
    assert rows[0]["word"] == "row 1"


def test_the_stack_dimension_is_one_more() -> None:
    rows = [TensorDict({"a": torch.zeros(2, 3)}, [2, 3]) for _ in range(4)]
    assert lazy_stack(rows, 0).batch_size == (4, 2, 3)
    assert lazy_stack(rows, 1).batch_size == (2, 4, 3)
    assert lazy_stack(rows, -1).batch_size == (2, 3, 4)
    assert lazy_stack(rows, -1).stack_dim == 2
    with pytest.raises(OutOfRange, match="dimension 3"):
        lazy_stack(rows, 3)


def test_members_need_as_many_dimensions() -> None:
    with pytest.raises(ShapeMismatch, match=r"as many dimensions, got \(\) in member 0 and \(2,\)"):
        lazy_stack([TensorDict(), TensorDict({}, [2])])
    with pytest.raises(InvalidValue, match="at least one member"):
        lazy_stack([])


def test_only_keys_of_all_members_are_seen() -> None:
    rows = members(2, 2)
    rows[0]["own"] = 1.0
    rows[1]["n", "own"] = 1.0
    stack = lazy_stack(rows)
    assert set(stack.keys()) == {"a", "b"}
    assert "own" not in stack
    with pytest.raises(KeyNotFound, match="`own`"):
        stack["own"]
    assert rows[0]["own"] == 1


def test_keys_that_are_not_seen_take_no_part() -> None:
    rows = members(2, 2)
    rows[0]["own"] = 1.0
    assert_close(lazy_stack(rows) + 1, lazy_stack(members(2, 2)) + 1)


def test_a_ragged_entry_is_read_from_the_members() -> None:
    stack = lazy_stack(members(2, 3, 2))
    with pytest.raises(
        ShapeMismatch, match=r"`a` is ragged: .* 3 members are \(2,\), \(3,\)\. Read"
    ):
        stack["a"]
    torch.testing.assert_close(stack["b"], torch.tensor([2, 3, 2]))
    assert [row["a"].shape[0] for row in stack.unbind(0)] == [2, 3, 2]
    assert "a: ragged" in repr(stack)


def test_a_ragged_stack_calculates_member_by_member() -> None:
    stack = lazy_stack(members(2, 3))
    result = (stack + 1) * stack
    assert type(result) is LazyStackedTensorDict
    torch.testing.assert_close(result[1]["a"], torch.full((3,), 12.0))
    stack.add_(1)
    torch.testing.assert_close(stack[0]["a"], torch.full((2,), 3.0))
    assert type(stack.clone()) is LazyStackedTensorDict


def test_entries_of_different_kinds_are_refused() -> None:
    rows = [TensorDict({"a": torch.zeros(2)}), TensorDict({"a": {"b": 1.0}})]
    with pytest.raises(
        KeySetMismatch, match=r"`a` must be of one kind .* a `TensorDict` and a `Tensor`"
    ):
        lazy_stack(rows)["a"]


def test_data_of_rows_is_one_value_per_row() -> None:
    rows = [TensorDict({"word": "x", "other": i}) for i in "ab"]
    assert lazy_stack(rows).get_non_tensor("word") == ["x", "x"]
    assert lazy_stack(rows).get_non_tensor("other") == ["a", "b"]
    assert lazy_stack(rows)[1:].get_non_tensor("other") == ["b"]
    batches = [TensorDict({"word": "x", "other": i}, [2]) for i in "ab"]
    assert lazy_stack(batches, 1).get_non_tensor("word") == [["x", "x"]] * 2
    assert lazy_stack(batches, 1).get_non_tensor("other") == [["a", "b"]] * 2


def test_rows_of_the_stacked_dimension_are_the_members() -> None:
    rows = members(2, 3, 4)
    stack = lazy_stack(rows)
    assert ids(stack[1], stack[-1]) == ids(rows[1], rows[2])
    assert ids(*stack) == ids(*stack.unbind(0)) == ids(*rows)
    part = stack[1:]
    assert type(part) is LazyStackedTensorDict
    assert ids(*part) == ids(*rows[1:])
    with pytest.raises(OutOfRange, match="3"):
        stack[3]


def test_writing_reaches_the_members() -> None:
    rows = members(2, 2)
    stack = lazy_stack(rows)
    stack["c"] = torch.tensor([5.0, 6.0])
    stack["n", "d"] = torch.tensor([7.0, 8.0])
    stack.set_("b", torch.tensor([1, 0]))
    stack[0] = 9
    assert rows[1]["c"] == 6
    assert rows[1]["n", "d"] == 8
    assert rows[1]["b"] == 0
    torch.testing.assert_close(rows[0]["a"], torch.full((2,), 9.0))
    del stack["c"]
    assert "c" not in rows[0]


def test_a_lazy_stack_is_written_to_a_lazy_stack_member_by_member() -> None:
    stack, others = lazy_stack(members(2, 2)), members(2, 3)
    stack["n"] = lazy_stack(others)
    assert ids(stack[1].get("n")) == ids(others[1])


def test_a_nested_container_is_a_lazy_stack() -> None:
    rows = [TensorDict({"n": {"a": torch.zeros(2)}}, [2]) for _ in range(3)]
    stack = lazy_stack(rows, 1)
    nested = inner(stack, "n")
    assert type(nested) is LazyStackedTensorDict
    nested["b"] = torch.arange(6.0).reshape(2, 3)
    torch.testing.assert_close(rows[1]["n", "b"], torch.tensor([1.0, 4.0]))


def test_a_lock_holds_the_members() -> None:
    rows = members(2, 2)
    stack = lazy_stack(rows).lock_()
    with pytest.raises(Locked, match="enclosing"):
        rows[0]["a"] = 1.0
    assert [id(stack[0]), stack[0].is_locked] == [id(rows[0]), True]
    assert stack[:1].is_locked
    assert stack.unbind(0)[0].is_locked
    stack.unlock_()
    rows[0]["a"] = torch.zeros(2)


def test_a_member_that_is_there_twice_is_unlocked_with_its_stack() -> None:
    first, twice = members(2, 2)
    stack = lazy_stack([first, twice, twice])
    for rows in ([], [twice], [first, twice]):  # locked by themselves before
        for row in rows:
            row.lock_()
        assert stack.lock_().is_locked
        with pytest.raises(Locked, match="encloses"):
            twice.unlock_()
        assert not stack.unlock_().is_locked
        twice["b"] = torch.zeros(2)
        assert not first.is_locked
        assert not twice.is_locked


def test_a_stack_of_stacks_unlocks_the_members_that_all_share() -> None:
    row = members(1, 2)[0]
    nested = lazy_stack([row, row])
    outer = lazy_stack([nested, nested])
    for locked in (row, nested, outer):
        locked.lock_()
        assert outer.is_locked
        assert not outer.unlock_().is_locked
        assert not nested.is_locked
        row["b"] = torch.zeros(2)


def test_a_member_that_another_container_holds_keeps_the_stack_locked() -> None:
    first, row = members(2, 2)
    stack = lazy_stack([first, row, row]).lock_()
    holder = TensorDict({"n": row}).lock_()
    with pytest.raises(Locked, match="encloses"):
        stack.unlock_()
    assert stack._kd_desc.lock is not None
    assert first.is_locked
    with pytest.raises(Locked, match="encloses"):
        holder.unlock_()
    del holder
    assert not stack.unlock_().is_locked
    assert not row.is_locked


def test_a_locked_member_changes_neither_it_nor_the_others() -> None:
    rows = members(2, 2)
    rows[1].lock_()
    with pytest.raises(Locked, match="set `c`"):
        lazy_stack(rows)["c"] = torch.zeros(2)
    assert "c" not in rows[0]
    with pytest.raises(Locked, match="remove `a`"):
        del lazy_stack(rows)["a"]
    assert "a" in rows[0]


def test_contiguous_stacks_all_entries() -> None:
    rows = [TensorDict({"n": {"a": torch.full((2,), float(i))}, "w": "x"}, [2]) for i in range(3)]
    dense: TensorDictBase = lazy_stack(rows, 1).contiguous()
    assert type(dense) is TensorDict
    assert type(inner(dense, "n")) is TensorDict
    torch.testing.assert_close(dense["n", "a"], torch.tensor([[0.0, 1, 2], [0, 1, 2]]))
    assert dense["w"] == [["x"] * 3] * 2


class Text(TensorClass):
    ids: torch.Tensor


def test_maybe_dense_stack_is_dense_where_members_are_alike() -> None:
    assert type(maybe_dense_stack(members(2, 2))) is TensorDict
    assert type(maybe_dense_stack(members(2, 3))) is LazyStackedTensorDict
    rows = members(2, 2)
    rows[0]["own"] = 1.0
    assert type(maybe_dense_stack(rows)) is LazyStackedTensorDict
    assert type(maybe_dense_stack([Text(ids=torch.ones(2)), Text(ids=torch.zeros(2))])) is Text


def test_maybe_dense_stack_is_lazy_where_nested_containers_differ() -> None:
    def member(rows: int, more: int = 1) -> TensorDict:
        below = TensorDict({"y": torch.ones(2, rows), "m": {"z": torch.ones(2, more)}}, [2])
        return TensorDict({"n": below, "x": torch.ones(2), "w": "word"}, [2])

    for dim, size in ((0, (2, 2)), (1, (2, 2)), (-1, (2, 2))):
        stacked = maybe_dense_stack([member(1), member(2)], dim)
        assert type(stacked) is TensorDict
        assert stacked.batch_size == inner(stacked, "n").batch_size == size
        assert type(inner(stacked, "n")) is LazyStackedTensorDict
        assert list(stacked.keys()) == ["n", "x", "w"]
    deeper = maybe_dense_stack([member(1), member(1, 2)])
    assert type(inner(deeper, "n")) is TensorDict
    assert type(inner(inner(deeper, "n"), "m")) is LazyStackedTensorDict
    assert deeper["n", "y"].shape == (2, 2, 1)
    other = member(1)
    del other["n", "m"]
    assert type(inner(maybe_dense_stack([member(1), other]), "n")) is LazyStackedTensorDict
    other["x"] = torch.ones(2, 1)
    assert type(maybe_dense_stack([member(1), other])) is LazyStackedTensorDict
    row = TensorDict({"n": TensorDict({"y": torch.ones(2, 3)}, [2, 3]), "x": torch.ones(2)}, [2])
    wide = TensorDict({"n": TensorDict({"y": torch.ones(2, 4)}, [2, 4]), "x": torch.ones(2)}, [2])
    assert type(maybe_dense_stack([row, wide])) is LazyStackedTensorDict  # of other batch sizes


def test_a_stack_of_stacks_reads_and_writes() -> None:
    grid = [lazy_stack(members(2, 2)) for _ in range(3)]
    stack = lazy_stack(grid)
    assert stack["a"].shape == (3, 2, 2)
    stack.set_("b", torch.arange(6).reshape(3, 2))
    assert grid[2][1]["b"] == 5
    assert_close(stack + 1, stack.contiguous() + 1)


def test_a_lazy_stack_inside_of_a_container_takes_part() -> None:
    td = TensorDict({"s": lazy_stack(members(2, 2)), "x": torch.zeros(2)}, [2])
    rows = inner(td, "s").unbind(0)
    td.add_(torch.tensor([1.0, 2.0]).long())
    torch.testing.assert_close(rows[1]["a"], torch.full((2,), 4.0))
    td[0] = 0
    torch.testing.assert_close(rows[0]["a"], torch.zeros(2))
    td.update_({"s": {"b": torch.tensor([3, 4])}})
    assert rows[1]["b"] == 4
    assert (td * torch.tensor([1.0, 2.0]))["s", "a"][1, 0] == 8


def test_the_batch_size_keeps_the_stacked_dimension() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(3, 4)}, [3]) for _ in range(2)], 0)
    stack.batch_size = [2, 3, 4]
    assert stack[0].batch_size == (3, 4)
    with pytest.raises(ShapeMismatch, match="2 containers stacked along dimension 0"):
        stack.batch_size = []


def test_devices_that_differ_are_none() -> None:
    rows = [TensorDict({"a": 1.0}, device=device) for device in ("cpu", "meta")]
    assert lazy_stack(rows).device is None
    assert lazy_stack(rows[:1]).device == torch.device("cpu")


def test_a_ragged_stack_is_pickled() -> None:
    other = pickle.loads(pickle.dumps(lazy_stack(members(2, 3))))
    assert type(other) is LazyStackedTensorDict
    assert [row["a"].shape[0] for row in other] == [2, 3]


def ragged() -> LazyStackedTensorDict:
    first = TensorDict({"r": torch.zeros(3), "x": torch.zeros(2), "n": {"r": torch.zeros(1)}})
    second = TensorDict({"r": torch.zeros(4), "x": torch.ones(2), "n": {"r": torch.zeros(2)}})
    return LazyStackedTensorDict(first.set("s", "one"), second.set("s", "two").set("own", 1.0))


def test_keys_of_ragged_entries_are_listed() -> None:
    stacked = ragged()
    assert list(stacked.keys(True, True)) == ["r", "x", ("n", "r")]
    assert list(stacked.keys(True, sort=True)) == ["n", ("n", "r"), "r", "s", "x"]
    assert len(stacked.keys(True)) == 5
    assert ("n", "r") in stacked.keys(True, True)
    assert "n" not in stacked.keys(True, True)
    assert ("n", "r") in stacked
    assert ("n", "own") not in stacked


def test_a_missing_key_of_a_ragged_stack_is_the_error() -> None:
    with pytest.raises(KeyNotFound, match=r"key `own` not found; available keys: `r`, `x`"):
        ragged()["own"]


def test_a_ragged_stack_moves_member_by_member() -> None:
    moved = ragged().to("meta")
    assert isinstance(moved, LazyStackedTensorDict)
    assert moved.device == moved[0].device == moved[1]["n"].device == torch.device("meta")
    assert moved[1]["r"].is_meta


def test_a_ragged_stack_is_written_by_apply_() -> None:
    stacked = ragged()
    stacked.apply_(lambda leaf: leaf + 1)
    assert stacked[0]["r"].tolist() == [1, 1, 1]


def test_an_index_of_everything_is_the_container() -> None:
    td = TensorDict({"a": torch.zeros(3, 2), "s": "word"}, [3, 2])
    for index in (slice(None), ..., (), (slice(None),), (..., slice(None))):
        assert td[index] is td
        assert type(lazy_stack([td])[index]) is LazyStackedTensorDict
    with pytest.raises(IndexError):
        td[:, :, :]


def test_a_member_is_a_container() -> None:
    with pytest.raises(InvalidArgument, match=r"member 1 .* got a `dict`"):
        LazyStackedTensorDict(TensorDict(), {})  # type: ignore[arg-type]  # wrong on purpose


def test_equal_arrays_are_one_value() -> None:
    names = NonTensorData(numpy.array(["a", "b"]), [1])
    rows = [TensorDict({"names": copy.deepcopy(names)}, [1]) for _ in range(2)]
    assert cat(rows)["names"].tolist() == ["a", "b"]
    for stacked in (LazyStackedTensorDict(*rows), stack_dense(rows)):
        assert [each.tolist() for [each] in stacked["names"]] == [["a", "b"]] * 2


@pytest.mark.parametrize(("dim", "stacked"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)])
def test_stacked_stacks_stay_lazy(dim: int, stacked: int) -> None:
    rows = [TensorDict({"a": torch.arange(3) + i, "n": {"b": torch.ones(3)}}, [3]) for i in (0, 5)]
    one, other = lazy_stack(rows, stacked), lazy_stack(rows[::-1], stacked)
    made: object = stack_dense([one, other], dim)
    assert isinstance(made, LazyStackedTensorDict)
    assert made.stack_dim == stacked + (dim <= stacked)
    expected = torch.stack([one["a"], other["a"]], dim)
    assert made.batch_size == expected.shape
    assert torch.equal(made["a"], expected)
    made[0]["a"].fill_(9)
    assert one["a"].max() < 9


def test_stacks_nest_as_deep_as_containers() -> None:
    empty: TensorDictBase = TensorDict()
    with pytest.raises(InvalidValue, match="nested at most"):
        functools.reduce(lambda stack, _: lazy_stack([stack]), range(500), empty)


def test_stacks_of_stacks_whose_keys_differ_are_written() -> None:
    leaf = torch.ones(2)
    stack = lazy_stack(
        [lazy_stack([TensorDict(b=leaf, c=1.0)]), lazy_stack([TensorDict(b=leaf + 1)])]
    )
    stack.neg_()
    assert leaf.tolist() == [-1, -1]


def test_a_mask_without_dimensions_masks_members_without_dimensions() -> None:
    stacked = lazy_stack([TensorDict({"n": torch.tensor(-1, dtype=torch.int32)})])
    assert stacked.masked_fill(torch.tensor(True), 1)["n"].tolist() == [1]
    assert stacked.masked_fill_(torch.tensor(False), 1)["n"].tolist() == [-1]


def test_a_rearranged_stack_is_a_copy() -> None:
    rows = [TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]
    for shaped in (lazy_stack(rows).unsqueeze(0), lazy_stack(rows).transpose(0, 1)):
        shaped["a"].add_(1)
    assert not rows[0]["a"].any()


def test_get_at_returns_the_wrapper_of_data() -> None:
    stack = lazy_stack([TensorDict({"word": "x"}) for _ in range(3)])
    found: object = stack.get_at("word", slice(2))
    assert isinstance(found, NonTensorStack)
    assert (found.tolist(), found.batch_size) == (["x", "x"], (2,))


@pytest.mark.parametrize(
    "index", [(..., None), (..., 1), (..., torch.tensor([0, 1])), (None, ..., slice(0, 2)), ...]
)
def test_an_ellipsis_stands_for_the_batch_and_not_for_that_of_a_nested_stack(index: Any) -> None:
    rows = [TensorDict({"n": TensorDict({"x": torch.rand(2, 1, 2)}, [2, 1, 2])}, [2, 1])] * 3
    stack = lazy_stack([row.clone() for row in rows], 2)
    dense, holder = stack.contiguous(), TensorDict({"s": stack}, [2, 1, 3])
    assert_close(inner(holder[index], "s").contiguous(), dense[index])
    holder[index] = 0.0
    dense[index] = 0.0
    assert_close(stack.contiguous(), dense)


def test_stacks_are_written_into_out() -> None:
    rows = [TensorDict({"a": torch.full((2,), float(n))}) for n in (1, 2)]
    for stack_ in (lazy_stack, maybe_dense_stack):
        out = TensorDict({"a": torch.zeros(2, 2)}, [2])
        leaf = out["a"]
        found: object = stack_(rows, out=out)
        assert found is out
        assert leaf.tolist() == [[1, 1], [2, 2]]
        with pytest.raises(ShapeMismatch, match="`out` must have batch_size"):
            stack_(rows[:1], out=out)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("join", [stack_dense, cat], ids=["stack", "cat"])
def test_nested_ragged_stacks_are_written_into_the_members_of_out(join: Any, dim: int) -> None:
    def row(value: int) -> TensorDict:
        agents = [TensorDict({"v": torch.full((2, 1, n), value + n)}, [2, 1]) for n in (1, 2)]
        agents[0]["own"] = torch.full((2, 1), value)
        return TensorDict({"agents": lazy_stack(agents, 2), "a": torch.ones(2, 1)}, [2, 1])

    rows = [row(10), row(20)]
    wanted = join(rows, dim)
    out = wanted.apply(torch.zeros_like)
    leaves = [each["v"] for each in inner(out, "agents").unbind(-1)]
    assert join(rows, dim, out=out) is out
    assert_close(out, wanted)
    for leaf, each in zip(leaves, inner(wanted, "agents").unbind(-1), strict=True):
        assert leaf.equal(each["v"])
    del inner(rows[1], "agents").unbind(-1)[1]["v"]
    with pytest.raises(KeySetMismatch):
        join(rows, dim, out=out.apply_(torch.zeros_like))
    assert out["a"].eq(0).all()


def test_dense_stack_is_dense_wherever_members_are_alike() -> None:
    rows = [TensorDict({"a": torch.ones(2)}) for _ in range(3)]
    got = dense_stack_tds([lazy_stack(rows), lazy_stack(rows)], 1)
    assert type(got) is LazyStackedTensorDict  # as `stack` joins those member by member
    assert got["a"].shape == (3, 2, 2)
    assert type(dense_stack_tds(lazy_stack(rows))) is TensorDict
    assert type(dense_stack_tds([*rows, TensorDict({"a": torch.ones(2), "b": 1})])) is type(got)
    agents = [
        TensorDict({"n": lazy_stack(members(2, 3)), "x": torch.ones(2)}, [2]) for _ in range(3)
    ]
    steps = dense_stack_tds(lazy_stack(agents, 1))
    assert type(steps) is TensorDict
    assert steps.batch_size == (2, 3)
    below = inner(steps, "n")
    assert isinstance(below, LazyStackedTensorDict)
    assert below.batch_size == (2, 3)
    assert below.stack_dim == 0


def test_members_are_listed_whatever_locks_them() -> None:
    rows = members(2, 3)
    stack = lazy_stack(rows)
    assert ids(*stack.tensordicts) == ids(*rows)
    with pytest.raises(Locked):
        stack.lock_().tensordicts[0]["new"] = torch.zeros(())


def test_lazy_stack_takes_the_options_of_the_class() -> None:
    rows = [TensorDict({"a": torch.zeros(n)}) for n in (1, 2)]
    for make in (lazy_stack, TensorDict.lazy_stack):
        assert make(rows, stack_dim_name="time", device="meta").names == ["time"]
        assert make(rows, device="meta").device == torch.device("meta")
        with pytest.raises(ShapeMismatch, match="ragged"):
            make(rows, strict_shape=True)
        assert ids(*make(rows, as_list=True).unbind(0)) == ids(*rows)  # they are read later


def test_tensors_are_stacked_as_entries_are_read() -> None:
    rows = [torch.zeros(1), torch.ones(2)]
    assert lazy_stack(rows, as_list=True)[1] is rows[1]  # type: ignore[comparison-overlap]  # types say less than the run
    options = {"padding_value": -1.0, "padding_side": "left"}  # type: ignore[unreachable]  # types say less than the run
    padded = lazy_stack(rows, as_padded_tensor=True, **options)
    assert padded.tolist() == [[-1, 0], [1, 1]]
    assert lazy_stack(rows, as_nested_tensor=True).is_nested
    assert lazy_stack(rows[1:] * 3, 1).shape == (2, 3)
    with pytest.raises(RuntimeError, match="ragged"):
        lazy_stack(rows)


def test_a_stack_is_built_from_the_dicts_of_its_members() -> None:
    rows = {"0": {"a": torch.zeros(3, 2)}, "1": {"a": torch.ones(3, 2), "b": torch.ones(3)}}
    stack = LazyStackedTensorDict.from_dict(rows, [3], stack_dim=1, names=["t", "e"])
    assert stack.batch_size == (3, 2)
    assert stack.names == ["t", "e"]
    assert stack["a"][:, 1].tolist() == [[1, 1]] * 3
    assert "b" in stack.tensordicts[1]
    assert LazyStackedTensorDict.from_dict([{"a": 1}, {"a": 2}])["a"].tolist() == [1, 2]
    with pytest.raises(KeyNotFound, match="`0`, `1`"):
        LazyStackedTensorDict.from_dict({"0": {"a": 1}, "x": {"a": 2}})


def test_an_empty_stack_of_another_size_is_a_stack_if_the_members_fit() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(2)}, [2]) for _ in range(3)])
    for made in (stack.empty(batch_size=[3, 5]), stack.empty(device="cpu")):
        assert isinstance(made, LazyStackedTensorDict)
        assert not list(made.keys())
    assert stack.empty(batch_size=[3, 5]).batch_size == (3, 5)
    assert stack.empty(device="cpu").tensordicts[0].device == torch.device("cpu")
    assert not hasattr(stack.empty(batch_size=[7]), "tensordicts")


def test_new_leaves_of_an_empty_stack_are_none() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(2, n + 1)}, [2]) for n in range(3)])
    made = stack.new_zeros(4, 2, empty_lazy=True)
    assert isinstance(made, LazyStackedTensorDict)
    assert made.batch_size == (4, 2)
    assert not list(made.keys())


def test_a_stack_is_not_contiguous() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(2)}, [2]) for _ in range(3)])
    assert not stack.is_contiguous()
    assert stack.contiguous().is_contiguous()
    assert stack.flatten(inplace=True) is stack
    assert stack.batch_size == (6,)
    with pytest.raises(NotImplementedError, match="stays lazy"):
        stack.contiguous(inplace=True)


def test_a_selection_of_a_stack_is_a_stack_of_plain_containers() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(2, n + 1)}, [2]) for n in range(3)])
    part = stack.select("a", as_tensordict=True)
    assert isinstance(part, LazyStackedTensorDict)
    assert part.tensordicts[1]["a"] is stack.tensordicts[1]["a"]


def test_a_nested_tensor_is_strided_unless_another_layout_is_said() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(n + 1)}) for n in range(2)])
    assert stack.get_nestedtensor("a").layout is torch.strided
    assert stack.get_nestedtensor("a", layout=torch.jagged).layout is torch.jagged


def test_flattened_rows_write_through_and_repeated_rows_stay_lazy() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)])
    flat = stack.reshape(-1)
    assert isinstance(flat, LazyStackedTensorDict)
    flat[4]["a"].fill_(7)
    assert stack["a"].tolist() == [[0, 0], [0, 0], [7, 0]]
    assert stack.flatten(1) is stack
    for made, shape in ((stack.repeat(2, 1), (6, 2)), (stack.repeat_interleave(2, 1), (3, 4))):
        assert isinstance(made, LazyStackedTensorDict)
        assert made.batch_size == shape
    assert stack.repeat_interleave(torch.tensor([0, 1, 2]), 0)["a"].tolist() == [
        [0, 0],
        [7, 0],
        [7, 0],
    ]
    assert stack.repeat(1, 2)["a"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [7, 0, 7, 0]]
    assert stack.unflatten(0, (3, 1))[:, 0]["a"].tolist() == stack["a"].tolist()
    assert stack.expand(2, 3, 2)[1]["a"].tolist() == stack["a"].tolist()


def test_rows_of_ragged_members_are_written_one_by_one() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2, n + 1)}, [2]) for n in range(3)])
    mask = torch.tensor([[True, False], [False, True], [False, False]])
    stack[mask] = 1
    assert [each["a"].sum(1).tolist() for each in stack.tensordicts] == [[1, 0], [0, 2], [0, 0]]
    stack[mask] = stack[mask].clone() * 2
    assert [each["a"].sum(1).tolist() for each in stack.tensordicts] == [[2, 0], [0, 4], [0, 0]]
    stack[slice(0, 0)] = stack[slice(0, 0)]
    stack[[1, 1]] = {"a": torch.stack([torch.full((2, 2), 1.0), torch.full((2, 2), 5.0)])}
    assert stack[1]["a"].tolist() == [[5, 5], [5, 5]]  # the last of two rows of one member
    with pytest.raises(KeyError):
        stack.setdefault(("a", "x"), 1)
    assert stack.load_state_dict({}, strict=False) is stack
    assert lazy_stack([stack, stack.clone()], strict_shape=True).batch_size == (2, 3, 2)
    with pytest.raises(ShapeMismatch):
        lazy_stack(stack.tensordicts, strict_shape=True)


def test_an_entry_of_some_members_is_removed_from_those() -> None:
    once = TensorDict({"a": torch.zeros(2), "n": {"c": torch.zeros(1), "d": torch.zeros(1)}})
    both = TensorDict({"a": torch.zeros(2), "c": torch.zeros(1)})
    stack = lazy_stack([once, both, both, TensorDict({"a": torch.zeros(2)})])
    with pytest.raises(Locked):
        stack.clone().lock_().del_("c")
    assert stack.del_("c") is stack
    del stack["n", "c"]
    assert "c" not in both
    assert inner(once, "n").keys() == {"d"}
    with pytest.raises(KeyNotFound):
        stack.del_("c")
    with pytest.raises(KeyNotFound):
        del stack["n", "c"]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1)])
def test_a_stack_that_gets_a_dimension_in_place_is_no_member_of_itself(
    sizes: tuple[int, ...],
) -> None:
    rows = [lazy_stack([TensorDict({"a": torch.tensor(n)})]) for n in range(3)]
    stack = lazy_stack(rows, 1)
    assert stack.unflatten(0, sizes, inplace=True) is stack
    assert stack.batch_size == (*sizes, 3)
    assert stack["a"].flatten().tolist() == [0, 1, 2]


class Episodes(LazyStackedTensorDict):
    """A class of a user, whose instances have attributes of their own."""

    def __init__(self, *members: TensorDictBase, stack_dim: int = 0, source: str = "") -> None:
        super().__init__(*members, stack_dim=stack_dim)
        self.source = source


@pytest.mark.parametrize(
    "make",
    [
        lambda stack: stack.clone(),
        lambda stack: stack.copy(),
        lambda stack: stack + 1,
        lambda stack: stack.double(),
        lambda stack: stack.detach(),
        lambda stack: stack.select("a"),
        lambda stack: stack.flatten_keys(),
        lambda stack: stack[:1],
        lambda stack: stack.unsqueeze(0),
        lambda stack: stack.transpose(0, 1),
        lambda stack: torch.cat([stack, stack]),
        lambda stack: torch.zeros_like(stack),
        lambda stack: stack.lock_(),
    ],
)
def test_a_class_of_a_user_keeps_its_attributes(
    make: Callable[[Episodes], LazyStackedTensorDict],
) -> None:
    rows: list[TensorDictBase] = [TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]
    made = make(Episodes(*rows, source="disk"))
    assert isinstance(made, Episodes)
    assert made.source == "disk"
