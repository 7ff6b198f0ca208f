"""Generated sources are what their tables say."""

import subprocess
import sys

from tests.repo.tree import ROOT


def test_the_operations_of_the_table_are_fresh() -> None:
    command = [sys.executable, "tools/generate_ops.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
