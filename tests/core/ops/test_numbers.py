"""Numbers for functions of which torch has only a form for two tensors."""

import pytest
import torch
from tools.operations import ARITHMETIC, LOGIC
from torch import Tensor

from kd_core import InvalidArgument, InvalidValue, TensorDict

NAMES = [row.name for row in (*ARITHMETIC, *LOGIC) if row.number]


def assert_same(got: Tensor, want: Tensor) -> None:
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("number", [3, 2.5, True])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_promoted_as_torch_promotes_numbers(name: str, number: float) -> None:
    fn = getattr(torch, name)
    for leaf in (torch.tensor([1, 5], dtype=torch.int32), torch.ones(2).half()):
        beside = torch.tensor(number, dtype=torch.result_type(leaf, number))
        whole, scalar = TensorDict({"a": leaf}, [2]), TensorDict({"a": leaf[0]})
        try:
            want = fn(leaf, beside)
        except NotImplementedError:  # not for integers
            with pytest.raises(NotImplementedError):
                getattr(whole, name)(number)
            continue
        assert_same(getattr(whole, name)(number)["a"], want)
        assert_same(getattr(scalar, name)(number)["a"], want[0])


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin"])
def test_integers_that_a_leaf_does_not_hold_are_refused(name: str) -> None:
    td = TensorDict({"i": torch.ones(2, dtype=torch.int32), "u": torch.ones(2, dtype=torch.uint8)})
    for call in (getattr(td, name), getattr(td, f"{name}_")):
        for number, dtype in ((2**40, "int32"), (-1, "uint8")):
            with pytest.raises(InvalidValue, match=rf"must be one that torch\.{dtype} holds, got"):
                call(number)
    assert td["i"].tolist() == td["u"].tolist() == [1, 1]


def test_integers_are_not_cast_to_the_leaf_where_floats_or_truth_are_computed() -> None:
    td = TensorDict({"u": torch.tensor([0, 1], dtype=torch.uint8)}, [2])
    assert_same(td.atan2(-300)["u"], torch.atan2(torch.tensor([0.0, 1.0]), torch.tensor(-300.0)))
    assert td.logical_and(256)["u"].tolist() == [False, True]
    assert td.logical_or_(-1)["u"].tolist() == [1, 1]


def test_a_default_that_a_leaf_does_not_hold_is_refused() -> None:
    td = TensorDict({"u": torch.ones(2, dtype=torch.uint8)}, [2])
    with pytest.raises(InvalidValue, match=r"must be one that torch\.uint8 holds, got -1"):
        td.maximum(TensorDict({}, [2]), default=-1)
    assert td.maximum(2, default=0)["u"].tolist() == [2, 2]


def test_integers_of_more_than_63_bits() -> None:
    td = TensorDict({"u": torch.ones(3, dtype=torch.uint64)}, [3])
    expected = torch.full((3,), 2**63, dtype=torch.uint64)
    assert torch.equal(td.clone().set_("u", 2**63)["u"], expected)
    assert torch.equal(td.clone().fill_("u", 2**63)["u"], expected)
    assert td.clone().set_at_("u", 2**63, 0)["u"].tolist() == [2**63, 1, 1]
    with pytest.raises(InvalidArgument, match=r"dtype is torch\.uint64"):
        td.set_("u", 2**64)
    with pytest.raises(InvalidValue, match=r"`x` must be an integer that torch\.int64 holds"):
        TensorDict({"x": 2**64})
