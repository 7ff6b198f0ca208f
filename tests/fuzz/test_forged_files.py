"""Forged and damaged artefacts give equal results or an `ExportError`, and nothing else.

A worker process opens each file under an audit hook (`forged_worker`); the files come from
`forging`. A forger may write any program: different results are accepted if `verify` finds them.
"""

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.export.models import case
from tests.fuzz.conftest import Seeds
from tests.fuzz.forged_worker import CANARY
from tests.fuzz.forging import FORGE

import kd_export

# A worker that waits instead of working is ended after so many seconds; one that works, by itself.
HANGING = 600.0
MEGABYTES = 1024.0
ROOT = Path(__file__).parents[2]


class Worker:
    """The process that opens forged files; a new one takes the place of one that was stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        canaries = self.folder / "path"
        canaries.mkdir(exist_ok=True)
        trace = self.folder / CANARY
        (canaries / f"{CANARY}.py").write_text(f"import os\nos.mkdir({str(trace)!r})\n")
        for name in ("work", "here"):
            (self.folder / name).mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.forged_worker", str(self.folder), str(canaries)],
            cwd=self.folder / "here",
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.answer() == "ready"

    def answer(self) -> object:
        assert self.process.stdout is not None
        watch = threading.Timer(HANGING, self.process.kill)
        watch.start()
        line = self.process.stdout.readline()
        watch.cancel()
        return json.loads(line) if line else None

    def examine(self, path: Path) -> dict[str, object]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        found = self.answer()
        if found is None:
            status = self.process.wait()
            self.start()
            return {"BROKEN": f"the worker ended with exit status {status} (a signal below 0)"}
        assert isinstance(found, dict)
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("forged")
    model = case("gru")
    program = kd_export.export(model.module, model.example)
    for suffix in FORGE:
        program.save(folder / f"good{suffix}")
    worker = Worker(folder)
    yield worker
    worker.stop()


def faults(found: dict[str, object], folder: Path) -> list[str]:
    """List what went wrong with one file."""
    if "BROKEN" in found:
        return [str(found["BROKEN"])]
    wrong = [f"{name}: {text}" for name, text in found.items() if str(text).startswith("BROKEN")]
    wrong += [str(event) for event in json.loads(json.dumps(found["seen"]))]
    if found["run"] == "different" and found["verify"] == "ok=True":
        wrong.append("other results, and verify says ok")
    if float(str(found["megabytes"])) > MEGABYTES:
        wrong.append(f"{found['megabytes']} MB")
    if (folder / CANARY).exists() or any((folder / "here").iterdir()):
        wrong.append("a canary was touched")
    return wrong


def test_forged_files_are_refused_or_harmless(worker: Worker, seeds: Seeds) -> None:
    for seed in seeds(60):
        source = random.Random(seed)
        suffix = source.choice(list(FORGE))
        forged = FORGE[suffix]((worker.folder / f"good{suffix}").read_bytes(), source)
        path = worker.folder / "work" / f"forged{suffix}"
        path.write_bytes(forged)
        found = worker.examine(path)
        assert not faults(found, worker.folder), (path.stat().st_size, found)
        seeds.count("files")
        seeds.count("refused" if str(found["run"]).startswith("refused") else str(found["run"]))
