"""The index operator: what is a key, what is an index, and what is neither."""

import math
from enum import StrEnum
from typing import Any, cast

import pytest
import torch
from tests.core.kinds import inner
from torch import Tensor

from kd_core import (
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyNotFound,
    KeySetMismatch,
    Locked,
    NestedKey,
    OutOfRange,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    UnknownField,
    lazy_stack,
)


def make() -> TensorDict:
    return TensorDict({"a": torch.arange(12.0).reshape(3, 4), "n": {"b": torch.ones(3)}}, [3])


def test_strings_and_tuples_of_strings_are_keys() -> None:
    td = make()
    assert td["a"] is td["a",]
    assert td["n", "b"] is td["n", ("b",)]


class Name(StrEnum):
    A = "a"
    N = "n"


def test_strings_of_a_class_of_their_own_are_keys() -> None:
    td = make()
    assert td[Name.A] is td["a"]
    assert td[Name.N, "b"] is td["n", "b"]
    td[Name.N, "b"] = torch.zeros(3)
    td[Name.A] = torch.zeros(3)
    assert not td["a"].any()
    assert not td["n", "b"].any()


def test_rows_and_slices_are_views() -> None:
    td = make()
    td[0]["a"].zero_()
    td[1:]["n", "b"].zero_()
    torch.testing.assert_close(td["a"][0], torch.zeros(4))
    torch.testing.assert_close(td["n", "b"], torch.tensor([1.0, 0.0, 0.0]))


def test_writing_a_key_of_a_row_does_not_write_through() -> None:
    td = make()
    td[0]["a"] = torch.zeros(4)
    torch.testing.assert_close(td["a"], make()["a"])


@pytest.mark.parametrize("index", [[0, 2], range(0, 3, 2), torch.tensor([0, 2])])
def test_rows_are_chosen_by_number(index: list[int]) -> None:
    torch.testing.assert_close(make()[index]["a"], make()["a"][[0, 2]])
    with pytest.raises(OutOfRange, match="too many indices"):
        make()[0, 2]


def test_numbers_of_rows_may_count_from_the_end() -> None:
    td = TensorDict({"a": torch.arange(3), "b": {"c": torch.arange(3.0)}}, [3])
    rows = td[torch.tensor([0, -1])]
    assert rows["a"].tolist() == rows["b", "c"].tolist() == [0, 2]


def test_numbers_of_rows_index_dtypes_that_index_select_lacks() -> None:
    td = TensorDict({"a": torch.arange(3).to(torch.uint16)}, [3])
    assert td[torch.tensor([2, 0])]["a"].tolist() == [2, 0]


def test_arrays_are_indices() -> None:
    numpy = pytest.importorskip("numpy")
    torch.testing.assert_close(make()[numpy.array([2, 0])]["a"], make()["a"][[2, 0]])
    torch.testing.assert_close(make()[numpy.array([True, False, True])]["a"], make()["a"][[0, 2]])
    torch.testing.assert_close(make()[numpy.int64(1)]["a"], make()["a"][1])


@pytest.mark.parametrize("index", [[], torch.tensor([], dtype=torch.int64), slice(3, None)])
def test_no_rows_are_an_empty_batch(index: list[int]) -> None:
    assert make()[index].batch_size == (0,)
    assert make()[index]["a"].shape == (0, 4)


def test_a_nested_container_keeps_its_further_batch_dimensions() -> None:
    td = TensorDict({"n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
    assert inner(td[0], "n").batch_size == (4,)
    assert inner(td[:, None], "n").batch_size == (3, 1, 4)
    mask = torch.tensor([True, False, True])
    assert inner(td[mask], "n").batch_size == (2, 4)


@pytest.mark.parametrize("index", [3, -4, [0, 3], torch.tensor([5]), (slice(None), 0)])
def test_rows_that_are_not_there_are_refused(index: int) -> None:
    td = make()
    with pytest.raises(OutOfRange, match=r"range|too many"):
        td[index]
    with pytest.raises(OutOfRange, match=r"range|too many"):
        td[index] = 0
    torch.testing.assert_close(td["a"], make()["a"])


@pytest.mark.parametrize("index", [1.5, object(), {"a"}])
def test_what_is_neither_key_nor_index_is_refused(index: int) -> None:
    with pytest.raises(InvalidArgument, match="an index must be a key"):
        make()[index]


@pytest.mark.parametrize("index", [torch.tensor(1.5), torch.ones(2), [1.5]])
def test_a_float_tensor_as_an_index_names_its_dtype(index: Tensor) -> None:
    with pytest.raises(IndexError, match=r"got torch.float32. Cast it with `index.long\(\)`"):
        make()[index]


def test_parts_of_both_are_refused() -> None:
    with pytest.raises(InvalidKey, match="`int`"):
        make()["a", 0]  # type: ignore[index]  # wrong on purpose
    with pytest.raises(InvalidKey, match="`slice`"):
        TensorDict({"b": {"c": 1.0}})["b", 0:2]  # type: ignore[index]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="an index must be a key"):
        make()[0, "a"]  # type: ignore[index]  # wrong on purpose


def test_a_backward_slice_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"positive step, got -1. Use `flip`"):
        make()[::-1]


@pytest.mark.parametrize("shape", [(2,), (3, 4)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(OutOfRange, match="shape of a mask"):
        make()[torch.ones(shape, dtype=torch.bool)]


def test_a_value_is_broadcast_to_rows() -> None:
    td = make()
    td[1:] = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    torch.testing.assert_close(td["a"][1:], torch.tensor([[1.0, 2, 3, 4]]).expand(2, 4))
    td[torch.tensor([True, False, False])] = {"a": torch.zeros(1, 4)}
    torch.testing.assert_close(td["a"][0], torch.zeros(4))


def test_rows_of_a_row_count_that_differs_are_refused() -> None:
    td = make()
    with pytest.raises(ShapeMismatch, match=r"shape \(2, 4\) to rows of `a`.*\(3, 4\)"):
        td[:] = make()[:2]
    torch.testing.assert_close(td["n", "b"], torch.ones(3))


def test_keys_that_the_target_lacks_are_added() -> None:
    td = make()
    td[0] = {"a": torch.zeros(4), "n": {"x": 1.0}}
    assert td["n", "x"].tolist() == [1, 0, 0]
    assert td["a"][0].sum() == 0


def test_gradients_flow_through_rows() -> None:
    leaf = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(TensorDict({"a": leaf}, [3])[1:]["a"].sum(), leaf)
    torch.testing.assert_close(grad, torch.tensor([0.0, 1.0, 1.0]))


def test_rows_of_one_entry_are_read_and_written() -> None:
    td = make().lock_()
    assert td.set_at_("a", 7.0, slice(0, 2)) is td
    torch.testing.assert_close(td.get_at("a", 1), torch.full((4,), 7.0))
    td.set_at_("n", {"b": 0.0}, 0)
    torch.testing.assert_close(td["n", "b"], torch.tensor([0.0, 1.0, 1.0]))
    with pytest.raises(KeyNotFound, match="`x`"):
        td.set_at_("x", 0.0, 0)
    for holder in (td, lazy_stack([td])):
        assert holder.get_at("x", 0) is None
        assert holder.get_at("x", 0, 3) == 3
        assert holder.get_at(("n", "x"), 0, default=5) == 5
        assert torch.equal(holder.get_at("a", 0, None), holder["a"][0])


def test_rows_of_a_nested_container_are_those_of_its_own_batch() -> None:
    def made() -> TensorDict:
        inner = TensorDict({"a": torch.arange(12).view(2, 3, 2), "w": "x"}, [2, 3])
        return TensorDict({"b": inner}, [2])

    indices: list[Any] = [
        (0, 2),
        (..., 0),
        (..., torch.tensor([True, False, True])),
        (slice(None), -1),
        1,
    ]
    for index in indices:
        td = made()
        rows, wanted = cast(Any, (td.get_at("b", index), td["b"][index]))
        assert torch.equal(rows["a"], wanted["a"])
        assert (rows["w"], rows.batch_size) == ("x", wanted.batch_size)
        td.set_at_("b", {"a": -1}, index)
        leaf = made()["b", "a"]
        leaf[(*index, slice(None)) if isinstance(index, tuple) else index] = -1
        assert torch.equal(td["b", "a"], leaf)
    with pytest.raises(IndexError):
        made().get_at("b", (0, 3))
    with pytest.raises(IndexError):
        made().set_at_("b", {"a": 1}, (0, 3))
    stack = lazy_stack(list(made().unbind(0)))
    rows = cast(Any, stack.get_at("b", (..., 0)))
    assert torch.equal(rows["a"], cast(Any, made()["b"][..., 0])["a"])


def test_iteration_needs_a_dimension() -> None:
    with pytest.raises(InvalidArgument, match=r"batch dimension.*Iterate over"):
        iter(TensorDict({"a": 1.0}))


def test_a_missing_key_is_not_removed() -> None:
    with pytest.raises(KeyNotFound, match="`x`"):
        del make()["x"]


def test_a_mask_of_several_dimensions_may_follow_an_ellipsis_and_an_integer() -> None:
    rows = torch.arange(12).reshape(2, 1, 3, 2)
    td = TensorDict({"a": rows}, rows.shape)
    index = (..., -2, torch.tensor([[True, False, True]]), [True, False])
    assert torch.equal(td[index]["a"], rows[index])
    assert td[index].batch_size == rows[index].shape


def test_a_false_index_writes_nothing_into_any_dtype() -> None:
    td = TensorDict({"a": torch.arange(3).to(torch.uint16)}, [3])
    td.set_at_("a", 2.5, False)
    td[False] = td.clone()
    assert td["a"].tolist() == [0, 1, 2]


def test_a_mask_takes_rows_of_dtypes_that_index_select_lacks() -> None:
    td = TensorDict({"a": torch.arange(3).to(torch.uint16)}, [3])
    assert td[torch.tensor([True, False, True])]["a"].tolist() == [0, 2]


def test_rows_of_a_part_of_the_keys_are_written() -> None:
    td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3), "d": torch.zeros(3)}}, [3])
    td[1] = TensorDict({"b": {"d": torch.tensor(1.0)}})
    assert td["b", "d"].tolist() == [0, 1, 0]
    assert not td["a"].any()
    assert not td["b", "c"].any()


@pytest.mark.parametrize("index", [3, slice(0, 2, -1), (0, 0)])
def test_rows_that_are_not_there_are_not_written(index: int) -> None:
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3])
    with pytest.raises((IndexError, ValueError)):
        td[index] = TensorDict({"a": torch.ones(()), "b": torch.ones(())})
    assert not td["a"].any()


def test_gradients_flow_into_rows_that_a_container_is_written_to() -> None:
    source = TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2]).requires_grad_()
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3])
    td[:2] = source
    total = td["a"].sum() + 3 * td["b"].sum()
    grads = torch.autograd.grad(total, [source["a"], source["b"]])
    assert [grad.tolist() for grad in grads] == [[1, 1], [3, 3]]


T, F = torch.tensor(True), torch.tensor(False)
MASK = torch.tensor([[True, False, True], [False, True, True]])
BYTES = MASK.to(torch.uint8)
INDICES: list[Any] = [
    True,
    False,
    T,
    F,
    (True,),
    (..., True),
    (True, ...),
    (0, True),
    (slice(None), True),
    (None, True, 0),
    (True, False),
    ([0, 1], True),
    (MASK[:, 0], True),
    MASK,
    MASK[:, 1],
    (MASK[:, 1], 0),
    (..., MASK[0]),
    BYTES,
    torch.tensor([-1, 0]),
    torch.tensor([[-1], [1]]),
    (slice(None), torch.tensor([-1], dtype=torch.int32)),
    torch.tensor(1),
    (..., None, [True, False, True]),
]
DTYPES = [torch.float32, torch.uint16, torch.uint64, torch.bool, torch.complex64]


def leaves_of(batch: tuple[int, ...]) -> dict[str, Tensor]:
    leaves: dict[str, Tensor] = {"none": torch.zeros(*batch, 0), "bare": torch.rand(batch)}
    for dtype in DTYPES:
        leaves[str(dtype)] = torch.arange(math.prod(batch) * 2).reshape(*batch, 2).to(dtype)
    return leaves


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("index", INDICES)
def test_rows_are_those_that_torch_takes_of_each_leaf(index: Any) -> None:
    leaves = leaves_of((2, 3))
    taken = TensorDict(leaves, [2, 3])[index]
    assert taken.batch_size == torch.zeros(2, 3)[index].shape
    for key, leaf in leaves.items():
        assert torch.equal(taken[key], leaf[spelled(index)])


def spelled(index: Any) -> Any:
    """An index of two batch dimensions, with slices in the place of `...`."""
    items = index if isinstance(index, tuple) else (index,)
    used = sum(not (item is None or item is ... or isinstance(item, bool)) for item in items)
    rest = [slice(None)] * (2 - used)
    return tuple(each for item in items for each in (rest if item is ... else [item]))


@pytest.mark.parametrize("index", [i for i in INDICES if i is not BYTES])
def test_rows_are_written_where_they_are_read(index: Any) -> None:
    td = TensorDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3, 2)}, [2, 3])
    expected = torch.zeros(2, 3)
    expected[index] = 5.0
    td[index] = 5.0
    assert torch.equal(td["a"], expected)
    assert torch.equal(td["b"], expected[..., None].expand(2, 3, 2))


@pytest.mark.parametrize("mask", [True, False])
def test_a_mask_of_no_dimensions_chooses_a_container_without_rows(mask: bool) -> None:
    td, chosen = TensorDict({"a": torch.tensor(1.0), "b": torch.ones(2)}), torch.tensor(mask)
    assert td[chosen].batch_size == (int(mask),)
    assert td.masked_select(chosen)["b"].shape == (int(mask), 2)
    assert td.where(chosen, 0.0)["b"].tolist() == [float(mask)] * 2
    td[chosen] = 7.0
    assert td["a"] == (7 if mask else 1)


@pytest.mark.parametrize("index", [(..., ...), (0, 0, ..., ...), (..., [0], ...)])
def test_two_ellipses_are_refused(index: Any) -> None:
    td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
    with pytest.raises(IndexError, match=r"at most one `...`"):
        td[index]
    with pytest.raises(IndexError, match=r"at most one `...`"):
        td[index] = 1.0


@pytest.mark.parametrize("index", [0, slice(2), [0], (0, 0), torch.tensor([True])])
def test_an_index_without_a_batch_size_says_so(index: Any) -> None:
    td = TensorDict({"a": torch.zeros(2, 3)})
    with pytest.raises((OutOfRange, ShapeMismatch), match=r"batch_size \(\)"):
        td[index]
    with pytest.raises(OutOfRange, match=r"no batch dimension. Pass `batch_size=`"):
        td[0]


def test_a_number_is_converted_as_torch_converts_it() -> None:
    td = TensorDict({"a": torch.zeros(2, dtype=torch.uint64)}, [2])
    td[0] = -1
    assert td["a"].tolist() == [2**64 - 1, 0]
    with pytest.raises(InvalidArgument, match=r"`a`, whose dtype is torch.uint64"):
        td[0] = 1j


def test_a_write_to_everything_converts_the_dtype_as_torch_does() -> None:
    td, leaf = TensorDict({"a": torch.zeros(2, dtype=torch.int64)}, [2]), torch.zeros(2).long()
    td[True] = torch.tensor([[1.5, 2.0]])
    leaf[True] = torch.tensor([[1.5, 2.0]])
    assert torch.equal(td["a"], leaf)


def test_leading_dimensions_of_size_1_of_a_value_are_dropped() -> None:
    td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, 3)}, [2])
    td[0] = torch.tensor([4.0])
    td[[1]] = torch.ones(1, 1, 1)
    assert td["a"].tolist() == [4, 1]
    with pytest.raises(ShapeMismatch, match="must be broadcastable to"):
        td[0] = torch.ones(2)


def test_no_rows_are_asked_for() -> None:
    assert make().__getitems__([]).batch_size == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16])
def test_one_row_number_keeps_the_dimension(dtype: torch.dtype) -> None:
    td = TensorDict({"a": torch.ones(3, 2).to(dtype)}, [3])
    assert td.index_select(0, torch.tensor(1))["a"].shape == (1, 2)


def test_an_indexed_write_that_one_dtype_lacks_writes_nothing() -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.uint64)}, [2])
    with pytest.raises(InvalidValue, match=r"uint64.*not implemented"):
        td[torch.tensor([-1, 1]), True] = TensorDict({"a": torch.zeros(1, 2), "b": td["b"]})
    assert td["a"].tolist() == [1, 1]


def test_one_expanded_leaf_is_refused_by_an_indexed_write_like_several() -> None:
    td = TensorDict({"a": torch.zeros(1).expand(3)}, [3])
    with pytest.raises(InvalidValue, match="share memory"):
        td[torch.tensor([True, False, True])] = 1.0


def test_update_at_writes_some_keys_into_rows() -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3), "c": torch.zeros(3)}}, [3])
    source: dict[NestedKey, object] = {"a": 1.0, ("n", "b"): torch.tensor([2.0]), ("n", "c"): 3.0}
    assert td.lock_().update_at_(source, 0, keys_to_update=["a", ("n", "b")]) is td
    assert td["a"].tolist() == [1, 0, 0]
    assert td["n", "b"].tolist() == [2, 0, 0]
    assert td["n", "c"].tolist() == [0, 0, 0]
    td.copy_at_(TensorDict({"a": torch.ones(2)}, [2]) * 5, slice(1, 3))
    assert td["a"].tolist() == [1, 5, 5]


def test_update_at_without_batch_dimensions_indexes_each_entry() -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"c": torch.zeros(2, 2)}, "s": "word"})
    assert td.update_at_({"a": 1.0, "n": {"c": torch.ones(2)}}, 0) is td
    assert td["a"].tolist() == [1, 0, 0]
    assert td["n", "c"].tolist() == [[1, 1], [0, 0]]
    td.copy_at_(TensorDict({"a": torch.ones(2)}), slice(1, 3))
    assert td["a"].tolist() == [1, 1, 1]
    with pytest.raises(KeyError, match="`z`"):
        td.update_at_({"a": 2.0, "n": {"z": 1.0}}, 0)
    with pytest.raises(OutOfRange, match="index 2"):
        td.update_at_({"a": 2.0, "n": {"c": torch.ones(2)}}, 2)
    assert td["a"].tolist() == [1, 1, 1]


def test_update_at_names_an_unknown_key_before_the_index() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with pytest.raises(KeyError, match="`z`"):
        td.update_at_({"z": 1.0}, 99)


@pytest.mark.parametrize("value", [-1, torch.tensor(-1.0), {"a": -1}])
def test_copy_at_writes_what_an_assignment_to_rows_writes(value: Any) -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    assert td.copy_at_(value, (2,)) is td
    assert td["a"].tolist() == [0, 0, -1]


@pytest.mark.parametrize("index", [3, [3], torch.tensor(3), torch.tensor([3]), torch.tensor([-4])])
def test_update_at_writes_no_entry_where_a_later_one_has_too_few_rows(index: Any) -> None:
    td = TensorDict({"a": torch.zeros(4), "n": {"b": torch.zeros(3)}}, [])
    with pytest.raises(OutOfRange):
        td.update_at_({"a": 1.0, "n": {"b": 1.0}}, index)
    assert not td["a"].any()


def test_update_at_writes_no_entry_where_a_later_one_cannot_be_written() -> None:
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(1).expand(2)}}, [])
    with pytest.raises(InvalidValue, match="share memory"):
        td.update_at_({"a": 1.0, "n": {"b": 1.0}}, ())
    assert not td["a"].any()


def test_update_at_is_all_or_nothing() -> None:
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3, 2)}, [3])
    with pytest.raises(KeySetMismatch, match="`z`"):
        td.update_at_({"a": 1.0, "z": 1.0}, 0)
    with pytest.raises(ShapeMismatch):
        td.update_at_({"a": 1.0, "b": torch.ones(3)}, 0)
    assert not td["a"].any()


@pytest.mark.parametrize("number", [1, -2])
def test_rows_that_do_not_exist_are_not_written_where_there_are_no_elements(number: int) -> None:
    for entries in ({"a": torch.zeros(1, 0)}, {}):
        td = TensorDict(entries, [1])
        with pytest.raises(OutOfRange, match=r"out of range for batch_size \(1,\)"):
            td[torch.tensor([number])] = 2.5
        td[torch.tensor([0])] = 2.5


def test_a_row_that_is_written_adds_the_keys_that_a_container_lacks() -> None:
    td = TensorDict(batch_size=[4])
    row = TensorDict({"a": torch.ones(3), "s": "z", "n": {"b": torch.ones(2, dtype=torch.int8)}})
    td[1] = row
    assert td["a"].tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert td["n", "b"].dtype is torch.int8
    assert td["n", "b"].sum(1).tolist() == [0, 2, 0, 0]
    assert td["s"] == [None, "z", None, None]
    part = TensorDict(batch_size=[4])
    part[2:] = TensorDict({"c": torch.ones(2, 3)}, [2])
    assert part["c"].sum(1).tolist() == [0, 0, 3, 3]
    picked = TensorDict(batch_size=[4])
    picked[torch.tensor([0, 3])] = {"d": torch.tensor([5, 6])}
    assert picked["d"].tolist() == [5, 0, 0, 6]


@pytest.mark.parametrize("index", [slice(1, 3), torch.tensor([1, 2]), [1, 2], (..., slice(1, 3))])
def test_a_nested_container_that_rows_add_keeps_its_further_batch_dimensions(index: Any) -> None:
    td = TensorDict(batch_size=[4])
    deep = TensorDict({"x": torch.ones(2, 5, 6, 7)}, [2, 5, 6])
    td[index] = TensorDict(
        {"n": TensorDict({"a": torch.ones(2, 5), "s": "z", "deep": deep}, [2, 5])}, [2]
    )
    assert td.nested("n", TensorDict).batch_size == (4, 5)
    assert td["n", "a"].sum(1).tolist() == [0, 5, 5, 0]
    assert td.nested(("n", "deep"), TensorDict).batch_size == (4, 5, 6)
    assert td["n", "deep", "x"].shape == (4, 5, 6, 7)
    row = TensorDict(batch_size=[4])
    row[1] = TensorDict(n=TensorDict({"a": torch.ones(5)}, [5]))
    assert row.nested("n", TensorDict).batch_size == (4, 5)
    assert row["n", "a"].sum(1).tolist() == [0, 5, 0, 0]


def test_keys_are_added_all_or_none_and_never_to_a_locked_container() -> None:
    td = TensorDict({"n": TensorDict(batch_size=[4]), "x": torch.zeros(4)}, [4])
    with pytest.raises(ShapeMismatch):
        td[0] = {"n": {"new": torch.ones(3)}, "x": torch.zeros(7)}
    assert list(td.keys(True, True)) == ["x"]
    with pytest.raises(Locked):
        td.lock_()[0] = {"x": 1.0, "n": {"new": torch.ones(3)}}
    assert td["x"].sum() == 0


def test_rows_of_a_tensor_class_are_not_written_where_the_source_has_no_such_field() -> None:
    class Sample(TensorClass):
        a: Tensor
        n: TensorDict

    sample = Sample(a=torch.zeros(2), n=TensorDict({"b": torch.zeros(2)}, [2]), batch_size=[2])
    rows = TensorDict({"a": torch.ones(1), "n": {"b": torch.ones(1)}, "none": torch.ones(1)}, [1])
    for source in (rows, rows.to_dict()):
        with pytest.raises(UnknownField, match="`none`"):
            sample[:1] = source
    assert not sample.a.any()
    assert not sample.n["b"].any()


ROWS = torch.tensor([2, -4, 2, 0])
"""Rows of four, one of them counted from the end, one of them twice."""


def rows_written(leaf: Tensor, source: Tensor) -> Tensor:
    """Return what a container writes into rows, beside a leaf that all sources fit."""
    before = torch.zeros(4)
    td = TensorDict({"first": before, "n": {"leaf": leaf}}, [4])
    td[ROWS] = TensorDict({"first": torch.ones(4), "n": {"leaf": source}}, [4])
    assert before.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert td["n", "leaf"] is leaf
    return leaf


@pytest.mark.parametrize(
    ("leaf", "source"),
    [
        (torch.zeros(4, 2), torch.rand(4, 2)),
        (torch.zeros(4, 2), torch.rand(2, 4).T),
        (torch.zeros(2, 4).T, torch.rand(4, 2)),
        (torch.zeros(4, 2), torch.rand(4, 1)),
        (torch.zeros(4, 0), torch.rand(4, 0)),
        (torch.zeros(4, dtype=torch.bool), torch.tensor([True, False, True, True])),
        (torch.zeros(4, dtype=torch.complex64), torch.rand(4, dtype=torch.complex64).conj()),
    ],
    ids=["plain", "columns", "into columns", "broadcast", "empty", "bool", "complex"],
)
def test_numbered_rows_of_a_container_are_written_as_those_of_a_tensor(
    leaf: Tensor, source: Tensor
) -> None:
    expected = leaf.clone()
    expected[ROWS] = source
    assert torch.equal(rows_written(leaf, source), expected)


def test_gradients_go_through_numbered_rows_of_a_container() -> None:
    source = torch.rand(4, 2, requires_grad=True)
    expected = torch.zeros(4, 2)
    expected[ROWS] = source
    [gradient] = torch.autograd.grad(expected.square().sum(), source)
    written = rows_written(torch.zeros(4, 2), source)
    assert torch.equal(torch.autograd.grad(written.square().sum(), source)[0], gradient)


def test_a_parameter_of_a_graph_refuses_numbered_rows_and_nothing_is_written() -> None:
    td = TensorDict({"a": torch.zeros(4), "b": torch.zeros(4, requires_grad=True)}, [4])
    rows = TensorDict({"a": torch.ones(4), "b": torch.ones(4)}, [4])
    with pytest.raises(InvalidValue, match="`b`"):
        td[ROWS] = rows
    with pytest.raises(OutOfRange, match="index 4 is out of bounds"), torch.no_grad():
        td[torch.tensor([0, 1, 2, 4])] = rows
    assert not td["a"].any()


def test_numbered_rows_overlap_what_is_written() -> None:
    td = TensorDict({"a": torch.arange(4.0), "b": torch.arange(4.0)}, [4])
    td[torch.tensor([1, 2, 3])] = td[:3]
    assert td["a"].tolist() == td["b"].tolist() == [0.0, 0.0, 1.0, 2.0]


def test_row_numbers_may_be_an_entry_that_is_written() -> None:
    fresh = {"a": torch.ones(3), "rows": torch.tensor([7, 8, 9]), "b": torch.tensor([1.0, 2, 3])}
    for source in (fresh, TensorDict(fresh, [3])):
        rows = torch.tensor([2, 0, 1])
        td = TensorDict({"a": torch.zeros(3), "rows": rows, "b": torch.zeros(3)}, [3])
        td[td["rows"]] = source
        assert td["rows"].tolist() == [8, 9, 7]
        assert td["b"].tolist() == [2.0, 3.0, 1.0]
