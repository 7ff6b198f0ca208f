"""Containers that hold tensors without batch dimensions, for the tests of those."""

import torch
from torch import Tensor

from kd_core import NestedKey, TensorDict, TensorDictBase, UnbatchedTensor


def fixed(value: float = 1.0) -> Tensor:
    return torch.full((2, 3), value)


def make(value: float = 1.0, rows: int = 4) -> TensorDict:
    """Rows beside a tensor without rows, on two levels."""
    inner = {"u": UnbatchedTensor(torch.full((5,), value)), "b": torch.zeros(rows, 2)}
    entries = {"a": torch.arange(float(rows)), "u": UnbatchedTensor(fixed(value)), "n": inner}
    return TensorDict(entries, [rows])


def wrapper(td: TensorDictBase, key: NestedKey = "u") -> UnbatchedTensor:
    found: object = td.get(key)
    assert isinstance(found, UnbatchedTensor)
    return found


def rows_of(td: TensorDictBase) -> TensorDictBase:
    return td.exclude("u", ("n", "u"))
