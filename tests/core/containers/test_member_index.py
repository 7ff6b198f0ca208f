"""An index of a stack takes what it takes of a tensor: members, their rows, or copies of both."""

from typing import Any

import numpy
import pytest
import torch
from tests.core.kinds import inner

from kd_core import (
    LazyStackedTensorDict,
    OutOfRange,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from kd_core.testing import assert_close

DIMS = (0, 1, 2)
MASK = torch.tensor([True, False, True])
ROWS = torch.tensor([2, 0, -1])
INDICES = (
    -1,
    slice(1, None),
    slice(None, None, 2),
    slice(2, 2),
    (..., -1),
    (-1,),
    (-1, ...),
    (None, ..., 0),
    (slice(None), None, 1),
    (..., None),
    (0, slice(1, 3), -1),
    MASK,
    (slice(None), MASK),
    (..., ROWS),
    (..., ROWS, slice(0, 1)),
    (0, ROWS),
    (ROWS, 0, ..., None),
    (torch.tensor([[0, 1]]), slice(1, 2)),
    (slice(None), torch.tensor([[0, 1]])),
    (ROWS, ROWS),
    (ROWS, slice(None), ROWS),
    torch.ones(3, 3, dtype=torch.bool),
    (torch.tensor(1), ...),
)


def dense() -> TensorDict:
    a, b = torch.arange(54.0).reshape(3, 3, 3, 2), torch.arange(27.0).reshape(3, 3, 3)
    return TensorDict({"a": a, "n": {"b": b}}, [3, 3, 3])


def stacked(dim: int) -> LazyStackedTensorDict:
    return lazy_stack([row.clone() for row in dense().unbind(dim)], dim)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_are_those_of_a_tensor(dim: int, index: object) -> None:
    taken: TensorDictBase = stacked(dim)[index]  # type: ignore[call-overload]  # any of the above
    assert_close(taken, dense()[index])  # type: ignore[call-overload]  # any of the above


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_values_are_written_to_the_members(dim: int, index: object) -> None:
    stack, whole = stacked(dim), dense()
    members = stack.unbind(dim)
    new: TensorDictBase = (dense() * 2)[index]  # type: ignore[call-overload]  # any of the above
    stack[index], whole[index] = new, new
    assert_close(lazy_stack(members, dim), whole)
    stack[index], whole[index] = -1, -1
    assert_close(lazy_stack(members, dim), whole)


@pytest.mark.parametrize("dim", DIMS)
def test_views_reach_the_members(dim: int) -> None:
    for index in INDICES[:11]:
        stack, whole = stacked(dim), dense()
        stack[index].add_(1)
        whole[index].add_(1)
        assert_close(stack, whole)


@pytest.mark.parametrize("index", [MASK, [0, 0], ROWS])
def test_rows_by_number_are_copies(index: object) -> None:
    stack = stacked(0)
    stack[index].zero_()  # type: ignore[call-overload]  # any of the above
    assert_close(stack, dense())


def test_pieces_reach_the_members() -> None:
    stack = stacked(1)
    for piece in (*stack.split(2, 1), *stack.chunk(3, 0), *stack.tensor_split([1], 1)):
        piece.add_(1)
    stack.narrow(1, 1, 2).add_(1)
    stack.unbind(0)[1].add_(1)
    expected = dense() + 3
    expected[:, 1:].add_(1)
    expected[1].add_(1)
    assert_close(stack, expected)


def test_an_enclosing_container_hands_its_index_down() -> None:
    td = TensorDict({"s": stacked(0)}, [3])
    for taken in (td[1:], td[MASK], td[ROWS], td.split(2)[0], td.index_select(0, ROWS % 3)):
        assert type(inner(taken, "s")) is LazyStackedTensorDict
    assert td.unbind(0)[1].get("s") is td[1].get("s")


@pytest.mark.parametrize("index", [3, (0, -4), (..., torch.tensor([3]))])
def test_a_row_that_is_not_there_is_refused(index: object) -> None:
    with pytest.raises(OutOfRange, match=r"batch_size \(3, 3, 3\)"):
        stacked(1)[index]  # type: ignore[call-overload]  # any of the above


@pytest.mark.parametrize("dim", DIMS)
def test_a_row_by_a_number_of_numpy_or_torch_is_the_member(dim: int) -> None:
    stack = stacked(dim)
    for number in (numpy.int64(1), torch.tensor(1), torch.tensor(-2)):
        index = (*[slice(None)] * dim, number)
        assert stack[index] is stack.tensordicts[1]
    stack[torch.tensor(0), :2].zero_()
    assert not stack[0, :2]["a"].any()


def test_rows_of_ragged_members_are_written_by_number_and_mask() -> None:
    rows = [TensorDict({"a": torch.zeros(4, n), "s": ["x"] * 4}, [4]) for n in (1, 2)]
    stack = lazy_stack(rows, 1)
    td = TensorDict({"agents": stack, "b": torch.zeros(4)}, [4])
    new = (td + 1)[:2]
    for index in (torch.tensor([0, 2]), torch.tensor([False, True, False, True])):
        td.zero_()
        td[index] = new
        for row in rows:
            assert torch.equal(row["a"][index], torch.ones(2, row["a"].shape[1]))
            assert row["a"].sum() == 2 * row["a"].shape[1]
    stack[ROWS.abs(), 1] = TensorDict({"a": torch.full((3, 2), 7.0), "s": ["y"] * 3}, [3])
    assert (rows[1]["a"][:3] == 7).all()
    assert rows[1]["s"] == ["y", "y", "y", "x"]
    assert rows[0]["s"] == ["x"] * 4


def test_a_row_that_does_not_fit_a_ragged_member_changes_none() -> None:
    rows = [TensorDict({"a": torch.zeros(4, n)}, [4]) for n in (1, 2)]
    new = [TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 3)]
    with pytest.raises(ShapeMismatch, match=r"must be broadcastable to \(2, 2\)"):
        lazy_stack(rows, 1)[[0, 1]] = lazy_stack(new, 1)
    assert not any(row["a"].any() for row in rows)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_mask_of_all_dimensions_of_a_leaf(dim: int) -> None:
    leaf = torch.arange(12).reshape(3, 2, 2)
    td = TensorDict({"a": leaf.clone()}, [3, 2])
    stack = lazy_stack(td.unbind(dim), dim)
    mask = leaf % 5 == 0
    for index in (mask, mask.tolist(), mask.numpy()):
        assert stack.get_at("a", index).tolist() == [0, 5, 10]
    stack.set_at_("a", -1, mask)
    assert torch.equal(td["a"], leaf.masked_fill(mask, -1))


def test_numbers_in_several_dimensions_take_copies_stacked_lazily() -> None:
    members = [TensorDict({"a": torch.zeros(i + 1)}) for i in range(3)]
    taken = lazy_stack(members)[torch.tensor([[0, 1], [2, 0]])]
    assert taken.batch_size == (2, 2)
    assert [row["a"].shape[0] for row in taken.view(-1).unbind(0)] == [1, 2, 3, 1]
    taken[0, 0]["a"].fill_(1)
    assert not members[0]["a"].any()
    stack = lazy_stack([TensorDict({"a": torch.arange(2) + i}, [2]) for i in range(3)], 1)
    index = torch.tensor([[0, 1], [1, 0]])
    assert stack[:, index]["a"].tolist() == stack["a"][:, index].tolist()
    assert TensorDict({"z": stack}, [2, 3])[:, index]["z", "a"].shape == (2, 2, 2)


def test_a_slice_may_take_members_backwards() -> None:
    members = [TensorDict({"a": torch.arange(2) + i}, [2]) for i in range(3)]
    taken = lazy_stack(members)[::-1].tensordicts
    assert all(row is member for row, member in zip(taken, members[::-1], strict=True))
    assert lazy_stack(members, 1)[:, ::-2]["a"].tolist() == [[2, 0], [3, 1]]
    with pytest.raises(ValueError, match="step"):
        lazy_stack(members)[:, ::-1]


def test_a_stack_in_a_locked_stack_is_locked_however_it_is_indexed() -> None:
    rows = [
        lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(2)]) for _ in range(2)
    ]
    stack: Any = lazy_stack(rows).lock_()
    for row in (stack[0, 0], stack[0][0], stack[0, :], stack[0, 0:1], stack[:, 0]):
        assert row.is_locked
    assert not stack[0, 0, 0].is_locked
