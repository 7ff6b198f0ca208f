"""Containers in a `DataLoader`: the default collate function stacks them.

If the data set is itself a container, `__getitems__` returns a whole batch at once, which is not
stacked again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.data._utils.collate import default_collate_fn_map

from kd_core._base import TensorDictBase
from kd_core._combine.stacking import stack


def _collate(
    batch: TensorDictBase | Sequence[TensorDictBase], *, collate_fn_map: object = None
) -> TensorDictBase:
    return batch if isinstance(batch, TensorDictBase) else stack(batch)


default_collate_fn_map[TensorDictBase] = _collate
