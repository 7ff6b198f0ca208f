"""Containers under nests of `vmap` and gradients, with and without the peer beside them.

The peer changes functions of torch when it is imported. So each program runs in a process that
imports it before kd, after it, or never; the lane `interop` has it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
from tests.fuzz.conftest import Seeds
from tests.fuzz.vmap_worker import answer

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = find_spec("tensordict") is not None


@contextmanager
def worker(when: str) -> Iterator[Callable[[int], object]]:
    """Return what runs the programs of a seed: a process, or where there is no peer, this one."""
    if not INSTALLED:
        yield answer
        return
    sources = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.vmap_worker", when],
        env={**os.environ, "PYTHONPATH": sources},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None

    def ask(seed: int) -> object:
        requests.write(f"{seed}\n")
        requests.flush()
        return json.loads(answers.readline())

    with process:
        try:
            assert json.loads(answers.readline()) == "ready"
            yield ask
        finally:
            process.kill()


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_transforms_do_what_they_do_to_dicts(when: str, seeds: Seeds) -> None:
    if when != "never" and not INSTALLED:
        pytest.skip("the peer is not installed")
    with worker(when) as ask:
        for seed in seeds(8):
            told = cast("dict[str, object]", ask(seed))
            assert told["wrong"] is None, told["wrong"]
            seeds.count("calls", cast(int, told["calls"]))
