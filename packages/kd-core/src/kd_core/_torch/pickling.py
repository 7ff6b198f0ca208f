"""Containers in `torch.load(weights_only=True)`, and on their way to another process.

Rebuilding a container does not call code of its class, so every kind can be named, also one that is
defined later. A pickle can call the functions that restore containers, which check what they are
given, and nothing else of this library; kinds of other libraries are listed as safe themselves.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import restore_descriptor
from kd_core._batch.names import NamedSize, restore_size
from kd_core._containers.dense import Dense, restore_dense
from kd_core._containers.lazy_stack import restore_stack
from kd_core._containers.member_storage import MemberStorage
from kd_core._containers.non_tensor import (
    MetaData,
    NonTensorData,
    restore_meta,
    restore_row_of_batch,
    restore_value,
)
from kd_core._containers.non_tensor_stack import restore_rows
from kd_core._containers.unbatched import UnbatchedTensor, restore_unbatched
from kd_core._leaves.packing import restore_from_bits
from kd_core._nodes import registry
from kd_core._nodes.registry import NamedKind


def _allow(cls: type) -> None:
    ours = issubclass(cls, (Dense, MemberStorage)) or cls.__module__.startswith("kd_core.")
    torch.serialization.add_safe_globals([NamedKind(cls) if ours else cls])
    ForkingPickler.register(cls, _reduced_for_processes)


def _reduced_for_processes(container: object) -> tuple[Any, ...]:
    # Between processes tensors go through shared memory, whatever the protocol: protocol 3 keeps
    # them tensors.
    function, args, *rest = cast("tuple[Any, ...]", container.__reduce_ex__(3))
    if function is restore_dense:
        cls, entries, *more = args
        originals = cast("Dense", container)._kd_entries
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
        restore_dense,
        restore_stack,
        restore_descriptor,
        restore_row_of_batch,
        restore_rows,
        restore_unbatched,
        restore_from_bits,
        NamedKind(NamedSize, restore_size),
        NamedKind(NonTensorData, restore_value),
        NamedKind(MetaData, restore_meta),
    ]
)
ForkingPickler.register(UnbatchedTensor, _unbatched_for_processes)
registry.on_new_kind(_allow)
