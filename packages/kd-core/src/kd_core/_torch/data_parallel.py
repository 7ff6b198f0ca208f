"""Containers in `DistributedDataParallel`: it finds the tensors in what a module returns.

With `find_unused_parameters=True` it follows the graph back from them. It looks into lists, tuples,
dicts and dataclasses and lets no other type be registered, so its function is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.nn.parallel import distributed

from kd_core._protocol.primitives import AbstractContainer

_find_others: Callable[[object], Iterable[Tensor]] = distributed._find_tensors


def _find_tensors(found: object) -> Iterable[Tensor]:
    if not isinstance(found, AbstractContainer):
        return _find_others(found)
    leaves: list[Tensor] = []
    found._collect(leaves)
    return leaves


distributed._find_tensors = _find_tensors
