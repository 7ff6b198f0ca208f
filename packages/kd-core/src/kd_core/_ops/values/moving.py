"""Moving a container to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._nodes.entry import is_unbatched
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import TypeVar

    import torch

    from kd_core._nodes.entry import Entry

    W = TypeVar("W", bound=AbstractContainer)


def moved(td: W, device: torch.device, non_blocking: bool) -> W:
    """Return a new container of the leaves on a device; those that are there already are shared."""
    desc = describe(td._desc.batch, device)
    if isinstance(td, Composite):
        return td._by_member(lambda member: moved(member, device, non_blocking))
    entries: dict[str, Entry] = {}
    for key, value in td._entries.items():
        if isinstance(value, Tensor):
            # Asked first: `to` takes 1 us to find out that there is nothing to do.
            there = value.device == device
            entries[key] = value if there else value.to(device, non_blocking=non_blocking)
        elif isinstance(value, AbstractContainer):
            entries[key] = moved(value, device, non_blocking)
        elif is_unbatched(value):
            entries[key] = value._map_each(
                lambda leaf: leaf.to(device, non_blocking=non_blocking)
            )._with_descriptor(desc)
        else:
            entries[key] = value._with_descriptor(describe(value._desc.batch, device))
    return td._like(entries, desc)
