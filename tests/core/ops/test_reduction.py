"""Reductions agree with the same torch function on every tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.operations import REDUCTIONS, ReductionRow
from torch import Tensor

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeyCollision,
    OutOfRange,
    TensorDict,
    lazy_stack,
)

BATCH = (3, 4)


NAMES = {row.name: "vector_norm" if row.name == "norm" else row.name for row in REDUCTIONS}


def by_name(row: ReductionRow) -> str:
    return row.name


@pytest.fixture
def leaves() -> dict[str, Tensor]:
    return {"a": torch.rand(3, 4), "b": torch.rand(3, 4, 2), "c": torch.rand(3, 4, 2, 5)}


@pytest.fixture
def td(leaves: dict[str, Tensor]) -> TensorDict:
    inner = {"b": leaves["b"], "c": leaves["c"], "note": "text"}
    return TensorDict({"a": leaves["a"], "n": inner}, BATCH)


def plain(td: TensorDict) -> dict[str, Tensor]:
    assert td["n", "note"] == "text"
    inner = {"b": td["n", "b"], "c": td["n", "c"]}
    return {"a": td["a"], **inner} if "a" in td else inner


def function(name: str) -> Callable[..., Any]:
    """The torch function, over any tuple of dimensions."""
    found: Callable[..., Any] = getattr(torch.linalg if name == "norm" else torch, NAMES[name])
    if name == "prod":
        return lambda x, dim, keepdim=False: x.log().sum(dim, keepdim).exp()
    return found


@pytest.mark.parametrize("row", REDUCTIONS, ids=by_name)
def test_over_everything(row: ReductionRow, td: TensorDict, leaves: dict[str, Tensor]) -> None:
    result = getattr(td, row.name)()
    assert result.batch_size == ()
    for key, value in plain(result).items():
        whole = leaves[key].ndim
        dims = tuple(range(2 if row.name == "logsumexp" else whole))  # which keeps the features
        torch.testing.assert_close(value, function(row.name)(leaves[key], dim=dims))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, -1, (0, 1), [1]])
@pytest.mark.parametrize("row", REDUCTIONS, ids=by_name)
def test_over_batch_dimensions(
    row: ReductionRow, dim: int | tuple[int, ...], keepdim: bool, td: TensorDict
) -> None:
    dims = [each % 2 for each in ([dim] if isinstance(dim, int) else dim)]
    result = getattr(td, row.name)(dim, keepdim=keepdim)
    expected = torch.empty(BATCH).sum(dims, keepdim=keepdim).shape
    assert result.batch_size == expected
    for key, value in plain(result).items():
        whole = function(row.name)(plain(td)[key], dim=tuple(dims), keepdim=keepdim)
        torch.testing.assert_close(value, whole)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("row", REDUCTIONS, ids=by_name)
def test_over_features(row: ReductionRow, keepdim: bool, td: TensorDict) -> None:
    result = getattr(td.exclude("a"), row.name)("feature", keepdim=keepdim)
    assert result.batch_size == BATCH
    for key, leaf in plain(td.exclude("a")).items():
        dims = tuple(range(2, leaf.ndim))
        expected = function(row.name)(leaf, dim=dims, keepdim=keepdim)
        torch.testing.assert_close(plain(result)[key], expected)


def test_a_leaf_without_features_counts_as_one(td: TensorDict, leaves: dict[str, Tensor]) -> None:
    assert torch.equal(td.sum("feature")["a"], leaves["a"])
    assert torch.equal(td.amax("feature", keepdim=True)["a"], leaves["a"])


@pytest.mark.parametrize("row", REDUCTIONS, ids=by_name)
def test_to_one_tensor(row: ReductionRow, td: TensorDict) -> None:
    together = torch.cat([leaf.flatten() for leaf in plain(td).values()])
    expected = function(row.name)(together, dim=(0,))
    torch.testing.assert_close(getattr(td, row.name)(reduce=True), expected)
    together = torch.cat([leaf.reshape(*BATCH, -1) for leaf in plain(td).values()], -1)
    expected = function(row.name)(together, dim=(-1,))
    torch.testing.assert_close(getattr(td, row.name)(dim="feature", reduce=True), expected)


def test_options(td: TensorDict, leaves: dict[str, Tensor]) -> None:
    assert td.sum(0, dtype=torch.float64)["a"].dtype is torch.float64
    assert td.prod(dtype=torch.float64)["a"].dtype is torch.float64
    for n in (0, 1, 2):
        expected = leaves["a"].var(0, correction=n)
        torch.testing.assert_close(td.var(0, correction=n)["a"], expected)
        torch.testing.assert_close(td.std(0, correction=n)["a"], expected.sqrt())
    torch.testing.assert_close(td.norm(ord=1)["a"], leaves["a"].sum())


def test_torch_functions_reduce(td: TensorDict, leaves: dict[str, Tensor]) -> None:
    total: Any = torch.sum(td, dim=0)  # type: ignore[call-overload]  # torch's stubs know tensors
    assert torch.equal(total["a"], leaves["a"].sum(0))


def test_an_empty_batch_has_sums() -> None:
    td = TensorDict({"a": torch.ones(0, 2), "b": torch.ones(0)}, [0])
    assert td.sum(0)["a"].tolist() == [0, 0]
    assert td.sum(dim="feature").batch_size == (0,)


def test_feature_dimensions_are_not_reached_by_number(td: TensorDict) -> None:
    with pytest.raises(OutOfRange, match="batch dimension 2 is out of range"):
        td.sum(2)


def test_a_reduction_of_everything_keeps_its_dimensions_if_asked_to(td: TensorDict) -> None:
    both = [td, lazy_stack(list(td.unbind(0)))]
    for each in both:
        for kept, plain in (
            (each.sum(keepdim=True), each.sum()),
            (each.quantile(0.5, keepdim=True), each.quantile(0.5)),
        ):
            assert kept.batch_size == (1, 1)
            for key in plain.keys(True, True):
                assert kept[key].shape == (1,) * td[key].ndim
                assert kept[key].item() == plain[key].item()


def test_wrong_dimensions_are_explained(td: TensorDict) -> None:
    with pytest.raises(InvalidValue, match=r"`dim` must be one or more .* got \(\)"):
        td.sum(())
    with pytest.raises(InvalidValue, match=r"distinct dimensions, got \(0, -2\)"):
        td.sum((0, -2))
    with pytest.raises(InvalidValue, match=r"\"feature\" .*got 'features'"):
        td.sum("features")
    with pytest.raises(InvalidArgument, match="`reduce=True` cannot be combined"):
        td.sum((0, 1), reduce=True)
    with pytest.raises(InvalidArgument, match="`dim` must be an integer or a name"):
        td.cummax((0, 1))  # type: ignore[call-overload]  # the error under test
    with pytest.raises(InvalidValue, match="requires at least one tensor"):
        TensorDict().sum(reduce=True)


def test_a_leaf_of_no_dimensions_keeps_none() -> None:
    assert TensorDict({"a": 1.0}).mean("feature", keepdim=True)["a"].shape == ()


@pytest.mark.parametrize("row", REDUCTIONS, ids=by_name)
def test_key_transform_names_the_result(row: ReductionRow, td: TensorDict) -> None:
    got = getattr(td, row.name)(0, key_transform=lambda key: f"{row.name}_{key}")
    names = {f"{row.name}_{key}" for key in ("a", "n")}
    assert set(got.keys()) == names
    with pytest.raises(InvalidArgument, match="cannot be combined with `reduce=True`"):
        getattr(td, row.name)(reduce=True, key_transform=str.upper)


def test_key_transform_that_joins_two_keys_is_refused(td: TensorDict) -> None:
    with pytest.raises(KeyCollision, match="two keys would be renamed to `x`"):
        td.sum(key_transform=lambda key: "x")
    with pytest.raises(InvalidArgument, match="the new name of `a` must be a string"):
        td.sum(key_transform=len)  # type: ignore[arg-type]  # the error under test


@pytest.mark.parametrize("name", ["norm", "logsumexp"])
def test_a_reduction_writes_into_out(name: str, td: TensorDict) -> None:
    expected = getattr(td, name)(0)
    out = expected.clone().zero_()
    leaf = out["a"]
    assert getattr(td, name)(0, out=out) is out
    assert torch.equal(leaf, expected["a"])
    with pytest.raises(InvalidArgument, match="`out` cannot be combined"):
        getattr(td, name)(reduce=True, out=out)


def test_norm_of_another_dtype(td: TensorDict) -> None:
    assert td.norm(dtype=torch.float64)["a"].dtype is torch.float64


def test_all_leaves_are_reduced_along_a_dimension() -> None:
    td = TensorDict({"a": torch.rand(3, 2), "n": {"b": torch.rand(3, 2)}}, [3, 2])
    for name in ("sum", "mean", "amax", "std"):
        expected = getattr(torch.cat([td["a"], td["n", "b"]], 1), name)(1)
        torch.testing.assert_close(getattr(td, name)(1, reduce=True), expected)
