"""What torch offers only at the price of importing its compiler, done without."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def assume_constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """Let a compiler call a function while it traces, and take the result for a constant.

    Sets the mark that `torch.compiler.assume_constant_result` sets, which imports the compiler:
    0.9 s. A torch that does not know the mark traces the function instead.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by dynamo
    return function
