"""Containers in a `DataLoader`: the default collate function stacks them.

If the data set is itself a container, `__getitems__` returns a whole batch at once, which is not
stacked again.
"""

from __future__ import annotations

from collections.abc import Sequence

from kd_core._base import TensorDictBase
from kd_core._combine.stacking import stack
from kd_core._torch_private import collate_as


def _collate(
    batch: TensorDictBase | Sequence[TensorDictBase], *, collate_fn_map: object = None
) -> TensorDictBase:
    return batch if isinstance(batch, TensorDictBase) else stack(batch)


collate_as(TensorDictBase, _collate)
