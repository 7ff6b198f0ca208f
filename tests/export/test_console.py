import contextlib
import io
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.export.models import case

import kd_export
from kd_core import AlreadyExists, store
from kd_export import _console
from kd_export._console import stage


class Told(io.StringIO):
    """Remember that something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = threading.Event()

    def flush(self) -> None:
        self.flushed.set()


def test_a_long_stage_gives_signs_past_what_keeps_it_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_console, "PATIENCE", 0.001)
    monkeypatch.delitem(sys.modules, "kd_core")  # as on a robot without torch
    told = Told()
    with (
        contextlib.redirect_stderr(told),
        stage("compile"),
        contextlib.redirect_stderr(io.StringIO()) as hidden,
    ):
        assert told.flushed.wait(10)
    assert told.getvalue().startswith("kd: compile: 0 s so far\n")
    assert hidden.getvalue() == ""


@pytest.mark.parametrize("quiet", [True, False])
def test_a_save_shows_its_stages(quiet: bool, tmp_path: Path) -> None:
    model, told = case("nested"), io.StringIO()
    with contextlib.redirect_stderr(told), store.progress(quiet=quiet):
        kd_export.save(model.module, tmp_path / "m.pt2", model.example)
    lines = [line for line in told.getvalue().splitlines() if line.startswith("kd: ")]
    if quiet:
        assert not lines
    else:
        assert lines[0].startswith("kd: save `m.pt2`")
        assert lines[-1].startswith("kd: save `m.pt2`: ended after ")


def test_a_file_that_exists_is_replaced_or_refused(tmp_path: Path) -> None:
    model, path = case("nested"), tmp_path / "m.pt2"
    kd_export.save(model.module, path, model.example, exist_ok=False)
    content = path.read_bytes()
    program = kd_export.export(model.module, model.example)
    writes: list[Callable[[], object]] = [
        lambda: kd_export.save(model.module, path, model.example, exist_ok=False),
        lambda: program.save(path, exist_ok=False),
        lambda: kd_export.convert(path, path, trusted=True, exist_ok=False),
    ]
    for write in writes:
        with pytest.raises(AlreadyExists, match="exist_ok"):
            write()
    assert path.read_bytes() == content
    assert program.save(path).ok


def test_stages_are_logged_in_order(tmp_path: Path, logged: list[logging.LogRecord]) -> None:
    model = case("nested")
    kd_export.save(model.module, tmp_path / "m.pt2", model.example)
    kd_export.verify(tmp_path / "m.pt2", trusted=True)
    save = ["capture the module", "run the module", "write `m.pt2`", "load `m.pt2`", "run `m.pt2`"]
    told = [record.getMessage() for record in logged if record.name.startswith("kd_export")]
    assert told == [*save, "load `m.pt2`", "run `m.pt2`"]
