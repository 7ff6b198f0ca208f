"""Samples of different lengths in one batch."""

import pytest
import torch
from torch.utils.data import DataLoader

from kd_core import InvalidArgument, KeyCollision, KeyNotFound, TensorDict, collate


def samples() -> list[TensorDict]:
    return [
        TensorDict({"x": torch.full((n, 2), float(n)), "n": {"y": torch.arange(n)}, "z": 1.0 * n})
        for n in (1, 3)
    ]


def test_entries_are_padded_each_with_its_value() -> None:
    got = collate(samples(), pad_keys={"x": -1.0, ("n", "y"): 7}, mask_key="mask")
    assert got.batch_size == (2,)
    assert got["x"].shape == (2, 3, 2)
    assert got["x"][0].tolist() == [[1, 1], [-1, -1], [-1, -1]]
    assert got["n", "y"].tolist() == [[0, 7, 7], [0, 1, 2]]
    assert got["z"].tolist() == [1, 3]
    assert got["mask", "n", "y"].tolist() == [[True, False, False], [True, True, True]]


def test_keys_alone_are_padded_with_zeros() -> None:
    got = collate(samples(), pad_keys=["x", ("n", "y")])
    assert got["n", "y"].tolist() == [[0, 0, 0], [0, 1, 2]]


def test_nested_tensors_keep_their_lengths() -> None:
    got = collate(samples(), pad_keys=["x"], nested_keys=[("n", "y")])
    assert [row.tolist() for row in got["n", "y"].unbind()] == [[0], [0, 1, 2]]


def test_a_data_loader_takes_it() -> None:
    loader: DataLoader[TensorDict] = DataLoader(
        samples(),  # type: ignore[arg-type]  # a list is a data set
        batch_size=2,
        collate_fn=lambda batch: collate(batch, pad_keys=["x", ("n", "y")]),
    )
    assert next(iter(loader))["x"].shape == (2, 3, 2)


def test_what_collate_refuses() -> None:
    with pytest.raises(KeyNotFound):
        collate(samples(), pad_keys=["w"])
    with pytest.raises(InvalidArgument, match="in `pad_keys` and in `nested_keys`"):
        collate(samples(), pad_keys=["x"], nested_keys=["x"])
    with pytest.raises(InvalidArgument, match="entry `z` of sample 0 must be a tensor with"):
        collate(samples(), pad_keys=["z"])
    with pytest.raises(KeyCollision, match="key `z` exists already"):
        collate(samples(), pad_keys=["x", ("n", "y")], mask_key="z")
