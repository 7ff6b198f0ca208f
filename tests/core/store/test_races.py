"""Two writers, four readers, and writers that are killed."""

import subprocess
import sys
from pathlib import Path


def test_readers_see_whole_versions_while_writers_race_and_die(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("race.py")), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "killed" in result.stdout
