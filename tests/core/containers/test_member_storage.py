"""What needs no whole batch is done to members: their keys, shapes, dtypes and memory are kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.core.kinds import inner
from torch import nn

from kd_core import (
    InvalidValue,
    KeyCollision,
    KeyNotFound,
    KeySetMismatch,
    LazyStackedTensorDict,
    Locked,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from kd_core.testing import assert_close

Change = Callable[[LazyStackedTensorDict], object]


def member(rows: int) -> TensorDict:
    source = {"x": torch.zeros(2, 3), "r": torch.zeros(2, rows), "n": {"y": torch.ones(2, rows)}}
    return TensorDict(source, [2])


def ragged(dim: int = 0) -> LazyStackedTensorDict:
    """Two members whose shapes differ, of which the first has a key of its own."""
    return lazy_stack([member(1).set("own", torch.zeros(2)), member(4)], dim)


MEMBERWISE: tuple[Callable[[LazyStackedTensorDict], TensorDictBase], ...] = (
    lambda td: td.clone(),
    lambda td: td + 1,
    lambda td: ~(td == td),
    lambda td: td.to(torch.float64),
    lambda td: td.to("cpu"),
    lambda td: td.detach(),
    lambda td: td.data,
    lambda td: td.apply(lambda leaf: leaf + 1),
    lambda td: td.named_apply(lambda name, leaf: leaf),
    lambda td: td.apply(torch.add, td),
    lambda td: td.clamp(0, 1),
    lambda td: td * torch.tensor([[1.0], [2.0]]),
    lambda td: td.where(torch.ones(td.batch_size).bool(), 0.0),
    lambda td: td.exclude("x"),
    lambda td: td.flatten_keys(),
    lambda td: td[torch.tensor([True, False])],
    lambda td: td[:, [0, 1]],
    lambda td: td.split(1)[0],
    lambda td: inner(TensorDict({"s": td}, [2]).clone(), "s"),
    lambda td: inner(TensorDict({"s": td}, [2]).to("cpu"), "s"),
    lambda td: inner(TensorDict({"s": td}, [2], device="cpu"), "s"),
    lambda td: inner(TensorDict({"s": td}, [2])[:1], "s"),
)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("number", range(len(MEMBERWISE)))
def test_ragged_members_keep_their_keys_and_shapes(dim: int, number: int) -> None:
    result = MEMBERWISE[number](ragged(dim))
    assert type(result) is LazyStackedTensorDict
    first = result.unbind(result.stack_dim)[0]
    assert "own" in first
    assert first["r"].shape[-1] == 1


def test_changing_keys_keeps_the_leaves_of_the_members() -> None:
    weight = nn.Parameter(torch.ones(2))
    half = torch.ones(2, dtype=torch.float16)
    rows = [TensorDict({"w": weight, "n": {"z": half}}), TensorDict({"w": half, "n": {"z": half}})]
    stack = lazy_stack(rows)
    stack.rename_key_("w", "v").rename_key_(("n", "z"), ("m", "z"))
    stack.update(lazy_stack([TensorDict({"u": half}), TensorDict({"u": weight})]))
    stack.select("v", "u", ("m", "z"), inplace=True).exclude("u", inplace=True)
    stack.flatten_keys(inplace=True).unflatten_keys(inplace=True)
    assert rows[0]["v"] is weight
    assert rows[1]["v"] is half
    assert rows[1]["m", "z"] is half
    assert list(rows[0].keys(True, True)) == ["v", ("m", "z")]


FAILING: tuple[tuple[type[Exception], Change], ...] = (
    (KeyCollision, lambda td: td.rename_key_("x", "late", safe=True)),
    (KeyNotFound, lambda td: td.rename_key_("own", "mine")),
    (KeyNotFound, lambda td: td.select("own", inplace=True)),
    (KeyCollision, lambda td: td.flatten_keys("_", inplace=True)),
    (ShapeMismatch, lambda td: td.pop("r")),
    (ShapeMismatch, lambda td: td.update({"x": torch.zeros(2, 2), "r": torch.zeros(2)})),
    (ShapeMismatch, lambda td: td.set_("r", torch.zeros(2, 2, 7))),
    (ShapeMismatch, lambda td: td.update_({"x": 1.0, "n": {"y": torch.zeros(2, 2, 7)}})),
    (KeySetMismatch, lambda td: td.add_(lazy_stack([member(1), member(4)]))),
    (ZeroDivisionError, lambda td: td.apply(lambda x: x + 1 // (4 - x.shape[-1]), inplace=True)),
)


@pytest.mark.parametrize("number", range(len(FAILING)))
def test_a_change_that_fails_changes_no_member(number: int) -> None:
    stack = ragged()
    rows = stack.unbind(0)
    rows[1]["late"] = torch.zeros(2)
    rows[1]["n_y"] = torch.zeros(2)
    before = [dict(row.items(True, True)) for row in rows]
    error, change = FAILING[number]
    with pytest.raises(error):
        change(stack)
    for row, entries in zip(rows, before, strict=True):
        assert list(row.keys(True, True)) == list(entries)
        assert all(row.get(key) is value for key, value in entries.items())
        assert all(not value.any() for key, value in entries.items() if key != ("n", "y"))


def test_an_exclusion_in_place_keeps_the_rest_of_ragged_members() -> None:
    stack = ragged()
    stack.exclude("x", inplace=True)
    assert [list(row.keys(True, True)) for row in stack] == [
        ["r", ("n", "y"), "own"],
        ["r", ("n", "y")],
    ]


class Point(TensorClass, frozen=True):
    x: torch.Tensor


def test_members_of_several_kinds_change_together_or_not_at_all() -> None:
    rows = [TensorDict({"x": torch.zeros(2)}), Point(torch.zeros(2))]
    with pytest.raises(AttributeError, match="cannot remove `x`: the class is frozen"):
        del lazy_stack(rows)["x"]
    assert "x" in rows[0]


WRITES: tuple[Change, ...] = (
    lambda td: td.data.add_(1),
    lambda td: td.apply(lambda leaf: leaf.add_(1)),
    lambda td: td.set_("x", td["x"] + 1).get("n").add_(1),
    lambda td: td.update_(td.clone() + 1),
    lambda td: td.update({"x": td["x"] + 1, "n": {"y": td["n", "y"] + 1}}, inplace=True),
    lambda td: td.load_state_dict((td + 1).state_dict()),
    lambda td: td.copy_(td + 1),
    lambda td: td.__setitem__(..., td + 1),
    lambda td: td.set_at_("x", 1.0, ...).set_at_(("n", "y"), 2.0, slice(None)),
    lambda td: TensorDict({"s": td}, [2])[:].get("s").add_(1),  # type: ignore[union-attr]  # as above
)


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_what_writes_in_place_writes_into_the_members(number: int) -> None:
    half = {"x": torch.zeros(3, dtype=torch.float16), "n": {"y": torch.ones(3)}}
    rows = [TensorDict(half), TensorDict({"x": torch.zeros(3), "n": {"y": torch.ones(3)}})]
    leaves = [leaf for row in rows for leaf in row.values(True, True)]
    WRITES[number](lazy_stack(rows))
    assert [leaf.tolist() for leaf in leaves] == [[1.0] * 3, [2.0] * 3] * 2
    assert [id(leaf) for row in rows for leaf in row.values(True, True)] == [
        id(leaf) for leaf in leaves
    ]


def test_gradients_are_those_of_the_members() -> None:
    rows = [TensorDict({"w": torch.ones(n)}) for n in (2, 3)]
    stack = lazy_stack(rows).requires_grad_()
    (stack * 3).sum(reduce=True).backward()
    row, whole, outer = rows[1].grad, stack.grad, TensorDict({"s": stack}, [2]).grad
    assert row is not None
    assert whole is not None
    assert outer is not None
    assert row["w"].tolist() == [3, 3, 3]
    assert [member["w"].shape[0] for member in whole] == [2, 3]
    assert inner(outer, "s")[0]["w"].tolist() == [3, 3]
    stack.zero_grad()
    assert rows[0]["w"].grad is None


def test_a_0d_operand_promotes_as_beside_the_stacked_leaf() -> None:
    operand = torch.tensor(2.0, dtype=torch.float64)
    stack = lazy_stack([TensorDict({"f": torch.ones(()), "i": torch.tensor(3)}) for _ in range(2)])
    whole = stack.contiguous()
    for do in (torch.add, torch.mul, torch.sub, torch.maximum):
        assert_close(do(stack, operand), do(whole, operand))  # type: ignore[arg-type]  # containers
    other = TensorDict({"f": operand, "i": operand})
    assert_close(stack + other, whole + other)
    assert_close(stack / operand, whole / operand)
    assert (stack * torch.ones(2, dtype=torch.float64))["f"].dtype is torch.float64


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (2, 3), (2, 1, 3), (1, 2, 1, 3)])
def test_a_container_without_batch_lines_up_with_the_stacked_leaves(
    dim: int, shape: tuple[int, ...]
) -> None:
    size = (1, 2)[:dim] + (1, 2)[dim + 1 :]
    rows = [TensorDict({"x": torch.rand(*size, 2, 3), "n": {}}, size) for _ in range((1, 2)[dim])]
    stack = lazy_stack(rows, dim)
    other = TensorDict({"x": torch.rand(shape), "n": {}})
    assert_close(stack - other, stack.contiguous() - other)
    assert_close(stack.addcmul(other, other), stack.contiguous().addcmul(other, other))
    dense = stack.contiguous()
    stack.mul_(other)
    assert_close(stack, dense * other)


def test_a_container_without_batch_lines_up_with_stacks_of_stacks() -> None:
    rows = [lazy_stack([TensorDict({"x": torch.rand(2)}) for _ in range(3)]) for _ in range(4)]
    for dim in (0, 1):
        stack = lazy_stack(rows, dim)
        for shape in ((2,), (3 if dim == 0 else 4, 2), (*stack.batch_size, 2)):
            other = TensorDict({"x": torch.rand(shape)})
            assert_close(stack - other, stack.contiguous() - other)


def test_a_container_without_batch_must_fit_the_stacked_dimension() -> None:
    stack = lazy_stack([TensorDict({"x": torch.zeros(2, 3)}, [2]) for _ in range(2)], 1)
    for shape in ((5, 3), (7, 2, 2, 3)):
        with pytest.raises(ShapeMismatch, match="`x` of a container of batch_size"):
            stack + TensorDict({"x": torch.ones(shape)})
    thin = lazy_stack([TensorDict({"x": torch.zeros(1)}, [1]) for _ in range(3)], 1)
    with pytest.raises(ShapeMismatch, match=r"must have a shape that starts with .*got \(4,\)"):
        thin + TensorDict({"x": torch.ones(4, 3)})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int8, torch.int64])
def test_an_integer_that_a_member_cannot_hold_is_used_as_it_is(dtype: torch.dtype) -> None:
    stack = lazy_stack([TensorDict({"x": torch.tensor(n, dtype=dtype)}) for n in range(3)])
    dense = stack.contiguous()
    for number in (torch.tensor(300), torch.tensor(-1), -1):
        assert_close(stack.atan2(number), dense.atan2(number))
        assert_close(stack / number, dense / number)
    rows = torch.tensor([200, 1, 0]).to(torch.int64 if dtype.is_signed else dtype)
    for x in (torch.tensor(300), rows, torch.tensor(1.5)):
        other = TensorDict({"x": x})
        assert_close(stack / other, dense / other)


def test_a_0d_operand_does_not_change_the_dtype_of_a_member_in_place() -> None:
    rows = [TensorDict({"x": torch.tensor(n, dtype=torch.uint8)}) for n in range(3)]
    lazy_stack(rows).mul_(torch.tensor(4, dtype=torch.uint32))
    assert [row["x"].item() for row in rows] == [0, 4, 8]


def test_keys_come_in_the_order_of_the_first_member() -> None:
    names = [f"k{number}" for number in range(50)]
    rows = [
        TensorDict({**dict.fromkeys(names, 0.0), "own": 1.0}),
        TensorDict(dict.fromkeys(names[::-1], 0.0)),
    ]
    assert list(lazy_stack(rows).keys()) == names
    assert list((lazy_stack(rows) + 1).keys()) == names


def test_a_member_held_twice_is_read_twice_and_changed_once() -> None:
    row = TensorDict({"a": torch.zeros(2), "n": {"b": 1.0}})
    stack = lazy_stack([row, row])
    assert stack["a"].shape == (2, 2)
    stack.rename_key_("a", "c").exclude("n", inplace=True)
    assert list(row.keys()) == ["c"]
    for write in (stack.set, stack.set_):
        with pytest.raises(
            InvalidValue, match=r"cannot .* `c`: the stack must hold each member once"
        ):
            write("c", torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    assert row["c"].tolist() == [0, 0]
    stack["d"] = torch.ones(2, 3)  # one value for both rows of the member
    stack.set_("c", torch.ones(2, 2))
    assert row["c"].tolist() == [1, 1]
    assert row["d"].shape == (3,)
    del stack["c"], stack["d"]
    assert row.is_empty()


def test_the_batch_size_is_set_on_the_members() -> None:
    rows = [TensorDict({"a": torch.zeros(3, n + 1), "n": {}}, [3]) for n in range(2)]
    stack = lazy_stack(rows)
    stack.batch_size = [2, 3]
    with pytest.raises(ShapeMismatch):
        stack.batch_size = [2, 3, 1]
    rows[0]["a"], rows[1]["a"] = torch.zeros(3, 1), torch.zeros(3, 1)
    stack.batch_size = [2, 3, 1]
    assert id(stack[0]) == id(rows[0])
    assert rows[0].batch_size == rows[0]["n"].shape == (3, 1)


def test_a_locked_member_below_keeps_all_members() -> None:
    rows = [TensorDict({"n": {"a": 1.0}}), TensorDict({"n": {"a": 1.0}})]
    inner(rows[1], "n").lock_()
    with pytest.raises(Locked):
        lazy_stack(rows).rename_key_(("n", "a"), ("n", "b"))
    assert ("n", "a") in rows[0]


@pytest.mark.parametrize(
    "call",
    [
        *(lambda td: td + 1, lambda td: -td, lambda td: td.view(-1), lambda td: td.unsqueeze(0)),
        *(
            lambda td: td[:, 0],
            lambda td: td[[1, 0]],
            lambda td: td.detach(),
            lambda td: td.double(),
        ),
        *(torch.zeros_like, lambda td: td.transpose(0, 1), lambda td: td.permute(0, 1)),
    ],
)
def test_a_stack_of_locked_members_is_locked(call: Callable[[Any], Any]) -> None:
    members = [TensorDict({"a": torch.zeros(2)}, [2]).lock_() for _ in range(3)]
    assert call(lazy_stack(members)).is_locked
    assert call(lazy_stack(members).lock_()).is_locked
    members[1].unlock_()
    assert not call(lazy_stack(members)).is_locked


def test_copies_and_answers_of_locked_members_are_not_locked() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]).lock_() for _ in range(3)])
    for made in (
        stack.clone(),
        stack == stack,
        stack.clamp(0, 1),
        stack.unbind(1)[0],
        stack.sum(0),
    ):
        assert not made.is_locked
    with pytest.raises(Locked):
        stack.append(TensorDict({"a": torch.zeros(2)}, [2]))
