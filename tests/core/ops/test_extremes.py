"""Extreme values with their places, truth, and running sums."""

import pytest
import torch

from kd_core import InvalidArgument, OutOfRange, TensorDict, lazy_stack


@pytest.fixture
def td() -> TensorDict:
    return TensorDict({"a": torch.rand(3, 4), "n": {"b": torch.rand(3, 4, 2)}}, [3, 4])


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_along_a_batch_dimension(name: str, dim: int, keepdim: bool, td: TensorDict) -> None:
    values, indices = getattr(td, name)(dim, keepdim)
    for key in ("a", ("n", "b")):
        expected = getattr(torch, name)(td[key], dim % 2, keepdim)
        assert torch.equal(values[key], expected.values)
        assert torch.equal(indices[key], expected.indices)
    assert values.batch_size == indices.batch_size == values["a"].shape


@pytest.mark.parametrize("name", ["min", "max"])
def test_over_everything(name: str, td: TensorDict) -> None:
    whole = getattr(td, name)()
    assert whole.batch_size == ()
    assert whole["n", "b"] == getattr(td["n", "b"], name)()
    assert getattr(td, name)(reduce=True) == getattr(torch, name)(
        torch.stack([whole["a"], whole["n", "b"]])
    )


@pytest.mark.parametrize("dim", ["feature", (0, 1)])
def test_places_need_one_dimension(dim: object, td: TensorDict) -> None:
    with pytest.raises(InvalidArgument, match=r"one integer.*`amin` or `amax`"):
        td.max(dim)  # type: ignore[call-overload]  # wrong on purpose


@pytest.mark.parametrize("name", ["min", "max"])
def test_a_dimension_by_its_name(name: str) -> None:
    td = TensorDict({"a": torch.rand(3, 4, 2)}, [3, 4], names=["env", "time"])
    expected = getattr(torch, name)(td["a"], 1)
    values, indices = getattr(td, name)("time")
    assert torch.equal(values["a"], expected.values)
    assert torch.equal(indices["a"], expected.indices)
    assert values.names == indices.names == ["env"]
    assert getattr(td, name)("time", keepdim=True).indices.names == ["env", "time"]
    assert torch.equal(getattr(td, name)("time", return_indices=False)["a"], expected.values)
    with pytest.raises(OutOfRange, match=r"named `tme`; the names are .*Did you mean `time`"):
        getattr(td, name)("tme")
    with pytest.raises(OutOfRange, match="the container has no names"):
        getattr(td.rename(None), name)("time")


def test_truth_of_all_leaves() -> None:
    td = TensorDict({"a": torch.tensor([True, False]), "b": torch.tensor([True, True])}, [2])
    assert td.any() is True
    assert td.all() is False
    assert (td == td).all() is True
    assert (td != td).any() is False
    assert TensorDict().all() is True
    assert TensorDict().any() is False


def test_truth_along_dimensions(td: TensorDict) -> None:
    mask = td > 0.5
    assert torch.equal(mask.all(0)["a"], mask["a"].all(0))
    assert torch.equal(mask.any((0, 1), keepdim=True)["a"], mask["a"].any().reshape(1, 1))
    assert torch.equal(mask.all(dim="feature")["n", "b"], mask["n", "b"].all(-1))


def test_running_sums_and_products(td: TensorDict) -> None:
    assert torch.equal(td.cumsum(1)["n", "b"], td["n", "b"].cumsum(1))
    assert torch.equal(td.cumprod(-1)["n", "b"], td["n", "b"].cumprod(1))
    with pytest.raises(OutOfRange, match="dimension 2"):
        td.cumsum(2)


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_without_indices(name: str) -> None:
    td = TensorDict({"a": torch.rand(3, 4), "b": torch.rand(3, 4, 2)}, [3, 4])
    assert torch.equal(
        getattr(td, name)(1, return_indices=False)["b"], getattr(td["b"], name)(1).values
    )
    both = getattr(td, name)((0, 1), return_indices=False)
    assert torch.equal(both["b"], getattr(td["b"], f"a{name}")((0, 1)))
    features = getattr(td, name)("feature", return_indices=False)
    assert torch.equal(features["b"], getattr(td["b"], f"a{name}")(2))


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_extremes_so_far(name: str) -> None:
    td = TensorDict({"a": torch.rand(3, 4), "b": torch.rand(3, 4, 2)}, [3, 4])
    expected = getattr(torch, name)(td["b"], 1)
    got = getattr(td, name)(-1)
    assert torch.equal(got.values["b"], expected.values)
    assert torch.equal(got.indices["b"], expected.indices)
    assert torch.equal(getattr(td, name)(1, return_indices=False)["b"], expected.values)


@pytest.mark.parametrize("name", ["min", "max", "cummin", "cummax"])
def test_the_type_is_that_of_torch(name: str) -> None:
    td = TensorDict({"a": torch.rand(3, 2), "n": {"b": torch.rand(3, 2)}}, [3, 2])
    kind = getattr(torch.return_types, name)
    for each in (td, lazy_stack(list(td.unbind(1)), 1)):
        found = getattr(each, name)(0)
        assert isinstance(found, kind)
        values, indices = found
        assert torch.equal(values["a"], getattr(td["a"], name)(0).values)
        assert torch.equal(indices["n", "b"], getattr(td["n", "b"], name)(0).indices)
        together = getattr(each, name)(1, reduce=True)
        expected = getattr(torch.cat([td["a"], td["n", "b"]], 1), name)(1)
        assert isinstance(together, kind)
        assert torch.equal(together.values, expected.values)
        assert torch.equal(together.indices, expected.indices)
        alone = getattr(each, name)(1, reduce=True, return_indices=False)
        assert torch.equal(alone, expected.values)
