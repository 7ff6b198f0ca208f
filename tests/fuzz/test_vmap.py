"""Containers under nests of `vmap` and gradients, with and without the peer beside them.

The peer changes functions of torch when it is imported. So each program runs in a process that
imports it before kd, after it, or never; the lane `interop` has it.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
from tests.fuzz.conftest import Seeds

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = find_spec("tensordict") is not None


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_transforms_do_what_they_do_to_dicts(when: str, seeds: Seeds) -> None:
    if when != "never" and not INSTALLED:
        pytest.skip("the peer is not installed")
    sources = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.vmap_worker", when],
        env={**os.environ, "PYTHONPATH": sources},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker:
        assert json.loads(worker.stdout.readline()) == "ready"
        try:
            for seed in seeds(8):
                worker.stdin.write(f"{seed}\n")
                worker.stdin.flush()
                told = cast("dict[str, object]", json.loads(worker.stdout.readline()))
                assert told["wrong"] is None, told["wrong"]
                seeds.count("calls", cast(int, told["calls"]))
        finally:
            worker.kill()
