"""Reading a name that does not exist: left out on purpose, misspelt, or missing while tracing."""

import pytest
import torch
from torch import Tensor

import kd_core
from kd_core import NotOffered, NotOfferedImport, TensorClass, TensorDict


class Named(TensorDict):
    """A kind whose property fails."""

    @property
    def broken(self) -> int:
        """Raise an error of its own."""
        raise AttributeError("what is wrong inside")


def test_the_error_of_an_import_and_of_a_name_say_the_same() -> None:
    with pytest.raises(NotOffered) as read:
        kd_core.deprecated_attributes  # type: ignore[attr-defined]  # noqa: B018  # the error is the promise
    with pytest.raises(NotOfferedImport) as imported:
        from kd_core import deprecated_attributes  # type: ignore[attr-defined]  # noqa: F401  # as above
    assert str(read.value) == str(imported.value)
    assert "Use the names of" in str(read.value)


def test_hasattr_and_defaults_work() -> None:
    assert not hasattr(kd_core, "deprecated_attributes")
    assert not hasattr(TensorDict(), "to_mds")
    assert getattr(TensorDict(), "to_mds", None) is None
    assert "to_mds" not in dir(TensorDict())
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
        attrs: Tensor

    box = Box(attrs=torch.ones(2), batch_size=[2])
    assert box.attrs.tolist() == [1, 1]
    assert box[0].attrs.item() == 1
    assert "attrs" in dir(box)


def test_compiled_code_asks_for_attributes() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def step(td: TensorDict) -> TensorDict:
        return td + 1 if hasattr(td, "to_mds") else td + getattr(td, "absent", 2)

    assert step(TensorDict({"a": torch.zeros(2)}))["a"].tolist() == [2, 2]
