"""What an error of torch says about the entry."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kd_core import (
    InvalidArgument,
    KeySetMismatch,
    NonTensorData,
    NonTensorStack,
    ShapeMismatch,
    TensorDict,
    lazy_stack,
)

FAILING: list[Callable[[TensorDict], object]] = [
    lambda td: -td,
    lambda td: td - 1,
    lambda td: 1 - td,
    lambda td: td - td,
    lambda td: td - torch.tensor(1),
    lambda td: torch.nn.functional.relu(td),  # type: ignore[arg-type]  # torch types tensors alone
]


@pytest.mark.parametrize("leaves", [1, 40])
@pytest.mark.parametrize("function", FAILING)
def test_an_error_of_torch_says_for_which_entry(
    function: Callable[[TensorDict], object], leaves: int
) -> None:
    td = TensorDict({str(n): torch.zeros(2) for n in range(leaves)}, [2])
    td["next", "done"] = torch.zeros(2, 1).bool()
    with pytest.raises(RuntimeError, match=r"[Bb]ool") as caught:
        function(td)
    assert caught.value.__notes__ == [
        "This is entry `('next', 'done')` of shape (2, 1) and torch.bool."
    ]


def complex_values() -> tuple[Tensor, Tensor]:
    """Return pairs of complex numbers whose sums and products have NaN of several bits."""
    parts = [0.0, -0.0, 1.0, 2.5, float("inf"), float("-inf"), float("nan")]
    each = torch.tensor([complex(real, imag) for real in parts for imag in parts])
    return each.repeat_interleave(len(each)), each.repeat(len(each))


def bits(values: Tensor) -> Tensor:
    return torch.view_as_real(values).view(torch.int32)


@pytest.mark.parametrize("count", [1, 9])
def test_a_tensor_on_the_left_stays_there(count: int) -> None:
    left, right = complex_values()
    td = TensorDict({f"k{i}": right for i in range(count)}, [len(right)])
    for name in ("add", "mul", "sub"):
        expected = bits(getattr(torch, name)(left, right))
        for result in (getattr(torch, name)(left, td), getattr(operator, name)(left, td)):
            for leaf in result.values():
                assert torch.equal(bits(leaf), expected)


@pytest.mark.parametrize("number", [2.5, 0.0, float("inf"), float("nan"), 1j])
def test_complex_leaves_are_multiplied_in_place_as_one_is(number: complex) -> None:
    values, _ = complex_values()
    td = TensorDict({f"k{i}": values.clone() for i in range(9)}, [len(values)]).mul_(number)
    for leaf in td.values():
        assert torch.equal(bits(leaf), bits(values.clone().mul_(number)))


def test_comparisons_compare_data_and_mappings() -> None:
    one = TensorDict({"x": torch.ones(2), "s": ["a", "b"], "n": {"unit": "m"}}, [2])
    other = one.clone()
    other[1] = {"s": "c"}
    assert (one == one.clone()).all()
    assert not (one == other).all()
    assert (one == other)["s"].tolist() == [True, False]
    assert (one != other)["s"].tolist() == [False, True]
    assert (one == other)["n", "unit"].tolist() == [True, True]
    assert not (TensorDict(s="a") == TensorDict(s="b")).all()
    lazy = lazy_stack([TensorDict(s="a"), TensorDict(s="b")])
    assert (lazy == lazy_stack([TensorDict(s="a"), TensorDict(s="c")]))["s"].tolist() == [1, 0]
    row = TensorDict({"x": 1.0, "s": "a", "n": {"unit": "m"}})
    assert (one == row)["s"].tolist() == [True, False]
    plain = TensorDict({"a": torch.arange(2), "n": {"b": 1}})
    assert (plain == {"a": torch.arange(2), "n": {"b": 1}}).all()
    assert (plain != {"a": torch.zeros(2), "n": {"b": 2}})["a"].tolist() == [False, True]
    assert (plain < {"a": torch.ones(2), "n": {"b": 2}})["a"].tolist() == [True, False]
    rows = TensorDict({"x": torch.ones(2, 3), "n": {"y": torch.arange(2)}, "s": ["a", "b"]}, [2])
    beside = {"x": torch.arange(3), "n": {"y": 1}, "s": ["a", "c"]}  # a row, a number, words
    assert (rows == beside)["x"].tolist() == [[False, True, False]] * 2
    assert (rows == beside)["n", "y"].tolist() == [False, True]
    assert (rows == beside)["s"].tolist() == [True, False]
    assert (lazy_stack([rows, rows]).exclude("s") > {"x": 0, "n": {"y": 0}})["x"].all()
    with pytest.raises(ShapeMismatch, match=r"entry `x`: its shape must start with \(2,\)"):
        rows == {**beside, "x": torch.arange(4)}  # noqa: B015  # the error is the promise
    with pytest.raises(KeySetMismatch):
        plain == {"a": torch.arange(2)}  # noqa: B015  # the error is the promise
    with pytest.raises(InvalidArgument, match="a number, a tensor or a container"):
        plain + {"a": 1}  # type: ignore[operator]  # refused


VALUES: list[Callable[[], object]] = [
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.nn.Parameter(torch.tensor([1.0, 3.0])),
    lambda: torch.tensor([True, False]),
    lambda: NonTensorStack("a", "b"),
    lambda: NonTensorStack("a", "c"),
    lambda: NonTensorStack(1, 2),
    lambda: "a",
    lambda: NonTensorData(2),
]


def answer(mine: object, its: object) -> list[bool]:
    """Return whether what two entries hold in each of two rows is equal."""

    def rows(value: object) -> list[object]:
        if isinstance(value, (Tensor, NonTensorStack)):
            held: Any = value.tolist()
            return [*held]
        return [value.data if isinstance(value, NonTensorData) else value] * 2

    return [one == other for one, other in zip(rows(mine), rows(its), strict=True)]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("locked", [False, True])
def test_all_kinds_of_entries_are_compared_beside_all_others(depth: int, locked: bool) -> None:
    pairs = [(mine(), its()) for mine in VALUES for its in VALUES]
    keys = ["n"] * depth
    left, right = TensorDict({}, [2]), TensorDict({}, [2])
    for number, (mine, its) in enumerate(pairs):
        for td, value in ((left, mine), (right, its)):
            td[(*keys, f"k{number}")] = value
    if locked:
        left.lock_()
        right.lock_()
    for number, (mine, its) in enumerate(pairs):
        key = (*keys, f"k{number}")
        expected = answer(mine, its)
        one, other = left.select(key), right.select(key)  # alone, and among the others
        for equal in (left == right, one == other):
            assert torch.as_tensor(equal[key].tolist()).expand(2).tolist() == expected, (mine, its)
        differs = (left != right)[key].tolist()
        assert torch.as_tensor(differs).expand(2).tolist() == [not each for each in expected]


def test_a_tensor_that_torch_broadcasts_enlarges_the_batch() -> None:
    td = TensorDict({"a": torch.arange(6.0).reshape(3, 2), "n": {"b": torch.ones(3)}}, [3])
    rows = torch.arange(2.0)[:, None]
    got = td + rows
    assert got.batch_size == (2, 3)
    assert torch.equal(got["a"], td["a"] + rows[..., None])
    assert got["n", "b"].shape == (2, 3)
    assert (td == rows).batch_size == (2, 3)
    assert td.clamp(min=rows).batch_size == (2, 3)
    assert (TensorDict({"a": torch.ones(2)}) * torch.arange(3)).batch_size == (3,)
    before = td.clone()
    with pytest.raises(ShapeMismatch, match="does not line up"):
        td.add_(rows)
    assert bool((td == before).all())
    with pytest.raises(ShapeMismatch, match="does not line up"):
        td + torch.ones(2)
