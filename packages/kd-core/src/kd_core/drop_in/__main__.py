"""The command `python -m kd_core.drop_in`: run a program that imports tensordict, on kd."""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from kd_core.drop_in import _finder


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a program with the drop-in installed.

    Args:
        arguments: the words of the command line; `None`: those of the process.
    """
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
    parser.add_argument("program", help="the file, or the module, to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    options = parser.parse_args(arguments)
    if options.report:
        report_at_exit()
    _finder.install()
    sys.argv = [options.program, *options.arguments]
    if options.module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.program).resolve().parent)
        runpy.run_path(options.program, run_name="__main__")


def report_at_exit() -> None:
    """Print the report of this process and its children when this one ends."""
    path = _finder.ask_for_report()
    owner = os.getpid()

    def report() -> None:
        if os.getpid() == owner:
            print(_finder.rendered(_finder.collected()), file=sys.stderr)
            path.unlink()

    atexit.register(report)


if __name__ == "__main__":
    main()
