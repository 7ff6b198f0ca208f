"""Gradients of the leaves of a container."""

import pytest
import torch

from kd_core import InvalidValue, TensorDict


@pytest.fixture
def td() -> TensorDict:
    return TensorDict({"w": torch.ones(2, 3), "n": {"b": torch.ones(2)}, "s": "text"}, [2])


def test_gradients_come_as_a_container(td: TensorDict) -> None:
    assert [td.requires_grad, td.requires_grad_() is td, td.requires_grad] == [False, True, True]
    torch.autograd.backward((td["w"] * 3).sum())
    assert td.grad is not None
    assert td.grad["w"].tolist() == [[3, 3, 3]] * 2
    assert td.grad.batch_size == (2,)
    assert list(td.grad.keys()) == ["w"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_dropped_or_zeroed(set_to_none: bool, td: TensorDict) -> None:
    torch.autograd.backward(td.requires_grad_().sum(reduce=True))
    assert td.zero_grad(set_to_none) is td
    assert (td.grad is None) is set_to_none
    if td.grad is not None:
        assert td.grad["n", "b"].tolist() == [0, 0]


def test_leaving_the_graph(td: TensorDict) -> None:
    result = td.requires_grad_() * 2
    for outside in (result.detach(), result.data):
        assert outside.requires_grad is not result.requires_grad
        assert outside["w"].data_ptr() == result["w"].data_ptr()
    assert result.detach_() is result
    assert not result.requires_grad
    assert torch.detach(td).requires_grad is False  # type: ignore[arg-type]  # no tensor


def test_integers_have_no_gradients() -> None:
    td = TensorDict({"w": torch.ones(2), "i": torch.ones(2).int()})
    with pytest.raises(InvalidValue, match=r"entry `i` must have a floating .* got torch.int32"):
        td.requires_grad_()
    assert not td.requires_grad


def test_results_inside_the_graph_keep_requiring(td: TensorDict) -> None:
    result = td.requires_grad_() * 2
    with pytest.raises(InvalidValue, match=r"`w` must be a leaf of the graph.*`detach"):
        result.requires_grad_(False)
    assert not td.requires_grad_(False).requires_grad
