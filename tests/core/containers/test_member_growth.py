"""Members are added to a stack: all that are given, or none."""

import pytest
import torch

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    LazyStackedTensorDict,
    Locked,
    ShapeMismatch,
    TensorDict,
    lazy_stack,
)


def rows(*numbers: int) -> list[TensorDict]:
    return [TensorDict({"a": torch.full((2,), number)}, [2]) for number in numbers]


@pytest.mark.parametrize(
    ("index", "want"), [(0, [9, 1, 2]), (1, [1, 9, 2]), (-1, [1, 9, 2]), (7, [1, 2, 9])]
)
def test_a_member_is_inserted_as_into_a_list(index: int, want: list[int]) -> None:
    stack = lazy_stack(rows(1, 2), 1)
    new = rows(9)[0]
    stack.insert(index, new)
    assert stack.batch_size == (2, 3)
    assert stack["a"].tolist() == [want] * 2
    assert id(new) in map(id, stack.unbind(1))


def test_members_are_added_to_the_end() -> None:
    stack = lazy_stack(rows(1))
    stack.append(rows(2)[0])
    stack.extend(rows(3, 4))
    stack.extend(TensorDict({"a": torch.full((2, 2), 5)}, [2, 2]))
    assert stack["a"][:, 0].tolist() == [1, 2, 3, 4, 5, 5]


def test_a_member_that_does_not_fit_changes_nothing() -> None:
    stack = lazy_stack(rows(1, 2))
    with pytest.raises(ShapeMismatch, match=r"\(2,\) in the members and \(\) in container 1"):
        stack.extend([*rows(3), TensorDict(a=1)])
    with pytest.raises(InvalidArgument, match="added to a lazy stack must be a container"):
        stack.append({"a": 1})  # type: ignore[arg-type]  # wrong on purpose
    around = TensorDict({"s": lazy_stack([stack])}, [1, 2, 2])
    with pytest.raises(InvalidValue, match="itself"):
        stack.insert(0, TensorDict({"s": stack}, [2]))
    assert around.batch_size == (1, 2, 2)
    assert stack.batch_size == (2, 2)
    with pytest.raises(Locked, match="add members"):
        stack.lock_().append(rows(3)[0])


def test_devices_of_members_are_combined() -> None:
    stack = lazy_stack([row.to("cpu") for row in rows(1, 2)])
    assert stack.device == torch.device("cpu")
    stack.append(rows(3)[0])
    assert stack.device is None


def test_the_constructor_checks_what_it_is_told() -> None:
    assert LazyStackedTensorDict(*rows(1, 2), batch_size=[2, 2]).batch_size == (2, 2)
    with pytest.raises(ShapeMismatch, match=r"must be \(2, 2\), .* got \(3, 2\)"):
        LazyStackedTensorDict(*rows(1, 2), batch_size=[3, 2])
    moved = LazyStackedTensorDict(*rows(1, 2), device="meta")
    assert moved.device == torch.device("meta")
    assert moved[0]["a"].is_meta
    assert LazyStackedTensorDict(*rows(1, 2), strict_shape=True)["a"].shape == (2, 2)
    with pytest.raises(KeySetMismatch, match=r"`b`.*strict shape|strict shape.*`b`"):
        LazyStackedTensorDict(*rows(1), TensorDict({"b": torch.zeros(2)}, [2]), strict_shape=True)
    ragged = [TensorDict({"a": torch.zeros(n)}) for n in (1, 2)]
    with pytest.raises(ShapeMismatch, match="`a` is ragged"):
        LazyStackedTensorDict(*ragged, strict_shape=True)


def ragged() -> LazyStackedTensorDict:
    return lazy_stack([TensorDict({"a": torch.ones(2, n), "w": ["x", "y"]}, [2]) for n in (1, 2)])


@pytest.mark.parametrize(
    ("pad_size", "want"),
    [
        ([0, 1], [[[1], [1]], [[1, 1], [1, 1]], [[5, 5], [5, 5]]]),
        ([2, -1], [[[5], [5]], [[5], [5]], [[1], [1]]]),
        ([1, 0, 0, 1], [[[5], [5], [5]], [[1], [1], [5]], [[1, 1], [1, 1], [5, 5]]]),
    ],
)
def test_padding_in_place_keeps_the_members(pad_size: list[int], want: list[object]) -> None:
    stack = ragged()
    first = stack.tensordicts[0]
    assert stack.pad(pad_size, value=5, inplace=True) is stack
    assert [member["a"].tolist() for member in stack.tensordicts] == want
    assert len(stack) == len(want)
    assert any(member is first for member in stack.tensordicts)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("pad_size", [[1, 2, 0, 1, 3, 0], [-1, 0, 2, 1, 0, -1], [1, 0, -1, 1]])
def test_padding_in_place_is_that_of_a_dense_container(dim: int, pad_size: list[int]) -> None:
    dense = TensorDict({"a": torch.arange(24.0).view(2, 3, 4)}, [2, 3, 4])
    stack = lazy_stack([*dense.unbind(dim)], dim)
    want = dense.pad(pad_size, value=7)
    assert stack.pad(pad_size, value=7, inplace=True).batch_size == want.batch_size
    assert torch.equal(stack["a"], want["a"])


def test_a_batch_size_is_not_found_without_the_dimensions_before_the_stacked_one() -> None:
    stack = lazy_stack([TensorDict({}, [3]), TensorDict({}, [3])], 1)
    with pytest.raises(ShapeMismatch, match=r"share 0 leading dimensions, and the stacked .* is 1"):
        stack.auto_batch_size_()
    assert stack.batch_size == (3, 2)


def test_padding_in_place_that_is_refused_changes_nothing() -> None:
    stack = ragged()
    stack.tensordicts[1].lock_()
    with pytest.raises(Locked):
        stack.pad([1, 0, 1, 0], inplace=True)
    with pytest.raises(NotImplementedError):
        ragged().pad([0, -2], inplace=True)
    assert [member.batch_size for member in stack.tensordicts] == [(2,), (2,)]
    assert len(stack) == 2
