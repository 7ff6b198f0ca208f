"""The entries of members, seen as those of one container."""

import torch

from kd_core import TensorDict, lazy_stack


def test_the_printed_form_shows_shapes_and_keys_of_all_members() -> None:
    first = TensorDict({"r": torch.zeros(2), "x": 1.0, "own": torch.zeros(5), "n": {"r": 1.0}})
    second = TensorDict({"r": torch.zeros(3), "x": 2.0, "n": {"r": torch.zeros(1)}, "s": "text"})
    text = repr(TensorDict({"members": lazy_stack([first, second])}, [2]))
    assert "own: Tensor in 1 of 2 members, of shape (5,)" in text
    assert "s: NonTensorData in 1 of 2 members, of shape ()" in text
    assert "r: ragged, of shapes (2,), (3,)" in text
    assert "r: ragged, of shapes (), (1,)" in text
    assert "x: Tensor(shape=torch.Size([2])" in text
    assert text.count("stack_dim=0") == 2
