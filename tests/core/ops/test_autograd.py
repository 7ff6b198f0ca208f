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
    assert list(td.grad.keys()) == ["w", "s"]
    assert TensorDict({"w": torch.ones(2)}).grad is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_dropped_or_zeroed(set_to_none: bool, td: TensorDict) -> None:
    torch.autograd.backward(td.requires_grad_().sum(reduce=True))
    assert td.zero_grad(set_to_none) is td
    assert td.grad is not None
    assert ("w" not in td.grad) is set_to_none
    if not set_to_none:
        assert td.grad["n", "b"].tolist() == [0, 0]


def test_results_that_keep_no_gradient_have_none_to_drop(td: TensorDict) -> None:
    result = td.requires_grad_() * 2
    result["w"].retain_grad()
    torch.autograd.backward(result.sum(reduce=True))
    assert result.zero_grad() is result  # torch warns of reading others
    assert result["w"].grad is None


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


def test_backward_takes_a_container_of_gradients() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2, 3)}}, [2]).requires_grad_()
    weights = TensorDict({"a": torch.tensor([1.0, 2.0]), "n": {"b": torch.ones(2, 3)}}, [2])
    (td * 3).backward(weights)
    assert td["a"].grad is not None
    assert td["a"].grad.tolist() == [3, 6]


def test_backward_leaves_out_what_requires_no_gradient() -> None:
    a, b = torch.ones((), requires_grad=True), torch.ones(3)
    other = torch.ones((), requires_grad=True)
    TensorDict({"a": a * 2 * other, "b": b}).backward(inputs=[a], retain_graph=True)
    assert a.grad == 2
    assert other.grad is None


def test_what_backward_refuses() -> None:
    with pytest.raises(InvalidValue, match="expected a leaf that requires gradients"):
        TensorDict({"a": 1.0}).backward()
    with pytest.raises(InvalidValue, match=r"entry `a` must be one number, got shape \(2,\)"):
        (TensorDict({"a": torch.ones(2)}).requires_grad_() * 2).backward()
