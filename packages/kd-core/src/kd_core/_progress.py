"""The progress of a long task: shown in a terminal, written to a log, or not shown.

A task has stages, and a stage may have a count. Once it has taken longer than `PATIENCE`, it is
shown on the standard error stream: in a terminal and a notebook as a bar with rate, remaining time
and stage, by rich where that is installed; elsewhere as one line every `LOG_EVERY` seconds. The
first task that is shown has the screen: tasks inside of it are not shown.

Knows clocks and streams; must not know torch or what a task does.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol, TextIO, TypeAlias, TypeVar

from kd_core._errors import InvalidValue

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.progress import Progress, TaskID

T = TypeVar("T")

PATIENCE: Final = 2.0
"""Seconds before a task is shown."""

LOG_EVERY: Final = 10.0
"""Seconds between two lines in a log."""

_REDRAW: Final = 0.2
"""Seconds between two pictures of a bar."""

_NEVER: Final = float("inf")

_UNWRITABLE: Final = (OSError, ValueError)
"""What a stream raises that is closed, whose reader is gone, or that lacks a character: the task
goes on unseen."""

VARIABLE: Final = "KD_PROGRESS"
"""The variable of the environment that says whether tasks are shown."""

_SETTINGS: Final = {"on": 0.0, "1": 0.0, "off": _NEVER, "0": _NEVER}


def setting() -> float:
    """Return after how many seconds the environment has tasks shown."""
    if os.environ.get("RANK", "0") != "0":
        return _NEVER
    return _SETTINGS.get(os.environ.get(VARIABLE, "").lower(), PATIENCE)


_SETTING: Final = setting()  # read once: reading it takes longer than all else of a short task

_SCREEN: Final = threading.Lock()
"""Held by the task that is shown."""

Report: TypeAlias = Callable[[int, int], object]
"""Takes how much is done, and how much there is."""

_REPORT: Final[ContextVar[Report | None]] = ContextVar("report", default=None)
_PATIENCE: Final[ContextVar[float | None]] = ContextVar("patience", default=None)
_CURRENT: Final[ContextVar[Task | None]] = ContextVar("task", default=None)


@contextmanager
def progress(report: Report | None = None, *, quiet: bool = False) -> Iterator[None]:
    """Show how far the long calls in the block are, from their start on, or not at all.

    Without it, calls that take longer than two seconds are shown: in a terminal and a notebook as a
    bar with rate, remaining time and stage, elsewhere as a line every ten seconds. It goes to the
    standard error stream. The variable `KD_PROGRESS` of the environment says `off` or `on` for a
    whole program; processes other than the main one, and ranks other than 0, show nothing.

    Args:
        report: takes what is done and how much there is, for each pass over the data: the bytes of
            saves, full loads, checks and rewrites, the parts of `map`; `None`: show it.
        quiet: show nothing.

    Raises:
        InvalidValue: if `quiet` is combined with `report`.

    Example:
        >>> from kd_core import TensorDict, store
        >>> with store.progress(lambda done, total: print(f"{done} of {total}")):
        ...     _ = TensorDict({"a": [1, 2]}, [2]).save("progress.kd")
        16 of 16
    """
    if quiet and report is not None:
        raise InvalidValue("`quiet` cannot be combined with `report`. Leave one out.")
    told = _REPORT.set(report)
    patience = _PATIENCE.set(_NEVER if quiet or report is not None else 0.0)
    try:
        yield
    finally:
        _PATIENCE.reset(patience)
        _REPORT.reset(told)


class Task:
    """A long task with stages and counts, as a context manager.

    Args:
        name: what is done, such as "save `td.kd`".
        stages: how many stages there are; 0: that is not known.
        watched: look at the clock in a thread, since the task does not count.
        at_once: show it from its start on, unless it is to be quiet.

    Example:
        >>> from kd_core.extending import Task
        >>> with Task("read `rows`", stages=1) as task:
        ...     task.begin("lines", total=2)
        ...     for _ in range(2):
        ...         task.advance()
    """

    __slots__ = (
        "_begun",
        "_due",
        "_ended",
        "_guard",
        "_patience",
        "_report",
        "_shown",
        "_stage_begun",
        "_tick",
        "_token",
        "_watch",
        "at",
        "done",
        "name",
        "stage",
        "stages",
        "total",
        "unit",
    )

    def __init__(
        self, name: str, *, stages: int = 0, watched: bool = False, at_once: bool = False
    ) -> None:
        self.name = name
        self.stages = stages
        self.at = 0
        self.stage = ""
        self.done = 0
        self.total = 0
        self.unit = ""
        self._shown: _Shown | None = None
        self._watch: threading.Thread | None = None
        self._report = _REPORT.get()
        self._begun = self._stage_begun = time.monotonic()
        patience = _PATIENCE.get()
        if patience is None:
            patience = _SETTING
        if at_once and patience != _NEVER:
            patience = 0.0
        self._patience = patience
        self._due = self._begun + patience
        self._guard = threading.Lock()
        self._ended = False
        if watched and self._due != _NEVER:
            self._tick = threading.Event()
            # What a task runs may redirect the stream: the bar goes where it is now.
            self._watch = threading.Thread(target=self._look, args=(sys.stderr,), daemon=True)
            self._watch.start()

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _CURRENT.reset(self._token)
        self.close()

    def close(self) -> None:
        """End the task: what shows it is removed."""
        with self._guard:
            self._ended = True
            if self._shown is not None:
                with suppress(*_UNWRITABLE):
                    self._shown.close(self)
                self._shown = None
                _SCREEN.release()
        if self._watch is not None:
            self._tick.set()
            self._watch.join()

    def begin(self, stage: str, total: int = 0, unit: str = "") -> None:
        """Begin a stage; those before it are done.

        Args:
            stage: what is done.
            total: how much there is to do; 0: that is not known.
            unit: what is counted, such as "rows"; "bytes" are shown as KB, MB and so on.
        """
        self.at += 1
        self.stage, self.done, self.total, self.unit = stage, 0, total, unit
        self._stage_begun = time.monotonic()
        self._poll(self._stage_begun)

    def advance(self, count: int = 1) -> None:
        """Note that more of the stage is done."""
        self.done += count
        if self._report is not None:
            self._report(self.done, self.total)
        now = time.monotonic()
        if now >= self._due:
            self._poll(now)

    def _poll(self, now: float, stream: TextIO | None = None) -> None:
        if now >= self._due:
            if multiprocessing.parent_process() is not None:
                self._due = _NEVER
                return
            with self._guard:
                if not self._ended:
                    self._show(now, stream)

    def _show(self, now: float, stream: TextIO | None) -> None:
        try:
            self._draw(now, stream or sys.stderr)
        except _UNWRITABLE:
            self._due = _NEVER

    def _draw(self, now: float, stream: TextIO | None) -> None:
        if stream is None:  # a program without a console, such as one of pythonw
            self._due = _NEVER
            return
        if self._shown is None:
            looks = _is_looked_at(stream)
            if self._patience and not looks and now < self._begun + LOG_EVERY:
                self._due = self._begun + LOG_EVERY
                return
            if not _SCREEN.acquire(blocking=False):
                self._due = now + PATIENCE
                return
            try:
                self._shown = _shown_on(stream) if looks else _Lines(stream)
            except BaseException:
                _SCREEN.release()
                raise
        self._shown.draw(self)
        self._due = now + self._shown.every

    def _look(self, stream: TextIO) -> None:
        while not self._ended:
            self._poll(time.monotonic(), stream)
            self._tick.wait(max(min(self._due - time.monotonic(), PATIENCE), 0.01))

    def share(self) -> float | None:
        """Return the share of the task that is done, as far as that is known."""
        inside = self.done / self.total if self.total else 0.0
        if self.stages:
            return min((max(self.at - 1, 0) + inside) / self.stages, 1.0)
        return min(inside, 1.0) if self.total else None

    def title(self) -> str:
        """Return what is done, and in which stage."""
        # There are more stages than expected where options ask for them.
        at = f" {self.at} of {self.stages}" if 0 < self.at <= self.stages else ""
        return f"{self.name}:{at} {self.stage}".rstrip(": ")

    def spent(self) -> str:
        """Return the time so far."""
        return duration(time.monotonic() - self._begun)

    def figures(self) -> str:
        """Return counts, rate, and the time that remains, or the time so far."""
        if not self.total:
            return f"{self.spent()} so far"
        told = [f"{amount(self.done, self.unit)} of {amount(self.total, self.unit)}"]
        if self.unit != "bytes":
            told = [f"{self.done:,} of {amount(self.total, self.unit)}"]
        if not self.done:
            return f"{told[0]}, {self.spent()} so far"
        rate = self.done / max(time.monotonic() - self._stage_begun, 1e-9)
        told.append(f"{amount(rate, self.unit if self.unit == 'bytes' else '')}/s")
        left = (self.total - self.done) / rate
        return ", ".join([*told, f"{duration(left)} left"])


def current() -> Task | None:
    """Return the task that runs, if there is one."""
    return _CURRENT.get()


def begin(stage: str, total: int = 0, unit: str = "") -> None:
    """Begin a stage of the task that runs, if there is one."""
    task = _CURRENT.get()
    if task is not None:
        task.begin(stage, total, unit)


def advance(count: int = 1) -> None:
    """Note that more of the stage of the task that runs is done, if there is one."""
    task = _CURRENT.get()
    if task is not None:
        task.advance(count)


def counted(
    items: Iterable[T], name: str, total: int, unit: str = "", *, at_once: bool = False
) -> Generator[T, None, None]:
    """Yield items, and show as a task how many were taken, each when the next is asked for."""
    task = Task(name, at_once=at_once)  # not the current one: a generator is left at any time
    try:
        task.begin("", total, unit)
        for item in items:
            yield item
            task.advance()
    finally:
        task.close()


def amount(count: float, unit: str) -> str:
    """Return a count with its unit.

    >>> amount(3 << 20, "bytes"), amount(12, "rows"), amount(2.5, "")
    ('3.15 MB', '12 rows', '2.5')
    """
    if unit == "bytes":
        for name in ("B", "KB", "MB", "GB"):
            if count < 1000:
                return f"{count:.3g} {name}" if count < 100 else f"{count:.0f} {name}"
            count /= 1000
        return f"{count:.1f} TB"
    number = f"{count:,.0f}" if count == int(count) or count >= 100 else f"{count:.1f}"
    return f"{number} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(3.2), duration(83), duration(7260)
    ('3 s', '1 min 23 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


# Where a task is shown.


class _Shown(Protocol):
    """What shows a task."""

    every: float
    """Seconds between two pictures."""

    def draw(self, task: Task) -> None: ...

    def close(self, task: Task) -> None: ...


def _is_notebook(stream: TextIO) -> bool:
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def _is_looked_at(stream: TextIO) -> bool:
    """Return whether a stream is a terminal or a notebook, not a log."""
    asks = getattr(stream, "isatty", None)  # what takes the place of a stream may only write
    return _is_notebook(stream) or (asks is not None and asks())


def _shown_on(stream: TextIO) -> _Shown:
    """Return what shows a task on a terminal or in a notebook."""
    if importlib.util.find_spec("rich") is None:
        return _Line(stream)
    return _Bar(stream, _is_notebook(stream))


class _Lines:
    """One line every few seconds, for a log."""

    every = LOG_EVERY

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, task: Task) -> None:
        print(f"kd: {task.title()}, {task.figures()}", file=self._stream, flush=True)

    def close(self, task: Task) -> None:
        """Print how long it took."""
        print(f"kd: {task.name}: ended after {task.spent()}", file=self._stream, flush=True)


class _Line:
    """A line that is written again and again, where rich is not installed."""

    every = _REDRAW

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._width = 0

    def draw(self, task: Task) -> None:
        share = task.share()
        bar = "" if share is None else f"|{'#' * int(20 * share):<20}| "
        text = f"{bar}{task.title()}, {task.figures()}"
        self._write(f"{text:<{self._width}}")
        self._width = len(text)

    def close(self, task: Task) -> None:
        """Remove the line."""
        self._write(" " * self._width + "\r")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text}")
        self._stream.flush()


class _Bar:
    """A bar of rich, which is removed at the end."""

    every = _REDRAW

    def __init__(self, stream: TextIO, notebook: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        class Bearing(Console):
            """A console that does not end the program when its reader has gone."""

            def on_broken_pipe(self) -> None:
                raise BrokenPipeError

        plain = TextColumn("{task.fields[figures]}", markup=False)
        self._bar: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            plain,
            console=Bearing(file=None if notebook else stream, stderr=notebook),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._row: TaskID = self._bar.add_task("", total=None, figures="")
        self._bar.start()

    def draw(self, task: Task) -> None:
        share = task.share()
        self._bar.update(
            self._row,
            description=task.title(),
            total=None if share is None else 1.0,
            completed=share or 0.0,
            figures=task.figures(),
        )

    def close(self, task: Task) -> None:
        """Remove the bar."""
        self._bar.stop()
