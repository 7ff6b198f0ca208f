"""Files, functions and classes stay small enough to read in one go."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.repo.tree import ROOT, source_files, tracked_files

MODULE_LINES = 500
BODY_LINES = 40
METHODS = 25
NESTING = 3

# Written by tools/generate_ops.py: read its table instead.
GENERATED = {
    "packages/kd-core/src/kd_core/_ops/math/pointwise.py",
    "packages/kd-core/src/kd_core/_ops/math/reduction.py",
}
# "path" or "path::qualified name": why it is larger. This should be empty.
EXCEPTIONS: dict[str, str] = {}

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def measured() -> list[Path]:
    """Return the modules held to the sizes: everything tracked but benchmarks and generated."""
    tracked = {path for path in tracked_files() if path.suffix == ".py"}
    return sorted(
        path
        for path in tracked | set(source_files())
        if name(path) not in GENERATED and not name(path).startswith("benchmarks/")
    )


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        else:
            yield from definitions(node, prefix)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function, clean=False) else function.body
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Return how many blocks stand inside each other, an `elif` counting as its `if`."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        inside = depth + (isinstance(child, BLOCKS) and not is_elif)
        deepest = max(deepest, nesting(child, inside))
    return deepest


@cache
def too_large(path: Path) -> list[tuple[str, str]]:
    """Return the places of a module that are too large; two tests ask for each module."""
    return list(oversized(path))


def oversized(path: Path) -> Iterator[tuple[str, str]]:
    text = path.read_text(encoding="utf-8")
    if (lines := len(text.splitlines())) > MODULE_LINES:
        yield name(path), f"{lines} lines, at most {MODULE_LINES}"
    for qualified, node in definitions(ast.parse(text)):
        where = f"{name(path)}::{qualified}"
        if isinstance(node, ast.ClassDef):
            methods = {child.name for child in node.body if isinstance(child, FUNCTIONS)}
            if len(methods) > METHODS:
                yield where, f"{len(methods)} methods, at most {METHODS}"
        elif isinstance(node, FUNCTIONS):
            if (lines := body_lines(node)) > BODY_LINES:
                yield where, f"{lines} lines of body, at most {BODY_LINES}"
            if (depth := nesting(node)) > NESTING:
                yield where, f"{depth} blocks inside each other, at most {NESTING}"


@pytest.mark.parametrize("path", measured(), ids=name)
def test_fits(path: Path) -> None:
    found = {where: what for where, what in too_large(path) if where not in EXCEPTIONS}
    assert found == {}


def test_every_exception_is_still_needed() -> None:
    needed = {where for path in measured() for where, _ in too_large(path)}
    assert set(EXCEPTIONS) <= needed


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("x = 1\n" * 501, "501 lines"),
        ("def f():\n" + "    x = 1\n" * 41, "41 lines of body"),
        ("class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(26)), "26 methods"),
        ("def f():\n" + "".join(" " * i + " if x:\n" for i in range(4)) + "     x\n", "4 blocks"),
    ],
)
def test_a_large_thing_is_seen(tmp_path: Path, source: str, what: str) -> None:
    assert any(what in found for found in sizes_of(source, tmp_path))


def sizes_of(source: str, folder: Path) -> list[str]:
    path = folder / "planted.py"
    path.write_text(source, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.ROOT", folder)
        return [what for _, what in oversized(path)]
