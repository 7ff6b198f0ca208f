"""A size that an axis has, or that follows from one: `n`, `n + 1`, `2*n - 3`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TEXT = re.compile(r"(?:([1-9]\d{0,8}) ?\* ?)?([^\W\d]\w{0,199})(?: ?([+-]) ?(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class LinearSize:
    """A multiple of an axis plus a number.

    Attributes:
        axis: The name of the axis.
        factor: What its size is multiplied by, at least 1.
        offset: What is added.
    """

    axis: str
    factor: int = 1
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> LinearSize | None:
        """Read a size; ``None`` if it is something else.

        >>> LinearSize.parse("2*n+1"), LinearSize.parse("n*m")
        (LinearSize(axis='n', factor=2, offset=1), None)
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        factor, axis, sign, offset = found.groups()
        return cls(axis, int(factor or 1), int(f"{sign or ''}{offset or 0}"))

    def __str__(self) -> str:
        head = self.axis if self.factor == 1 else f"{self.factor}*{self.axis}"
        return head if not self.offset else f"{head} {'-+'[self.offset > 0]} {abs(self.offset)}"

    def at(self, size: int) -> int:
        """Compute the size where the axis has another.

        >>> LinearSize("n", 2, 1).at(3)
        7
        """
        return self.factor * size + self.offset

    def axis_at(self, size: int) -> int | None:
        """Compute the size of the axis from this size; ``None`` if there is none.

        >>> LinearSize("n", 2, 1).axis_at(7), LinearSize("n", 2, 1).axis_at(8)
        (3, None)
        """
        whole, rest = divmod(size - self.offset, self.factor)
        return whole if rest == 0 and whole >= 0 else None

    def solve(self, other: LinearSize) -> LinearSize | None:
        """Compute the axis from that of an equal size; ``None`` if that is not a whole multiple.

        >>> print(LinearSize("s", 1, 1).solve(LinearSize("n", 2)))
        2*n - 1
        """
        factor, rest = divmod(other.factor, self.factor)
        offset, left = divmod(other.offset - self.offset, self.factor)
        return None if rest or left else LinearSize(other.axis, factor, offset)


def known_size(size: int | str, sizes: Mapping[str, int]) -> int | None:
    """Compute a size of a shape from the sizes of the axes; ``None`` if they do not tell it.

    >>> known_size("2*n", {"n": 3}), known_size(5, {}), known_size("n*m", {"n": 3})
    (6, 5, None)
    """
    if isinstance(size, int):
        return size
    linear = LinearSize.parse(size)
    return None if linear is None or linear.axis not in sizes else linear.at(sizes[linear.axis])


def axes_of(shape: Sequence[int | str]) -> set[str]:
    """Collect the axes that a shape names.

    >>> sorted(axes_of(("n", 3, "2*m + 1")))
    ['m', 'n']
    """
    parsed = (LinearSize.parse(size) for size in shape if isinstance(size, str))
    return {linear.axis for linear in parsed if linear is not None}
