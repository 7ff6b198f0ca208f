"""What differs between the supported versions of torch, by feature test, as long as they are.

And what torch offers only at the price of importing its compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def _clone_each(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    return [leaf.clone() for leaf in leaves]


clone_all: Final[Callable[[list[Tensor]], Sequence[Tensor]]] = getattr(
    torch, "_foreach_clone", _clone_each
)
"""Clone all leaves at once, by a kernel that newer versions have."""


CONSTANT_OBJECTS: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether dynamo compares what belongs to an object that it took for a constant.

Before, `!=` of such a tuple is an internal error. Only the compiler shows it, so by number.
"""


def assume_constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """Let a compiler call a function while it traces, and take the result for a constant.

    Sets the mark that `torch.compiler.assume_constant_result` sets, which imports the compiler:
    0.9 s. A torch that does not know the mark traces the function instead.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by dynamo
    return function
