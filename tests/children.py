"""Run programs in processes of their own, without importing torch in each.

Each process of pytest starts one Python that imports torch, nothing of kd, and forks a child for
each program. What a child imports, sets and breaks ends with it. A program that asks what an
interpreter imports from its start, or that blocks the import of torch, is run by `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Mapping
from pathlib import Path


def run(
    *arguments: str | Path, cwd: str | Path = ".", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program as `python` with these arguments does, and return what it printed.

    Args:
        *arguments: `-W ignore`, then `-c PROGRAM`, `-m MODULE` or a path, then what it is given.
        cwd: where it runs.
        env: its environment; by default this one's, with the folders that this one imports from.
    """
    given = [os.fspath(argument) for argument in arguments]
    if env is None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {
            "given": given, "cwd": str(Path(cwd).resolve()), "env": dict(env),
            "out": str(out), "err": str(err),
        }  # fmt: skip
        code = _answer(json.dumps(request))
        return subprocess.CompletedProcess(given, code, out.read_text(), err.read_text())


def check_output(
    *arguments: str | Path, cwd: str | Path = ".", env: Mapping[str, str] | None = None
) -> str:
    """Run a program that must succeed, and return what it wrote on its standard output."""
    result = run(*arguments, cwd=cwd, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _answer(request: str) -> int:
    process = _server(os.getpid())
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


@functools.cache
def _server(_: int) -> subprocess.Popen[str]:
    """Start the process that forks the children of this one; a fork of this one starts its own."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_stop, process, os.getpid())
    return process


def _stop(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() == owner:  # and not what was forked from it
        process.kill()
        process.communicate()


def _serve() -> None:
    import torch  # noqa: F401  # for the children

    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path[1:] if path not in own]
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(json.loads(line), installed)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(request: dict[str, object], installed: list[str]) -> None:
    """Be the process of a program, until its end."""
    given, env = request["given"], request["env"]
    assert isinstance(given, list)
    assert isinstance(env, dict)
    streams = (os.devnull, os.O_RDONLY), (request["out"], 0), (request["err"], 0)
    for number, (path, _) in enumerate(streams):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
        os.dup2(os.open(str(path), flags), number)
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(env)
    warnings.resetwarnings()
    while given[0] == "-W":
        assert given[1] == "ignore"
        warnings.simplefilter("ignore")
        del given[:2]
    sys.path[:] = ["", *env.get("PYTHONPATH", "").split(os.pathsep), *installed]
    code = 0
    try:
        _execute(given)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _execute(given: list[str]) -> None:
    option, *rest = given
    if option == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = given
        sys.path[0] = str(Path(option).parent)
        runpy.run_path(option, run_name="__main__")


if __name__ == "__main__":
    _serve()
