"""Containers in training loops: in a `DataLoader` and in `DistributedDataParallel`.

The default collate function stacks them. If the data set is itself a container, `__getitems__`
returns a whole batch at once, which is not stacked again.

With `find_unused_parameters=True`, `DistributedDataParallel` follows the graph back from the
tensors in what a module returns. It looks into lists, tuples, dicts and dataclasses and lets no
other type be registered, so its function is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.nn.parallel import distributed
from torch.utils.data._utils.collate import default_collate_fn_map

from kd_core._base import TensorDictBase
from kd_core._combine.stacking import stack
from kd_core._protocol.primitives import AbstractContainer


def _collate(
    batch: TensorDictBase | Sequence[TensorDictBase], *, collate_fn_map: object = None
) -> TensorDictBase:
    return batch if isinstance(batch, TensorDictBase) else stack(batch)


default_collate_fn_map[TensorDictBase] = _collate


_find_others: Callable[[object], Iterable[Tensor]] = distributed._find_tensors


def _find_tensors(found: object) -> Iterable[Tensor]:
    if not isinstance(found, AbstractContainer):
        return _find_others(found)
    leaves: list[Tensor] = []
    found._collect(leaves)
    return leaves


distributed._find_tensors = _find_tensors
