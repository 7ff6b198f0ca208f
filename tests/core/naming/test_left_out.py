"""Reading a name that does not exist: left out on purpose, misspelt, or missing while tracing."""

import pytest
import torch
from torch import Tensor

from kd_core import NotOffered, TensorClass, TensorDict


class Named(TensorDict):
    """A kind whose property fails."""

    @property
    def broken(self) -> int:
        """Raise an error of its own."""
        raise AttributeError("what is wrong inside")


def test_hasattr_and_defaults_work() -> None:
    assert not hasattr(TensorDict(), "qint8")
    assert getattr(TensorDict(), "qint8", None) is None
    assert "qint8" not in dir(TensorDict())
    assert "select" in dir(TensorDict())


def test_a_property_that_fails_keeps_its_message() -> None:
    with pytest.raises(AttributeError, match="what is wrong inside"):
        Named().broken  # noqa: B018  # the error is the promise


def test_a_tensor_class_explains_too() -> None:
    class Point(TensorClass):
        x: Tensor

    with pytest.raises(NotOffered, match="quantize_per_tensor"):
        Point(torch.zeros(2)).qint8  # type: ignore[attr-defined]  # noqa: B018  # as above


def test_a_field_may_have_a_name_that_is_left_out() -> None:
    class Box(TensorClass):
        qint8: Tensor

    box = Box(qint8=torch.ones(2), batch_size=[2])
    assert box.qint8.tolist() == [1, 1]
    assert box[0].qint8.item() == 1
    assert "qint8" in dir(box)


def test_compiled_code_asks_for_attributes() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def step(td: TensorDict) -> TensorDict:
        return td + 1 if hasattr(td, "qint8") else td + getattr(td, "absent", 2)

    assert step(TensorDict({"a": torch.zeros(2)}))["a"].tolist() == [2, 2]
