"""Rows are added around those of a container, or to the shorter ones of several."""

from typing import Any

import pytest
import torch
from tests.core.rows import BATCH, assert_rows, container, numbers

from kd_core import (
    InvalidValue,
    KeyCollision,
    ShapeMismatch,
    TensorDict,
    pad,
    pad_sequence,
)


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
