"""Rows are shared between ranks, and put together again as they were."""

import random

import pytest
import torch
from tests.core.distributed.programs import ragged, told_ragged

from kd_core import InvalidArgument, InvalidValue, ShapeMismatch, TensorDict, cat, distributed


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 7, 11])
def test_rows_are_padded_to_a_divisor_and_back(divisor: int) -> None:
    td = ragged(3)
    padded, count = distributed.pad_to_divisor(td, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= count < divisor
    assert len(padded) == 4 + count
    parts = padded.chunk(divisor)
    assert len(parts) == divisor
    assert told_ragged(distributed.unpad(cat(parts), count)) == told_ragged(td)


def test_any_weights_are_balanced_and_the_order_restored() -> None:
    draw = random.Random(0)
    for _ in range(30):
        rows = draw.randint(1, 12)
        chunks = draw.randint(1, rows)
        weights = [draw.choice([0, 1, 2, 3.5, 40]) for _ in range(rows)]
        td = TensorDict({"a": torch.arange(rows), "w": torch.tensor(weights)}, [rows])
        parts, order = distributed.balanced_chunks(td, chunks, weights)
        sums = [float(part["w"].sum()) for part in parts]
        assert len(parts) == chunks
        assert min(len(part) for part in parts) > 0
        assert max(sums) - min(sums) <= max(weights)
        whole = cat(parts)
        assert whole["a"].tolist() == order.tolist()
        assert distributed.restore_order(whole, order)["a"].tolist() == list(range(rows))


def test_weights_are_lengths_of_a_ragged_entry_or_values_of_another() -> None:
    td = ragged(4)
    td["cost"] = torch.tensor([1, 2, 3, 4, 5])
    td["n"] = TensorDict({"cost": td["cost"]}, [5])
    found = []
    for weights in ("tokens", ("stack", "x"), "cost", ("n", "cost"), td["cost"], [1, 2, 3, 4, 5]):
        parts, order = distributed.balanced_chunks(td, 2, weights)
        found.append(order.tolist())
        assert told_ragged(distributed.restore_order(cat(parts), order)) == told_ragged(td)
    assert found == [found[0]] * 6


def test_what_cannot_be_shared_is_refused() -> None:
    td = TensorDict({"a": torch.ones(3, 2), "w": ["x", "y", "z"]}, [3])
    for call in (distributed.pad_to_divisor, distributed.unpad):
        with pytest.raises(InvalidValue, match="needs a batch dimension"):
            call(TensorDict(), 1)
    with pytest.raises(InvalidValue, match="`divisor` must be a positive integer, got 0"):
        distributed.pad_to_divisor(td, 0)
    with pytest.raises(InvalidValue, match="from 0 to 3, got 4"):
        distributed.unpad(td, 4)
    with pytest.raises(InvalidValue, match=r"number of rows, 3, got 4. Call `pad_to_divisor`"):
        distributed.balanced_chunks(td, 4, [1, 1, 1])
    with pytest.raises(ShapeMismatch, match="one number for each of the 3 rows, got 2 values"):
        distributed.balanced_chunks(td, 2, [1, 1])
    with pytest.raises(ShapeMismatch, match="one number for each of the 3 rows"):
        distributed.balanced_chunks(td, 2, "a")
    with pytest.raises(InvalidValue, match="finite and non-negative"):
        distributed.balanced_chunks(td, 2, [1, -1, float("nan")])
    with pytest.raises(InvalidArgument, match="entry `w` must be ragged, or one number"):
        distributed.balanced_chunks(td, 2, "w")
    with pytest.raises(InvalidArgument, match="each number from 0 to 2 once"):
        distributed.restore_order(td, torch.tensor([0, 0, 1]))
    assert distributed.pad_to_divisor(td[:0], 2)[1] == 0
