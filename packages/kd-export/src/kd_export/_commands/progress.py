"""The stages of a command as a bar on a terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kd_export._stages import LOGGER

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


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
