"""`torch.autograd.grad` of containers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kd_core import InvalidArgument, KeySetMismatch, TensorClass, TensorDict, lazy_stack, stack

grad: Any = torch.autograd.grad


class Point(TensorClass):
    x: Tensor
    word: str = "p"


def inputs() -> TensorDict:
    leaves: dict[str, object] = {
        "a": torch.arange(3.0).requires_grad_(),
        "n": {"b": torch.ones(3, 2, requires_grad=True)},
        "word": "w",
    }
    return TensorDict(leaves, [3])


def outputs(td: TensorDict) -> TensorDict:
    return TensorDict({"n": {"p": td["n", "b"] * 3}, "o": td["a"] ** 2}, [3])


def ones() -> TensorDict:
    return TensorDict({"o": torch.ones(3), "n": {"p": torch.full((3, 2), 2.0)}}, [3])


def test_gradients_of_a_container_belong_to_its_keys() -> None:
    td = inputs()
    found = grad(outputs(td), td, ones(), create_graph=True)
    assert (type(found), found.batch_size, found["word"]) == (TensorDict, (3,), "w")
    assert found["a"].tolist() == [0, 2, 4]
    assert found["n", "b"].tolist() == [[6, 6]] * 3
    assert grad(found["a"].sum(), td["a"])[0].tolist() == [2, 2, 2]
    assert grad(outputs(td.lock_()).sum(), td).is_locked


def test_either_side_may_be_tensors() -> None:
    td = inputs()
    a, b = grad(outputs(td), [td["a"], td["n", "b"]], ones())
    assert (a.tolist(), b.tolist()) == ([0, 2, 4], [[6, 6]] * 3)
    assert grad(td["a"].sum() + td["n", "b"].sum(), td)["a"].tolist() == [1, 1, 1]
    made = outputs(td)
    found = grad([made["o"], made["n", "p"]], td, [torch.ones(3), torch.ones(3, 2)])
    assert found["n", "b"].tolist() == [[3, 3]] * 3


def test_what_is_not_used_is_left_out_or_zero() -> None:
    td = inputs()
    td["c"] = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        grad(td["a"].sum(), td)
    assert list(grad(td["a"].sum(), td, allow_unused=True).keys(True, True)) == ["a"]
    assert grad(td["a"].sum(), td, materialize_grads=True)["c"].tolist() == [0, 0, 0]
    nothing = TensorDict({"c": td["c"]}, [3])
    assert grad(td["a"].sum(), nothing, allow_unused=True).is_empty()


def test_batches_of_gradients_have_one_more_dimension() -> None:
    td = inputs()
    twice = stack([ones(), ones() * 2])
    found = grad(outputs(td), td, twice, is_grads_batched=True)
    assert found.batch_size == (2, 3)
    assert found["a"].tolist() == [[0, 2, 4], [0, 4, 8]]


def test_members_and_fields_get_their_own_gradients() -> None:
    rows = [TensorDict({"x": torch.full((i + 1,), 2.0, requires_grad=True)}) for i in range(2)]
    members = lazy_stack(rows)
    found = grad(sum(row["x"].square().sum() for row in rows), members)
    assert [row["x"].tolist() for row in found.unbind(0)] == [[4], [4, 4]]
    point = Point(x=torch.ones(2, requires_grad=True), batch_size=[2])
    made = grad((point.x * 3).sum(), point)
    assert (type(made), made.x.tolist(), made.word) == (Point, [3, 3], "p")


def test_gradients_that_do_not_belong_are_refused() -> None:
    td = inputs()
    with pytest.raises(KeySetMismatch, match=r"`\('n', 'p'\)` only in `outputs`"):
        grad(outputs(td), td, ones().select("o"))
    with pytest.raises(InvalidArgument, match="`grad_outputs` must be a tensor or several"):
        grad(td["a"], td, ones())
    with pytest.raises(InvalidArgument, match="may be one container, or tensors, got 2"):
        grad(td["a"].sum(), (td, td))
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        grad(outputs(td), td)
