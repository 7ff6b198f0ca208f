"""The pytest plugin: `pytest -p kd_core.drop_in` runs a suite that imports tensordict, on kd."""

from __future__ import annotations

import atexit
from argparse import Namespace
from typing import Protocol

from kd_core.drop_in import _finder, _report


class _Group(Protocol):
    def addoption(self, name: str, *, action: str, help: str) -> None: ...


class _Parser(Protocol):
    def getgroup(self, name: str) -> _Group: ...


class _Early(Protocol):
    known_args_namespace: Namespace


class _Config(Protocol):
    def getoption(self, name: str) -> bool: ...


class _Writer(Protocol):
    def write_line(self, line: str) -> None: ...


def pytest_addoption(parser: _Parser) -> None:
    """Add the option `--kd-report`."""
    parser.getgroup("kd").addoption(
        "--kd-report",
        action="store_true",
        help="list what the tests asked of tensordict that kd lacks, by name and count",
    )


def pytest_load_initial_conftests(early_config: _Early) -> None:
    """Install the drop-in before the first `conftest.py` is imported."""
    if early_config.known_args_namespace.kd_report:
        atexit.register(_report.ask().unlink)
    _finder.install()


def pytest_terminal_summary(terminalreporter: _Writer, config: _Config) -> None:
    """Print the report, if it was asked for."""
    if config.getoption("--kd-report"):
        terminalreporter.write_line(_report.render(_report.collected()))
