"""Writes into members that are single rows: their values are written as those of a batch are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    KeyThroughLeaf,
    LazyStackedTensorDict,
    Locked,
    MetaData,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from kd_core._types import Index
from kd_core.testing import assert_close

WORDS = ("a", "b", "c")
OTHER = TensorDict({"x": torch.arange(3) + 7, "w": ["d", "b", "e"], "n": {"w": ["f"] * 3}}, [3])
ROW = TensorDict({"x": torch.tensor(7), "w": "a", "n": {"w": "z"}})


def dense() -> TensorDictBase:
    entries = {"x": torch.arange(3), "w": list(WORDS), "n": {"w": list(WORDS)}}
    return TensorDict(entries, [3])


def stacked() -> TensorDictBase:
    rows = enumerate(WORDS)
    return lazy_stack([TensorDict({"x": torch.tensor(i), "w": w, "n": {"w": w}}) for i, w in rows])


def enclosed() -> TensorDictBase:
    return TensorDict({"s": stacked()}, [3])


Write = Callable[[TensorDictBase], object]

WRITES: dict[str, Write] = {
    "row": lambda td: td.__setitem__(1, ROW),
    "mapping": lambda td: td.__setitem__(-1, {"w": "z", "n": {"w": "y"}}),
    "rows": lambda td: td.__setitem__(slice(1, 3), OTHER[:2]),
    "the same row for all": lambda td: td.__setitem__(..., ROW),
    "numbers": lambda td: td.__setitem__([2, 0], OTHER[1:]),
    "mask": lambda td: td.__setitem__(td["x"] > 0, ROW),
    "set_at_": lambda td: td.set_at_(("n", "w"), "z", 0),
    "set_at_ with a new dimension": lambda td: td.set_at_("w", "z", (None, 1)),
    "set_at_ with numbers between new dimensions": lambda td: td.set_at_(
        "w", "z", (None, [1], None)
    ),
    "a row under a new dimension": lambda td: td.__setitem__((None, -1), ROW),
    "update_at_": lambda td: td.update_at_({"w": ["z", "y"]}, slice(2)),
    "set_": lambda td: td.set_("w", ["z", "b", "y"]),
    "set_ of all": lambda td: td.set_("w", "a"),
    "update_": lambda td: td.update_({"w": "a", "n": {"w": ["z", "y", "x"]}}),
    "update_ of a container": lambda td: td.update_(OTHER),
    "update in place": lambda td: td.update({"w": "a"}, inplace=True),
    "copy_": lambda td: td.copy_(OTHER),
    "copy_ of a row": lambda td: td.copy_(ROW),
    "through a part": lambda td: td[1:].set_("w", ["z", "y"]),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("lock", [False, True])
def test_values_are_written_as_those_of_a_batch(name: str, lock: bool) -> None:
    expected, td = dense(), stacked()
    members = list(td.unbind(0))
    if lock:
        td.lock_()
    WRITES[name](expected)
    WRITES[name](td)
    assert td.tolist() == expected.tolist()
    assert [member["w"] for member in members] == expected["w"]


def test_values_of_a_stack_in_a_batch_are_written() -> None:
    td = enclosed()
    td[0] = {"s": {"w": "z"}}
    td.update_({"s": {"n": {"w": ["z", "y", "x"]}}})
    assert td["s", "w"] == ["z", "b", "c"]
    assert td["s", "n", "w"] == ["z", "y", "x"]


@pytest.mark.parametrize("make", [dense, stacked])
def test_a_write_that_fails_writes_no_value(make: Callable[[], TensorDictBase]) -> None:
    td = make()
    wrong = {"w": "z", "x": torch.zeros(7)}
    for write in (
        lambda: td.update_(wrong),
        lambda: td.__setitem__(0, wrong),
        lambda: td.update(wrong, inplace=True),
        lambda: td.update_({"x": 5, "w": torch.zeros(3)}),
    ):
        with pytest.raises((ValueError, TypeError)):
            write()
        assert td.tolist() == dense().tolist()


COPIES: tuple[Callable[[TensorDictBase], TensorDictBase], ...] = (
    lambda td: td.clone(),
    lambda td: td.clone(recurse=False),
    lambda td: td.copy(),
    copy.copy,
    lambda td: td.unflatten_keys("."),
)


@pytest.mark.parametrize("make", [dense, stacked])
@pytest.mark.parametrize("copy", COPIES)
def test_copies_have_values_of_their_own(
    make: Callable[[], TensorDictBase], copy: Callable[[TensorDictBase], TensorDictBase]
) -> None:
    td = make()
    if make is dense:
        td["n", "one"] = "a"
    writes: tuple[Write, ...] = (
        lambda td: td.__setitem__(0, {"w": "z"}),
        lambda td: td.update_({"n": {"w": "z"}}),
        lambda td: td.update_({"n": {"one": "z"}} if make is dense else {"w": "y"}),
    )
    for write in writes:
        copied = copy(td)
        before = td.to_dict(convert_tensors=True)
        write(copied)
        assert td.to_dict(convert_tensors=True) == before
        before = copied.to_dict(convert_tensors=True)
        write(td)
        assert copied.to_dict(convert_tensors=True) == before


def test_a_value_of_all_rows_is_not_written() -> None:
    td = TensorDict({"w": MetaData("a")}, [2])
    with pytest.raises(
        InvalidArgument, match="`w` holds one value for the whole batch, 'a', which"
    ):
        td[0] = {"w": "z"}


def test_a_row_of_a_shared_value_says_where_it_is_written() -> None:
    row = TensorDict({"w": "a"}, [2])[0]
    with pytest.raises(InvalidArgument, match="or `set_at_` on the batch whose row it is"):
        row.set_("w", "z")


@pytest.mark.parametrize("index", [0, slice(0, 2), [0, 1], (slice(None), 0), ...])
def test_rows_take_values_of_leading_size_1_as_a_dense_container_does(index: Index) -> None:
    stack = lazy_stack([TensorDict({"x": torch.zeros(2)}, [2]) for _ in range(3)])
    whole = stack.contiguous()
    shape = whole.get_at("x", index).shape
    value = torch.arange(float(shape.numel())).reshape(1, 1, *shape)
    stack.set_at_("x", value, index)
    whole.set_at_("x", value, index)
    assert stack["x"].tolist() == whole["x"].tolist()
    assert stack["x"].any()


def test_a_container_of_tensors_is_not_written_as_a_value() -> None:
    tensors = {"b": torch.ones(3)}
    writes: list[Callable[[TensorDictBase], object]] = [
        lambda td: td.update_({"w": tensors}),
        lambda td: td.set_("w", TensorDict(tensors, [3])),
        lambda td: td.set_at_("w", tensors, 0),
    ]
    for td in (dense(), stacked()):
        for write in writes:
            with pytest.raises(KeyThroughLeaf, match="`w` holds values that are not tensors, got"):
                write(td)
        assert td["w"] == list(WORDS)
        assert td.set_at_("w", {"b": 1}, 0)["w"] == [{"b": 1}, *WORDS[1:]]


@pytest.mark.parametrize("index", [(..., -1), (..., slice(-1, None))])
def test_an_ellipsis_means_the_dimensions_of_the_tensor(index: Index) -> None:
    inner = TensorDict({"a": torch.zeros(2), "w": ["x", "y"]}, [2])
    stack = lazy_stack([TensorDict({"n": inner.clone()}) for _ in range(3)])
    assert stack.set_at_(("n", "a"), 2.0, index) is stack
    assert stack["n", "a"].tolist() == [[0, 2], [0, 2], [0, 2]]
    assert stack.get_at(("n", "a"), index).unique().tolist() == [2]
    assert stack.set_at_(("n", "w"), "z", (..., -1))["n", "w"][2] == ["z", "z"]


def test_a_list_is_stored_member_by_member() -> None:
    rows = [TensorDict({"a": torch.zeros(n), "s": "x"}) for n in (1, 2)]
    stack = lazy_stack(rows)
    values = [torch.ones(3), torch.ones(4)]
    stack["new"] = values
    assert [row["new"] is value for row, value in zip(rows, values, strict=True)] == [True, True]
    stack.update(
        {"new": values, "below": [TensorDict({"b": value}) for value in values]}, clone=True
    )
    assert rows[0]["new"] is not values[0]
    assert rows[1]["below", "b"].shape == (4,)
    stack["s"] = ["y", "z"]
    assert rows[1]["s"] == "z"


def test_a_ragged_list_is_written_in_place() -> None:
    rows = [TensorDict({"a": torch.zeros(n)}) for n in (1, 2)]
    leaves = [row["a"] for row in rows]
    lazy_stack(rows).lock_().set_("a", [torch.ones(1), torch.ones(2)])
    lazy_stack(rows).update_({"a": [leaf * 2 for leaf in leaves]})
    assert [leaf.tolist() for leaf in leaves] == [[2.0], [2.0, 2.0]]


def test_a_list_that_does_not_fit_changes_nothing() -> None:
    rows = [TensorDict({"a": torch.zeros(2, n)}, [2]) for n in (1, 2)]
    stack = lazy_stack(rows)
    with pytest.raises(ShapeMismatch, match=r"does not fit entry `a`.* got \(3,\)"):
        stack["a"] = [torch.ones(2, 5), torch.ones(3)]
    with pytest.raises(ShapeMismatch, match="to `a` in place"):
        stack.set_("a", [torch.ones(2, 1), torch.ones(2, 5)])
    with pytest.raises(InvalidValue, match="must hold each member once"):
        lazy_stack([rows[0], rows[0]]).set_("a", [torch.ones(2, 1), torch.zeros(2, 1)])
    assert [row["a"].shape for row in rows] == [(2, 1), (2, 2)]
    assert not any(row["a"].any() for row in rows)


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (1, [1]),
        (slice(0, 2), [0, 1]),
        ([0, 2], [0, 2]),
        (torch.tensor([True, False, True]), [0, 2]),
    ],
)
def test_rows_bring_keys_that_the_members_lack(index: Index, rows: list[int]) -> None:
    members = [TensorDict({"a": torch.zeros(2)}), TensorDict(), TensorDict({"a": torch.zeros(2)})]
    kept = members[0]["a"]
    new = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.arange(3)}}, [3])
    lazy_stack(members)[index] = new[index]
    assert members[0]["a"] is kept
    for row, member in enumerate(members):
        written = row in rows
        assert ("n" in member) is written
        if written:
            assert member["a"].tolist() == [1, 1]
            assert member["n", "b"] == row


def test_rows_with_new_keys_that_do_not_fit_change_nothing() -> None:
    members = [TensorDict({"a": torch.zeros(2)}) for _ in range(2)]
    with pytest.raises(ShapeMismatch):
        lazy_stack(members)[0] = TensorDict({"new": 1, "a": torch.ones(3)})
    with pytest.raises(KeySetMismatch, match="`new`"):  # a member cannot be two rows
        lazy_stack(members)[[1, 1]] = TensorDict({"new": [1, 2], "a": torch.ones(2, 2)}, [2])
    with pytest.raises(ShapeMismatch):  # of two members, the second row does not fit
        lazy_stack([*members[:1], TensorDict({"a": torch.zeros(3)})])[:] = TensorDict(
            {"new": [1, 2], "a": torch.ones(2, 2)}, [2]
        )
    with pytest.raises(Locked):
        lazy_stack([member.lock_() for member in members])[0] = TensorDict({"new": 1})
    assert all(list(member.keys()) == ["a"] and not member["a"].any() for member in members)


def test_rows_of_members_get_new_keys_with_zeros_elsewhere() -> None:
    for dim in (0, 1):
        members = [TensorDict({"a": torch.zeros(3), "n": {"c": torch.zeros(3)}}, [3]) for _ in "ab"]
        stack = lazy_stack(members, dim)
        at = (0, 1) if dim == 0 else (1, 0)
        stack[at] = TensorDict({"a": 1.0, "new": 2.0, "n": {"d": 3.0}})
        assert members[0]["a"].tolist() == [0, 1, 0]
        assert members[0]["new"].tolist() == [0, 2, 0]
        assert members[0]["n", "d"].tolist() == [0, 3, 0]
        assert list(members[1].keys(True)) == ["a", "n", ("n", "c")]


def test_new_keys_of_several_rows_are_copied_and_broadcast() -> None:
    members = [TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)]
    given = torch.ones(2, 2)
    lazy_stack(members, 1)[:, :2] = TensorDict({"new": given}, [2, 2])
    given.zero_()
    assert [member.get("new", torch.zeros(2)).tolist() for member in members] == [
        [1, 1],
        [1, 1],
        [0, 0],
    ]
    lazy_stack(members)[1:, :1] = {"more": torch.ones(2, 1, 2)}
    assert [list(member.keys()) for member in members] == [
        ["a", "new"],
        ["a", "new", "more"],
        ["a", "more"],
    ]
    assert members[2]["more"].tolist() == [[1, 1], [0, 0]]
    lazy_stack(members)[:] = TensorDict({"a": 4.0, "last": 5.0})
    assert all(member["last"].tolist() == [5, 5] for member in members)


def ragged() -> TensorDictBase:
    return lazy_stack([TensorDict({"a": torch.zeros(2, n)}, [2]) for n in (1, 2, 3)])


@pytest.mark.parametrize("index", [..., slice(0, 2), [0, 2], torch.tensor([True, False, True])])
@pytest.mark.parametrize("write", ["update_at_", "copy_at_", "__setitem__"])
def test_one_row_is_written_to_ragged_members(index: Index, write: str) -> None:
    stack = ragged()
    row = TensorDict({"a": torch.tensor([[1.0], [2.0]])}, [2])
    if write == "__setitem__":
        stack[index] = row
    else:
        getattr(stack, write)(row, index)
    written = range(3) if index is ... else torch.arange(3)[index].tolist()
    for number, member in enumerate(stack.unbind(0)):
        value = [1.0, 2.0] if number in written else [0.0, 0.0]
        assert member["a"].tolist() == [[each] * (number + 1) for each in value]


def test_ragged_members_are_written_from_a_stack_of_the_same_shapes() -> None:
    stack = ragged()
    kept = [member["a"] for member in stack.unbind(0)]
    stack.update_at_(stack.apply(torch.ones_like), None)
    assert all(bool(each.all()) for each in kept)
    with pytest.raises(ShapeMismatch):
        stack.update_at_(TensorDict({"a": torch.ones(4, 1)}, [4]), ...)


WHOLE = slice(None)
SHIFTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "rows": (lambda td: td[1:], lambda td: td[:-1]),
    "rows back": (lambda td: td[:-1], lambda td: td[1:]),
    "columns": (lambda td: td[:, 1:], lambda td: td[:, :-1]),
    "both": (lambda td: td[1:, 1:], lambda td: td[:-1, :-1]),
    "across": (lambda td: td[1:, :-1], lambda td: td[:-1, 1:]),
    "turned": (lambda td: td, lambda td: lazy_stack(td.unbind(0)[::-1])),
}
SHIFTED: dict[str, Callable[[Any, Any], object]] = {
    "[:]": lambda td, rows: td.__setitem__(WHOLE, rows),
    "[:, :]": lambda td, rows: td.__setitem__((WHOLE, WHOLE), rows),
    "[numbers]": lambda td, rows: td.__setitem__(torch.arange(td.shape[0]), rows),
    "[:] of one entry": lambda td, rows: td.__setitem__(WHOLE, rows.select("b")),
    "update_": lambda td, rows: td.update_(rows),
    "update_ of one entry": lambda td, rows: td.update_(rows.select("b")),
    "update_at_": lambda td, rows: td.update_at_(rows, WHOLE),
    "copy_": lambda td, rows: td.copy_(rows),
    "add_": lambda td, rows: td.add_(rows),
    "lerp_": lambda td, rows: td.lerp_(rows, 0.5),
    "addcmul_": lambda td, rows: td.addcmul_(rows, rows),
    "nested": lambda td, rows: TensorDict({"n": td}, td.shape).update_({"n": rows}),
    "nested [:]": lambda td, rows: TensorDict({"n": td}, td.shape).__setitem__(
        WHOLE, TensorDict({"n": rows}, rows.shape)
    ),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shift", SHIFTS)
def test_rows_of_a_stack_are_read_before_one_of_them_is_written(shift: str, dim: int) -> None:
    to, of = SHIFTS[shift]
    for name, write in SHIFTED.items():
        leaves = {"a": torch.arange(16.0).reshape(4, 4), "b": torch.arange(16.0, 32).reshape(4, 4)}
        batch = TensorDict(leaves, [4, 4])
        dense, views = batch.clone(), lazy_stack(batch.clone().unbind(dim), dim)
        stack = lazy_stack([row.clone() for row in batch.unbind(dim)], dim)
        write(to(dense), of(dense).clone())
        for made in (stack, views):
            write(to(made), of(made))
            for key in leaves:
                assert torch.equal(made[key], dense[key]), (name, key)


def test_rows_of_a_batch_are_read_before_a_stack_of_its_rows_is_written() -> None:
    batch = TensorDict({"a": torch.arange(4)}, [4])
    stack = lazy_stack(batch.unbind(0))
    stack[1:] = batch[:-1]
    assert batch["a"].tolist() == [0, 0, 1, 2]
    stack[1:].update_(batch[:-1])
    assert batch["a"].tolist() == [0, 0, 0, 1]


def test_compiled_code_reads_rows_of_a_stack_before_it_writes_one() -> None:
    def shift(stack: TensorDictBase) -> None:
        stack[1:] = stack[:-1]
        stack[1:].update_(stack[:-1])

    members = [TensorDict({"a": torch.tensor([i])}, [1]) for i in range(4)]
    torch.compile(shift, backend="eager", fullgraph=True)(lazy_stack(members))
    assert [member["a"].item() for member in members] == [0, 0, 0, 1]


def test_one_value_without_a_batch_is_written_in_place() -> None:
    td = TensorDict({"w": "a", "m": MetaData("b"), "n": {"w": "c"}})
    same = td.select("w", "m", "n")
    td[()] = TensorDict({"w": "z", "m": "y"})
    td[...] = {"n": {"w": "x"}}
    assert same.to_dict() == {"w": "z", "m": "y", "n": {"w": "x"}}
    td.lock_().update({"w": "v", "n": {"w": "u"}}, inplace=True)
    assert same.to_dict() == {"w": "v", "m": "y", "n": {"w": "u"}}
    rows = lazy_stack([TensorDict({"w": "a"}), TensorDict({"w": "a"})])
    rows.unbind(0)[0][()] = TensorDict({"w": "z"})
    assert rows["w"] == ["z", "a"]


def test_values_of_rows_are_broadcast_to_a_stack() -> None:
    part = TensorDict({"w": ["a", "b"]}, [2])
    for dim, expected in enumerate(([["c", "d"]] * 2, [["c", "c"], ["d", "d"]])):
        td = lazy_stack([part.clone(), part.clone()], dim)
        td[:] = lazy_stack([TensorDict({"w": ["c", "d"]}, [2])], dim)
        assert td["w"] == expected
    td = lazy_stack([part.clone(), part.clone()])
    with pytest.raises((ShapeMismatch, IndexError)):
        td[:] = lazy_stack([TensorDict({"w": ["c", "d", "e"]}, [3])])


def of_words(dim: int = 0) -> tuple[TensorDict, TensorDict, TensorDictBase]:
    """Return two members that have one word for all of their rows, and their stack."""
    one, other = [TensorDict({"w": "a", "n": {"w": "b"}}, [2, 3]) for _ in range(2)]
    return one, other, lazy_stack([one, other], dim)


def test_rows_of_a_member_with_one_value_for_all_are_written() -> None:
    one, other, td = of_words()
    td[0, 0] = {"w": "z", "n": {"w": "y"}}
    assert one["w"] == [["z"] * 3, ["a"] * 3]
    assert one["n", "w"] == [["y"] * 3, ["b"] * 3]
    assert other["w"] == "a"
    td.set_at_(("n", "w"), "x", (slice(None), 1, 2))
    assert one["n", "w"] == [["y"] * 3, ["b", "b", "x"]]
    assert other["n", "w"] == [["b"] * 3, ["b", "b", "x"]]
    td[0] = {"w": "v"}  # all rows of a member
    assert one["w"] == [["v"] * 3] * 2


def test_such_rows_are_written_by_mask_and_in_stacks_of_stacks() -> None:
    one, other, td = of_words(1)
    mask = torch.zeros(2, 2, 3, dtype=torch.bool)
    mask[0, 1, 2] = True
    td[mask] = TensorDict({"w": ["z"]}, [1])
    assert other["w"] == [["a", "a", "z"], ["a"] * 3]
    assert one["w"] == "a"
    first, _, inside = of_words()
    lazy_stack([inside, inside.clone()])[0, 0, 1] = {"w": "z"}
    assert first["w"] == [["a"] * 3, ["z"] * 3]


def test_such_rows_stay_where_a_write_fails_and_are_held_by_a_lock() -> None:
    one, _, td = of_words()
    with pytest.raises(ShapeMismatch):
        td[0, 0] = {"w": "z", "n": {"w": ["x"] * 4}}
    assert one["w"] == "a"
    assert one["n", "w"] == "b"
    td.lock_()
    td[0, 0] = {"w": "z"}
    assert one["w"] == [["z"] * 3, ["a"] * 3]
    word: Any = one.get("w")
    assert word.is_locked


@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 2, 2), (1, 2, 3)])
def test_values_of_rows_are_lined_up_from_the_left(sizes: tuple[int, ...]) -> None:
    def make() -> LazyStackedTensorDict:
        return lazy_stack([TensorDict({"a": torch.zeros(size)}) for size in sizes])

    rows = torch.tensor([1.0, 2.0, 3.0])
    writes: list[Callable[[LazyStackedTensorDict], object]] = [
        lambda td: td.set_("a", rows),
        lambda td: td.update_({"a": rows}),
        lambda td: td.update_(TensorDict({"a": rows}, [3])),
        lambda td: td.set_("a", rows[:, None]),
    ]
    for write in writes:
        stack = make()
        write(stack)
        written = [member["a"].tolist() for member in stack.tensordicts]
        assert written == [[row] * size for row, size in zip((1, 2, 3), sizes, strict=True)]


def test_new_entries_of_a_stack_that_updates_another_are_shared() -> None:
    target, source = (lazy_stack([TensorDict(a=float(i)) for i in range(2)]) for _ in "ab")
    before = target[0]["a"]
    target.update(source + 1, inplace=True)
    assert before.item() == 1
    source["new"] = torch.ones(2)
    target.update(source, inplace=True)
    source.add_(1)
    assert target["new"].tolist() == [2, 2]


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_view_with_one_dimension_more_writes_values_of_members(batch: tuple[int, ...]) -> None:
    members = [TensorDict({"w": "v", "a": torch.zeros(batch)}, batch) for _ in range(2)]
    stack = lazy_stack(members)
    for dim in (0, -1):
        view = stack.unsqueeze(dim)
        view.set_("w", f"W{dim}")
        assert [member["w"] for member in members] == [f"W{dim}"] * 2
    stack.set_("w", "u")
    assert (stack.unsqueeze(0)[0] == stack).all()
    stack.unsqueeze(-1)[1].update_({"w": "x"})
    assert [member["w"] for member in members] == ["u", "x"]


@pytest.mark.parametrize(
    "index", [slice(None), ..., None, [1, 0], torch.tensor([0, 1]), torch.tensor([True, True])]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_that_each_member_gets_are_lined_up_from_the_right(index: Any, dim: int) -> None:
    entries: dict[str, Any] = {"a": torch.arange(4.0).reshape(2, 2), "n": {"b": torch.arange(2.0)}}
    stack = lazy_stack([TensorDict(entries, [2]).clone() * 0 for _ in range(2)], dim)
    dense = stack.contiguous()
    for td in (stack, dense):
        td[index] = TensorDict(entries, [2])
    assert_close(stack.contiguous(), dense)
    for value in (entries["a"] + 1, {"a": torch.arange(4.0).reshape(2, 2) + 2}):
        for td in (stack, dense):
            td[index] = value
        assert_close(stack.contiguous(), dense)
    for td in (stack, dense):
        td.set_at_("a", torch.arange(4.0).reshape(2, 2) + 3, slice(None))
    assert_close(stack.contiguous(), dense)
