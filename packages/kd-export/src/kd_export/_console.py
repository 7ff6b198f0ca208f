"""What long calls and reports print: stages, a bar, tables; and what is silenced meanwhile.

The logger ``kd_export`` gets a record of level INFO for each stage of a long call. How far a call
is, is shown as kd_core shows all long tasks. Where kd_core is not imported, as on a robot without
torch, calls are short and only logged.

What torch and the exporters print while they work is suppressed: errors are explained anyway.

Knows terminals and logging; must not know programs or torch.
"""

from __future__ import annotations

import contextlib
import html
import io
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

from kd_export._errors import printable

if TYPE_CHECKING:
    from kd_core.extending import Task


Row = tuple[str, ...]


def plain_table(header: Row, rows: Sequence[Row]) -> str:
    """Align a table's cells in columns; what a terminal would obey is escaped.

    >>> print(plain_table(("name", "size"), [("x", "3"), ("longer", "4")]))
    name    size
    x       3
    longer  4
    """
    lines = [[*map(printable, line)] for line in ([header] if any(header) else []) + [*rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    aligned = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in aligned)


def html_table(header: Row, rows: Sequence[Row]) -> str:
    """Write a table as HTML.

    >>> html_table(("name",), [("<x>",)])
    '<table><tr><th>name</th></tr><tr><td>&lt;x&gt;</td></tr></table>'
    """

    def line(cells: Row, tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    head = line(header, "th") if any(header) else ""
    return f"<table>{head}{''.join(line(row, 'td') for row in rows)}</table>"


@contextlib.contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Suppress warnings, and what loggers say."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def muted(*names: str) -> Iterator[None]:
    """Suppress, beside that, what is printed."""
    with silenced(*names), contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def muted_tool() -> Iterator[None]:
    """Suppress all that a tool, and what it imports, says by warnings, logs and print."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with muted():
            yield
    finally:
        logging.disable(level)


LOGGER = logging.getLogger("kd_export")


PATIENCE = 10.0
"""Seconds between two signs of a stage where kd_core is not imported."""

_CURRENT: ContextVar[Task | None] = ContextVar("kd_export task", default=None)


@contextlib.contextmanager
def task(name: str, stages: int = 0) -> Iterator[None]:
    """Show how far a call is, if it takes long; a call inside of another is part of that.

    Args:
        name: What is done, such as "save `policy.onnx`".
        stages: How many stages it has; 0 if that is not known.
    """
    if not _has_core() or _CURRENT.get() is not None:
        yield
        return
    from kd_core.extending import Task

    with Task(name, stages=stages, watched=True) as made:
        token = _CURRENT.set(made)
        try:
            yield
        finally:
            _CURRENT.reset(token)


@contextlib.contextmanager
def stage(name: str, total: int = 0) -> Iterator[None]:
    """Report that a stage of a call begins.

    Args:
        name: What is done, such as "capture the module".
        total: How many times `advance` will be called; 0 if that is not known.
    """
    LOGGER.info(name)
    with task(name) if _has_core() else _signs(name):
        current = _CURRENT.get()
        if current is not None:
            current.begin("" if current.name == name else name, total, "cases")
        yield


def _has_core() -> bool:
    """Decide whether kd_core is imported; an entry of ``None`` keeps it from being imported."""
    return sys.modules.get("kd_core") is not None


def advance() -> None:
    """Report that one more case of the stage is done."""
    current = _CURRENT.get()
    if current is not None:
        current.advance()


@contextlib.contextmanager
def _signs(name: str) -> Iterator[None]:
    """Say every `PATIENCE` seconds that a stage still runs."""
    if os.environ.get("KD_PROGRESS", "").lower() in ("off", "0"):
        yield
        return
    finished = threading.Event()
    # Compilers are kept quiet by a redirection: signs go where stderr is before the stage.
    watch = threading.Thread(target=_remind, args=(name, finished, sys.stderr), daemon=True)
    watch.start()
    try:
        yield
    finally:
        finished.set()
        watch.join()


def _remind(name: str, finished: threading.Event, stream: TextIO) -> None:
    start = time.monotonic()
    while not finished.wait(PATIENCE):
        print(f"kd: {name}: {time.monotonic() - start:.0f} s so far", file=stream, flush=True)
