"""Rows grouped by the values of an entry."""

import pytest
import torch

from kd_core import InvalidArgument, KeyNotFound, ShapeMismatch, TensorDict, group_by, lazy_stack


def test_groups_keep_the_order_of_their_rows() -> None:
    td = TensorDict({"k": torch.tensor([2, 0, 2, 0, 1]), "x": torch.arange(5), "s": "text"}, [5])
    values, groups = group_by(td, "k")
    assert values.tolist() == [0, 1, 2]
    assert [group["x"].tolist() for group in groups] == [[1, 3], [4], [0, 2]]
    assert [group.batch_size for group in groups] == [(2,), (1,), (2,)]
    assert groups[0]["s"] == "text"


def test_vectors_and_nested_keys_group_too() -> None:
    td = TensorDict({"n": {"k": torch.tensor([[0, 1], [0, 0], [0, 1]])}}, [3])
    values, groups = group_by(td, ("n", "k"))
    assert values.tolist() == [[0, 0], [0, 1]]
    assert [len(group) for group in groups] == [1, 2]


def test_values_that_are_not_tensors_group_too() -> None:
    td = TensorDict({"s": ["y", "x", "y"], "t": "all", "x": torch.arange(3)}, [3])
    values: object
    values, groups = group_by(td, "s")
    assert values == ["x", "y"]
    found: list[object] = [(group["x"].tolist(), group["s"]) for group in groups]
    assert found == [
        ([1], ["x"]),
        ([0, 2], ["y", "y"]),
    ]
    values, (only,) = group_by(td, "t")
    assert values == ["all"]
    assert len(only) == 3
    grid = TensorDict({"s": [["a", "b"], ["c", "d"], ["a", "b"]]}, [3, 2])
    values, _ = group_by(grid, "s")
    assert values == [("a", "b"), ("c", "d")]


def test_a_lazy_stack_is_grouped_by_member() -> None:
    rows = [TensorDict({"k": n % 2, "x": torch.ones(n)}) for n in range(1, 4)]
    _, groups = group_by(lazy_stack(rows), "k")
    assert [[row["x"].shape[0] for row in group.unbind(0)] for group in groups] == [[2], [1, 3]]


def test_no_row_is_no_group() -> None:
    values, groups = group_by(TensorDict({"k": torch.zeros(0, dtype=torch.int64)}, [0]), "k")
    assert values.shape == (0,)
    assert sum(len(group) for group in groups) == 0


def test_what_group_by_refuses() -> None:
    with pytest.raises(KeyNotFound):
        group_by(TensorDict(batch_size=[2]), "k")
    with pytest.raises(InvalidArgument, match="entry `k` must be a tensor or non-tensor data"):
        group_by(TensorDict({"k": {"a": torch.zeros(2)}}, [2]), "k")
    for values in (["a", 1], [{"k": 1}, {"k": 2}]):
        with pytest.raises(
            InvalidArgument, match=r"`k` must be hashable and comparable .* Store a"
        ):
            group_by(TensorDict({"k": values}, [2]), "k")
    with pytest.raises(ShapeMismatch, match="expected a batch dimension"):
        group_by(TensorDict({"k": torch.arange(2)}), "k")
