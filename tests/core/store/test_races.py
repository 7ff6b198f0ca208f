"""Writers and readers at once, processes that are killed, and an arena that many of them fill."""

import subprocess
import sys
from pathlib import Path


def test_processes_that_race_die_and_share_see_whole_stores(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("race.py")), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "killed" in result.stdout
    assert "shared" in result.stdout
    assert "constructed" in result.stdout
