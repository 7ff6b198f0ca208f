"""How far long saves, loads and checks are: reported on request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeAlias

Report: TypeAlias = Callable[[int, int], object]
"""Takes the bytes that are written or read, and how many there are."""

STEP: Final = 4 << 20
"""Bytes between two reports, at most."""

_REPORT: Final[ContextVar[Report | None]] = ContextVar("report", default=None)


@contextmanager
def progress(report: Report | None = None) -> Iterator[None]:
    """Show how far saves, full loads, checks and rewrites in the block are.

    Args:
        report: takes the bytes that are written or read and how many there are, for each pass over
            the data; `None`: a line on the standard error stream.

    Example:
        >>> from kd_core import TensorDict, store
        >>> with store.progress(lambda done, total: print(f"{done} of {total}")):
        ...     _ = TensorDict({"a": [1, 2]}, [2]).save("progress.kd")
        16 of 16
    """
    token = _REPORT.set(report or _Line())
    try:
        yield
    finally:
        _REPORT.reset(token)


def reported(pieces: Iterable[memoryview | bytes], total: int) -> Iterator[memoryview | bytes]:
    """Yield bytes, and report how many of them were taken."""
    report = _REPORT.get()
    if report is None:
        yield from pieces
        return
    done = 0
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), STEP):
            part = view[start : start + STEP]
            yield part
            done += len(part)
            report(done, total)


class _Line:
    """A line that shows a percentage."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // total
        if percent != self._shown:
            self._shown = percent
            end = "\n" if done == total else ""
            sys.stderr.write(f"\r{percent:3} % of {total:,} bytes{end}")
            sys.stderr.flush()
