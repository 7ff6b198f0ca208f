"""Pointwise operations agree with the same torch function on every tensor of a nested dict."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.operations import (
    ARITHMETIC,
    CASTS,
    COMPARISONS,
    LOGIC,
    UNARY,
    BinaryRow,
    CastRow,
    UnaryRow,
)
from torch import Tensor

from kd_core import (
    DeviceMismatch,
    InvalidArgument,
    KeySetMismatch,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

PLAIN = [row for row in UNARY if row.name != "bitwise_not"]
ORDERED = (*ARITHMETIC, *COMPARISONS)


def by_name(row: UnaryRow | BinaryRow | CastRow) -> str:
    return row.name


def tensors(count: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """As many tensors of batch size 3; above eight of them foreach kernels take over."""
    shapes = [(3,), (3, 2), (3, 1, 2)]
    return {str(i): (torch.rand(shapes[i % 3]) * 4 + 0.1).to(dtype) for i in range(count)}


def nested(leaves: dict[str, Tensor]) -> TensorDict:
    """The first leaf at the top, the others below it, beside data that is not a tensor."""
    first, *rest = leaves
    inner: dict[str, object] = {key: leaves[key] for key in rest}
    return TensorDict({first: leaves[first], "rest": inner, "note": "text"}, [3])


def flat(td: TensorDict) -> dict[str, Tensor]:
    assert td["note"] == "text"
    found = {}
    for key, value in td.items(include_nested=True, leaves_only=True):
        if isinstance(value, Tensor):
            found[key if isinstance(key, str) else str(key[-1])] = value
    return found


def assert_same(td: TensorDict, expected: dict[str, Tensor]) -> None:
    found = flat(td)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is value.dtype
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True)


def as_tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def as_container(value: object) -> TensorDict:
    assert isinstance(value, TensorDict)
    return value


def function(name: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(torch, name)
    return found


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("row", PLAIN, ids=by_name)
def test_unary(row: UnaryRow, count: int) -> None:
    leaves = tensors(count)
    expected = {key: function(row.name)(leaf) for key, leaf in leaves.items()}
    assert_same(getattr(nested(leaves), row.name)(), expected)


@pytest.mark.parametrize("row", PLAIN, ids=by_name)
def test_torch_function(row: UnaryRow) -> None:
    leaves = tensors(3)
    expected = {key: function(row.name)(leaf) for key, leaf in leaves.items()}
    result = getattr(torch, row.name)(nested(leaves))
    assert_same(result, expected)


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("row", [row for row in PLAIN if row.in_place], ids=by_name)
def test_unary_in_place(row: UnaryRow, count: int) -> None:
    leaves = tensors(count)
    expected = {key: function(row.name)(leaf).to(leaf.dtype) for key, leaf in leaves.items()}
    td = nested(leaves).lock_()
    assert getattr(td, f"{row.name}_")() is td
    assert_same(td, expected)
    assert flat(td)["1"] is leaves["1"]


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("row", ORDERED, ids=by_name)
def test_binary_with_a_container(row: BinaryRow, count: int) -> None:
    mine, theirs = tensors(count), tensors(count)
    expected = {key: function(row.name)(mine[key], theirs[key]) for key in mine}
    found = getattr(nested(mine), row.name)(nested(theirs))
    if row.name in ("eq", "ne"):  # data is compared, too
        assert found.pop("note").unique().tolist() == [row.name == "eq"]
        found["note"] = "text"
    assert_same(found, expected)


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
@pytest.mark.parametrize("number", [2, 0.3, -0.0, 30001])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow", "eq", "lt"])
def test_binary_with_a_number(name: str, number: float, dtype: torch.dtype, count: int) -> None:
    leaves = tensors(count, dtype)
    expected = {key: function(name)(leaf, number) for key, leaf in leaves.items()}
    assert_same(getattr(nested(leaves), name)(number), expected)


@pytest.mark.parametrize("row", ORDERED, ids=by_name)
def test_binary_with_a_tensor_covers_batch_dimensions(row: BinaryRow) -> None:
    leaves, other = tensors(9), torch.tensor([1.0, 2.0, 3.0])
    expected = {
        key: function(row.name)(leaf, other.reshape(3, *(1,) * (leaf.ndim - 1)))
        for key, leaf in leaves.items()
    }
    assert_same(getattr(nested(leaves), row.name)(other), expected)


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("row", [r for r in ARITHMETIC if r.in_place], ids=by_name)
@pytest.mark.parametrize("kind", ["container", "tensor"])
def test_binary_in_place(row: BinaryRow, kind: str, count: int) -> None:
    mine, theirs = tensors(count), tensors(count)
    other = torch.tensor([1.0, 2.0, 3.0])
    td = nested(mine).lock_()
    if kind == "tensor":
        theirs = {
            key: other.reshape(3, *(1,) * (leaf.ndim - 1)).expand_as(leaf)
            for key, leaf in mine.items()
        }
    expected = {key: function(row.name)(mine[key], theirs[key]) for key in mine}
    assert getattr(td, f"{row.name}_")(other if kind == "tensor" else nested(theirs)) is td
    assert_same(td, expected)
    assert flat(td)["1"] is mine["1"]


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow"])
def test_arithmetic_in_place_with_a_number(name: str, count: int) -> None:
    leaves = tensors(count)
    expected = {key: function(name)(leaf, 1.7) for key, leaf in leaves.items()}
    td = nested(leaves)
    getattr(td, f"{name}_")(1.7)
    assert_same(td, expected)


@pytest.mark.parametrize("count", [2, 12])
@pytest.mark.parametrize("row", LOGIC, ids=by_name)
def test_logic(row: BinaryRow, count: int) -> None:
    mine, theirs = tensors(count, torch.int64), tensors(count, torch.int64)
    expected = {key: function(row.name)(mine[key], theirs[key]) for key in mine}
    assert_same(getattr(nested(mine), row.name)(nested(theirs)), expected)
    td = nested(mine)
    getattr(td, f"{row.name}_")(nested(theirs))
    assert_same(td, {key: value.long() for key, value in expected.items()})


OPERATORS = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.pow,
    operator.floordiv,
    operator.mod,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("fn", OPERATORS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("other", [2, 1.7, torch.tensor(2.5), torch.tensor([1.0, 2.0, 3.0])])
def test_operators_on_both_sides(
    fn: Callable[[object, object], object], other: float | Tensor, count: int
) -> None:
    leaves = tensors(count)
    operands = {
        key: other.reshape((*other.shape, *(1,) * (leaf.ndim - 1 if other.ndim else 0)))
        if isinstance(other, Tensor)
        else other
        for key, leaf in leaves.items()
    }
    right, left = as_container(fn(nested(leaves), other)), as_container(fn(other, nested(leaves)))
    assert_same(right, {key: as_tensor(fn(leaf, operands[key])) for key, leaf in leaves.items()})
    assert_same(left, {key: as_tensor(fn(operands[key], leaf)) for key, leaf in leaves.items()})


@pytest.mark.parametrize("fn", [operator.and_, operator.or_, operator.xor])
def test_bitwise_operators(fn: Callable[[object, object], object]) -> None:
    leaves = tensors(3, torch.bool)
    other = torch.tensor([True, False, True])
    expected = {
        key: as_tensor(fn(leaf, other.reshape(3, *(1,) * (leaf.ndim - 1))))
        for key, leaf in leaves.items()
    }
    for result in (fn(nested(leaves), other), fn(other, nested(leaves))):
        assert_same(as_container(result), expected)


def test_operators_without_operand() -> None:
    leaves = tensors(3)
    assert_same(-nested(leaves), {key: -leaf for key, leaf in leaves.items()})
    assert_same(abs(nested(leaves)), leaves)
    assert_same(+nested(leaves), leaves)
    masks = {key: leaf > 1 for key, leaf in leaves.items()}
    assert_same(~nested(masks), {key: ~mask for key, mask in masks.items()})


def test_an_operator_in_place_keeps_container_and_storage() -> None:
    leaves = tensors(3)
    before = {key: leaf.clone() for key, leaf in leaves.items()}
    td = original = nested(leaves)
    td += 1
    td *= nested(before)
    assert td is original
    assert_same(td, {key: (leaf + 1) * leaf for key, leaf in before.items()})
    assert flat(td)["1"] is leaves["1"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # by torch
@pytest.mark.parametrize("row", CASTS, ids=by_name)
def test_casts(row: CastRow) -> None:
    leaves = tensors(3)
    dtype = getattr(torch, row.dtype)
    td = getattr(nested(leaves), row.name)()
    assert_same(td, {key: leaf.to(dtype) for key, leaf in leaves.items()})
    again = getattr(td, row.name)()
    assert again is not td
    assert all(flat(again)[key] is leaf for key, leaf in flat(td).items())


def test_options() -> None:
    leaves = tensors(3)
    td = nested(leaves)
    assert_same(td.add(1, alpha=2), {key: leaf.add(1, alpha=2) for key, leaf in leaves.items()})
    halved = {key: leaf.div(2, rounding_mode="floor") for key, leaf in leaves.items()}
    assert_same(td.div(2, rounding_mode="floor"), halved)
    before = {key: leaf.clone() for key, leaf in leaves.items()}
    td.sub_(nested(before), alpha=0.5)
    assert_same(td, {key: leaf * 0.5 for key, leaf in before.items()})


@pytest.mark.parametrize("count", [3, 12])
def test_mixed_dtypes_promote_leaf_by_leaf(count: int) -> None:
    dtypes = [torch.float32, torch.int64, torch.bool, torch.float64]
    leaves = {str(i): torch.ones(3).to(dtypes[i % 4]) for i in range(count)}
    td = nested(leaves)
    assert_same(td + 1, {key: leaf + 1 for key, leaf in leaves.items()})
    assert_same(td * 0.5, {key: leaf * 0.5 for key, leaf in leaves.items()})
    assert_same(td.exp(), {key: leaf.exp() for key, leaf in leaves.items()})


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("fn", [torch.exp, lambda x: x * 3, lambda x: 2 - x, lambda x: x / 3 + x])
def test_gradients_equal_the_loop(fn: Callable[[object], object], count: int) -> None:
    leaves = {key: leaf.requires_grad_() for key, leaf in tensors(count).items()}
    weights = list(leaves.values())
    expected = torch.autograd.grad([as_tensor(fn(leaf)).sum() for leaf in weights], weights)
    result = flat(as_container(fn(nested(leaves))))
    found = torch.autograd.grad([leaf.sum() for leaf in result.values()], weights)
    assert all(map(torch.equal, found, expected))


def test_parameters_give_tensors() -> None:
    td = TensorDict({str(i): torch.nn.Parameter(torch.ones(2)) for i in range(10)})
    for result in (td + 1, td * td, td.exp()):
        assert type(result["0"]) is Tensor
        assert result["0"].requires_grad


def test_a_locked_container_gives_locked_results() -> None:
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3)}}, [3]).lock_()
    for result in (
        td + 1,
        td + td,
        1 / td,
        td.abs(),
        td.double(),
        td.lerp(td, 0.5),
        td.detach(),
        td.maximum(td),
        td.add(td, default=0),
        td.where(torch.tensor([True, False, True]), 0.0),
        td.nested("n", TensorDict) * 2,
    ):
        assert result.is_locked
        result.unlock_()["new"] = torch.ones(3)
        assert "n" not in result or not result.nested("n", TensorDict).is_locked
    rows = torch.ones(3)
    words = TensorDict({"s": "word", "n": {}}, [3]).lock_()
    for free in (
        td.clamp(0, 1),
        *(words + 1, words + words, -words, words.exp(), words.maximum(1), words.lerp(words, 0.5)),
        td + rows,
        rows * td,
        td.clamp_min(rows),
        td == td,
        td.sum(0),
        td.clone(),
        td.type(torch.int32),
    ):
        assert not free.is_locked
    assert td.is_locked
    assert td.nested("n", TensorDict).is_locked


def test_vmap_sees_each_row() -> None:
    stacked = torch.arange(30.0).reshape(3, 10)

    def shift(row: Tensor) -> Tensor:
        td = TensorDict({str(i): row + i for i in range(10)}, [10])
        result: Tensor = (td + 1)["9"] + (td + td)["0"]
        return result

    assert torch.equal(torch.vmap(shift)(stacked), stacked + 10 + 2 * stacked)


def test_constants_made_under_inference_mode_serve_training() -> None:
    leaves = tensors(3)
    with torch.inference_mode():
        nested(leaves) * 3.25
    weights = {key: leaf.requires_grad_() for key, leaf in leaves.items()}
    (gradient,) = torch.autograd.grad((nested(weights) * 3.25)["0"].sum(), weights["0"])
    assert torch.equal(gradient, torch.full((3,), 3.25))


def test_fake_tensors_stay_fake() -> None:
    from torch._subclasses import FakeTensorMode

    nested(tensors(3)) + 1
    with FakeTensorMode():
        td = TensorDict({str(i): torch.ones(3) for i in range(9)}, [3])
        assert (td + 1)["0"].shape == (3,)


def test_different_keys_are_listed() -> None:
    td, other = TensorDict({"a": 1, "b": 2}), TensorDict({"a": 1, "c": 3})
    with pytest.raises(KeySetMismatch, match=r"`b` only in the first container and `c` only in"):
        td + other


def test_different_batch_sizes_are_refused() -> None:
    td, other = (
        TensorDict({"a": torch.ones(3, 2)}, [3]),
        TensorDict({"a": torch.ones(3, 2)}, [3, 2]),
    )
    with pytest.raises(ShapeMismatch, match=r"\(3,\) and \(3, 2\)"):
        td + other


def test_a_container_without_batch_size_broadcasts() -> None:
    td, other = TensorDict({"a": torch.ones(3, 2)}, [3]), TensorDict({"a": torch.tensor([1.0, 2])})
    assert (td + other)["a"].tolist() == [[2, 3]] * 3
    assert (other + td).batch_size == ()


def test_a_result_that_leaves_the_batch_is_refused() -> None:
    td, other = TensorDict({"a": torch.ones(3)}, [3]), TensorDict({"a": torch.ones(2, 1)})
    with pytest.raises(ShapeMismatch, match=r"`a` must have a shape .* \(3,\), got \(2, 3\)"):
        td + other


def test_a_tensor_with_more_than_the_batch_is_refused() -> None:
    td = nested(tensors(3))
    with pytest.raises(ShapeMismatch, match=r"shape \(3, 2\) does not line up.* \(3,\)"):
        td + torch.ones(3, 2)
    with pytest.raises(ShapeMismatch, match=r"shape \(4,\) does not line up"):
        td * torch.ones(4)


def test_foreign_operands_are_refused() -> None:
    td = nested(tensors(3))
    with pytest.raises(InvalidArgument, match=r"got a `dict`. Wrap a mapping"):
        td + {"a": 1}  # type: ignore[operator]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="got a `dict`"):
        td.add({"a": 1})  # type: ignore[arg-type]  # wrong on purpose
    assert (td == "text") is False
    assert (td != None) is True  # noqa: E711  # the operator is tested


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda td: td.exp_(), r"`\('rest', 'i'\)` of torch.int64 cannot be written in place: res"),
        (lambda td: td.add_(0.5), r"`\('rest', 'i'\)` of torch.int64 cannot be written in place"),
        (lambda td: td.div_(td), "torch.int64 cannot be written in place"),
        (lambda td: td.add_(TensorDict({"f": torch.ones(1, 3), "rest": {"i": 1}})), "broadcast"),
    ],
)
def test_a_failing_write_changes_nothing(act: Callable[[TensorDict], object], match: str) -> None:
    td = TensorDict({"f": torch.ones(3), "rest": {"i": torch.ones(3).long()}}, [3])
    with pytest.raises(ValueError, match=match):
        act(td)
    assert td["f"].tolist() == [1, 1, 1]


def test_a_parameter_is_not_written_with_gradients_on() -> None:
    td = TensorDict({"a": torch.zeros(2), "w": torch.nn.Parameter(torch.ones(2))})
    with pytest.raises(ValueError, match=r"entry `w` of torch.float32.*requires grad.*no_grad"):
        td += 1
    assert td["a"].tolist() == [0, 0]
    with torch.no_grad():
        td += 1
    assert td["w"].tolist() == [2, 2]


def test_numpy_operands() -> None:
    numpy = pytest.importorskip("numpy")
    td = TensorDict({"a": torch.ones(2, 3)}, [2])
    assert (td + numpy.float32(1.5))["a"].dtype is torch.float32
    assert (td * numpy.array([1.0, 2.0]))["a"][1, 0] == 2
    assert isinstance(numpy.float64(2) * td, TensorDict)


@given(
    number=st.one_of(st.floats(width=64), st.integers(-(2**60), 2**60)),
    values=st.lists(st.floats(width=32), min_size=9, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    fn=st.sampled_from([operator.add, operator.sub, operator.mul, operator.truediv]),
    count=st.sampled_from([2, 9]),
)
def test_no_bit_differs_from_the_loop(
    number: float,
    values: list[float],
    dtype: torch.dtype,
    fn: Callable[[object, object], object],
    count: int,
) -> None:
    """Constants in place of numbers, and foreach kernels, give what the loop gives: NaN by NaN."""
    leaves = {str(i): torch.tensor([values[i], 1.0, -0.0], dtype=dtype) for i in range(count)}
    bits = torch.int32 if dtype is torch.float32 else torch.int64
    for swap in (False, True):

        def act(value: object, swap: bool = swap) -> object:
            return fn(number, value) if swap else fn(value, number)

        result = as_container(act(TensorDict(leaves, [3])))
        for key, leaf in leaves.items():
            expected = as_tensor(act(leaf))
            numbers = ~expected.isnan()
            assert torch.equal(result[key].isnan(), ~numbers)
            assert torch.equal(result[key].view(bits)[numbers], expected.view(bits)[numbers])


def test_leaves_that_do_not_broadcast_are_named() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2, 3)}}, [2])
    other = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2, 4)}}, [2])
    message = r"entry `\('n', 'b'\)` must be .*, got \(2, 3\) .* \(2, 4\) in the second"
    with pytest.raises(ShapeMismatch, match=message):
        td + other


def test_leaves_on_different_devices_are_named() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2])
    with pytest.raises(
        DeviceMismatch, match=r"entry `a` must be on the same device .* cpu and meta"
    ):
        td + td.to("meta")


@pytest.mark.parametrize("leaves", [1, 3, 12])
@pytest.mark.parametrize(
    "name", ["maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "logaddexp", "logical_and"]
)
def test_numbers_do_where_torch_takes_tensors_alone(name: str, leaves: int) -> None:
    entries = {str(i): torch.rand(2).to(torch.float64) for i in range(leaves)}
    got = getattr(TensorDict(entries, [2]), name)(0.5)
    for key, leaf in entries.items():
        expected = getattr(torch, name)(leaf, torch.tensor(0.5))
        torch.testing.assert_close(got[key], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("nan_to_num", (0.5,), {}),
        ("nan_to_num", (), {"posinf": 1.0, "neginf": -1.0}),
        ("nan_to_num", (-0.0, 1.0, 2.0), {}),
        ("round", (), {"decimals": 1}),
        ("round", (), {"decimals": 0}),
        ("logit", (0.1,), {}),
        ("logit", (), {"eps": 0.2}),
        ("pow", (), {"exponent": 2}),
        ("add", (1,), {"alpha": 0.5}),
        ("div", (2,), {"rounding_mode": "floor"}),
    ],
)
def test_methods_take_the_arguments_of_torch(
    name: str, args: tuple[float, ...], options: dict[str, float]
) -> None:
    leaf = torch.tensor([0.123, float("nan"), float("inf"), -float("inf")])
    td = TensorDict({"a": leaf}, [4])
    expected = getattr(leaf, name)(*args, **options)
    torch.testing.assert_close(getattr(td, name)(*args, **options)["a"], expected, equal_nan=True)
    getattr(td, f"{name}_")(*args, **options)
    torch.testing.assert_close(td["a"], expected, equal_nan=True)


def test_torch_judges_an_option_that_equals_the_default() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2])
    with pytest.raises(RuntimeError, match="Boolean alpha"):
        td.add(1, alpha=True)
    with pytest.raises(TypeError, match="decimals"):
        td.round(decimals=0.0)  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("lazy", [False, True])
def test_a_tensor_lines_up_with_the_first_or_the_last_batch_dimensions(lazy: bool) -> None:
    row, column = torch.arange(4.0), torch.arange(3.0)
    leaves = {"a": torch.zeros(3, 4, 2), "n": {"b": torch.ones(3, 4)}}
    td: TensorDictBase = TensorDict(leaves, [3, 4])
    if lazy:
        td = lazy_stack(list(td.unbind(1)), 1)
    operations: list[Callable[[Any, Any], Any]] = [
        lambda td, x: td + x,
        lambda td, x: x - td,
        lambda td, x: td >= x,
        lambda td, x: td.clone().mul_(x),
        lambda td, x: td.clamp(min=x),
        lambda td, x: td.lerp(x, 0.5),
        lambda td, x: torch.nn.functional.l1_loss(td, x, reduction="none"),
    ]
    for call in operations:
        assert (call(td, row) == call(td, row[None])).all()
        assert (call(td, column) == call(td, column[:, None])).all()
        square = td[:, :3]
        message = r"fits the first and the last .* `x\[..., None\]` for the first, `x\[None\]` for"
        with pytest.raises(ShapeMismatch, match=message):
            call(square, column)
        assert (call(square, column[:1]) == call(square, column[:1, None])).all()


def with_batch(*batch: int) -> TensorDict:
    values = torch.arange(1.0, 1 + torch.Size(batch).numel()).view(batch)
    return TensorDict({"u": values, "v": {"w": values.unsqueeze(-1) + torch.zeros(2)}}, batch)


BATCHES = [((3, 4), (1, 4)), ((1, 4), (3, 4)), ((3, 1), (1, 4)), ((3, 4), (4,)), ((4,), (3, 4))]


@pytest.mark.parametrize(("mine", "theirs"), [*BATCHES, ((3,), (1,)), ((3, 3), (1,))])
@pytest.mark.parametrize(
    "fn",
    [
        lambda left, right: left * right,
        lambda left, right: left <= right,
        lambda left, right: left == right,
        lambda left, right: left.add(right, alpha=2),
        torch.maximum,
        lambda left, right: left.clamp(right, right),
        lambda left, right: left.lerp(right, 0.5),
        lambda left, right: torch.addcmul(left, left, right),
    ],
)
def test_batch_sizes_are_broadcast_as_shapes(
    fn: Callable[[Any, Any], Any], mine: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    left, right = with_batch(*mine), with_batch(*theirs)
    wide = torch.broadcast_shapes(mine, theirs)
    expected = fn(left.expand(wide), right.expand(wide))
    for made in (fn(left, right), fn(lazy_stack(left.unbind(0)), right)):
        assert made.batch_size == made["v"].batch_size == wide
        assert (made == expected).all()


@pytest.mark.parametrize("theirs", [(1, 4), (3, 1), (4,), (1,)])
def test_batch_sizes_are_broadcast_in_place_and_by_where(theirs: tuple[int, ...]) -> None:
    right = with_batch(*theirs)
    wide = right.expand(3, 4)
    assert (with_batch(3, 4).mul_(right) == with_batch(3, 4) * wide).all()
    assert (with_batch(3, 4).lerp_(right, 0.5) == with_batch(3, 4).lerp(wide, 0.5)).all()
    keep = with_batch(3, 4)["u"] > 5
    made = with_batch(3, 4).where(keep, right)
    assert (made == with_batch(3, 4).where(keep, wide)).all()
    joined = with_batch(3, 4).rename_key_("u", "x").mul(right, default=1)
    assert joined.batch_size == (3, 4)
    assert torch.equal(joined["u"], wide["u"])
    assert torch.equal(joined["x"], with_batch(3, 4)["u"])


def test_batch_sizes_that_do_not_fit_one_way_are_refused() -> None:
    for left, right in (((3,), (2,)), ((3, 4), (3,)), ((3, 3), (3,)), ((3,), (3, 3))):
        with pytest.raises(ShapeMismatch, match="batch sizes must be equal"):
            with_batch(*left) + with_batch(*right)
    with pytest.raises(ShapeMismatch, match="batch sizes must be equal"):
        with_batch(1, 4).mul_(with_batch(3, 4))


def test_batch_sizes_are_broadcast_in_compiled_code() -> None:
    def compute(left: TensorDict, right: TensorDict) -> tuple[TensorDict, ...]:
        return left * right, left.lerp(right, 0.5), left.clone().mul_(right)

    run: Any = torch.compile(compute, backend="eager", fullgraph=True)
    for right in (with_batch(1, 4), with_batch(3, 4), with_batch(4)):
        expected = with_batch(3, 4) * right
        for made, plain in zip(
            run(with_batch(3, 4), right),
            (expected, with_batch(3, 4).lerp(right, 0.5), expected),
            strict=True,
        ):
            assert made.batch_size == (3, 4)
            assert (made == plain).all()
