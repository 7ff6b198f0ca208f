"""What is read of a checkpoint, where checkpoints of several kinds are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


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
