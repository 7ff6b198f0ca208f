"""Leaves that are conjugated or negated when they are read are written as others are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kd_core import TensorDict, lazy_stack


@pytest.mark.parametrize("count", [2, 30])
def test_conjugated_and_negated_leaves_are_written(count: int) -> None:
    """torch has no foreach kernel that writes into them."""
    makes: list[Callable[[], Tensor]] = [
        lambda: torch.tensor([1 + 2j]).conj(),
        lambda: torch.tensor([2j]).conj().imag,
    ]
    for make in makes:
        td = TensorDict({str(at): make() for at in range(count)})
        other = td.clone()
        td.add_(1).mul_(2.0).add_(other).lerp_(other, 0.5).exp_()
        expected = make().add(1).mul(2.0).add(make()).lerp(make(), 0.5).exp()
        for leaf in td.values():
            torch.testing.assert_close(leaf, expected)
        assert all(not leaf.any() for leaf in td.zero_().values())


def test_conjugated_leaves_are_copied_beside_ragged_members() -> None:
    """With one foreach call for all leaves it would be refused, and members be stacked."""

    def make(value: float) -> TensorDict:
        rows = lazy_stack([TensorDict({"x": torch.full((n,), value)}) for n in (1, 2)])
        return TensorDict({"a": torch.full((2,), value + 1j).conj(), "rows": rows}, [2])

    for call in ("update_", "copy_"):
        td = make(0.0)
        getattr(td, call)(make(3.0))
        assert td["a"].tolist() == [3 - 1j] * 2
        assert [row["x"].tolist() for row in td["rows"]] == [[3.0], [3.0, 3.0]]
