"""The command `python -m kd_core`: look into a store, check it, and rewrite it in one segment.

Exit codes: 0 ok, 1 the store is damaged, 2 wrong use, or nothing at the path.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from kd_core import FormatError, KdError, store

OK, DAMAGED, USAGE = range(3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    Args:
        arguments: the words of the command line; `None`: those of the process.

    Example:
        >>> from kd_core import TensorDict
        >>> from kd_core.__main__ import main
        >>> _ = TensorDict({"a": [1, 2]}, [2]).save("main.kd")
        >>> main(["check", "main.kd"])
        main.kd: directory, format 1, generation 1, 1 file, 80 bytes, 1 part, 1 tensor
        td [2]
          a: int64 [2]
        0
    """
    options = _parser().parse_args(arguments)
    try:
        with store.progress() if options.progress else nullcontext():
            if options.command == "compact":
                store.compact(options.path)
            print((store.check if options.command == "check" else store.inspect)(options.path))
    except FormatError as error:
        print(error, file=sys.stderr)
        return DAMAGED
    except (KdError, OSError) as error:
        print(error, file=sys.stderr)
        return USAGE
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kd_core", description="Stores of containers.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in (
        ("inspect", "show what a store holds, from its manifest alone"),
        ("check", "read all of a store and compare it with its checksums"),
        ("compact", "rewrite a store in one segment"),
    ):
        command = commands.add_parser(name, help=does, description=does)
        command.add_argument("path")
        command.add_argument("--progress", action="store_true", help="show how far it is")
    return parser


if __name__ == "__main__":
    sys.exit(main())
