"""Open forged files in a process of its own and report what happened, one line of JSON a file.

    python -m tests.fuzz.forged_worker GOOD_FOLDER CANARY_FOLDER

An audit hook watches each file: nothing may be written, started, connected to, unpickled or
imported, no forged text may be compiled, and no file be read but the forged ones. The folder for
temporary files is this process's own; what has a name there, even for a moment, is reported.
"""

import encodings.cp437  # noqa: F401  # names in archives are decoded with it: loaded unwatched
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import kd_export
from kd_export._schema import onnx_file
from kd_export._schema.serialized_program import SOURCE

CANARY = "canary_of_kd"
SECRET = "secret_of_kd"
"""A file that stands everywhere where a forged one could look, and that nothing may open."""
SECONDS = 10  # of the processor, for one file; most take less than one
X = {
    "x": torch.linspace(-1, 1, 12).reshape(4, 3),
    "state.h": torch.linspace(0, 1, 20).reshape(4, 5),
}
LIBRARIES = (
    "torch",
    "sympy",
    "mpmath",
    "numpy",
    "onnxruntime",
    "openvino",
    "executorch",
    "kd_export",
    "kd_core",
    "encodings",
)
FORBIDDEN = """
os.system os.exec os.posix_spawn os.fork os.forkpty os.spawn subprocess.Popen socket.connect
socket.bind socket.getaddrinfo urllib.Request ftplib.connect os.mkdir os.remove os.rename os.rmdir
os.chmod os.link os.symlink os.truncate shutil.rmtree shutil.move shutil.copyfile
pickle.find_class webbrowser.open ctypes.dlopen os.putenv
"""
# The clock that the limit counts: a process samples it, so it is seconds away from `getrusage`.
COUNTED = ~0 << 3
watched: Path | None = None
loaded = 0.0
seen: list[str] = []


def hook(event: str, arguments: tuple[object, ...]) -> None:
    if watched is None:
        return
    if event in FORBIDDEN.split():
        seen.append(f"{event} {arguments}"[:300])
    elif event == "open":
        check_open(*arguments[:3])
    elif event == "import":
        name = str(arguments[0]).partition(".")[0]
        if name not in LIBRARIES and name not in sys.stdlib_module_names:
            seen.append(f"import {arguments[0]}")
    elif event == "compile" and CANARY in str(arguments[0]) and arguments[1] != SOURCE:
        seen.append(f"compile {arguments[0]!r}"[:300])


def check_open(name: object, mode: object, flags: object) -> None:
    if not isinstance(name, str | bytes):
        return
    path = Path(name.decode() if isinstance(name, bytes) else name)
    writes = any(letter in str(mode) for letter in "wax+") or (isinstance(flags, int) and flags & 3)
    inside = watched is not None and path in (watched, *beside(watched))
    library = str(path).startswith((sys.prefix, sys.base_prefix, *sys.path[1:], "/proc", "/sys"))
    if path == Path(tempfile.gettempdir()) and nameless(mode, flags):
        return
    if writes or not (inside or (library and CANARY not in str(path))):
        seen.append(f"open {path} {mode}")


def beside(path: Path) -> tuple[Path, ...]:
    """Return the files of weights that a model may have."""
    return path.with_name(f"{path.name}.data"), path.with_suffix(".bin")


def nameless(mode: object, flags: object) -> bool:
    """Decide whether a folder is opened to hold a file that never has a name.

    Python reports the file object first, whose mode cannot open a folder without the second step.
    """
    assert isinstance(flags, int)
    return mode is not None or flags & os.O_TMPFILE == os.O_TMPFILE


def outcome(call: Callable[[], str]) -> str:
    try:
        return call()
    except kd_export.ExportError as error:
        return f"refused: {type(error).__name__}: {error}"[:300]
    except Exception as error:
        return f"BROKEN: {type(error).__name__}: {error}"[:300]


def tell(schema: kd_export.Schema) -> str:
    return f"ok {len(str(schema))} {len(repr(schema))}"


class Good:
    """A file as it was exported: what it gives, and what a caller says to have it opened."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.digest: str | None = None
        self.results: dict[str, torch.Tensor] = {}
        if path.name.endswith(".aoti.pt2"):
            # Machine code does what it wants: a forged file of it must never be loaded.
            self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
            return
        try:
            self.results = self.open(path).run(X)
        except kd_export.BackendMissing:  # what is read before the runtime is needed is tried
            return
        assert kd_export.verify(path, trusted=True).ok

    def open(self, path: Path) -> kd_export.Session:
        return kd_export.open(path, trusted=self.digest is None, sha256=self.digest)

    def run(self, path: Path) -> str:
        session = self.open(path)
        inputs = {entry.wire: X[entry.wire] for entry in session.schema.inputs if entry.wire in X}
        found = session.run(inputs)
        same = list(found) == list(self.results) and all(
            torch.allclose(found[name], self.results[name], 1e-4, 1e-4) for name in self.results
        )
        return "equal" if same else "different"

    def verify(self, path: Path) -> str:
        trusted = self.digest is None
        return f"ok={kd_export.verify(path, trusted=trusted, sha256=self.digest).ok}"


def peak() -> float:
    """Return the most memory that the process ever held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def limit_processor_time() -> None:
    """Let the system end this process if one file keeps it busy, whatever the machine does."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.clock_gettime(COUNTED)) + SECONDS + 1, most))


def examine(path: Path, good: Good) -> dict[str, object]:
    global watched
    limit_processor_time()
    seen.clear()
    watched = path
    result: dict[str, object] = {
        "inspect": outcome(lambda: tell(kd_export.inspect(path))),
        "untrusted": outcome(lambda: tell(kd_export.open(path).schema)),
        "run": outcome(lambda: good.run(path)),
        "verify": outcome(lambda: good.verify(path)),
    }
    watched = None
    result["megabytes"] = peak() - loaded
    return result | {"seen": list(seen)}


def main(folder: str, canaries: str) -> None:
    global loaded
    torch.set_num_threads(1)
    sys.path.append(canaries)
    sys.dont_write_bytecode = True
    sys.addaudithook(hook)
    suffixes = (".pt2", ".onnx", ".xml", ".pte")
    models = [path for path in Path(folder).iterdir() if path.suffix in suffixes]
    good = {path.name: Good(path) for path in models}  # unwatched: lazy imports are done now
    loaded = peak()  # what torch itself takes depends on its build
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        path = Path(line.strip())
        print(json.dumps(examine(path, good[path.name])), flush=True)


if __name__ == "__main__":
    onnx_file.LARGE = 64  # so that weights of small models are read where they are, too
    main(*sys.argv[1:])
