"""Change the sources at random, one place at a time, and count the changes that the tests notice.

    python tools/mutants.py --count 100 --seed 0              # of the commit that is checked out
    python tools/mutants.py --count 100 --seed 0 --commit REV # of another, with its own tests

A mutant is one edit: a comparison turned, a constant changed, `and` for `or`, an argument, a
statement or a branch left out, `None` returned. Each runs in a fork that has imported torch, on a
copy of the tree. It runs the docstrings of its module and the test files that speak of the changed
function or of what calls it, the likeliest first, until one fails or `--seconds` of the processor
are used. The share of killed mutants is therefore at least what is printed: a survivor may be equal
to the original, or be noticed by a file that had no turn. In the end the tests that failed run on
the sources as they are; a mutant whose test fails there too is not counted.

mutmut 3 puts a trampoline in the place of each function, which dynamo, `inspect.getsource` and the
modules that generate code would see; cosmic-ray starts the test command, and so imports torch, anew
for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import importlib
import io
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest
import torch._dynamo
import torch.export  # noqa: F401  # before the forks, which then need not

ROOT = Path(__file__).resolve().parent.parent
# What the environment of the suite has no libraries for.
APART = re.compile(r"executorch|litert|openvino|redis|/_children/|_torch_private|torch_private")
UNTESTED = re.compile(r"tests/(gpu|models|policies|interop|typing|repo)/")
TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip


Edited: TypeAlias = ast.expr | ast.stmt


class Mutant(NamedTuple):
    """One edit of one file.

    Attributes:
        file: The file, from the root of the tree.
        line: Where it is.
        names: The functions and classes around it, the innermost last.
        before: What the source says there.
        after: What it says instead.
        text: The whole file with the edit.
    """

    file: str
    line: int
    names: tuple[str, ...]
    before: str
    after: str
    text: str


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Return what may stand for a node."""
    other = copy.copy(node)
    match other:
        case ast.Compare(ops=[op]) | ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in TURNED:
            turned = TURNED[type(op)]()
            setattr(
                other, *(("ops", [turned]) if isinstance(other, ast.Compare) else ("op", turned))
            )
            yield other
        case ast.UnaryOp(op=ast.Not()):
            yield other.operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=str() as value) if value:
            yield ast.Constant(value + "X")
        case ast.IfExp():
            yield from (other.body, other.orelse)
        case ast.Call() if len(other.args) + len(other.keywords) > 1:
            field = "keywords" if other.keywords else "args"
            setattr(other, field, getattr(other, field)[:-1])
            yield other
        case ast.If():
            yield from (ast.Constant(value=True), ast.Constant(value=False))
        case ast.Return(value=ast.AST() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Pass()


def places(node: ast.AST, names: tuple[str, ...] = ()) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """Return the nodes that may be changed: no annotation, docstring, message or declaration."""
    yield node, names
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names = (*names, node.name)
        if any("overload" in ast.unparse(each) for each in node.decorator_list):
            return
    for field, value in ast.iter_fields(node):
        if field in {"annotation", "returns", "decorator_list", "type_params", "op", "ops", "ctx"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(
                child, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom
            ):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            match child:
                case ast.Call(func=ast.Name(id="cast" | "TypeVar" | "NewType" | "ParamSpec")):
                    continue
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    continue
            if isinstance(child, ast.AST):
                yield from places(child, names)


def mutants(root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of the sources of a tree, each place with equal chance."""
    found = []
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        if not APART.search(str(path)):
            for node, names in places(ast.parse(path.read_bytes())):
                # What runs at import is noticed by every test.
                if names and isinstance(node, ast.expr | ast.stmt):
                    found += [(path, node, names, after) for after in changes(node)]
    chosen = random.Random(seed).sample(found, count)
    return [edited(root, *each) for each in chosen]


def edited(root: Path, path: Path, node: Edited, names: tuple[str, ...], after: ast.AST) -> Mutant:
    """Write an edit into the text of its file."""
    node = node.test if isinstance(node, ast.If) else node
    data = path.read_bytes()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    begin = starts[node.lineno - 1] + node.col_offset
    end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
    new = ast.unparse(after)
    new = f"({new})" if isinstance(after, ast.expr) else new
    text = (data[:begin] + new.encode() + data[end:]).decode()
    before = " ".join(data[begin:end].decode().split())
    return Mutant(str(path.relative_to(root)), node.lineno, names, before, new, text)


class Selection:
    """Which test files speak of a function, or of the functions that call it.

    Args:
        root: The tree.
    """

    def __init__(self, root: Path) -> None:
        self.words: dict[str, set[str]] = {}
        for path in sorted(root.glob("tests/**/test_*.py")):
            name = str(path.relative_to(root))
            if not UNTESTED.search(name) and not APART.search(name):
                self.words[name] = set(re.findall(r"\w+", path.read_text()))
        self.files = collections.Counter(word for words in self.words.values() for word in words)
        self.callers: dict[str, set[str]] = collections.defaultdict(set)
        for path in root.glob("packages/*/src/**/*.py"):
            for statement in ast.parse(path.read_bytes()).body:
                table = [each.id for each in ast.walk(statement) if isinstance(each, ast.Name)]
                for node, names in places(statement, tuple(table[:1])):
                    used = getattr(node, "id", getattr(node, "attr", None))
                    if names and used is not None:
                        self.callers[used].add(names[-1])

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the test files for a mutant, the likeliest first."""
        near: dict[str, int] = {}
        level = set(mutant.names)
        for depth in range(4):
            near.update((name, depth) for name in level if name not in near)
            level = set().union(*(self.callers[name] for name in level)) - set(near)
        scores: dict[str, float] = collections.defaultdict(float)
        stem = Path(mutant.file).stem.strip("_")
        folder = Path(mutant.file).parent.name.strip("_")
        for file, words in self.words.items():
            for name, depth in near.items():
                if name in words:
                    scores[file] += 4.0**-depth / self.files[name]
            if stem in Path(file).stem:
                scores[file] += 2
            if folder.removeprefix("kd_") in Path(file).parts:
                scores[file] += 0.1
            if file in scores and file.startswith("tests/fuzz"):
                scores[file] /= 20  # they are long
        return sorted(scores, key=lambda file: -scores[file])[:12]


class Judge:
    """Note the first test that fails, and stop when the time is up.

    Args:
        seconds: Of the processor.
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.process_time() + seconds
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed."""
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Stop before a test that has no time left."""
        if time.process_time() > self.end:
            item.session.shouldstop = "time"


def run(root: Path, tests: list[str], seconds: float, *more: str) -> list[str]:
    """Run tests in a fork; return those that failed."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        if not select.select([read], [], [], 5 * (seconds + 60))[0]:  # it waits for ever
            os.killpg(child, signal.SIGKILL)
        with os.fdopen(read) as answer:
            said = answer.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code > 0:
            raise RuntimeError("pytest did not start")
        return [f"signal {-code}"] if code else said.split("\n")[:-1]
    code = 1
    try:
        os.close(read)
        os.setsid()
        signal.setitimer(signal.ITIMER_PROF, seconds + 60)  # an endless loop
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.chdir(root)
        sources = [*map(str, root.glob("packages/*/src")), str(root)]
        os.environ["PYTHONPATH"] = os.pathsep.join(sources)
        sys.path[:] = sources + [each for each in sys.path if not each.startswith(str(ROOT))]
        sys.dont_write_bytecode = True
        for file in tests:
            if file.startswith("packages/"):  # or pytest would import it once more: see conftest.py
                with contextlib.suppress(Exception):  # which pytest tells
                    name = file.partition("/src/")[2].partition(".py")[0].replace("/", ".")
                    importlib.import_module(name.removesuffix(".__init__"))
        judge = Judge(seconds)
        pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", *more, *tests], plugins=[judge])
        os.write(write, "".join(each + "\n" for each in judge.failed).encode())
        code = 0
    finally:
        os._exit(code)


def interval(killed: int, total: int) -> tuple[float, float]:
    """Return the interval of Wilson around a share, 95 %."""
    share, z = killed / total, 1.96
    middle, width = (
        share + z * z / 2 / total,
        z * math.sqrt(share * (1 - share) / total + z * z / 4 / total**2),
    )
    scale = 1 + z * z / total
    return (middle - width) / scale, (middle + width) / scale


def main() -> None:
    """Draw the mutants, run them, and print those that no test noticed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--commit", default="HEAD")
    asked = parser.parse_args()
    archive = ["git", "-C", str(ROOT), "archive", asked.commit]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        packed = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as tree:
            tree.extractall(root, filter="data")
        selection = Selection(root)
        killers: dict[Mutant, str] = {}
        drawn = mutants(root, asked.count, asked.seed)
        for number, mutant in enumerate(drawn):
            path = root / mutant.file
            text = path.read_text()
            path.write_text(mutant.text)
            start = time.monotonic()
            failed = run(root, [mutant.file, *selection.tests(mutant)], asked.seconds, "-x")
            path.write_text(text)
            if failed:
                killers[mutant] = failed[0]
            said = f"killed by {failed[0]}" if failed else "SURVIVED"
            print(f"{number} {mutant.file}:{mutant.line} {'.'.join(mutant.names)}")
            print(f"    {mutant.before[:90]}  ->  {mutant.after[:90]}")
            print(f"    {said} ({time.monotonic() - start:.0f} s)", flush=True)
        ids = {test for test in killers.values() if "::" in test}
        broken = set(run(root, sorted(ids), 900)) if ids else set()
        doubtful = sum(test in broken for test in killers.values())
        killed, total = len(killers) - doubtful, len(drawn) - doubtful
        low, high = interval(killed, total)
        print(f"{killed} of {total} killed, {killed / total:.1%} ({low:.1%} to {high:.1%})")
        print(f"{doubtful} not counted: their tests fail on the sources as they are", *broken)


if __name__ == "__main__":
    main()
