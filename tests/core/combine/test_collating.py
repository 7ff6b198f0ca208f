"""Samples of different lengths in one batch."""

from typing import Any, Literal

import pytest
import torch
from torch.utils.data import DataLoader

from kd_core import (
    InvalidArgument,
    KeyCollision,
    KeyNotFound,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    collate,
    lazy_stack,
)


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


@pytest.mark.parametrize("side", ["right", "left"])
def test_every_dimension_in_which_samples_differ_is_padded(side: Literal["right", "left"]) -> None:
    maps = [TensorDict(contact=torch.ones(n, n + 1, 2)) for n in (1, 3)]
    got = collate(maps, pad_keys={"contact": -1.0}, mask_key="mask", padding_side=side)
    assert got["contact"].shape == (2, 3, 4, 2)
    corner = got["contact"][0] if side == "right" else got["contact"][0].flip(0, 1)
    assert (corner[:1, :2] == 1).all()
    assert (corner[1:] == -1).all()
    assert (corner[:, 2:] == -1).all()
    assert got["mask", "contact"].sum(1).tolist() == [1, 3]
    assert got["contact"].equal(
        lazy_stack(maps).get(
            "contact", as_padded_tensor=True, padding_side=side, padding_value=-1.0
        )
    )


def test_samples_of_a_padded_entry_have_one_number_of_dimensions() -> None:
    rows = [TensorDict(x=torch.ones(2, 2)), TensorDict(x=torch.ones(2))]
    with pytest.raises(
        ShapeMismatch, match=r"entry `x` cannot be padded: its shape is \(2,\) in sample 1"
    ):
        collate(rows, pad_keys=["x"])


def test_what_collate_refuses() -> None:
    with pytest.raises(KeyNotFound):
        collate(samples(), pad_keys=["w"])
    with pytest.raises(InvalidArgument, match="in `pad_keys` and in `nested_keys`"):
        collate(samples(), pad_keys=["x"], nested_keys=["x"])
    with pytest.raises(InvalidArgument, match="entry `z` of sample 0 must be a tensor with"):
        collate(samples(), pad_keys=["z"])
    with pytest.raises(KeyCollision, match="key `z` exists already"):
        collate(samples(), pad_keys=["x", ("n", "y")], mask_key="z")


class Prompt(TensorClass):
    tokens: torch.Tensor
    mask: TensorDict | None = None
    anything: Any = None
    row: torch.Tensor | None = None
    inner: "Prompt | None" = None


class Loose(TypedTensorDict):
    tokens: torch.Tensor


PROMPTS = [Prompt(tokens=torch.arange(n)) for n in (1, 3)]
REAL = [[True, False, False], [True] * 3]


def test_a_tensor_class_keeps_the_masks_in_a_container() -> None:
    for key in ("mask", "anything"):
        got = collate(PROMPTS, pad_keys=["tokens"], mask_key=key)
        assert type(got) is Prompt
        mask: object = got.get(key)
        assert isinstance(mask, TensorDict)
        assert mask.batch_size == (2,)
        assert got[key, "tokens"].tolist() == REAL
        assert (key, "tokens") in got.keys(True, True)
    below = [TensorDict(x=prompt) for prompt in PROMPTS]
    nested = collate(below, pad_keys=[("x", "tokens")], mask_key=("x", "mask"))
    assert nested["x", "mask", "x", "tokens"].tolist() == REAL
    loose = [Loose(tokens=torch.arange(n)) for n in (1, 3)]
    assert collate(loose, pad_keys=["tokens"], mask_key="real")["real", "tokens"].tolist() == REAL


def test_a_field_for_masks_is_declared_as_a_container() -> None:
    for key in ("row", "inner", ("row", "tokens")):
        with pytest.raises(
            InvalidArgument, match=r"field `(row|inner)` of `Prompt` to be declared"
        ):
            collate(PROMPTS, pad_keys=["tokens"], mask_key=key)
    with pytest.raises(
        InvalidArgument, match=r"`mask_key` expected `Prompt` to have a field `real"
    ):
        collate(PROMPTS, pad_keys=["tokens"], mask_key="real")
    with pytest.raises(KeyCollision, match="key `tokens` exists already"):
        collate(PROMPTS, pad_keys=["tokens"], mask_key="tokens")
