"""Several containers become one as their leaves do, key by key."""

from typing import Any

import pytest
import torch
from tests.core.rows import assert_rows, container, lazy_container, numbers

from kd_core import (
    DeviceMismatch,
    InvalidArgument,
    InvalidValue,
    KdError,
    KeySetMismatch,
    LazyStackedTensorDict,
    OutOfRange,
    ShapeMismatch,
    TensorDict,
    cat,
    lazy_stack,
    stack,
)
from kd_core.testing import assert_close

JOINS: list[Any] = [stack, torch.stack]
CATS: list[Any] = [cat, torch.cat, torch.concat, torch.concatenate]
BOTH = pytest.mark.parametrize("join", [stack, cat])


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("dim", [0, 1, 3, -1, -4])
def test_stack_puts_rows_where_torch_does(join: Any, dim: int) -> None:
    td = container()
    flipped = td.flip(0, 2)
    rows = torch.stack([numbers(), numbers().flip(0, 2), numbers()], dim)
    assert_rows(join([td, flipped, td], dim), td, rows)


@pytest.mark.parametrize("join", CATS)
@pytest.mark.parametrize("dim", [0, 2, -1])
def test_cat_puts_rows_where_torch_does(join: Any, dim: int) -> None:
    td, n = container(), numbers()
    parts = [td, td.narrow(dim, 0, 1), td.narrow(dim, 0, 0)]
    rows = torch.cat([n, n.narrow(dim, 0, 1), n.narrow(dim, 0, 0)], dim)
    assert_rows(join(parts, dim=dim), td, rows)


@BOTH
def test_lazy_stacks_beside_dense_ones(join: Any) -> None:
    rows = (torch.stack if join is stack else torch.cat)([numbers(), numbers()])
    got = join([container(), lazy_container()])
    assert isinstance(got, TensorDict if join is stack else LazyStackedTensorDict)
    assert_rows(got, container(), rows)


@pytest.mark.parametrize("count", [2, 40])
def test_keys_may_come_in_another_order(count: int) -> None:
    keys = [f"k{i}" for i in range(count)]
    one = TensorDict({key: torch.full((2,), i) for i, key in enumerate(keys)}, [2])
    other = TensorDict({key: one[key] + 1 for key in reversed(keys)}, [2])
    for both in ([one, other], [one, one, other]):
        got = stack(both)
        assert list(got.keys()) == keys
        assert all(got[key][-1].tolist() == [i + 1] * 2 for i, key in enumerate(keys))


def test_a_tuple_a_single_container_and_one_without_entries() -> None:
    td = container()
    assert_rows(stack((td,)), td, numbers()[None])
    assert cat([TensorDict({}, [2]), TensorDict({}, [3])]).batch_size == (5,)


def test_dtypes_promote_as_in_torch() -> None:
    parts = [TensorDict({"a": torch.ones(1, dtype=d)}, [1]) for d in (torch.int32, torch.float64)]
    assert cat(parts)["a"].dtype is torch.float64


def test_a_stack_has_the_device_of_its_first_part_and_cat_the_one_of_all() -> None:
    here, anywhere = TensorDict({"a": [1]}, [1], device="cpu"), TensorDict({"a": [1]}, [1])
    for join in (stack, cat):
        assert join([here, here]).device == torch.device("cpu")
        assert join([anywhere, here]).device is None
    assert stack([here, anywhere]).device == torch.device("cpu")
    assert cat([here, anywhere]).device is None


def test_the_result_of_locked_containers_is_not_locked() -> None:
    td = container().lock_()
    assert not stack([td, td]).is_locked
    assert not cat([td, td]).is_locked


def test_gradients_flow_to_each_container() -> None:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    joined = stack([TensorDict({"a": leaf}, [2]) for leaf in leaves])["a"]
    grads = torch.autograd.grad((joined * torch.tensor([[1.0], [2.0]])).sum(), leaves)
    assert [grad.tolist() for grad in grads] == [[1, 1], [2, 2]]


@pytest.mark.parametrize("join", [torch.stack, torch.cat, stack, cat])
def test_it_compiles_as_one_graph_for_any_batch(join: Any) -> None:
    torch._dynamo.reset()
    run = torch.compile(
        lambda one, other: join([one, other], 1), fullgraph=True, dynamic=True, backend="eager"
    )
    for size in (4, 6):
        td = TensorDict({"a": torch.rand(size, 2), "b": {"c": torch.rand(size, 2, 3)}}, [size, 2])
        got, expected = run(td, td), join([td, td], 1)
        assert got.batch_size == expected.batch_size
        torch.testing.assert_close(got.to_dict(), expected.to_dict())


def test_equal_data_of_batches_stays_one_value() -> None:
    one, other = (TensorDict({"names": {"x", "y"}, "a": [1]}, [1]) for _ in range(2))
    assert cat([one, other]).get_non_tensor("names") == {"x", "y"}
    assert stack([one, other]).get_non_tensor("names") == [[{"x", "y"}], [{"x", "y"}]]


@pytest.mark.parametrize("other", ["text", torch.nn.Identity(), None])
def test_data_that_differs_becomes_one_value_per_row(other: object) -> None:
    one = TensorDict({"in": {"word": "word"}, "a": torch.ones(1)}, [1])
    differing = TensorDict({"in": {"word": other}, "a": torch.ones(1)}, [1])
    assert cat([one, differing]).get_non_tensor(("in", "word")) == ["word", other]
    assert stack([one, differing]).get_non_tensor(("in", "word")) == [["word"], [other]]


@BOTH
def test_missing_and_additional_keys_name_the_container(join: Any) -> None:
    td = TensorDict({"a": torch.ones(2), "in": {"b": torch.ones(2)}}, [2])
    fewer = TensorDict({"a": torch.ones(2), "in": {}}, [2])
    other = TensorDict({"x": torch.ones(2), "in": {"b": torch.ones(2)}}, [2])
    with pytest.raises(
        KeySetMismatch, match=r"container 2 of .* below `in`, got `b` only in container 0"
    ):
        join([td, td, fewer])
    with pytest.raises(
        KeySetMismatch, match="got `a` only in container 0 and `x` only in container 1"
    ):
        join([td, other])


@BOTH
@pytest.mark.parametrize(
    ("one", "other"), [(1.0, {"b": 1.0}), ({"b": 1.0}, 1.0), ("word", 1.0), (1.0, "word")]
)
def test_kinds_that_differ_name_the_container(join: Any, one: object, other: object) -> None:
    first, second = (TensorDict({"a": each}).expand(1) for each in (one, other))
    with pytest.raises(
        KeySetMismatch, match=r"`a` must be .* in container 0 and .* in container 1"
    ):
        join([first, second])


@BOTH
def test_leaves_that_do_not_fit_name_the_container(join: Any) -> None:
    td = TensorDict({"in": {"a": torch.ones(2, 3)}}, [2])
    wide = TensorDict({"in": {"a": torch.ones(2, 4)}}, [2])
    with pytest.raises(ShapeMismatch, match=r"shape is \(2, 4\) in container 2 and \(2, 3\) in"):
        join([td, td, wide])


class _Unjoinable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.stack, torch.cat):
            raise KeyError("no function for this")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # by torch


@BOTH
def test_a_key_error_of_a_tensor_names_the_entry(join: Any) -> None:
    td = TensorDict({"a": torch.zeros(2).as_subclass(_Unjoinable)}, [2])
    with pytest.raises(InvalidValue, match="cannot join the entries `a`: 'no function for this'"):
        join([td, td])


def test_batch_sizes_that_do_not_fit_name_the_container() -> None:
    td, n = container(), "container 1"
    with pytest.raises(ShapeMismatch, match=rf"must be equal, got .* \(1, 1, 3\) in {n}"):
        stack([td, td[:1]])
    with pytest.raises(ShapeMismatch, match=rf"dimension that grows, got .* \(2, 1, 2\) in {n}"):
        cat([td, td.narrow(2, 0, 2)])
    inner = TensorDict({"in": TensorDict({}, [2, 5])}, [2])
    other = TensorDict({"in": TensorDict({}, [2, 6])}, [2])
    with pytest.raises(
        ShapeMismatch, match=rf"batch sizes of `in` must be equal, .* \(2, 6\) in {n}"
    ):
        stack([inner, other])


@BOTH
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], InvalidValue, "at least one container"),
        (TensorDict({}), InvalidArgument, "a list or tuple of containers, got a `TensorDict`"),
        ([{"a": 1}], InvalidArgument, "input 0 of .*, got a `dict`"),
        ([TensorDict({}, [2]), {"a": 1}], InvalidArgument, "input 1 of .*, got a `dict`"),
        ([TensorDict({}, [2]), torch.ones(2)], InvalidArgument, "input 1 of .*, got a `Tensor`"),
    ],
)
def test_anything_else_is_refused(
    join: Any, given: Any, error: type[KdError], message: str
) -> None:
    with pytest.raises(error, match=message):
        join(given)


@BOTH
def test_dimensions_are_checked(join: Any) -> None:
    with pytest.raises(OutOfRange, match="dimension 4 is out of range"):
        join([container(), container()], 4)


@pytest.mark.parametrize("join", [stack, torch.stack])
def test_stack_writes_to_out(join: Any) -> None:
    td = container()
    out = stack([td.flip(0), td]).lock_()
    storages = [out["row"].data_ptr(), out["nested", "deep", "row"].data_ptr()]
    assert join([td, td], out=out) is out
    assert_rows(out.clone(recurse=False), td, torch.stack([numbers(), numbers()]))
    assert storages == [out["row"].data_ptr(), out["nested", "deep", "row"].data_ptr()]


def test_cat_writes_to_out() -> None:
    td = TensorDict({"a": torch.ones(2, 3)}, [2, 3])
    out = TensorDict({"a": torch.zeros(2, 6)}, [2, 6])
    cat([td, td], 1, out=out)
    assert out["a"].all()


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (TensorDict({"a": torch.zeros(3, 2)}, [3]), ShapeMismatch, r"got \(3,\)"),
        (
            TensorDict({"a": torch.zeros(2, 2), "b": torch.zeros(2, 1)}, [2]),
            ShapeMismatch,
            r"entry `b` of `out` must have shape \(2,\), got \(2, 1\)",
        ),
        (
            TensorDict({"a": torch.zeros(2, 2), "b": torch.zeros(2, requires_grad=True)}, [2]),
            InvalidArgument,
            "`b` requires gradients",
        ),
        (
            TensorDict({"a": torch.zeros(2, 2), "b": "w"}, [2]),
            KeySetMismatch,
            "`b` of `out` must be a tensor, got a non-tensor value",
        ),
        (
            TensorDict({"a": torch.zeros(2, 2), "b": "w"}, [2]),
            KeySetMismatch,
            "`b` of `out` must be a tensor",
        ),
        (
            TensorDict({"a": torch.zeros(2, 2), "b": torch.zeros(1).expand(2)}, [2]),
            InvalidValue,
            "`b` cannot be written in place: some of its elements share",
        ),
        (
            TensorDict({"a": torch.zeros(2, 2), "b": torch.zeros(2, device="meta")}, [2]),
            DeviceMismatch,
            "`b` of `out` is on meta, but that of container 0 is on cpu",
        ),
    ],
)
def test_an_out_that_does_not_fit_is_left_alone(
    out: TensorDict, error: type[KdError], message: str
) -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.tensor(1.0)})
    with pytest.raises(error, match=message):
        stack([td, td], out=out)
    assert not out["a"].any()


def test_an_out_may_overlap_what_is_joined() -> None:
    rows, first = torch.arange(4.0).reshape(2, 2), torch.ones(2)
    parts = [TensorDict({"a": first, "b": rows[i]}) for i in (1, 0)]
    out = stack(parts, out=TensorDict({"a": torch.zeros(2, 2), "b": rows}, [2]))
    assert out["a"].eq(1).all()
    assert rows.tolist() == [[2, 3], [0, 1]]


@pytest.mark.parametrize("dim", [0, 1])
@BOTH
def test_out_may_be_a_lazy_stack(join: Any, dim: int) -> None:
    parts = [
        TensorDict({"a": torch.full((2, 2), i), "n": {"b": torch.ones(2, 2)}}, [2, 2])
        for i in (1.0, 2.0)
    ]
    expected = join(parts, dim)
    rows = [(row * 0).to(torch.float64) for row in expected.unbind(1)]
    out = lazy_stack(rows, 1)
    assert join(parts, dim, out=out) is out
    assert rows[1]["a"].dtype is torch.float64
    assert_close(lazy_stack(rows, 1).float(), expected)


def ragged_rows(fill: float, sizes: tuple[int, int] = (2, 3)) -> list[TensorDict]:
    return [
        TensorDict(
            {"a": torch.full((n,), fill), "s": str(fill), "n": {"b": torch.full((2,), fill)}}
        )
        for n in sizes
    ]


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("locked", [False, True])
def test_a_ragged_stack_takes_each_row_in_its_member(join: Any, locked: bool) -> None:
    members = ragged_rows(5.0)
    members[0]["c"] = torch.tensor(9.0)
    out = lazy_stack(members)
    if locked:
        out.lock_()
    held = [member["a"] for member in members]
    rows = ragged_rows(1.0)
    for row in rows:
        row["d"] = torch.tensor(8.0)
    assert join(rows, 0, out=out) is out
    for row, member, before in zip(rows, members, held, strict=True):
        assert member["a"] is before
        assert_close(member.exclude("c"), row.exclude("d"))
        assert member["s"] == "1.0"
    assert members[0]["c"] == 9.0
    nested = [lazy_stack(ragged_rows(float(i))) for i in range(2)]
    target = lazy_stack([lazy_stack(ragged_rows(5.0)) for _ in range(2)])
    stack(nested, out=target)
    assert target[1][1]["a"].tolist() == [1.0] * 3


def test_a_ragged_stack_is_left_alone_where_a_row_does_not_fit() -> None:
    out = lazy_stack(ragged_rows(5.0))
    for rows in (ragged_rows(1.0, (2, 4)), ragged_rows(1.0)[:1]):
        with pytest.raises(ShapeMismatch):
            stack(rows, out=out)
        assert [float(each.sum()) for each in out.get("a", as_list=True)] == [10.0, 15.0]


@BOTH
def test_an_out_of_another_dtype_is_left_alone(join: Any) -> None:
    parts = [TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2]) for _ in range(2)]
    for out in (join(parts) * 0, lazy_stack((join(parts) * 0).unbind(0))):
        out["b"] = out["b"].int()
        with pytest.raises(InvalidArgument, match=r"`b` of `out` must .* got torch.int32"):
            join(parts, out=out)
        assert not out["a"].any()


def test_nested_lazy_stacks_of_ragged_members_are_concatenated() -> None:
    lengths = [[1, 2], [3]]
    parts = [lazy_stack([TensorDict({"x": torch.ones(n)}) for n in part]) for part in lengths]
    made = cat([TensorDict({"n": {"s": part}}, [len(part)]) for part in parts])
    rows = [row["n", "s", "x"].shape[0] for row in made.unbind(0)]
    assert rows == [1, 2, 3]


@pytest.mark.parametrize("stack_dim", [0, 1])
def test_lazy_stacks_are_concatenated_member_by_member(stack_dim: int) -> None:
    rows = [TensorDict({"r": torch.full((2, n), n)}, [2]) for n in (1, 2)]
    stack_ = lazy_stack(rows, stack_dim)
    longer = cat([stack_, stack_], stack_dim)
    assert [row["r"].shape[-1] for row in longer.unbind(stack_dim)] == [1, 2, 1, 2]
    wider = cat([stack_, stack_], 1 - stack_dim)
    assert [tuple(row["r"].shape) for row in wider.unbind(stack_dim)] == [(4, 1), (4, 2)]
    longer.zero_()
    assert rows[1]["r"].all()


def test_entries_of_out_that_the_containers_lack_stay() -> None:
    out = TensorDict(x=torch.zeros(2, 3), y=torch.zeros(2, 3), batch_size=[2, 3])
    rows = [TensorDict(x=torch.ones(3), batch_size=[3])] * 2
    assert torch.stack(rows, 0, out=out) is out  # type: ignore[arg-type, comparison-overlap]  # wrong for the type checker alone
    assert (out["x"].sum(), out["y"].sum()) == (6, 0)  # type: ignore[unreachable]  # types say less than the run


@BOTH
def test_out_decides_which_entries_are_wanted(join: Any) -> None:
    parts = [
        TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2), "c": torch.ones(2)}}, [2]),
        TensorDict({"n": {"b": torch.ones(2)}, "d": torch.ones(2)}, [2]),
    ]
    out = join(parts[1:] * 2) * 0
    del out["d"]
    leaf = out["n", "b"]
    assert join(parts, out=out.lock_()) is out
    assert list(out.keys(True, True)) == [("n", "b")]
    assert leaf.all()


def test_an_out_without_an_entry_for_words_is_left_alone() -> None:
    rows = [TensorDict(a=torch.ones(()), w="word")] * 2
    out = TensorDict(a=torch.zeros(2), batch_size=[2])
    with pytest.raises(KeySetMismatch, match="`out` must have an entry `w`"):
        stack(rows, out=out)
    assert not out["a"].any()


@pytest.mark.parametrize("dim", [0, 1])
def test_ragged_members_are_concatenated_into_out(dim: int) -> None:
    parts = [
        lazy_stack([TensorDict({"a": torch.full((2, n), float(n))}, [2]) for n in (1, 2)])
        for _ in range(2)
    ]
    want = cat(parts, dim)
    out = want.apply(torch.zeros_like)
    kept = [member["a"] for member in out.unbind(0)]
    join: Any = torch.cat
    assert join(parts, dim, out=out) is out
    assert [each.tolist() for each in kept] == [each["a"].tolist() for each in want.unbind(0)]


@pytest.mark.parametrize("dim", [1, 2])
def test_ragged_members_are_stacked_into_out(dim: int) -> None:
    one = lazy_stack([TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 2, 3)])
    out = stack([one, one], dim) * 0
    leaf = out[0]["a"]
    assert stack([one, one.clone()], dim, out=out) is out
    assert leaf.eq(1).all()
    assert [each["a"].shape[-1] for each in out.unbind(0)] == [1, 2, 3]
    with pytest.raises(ShapeMismatch):
        stack([one, one], dim, out=stack([one, one, one], dim))
