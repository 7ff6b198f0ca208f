"""Containers between the processes of a group of `torch.distributed`, as functions.

Each call first agrees with all ranks on keys, shapes and dtypes, and then sends one message for
each dtype and device. Most functions are methods of containers, too. Import it on demand: it loads
`torch.distributed`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from kd_core._base import TensorDictBase
from kd_core._containers.tensordict import TensorDict
from kd_core._distributed import collectives, groups, outlines
from kd_core._distributed.groups import Handle as Handle
from kd_core._errors import CommunicationError as CommunicationError
from kd_core._errors import InvalidValue, KdError
from kd_core._naming import publish
from kd_core._protocol import AbstractContainer as _Container

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata

    from kd_core._distributed.collectives import Op, Weights
    from kd_core._types import DeviceLike

T = TypeVar("T", bound=TensorDictBase)


def broadcast(
    td: T | None,
    src: int,
    *,
    group: ProcessGroup | None = None,
    device: DeviceLike | None = None,
) -> T:
    """Return the container of one rank on all ranks; see `TensorDict.broadcast`.

    Args:
        td: the container, which is written to on other ranks than `src`; `None` there: a new
            container is returned.
        src: the rank in the default group whose values are taken.
        group: the process group; `None`: the default group.
        device: where a new container is put.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from kd_core import TensorDict, distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> distributed.broadcast(TensorDict({"a": torch.ones(2)}), src=0)["a"]
        tensor([1., 1.])
        >>> dist.destroy_process_group()
    """
    return collectives.broadcast(td, src, group, device)


def all_reduce(
    td: TensorDictBase,
    op: Op | None = None,
    *,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    bucket_bytes: int | None = None,
) -> Handle | None:
    """Replace each value by a reduction over all ranks, in place; see `TensorDict.all_reduce`.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from kd_core import TensorDict, distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> handle = distributed.all_reduce(TensorDict({"a": torch.ones(2)}), async_op=True)
        >>> handle.wait()
        >>> dist.destroy_process_group()
    """
    return collectives.all_reduce(td, op, group, async_op, bucket_bytes)


def reduce(
    td: TensorDictBase,
    dst: int,
    op: Op | None = None,
    *,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    bucket_bytes: int | None = None,
) -> Handle | None:
    """Replace each value on one rank by a reduction over all ranks; see `TensorDict.reduce`.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from kd_core import TensorDict, distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> distributed.reduce(TensorDict({"loss": torch.ones(())}), dst=0, op="max")
        >>> dist.destroy_process_group()
    """
    return collectives.reduce(td, dst, op, group, async_op, bucket_bytes)


def all_gather(td: T, *, group: ProcessGroup | None = None) -> list[T]:
    """Return the containers of all ranks on each rank; see `TensorDict.all_gather`.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from kd_core import TensorDict, distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> len(distributed.all_gather(TensorDict({"a": torch.arange(2)}, [2])))
        1
        >>> dist.destroy_process_group()
    """
    return collectives.all_gather(td, group)


def gather(td: T, dst: int, *, group: ProcessGroup | None = None) -> list[T] | None:
    """Return the containers of all ranks on one rank, in the order of ranks.

    Ranks may have different numbers of rows in the first batch dimension.

    Args:
        td: the container of this rank.
        dst: the rank in the default group that gets them.
        group: the process group; `None`: the default group.

    Returns:
        The containers on `dst`, `None` on other ranks.

    Raises:
        KeySetMismatch: on all ranks, if the keys differ between them.
        kd_core.ShapeMismatch: on all ranks, if shapes differ beside the number of rows.
        CommunicationError: if another rank ended, or did not answer in time.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from kd_core import TensorDict, distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> [part["a"] for part in distributed.gather(TensorDict({"a": torch.arange(2)}), dst=0)]
        [tensor([0, 1])]
        >>> dist.destroy_process_group()
    """
    return collectives.gather(td, dst, group)


def scatter(
    containers: Sequence[T] | None,
    src: int,
    *,
    group: ProcessGroup | None = None,
    device: DeviceLike | None = None,
) -> T:
    """Return the container that one rank has for each rank.

    Args:
        containers: on `src`, one container for each rank, of any keys and shapes; `None` elsewhere.
        src: the rank in the default group that has them.
        group: the process group; `None`: the default group.
        device: where the entries are put.

    Returns:
        A new container; on `src`, the one of the sequence.

    Raises:
        InvalidArgument: if `src` does not have one container for each rank.
        CommunicationError: if another rank ended, or did not answer in time.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from kd_core import TensorDict, distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> parts = TensorDict({"a": torch.arange(2)}, [2]).chunk(1)
        >>> distributed.scatter(parts, src=0)["a"]
        tensor([0, 1])
        >>> dist.destroy_process_group()
    """
    return collectives.scatter(containers, src, group, device)


def send(td: TensorDictBase, dst: int, *, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send a container to a rank; see `TensorDict.send`.

    Example:
        >>> from kd_core import TensorDict, distributed
        >>> def pass_on(td: TensorDict, rank: int) -> None:
        ...     distributed.send(td, 1) if rank == 0 else distributed.recv(td, 0)
    """
    collectives.isend(td, dst, group, None, tag, "send").wait()


def isend(
    td: TensorDictBase, dst: int, *, group: ProcessGroup | None = None, tag: int = 0
) -> Handle:
    """Start to send a container to a rank; see `TensorDict.isend`.

    Example:
        >>> from kd_core import TensorDict, distributed
        >>> def send_both(first: TensorDict, second: TensorDict) -> None:
        ...     handles = [distributed.isend(td, 1) for td in (first, second)]
        ...     for handle in handles:
        ...         handle.wait()
    """
    return collectives.isend(td, dst, group, None, tag)


def recv(td: TensorDictBase, src: int, *, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Write the values of a container that another rank sends; see `TensorDict.recv`.

    Example:
        >>> from kd_core import TensorDict, distributed
        >>> def pass_on(td: TensorDict, rank: int) -> None:
        ...     distributed.send(td, 1) if rank == 0 else distributed.recv(td, 0)
    """
    collectives.irecv(td, src, group, None, tag, "recv").wait()


def irecv(
    td: TensorDictBase, src: int, *, group: ProcessGroup | None = None, tag: int = 0
) -> Handle:
    """Start to receive the values of a container; see `TensorDict.irecv`.

    Example:
        >>> from kd_core import TensorDict, distributed
        >>> def receive(td: TensorDict) -> None:
        ...     handle = distributed.irecv(td, 0)
        ...     handle.wait()
    """
    return collectives.irecv(td, src, group, None, tag)


def init_remote(td: TensorDictBase, dst: int, *, group: ProcessGroup | None = None) -> None:
    """Send a container to a rank that does not have it yet; see `TensorDict.init_remote`.

    Example:
        >>> from kd_core import TensorDict, distributed
        >>> def share(td: TensorDict | None, rank: int) -> TensorDict:
        ...     if td is None:
        ...         return distributed.from_remote_init(0)
        ...     distributed.init_remote(td, 1)
        ...     return td
    """
    collectives.init_remote(td, dst, group, False)


def from_remote_init(
    src: int, *, group: ProcessGroup | None = None, device: DeviceLike | None = None
) -> TensorDictBase:
    """Return a new container that another rank sends; see `TensorDict.from_remote_init`.

    Example:
        >>> from kd_core import TensorDict, distributed
        >>> def share(td: TensorDict | None, rank: int) -> TensorDict:
        ...     if td is None:
        ...         return distributed.from_remote_init(0)
        ...     distributed.init_remote(td, 1)
        ...     return td
    """
    return TensorDict.from_remote_init(src, group, device)


def pad_to_divisor(td: T, divisor: int) -> tuple[T, int]:
    """Return a container whose number of rows can be divided, and how many rows were added.

    The new rows are behind the others and repeat them from the first one on, so all kinds of
    entries can be padded.

    Args:
        td: the container; its first batch dimension is padded.
        divisor: the number of ranks, for example.

    Raises:
        InvalidValue: if the container has no batch dimension, or `divisor` is not positive.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, distributed
        >>> td = TensorDict({"a": torch.arange(3), "word": ["x", "y", "z"]}, [3])
        >>> padded, count = distributed.pad_to_divisor(td, 2)
        >>> padded["word"], count
        (['x', 'y', 'z', 'x'], 1)
    """
    return collectives.pad_to_divisor(td, divisor)


def unpad(td: T, count: int) -> T:
    """Return a container without its last rows: the inverse of `pad_to_divisor`.

    Args:
        td: the container.
        count: how many rows were added.

    Raises:
        InvalidValue: if the container has fewer rows.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, distributed
        >>> padded, count = distributed.pad_to_divisor(TensorDict({"a": torch.arange(3)}, [3]), 2)
        >>> distributed.unpad(padded, count)["a"]
        tensor([0, 1, 2])
    """
    return collectives.unpad(td, count)


def balanced_chunks(td: T, chunks: int, weights: Weights) -> tuple[list[T], Tensor]:
    """Split rows into containers of about the same weight.

    The weights of two containers differ by at most that of the heaviest row.

    Args:
        td: the container; its first batch dimension is split.
        chunks: the number of containers; each has a row at least.
        weights: one number for each row; or the key of an entry: of a ragged one the lengths are
            taken, of another one its values.

    Returns:
        The containers, and which row of `td` each of their rows was; see `restore_order`.

    Raises:
        InvalidValue: if there are fewer rows than chunks, or a weight is negative or not finite.
        ShapeMismatch: if `weights` is not one number for each row.
        InvalidArgument: if an entry gives no weights.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, distributed
        >>> td = TensorDict({"a": torch.arange(4)}, [4])
        >>> parts, order = distributed.balanced_chunks(td, 2, weights=[6, 1, 2, 3])
        >>> [part["a"].tolist() for part in parts]
        [[0], [1, 2, 3]]
        >>> distributed.restore_order(torch.cat(parts), order)["a"]
        tensor([0, 1, 2, 3])
    """
    return collectives.balanced_chunks(td, chunks, weights)


def restore_order(td: T, order: Tensor) -> T:
    """Return rows in the order that they had before `balanced_chunks`.

    Args:
        td: the rows of all chunks, or what was computed from them, in the order of the chunks.
        order: what `balanced_chunks` returned.

    Raises:
        InvalidArgument: if `order` is not an order of these rows.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, distributed
        >>> td = TensorDict({"a": torch.tensor([7, 5])}, [2])
        >>> distributed.restore_order(td, torch.tensor([1, 0]))["a"]
        tensor([5, 7])
    """
    return collectives.restore_order(td, order)


# Checkpoints. torch asks a container for its `state_dict()`, which has the tensors alone. So torch
# is given nested states to save, and batch sizes and non-tensor data are read alone before torch
# writes into leaves: all ranks agree that they fit.


class _StatedPlanner(DefaultLoadPlanner):
    """Read what a checkpoint states of containers beside their tensors; else leave it as it is.

    `save` of torch writes the tensors of a container alone.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, dict[str, object]],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        saved = {} if metadata is None else metadata.state_dict_metadata
        stated = {
            key: data
            for key, data in state_dict.items()
            if any(f"{key}.{name}" in saved for name in data)
        }
        super().set_up_planner(stated, metadata, is_coordinator)


def save_checkpoint(
    state: Mapping[str, object],
    checkpoint_id: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
) -> None:
    """Save containers and other values by `torch.distributed.checkpoint.save`, in a new folder.

    Batch sizes and non-tensor data of containers are saved too; `save` of torch saves the tensors
    of a container alone.

    A checkpoint is whole once all ranks have written their parts. If a rank ends before, the others
    raise an error that names the call, and earlier checkpoints stay as they were.

    Args:
        state: containers, state dicts and other values by names.
        checkpoint_id: the folder, which all ranks see.
        group: the process group; `None`: the default group, if there is one.

    Raises:
        InvalidValue: on all ranks, if the folder holds a checkpoint; nothing is written then.
        CommunicationError: if another rank ended, or did not answer in time.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import torch.distributed as dist
        >>> from kd_core import TensorDict, distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> folder = tempfile.mkdtemp()
        >>> distributed.save_checkpoint({"td": TensorDict({"a": torch.ones(2)})}, folder)
        >>> dist.destroy_process_group()
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    problem = None
    if Path(checkpoint_id, ".metadata").exists():
        problem = InvalidValue(
            f"`{os.fspath(checkpoint_id)}` holds a checkpoint, which a failure would damage. Save "
            "each checkpoint in a folder of its own."
        )
    with _calling("save_checkpoint", group) as team:
        _agree(team, "save_checkpoint", problem)
        content = {**state, **{key: _state_of(td) for key, td in _containers(state).items()}}
        save(content, checkpoint_id=checkpoint_id, process_group=group)


def load_checkpoint(
    state: MutableMapping[str, object],
    checkpoint_id: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
) -> None:
    """Load what `save_checkpoint` wrote, in place, if it fits all containers.

    Batch sizes are compared first, so nothing is written if they differ on a rank. Non-tensor data
    is loaded too. `load` of torch does neither. What its `save` wrote of a container has tensors
    alone, and is loaded too.

    Args:
        state: containers, state dicts and other values by the names under which they were saved.
        checkpoint_id: the folder of the checkpoint.
        group: the process group; `None`: the default group, if there is one.

    Raises:
        ShapeMismatch: if the batch size of a container is not that of the checkpoint.
        InvalidValue: if a leaf cannot be written to, or another rank cannot take part.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import torch.distributed as dist
        >>> from kd_core import TensorDict, distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> folder = tempfile.mkdtemp()
        >>> saved = {"td": TensorDict({"a": torch.ones(2), "unit": "m"})}
        >>> distributed.save_checkpoint(saved, folder)
        >>> td = TensorDict({"a": torch.zeros(2), "unit": "m"})
        >>> distributed.load_checkpoint({"td": td}, folder)
        >>> td["a"]
        tensor([1., 1.])
        >>> dist.destroy_process_group()
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    containers = _containers(state)
    data = {key: _without_tensors(_state_of(td)) for key, td in containers.items()}
    with _calling("load_checkpoint", group) as team:
        load(data, checkpoint_id=checkpoint_id, process_group=group, planner=_StatedPlanner())
        _agree(team, "load_checkpoint", _problem(containers, data))
        load(state, checkpoint_id=checkpoint_id, process_group=group)
        for key, td in containers.items():
            td._kd_engine.load_state_dict(td, data[key], False)  # what is not a tensor


@contextmanager
def _calling(name: str, group: ProcessGroup | None) -> Iterator[groups.Team | None]:
    """Name a call in errors of the backend, if there is a group."""
    if not dist.is_initialized():
        yield None
        return
    team = groups.team_of(group)
    with team.calling(name):
        yield team


def _agree(team: groups.Team | None, name: str, problem: KdError | None) -> None:
    """Raise the problem of a rank on all ranks."""
    if team is not None:
        groups.agree(team, groups.Proposal(name, None, problem=problem))
    elif problem is not None:
        raise problem


def _containers(state: Mapping[str, object]) -> dict[str, _Container]:
    """Return the containers in a state whose state dict is not that of a module."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, _Container) and not isinstance(value, nn.Module)
    }


def _state_of(td: _Container) -> object:
    return td._kd_engine._kd_levels(td, keep_vars=False)


def _without_tensors(value: object) -> object:
    """Return copies of nested dicts and lists, without the tensors among the values of dicts."""
    if isinstance(value, Mapping):
        rest = {key: each for key, each in value.items() if not isinstance(each, Tensor)}
        return {key: _without_tensors(each) for key, each in rest.items()}
    return [_without_tensors(each) for each in value] if isinstance(value, list) else value


def _problem(containers: Mapping[str, _Container], data: Mapping[str, object]) -> KdError | None:
    """Return why what was read does not fit, if it does not."""
    for key, td in containers.items():
        try:
            td._kd_engine._kd_check_state(td, data[key])
            mine = outlines.outlined(td._kd_engine.filter_non_tensor_data(td))
            if mine.outline.plain:
                mine.check_writable()
        except KdError as error:
            reason = str(error).partition(" Pass `")[0]  # the remedies are of `load_state_dict`
            return type(error)(
                f"`{key}` cannot take what the checkpoint holds: {reason} Load it into a container "
                "with the batch size and the data that were saved."
            )
    return None


publish(__name__)
