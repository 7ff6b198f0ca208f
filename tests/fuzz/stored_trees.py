"""Random containers with odd keys, dtypes and values, and all that one holds."""

from __future__ import annotations

import math
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor

from kd_core import NonTensorStack, TensorDict, TensorDictBase

Shape: TypeAlias = tuple[int, ...]
Content: TypeAlias = dict[tuple[str, ...], object]
KEYS = ["", "a", "A", "a/b", "../x", "x.y", "\u00e9", "e\u0301", "manifest.json", ".lock", "t0"]
KEYS += ["__metadata__", "k" * 300, "\0", "seg-0", " ", "\ud7ff", "batch_size", "_", "shape"]
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.uint64]
VALUES: list[object] = ["s", "", None, 3, -(2**70), 1.5, math.nan, math.inf, True, b"\0\xff"]
VALUES += [[1, "a", None], {"k": [1]}, ("a", 1), {"": {}}, []]


def leaf(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return a tensor of random bytes."""
    if dtype is torch.bool:
        return torch.randint(2, shape).bool()
    count = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def tree(rng: Random, batch: Shape, depth: int = 0) -> TensorDict:
    """Build a container with odd keys, dtypes and values."""
    td = TensorDict(batch_size=batch)
    for key in rng.sample(KEYS, rng.randint(0, 5)):
        kind = rng.random()
        if kind < 0.55 or (kind < 0.75 and depth == 3):
            shape = (*batch, *rng.choice([(), (2,), (0,), (1, 3)]))
            td[key] = leaf(shape, rng.choice(DTYPES))
        elif kind < 0.75:
            td[key] = tree(rng, (*batch, *rng.choice([(), (), (2,)])), depth + 1)
        elif kind < 0.85 or len(batch) != 1 or not batch[0]:
            td.set_non_tensor(key, rng.choice(VALUES))
        else:
            td[key] = NonTensorStack(*rng.choices(VALUES, k=batch[0]))
    return td


def content(td: TensorDictBase) -> Content:
    """Return all that a container holds, tensors as their bytes."""
    found: Content = {(): tuple(td.batch_size)}
    for key in td.keys():  # noqa: SIM118  # a container iterates over rows
        value: object = td.get(key)
        if isinstance(value, Tensor):
            bits = value.contiguous().reshape(-1).view(torch.uint8).tolist()
            found[(key,)] = value.dtype, tuple(value.shape), bits
        elif isinstance(value, TensorDictBase):
            found |= {(key, *path): part for path, part in content(value).items()}
        else:
            found[(key,)] = type(value).__name__, repr(td[key])
    return found
