"""Every error is also the builtin one that callers expect, and prints as a sentence."""

import pytest
import torch

import kd_core
from kd_core import KdError, KeyNotFound, ShapeMismatch, TensorDict

BUILTINS = {
    "KeyNotFound": KeyError,
    "KeySetMismatch": KeyError,
    "InvalidKey": TypeError,
    "KeyCollision": ValueError,
    "ShapeMismatch": ValueError,
    "DeviceMismatch": ValueError,
    "InvalidValue": ValueError,
    "InvalidArgument": TypeError,
    "UnsupportedFunction": TypeError,
    "UnknownField": AttributeError,
    "OutOfRange": IndexError,
    "Locked": RuntimeError,
    "MissingDependency": ImportError,
}


@pytest.mark.parametrize("name", BUILTINS)
def test_an_error_is_of_kd_and_a_builtin(name: str) -> None:
    error = getattr(kd_core, name)
    assert issubclass(error, KdError)
    assert issubclass(error, BUILTINS[name])


def test_a_key_error_prints_without_quotes() -> None:
    assert str(KeyNotFound("key `a` is not there.")) == "key `a` is not there."
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
    assert f"batch_size {batch} does not fit entry `obs`: its shape {shape}" in str(caught.value)


def test_many_keys_are_cut() -> None:
    td = TensorDict({f"key{i}": 0.0 for i in range(30)})
    with pytest.raises(KeyNotFound, match=r"`key11`, ... \(18 more\)"):
        td["nothing like these"]
