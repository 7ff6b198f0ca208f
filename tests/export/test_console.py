import contextlib
import io
import logging
import threading
from pathlib import Path

import pytest
from tests.export.models import case

import kd_export
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
    monkeypatch.setattr(_console.LOGGER, "propagate", False)
    told = Told()
    with (
        contextlib.redirect_stderr(told),
        stage("compile"),
        contextlib.redirect_stderr(io.StringIO()) as hidden,
    ):
        assert told.flushed.wait(10)
    assert told.getvalue().startswith("kd_export: compile: 0 s so far\n")
    assert hidden.getvalue() == ""


def test_stages_are_logged_in_order(tmp_path: Path, logged: list[logging.LogRecord]) -> None:
    model = case("nested")
    kd_export.save(model.module, tmp_path / "m.pt2", model.example)
    kd_export.verify(tmp_path / "m.pt2", trusted=True)
    save = ["capture the module", "run the module", "write `m.pt2`", "load `m.pt2`", "run `m.pt2`"]
    told = [record.getMessage() for record in logged if record.name.startswith("kd_export")]
    assert told == [*save, "load `m.pt2`", "run `m.pt2`"]
