"""What every test, docstring and Markdown fence of the repository runs under."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


def _enter_scratch(namespace: dict[str, Any]) -> None:
    """Let the fences of one page write files where nobody else looks."""
    namespace["_home"] = Path.cwd()
    namespace["_scratch"] = tempfile.TemporaryDirectory()
    os.chdir(namespace["_scratch"].name)
    torch.manual_seed(0)


def _leave_scratch(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_home"])
    namespace["_scratch"].cleanup()


# Settings of Sphinx, which only the docs lane installs.
collect_ignore = ["docs/conf.py"]

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
    setup=_enter_scratch,
    teardown=_leave_scratch,
).pytest()


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the seed of every test, and give every docstring a folder of its own."""
    torch.manual_seed(0)
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
