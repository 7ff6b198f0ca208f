"""Every error is also the builtin one that callers expect, and prints as a sentence."""

import importlib
import re

import pytest
import torch

import kd_core
from kd_core import KdError, KeyNotFound, ShapeMismatch, TensorDict

BUILTINS: dict[str, tuple[type[Exception], ...]] = {
    "KeyNotFound": (KeyError,),
    "KeySetMismatch": (KeyError, RuntimeError),
    "InvalidKey": (TypeError, KeyError, ValueError, RuntimeError),
    "KeyCollision": (ValueError, KeyError, RuntimeError),
    "ShapeMismatch": (ValueError, RuntimeError),
    "DeviceMismatch": (ValueError, RuntimeError),
    "InvalidValue": (ValueError, RuntimeError),
    "InvalidArgument": (TypeError, ValueError, RuntimeError),
    "UnsupportedFunction": (TypeError,),
    "OutOfRange": (IndexError, ValueError, RuntimeError),
    "Locked": (RuntimeError, ValueError),
    "MissingDependency": (ImportError,),
}


@pytest.mark.parametrize("name", BUILTINS)
def test_an_error_is_of_kd_and_of_its_builtins(name: str) -> None:
    error = getattr(kd_core, name)
    assert error.__mro__[1] is KdError
    assert error.__bases__[1:] == BUILTINS[name]


def test_what_is_not_a_field_is_caught_as_a_key_and_as_an_attribute() -> None:
    builtins = (AttributeError, TypeError, ValueError, RuntimeError)
    assert kd_core.UnknownField.__bases__ == (KeyNotFound, *builtins)


@pytest.mark.parametrize("name", BUILTINS)
def test_the_tree_shows_each_error_with_its_builtins(name: str) -> None:
    tree = importlib.import_module("kd_core._errors").__doc__ or ""
    (line,) = re.findall(rf"-- {name} +\(([\w, ]+)\)", tree)
    assert line.split(", ") == [builtin.__name__ for builtin in BUILTINS[name]]


@pytest.mark.parametrize("family", [ValueError, RuntimeError])
def test_a_shape_is_caught_as_torch_and_python_would_raise_it(family: type[Exception]) -> None:
    with pytest.raises(family, match="batch_size"):
        TensorDict({"a": torch.zeros(3)}, [4])
    with pytest.raises(family, match="locked"):
        TensorDict().lock_().set("a", 0.0)


@pytest.mark.parametrize("family", [ValueError, RuntimeError])
def test_a_device_and_a_truth_value_are_caught_as_torch_would_raise_them(
    family: type[Exception],
) -> None:
    with pytest.raises(family, match="'gpu' is not a valid device"):
        TensorDict().to("gpu")
    with pytest.raises(family, match="ambiguous"):
        bool(TensorDict(a=1))


def test_a_mask_in_brackets_is_caught_as_torch_would_raise_it() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    for mask in (torch.ones(2, dtype=torch.bool), [True, False]):
        with pytest.raises(IndexError, match="mask"):
            td[mask]
        with pytest.raises(IndexError, match="mask"):
            td[mask] = 1.0
    assert td["a"].sum() == 0


def test_a_key_error_prints_without_quotes() -> None:
    assert str(KeyNotFound("key `a` not found.")) == "key `a` not found."
    assert str(KdError()) == ""


@pytest.mark.parametrize(
    ("batch", "shape", "remedy"),
    [
        ((3, 4), (3, 5), r"Pass `batch_size=\(3,\)`, or reshape `obs`"),
        ((3,), (2, 3), r"Pass `batch_size=\(\)`"),
        ((3, 4), (), r"Pass `batch_size=\(\)`"),
    ],
)
def test_a_shape_that_does_not_fit_is_told_with_a_remedy(
    batch: tuple[int, ...], shape: tuple[int, ...], remedy: str
) -> None:
    with pytest.raises(ShapeMismatch, match=remedy) as caught:
        TensorDict({"obs": torch.zeros(shape)}, batch)
    expected = f"does not fit entry `obs`: its shape must start with {batch}, got {shape}"
    assert expected in str(caught.value)


def test_many_keys_are_cut() -> None:
    td = TensorDict({f"key{i}": 0.0 for i in range(30)})
    with pytest.raises(KeyNotFound, match=r"`key11`, ... \(18 more\)"):
        td["nothing like these"]
