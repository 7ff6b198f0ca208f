"""Questions about tensors, and shapes from the left."""

import pytest
import torch

from kd_core import (
    InvalidArgument,
    ShapeMismatch,
    TensorDict,
    expand_as_right,
    expand_right,
    is_bool,
    is_floating,
    is_inexact,
    is_integer,
)


def test_new_dimensions_are_on_the_right() -> None:
    mask = torch.tensor([True, False])
    assert expand_right(mask, (2, 3, 4))[:, 1, 2].tolist() == [True, False]
    assert expand_as_right(mask, torch.zeros(2, 5)).shape == (2, 5)
    assert expand_as_right(mask, TensorDict({}, [2, 3])).shape == (2, 3)  # type: ignore[arg-type]  # has a shape
    assert expand_right(torch.ones(1, 3), (2, 3)).shape == (2, 3)
    assert expand_right(torch.ones(()), ()).shape == ()
    assert expand_right(mask, (2, 3)).data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("shape", [(3, 2), (), (1,)])
def test_a_shape_that_does_not_start_so_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatch, match=r"shape \(2,\) cannot be expanded on the right"):
        expand_right(torch.zeros(2), shape)


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        (torch.float16, {is_floating, is_inexact}),
        (torch.complex64, {is_inexact}),
        (torch.bool, {is_bool}),
        (torch.uint16, {is_integer}),
        (torch.int64, {is_integer}),
    ],
)
def test_each_dtype_is_of_its_kinds(dtype: torch.dtype, kinds: set[object]) -> None:
    for ask in (is_floating, is_inexact, is_bool, is_integer):
        assert ask(dtype) == ask(torch.zeros(1, dtype=dtype)) == (ask in kinds)
        assert not ask(dtype, torch.float8_e4m3fn) or ask in (is_floating, is_inexact)


def test_only_tensors_and_dtypes_are_asked_about() -> None:
    with pytest.raises(InvalidArgument, match="a tensor or a dtype, got an `int`"):
        is_integer(3)  # type: ignore[arg-type]  # the error is the promise
