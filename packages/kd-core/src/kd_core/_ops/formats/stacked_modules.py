"""The parameters of several modules as one container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from kd_core._errors import InvalidValue, KeySetMismatch
from kd_core._ops.formats.building import build, stack_rows
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from kd_core._nodes.entry import Node


class StackedModules(AbstractContainer):
    """The method that stacks the parameters of modules."""

    __slots__ = ()

    @classmethod
    def from_modules(
        cls,
        *modules: nn.Module,
        as_module: bool = False,
        lock: bool = False,
        use_state_dict: bool = False,
        lazy_stack: bool = False,
        expand_identical: bool = False,
    ) -> Self:
        """Stack the parameters and buffers of modules of the same structure.

        Args:
            *modules: the modules; they are not changed.
            as_module: return a `kd_nn.TensorDictParams`, which is an `nn.Module`; needs kd-nn.
            lock: lock the container.
            use_state_dict: take the entries of `state_dict()`, with the hooks of the modules.
            lazy_stack: keep the tensors of the modules as members, instead of stacking copies that
                are leaves of autograd.
            expand_identical: expand a tensor that all modules share, instead of copying it.

        Raises:
            KeySetMismatch: if the modules have different structures.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> nets = [torch.nn.Linear(2, 1) for _ in range(3)]
            >>> TensorDict.from_modules(*nets)["weight"].shape
            torch.Size([3, 1, 2])
        """
        if not modules:
            raise InvalidValue("`modules` must have at least one module, got none.")
        take = cast("Callable[..., Self]", getattr(cls, "from_module"))  # noqa: B009  # of dense kinds
        rows = [take(module, use_state_dict=use_state_dict) for module in modules]
        if lazy_stack:
            made = stack_rows(rows, True)
        else:
            entries = _stacked([row._entries for row in rows], (), expand_identical)
            made = build(cls, entries, (len(rows),), None)
        if as_module:
            from kd_core._ops.calls.module_state import as_module as module_of

            made = cast("Self", module_of(cast("Node", made)))
        return made.lock_() if lock else made  # type: ignore[attr-defined]  # of a concern


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
            inner = [cast("AbstractContainer", node)._entries for node in column]
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
