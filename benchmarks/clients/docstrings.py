"""Run the examples in docstrings of packages; write what each statement printed or raised.

`python docstrings.py OUT [PACKAGE ...]` runs them on the peer, `python -m kd_core.drop_in
docstrings.py OUT [PACKAGE ...]` on kd. Each docstring runs in a process of its own, forked from one
that has imported the packages.
"""

import ast
import contextlib
import doctest
import importlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch
from gymnasium.utils import seeding
from measured import content, kinds

PACKAGES = ("torchrl", "rl4co", "benchmarl", "rsl_rl", "verl", "physicsnemo")
# What most examples import: once, before the forks.
WARM = (
    *(
        "torchrl.envs",
        "torchrl.data",
        "torchrl.modules",
        "torchrl.objectives",
        "torchrl.collectors",
    ),
    "torchrl.envs.libs.gym",
)
# Where names come from that an example does not import, beside its own module.
ASSUMED = (
    *("tensordict", "tensordict.nn", "torchrl.envs", "torchrl.data", "torchrl.modules"),
    *("torchrl.objectives", "torchrl.collectors", "torchrl.envs.libs.gym"),
)
SECONDS = int(os.environ.get("KD_CLIENT_SECONDS", "12"))
# What asks for a cluster or a server of models.
ELSEWHERE = re.compile(r"[._]ray|Ray|vllm|sglang|atari|libs\.(brax|dm_control)")
# What differs from run to run: addresses, folders, times.
VOLATILE = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0x"),
    (re.compile(r"/tmp/\w+"), "/tmp/"),
    (re.compile(r"\d+%\|.*"), "bar"),
)

Outcome = tuple[str, str, str]  # source, printed, kind of error


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Yield the place and text of each docstring with examples, without importing the package."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    top = Path(spec.origin).parent
    for path in sorted(top.rglob("*.py")):
        module = ".".join([package, *path.relative_to(top).with_suffix("").parts])
        yield from inside(ast.parse(path.read_text(encoding="utf-8")), module)


def inside(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a module, class or function and of those in it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and ">>>" in text:
            yield place, text
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "")
            yield from inside(child, f"{place}.{name}" if name else place)


def statements(text: str) -> list[str]:
    """Return the statements of a docstring; none, if it is not laid out as examples are."""
    try:
        return [each.source for each in doctest.DocTestParser().get_examples(text)]
    except ValueError:
        return []


def assumed(place: str) -> dict[str, object]:
    """Return what an example finds without importing it."""
    names: dict[str, object] = {}
    parts = place.split(".")
    own = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for name in (*ASSUMED, *own):
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            public = getattr(module, "__all__", None) or dir(module)
            names |= {each: getattr(module, each) for each in public if each[0] != "_"}
    return names | {"torch": torch, "nn": torch.nn, "np": numpy}


def outcomes(place: str, sources: list[str]) -> Iterator[Outcome]:
    """Run statements one after another in one namespace, whatever they raise."""
    names = assumed(place)
    names["__name__"] = "__main__"
    before = dict(names)
    for source in sources:
        out, error = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(source, "<example>", "single"), names)  # the point
        except (Exception, SystemExit) as found:
            error = f"{kinds(found)}: {found}"
        yield source, stable(out.getvalue()), stable(error)
    made = {n: v for n, v in names.items() if n != "_" and v is not before.get(n, names)}
    yield (
        "",
        stable(json.dumps({n: content(v) for n, v in made.items() if n != "__builtins__"})),
        "",
    )


def stable(text: str) -> str:
    """Return a text without what differs from run to run."""
    for pattern, instead in VOLATILE:
        text = pattern.sub(instead, text)
    return text


def run(place: str, sources: list[str], folder: str) -> tuple[list[Outcome], float]:
    """Run the statements in a forked process, for a limited time."""
    result = Path(folder) / "result"
    result.unlink(missing_ok=True)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            os.chdir(folder)
            devnull = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(devnull, descriptor)
            random.seed(0)
            numpy.random.seed(0)
            torch.manual_seed(0)
            with result.open("a", encoding="utf-8") as file:
                for each in outcomes(place, sources):
                    file.write(json.dumps(each) + "\n")
                    file.flush()
        os._exit(0)
    while time.monotonic() - start < SECONDS and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    lines = result.read_text(encoding="utf-8").splitlines() if result.exists() else []
    done = [tuple(json.loads(line)) for line in lines]
    if len(done) <= len(sources):
        done.append(((*sources, "")[len(done)], "", "TimeoutError"))
    return done, time.monotonic() - start


def main() -> None:
    """Run the examples of the packages named on the command line, or of all that are known."""
    warnings.simplefilter("ignore")
    fresh = seeding.np_random
    seeding.np_random = lambda seed=None: fresh(0 if seed is None else seed)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    torch.set_num_threads(1)
    out, *packages = sys.argv[1:]
    pattern = re.compile(os.environ.get("KD_CLIENT_EXAMPLES", ""))
    for name in WARM:
        importlib.import_module(name)
    # What BenchMARL 1.5.2 imports, TorchRL 0.14.1 calls so.
    collectors = importlib.import_module("torchrl.collectors")
    vars(collectors)["SyncDataCollector"] = collectors.Collector
    for name in packages or PACKAGES:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder, Path(out).open("w", encoding="utf-8") as file:
        for package in packages or PACKAGES:
            for place, text in docstrings(package):
                sources = statements(text)
                if sources and pattern.search(place) and not ELSEWHERE.search(place):
                    found, seconds = run(place, sources, folder)
                    file.write(json.dumps([place, found]) + "\n")
                    file.flush()
                    print(f"{seconds:6.1f} {place}", flush=True)


if __name__ == "__main__":
    main()
