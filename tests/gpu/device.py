"""The device that these tests run on: `KD_DEVICE`, or the CPU.

`nox -s tests` runs them on the CPU, which exercises their logic; `nox -s gpu` sets `cuda:0`.
"""

import os
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from kd_core import NonTensorDataBase, TensorDictBase, UnbatchedTensor

DEVICE: Final = torch.device(os.environ.get("KD_DEVICE", "cpu"))
CPU: Final = torch.device("cpu")
TORCH: Any = torch
"""Its functions as containers meet them: its types name tensors alone."""


def devices(td: TensorDictBase) -> set[torch.device]:
    """Return where the leaves of a container are."""
    leaves: list[object] = list(td.values(True, True))
    return {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}


def on_cpu(value: object) -> object:
    """Return a value whose tensors are on the CPU, in containers as in plain structures."""
    if isinstance(value, (Tensor, TensorDictBase)):
        return value.detach().to("cpu")
    if isinstance(value, Mapping):
        return {key: on_cpu(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [on_cpu(each) for each in value]
    return value


def assert_alike(found: object, expected: object, tolerance: float | None = None) -> None:
    """Assert that two values are equal up to rounding, wherever they are.

    Args:
        found: a value.
        expected: what it must be.
        tolerance: how far apart numbers may be; None: what torch allows their dtypes.
    """
    if isinstance(expected, TensorDictBase):
        assert isinstance(found, TensorDictBase)
        assert type(found) is type(expected)
        assert found.batch_size == expected.batch_size
        assert list(found.keys()) == list(expected.keys())
        for key in expected.keys():  # noqa: SIM118  # a container iterates over its rows
            assert_alike(found.get(key), expected.get(key), tolerance)
    elif isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        torch.testing.assert_close(
            found.detach(),
            expected.detach(),
            atol=tolerance,
            rtol=tolerance,
            equal_nan=True,
            check_device=False,
        )
    elif isinstance(expected, NonTensorDataBase):
        assert isinstance(found, NonTensorDataBase)
        assert found.tolist() == expected.tolist()
    elif isinstance(expected, UnbatchedTensor):
        assert isinstance(found, UnbatchedTensor)
        assert_alike(found.data, expected.data, tolerance)
    elif isinstance(expected, Mapping):
        assert isinstance(found, Mapping)
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_alike(found[key], value, tolerance)
    elif isinstance(expected, (tuple, list)):
        assert isinstance(found, (tuple, list))
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_alike(mine, theirs, tolerance)
    else:
        assert found == expected
