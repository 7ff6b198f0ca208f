"""Functions of two leaves that take each row from one of them.

A node that holds one value per row follows every function that chooses rows. Another function of
two leaves, such as a sum, has no meaning for it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Selection:
    """A function of two leaves that takes each row from one of them."""

    __slots__ = ("_choose",)

    def __init__(self, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._choose = choose

    def __call__(self, leaf: Tensor, new: Tensor) -> Tensor:
        return self._choose(leaf, new)
