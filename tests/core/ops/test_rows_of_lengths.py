"""Rows of different lengths: see also `tests/core/containers/test_member_reading.py`."""

import pytest
import torch

from kd_core import InvalidValue, KeyCollision, TensorDict, lazy_stack


def jagged() -> TensorDict:
    rows = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=torch.jagged)
    return TensorDict({"n": {"a": rows}, "b": torch.zeros(2)}, [2])


def test_nested_tensors_are_padded() -> None:
    padded = jagged().to_padded_tensor(7, mask_key=("n", "real"))
    assert padded["n", "a"].shape == (2, 3, 2)
    assert padded["n", "a"][0, :, 0].tolist() == [1, 7, 7]
    assert padded["n", "real"].tolist() == [[True, False, False], [True] * 3]
    assert padded["b"].shape == (2,)
    assert jagged().to_padded_tensor()["n", "a"].shape == (2, 3, 2)


def test_a_mask_does_not_replace_an_entry() -> None:
    with pytest.raises(KeyCollision, match="`b` exists already"):
        jagged().to_padded_tensor(mask_key="b")
    with pytest.raises(KeyCollision, match=r"`\('n', 'a'\)` exists already"):
        jagged().to_padded_tensor(mask_key=("n", "a"))


def test_a_container_without_nested_tensors_is_as_it_was() -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    assert list(td.to_padded_tensor().keys()) == ["a"]
    with pytest.raises(InvalidValue, match="Pass `keys`"):
        td.to_padded_tensor(mask_key="mask")


def test_the_caller_decides_what_has_a_mask() -> None:
    for lengths in ([1, 2], [2, 2], [2]):
        stack = lazy_stack([TensorDict(a=torch.ones(n), b=1.0) for n in lengths])
        padded = stack.to_padded_tensor(mask_key="mask", keys=["a"])
        assert padded["a"].shape == (len(lengths), 2)
        assert padded["mask"].sum(1).tolist() == lengths
    with pytest.raises(InvalidValue, match="Leave it out of `keys`"):
        stack.to_padded_tensor(mask_key="mask", keys=["b"])


def test_a_container_without_lazy_stacks_is_dense_already() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
    assert td.densify() is td
    held = TensorDict({"n": lazy_stack([td, td.clone()])})
    assert held.densify() is not held
