"""Results written into `out`."""

import pytest
import torch

from kd_core import InvalidArgument, KeySetMismatch, ShapeMismatch, TensorDict


def source() -> TensorDict:
    return TensorDict({"a": torch.arange(3.0), "n": {"b": torch.arange(6.0).view(3, 2)}}, [3])


def test_a_result_is_written_into_the_leaves_of_out() -> None:
    out = source().zero_()
    leaf = out["n", "b"]
    assert source().clamp(1, 2, out=out.lock_()) is out
    assert out["n", "b"] is leaf
    assert leaf.tolist() == [[1, 1], [2, 2], [2, 2]]


def test_the_input_may_be_the_output() -> None:
    td = source()
    td.clamp(1, 2, out=td)
    assert td["a"].tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (TensorDict({"a": torch.zeros(3)}, [3]), KeySetMismatch, "same keys"),
        (TensorDict({"a": torch.zeros(2), "n": {}}, [2]), ShapeMismatch, r"batch_size \(3,\)"),
        (
            TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3]),
            ShapeMismatch,
            r"entry `\('n', 'b'\)` of `out` must have shape \(3, 2\), got \(3,\)",
        ),
        (
            TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3, 2).int()}}, [3]),
            InvalidArgument,
            "to which torch.float32 can be cast",
        ),
    ],
)
def test_an_output_that_does_not_fit_is_not_written(
    out: TensorDict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        (source() + 1).clamp(1, 2, out=out)
    assert not out["a"].any()


def test_gradients_are_not_recorded_through_out() -> None:
    with pytest.raises(InvalidArgument, match="requires gradients"):
        source().requires_grad_().clamp(1, 2, out=source())
