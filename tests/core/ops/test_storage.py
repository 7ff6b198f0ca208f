"""All leaves in one storage."""

import pytest
import torch

from kd_core import InvalidValue, TensorDict


@pytest.fixture(params=["one dtype", "several"])
def td(request: pytest.FixtureRequest) -> TensorDict:
    dtypes = [torch.bool, torch.int64, torch.float32, torch.uint8]
    several = request.param == "several"
    leaves = {
        str(i): torch.rand(3, i + 1).to(dtypes[i % 4] if several else torch.float32)
        for i in range(9)
    }
    return TensorDict({"top": torch.ones(3), "n": leaves, "s": "text"}, [3])


def test_values_are_kept(td: TensorDict) -> None:
    one = td.consolidate()
    assert bool((one == td).all())
    assert one["s"] == "text"
    assert one.batch_size == (3,)
    assert one["n", "3"].dtype is td["n", "3"].dtype


def test_leaves_share_one_storage_of_their_own(td: TensorDict) -> None:
    one = td.consolidate()
    assert one.is_consolidated()
    assert not td.is_consolidated()
    one.zero_()
    assert td["top"].tolist() == [1, 1, 1]


def test_a_replaced_leaf_is_elsewhere(td: TensorDict) -> None:
    one = td.consolidate()
    one["top"] = torch.zeros(3)
    assert not one.is_consolidated()


def test_copies_are_outside_the_graph() -> None:
    one = TensorDict({"w": torch.ones(2, requires_grad=True), "b": torch.ones(1)}).consolidate()
    assert not one.requires_grad
    assert one["w"].tolist() == [1, 1]


def test_strided_and_empty_leaves() -> None:
    one = TensorDict({"a": torch.arange(6).reshape(2, 3).T, "b": torch.ones(3, 0)}, [3])
    assert one.consolidate()["a"].tolist() == one["a"].tolist()
    assert TensorDict().consolidate().is_empty()


def test_a_leaf_that_stands_twice_is_kept_twice() -> None:
    shared = torch.ones(2)
    one = TensorDict({"a": shared, "b": shared, "c": torch.ones(2).int()}, [2]).consolidate()
    assert bool((one == 1).all())


def test_what_does_not_fit_is_named() -> None:
    td = TensorDict({"a": torch.ones(2), "m": torch.ones(2, device="meta")})
    with pytest.raises(InvalidValue, match="entry `m` is on meta, but others are on cpu"):
        td.consolidate()
    sparse = TensorDict({"s": torch.ones(2, 2).to_sparse()})
    with pytest.raises(InvalidValue, match=r"entry `s` is of layout torch.sparse_coo"):
        sparse.consolidate()


def test_one_leaf_is_copied_too() -> None:
    x = torch.ones(3, requires_grad=True)
    copy = TensorDict({"a": x}, [3]).consolidate()["a"]
    assert copy.data_ptr() != x.data_ptr()
    assert not copy.requires_grad
