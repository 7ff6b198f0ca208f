"""A plugin for pytest: failures are written as they happen, to the file that `KD_FAILURES` names.

A run that is stopped at its time limit prints none.
"""

import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        with Path(os.environ["KD_FAILURES"]).open("a", encoding="utf-8") as file:
            file.write(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n\n")
