"""Rows are added around those of a container, or to the shorter ones of several."""

import re
from typing import Any, Literal

import pytest
import torch
from tests.core.rows import BATCH, assert_rows, container, numbers

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeyCollision,
    KeySetMismatch,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    collate,
    pad,
    pad_sequence,
    unpad_sequence,
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
    [([1], "a pair"), ([0, 0, 0, 0], "at most 1 batch"), ([-2, -3], "not remove more rows")],
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


class Text(TensorClass):
    ids: torch.Tensor


def test_masks_need_a_field_of_a_tensor_class() -> None:
    parts = [Text(ids=torch.ones(n), batch_size=[n]) for n in (1, 2)]
    with pytest.raises(InvalidArgument, match=r"`Text` to have a field `masks`.*`to_tensordict"):
        pad_sequence(parts, return_mask=True)
    with pytest.raises(InvalidArgument, match=re.escape("`masks: TensorDict | None = None`")):
        pad_sequence(parts, return_mask=True)
    padded = pad_sequence([part.to_tensordict() for part in parts], return_mask=True)
    assert padded["masks", "ids"].tolist() == [[True, False], [True, True]]


class Masked(TensorClass):
    ids: torch.Tensor
    masks: TensorDict | None = None
    real: torch.Tensor | None = None


def test_a_tensor_class_keeps_the_masks_in_the_field_declared_for_them() -> None:
    parts = [Masked(ids=torch.ones(n), batch_size=[n]) for n in (1, 2)]
    padded = pad_sequence(parts, return_mask=True)
    assert type(padded) is Masked
    assert padded.masks is not None
    assert padded.masks["ids"].tolist() == [[True, False], [True, True]]
    with pytest.raises(InvalidArgument, match="`return_mask` expected field `real` of `Masked`"):
        pad_sequence(parts, return_mask="real")


def test_pad_sequence_refuses_batches_that_differ_elsewhere() -> None:
    with pytest.raises(ShapeMismatch, match="container 1"):
        pad_sequence([TensorDict({}, [2, 3]), TensorDict({}, [2])])
    with pytest.raises(ShapeMismatch, match="container 1"):
        pad_sequence([TensorDict({}, [2, 3]), TensorDict({}, [2, 4])])


def test_pad_sequence_without_a_batch_pads_each_leaf_to_its_own_longest() -> None:
    def episode(steps: int, notes: int) -> TensorDict:
        obs, note = torch.ones(steps, 2), torch.ones(notes)
        return TensorDict({"n": {"obs": obs}, "note": note, "id": float(steps), "task": "reach"})

    got = pad_sequence([episode(1, 3), episode(3, 2)], padding_value=-1, return_mask="real")
    assert got.batch_size == (2,)
    assert got["n", "obs"][0].tolist() == [[1, 1], [-1, -1], [-1, -1]]
    assert got["note"].tolist() == [[1, 1, 1], [1, 1, -1]]
    assert got["id"].tolist() == [1, 3]
    assert got.get_non_tensor("task") == ["reach", "reach"]
    assert got["real", "n", "obs"].tolist() == [[True, False, False], [True] * 3]
    assert got["real", "note"].tolist() == [[True] * 3, [True, True, False]]
    assert got["real", "id"].tolist() == [True, True]


def test_pad_sequence_without_a_batch_checks_keys_and_shapes() -> None:
    rows = [TensorDict({"a": torch.ones(2, 3)}), TensorDict({"a": torch.ones(2, 4)})]
    with pytest.raises(ShapeMismatch, match="`a`"):
        pad_sequence(rows)
    assert pad_sequence(rows, pad_dim=1)["a"].shape == (2, 2, 4)
    with pytest.raises(KeySetMismatch):
        pad_sequence([TensorDict({"a": torch.ones(2)}), TensorDict({"b": torch.ones(1)})])


def parts(*lengths: int) -> list[TensorDict]:
    entries = [{"a": torch.arange(n) + 1, "b": torch.ones(n, 2)} for n in lengths]
    return [TensorDict(each, [n]) for each, n in zip(entries, lengths, strict=True)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [(2, 3), (0, 2), (1,)])
def test_unpad_sequence_undoes_pad_sequence(
    side: Literal["left", "right"], lengths: tuple[int, ...]
) -> None:
    given = parts(*lengths)
    padded = pad_sequence(given, return_mask=True, padding_side=side)
    for mask in (None, "masks", padded["masks", "a"], padded.get("masks")):
        found = unpad_sequence(padded, mask)
        for one, other in zip(found, given, strict=True):
            assert one.batch_size == other.batch_size
            assert torch.equal(one["a"], other["a"])
            assert torch.equal(one["b"], other["b"])


def test_unpad_sequence_of_leaves() -> None:
    given = [TensorDict({"a": torch.ones(n), "c": torch.ones(2 * n, 2)}) for n in (1, 3)]
    found = unpad_sequence(pad_sequence(given, return_mask=True, padding_side="left"))
    assert [part["a"].shape[0] for part in found] == [1, 3]
    assert [part["c"].shape for part in found] == [(2, 2), (6, 2)]


def test_padding_at_the_left() -> None:
    assert pad_sequence(parts(1, 2), padding_side="left")["a"].tolist() == [[0, 1], [1, 2]]
    with pytest.raises(InvalidValue, match="`padding_side` must be"):
        pad_sequence(parts(1, 2), padding_side="middle")  # type: ignore[arg-type]  # the error


def test_pad_sequence_writes_into_out() -> None:
    out = pad_sequence(parts(1, 2))
    out.zero_()
    assert pad_sequence(parts(1, 2), out=out) is out
    assert out["a"].tolist() == [[1, 0], [1, 2]]


def test_pad_in_place() -> None:
    (td,) = parts(2)
    assert pad(td, [1, 0], inplace=True) is td
    assert td["a"].tolist() == [0, 1, 2]


def test_samples_are_padded_at_the_left() -> None:
    samples = [TensorDict({"x": torch.ones(n), "y": 1.0 * n}) for n in (1, 2)]
    got = collate(samples, pad_keys={"x": -1.0}, mask_key="mask", padding_side="left")
    assert got["x"].tolist() == [[-1, 1], [1, 1]]
    assert got["mask", "x"].tolist() == [[False, True], [True, True]]
    with pytest.raises(
        InvalidValue, match=r'`padding_side` must be "right" or "left", got \'top\''
    ):
        collate(samples, pad_keys=["x"], padding_side="top")  # type: ignore[arg-type]  # refused
