"""Programs of other people give the same numbers on kd and on the peer, seed by seed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PROGRAMS = [
    path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem[:5] not in ("test_", "measu")
]
SEEDS = range(int(os.environ.get("KD_CLIENT_SEEDS", "2")))


def run(program: str, seed: int, *how: str) -> tuple[dict[str, float], float]:
    command = [sys.executable, "-W", "ignore", *how, f"{program}.py", str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    return found["numbers"], found["cpu"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_are_equal(program: str, record_property: Callable[[str, object], None]) -> None:
    times = []
    for seed in SEEDS:
        expected, peer = run(program, seed)
        got, ours = run(program, seed, "-m", "kd_core.drop_in")
        assert got == expected
        times.append((ours, peer))
    ours, peer = (sum(column) for column in zip(*times, strict=True))
    record_property("cpu", f"{ours / peer:.2f}")
    print(f"{program}: {ours:.1f} s on kd, {peer:.1f} s on the peer, {ours / peer:.2f}")
