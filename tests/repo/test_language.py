"""The four distributions speak one plain English: docstrings, messages, comments and imports.

`python -m tests.repo.test_language [FOLDER or FILE ...]` prints what would be refused.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.repo.tree import IMPORT_NAMES, ROOT, source_files

# Folders and files whose language is not done yet, as paths below `packages/*/src`. This should
# be empty.
NOT_DONE: tuple[str, ...] = ()

# What the docstring of a function starts with. A new verb is welcome where a reader of the
# documentation of PyTorch would expect it and none of these says the same.
VERBS = """
Abbreviate Accept Accumulate Add Align Allocate Allow Annotate Append Apply Assert Assign Attach
Bind Broadcast Build Cache Call Capture Cast Change Check Choose Clamp Classify Clear Clone Close
Collate Collect Combine Compare Compile Complete Compute Concatenate Configure Consolidate
Construct Convert Copy Count Create Decide Declare Decode Decorate Deduplicate Define Delegate
Delete Describe Detach Detect Determine Disable Discard Dispatch Display Distribute Divide Draw
Drop Duplicate Emit Enable Encode Enter Enumerate Escape Estimate Evaluate Exchange Exclude
Execute Exit Expand Export Extend Extract Fill Filter Find Flatten Flip Fold Forbid Format Forward
Free Gather Generate Get Group Handle Hash Identify Ignore Implement Import Index Infer Inherit
Initialise Inline Insert Inspect Install Interpolate Intersect Invalidate Invert Invoke Iterate
Join Keep Limit List Load Locate Lock Lower Map Mark Mask Match Materialise Measure Merge Mirror
Move Multiply Name Negate Nest Normalise Notify Open Order Overlay Override Overwrite Pack Pad
Pair Parse Partition Patch Perform Permute Pickle Pin Populate Prefix Prepare Prevent Print
Propagate Prune Quote Raise Rank Read Rebind Rebuild Receive Recompute Record Redirect Reduce
Refresh Refuse Register Reject Release Reload Remove Rename Render Reorder Repeat Replace Replay
Report Represent Reset Reshape Resolve Restore Restrict Retrieve Return Reuse Reverse Rewrite Roll
Round Run Sample Save Scale Scan Scatter Score Select Send Serialise Set Share Shift Show Sign
Simplify Simulate Skip Slice Solve Sort Split Squeeze Stack Stage Start Stop Store Strip
Substitute Subtract Sum Summarise Supply Support Suppress Swap Switch Test Trace Track Transform
Translate Transpose Traverse Truncate Try Unbind Undo Unflatten Unlock Unpack Unregister Unwrap
Update Use Validate Verify View Visit Wait Warn Wrap Write Yield Zero
"""

# What no message, docstring or comment says, and what to write for it.
PHRASES = {
    r"\bcame\b": "expected X, got Y",
    r"(?<!\bthere )\b(is|are|was|were) no\b(?! longer)": "is not a ..., has no ...",
    r"\b0 or more\b": "non-negative",
    r"\bgo(es)? without\b": "cannot be combined with",
    r"\bvouch(es)?\b": "requires ...",
    r"\bis let near\b": "the condition itself",
    r"\blaid over\b": "overlay",
    r"\bof the moment\b": "current",
    r"\bsomebody\b": "the caller, a hook, a thread: the one that is meant",
    r"\ba `[aeioAEIO]": "an `...`; `with_article` writes it before any name",
}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOUNS = {"property", "cached_property", "setter"}


@pytest.mark.parametrize("path", source_files(), ids=lambda path: relative(path))
def test_speaks_plainly(path: Path) -> None:
    if not is_pending(path):
        assert findings(path) == []


def test_every_pending_folder_is_there() -> None:
    names = [relative(path) for path in source_files()]
    assert [name for name in NOT_DONE if not any(is_below(path, name) for path in names)] == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ('def f():\n    """Give one."""\n', ":1: docstring starts with `Give`"),
        ('def f():\n    """`x`: a thing."""\n', ":1: docstring starts with `x`"),
        ('class A:\n    def f(self):\n        """A thing."""\n', ":2: docstring starts with `A`"),
        ('raise ValueError(\n    "expected a key, but 3 came."\n)\n', ":2: 'came'"),
        ('raise ValueError(f"{x!r} is no tensor.")\n', ":1: 'is no'"),
        ("x = 1  # where somebody looks\n", ":1: 'somebody'"),
        ("x = 'got a `int`'\n", ":1: 'a `i'"),
        ("from . import x\n", ":1: relative import"),
        ("import kd_core._keys\n", ":1: `import kd_core._keys`"),
    ],
)
def test_what_is_not_plain_is_seen(tmp_path: Path, source: str, what: str) -> None:
    path = tmp_path / "planted.py"
    path.write_text(source, encoding="utf-8")
    assert any(what in found for found in findings(path))


@pytest.mark.parametrize(
    "source",
    [
        'class A:\n    @property\n    def f(self):\n        """The batch size."""\n',
        'def f():\n    """Return one, or `None` where there is no entry."""\n',
        'x = f"`{key}` is no longer a member"\n',
        "from kd_core import _keys\n",
    ],
)
def test_what_is_plain_passes(tmp_path: Path, source: str) -> None:
    path = tmp_path / "plain.py"
    path.write_text(source, encoding="utf-8")
    assert findings(path) == []


def relative(path: Path) -> str:
    """Return a path below `packages/*/src`, or its name where it is elsewhere."""
    if not path.is_relative_to(ROOT / "packages"):
        return path.name
    return "/".join(path.relative_to(ROOT / "packages").parts[2:])


def is_below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(f"{folder}/")


def is_pending(path: Path) -> bool:
    return any(is_below(relative(path), folder) for folder in NOT_DONE)


def findings(path: Path) -> list[str]:
    """Return what a file says that it should not, each with its place."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = [*docstrings(tree), *phrases(tree, text), *imports(tree)]
    place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return [f"{place}:{line}: {what}" for line, what in sorted(found)]


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, FUNCTIONS) or is_property(node):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        first = text.split()[0].strip("`.,:;") if text.split() else ""
        if first not in VERBS.split():
            yield node.lineno, f"docstring starts with `{first}`, expected a verb of VERBS"


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether users see an attribute, whose docstring names what it is."""
    return any(ast.unparse(mark).split(".")[-1] in NOUNS for mark in function.decorator_list)


def phrases(tree: ast.AST, text: str) -> Iterator[tuple[int, str]]:
    for line, said in [*strings(tree), *comments(text)]:
        for pattern, better in PHRASES.items():
            for match in re.finditer(pattern, said):
                at = line + said.count("\n", 0, match.start())
                yield at, f"'{match[0]}', expected: {better}"


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import, expected `from kd_x.y import z`"
        elif isinstance(node, ast.Import):
            strangers = {alias.name for alias in node.names if is_own(alias.name)}
            yield from (
                (node.lineno, f"`import {name}`, expected `from kd_x.y import z`")
                for name in sorted(strangers)
            )


def is_own(name: str) -> bool:
    return name.split(".")[0] in IMPORT_NAMES


def main(names: list[str]) -> int:
    """Print the findings of some folders or files, of all sources by default."""
    wanted = [Path(name).resolve() for name in names]
    count = 0
    for path in source_files():
        if wanted and not any(path.is_relative_to(place) for place in wanted):
            continue
        for found in findings(path):
            print(found)
            count += 1
    print(f"{count} findings")
    return count > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
