"""A lazy stack has one tensor without batch dimensions where those of its members are equal."""

import pytest
import torch
from tests.core.containers.unbatched import make

from kd_core import ShapeMismatch, TensorDict, lazy_stack, stack


@pytest.mark.parametrize("name", ["sum", "mean", "std", "norm", "logsumexp"])
def test_all_values_together_count_it_once(name: str) -> None:
    rows = [make(1.5, rows=3), make(1.5, rows=3)]
    td = lazy_stack(rows)
    wanted = getattr(stack(rows), name)(reduce=True)
    torch.testing.assert_close(getattr(td, name)(reduce=True), wanted)
    around = TensorDict({"stack": td})
    torch.testing.assert_close(getattr(around, name)(reduce=True), wanted)


def test_all_values_together_need_equal_ones() -> None:
    td = lazy_stack([make(1.0), make(2.0)])
    with pytest.raises(ShapeMismatch, match="entry `u` is an `UnbatchedTensor` that differs"):
        td.sum(reduce=True)


@pytest.mark.parametrize("keepdim", [False, True])
def test_different_ones_are_reduced_in_their_members(keepdim: bool) -> None:
    rows = [make(1.0), make(2.0)]
    for stacked in (0, 1):
        got = lazy_stack(rows, stacked).sum(dim="feature", keepdim=keepdim)
        for number, row in enumerate(rows):
            wanted = row.sum(dim="feature", keepdim=keepdim)
            member = got[number] if stacked == 0 else got[:, number]
            for key in ("a", "u", ("n", "u"), ("n", "b")):
                torch.testing.assert_close(member[key], wanted[key])
    assert got.batch_size == (4, 2)


def test_quantiles_of_different_ones() -> None:
    got = lazy_stack([make(1.0), make(2.0)]).quantile(0.5, "feature")
    assert [float(got[0]["u"]), float(got[1]["n", "u"])] == [1.0, 2.0]
