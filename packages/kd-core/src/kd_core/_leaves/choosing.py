"""Functions of two leaves that take each row from one of them.

A node that holds one value per row follows every function that chooses rows. Another function of
two leaves, such as a sum, has no meaning for it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Selection:
    """A function of two leaves that takes each row from one of them.

    Attributes:
        of_member: a function from a stacked dimension and a position in it to the selection among
            the rows of that member; `None`: only stacked leaves can be chosen from.
    """

    __slots__ = ("_choose", "of_member")

    def __init__(
        self,
        choose: Callable[[Tensor, Tensor], Tensor],
        of_member: Callable[[int, int], Selection] | None = None,
    ) -> None:
        self._choose = choose
        self.of_member = of_member

    def __call__(self, leaf: Tensor, new: Tensor) -> Tensor:
        return self._choose(leaf, new)
