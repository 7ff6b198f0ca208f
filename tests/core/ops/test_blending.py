"""Operations of a leaf with two operands."""

import pytest
import torch
from torch import Tensor

from kd_core import InvalidArgument, ShapeMismatch, TensorDict, lazy_stack

COUNTS = [2, 12]


def leaves(count: int) -> dict[str, Tensor]:
    return {str(i): torch.rand(3, i % 3 + 1) for i in range(count)}


@pytest.mark.parametrize("count", COUNTS)
def test_clamp(count: int) -> None:
    plain = leaves(count)
    td = TensorDict(plain, [3])
    for low, high in [(0.2, 0.7), (0.5, None), (None, 0.5)]:
        for key, leaf in plain.items():
            assert torch.equal(td.clamp(low, high)[key], leaf.clamp(low, high))
    assert torch.equal(td.clamp_min(0.5)["1"], plain["1"].clamp(min=0.5))
    assert torch.equal(td.clamp_max(0.5)["1"], plain["1"].clamp(max=0.5))
    limits = td.clamp(td * 0 + 0.2, torch.tensor([0.3, 0.4, 0.5]))
    high_rows = torch.tensor([[0.3], [0.4], [0.5]])
    assert torch.equal(limits["1"], plain["1"].clamp(torch.tensor(0.2), high_rows))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("weight", [0.25, torch.tensor(0.25), torch.tensor([0.1, 0.2, 0.3])])
def test_lerp(weight: float | Tensor, count: int) -> None:
    mine, theirs = leaves(count), leaves(count)
    result = TensorDict(mine, [3]).lerp(TensorDict(theirs, [3]), weight)
    amount = weight[:, None] if isinstance(weight, Tensor) and weight.ndim else weight
    for key, leaf in mine.items():
        assert torch.equal(result[key], torch.lerp(leaf, theirs[key], amount))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_added_products(name: str, count: int) -> None:
    first, second, third = (TensorDict(leaves(count), [3]) for _ in range(3))
    result = getattr(first, name)(second, third, value=0.5)
    for key in leaves(count):
        expected = getattr(torch, name)(first[key], second[key], third[key], value=0.5)
        assert torch.equal(result[key], expected)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["lerp", "addcmul", "addcdiv", "clamp"])
def test_in_place_keeps_storage(name: str, count: int) -> None:
    td, low, high = (TensorDict(leaves(count), [3]) for _ in range(3))
    second = 0.5 if name == "lerp" else high
    expected = getattr(td, name)(low, second)
    leaf = td["1"]
    assert getattr(td.lock_(), f"{name}_")(low, second) is td
    assert td["1"] is leaf
    assert bool((td == expected).all())


def test_torch_functions() -> None:
    td = TensorDict(leaves(2), [3])
    assert torch.equal(torch.clamp(td, 0.2, 0.5)["1"], td["1"].clamp(0.2, 0.5))  # type: ignore[call-overload]  # torch's stubs take tensors alone


def test_lerp_of_the_scalars_of_members() -> None:
    start, end = leaves(12), {key: torch.tensor(2.0) for key in leaves(12)}
    members = [TensorDict({key: leaf[row, 0] for key, leaf in start.items()}) for row in range(3)]
    result = lazy_stack(members).lerp(TensorDict(end), 0.25)
    for key, leaf in start.items():
        assert torch.equal(result[key], torch.lerp(leaf[:, 0], end[key], 0.25))


def test_scalars_of_members_are_promoted_as_rows_however_deep_they_are() -> None:
    members = [TensorDict({"n": {"a": torch.tensor(row)}}) for row in (0.0, 1.0)]
    number = torch.tensor(2.5, dtype=torch.float64)
    for operand in (number, TensorDict({"n": {"a": number}})):
        result = lazy_stack(members).add(operand)["n", "a"]
        assert result.dtype is torch.float32
        assert result.tolist() == [2.5, 3.5]


def test_gradients_flow_through_lerp() -> None:
    plain = {key: leaf.requires_grad_() for key, leaf in leaves(12).items()}
    loss = TensorDict(plain, [3]).lerp(TensorDict(leaves(12), [3]), 0.25).sum(reduce=True)
    torch.autograd.backward(loss)
    assert all(leaf.grad is not None and bool((leaf.grad == 0.75).all()) for leaf in plain.values())


def test_misfits_are_explained_and_change_nothing() -> None:
    td = TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3])
    wrong = TensorDict({"a": torch.ones(3), "b": torch.ones(3, 3)}, [3])
    with pytest.raises(ShapeMismatch, match=r"\(3, 3\) to `b` in place"):
        td.lerp_(wrong, 0.5)
    with pytest.raises(InvalidArgument, match=r"`min`, `max`, or both"):
        td.clamp()
    with pytest.raises(InvalidArgument, match="got a `str`"):
        td.clamp("low")  # type: ignore[arg-type]  # wrong on purpose
    assert td["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("name", "limit"), [("clamp_min", 0.6), ("clamp_max", 0.4)])
def test_one_limit_in_place(name: str, limit: float) -> None:
    td = TensorDict(leaves(3), [3])
    expected = getattr(td, name)(limit)
    leaf = td["1"]
    assert getattr(td.lock_(), f"{name}_")(limit) is td
    assert td["1"] is leaf
    assert bool((td == expected).all())


def test_mod_and_rsub() -> None:
    td = TensorDict({"a": torch.tensor([-3, 5])}, [2])
    assert td.mod(4)["a"].tolist() == [1, 1]
    assert td.rsub(1, alpha=2)["a"].tolist() == [7, -9]
    assert torch.rsub(td, 1)["a"].tolist() == [4, -4]  # type: ignore[call-overload]  # a container


def test_clamp_takes_a_number_beside_a_container() -> None:
    td = TensorDict({"a": torch.tensor([-2.0, 0.5, 9.0]), "b": torch.tensor([[3], [4], [5]])}, [3])
    high = TensorDict({"a": torch.tensor(1.0), "b": torch.tensor([2])})
    got = td.clamp(0, high)
    assert (got["a"].tolist(), got["b"].tolist()) == ([0, 0.5, 1], [[2], [2], [2]])
    assert td.clamp(torch.tensor([3, 3, 3]), 4)["b"].tolist() == [[3], [4], [4]]
    assert td.clamp_(0, high)["a"].tolist() == [0, 0.5, 1]
    assert td["b"].tolist() == [[2], [2], [2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_limits_of_two_kinds_widen_rows_of_a_stack_as_the_stack(dtype: torch.dtype) -> None:
    td = TensorDict({"a": torch.arange(3)}, [3])
    high = TensorDict({"a": torch.arange(1, 4).to(dtype)}, [3])
    for each in (td, lazy_stack(td.unbind(0))):
        clamped = each.clamp(2**40, high)["a"]
        assert clamped.dtype is dtype
        assert clamped.tolist() == [1, 2, 3]
