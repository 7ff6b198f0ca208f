"""Values written into leaves, and containers of fresh leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeyNotFound,
    Locked,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)


@pytest.fixture
def td() -> TensorDict:
    return TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3, 2).int()}, "s": "text"}, [3])


def test_zero_and_fill_write_in_place(td: TensorDict) -> None:
    a = td["a"]
    assert td.lock_().zero_() is td
    assert a.tolist() == [0, 0, 0]
    td.fill_(2)
    assert a.tolist() == [2, 2, 2]
    assert td["n", "b"].tolist() == [[2, 2]] * 3


def test_copy_writes_in_place_and_converts(td: TensorDict) -> None:
    a = td["a"]
    source = td.clone().fill_(5).double()
    assert td.copy_(source) is td
    assert td["a"] is a
    assert a.tolist() == [5, 5, 5]
    td.copy_(source.zero_(), non_blocking=True)
    assert td["n", "b"].sum() == 0


def test_a_copy_broadcasts(td: TensorDict) -> None:
    td.copy_(TensorDict({"a": torch.tensor(4.0), "n": {"b": torch.tensor([1, 2])}, "s": "text"}))
    assert td["n", "b"].tolist() == [[1, 2]] * 3


@pytest.mark.parametrize("method", ["copy_", "update_"])
@pytest.mark.parametrize("count", [2, 20])
def test_gradients_flow_through_a_copy(method: str, count: int) -> None:
    weight = torch.ones(3, requires_grad=True)
    source = TensorDict({f"k{i}": weight * i for i in range(count)}, [3])
    target = TensorDict({f"k{i}": torch.zeros(3) for i in range(count)}, [3])
    getattr(target, method)(source)
    target["k1"].sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1, 1]


def test_a_copy_refuses_another_layout_before_it_writes() -> None:
    td = TensorDict({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}, [2])
    sparse = torch.ones(2, 2).to_sparse()
    with pytest.raises(InvalidValue, match=r"entry `b` .* must have the layout torch.strided"):
        td.copy_(TensorDict({"a": torch.ones(2, 2), "b": sparse}, [2]))
    assert not td["a"].any()


def test_a_failing_copy_changes_nothing(td: TensorDict) -> None:
    wrong = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3, 5)}, "s": "text"}, [3])
    with pytest.raises(ShapeMismatch, match=r"\(3, 5\) to .*'b'"):
        td.copy_(wrong)
    with pytest.raises(KeyNotFound, match="`z`"):
        td.copy_(TensorDict({"a": torch.zeros(3), "z": torch.zeros(3)}, [3]))
    assert td["a"].tolist() == [1, 1, 1]


def test_a_copy_of_fewer_keys_leaves_the_others(td: TensorDict) -> None:
    td.copy_(TensorDict({"a": torch.zeros(3)}, [3]))
    assert td["a"].tolist() == [0, 0, 0]
    assert td["n", "b"].tolist() == [[1, 1]] * 3
    assert td["s"] == "text"


def test_masks_cover_batch_dimensions(td: TensorDict) -> None:
    mask = torch.tensor([True, False, True])
    assert td.masked_fill(mask, 9)["n", "b"].tolist() == [[9, 9], [1, 1], [9, 9]]
    assert td["a"].tolist() == [1, 1, 1]
    a = td["a"]
    assert td.lock_().masked_fill_(mask, 9)["a"] is a
    assert a.tolist() == [9, 1, 9]
    with pytest.raises(ShapeMismatch, match=r"shape \(2,\) does not line up"):
        td.masked_fill(mask[:2], 0)
    with pytest.raises(InvalidArgument, match=r"torch.bool, got a tensor of torch.float32"):
        td.masked_fill(mask.float(), 0)


def fill(td: TensorDict) -> TensorDict:
    return td.fill_(300)


def fill_masked(td: TensorDict) -> TensorDict:
    return td.masked_fill_(torch.tensor([True, False]), 300)


def clamp(td: TensorDict) -> TensorDict:
    return td.clamp_(300)


@pytest.mark.parametrize("write", [fill, fill_masked, clamp])
def test_a_value_that_one_leaf_cannot_hold_is_written_to_none(
    write: Callable[[TensorDict], TensorDict],
) -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.uint8)}, [2])
    with pytest.raises(InvalidValue, match=r"`b` of torch.uint8 cannot be written in place: \w+"):
        write(td)
    assert td["a"].tolist() == [1, 1]


@pytest.mark.parametrize("rows", [0, 2])
def test_a_number_beyond_the_range_of_one_leaf_is_written_to_none(rows: int) -> None:
    leaves = {"a": torch.ones(rows), "b": torch.ones(rows, dtype=torch.float16)}
    td = TensorDict(leaves, [rows])
    with pytest.raises(InvalidValue, match=r"`b` of torch.float16 .*overflow"):
        td.fill_(2**40)
    assert td["a"].tolist() == [1] * rows


@pytest.mark.parametrize("last", ["expanded", "parameter"])
def test_a_mask_is_written_to_all_leaves_or_none(last: str) -> None:
    leaf = torch.ones(1).expand(2) if last == "expanded" else nn.Parameter(torch.ones(2))
    td = TensorDict({"a": torch.ones(2), "b": leaf}, [2])
    with pytest.raises(InvalidValue, match="`b`"):
        td.masked_fill_(torch.tensor([True, False]), 0.0)
    assert td["a"].tolist() == [1, 1]


@pytest.mark.parametrize("size", [(5, 2), ([5, 2],)])
@pytest.mark.parametrize(("name", "value"), [("zeros", 0), ("ones", 1), ("empty", None)])
def test_fresh_leaves(
    name: str, value: int | None, size: tuple[object, ...], td: TensorDict
) -> None:
    made = getattr(td, f"new_{name}")(*size)
    assert made.batch_size == made["n", "b"].shape[:2] == (5, 2)
    assert made["n", "b"].shape == (5, 2, 2)
    assert made["n", "b"].dtype is torch.int32
    assert made["s"] == "text"
    if value is not None:
        assert bool((made == value).all())


def test_fresh_leaves_elsewhere(td: TensorDict) -> None:
    made = td.new_full(2, 7.0, dtype=torch.float64)
    assert made["n", "b"].tolist() == [[7, 7]] * 2
    assert made["a"].dtype is torch.float64
    moved = td.new_zeros(2, device="meta")
    assert moved.device == moved["a"].device == torch.device("meta")


@pytest.mark.parametrize(
    "fn", [torch.zeros_like, torch.ones_like, torch.empty_like, lambda x: torch.full_like(x, 3)]
)
def test_like_functions(fn: Callable[[object], Tensor], td: TensorDict) -> None:
    made: object = fn(td)
    assert isinstance(made, TensorDict)
    assert made.batch_size == (3,)
    assert made["n", "b"].dtype is torch.int32
    if fn is not torch.empty_like:
        assert torch.equal(made["n", "b"], fn(td["n", "b"]))


def test_what_is_made_like_a_locked_container_is_locked() -> None:
    td: Any = TensorDict({"n": {"a": torch.ones(2)}}, [2]).lock_()
    made: Any
    for made in (torch.zeros_like(td), torch.ones_like(td, dtype=torch.int64)):
        assert made.is_locked
        with pytest.raises(Locked):
            made["n", "b"] = torch.zeros(2)
    made = torch.empty_like(td, device="meta")
    assert made.is_locked
    made = torch.zeros_like(td.unlock_())
    assert not made.is_locked


def test_random_like_functions(td: TensorDict) -> None:
    made: object = torch.rand_like(td.float(), dtype=torch.float64)  # type: ignore[call-overload]  # torch's stubs take tensors alone
    assert isinstance(made, TensorDict)
    assert made["a"].dtype is torch.float64
    moved: object = torch.zeros_like(td, device="meta")  # type: ignore[arg-type]  # torch's stubs take tensors alone
    assert isinstance(moved, TensorDict)
    assert moved.device == torch.device("meta")


def test_fill_at_a_key() -> None:
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2), "c": torch.zeros(2)}}, [2])
    assert td.lock_().fill_(("n", "b"), 3.0) is td
    assert td["n", "b"].tolist() == [3, 3]
    assert td["n", "c"].tolist() == [0, 0]
    td.fill_(key="n", value=2.0).fill_(value=td["a"].sum())
    assert td["n", "b"].tolist() == [0, 0]


def test_fill_at_a_key_reaches_the_members_of_a_stack() -> None:
    members = [TensorDict({"a": torch.zeros(n), "b": torch.zeros(1)}) for n in (1, 2)]
    lazy_stack(members).fill_("a", 4.0)
    assert members[1]["a"].tolist() == [4, 4]
    assert members[1]["b"].tolist() == [0]


def test_what_fill_refuses() -> None:
    td = TensorDict({"a": torch.zeros(2), "s": "text"}, [2])
    with pytest.raises(KeyNotFound):
        td.fill_("z", 1.0)
    assert td.fill_("s", 1.0)["s"] == "text"
    with pytest.raises(InvalidArgument, match="expected a value, or a key and a value"):
        td.fill_()  # type: ignore[call-overload]  # the error under test


@pytest.mark.parametrize("name", ["new_zeros", "new_ones", "new_empty", "new_full"])
def test_new_leaves_take_the_options_of_torch(name: str) -> None:
    td = TensorDict({"a": torch.ones(2, 3)}, [2])
    args = ((2,), 1.0) if name == "new_full" else (2,)
    assert getattr(td, name)(*args, requires_grad=True)["a"].requires_grad
    if name in ("new_zeros", "new_empty"):
        assert getattr(td, name)(*args, layout=torch.sparse_coo)["a"].is_sparse


def test_new_tensor_makes_each_leaf_of_the_same_data() -> None:
    td = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2).int()}}, [2])
    new = td.new_tensor([1.0, 2.0, 3.0])
    assert new.batch_size == (3,)
    assert new["a"].tolist() == [1, 2, 3]
    assert new["n", "b"].tolist() == [1, 2, 3]
    assert new["n", "b"].dtype == torch.int32
    assert td["a"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_new_leaves_keep_the_names_of_the_last_dimensions() -> None:
    td = TensorDict({"a": torch.ones(3, 2, 4), "n": {"b": torch.ones(3, 2)}}, [3, 2])
    td.names = ["t", "e"]
    assert td.new_zeros(5, 5).names == ["t", "e"]
    assert td.new_ones(5, 5)["n"].names == ["t", "e"]  # type: ignore[attr-defined]  # a container
    assert td.new_full((4,), 1.0).names == ["e"]
    assert td.new_zeros(4, 5, 6).names == [None, "t", "e"]
    assert td.new_zeros(4, 5, 6)["a"].shape == (4, 5, 6, 4)


def test_an_explicit_device_of_none_is_no_device_of_the_container() -> None:
    td = TensorDict({"a": torch.ones(3)}, [3], device="cpu")
    assert td.new_zeros(2).device == torch.device("cpu")
    assert td.new_zeros(2, device=None).device is None
    assert td.new_tensor([1.0], device=None).device is None


@pytest.mark.parametrize("lazy", [False, True])
def test_a_mask_that_fits_first_and_last_dimensions_means_the_first(lazy: bool) -> None:
    td: TensorDictBase = TensorDict({"a": torch.zeros(2, 3, 2, 4)}, [2, 3, 2])
    td = lazy_stack(list(td.unbind(1)), 1) if lazy else td
    mask, rest = torch.tensor([True, False]), torch.tensor([5.0, 7.0])
    assert td.masked_fill(mask, 1.0)["a"].sum((1, 2, 3)).tolist() == [24, 0]
    assert td.clone().masked_fill_(mask, 1.0)["a"].sum((1, 2, 3)).tolist() == [24, 0]
    assert td.where(~mask, 1.0)["a"].sum((1, 2, 3)).tolist() == [24, 0]
    nowhere = torch.zeros(2, 3, 2, dtype=torch.bool)
    assert td.where(nowhere, rest)["a"][:, 0, 0, 0].tolist() == [5, 7]


def test_new_containers_without_a_device_have_none_below_either() -> None:
    td = TensorDict({"n": {"a": torch.ones(3)}}, [3], device="cpu")
    made = [
        td.new_zeros(2, device=None),
        td.new_ones(3, device=None),
        td.new_full((2,), 1.0, device=None),
    ]
    made.append(td.new_tensor(torch.ones(2), device=None))
    for each in made:
        assert [str(each.device), str(each["n"].device)] == ["None", "None"]
