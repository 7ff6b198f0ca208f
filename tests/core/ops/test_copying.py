"""Copies: what they share, and what they do not."""

from typing import cast

import torch
from tests.core.kinds import inner
from torch import nn

from kd_core import TensorDict, UnbatchedTensor, lazy_stack


def test_clone_keeps_the_graph() -> None:
    leaf = torch.ones(3, requires_grad=True)
    clone = TensorDict({"a": leaf}, [3]).clone()
    assert clone["a"].grad_fn is not None
    (grad,) = torch.autograd.grad(clone["a"].sum(), leaf)
    torch.testing.assert_close(grad, torch.ones(3))


def test_clone_of_many_leaves_shares_none() -> None:
    td = TensorDict({str(i): torch.full((3,), float(i)) for i in range(40)}, [3])
    clone = td.clone()
    clone.zero_()
    torch.testing.assert_close(td["39"], torch.full((3,), 39.0))
    assert list(clone.keys()) == list(td.keys())


def test_clone_keeps_layout_and_dtype() -> None:
    leaf = torch.zeros(2, 3, dtype=torch.float16).T
    clone = TensorDict({"a": leaf}).clone()["a"]
    assert clone.stride() == leaf.stride()
    assert clone.dtype is torch.float16


def test_a_shallow_copy_keeps_parameters() -> None:
    weight = nn.Parameter(torch.zeros(3))
    td = TensorDict({"n": {"w": weight}})
    assert td.copy()["n", "w"] is weight
    assert inner(td.copy(), "n") is not inner(td, "n")


def test_to_dict_drops_nones_on_request() -> None:
    td = TensorDict({"a": 1.0, "none": None, "n": {"none": None, "word": "x"}})
    assert td.to_dict(retain_none=False)["n"] == {"word": "x"}
    assert set(td.to_dict()) == {"a", "none", "n"}


def test_from_dict_is_the_way_back() -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"word": "x", "none": None}}, [3])
    other = TensorDict.from_dict(td.to_dict(), [3])
    assert other["a"] is td["a"]
    assert other["n", "none"] is None


def test_to_tensordict_makes_every_level_a_tensordict() -> None:
    stack = lazy_stack([TensorDict({"x": torch.full((3,), float(i))}) for i in range(2)])
    td = TensorDict({"s": stack, "word": "reach", "none": None}, [2]).lock_()
    copy = td.to_tensordict()
    assert type(inner(copy, "s")) is TensorDict
    assert copy["s", "x"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert not copy.is_locked
    copy["s", "x"].add_(1)
    assert not stack[0]["x"].any()
    assert list(td.to_tensordict(retain_none=False).keys()) == ["s", "word"]


def test_to_tensordict_copies_tensors_without_batch_and_values_of_rows() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.zeros(3)), "w": ["a", "b"]}, [2])
    copy = td.to_tensordict()
    copy["u"].fill_(1)
    cast("list[object]", copy["w"])[0] = "c"
    assert copy["w"] == ["c", "b"]
    assert td["w"] == ["a", "b"]
    assert td["u"].tolist() == [0, 0, 0]
