"""`load_checkpoint`: what `torch.distributed.checkpoint` loads, into containers that it fits.

torch writes into the leaves first, and calls `load_state_dict` of a container afterwards. So batch
sizes and non-tensor data are read alone before, and all ranks agree that they fit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from kd_core._distributed.agreement import Proposal, agree
from kd_core._distributed.groups import team_of
from kd_core._distributed.outlines import outlined
from kd_core._errors import KdError
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def load_checkpoint(
    state: MutableMapping[str, object],
    checkpoint_id: str | os.PathLike[str],
    group: ProcessGroup | None,
) -> None:
    """Load a checkpoint, if it fits the containers on all ranks."""
    from torch.distributed.checkpoint.state_dict_loader import load

    containers = {
        key: value
        for key, value in state.items()
        if isinstance(value, AbstractContainer) and not isinstance(value, nn.Module)
    }
    data = {key: _without_tensors(_state_of(td)) for key, td in containers.items()}
    load(data, checkpoint_id=checkpoint_id, process_group=group)
    problem = _problem(containers, data)
    if dist.is_initialized():
        team = team_of(group)
        with team.calling("load_checkpoint"):
            agree(team, Proposal("load_checkpoint", None, problem=problem))
    elif problem is not None:
        raise problem
    load(state, checkpoint_id=checkpoint_id, process_group=group)


def _state_of(td: AbstractContainer) -> object:
    return td.state_dict()  # type: ignore[attr-defined]  # of a concern


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
            td.load_state_dict(data[key], strict=False)  # type: ignore[attr-defined]  # of a concern
            mine = outlined(td.filter_non_tensor_data())  # type: ignore[attr-defined]  # as above
            if mine.outline.plain:
                mine.check_writable()
        except KdError as error:
            reason = str(error).partition(" Pass `")[0]  # the remedies are of `load_state_dict`
            return type(error)(
                f"`{key}` cannot take what the checkpoint holds: {reason} Load it into a container "
                "with the batch size and the data that were saved."
            )
    return None
