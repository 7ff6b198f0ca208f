"""Parameters and buffers of several lazy modules, stacked before their shapes are known.

A lazy module of torch gives its parameters a shape when it is first called. Stacked ones get it
when `vmap` first calls a module with them: the module draws the values of all rows at once, which
takes `randomness="same"`, and reads its own row from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from kd_core._errors import InvalidArgument
from kd_core._torch_private import add_batch_dim, make_subclass

if TYPE_CHECKING:
    from typing import Self


class StackedUninitialized(Tensor):
    """A tensor for each of several lazy modules.

    Attributes:
        _kd_rows: how many rows there are.
        _kd_level: the level of the `vmap` that maps the rows, once one does.
    """

    _kd_rows: int
    _kd_level: int | None

    def __new__(
        cls,
        rows: int,
        requires_grad: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Build one without values."""
        # `vmap` reads the number of rows.
        data = torch.empty(rows, 0, device=device, dtype=dtype)
        made: Self = make_subclass(cls, data, requires_grad)
        made._kd_rows, made._kd_level = rows, None
        return made

    @property
    def batch_size(self) -> torch.Size:
        """The dimension that is known, that of the rows."""
        return torch.Size([self._kd_rows])

    def dim(self) -> int:
        """Return how many dimensions there are without values."""
        return 2

    def stand_in(self) -> Tensor:
        """Return a tensor that has the rows, and nothing in them."""
        return torch.empty(self._kd_rows, 0)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        data = self.data
        made = type(self)(self._kd_rows, self.requires_grad, data.device, data.dtype)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        data = self.data
        return type(self), (self._kd_rows, self.requires_grad, data.device, data.dtype)


class StackedUninitializedParameter(StackedUninitialized, UninitializedParameter):
    """A parameter for each of several lazy modules."""

    def materialize(
        self,
        shape: tuple[int, ...],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Become a parameter with this shape in each row."""
        super().materialize((self._kd_rows, *shape), device, dtype)
        del self._kd_rows, self._kd_level


class StackedUninitializedBuffer(StackedUninitialized, UninitializedBuffer):
    """A buffer for each of several lazy modules."""

    persistent = True
    _is_buffer = True

    def materialize(
        self,
        shape: tuple[int, ...],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Become a buffer with this shape in each row."""
        super().materialize((self._kd_rows, *shape), device, dtype)
        del self._kd_rows, self._kd_level


KINDS: Final = frozenset({StackedUninitializedParameter, StackedUninitializedBuffer})


def stacked_uninitialized(column: Sequence[Tensor]) -> StackedUninitialized:
    """Stack tensors of lazy modules.

    Raises:
        InvalidArgument: if some of the modules have been called, whose values would be lost.
    """
    if not all(map(is_lazy, column)):
        raise InvalidArgument(
            "the modules must all be called once or all be new, got parameters with and without "
            "a shape. Call each lazy module once."
        )
    first = column[0]
    is_parameter = isinstance(first, nn.Parameter)
    kind = StackedUninitializedParameter if is_parameter else StackedUninitializedBuffer
    return kind(len(column), first.requires_grad, first.device, first.dtype)


def read_by_row(
    module: nn.Module, tensors: Mapping[str, StackedUninitialized]
) -> Callable[[], None]:
    """Let a module inside `vmap` read its row of tensors, once it has given them a shape.

    Args:
        module: The module, which has them as its parameters and buffers.
        tensors: The tensors by name, mapped by `vmap`.

    Returns:
        A function that takes this back, if the module was not called.
    """
    levels = {name: tensor._kd_level for name, tensor in tensors.items()}

    def take(module: nn.Module, values: object) -> None:
        handle.remove()
        for name, level in levels.items():
            held = cast("dict[str, Tensor]", module._parameters)
            if name not in held:
                held = cast("dict[str, Tensor]", module._buffers)
            if not is_lazy(held[name]):
                module.__dict__[name] = add_batch_dim(held.pop(name), 0, level)

    handle = module.register_forward_pre_hook(take)  # after that which gives shapes
    return handle.remove
