"""Quantiles and softmax agree with torch on every leaf."""

import pytest
import torch

from kd_core import (
    InvalidValue,
    LazyStackedTensorDict,
    OutOfRange,
    ShapeMismatch,
    TensorDict,
    lazy_stack,
)


def container() -> TensorDict:
    return TensorDict({"a": torch.rand(3, 4), "n": {"b": torch.rand(3, 4, 2, 5)}}, [3, 4])


def test_quantile_over_everything_and_together() -> None:
    td = container()
    assert torch.equal(td.quantile(0.3)["n", "b"], td["n", "b"].quantile(0.3))
    flat = torch.cat([td["a"].reshape(-1), td["n", "b"].reshape(-1)])
    assert torch.equal(td.quantile(0.3, reduce=True), flat.quantile(0.3))


@pytest.mark.parametrize("keepdim", [False, True])
def test_quantile_over_several_dimensions(keepdim: bool) -> None:
    td = container()
    got = td.quantile(0.3, (0, 1), keepdim)
    assert got.batch_size == ((1, 1) if keepdim else ())
    expected = td["n", "b"].flatten(0, 1).quantile(0.3, 0)
    assert torch.equal(got["n", "b"].reshape(2, 5), expected)


def test_several_quantiles_are_the_first_dimension() -> None:
    td = container()
    got = td.quantile([0.1, 0.5, 0.9], 1)
    assert got.batch_size == (3, 3)
    assert torch.equal(got["a"], td["a"].quantile(torch.tensor([0.1, 0.5, 0.9]), 1))
    features = td.quantile([0.1, 0.9], "feature")
    assert features.batch_size == (2, 3, 4)
    assert torch.equal(features["a"][0], td["a"])


def test_quantile_renames_keys() -> None:
    got = container().quantile([0.5], 0, key_transform=lambda key: f"{key}_q")
    assert list(got.keys(True, True)) == ["a_q", ("n_q", "b_q")]


def test_what_quantile_refuses() -> None:
    with pytest.raises(ShapeMismatch, match="`q` must be one number or a vector"):
        container().quantile(torch.rand(2, 2))
    with pytest.raises(OutOfRange, match="batch dimension 2"):
        container().quantile(0.5, 2)
    with pytest.raises(InvalidValue, match='"feature"'):
        container().quantile(0.5, "batch")


def test_softmax_keeps_shapes() -> None:
    td = container()
    assert torch.equal(td.softmax(-1)["n", "b"], td["n", "b"].softmax(1))
    flat = td["n", "b"].flatten(2).log_softmax(2).reshape(3, 4, 2, 5)
    assert torch.equal(td.log_softmax("feature")["n", "b"], flat)
    assert td.softmax("feature")["a"].eq(1).all()


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cummax", "quantile"])
def test_the_functions_of_torch_reach_the_methods(name: str) -> None:
    td = container()
    args = (torch.tensor(0.5), 0) if name == "quantile" else (0,)
    got, expected = getattr(torch, name)(td, *args), getattr(torch, name)(td["a"], *args)
    if name == "cummax":
        got, expected = got.values, expected.values
    assert torch.equal(got["a"], expected)


def test_softmax_along_a_dimension_of_the_members_of_a_stack() -> None:
    rows = [TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 3)]
    made = lazy_stack(rows).softmax(1)
    assert isinstance(made, LazyStackedTensorDict)
    assert made[1]["a"].tolist() == [[0.5] * 3] * 2
    alike = lazy_stack([TensorDict({"a": torch.ones(2)}, [2]) for _ in range(4)])
    assert isinstance(alike.softmax(0), LazyStackedTensorDict)
    assert alike.softmax(0)[3]["a"].tolist() == [0.25, 0.25]
