"""What long calls and reports print: stages, a bar, tables; and what is silenced meanwhile.

The logger ``kd_export`` gets a record of level INFO for each stage of a long call. One that takes
longer than `PATIENCE` says so again and again, by level WARNING, so that nobody waits without a
sign: where no handler listens, it is printed. A command shows stages as a bar.

What torch and the exporters print while they work is suppressed: errors are explained anyway.

Knows terminals and logging; must not know programs or torch.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import io
import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from kd_export._errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


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


LOGGER = logging.getLogger("kd_export")
PATIENCE = 20.0
"""Seconds between two signs of a stage."""


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Report that a stage begins, and every `PATIENCE` seconds that it still runs.

    Args:
        name: What is done, such as "capture the module".
    """
    LOGGER.info(name)
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
        sign = f"{name}: {time.monotonic() - start:.0f} s so far"
        if LOGGER.hasHandlers():
            LOGGER.warning(sign)
        elif LOGGER.isEnabledFor(logging.WARNING):
            print(f"kd_export: {sign}", file=stream, flush=True)


@contextlib.contextmanager
def bar_of(stages: int) -> Iterator[None]:
    """Show the stages that begin in a block, on stderr where it is a terminal that rich can use.

    Elsewhere a stage that takes long says so by itself.

    Args:
        stages: How many there are.
    """
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    level = LOGGER.level
    with Progress(
        *columns,
        console=Console(file=sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        listener = _Listener(bar, bar.add_task("", total=stages))
        LOGGER.addHandler(listener)
        LOGGER.setLevel(logging.INFO)
        try:
            yield
        finally:
            LOGGER.setLevel(level)
            LOGGER.removeHandler(listener)


class _Listener(logging.Handler):
    """Move a bar on at each stage; that one takes long is seen by the time."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        super().__init__()
        self._bar = bar
        self._task = task
        self._begun = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Show the name of the stage that begins; those before it are done."""
        if record.levelno == logging.INFO:
            self._bar.update(self._task, description=record.getMessage(), completed=self._begun)
            self._begun += 1
