"""Distributions that do not check their values, in one thread alone.

torch keeps the default on a class, for all threads: a thread that computes shapes, or captures a
graph, must not disable the checks of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch.distributions import Distribution


class _Depth(threading.local):
    """How many `values_unchecked` a thread is in."""

    def __init__(self) -> None:
        self.depth = 0


class _CheckedElsewhere:
    """Torch's default while a thread is inside: false there, as before in other threads.

    torch asks for its truth only.
    """

    __slots__ = ("before",)

    def __init__(self, before: bool) -> None:
        self.before = before

    def __bool__(self) -> bool:
        return self.before and not _here.depth

    def __eq__(self, other: object) -> bool:
        """Return whether the truth is `other`: `set_default_validate_args` compares."""
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(self.before)

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        """Copy and pickle as what it was before: an expanded distribution keeps the default."""
        return bool, (self.before,)


class _Threads:
    """How many threads are inside, and what torch's default is meanwhile."""

    def __init__(self) -> None:
        self.count = 0
        self.default = _CheckedElsewhere(True)


_here: Final = _Depth()
_threads: Final = _Threads()
_lock: Final = threading.Lock()


@contextmanager
def values_unchecked() -> Iterator[None]:
    """Disable torch's default of checking the values of distributions in this thread.

    Distributions built inside do not read their parameters, so they can be built where values
    cannot be read: in an export, under `vmap`, of fake tensors. Other threads keep the default, as
    does a distribution that was given ``validate_args=True``.

    Example:
        >>> import torch
        >>> with values_unchecked():
        ...     wrong = torch.distributions.Normal(0.0, -1.0)
        >>> wrong.scale
        tensor(-1.)
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    with _lock:
        if not _threads.count:
            _threads.default = _CheckedElsewhere(bool(Distribution._validate_args))
            Distribution._validate_args = _threads.default  # type: ignore[assignment]  # a truth
        _threads.count += 1
    _here.depth += 1


def _leave() -> None:
    """Undo `_enter`: the last one that leaves restores torch's default, unless it was set anew."""
    _here.depth -= 1
    with _lock:
        _threads.count -= 1
        if not _threads.count and vars(Distribution)["_validate_args"] is _threads.default:
            Distribution._validate_args = _threads.default.before
