"""Put faults back that were mended, one at a time, and show that the tests that saw them go red.

`planted_faults.toml` lists them: what the source says, what it said with the fault, and the tests
that must fail then. Everything happens in a copy of the packages; the working tree is not written.
A fault whose text is no longer in the source is reported too: plant it anew where the code went.

    python tools/planted_faults.py            # all of them
    python tools/planted_faults.py A1 B9      # those whose names begin so
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch._dynamo
import torch.export  # noqa: F401  # before the forks, which then need not

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
SECONDS = 900


class Fault:
    """A fault of the table.

    Attributes:
        name: The name, as the report gives it.
        file: The source, from `packages/` on.
        before: What the source says.
        after: What it says with the fault.
        tests: What must go red: arguments of pytest.
    """

    def __init__(self, row: Mapping[str, object]) -> None:
        self.name, self.file = str(row["name"]), str(row["file"])
        self.before, self.after = str(row["before"]), str(row["after"])
        self.tests = str(row["tests"]).split(maxsplit=1)


def faults(chosen: list[str]) -> list[Fault]:
    """Return the faults whose names begin with one of the words, or all."""
    rows = tomllib.loads(TABLE.read_text())["fault"]
    found = [Fault(row) for row in rows]
    return [fault for fault in found if not chosen or fault.name.startswith(tuple(chosen))]


def run(fault: Fault, packages: Path) -> str:
    """Plant a fault in a copy of the packages; return what the tests say."""
    path = packages / fault.file
    text = path.read_text()
    if text.count(fault.before) != 1:
        return f"NOT PLANTED: its text is there {text.count(fault.before)} times"
    path.write_text(text.replace(fault.before, fault.after))
    try:
        with tempfile.TemporaryFile("w+") as said:
            code = tested(fault, packages, said.fileno())
            said.seek(0)
            lines = said.read().splitlines()
    finally:
        path.write_text(text)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if code == 1 and failed:
        return "red: " + failed[0].partition(" ")[2].partition(" - ")[0]
    if code == 0:
        return "GREEN"
    return f"BROKEN: {code} " + " ".join(lines)[-300:]


def tested(fault: Fault, packages: Path, out: int) -> int:
    """Run the tests of a fault in a fork, which has imported torch already; return its status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.dup2(out, 1)
        os.dup2(out, 2)
        signal.alarm(SECONDS)
        sources = [*map(str, packages.glob("*/src")), str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(sources)
        sys.path[:0] = sources
        sys.dont_write_bytecode = True
        options = ["-q", "-x", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
        file, *chosen = fault.tests
        code = pytest.main([*options, file, *(["-k", chosen[0]] if chosen else [])])
        sys.stdout.flush()
        os._exit(int(code))
    finally:
        os._exit(4)


def main() -> int:
    """Run the faults; return whether one was not seen."""
    ok = True
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder, "packages")
        shutil.copytree(
            ROOT / "packages", packages, ignore=shutil.ignore_patterns("__pycache__", "dist")
        )
        for fault in faults(sys.argv[1:]):
            found = run(fault, packages)
            ok = ok and found.startswith("red")
            print(f"{fault.name}: {found}", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
