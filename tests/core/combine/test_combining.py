"""Several containers become one as their leaves do, key by key."""

from typing import Any

import pytest
import torch
from tests.core.rows import BATCH, assert_rows, container, lazy_container, numbers

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KdError,
    KeyCollision,
    KeySetMismatch,
    OutOfRange,
    ShapeMismatch,
    TensorDict,
    cat,
    merge_tensordicts,
    pad,
    pad_sequence,
    stack,
)

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
def test_lazy_stacks_become_dense(join: Any) -> None:
    rows = (torch.stack if join is stack else torch.cat)([numbers(), numbers()])
    got = join([lazy_container(), container()])
    assert isinstance(got, TensorDict)
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


def test_the_device_stays_where_all_agree() -> None:
    here, anywhere = TensorDict({"a": 1}, device="cpu"), TensorDict({"a": 1})
    assert stack([here, here]).device == torch.device("cpu")
    assert stack([here, anywhere]).device is None


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


def test_equal_data_stays_one_value() -> None:
    one, other = (TensorDict({"names": {"x", "y"}, "a": 1}) for _ in range(2))
    assert stack([one, other])["names"] == {"x", "y"}


@BOTH
@pytest.mark.parametrize("other", ["text", torch.nn.Identity(), None])
def test_data_that_differs_is_an_error(join: Any, other: object) -> None:
    one = TensorDict({"in": {"word": "word"}, "a": torch.ones(1)}, [1])
    differing = TensorDict({"in": {"word": other}, "a": torch.ones(1)}, [1])
    with pytest.raises(InvalidValue, match=r"in.*word.*container 2 and 'word' in container 0"):
        join([one, one, differing])


@BOTH
def test_missing_and_additional_keys_name_the_container(join: Any) -> None:
    td = TensorDict({"a": torch.ones(2), "in": {"b": torch.ones(2)}}, [2])
    fewer = TensorDict({"a": torch.ones(2), "in": {}}, [2])
    other = TensorDict({"x": torch.ones(2), "in": {"b": torch.ones(2)}}, [2])
    with pytest.raises(KeySetMismatch, match="below `in` container 2 lacks `b` and alone has none"):
        join([td, td, fewer])
    with pytest.raises(KeySetMismatch, match="container 1 lacks `a` and alone has `x`"):
        join([td, other])


@BOTH
@pytest.mark.parametrize(
    ("one", "other"), [(1.0, {"b": 1.0}), ({"b": 1.0}, 1.0), ("word", 1.0), (1.0, "word")]
)
def test_kinds_that_differ_name_the_container(join: Any, one: object, other: object) -> None:
    first, second = (TensorDict({"a": each}).expand(1) for each in (one, other))
    with pytest.raises(KeySetMismatch, match=r"`a` is .* in container 1 and .* in container 0"):
        join([first, second])


@BOTH
def test_leaves_that_do_not_fit_name_the_container(join: Any) -> None:
    td = TensorDict({"in": {"a": torch.ones(2, 3)}}, [2])
    wide = TensorDict({"in": {"a": torch.ones(2, 4)}}, [2])
    with pytest.raises(ShapeMismatch, match=r"shape is \(2, 4\) in container 2 and \(2, 3\) in"):
        join([td, td, wide])


def test_batch_sizes_that_do_not_fit_name_the_container() -> None:
    td, n = container(), "container 1"
    with pytest.raises(ShapeMismatch, match=rf"the same, but .* \(1, 1, 3\) in {n}"):
        stack([td, td[:1]])
    with pytest.raises(ShapeMismatch, match=rf"dimension that grows, but .* \(2, 1, 2\) in {n}"):
        cat([td, td.narrow(2, 0, 2)])
    inner = TensorDict({"in": TensorDict({}, [2, 5])}, [2])
    other = TensorDict({"in": TensorDict({}, [2, 6])}, [2])
    with pytest.raises(ShapeMismatch, match=rf"batch_size of `in` is \(2, 6\) in {n}"):
        stack([inner, other])


@BOTH
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], InvalidValue, "one container or more"),
        (TensorDict({}, [2]), InvalidArgument, "a list or tuple of containers, but a `TensorDict`"),
        ([{"a": 1}], InvalidArgument, "number 0 is a `dict`"),
        ([TensorDict({}, [2]), {"a": 1}], InvalidArgument, "number 1 is a `dict`"),
        ([TensorDict({}, [2]), torch.ones(2)], InvalidArgument, "number 1 is a `Tensor`"),
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
        (TensorDict({"a": torch.zeros(3, 2)}, [3]), ShapeMismatch, r"batch_size \(3,\)"),
        (TensorDict({"a": torch.zeros(2, 2)}, [2]), ShapeMismatch, "the keys `a`, but"),
        (
            TensorDict({"a": torch.zeros(2, 2), "b": torch.zeros(2, 1)}, [2]),
            ShapeMismatch,
            r"entry `b` of `out` has shape \(2, 1\), but the result has \(2,\)",
        ),
        (
            TensorDict({"a": torch.zeros(2, 2), "b": torch.zeros(2, requires_grad=True)}, [2]),
            InvalidArgument,
            "`b` needs gradients",
        ),
        (TensorDict({"a": torch.zeros(2, 2), "b": "w"}, [2]), KeySetMismatch, "`b` is data"),
    ],
)
def test_an_out_that_does_not_fit_is_left_alone(
    out: TensorDict, error: type[KdError], message: str
) -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.tensor(1.0)})
    with pytest.raises(error, match=message):
        stack([td, td], out=out)
    assert not out["a"].any()


def test_pad_adds_rows_around_each_dimension() -> None:
    td = container((2, 3))
    got = pad(td, [1, 2, 0, 1], value=-1)
    assert got.batch_size == (5, 4)
    assert got.get("word").batch_size == (5, 4)  # type: ignore[union-attr]  # a wrapper
    assert_rows(got[1:3, :3], td, numbers((2, 3)))
    for key in ("bare", "row", "image", ("nested", "deep", "row"), ("inner", "wide")):
        assert (got[key][0] == -1).all()
        assert (got[key][3:] == -1).all()
        assert (got[key][:, 3:] == -1).all()


def test_pad_takes_rows_away() -> None:
    td = container((4,))
    assert_rows(pad(td, [-1, -2]), td, numbers((4,))[1:2])


@pytest.mark.parametrize(
    ("pad_size", "message"),
    [([1], "a pair"), ([0, 0, 0, 0], "each of the 1 batch"), ([-2, -3], "more rows away")],
)
def test_pad_sizes_are_checked(pad_size: list[int], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        pad(TensorDict({}, [4]), pad_size)


@pytest.mark.parametrize("dim", [0, 2])
def test_pad_sequence_pads_at_the_end(dim: int) -> None:
    td = container()
    got = pad_sequence([td.narrow(dim, 0, 1), td], pad_dim=dim, padding_value=0, return_mask=True)
    masks: Any = got.pop("masks")
    assert got.batch_size == (2, *BATCH)
    assert_rows(got[1], td, numbers())
    assert_rows(got[0].narrow(dim, 0, 1), td, numbers().narrow(dim, 0, 1))
    size = BATCH[dim]
    real = torch.ones(2, *BATCH, dtype=torch.bool)
    real[0].narrow(dim, 1, size - 1).fill_(False)
    for key in ("bare", ("nested", "deep", "row"), ("inner", "wide")):
        mask = masks[key]
        assert mask.shape[:4] == (2, *BATCH)
        assert mask.reshape(2, *BATCH, -1)[..., 0].equal(real)
        assert not got[key][0].narrow(dim, 1, size - 1).any()


def test_pad_sequence_takes_a_key_for_the_masks() -> None:
    parts = [TensorDict({"a": torch.ones(n), "word": "x"}, [n]) for n in (1, 2)]
    masks: Any = pad_sequence(parts, return_mask="real")["real"]
    assert list(masks.keys()) == ["a"]
    with pytest.raises(KeyCollision, match="`a`"):
        pad_sequence(parts, return_mask="a")


def test_pad_sequence_refuses_batches_that_differ_elsewhere() -> None:
    with pytest.raises(ShapeMismatch, match="container 1"):
        pad_sequence([TensorDict({}, [2, 3]), TensorDict({}, [2])])
    with pytest.raises(ShapeMismatch, match="container 1"):
        pad_sequence([TensorDict({}, [2, 3]), TensorDict({}, [2, 4])])


def test_merge_keeps_the_later_entry_and_the_sources() -> None:
    first = TensorDict({"a": 1, "in": {"b": 1}}).lock_()
    merged = merge_tensordicts(first, TensorDict({"in": {"c": 2}}), TensorDict({"a": 3}))
    assert merged.to_dict() == {"a": 3, "in": {"b": 1, "c": 2}}
    assert set(first.keys(True, True)) == {"a", ("in", "b")}


def test_merge_checks_batch_sizes() -> None:
    with pytest.raises(ShapeMismatch, match=r"the same, but the batch_size is \(3,\) in cont"):
        merge_tensordicts(TensorDict({}, [2]), TensorDict({}, [3]))
