"""Containers in the object store of Ray: one header and one array for each dtype."""

import warnings
from typing import NewType

import numpy as np
import ray
import torch

from kd_core import TensorDict, TensorDictBase

Stored = NewType("Stored", tuple[bytes, list["ray.ObjectRef[np.ndarray]"]])
"""What stands for a container in the store: its header, and the references of its arrays."""


def put(td: TensorDictBase) -> Stored:
    """Copy a container into the store, once."""
    header, buffers = td.detach().to_buffers()
    return Stored((header, [ray.put(flat.view(torch.uint8).numpy()) for flat in buffers]))


def get(stored: Stored) -> TensorDict:
    """Return a container of its own: Ray's arrays are read-only, and copied."""
    header, references = stored
    return TensorDict.from_buffers(header, ray.get(references))


def look(stored: Stored) -> TensorDict:
    """Return a container on the memory of the store, without a copy, to be read only.

    Every process that looks sees the same memory, and torch has no tensor that cannot be written
    to: a write would change what all of them see.
    """
    header, references = stored
    arrays = ray.get(references)
    with warnings.catch_warnings(action="ignore"):  # that they are read-only
        return TensorDict.from_buffers(header, [torch.from_numpy(array) for array in arrays])
