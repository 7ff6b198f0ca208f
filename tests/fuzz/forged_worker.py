"""Open forged files in a process of its own and report what happened, one line of JSON a file.

    python -m tests.fuzz.forged_worker GOOD_FOLDER CANARY_FOLDER

An audit hook watches each file: nothing may be written, started, connected to, unpickled or
imported, no forged text may be compiled, and no file outside the folder of the forged one be read.
"""

import json
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import kd_export
from kd_export._schema.size_expression import SOURCE

CANARY = "canary_of_kd"
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
    inside = watched is not None and path.parent == watched.parent
    library = str(path).startswith((sys.prefix, sys.base_prefix, *sys.path[1:], "/proc", "/sys"))
    if path == Path(tempfile.gettempdir()):
        return  # a file without a name, which nobody else can open and which leaves nothing behind
    if writes or not (inside or (library and CANARY not in str(path))):
        seen.append(f"open {path} {mode}")


def outcome(call: Callable[[], str]) -> str:
    try:
        return call()
    except kd_export.ExportError as error:
        return f"refused: {type(error).__name__}: {error}"[:300]
    except Exception as error:
        return f"BROKEN: {type(error).__name__}: {error}"[:300]


def tell(schema: kd_export.Schema) -> str:
    return f"ok {len(str(schema))} {len(repr(schema))}"


def run(path: Path, good: dict[str, torch.Tensor]) -> str:
    session = kd_export.open(path, trusted=True)
    inputs = {entry.wire: X[entry.wire] for entry in session.schema.inputs if entry.wire in X}
    found = session.run(inputs)
    same = list(found) == list(good) and all(
        torch.allclose(found[name], good[name], 1e-4, 1e-4) for name in good
    )
    return "equal" if same else "different"


def peak() -> float:
    """Return the most memory that the process ever held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def limit_processor_time() -> None:
    """Let the system end this process if one file keeps it busy, whatever the machine does."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS + 1, most))


def examine(path: Path, good: dict[str, torch.Tensor]) -> dict[str, object]:
    global watched
    limit_processor_time()
    seen.clear()
    watched = path
    result: dict[str, object] = {
        "inspect": outcome(lambda: tell(kd_export.inspect(path))),
        "run": outcome(lambda: run(path, good)),
        "verify": outcome(lambda: f"ok={kd_export.verify(path, trusted=True).ok}"),
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
    good = {path.suffix: path for path in sorted(Path(folder).glob("good.*"))}
    expected = {}
    for suffix, path in good.items():  # once unwatched, so that lazy imports are done
        expected[suffix] = kd_export.open(path, trusted=True).run(X)
        assert kd_export.verify(path, trusted=True).ok
    loaded = peak()  # what torch itself takes depends on its build
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        path = Path(line.strip())
        print(json.dumps(examine(path, expected[path.suffix])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
