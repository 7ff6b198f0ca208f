"""The parameters of several modules as one container."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from kd_core._errors import InvalidValue, KeySetMismatch
from kd_core._ops.formats.building import build, stack_rows
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import TypeVar

    C = TypeVar("C", bound=AbstractContainer)


def stacked_modules(
    cls: type[C],
    modules: Sequence[nn.Module],
    use_state_dict: bool,
    lazy_stack: bool,
    expand_identical: bool,
) -> C:
    """Stack the parameters and buffers of modules of the same structure; see `from_modules`."""
    if not modules:
        raise InvalidValue("`modules` must have at least one module, got none.")
    take = cast("Callable[..., C]", getattr(cls, "from_module"))  # noqa: B009  # of dense kinds
    rows = [take(module, use_state_dict=use_state_dict) for module in modules]
    if lazy_stack:
        return stack_rows(rows, True)
    entries = _stacked([row._kd_entries for row in rows], (), expand_identical)
    return build(cls, entries, (len(rows),), None)


def _stacked(
    levels: list[Mapping[str, object]], path: tuple[str, ...], expand: bool
) -> dict[str, object]:
    """Stack the tensors of modules as leaves of autograd where those of the modules are."""
    first = levels[0]
    for number, level in enumerate(levels):
        if level.keys() != first.keys():
            raise KeySetMismatch(
                f"the modules must have the same structure, got {sorted(first)} in module 0 and "
                f"{sorted(level)} in module {number}{f' below {path}' if path else ''}."
            )
    made: dict[str, object] = {}
    for key in first:
        column = [level[key] for level in levels]
        if not isinstance(column[0], Tensor):
            inner = [cast("AbstractContainer", node)._kd_entries for node in column]
            made[key] = _stacked(cast("list[Mapping[str, object]]", inner), (*path, key), expand)
            continue
        made[key] = _stacked_leaf(cast("list[Tensor]", column), expand)
    return made


def _stacked_leaf(column: list[Tensor], expand: bool) -> Tensor:
    if expand and all(leaf is column[0] for leaf in column):
        return column[0].expand(len(column), *column[0].shape)
    with torch.no_grad():
        stacked = torch.stack(column)
    if all(isinstance(leaf, nn.Parameter) for leaf in column):
        return nn.Parameter(stacked, requires_grad=column[0].requires_grad)
    return stacked.requires_grad_(any(leaf.requires_grad for leaf in column))
