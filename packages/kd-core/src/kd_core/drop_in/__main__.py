"""The command `python -m kd_core.drop_in`: run a program that imports tensordict, on kd."""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import sys
from pathlib import Path
from types import CodeType, ModuleType
from zipfile import is_zipfile

from kd_core.drop_in import _finder


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m kd_core.drop_in",
        usage="python -m kd_core.drop_in [--report] (PROGRAM | -m MODULE) [ARGUMENT ...]",
        description="Run a program that imports tensordict, on kd.",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="at the end, list what the program asked for that kd lacks",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, not a file")
    parser.add_argument("program", help="the file, folder, archive or module to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    return parser.parse_args()


def report_at_exit() -> None:
    """Print the report of this process and its children when this one ends."""
    path = _finder.ask_for_report()
    owner = os.getpid()

    def report() -> None:
        if os.getpid() == owner:
            print(_finder.rendered(_finder.collected()), file=sys.stderr)
            path.unlink()

    atexit.register(report)


def main_module(path: str) -> tuple[CodeType, dict[str, object]]:
    """Make a file the main module, as Python does; return its code, and where that is to run."""
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(module)


if __name__ == "__main__":
    options = arguments()
    if options.report:
        report_at_exit()
    _finder.install()
    sys.argv = [options.program, *options.arguments]
    if options.module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    elif Path(options.program).is_dir() or is_zipfile(options.program):
        runpy.run_path(options.program, run_name="__main__")
    else:
        sys.path[0] = str(Path(options.program).resolve().parent)
        # In this frame: torch writes down the whole stack whenever it is seeded.
        exec(*main_module(options.program))
