"""A batch is taken apart, and rows are picked, as on a tensor of shape `batch_size`."""

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.core.rows import assert_rows, container, lazy_container, numbers
from torch import Tensor

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    LazyStackedTensorDict,
    Locked,
    NonTensorData,
    NonTensorStack,
    OutOfRange,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    stack,
)
from kd_core.testing import assert_close

BATCH = (5, 3)
PIECES: list[tuple[str, tuple[Any, ...]]] = [
    ("split", (2,)),
    ("split", (5,)),
    ("split", (9, 1)),
    ("split", ([1, 0, 4],)),
    ("split", ((2, 1), -1)),
    ("chunk", (2,)),
    ("chunk", (4,)),
    ("chunk", (7, 1)),
    ("tensor_split", (2,)),
    ("tensor_split", (4, 1)),
    ("tensor_split", ((1, 4),)),
    ("tensor_split", ((3, 1, -1),)),
    ("unbind", ()),
    ("unbind", (-1,)),
]
PICKS: list[tuple[str, tuple[Any, ...]]] = [
    ("narrow", (0, 1, 3)),
    ("narrow", (-1, -2, 2)),
    ("narrow", (0, 5, 0)),
    ("index_select", (0, torch.tensor([4, 0, 0]))),
    ("index_select", (1, torch.tensor([2], dtype=torch.int32))),
    ("gather", (0, torch.tensor([[4, 0, 1], [2, 2, 2]]))),
    ("gather", (1, torch.tensor([[2, 2, 0, 1], [1, 0, 0, 0]]))),
    ("masked_select", (numbers(BATCH) % 4 == 1,)),
]


def names(cases: list[tuple[str, tuple[Any, ...]]]) -> list[str]:
    return [f"{name}-{number}" for number, (name, _) in enumerate(cases)]


@pytest.mark.parametrize(("name", "args"), PIECES, ids=names(PIECES))
@pytest.mark.parametrize("make", [container, lazy_container])
@pytest.mark.parametrize("batch", [BATCH, (0, 2)])
def test_pieces_are_those_of_a_tensor_of_row_numbers(
    make: Callable[[tuple[int, ...]], TensorDictBase],
    name: str,
    args: tuple[Any, ...],
    batch: tuple[int, ...],
) -> None:
    if name == "split" and batch != BATCH and not isinstance(args[0], int):
        args = ([0, 0],)
    td = container(batch)
    got = getattr(make(batch), name)(*args)
    expected = getattr(numbers(batch), name)(*args)
    assert isinstance(got, tuple)
    assert len(got) == len(expected)
    for piece, rows in zip(got, expected, strict=True):
        assert_rows(piece, td, rows)


@pytest.mark.parametrize(("name", "args"), PICKS, ids=names(PICKS))
@pytest.mark.parametrize("make", [container, lazy_container])
def test_rows_are_those_of_a_tensor_of_row_numbers(
    make: Callable[[tuple[int, ...]], TensorDictBase], name: str, args: tuple[Any, ...]
) -> None:
    got = getattr(make(BATCH), name)(*args)
    assert_rows(got, container(BATCH), getattr(numbers(BATCH), name)(*args))


@pytest.mark.parametrize("name", ["gather", "index_select"])
def test_rows_of_a_batch_of_one_dimension(name: str) -> None:
    td, index = container((5,)), torch.tensor([3, 3, 0])
    assert_rows(getattr(td, name)(0, index), td, index)


def test_a_mask_may_cover_leading_dimensions_only() -> None:
    td, mask = container(BATCH), torch.tensor([True, False, True, False, False])
    assert_rows(td.masked_select(mask), td, numbers(BATCH)[mask])


def test_all_compile_as_one_graph() -> None:
    calls = PIECES + PICKS[:-1]

    def every(td: TensorDict) -> list[Any]:
        return [getattr(td, name)(*args) for name, args in calls]

    td = TensorDict({"a": torch.rand(5, 3, 4), "b": {"c": torch.rand(5, 3)}}, (5, 3))
    torch._dynamo.reset()
    run = torch.compile(every, fullgraph=True, dynamic=True, backend="eager")
    for call, got, expected in zip(calls, run(td), every(td), strict=True):
        if isinstance(expected, TensorDictBase):
            got, expected = (got,), (expected,)
        for one, other in zip(got, expected, strict=True):
            assert one.batch_size == other.batch_size, call
            torch.testing.assert_close(one.to_dict(), other.to_dict(), msg=str(call))


@pytest.mark.parametrize(("name", "args"), PIECES[:1] + PIECES[-1:] + PICKS[:1])
def test_pieces_share_memory(name: str, args: tuple[Any, ...]) -> None:
    td = container(BATCH)
    got = getattr(td, name)(*args)
    piece = got if isinstance(got, TensorDict) else got[-1]
    for key in ("row", ("nested", "deep", "row"), ("inner", "wide")):
        assert piece[key].untyped_storage().data_ptr() == td[key].untyped_storage().data_ptr()


def test_pieces_of_a_container_without_entries() -> None:
    assert [p.batch_size[0] for p in TensorDict({}, [5]).split(2)] == [2, 2, 1]
    assert len(TensorDict({}, [5]).unbind()) == 5


def test_pieces_of_a_locked_container_are_not_locked() -> None:
    first, _ = container((2,)).lock_().unbind()
    assert not first.is_locked
    assert "new" in first.set("new", 1.0)


def test_gradients_flow_through_gather() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    got = TensorDict({"a": weight}, [3]).gather(0, torch.tensor([1, 1]))["a"]
    (grad,) = torch.autograd.grad(got.sum(), weight)
    assert grad.tolist() == [[0, 0], [2, 2], [0, 0]]


@pytest.mark.parametrize("make", [container, lazy_container])
def test_where_takes_rows_of_another_container(
    make: Callable[[tuple[int, ...]], TensorDictBase],
) -> None:
    td, condition = container(BATCH), numbers(BATCH) % 2 == 0
    got = make(BATCH).where(condition, td.flip(0))
    rows = torch.where(condition, numbers(BATCH), numbers(BATCH).flip(0))
    assert_rows(got, td, rows)


@pytest.mark.parametrize("other", [0, torch.zeros(5, 3, dtype=torch.int64)])
def test_where_takes_a_number_or_a_tensor_of_rows(other: int | torch.Tensor) -> None:
    td = TensorDict({"a": torch.ones(5, 3, 2).long(), "b": {"c": torch.ones(5, 3).long()}}, BATCH)
    condition = torch.tensor([True, False, False, False, True])
    got = td.where(condition, other)
    assert got["a"][:, 0, 0].tolist() == [1, 0, 0, 0, 1]
    assert got["b", "c"][:, 2].tolist() == [1, 0, 0, 0, 1]


def test_scatter_writes_rows_of_another_container() -> None:
    td = TensorDict({"a": torch.zeros(3, 2, 2), "b": torch.zeros(3, 2)}, [3, 2])
    source = TensorDict({"b": torch.ones(1, 2), "a": torch.full((1, 2, 2), 2.0)}, [1, 2])
    got = td.scatter(0, torch.tensor([[2, 0]]), source)
    assert got["b"].tolist() == [[0, 1], [0, 0], [1, 0]]
    torch.testing.assert_close(got["a"], 2 * got["b"][..., None].expand(3, 2, 2))
    assert not td["a"].any()


def test_scatter_writes_a_number() -> None:
    td = TensorDict({"a": torch.zeros(3, 2)}, [3])
    assert td.scatter(0, torch.tensor([0, 2]), 5.0)["a"][:, 1].tolist() == [5, 0, 5]


MASK = torch.ones(5, dtype=torch.bool)
ROWS = torch.zeros(5, 3, dtype=torch.int64)
ERRORS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("split", (0,), InvalidValue, "`split_size` must be positive"),
    ("split", ([1, 2],), InvalidValue, r"sum to the 5 rows of dimension 0, got \(1, 2\)"),
    ("split", ([6, -1],), InvalidValue, "must be non-negative"),
    ("split", (1, 2), OutOfRange, "dimension 2 is out of range"),
    ("chunk", (0,), InvalidValue, "`chunks` must be positive"),
    ("tensor_split", (0,), InvalidValue, "sections must be positive"),
    ("unbind", (-3,), OutOfRange, "dimension -3"),
    ("narrow", (0, 3, 3), OutOfRange, "cannot take 3 rows from row 3 of dimension 0"),
    ("narrow", (0, -6, 1), OutOfRange, "which has 5 rows"),
    ("index_select", (0, ROWS), ShapeMismatch, "a vector of row numbers"),
    ("index_select", (0, [1]), InvalidArgument, "got list"),
    ("gather", (0, ROWS[0]), ShapeMismatch, "as many dimensions as batch_size"),
    ("gather", (0, torch.zeros(1, 4).long()), ShapeMismatch, r"got shape \(1, 4\)"),
    ("gather", (0, torch.zeros(5, 3)), InvalidArgument, r"got torch\.float32"),
    ("masked_select", (MASK[:4],), OutOfRange, r"shape of a mask must be .* got \(4,\)"),
    ("masked_select", (ROWS,), InvalidArgument, "a tensor of torch.bool"),
    ("where", (MASK, TensorDict({}, [5, 3])), KeySetMismatch, "`bare`"),
    ("where", (MASK, TensorDict({}, [5])), ShapeMismatch, "batch sizes must be equal"),
    ("scatter", (0, ROWS, TensorDict({}, [4, 3])), ShapeMismatch, "as large as the index"),
    ("scatter", (0, ROWS, TensorDict({}, [5, 3])), KeySetMismatch, "`bare`"),
]


@pytest.mark.parametrize(("name", "args", "error", "message"), ERRORS)
def test_bad_arguments_say_what_was_expected(
    name: str, args: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        getattr(container(BATCH), name)(*args)


def test_a_tensor_of_where_fits_every_entry_from_one_side() -> None:
    td = TensorDict({"a": torch.zeros(4, 2), "n": {"b": torch.zeros(4, 3)}}, [4])
    rows = torch.arange(4) < 2
    for made in (td, lazy_stack([*td])):
        for shape in ((3,), (2, 2), (4, 2, 1)):
            with pytest.raises(ShapeMismatch, match=re.escape(f"a tensor of shape {shape}")):
                made.where(rows, torch.zeros(shape))
        assert made.where(rows, torch.arange(4.0))["n", "b"].sum(1).tolist() == [0, 0, 6, 9]


def test_a_tensor_tells_where_to_split() -> None:
    td = TensorDict({"a": torch.arange(4)}, [4])
    where = cast("int", torch.tensor(2)), cast("list[int]", torch.tensor([1]))
    assert [each.batch_size[0] for each in td.tensor_split(where[0])] == [2, 2]
    assert [each.batch_size[0] for each in td.tensor_split(where[1])] == [1, 3]


@pytest.mark.parametrize("name", ["where", "masked_fill", "mul", "index"])
def test_masks_and_operands_line_up_with_the_first_dimensions(name: str) -> None:
    td = TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 3, 4)}, [2, 3])
    mask = torch.tensor([True, False])
    if name == "where":
        got = td.where(mask, 0.0)
    elif name == "masked_fill":
        got = td.masked_fill(~mask, 0.0)
    elif name == "mul":
        got = td * mask
    else:
        got = td.clone()
        got[~mask] = 0.0
    assert got["a"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert got["b"].sum((1, 2)).tolist() == [12, 0]


@pytest.mark.parametrize("shape", [(3,), (1, 3, 1), (2, 3)])
@pytest.mark.parametrize(
    "call",
    [
        lambda td, mask: td.where(mask, 0.0),
        lambda td, mask: td.where(torch.tensor(True), mask),
        lambda td, mask: td.masked_fill(mask, 0.0),
        lambda td, mask: td * mask,
        lambda td, mask: td.clamp(max=mask),
    ],
)
def test_what_does_not_line_up_is_refused_everywhere(
    shape: tuple[int, ...], call: Callable[[TensorDict, Tensor], object]
) -> None:
    td = TensorDict({"a": torch.ones(2, 2)}, [2, 2])
    with pytest.raises(ShapeMismatch, match=r"does not line up|must fit the first"):
        call(td, torch.ones(shape, dtype=torch.bool))


def test_where_takes_the_other_of_no_dimensions_as_a_number() -> None:
    td = TensorDict({"a": torch.ones(2, dtype=torch.int32), "b": torch.ones(2, 3)}, [2])
    got = td.where(torch.tensor([True, False]), torch.tensor(5))
    assert got["a"].tolist() == [1, 5]
    assert got["a"].dtype is torch.int32


@pytest.mark.parametrize("dim", [0, 1])
def test_index_select_keeps_the_dimension_for_one_row_of_a_stack(dim: int) -> None:
    stack = lazy_stack([TensorDict({"x": torch.rand(3)}, [3]) for _ in range(2)])
    found = stack.index_select(dim, torch.tensor(1))
    assert_close(found, stack.contiguous().index_select(dim, torch.tensor(1)))


@pytest.mark.parametrize(
    ("values", "pad", "expected"),
    [
        ([True, True], 0, torch.bool),
        ([2**30 + 1, 3], 0.0, torch.int64),
        ([2, 3], 1.5, torch.float32),
    ],
)
def test_where_keeps_the_dtype_of_what_it_pads(
    values: list[object], pad: float, expected: torch.dtype
) -> None:
    mask = torch.tensor([True, False])
    td, other = TensorDict({"x": torch.tensor(values)}, [2]), TensorDict({}, [2])
    for got in (td.where(mask, other, pad=pad)["x"], other.where(~mask, td, pad=pad)["x"]):
        assert got.dtype is expected
        assert got.tolist() == [values[0], pad]


def test_row_numbers_out_of_range_are_an_index_error() -> None:
    td = TensorDict({"x": torch.zeros(3)}, [3])
    for call in (td.gather, td.index_select):
        with pytest.raises(OutOfRange, match="less than 3, got -1 to 7"):
            call(0, torch.tensor([-1, 7]))


def test_where_pads_what_one_side_lacks() -> None:
    mask = torch.tensor([True, False])
    td = TensorDict({"a": torch.ones(2, 3), "n": {"x": torch.ones(2)}}, [2])
    other = TensorDict({"a": torch.zeros(2, 3), "b": torch.ones(2, 2), "n": {}}, [2])
    got = td.where(mask, other, pad=7)
    assert got["a"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert got["b"].tolist() == [[7, 7], [1, 1]]
    assert got["n", "x"].tolist() == [1, 7]
    stacked = lazy_stack(list(td.unbind(0))).where(mask, other, pad=7)
    assert stacked["b"].tolist() == [[7, 7], [1, 1]]
    holder = TensorDict({"s": lazy_stack(list(td.unbind(0)))}, [2])
    assert holder.where(mask, TensorDict(batch_size=[2]), pad=7)["s", "a"].tolist() == [
        [1, 1, 1],
        [7, 7, 7],
    ]


@pytest.mark.parametrize("pad", [0, 7.0])
def test_where_keeps_words_that_one_side_lacks(pad: float) -> None:
    mask = torch.tensor([True, False])
    words = TensorDict({"w": NonTensorStack("a", "b"), "n": {"w": NonTensorStack(1, "c")}}, [2])
    bare = TensorDict({"x": torch.ones(2)}, [2])
    for one in (words, lazy_stack(list(words.unbind(0)))):
        for got in (one.where(mask, bare, pad=pad), bare.where(mask, one, pad=pad)):
            assert got.to_dict()["w"] == ["a", "b"]
            assert got.to_dict()["n"] == {"w": [1, "c"]}
            assert got["x"].tolist() in ([1, pad], [pad, 1])


def ragged_holder(value: float) -> TensorDict:
    """Return a container of batch size (2, 3) with a stack along dimension 1 of unlike members."""
    members = [
        TensorDict({"x": torch.full((2, n), value), "w": [f"{value}", "b"]}, [2]) for n in (1, 2, 3)
    ]
    return TensorDict({"n": {"s": lazy_stack(members, 1)}, "a": torch.full((2, 3), value)}, [2, 3])


def stack_inside(td: TensorDict) -> LazyStackedTensorDict:
    found: object = td.get(("n", "s"))
    assert isinstance(found, LazyStackedTensorDict)
    return found


def ragged_rows(td: TensorDict) -> list[list[float]]:
    """Return the first number of each row of the ragged entry, transposed."""
    return [member["x"][:, 0].tolist() for member in stack_inside(td).unbind(1)]


CONDITIONS = {
    "full": torch.tensor([[True, False, True], [False, True, True]]),
    "rows": torch.tensor([True, False]),
    "column": torch.tensor([[True], [False]]),
    "member": torch.tensor([[False, True, True]]),
    "one": torch.tensor(False),
}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_where_chooses_rows_of_a_ragged_stack_inside(condition: torch.Tensor) -> None:
    td, other = ragged_holder(1.0), ragged_holder(2.0)
    rows = condition.reshape(*condition.shape, *[1] * (2 - condition.ndim)).expand(2, 3)
    got = td.where(condition, other)
    assert ragged_rows(got) == torch.where(rows, 1.0, 2.0).T.tolist()
    words = [["1.0" if each else "2.0" for each in rows[0].tolist()], ["b"] * 3]
    assert stack_inside(got).get_non_tensor("w") == words
    out = ragged_holder(0.0)
    assert td.where(condition, other, out=out) is out
    assert ragged_rows(out) == ragged_rows(got)
    for number in (5.0, torch.full((2, 1), 5.0)):
        got = td.where(condition, number)
        assert ragged_rows(got) == torch.where(rows, 1.0, 5.0).T.tolist()
        assert got["a"].tolist() == torch.where(rows, 1.0, 5.0).tolist()


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("missing", [("n", "s", "x"), ("n", "s"), "n"])
def test_where_pads_rows_of_a_ragged_stack_inside(
    condition: torch.Tensor, missing: str | tuple[str, ...]
) -> None:
    td = ragged_holder(1.0)
    part = td.exclude(missing)
    rows = condition.reshape(*condition.shape, *[1] * (2 - condition.ndim)).expand(2, 3)
    expected = torch.where(rows, 1.0, 7.0).T.tolist()
    assert ragged_rows(td.where(condition, part, pad=7.0)) == expected
    assert ragged_rows(part.where(~condition, td, pad=7.0)) == expected


def test_where_without_dimensions_keeps_the_value_of_one_row() -> None:
    one, other = TensorDict({"word": "a"}), TensorDict({"word": "b"})
    for td in (one, one.where(torch.tensor(True), other), other.where(torch.tensor(False), one)):
        assert td.get("word") == NonTensorData("a")
        assert stack([td, td])["word"] == ["a", "a"]


def test_out_takes_the_entries_of_where() -> None:
    td = TensorDict({"a": torch.arange(2.0), "n": {"b": torch.arange(2)}}, [2])
    out = TensorDict({"n": {"c": torch.ones(2), "b": torch.ones(2)}, "d": torch.ones(2)}, [2])
    inner, leaf = out["n"], out["n", "b"]
    assert td.where(torch.tensor([True, False]), 5.0, out=out) is out
    assert leaf.tolist() == [1, 1]
    assert out["n"] is inner
    assert out["n", "b"].tolist() == [0, 5]
    assert out["a"].tolist() == [0, 5]
    assert sorted(out.keys(True, True), key=str) == [("n", "b"), ("n", "c"), "a", "d"]
    with pytest.raises(Locked):
        td.where(torch.tensor([True, False]), 5.0, out=out.lock_())


def test_where_changes_itself_and_not_what_shares_its_tensors() -> None:
    td = TensorDict({"a": torch.arange(2.0)}, [2])
    kept = td.copy()
    td.where(torch.tensor([True, False]), 5.0, out=td)
    assert td["a"].tolist() == [0, 5]
    assert kept["a"].tolist() == [0, 1]


def test_where_replaces_the_batch_size_of_out_and_gather_writes_into_it() -> None:
    td = TensorDict({"a": torch.arange(2.0)}, [2])
    out = td.clone()
    leaf = out["a"]
    assert td.gather(0, torch.tensor([1, 1]), out=out) is out
    assert leaf.tolist() == [1, 1]
    small = TensorDict({"a": torch.zeros(3)}, [3])
    with pytest.raises(ShapeMismatch, match="`out` must have batch_size"):
        td.where(torch.tensor([True, False]), 5.0, out=small)
    td.where(torch.tensor([True, False]), 5.0, out=small, update_batch_size=True)
    assert small.batch_size == (2,)
    assert small["a"].tolist() == [0, 5]


def uneven_rows(value: float) -> LazyStackedTensorDict:
    return lazy_stack([TensorDict({"a": torch.full((n,), value + n)}) for n in (1, 2, 3)])


@pytest.mark.parametrize("index", [[], [1], [2, 0], [0, 1, 2], [1, 2, 0]])
@pytest.mark.parametrize("below", [False, True])
def test_scatter_exchanges_rows_of_ragged_stacks(index: list[int], below: bool) -> None:
    mine, theirs = uneven_rows(0.0), uneven_rows(10.0)
    wanted = [row.clone() for row in mine.get("a", as_list=True)]
    for position, row in enumerate(index):
        wanted[row] = theirs.get("a", as_list=True)[position]
    numbers = torch.tensor(index, dtype=torch.int64)
    if below:
        td = TensorDict({"s": mine, "d": torch.zeros(3)}, [3])
        src = TensorDict({"s": theirs, "d": torch.ones(3)}, [3])
        result = td.scatter(0, numbers, src)
        assert result["d"].sum() == len(index)
        found = result.get(("s", "a"), as_list=True)
    else:
        found = mine.scatter(0, numbers, theirs).get("a", as_list=True)
    assert found is not None
    assert all(map(torch.equal, found, wanted))
    for leaf in found:
        leaf.zero_()  # a copy
    assert mine[0]["a"].tolist() == [1]
    assert theirs[0]["a"].tolist() == [11]


def test_scatter_writes_a_number_to_rows_of_a_ragged_stack() -> None:
    mine = uneven_rows(0.0)
    found = mine.scatter(0, torch.tensor([2, 0]), 5.0).get("a", as_list=True)
    assert [row.tolist() for row in found] == [[5], [2, 2], [5, 5, 5]]


@pytest.mark.parametrize("row", [-1, 3])
def test_scatter_of_a_ragged_stack_refuses_rows_that_are_not_there(row: int) -> None:
    with pytest.raises(OutOfRange, match=f"from 0 to 2, got {row}"):
        uneven_rows(0.0).scatter(0, torch.tensor([0, row]), uneven_rows(1.0))


def test_scatter_of_a_ragged_stack_in_two_dimensions_is_refused() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2, n)}, [2]) for n in (1, 2)])
    with pytest.raises(ShapeMismatch, match="ragged"):
        stack.scatter(0, torch.zeros(1, 2, dtype=torch.int64), stack)


def test_a_condition_over_features_chooses_values() -> None:
    td = TensorDict({"a": torch.ones(3, 2), "b": torch.ones(3, 2, 4)}, [3])
    mask = torch.tensor([[True, False], [False, True], [True, True]])
    got = td.where(mask, 0.0)
    assert got["a"].tolist() == [[1, 0], [0, 1], [1, 1]]
    assert torch.equal(got["b"], mask[..., None].expand(3, 2, 4).float())
    assert torch.equal(td.where(mask, td * 2)["a"], torch.where(mask, 1.0, 2.0))
    with pytest.raises(ShapeMismatch, match="must fit the first dimensions of each entry"):
        td.where(torch.ones(3, 4, dtype=torch.bool), 0.0)


def test_one_mask_selects_a_container_without_a_batch() -> None:
    td = TensorDict({"a": torch.ones(2)})
    assert td.masked_select(torch.tensor([True])).batch_size == (1,)
    assert td.masked_select(torch.tensor([False])).batch_size == (0,)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 1, 4), (1, 2, 1), (3, 2, 1)])
@pytest.mark.parametrize("other", [1.0, torch.tensor(2.0), torch.rand(3, 2), torch.rand(3, 1)])
def test_a_condition_over_features_chooses_in_stacks_as_in_what_they_stack(
    dim: int, shape: tuple[int, ...], other: float | Tensor
) -> None:
    td = TensorDict({"a": torch.rand(3, 2, 4), "n": {"b": torch.rand(3, 2, 4, 5)}}, [3, 2])
    condition = torch.rand(shape) > 0.5
    expected = td.where(condition, other)
    found = lazy_stack(list(td.unbind(dim)), dim).where(condition, other)
    assert found.batch_size == (3, 2)
    assert torch.equal(found["a"], expected["a"])
    assert torch.equal(found["n", "b"], expected["n", "b"])
    with pytest.raises(ShapeMismatch, match="must fit the first dimensions of each entry"):
        lazy_stack(list(td.unbind(dim)), dim).where(torch.ones(3, 2, 5).bool(), other)
