"""A long task is shown where somebody looks, said in a log, and costs nothing when it is not."""

import importlib.util
import io
from contextlib import redirect_stderr

import pytest

from kd_core import InvalidValue, TensorDict, store
from kd_core import _progress as progress
from kd_core._progress import Task, amount, duration


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return Screen()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide rich."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each step from the start on."""
    monkeypatch.setattr(progress, "_SETTING", 0.0)
    for shown in (progress._Lines, progress._Line, progress._Bar):
        monkeypatch.setattr(shown, "every", 0.0)


def run(stream: io.StringIO, watched: bool = False) -> None:
    with redirect_stderr(stream), Task("save `x`", stages=2, watched=watched) as task:
        task.begin("write", 400, "bytes")
        for _ in range(4):
            task.advance(100)
        task.begin("flush")


@pytest.mark.usefixtures("plain", "impatient")
def test_a_terminal_without_rich_gets_a_line_that_is_removed(screen: Screen) -> None:
    run(screen)
    *_, counted, last = [line.strip() for line in screen.getvalue().split("\r") if line.strip()]
    assert counted.startswith("|##########          | save `x`: 1 of 2 write, 400 B of 400 B, ")
    assert counted.endswith("B/s, 0 s left")
    assert last == "|##########          | save `x`: 2 of 2 flush, 0 s so far"
    assert screen.getvalue().endswith(" \r")


@pytest.mark.usefixtures("impatient")
def test_a_terminal_with_rich_gets_a_bar(screen: Screen) -> None:
    pytest.importorskip("rich")
    run(screen, watched=True)
    assert "save `x`: 2 of 2 flush" in screen.getvalue()


@pytest.mark.usefixtures("impatient")
def test_a_log_gets_lines_and_the_end() -> None:
    log = io.StringIO()
    run(log, watched=True)
    lines = log.getvalue().splitlines()
    assert any(line.startswith("kd: save `x`: 1 of 2 write, ") for line in lines)
    assert "kd: save `x`: 2 of 2 flush, 0 s so far" in lines
    assert lines[-1] == "kd: save `x`: ended after 0 s"


class Gone(io.StringIO):
    """A pipe whose reader is gone."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError


class Hung(Gone):
    """A terminal that was closed."""

    def isatty(self) -> bool:
        return True


class Tee:
    """What a program may put in the place of the stream: it only writes."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    "stream",
    [None, closed(), Gone(), Hung(), io.TextIOWrapper(io.BytesIO(), "ascii")],
    ids=["no console", "closed", "gone", "hung", "ascii"],
)
def test_a_stream_that_takes_nothing_does_not_end_the_task(
    stream: io.StringIO | None, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with Task("save `ä`", watched=watched) as task:
        task.begin("wörte", 2)
        task.advance()
    assert task.done == 1
    assert progress._SCREEN.acquire(blocking=False)
    progress._SCREEN.release()


@pytest.mark.usefixtures("impatient")
def test_a_stream_that_only_writes_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", tee := Tee())
    with Task("save `x`") as task:
        task.begin("write", 2)
    assert tee.text.splitlines()[-1] == "kd: save `x`: ended after 0 s"


@pytest.mark.usefixtures("impatient")
def test_nothing_is_shown_when_quiet(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.progress(quiet=True):
        run(screen, watched=True)
    monkeypatch.setenv(progress.VARIABLE, "off")
    monkeypatch.setattr(progress, "_SETTING", progress.setting())
    run(screen, watched=True)
    with redirect_stderr(screen):
        list(progress.counted(range(3), "map", 3, at_once=True))
    monkeypatch.setenv(progress.VARIABLE, "on")
    assert progress.setting() == 0.0
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(progress, "_SETTING", progress.setting())
    run(screen)
    assert screen.getvalue() == ""


def test_short_tasks_are_not_shown(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SETTING", progress.PATIENCE)
    run(screen, watched=True)
    with redirect_stderr(screen):
        TensorDict({"a": [1, 2]}, [2]).map(lambda part: part, chunksize=1)
    assert screen.getvalue() == ""


@pytest.mark.usefixtures("plain", "impatient")
def test_a_task_inside_of_one_that_is_shown_is_not(screen: Screen) -> None:
    inner = Screen()
    with redirect_stderr(screen), store.progress(), Task("outside") as outside:
        outside.begin("steps", 3)
        run(inner)
        outside.advance()
    assert inner.getvalue() == ""
    assert "1 of 3" in screen.getvalue()
    run(screen)
    assert "save" in screen.getvalue()  # the screen is free again


@pytest.mark.usefixtures("plain", "impatient")
def test_an_error_frees_the_screen(screen: Screen) -> None:
    with pytest.raises(ZeroDivisionError), store.progress(), Task("outside") as outside:
        outside.begin(f"{1 / 0}")
    parts = progress.counted(range(3), "map", 3, at_once=True)
    next(parts)
    parts.close()  # a generator is left at any time
    run(screen)
    assert "save" in screen.getvalue()


def test_map_reports_its_parts() -> None:
    seen = list[tuple[int, int]]()
    with store.progress(lambda done, total: seen.append((done, total))):
        TensorDict({"a": [1, 2]}, [2]).map(lambda part: part, chunksize=1)
    assert seen == [(1, 2), (2, 2)]
    with pytest.raises(InvalidValue, match="quiet"), store.progress(print, quiet=True):
        pass


def test_amounts_and_times_in_words() -> None:
    assert [amount(count, "bytes") for count in (12, 1234, 45_600_000, 10**13)] == [
        *("12 B", "1.23 KB", "45.6 MB", "10.0 TB"),
    ]
    assert (amount(1234.5, "rows"), amount(0.25, "")) == ("1,234 rows", "0.2")
    assert [duration(seconds) for seconds in (0.4, 61, 7200)] == ["0 s", "1 min 1 s", "2 h 0 min"]
