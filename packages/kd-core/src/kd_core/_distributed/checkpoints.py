"""Checkpoints of `torch.distributed.checkpoint`: saved beside others, loaded where they fit.

torch asks a container for its `state_dict()`, which has the tensors alone. So torch is given nested
states to save, and batch sizes and non-tensor data are read alone before torch writes into leaves:
all ranks agree that they fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from kd_core._distributed.groups import Proposal, agree, team_of
from kd_core._distributed.outlines import outlined
from kd_core._errors import InvalidValue, KdError
from kd_core._protocol import AbstractContainer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata

    from kd_core._distributed.groups import Team


# What is read of a checkpoint, where checkpoints of several kinds are loaded.


class StatedPlanner(DefaultLoadPlanner):
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
    group: ProcessGroup | None,
) -> None:
    """Save a checkpoint in a folder that does not hold one."""
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


@contextmanager
def _calling(name: str, group: ProcessGroup | None) -> Iterator[Team | None]:
    """Name a call in errors of the backend, if there is a group."""
    if not dist.is_initialized():
        yield None
        return
    team = team_of(group)
    with team.calling(name):
        yield team


def _agree(team: Team | None, name: str, problem: KdError | None) -> None:
    """Raise the problem of a rank on all ranks."""
    if team is not None:
        agree(team, Proposal(name, None, problem=problem))
    elif problem is not None:
        raise problem


def load_checkpoint(
    state: MutableMapping[str, object],
    checkpoint_id: str | os.PathLike[str],
    group: ProcessGroup | None,
) -> None:
    """Load a checkpoint, if it fits the containers on all ranks."""
    from torch.distributed.checkpoint.state_dict_loader import load

    containers = _containers(state)
    data = {key: _without_tensors(_state_of(td)) for key, td in containers.items()}
    with _calling("load_checkpoint", group) as team:
        load(data, checkpoint_id=checkpoint_id, process_group=group, planner=StatedPlanner())
        _agree(team, "load_checkpoint", _problem(containers, data))
        load(state, checkpoint_id=checkpoint_id, process_group=group)


def _containers(state: Mapping[str, object]) -> dict[str, AbstractContainer]:
    """Return the containers in a state whose state dict is not that of a module."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, AbstractContainer) and not isinstance(value, nn.Module)
    }


def _state_of(td: AbstractContainer) -> object:
    return td._kd_engine._kd_levels(td, keep_vars=False)


def _without_tensors(value: object) -> object:
    """Return copies of nested dicts and lists, without the tensors among the values of dicts."""
    if isinstance(value, Mapping):
        rest = {key: each for key, each in value.items() if not isinstance(each, Tensor)}
        return {key: _without_tensors(each) for key, each in rest.items()}
    return [_without_tensors(each) for each in value] if isinstance(value, list) else value


def _problem(
    containers: Mapping[str, AbstractContainer], data: Mapping[str, object]
) -> KdError | None:
    """Return why what was read does not fit, if it does not."""
    for key, td in containers.items():
        try:
            td._kd_engine._kd_check_state(td, data[key])
            mine = outlined(td._kd_engine.filter_non_tensor_data(td))
            if mine.outline.plain:
                mine.check_writable()
        except KdError as error:
            reason = str(error).partition(" Pass `")[0]  # the remedies are of `load_state_dict`
            return type(error)(
                f"`{key}` cannot take what the checkpoint holds: {reason} Load it into a container "
                "with the batch size and the data that were saved."
            )
    return None
