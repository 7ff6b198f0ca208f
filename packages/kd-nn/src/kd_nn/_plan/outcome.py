"""What a plan is, and why it did not run.

Plans are written by other modules of this folder, which are loaded when the first one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kd_nn._plan.invalidation import Dependency


class Outcome:
    """Why a plan did not run."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


BUSY: Final = Outcome("this call must be interpreted")
STALE: Final = Outcome("something has changed")
FREE_PLANS: Final = 20
WAIT: Final = 1000
"""After so many plans a module goes the long way for so many calls before it gets another one."""


def never(*_: object, **__: object) -> Outcome:
    return BUSY


class Plan:
    """The generated functions of one module.

    Attributes:
        container: Runs on a plain `TensorDict`; returns it, or why it did not run.
        tensors: Runs on tensors by position or keyword; returns the outputs, or why not.
        names: The names of its arguments, in order.
        dependency: What the functions depend on, if they look at a flag of their own.
    """

    __slots__ = ("container", "dependency", "names", "tensors")

    def __init__(
        self,
        container: Callable[..., object] = never,
        tensors: Callable[..., object] = never,
        names: tuple[str, ...] = (),
    ) -> None:
        self.container = container
        self.tensors = tensors
        self.names = names
        self.dependency: Dependency | None = None


NO_PLAN: Final = Plan()
