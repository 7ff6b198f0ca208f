"""Containers in `torch.load(weights_only=True)`, and on their way to another process.

Rebuilding a container does not call code of its class, so every kind can be listed as safe, also a
kind that is defined later.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import restore_descriptor
from kd_core._batch.names import NamedSize
from kd_core._containers.dense import Dense, restore_dense
from kd_core._containers.lazy_stack import restore_stack
from kd_core._containers.non_tensor import MetaData, NonTensorData, restore_row_of_batch
from kd_core._containers.non_tensor_stack import restore_rows
from kd_core._containers.unbatched import UnbatchedTensor, restore_unbatched
from kd_core._leaves.packing import restore_from_bits
from kd_core._nodes import registry


def _allow(cls: type) -> None:
    torch.serialization.add_safe_globals([cls])
    ForkingPickler.register(cls, _reduced_for_processes)


def _reduced_for_processes(container: object) -> tuple[Any, ...]:
    # Between processes tensors go through shared memory, whatever the protocol: protocol 3 keeps
    # them tensors.
    function, args, *rest = cast("tuple[Any, ...]", container.__reduce_ex__(3))
    if function is restore_dense:
        cls, entries, *more = args
        originals = cast("Dense", container)._entries
        args = (cls, {key: _in_arena(originals[key], entries[key]) for key in entries}, *more)
    return function, args, *rest


def _unbatched_for_processes(entry: UnbatchedTensor) -> tuple[Any, ...]:
    function, (reduced, *more) = entry.__reduce_ex__(3)
    return function, (_in_arena(entry._tensor, reduced), *more)


def _in_arena(entry: object, reduced: object) -> object:
    """Return what stands for an entry in another process: a leaf of an arena is mapped there."""
    if not isinstance(entry, Tensor):
        return reduced
    from kd_core._store.places import place_of

    if place_of(entry) is None:
        return reduced
    from kd_core._store.arena import MappedLeaf

    return MappedLeaf(entry)


# `restore` of the descriptor is for kinds of other libraries, which are pickled as any object is.
torch.serialization.add_safe_globals(
    [
        NamedSize,
        restore_dense,
        restore_stack,
        restore_descriptor,
        restore_row_of_batch,
        restore_rows,
        restore_unbatched,
        restore_from_bits,
        NonTensorData,
        MetaData,
        UnbatchedTensor,
    ]
)
ForkingPickler.register(UnbatchedTensor, _unbatched_for_processes)
registry.on_new_kind(_allow)
