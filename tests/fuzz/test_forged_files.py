"""Forged and damaged artefacts give equal results or an `ExportError`, and nothing else.

A worker process opens each file under an audit hook (`forged_worker`); the files come from
`forging` and `forging_models`. A forger may write any program: different results are accepted if
`verify` finds them. What libraries written in C++ open and create is watched from here.
"""

import ctypes
import importlib.util
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.export.models import case
from tests.fuzz.conftest import Seeds
from tests.fuzz.forged_worker import CANARY, COUNTED, SECONDS, SECRET, limit_processor_time
from tests.fuzz.forging_models import FORGE, Forged

import kd_export

# A worker that waits instead of working is ended after so many seconds; one that works, by itself.
HANGING = 600.0
MEGABYTES = 1024.0
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "export" / "golden"
RUNS_ON_LOADING = f"""
#include <sys/stat.h>
__attribute__((constructor)) static void leave_a_trace(void) {{ mkdir("{CANARY}", 0700); }}
"""


class Worker:
    """The process that opens forged files; a new one takes the place of one that was stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.formats = [names for names in FORGE if (folder / names[0]).exists()]
        files = [name for names in self.formats for name in names]
        self.good = {name: (folder / name).read_bytes() for name in files}
        for name in ("work", "here", "tmp", "path"):
            (folder / name).mkdir(exist_ok=True)
        for place in (folder, folder / "work", folder / "here"):
            (place / SECRET).write_bytes(bytes(4096))
        trace = folder / CANARY
        (folder / "path" / f"{CANARY}.py").write_text(f"import os\nos.mkdir({str(trace)!r})\n")
        self.start()
        self.watch = Watch(folder, folder / "work", folder / "here", folder / "tmp")
        self.at_first = self.around()  # onnxruntime, for one, leaves a file when it is imported

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.forged_worker", self.folder, self.folder / "path"],
            cwd=self.folder / "here",
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder / "tmp")},
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

    def write(self, forged: Forged) -> Path:
        """Write the files of one artefact in place of those before."""
        work = self.folder / "work"
        for path in work.iterdir():
            if path.name != SECRET:
                path.unlink()
        for name, content in forged.items():
            path = work / name
            path.write_bytes(content) if isinstance(content, bytes) else path.symlink_to(content)
        return work / next(iter(forged))

    def examine(self, path: Path) -> dict[str, object]:
        assert self.process.stdin is not None
        self.watch.events()
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        found = self.answer()
        if found is None:
            status = self.process.wait()
            self.start()
            return {"BROKEN": f"the worker ended with exit status {status} (a signal below 0)"}
        assert isinstance(found, dict)
        models = [name for name in self.watch.events() if not name.startswith(path.stem)]
        return found | {"files": models}

    def around(self) -> set[str]:
        """Return the names of the files where none may stay."""
        places = (self.folder, self.folder / "here", self.folder / "tmp")
        return {path.name for place in places for path in place.iterdir()}

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.watch.close()


class Watch:
    """The files of some folders that are opened or created, by whatever code."""

    OPENED, CREATED, FOLDER = 0x20, 0x100, 0x40000000

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.file = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for folder in folders:
            number = libc.inotify_add_watch(self.file, bytes(folder), self.OPENED | self.CREATED)
            assert number > 0, os.strerror(ctypes.get_errno())

    def events(self) -> list[str]:
        """Return the names of the files that were opened or created since the last call."""
        try:
            data = os.read(self.file, 1 << 20)
        except BlockingIOError:
            return []
        names, position = [], 0
        while position < len(data):
            _, mask, _, length = struct.unpack_from("iIII", data, position)
            name = data[position + 16 : position + 16 + length].rstrip(b"\0").decode()
            position += 16 + length
            # A temporary file without a name has "#" and a number for one here.
            if mask & self.CREATED or (name[:1] not in ("", "#") and not mask & self.FOLDER):
                names.append(name)
        return names

    def close(self) -> None:
        os.close(self.file)


def write_compiled(path: Path, schema: kd_export.Schema) -> None:
    """Write an AOTInductor package whose code leaves a trace when it is loaded."""
    source, library = path.with_name("trace.c"), path.with_name("trace.so")
    source.write_text(RUNS_ON_LOADING)
    library.touch()
    if compiler := shutil.which("cc"):
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/archive_format", "pt2")
        archive.writestr("model/archive_version", "0")
        archive.write(library, "model/data/aotinductor/model/trace.wrapper.so")
        archive.writestr("model/extra/kd_export.json", schema.to_json())


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("forged")
    model = case("gru")
    program = kd_export.export(model.module, model.example)
    program.save(folder / "good.pt2")
    program.save(folder / "good.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kd_export._backends.onnx.LARGEST_INSIDE", 0)
        patch.setattr("kd_export._backends.onnx_operators.LARGE", 256)
        program.save(folder / "beside.onnx")
    if importlib.util.find_spec("openvino") is not None:
        program.save(folder / "good.xml")
    shutil.copy(GOLDEN / "gru.pte", folder / "good.pte")
    write_compiled(folder / "good.aoti.pt2", program.schema)
    worker = Worker(folder)
    yield worker
    worker.stop()


def faults(found: dict[str, object], path: Path, worker: Worker) -> list[str]:
    """List what went wrong with one artefact."""
    if "BROKEN" in found:
        return [str(found["BROKEN"])]
    wrong = [f"{name}: {text}" for name, text in found.items() if str(text).startswith("BROKEN")]
    wrong += [str(event) for event in json.loads(json.dumps(found["seen"]))]
    wrong += [f"opened or created: {name}" for name in json.loads(json.dumps(found["files"]))]
    if path.suffix in (".pt2", ".pte") and not str(found["untrusted"]).startswith("refused"):
        wrong.append("opened without trust")
    if path.name.endswith(".aoti.pt2") and not str(found["run"]).startswith("refused"):
        wrong.append("compiled code that was changed")
    if found["run"] == "different" and found["verify"] == "ok=True":
        wrong.append("other results, and verify says ok")
    if float(str(found["megabytes"])) > MEGABYTES:
        wrong.append(f"{found['megabytes']} MB")
    wrong += [f"left behind: {name}" for name in worker.around() - worker.at_first]
    return wrong


def test_forged_files_are_refused_or_harmless(worker: Worker, seeds: Seeds) -> None:
    for seed in seeds(30):
        source = random.Random(seed)
        names = source.choice(worker.formats)
        good = {name: worker.good[name] for name in names}
        while (forged := FORGE[names](good, source)) == good:
            pass
        path = worker.write(forged)
        found = worker.examine(path)
        assert not faults(found, path, worker), (path.name, path.stat().st_size, found)
        seeds.count("files")
        seeds.count("refused" if str(found["run"]).startswith("refused") else str(found["run"]))


def test_each_file_has_the_same_time_of_the_processor() -> None:
    """The clock that the limit counts is not the one that `getrusage` tells."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    try:
        limit_processor_time()
        left = resource.getrlimit(resource.RLIMIT_CPU)[0] - time.clock_gettime(COUNTED)
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)
    assert SECONDS - 0.5 < left <= SECONDS + 1
