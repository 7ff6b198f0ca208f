"""Public signatures do not say `Any`, and each ignored check has its reason beside it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.repo.tree import ROOT, source_files

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IGNORES = re.compile(r"#\s*(type: ignore|noqa)(?P<code>\[[^\]]*\]|:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)?")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def public_functions(
    tree: ast.AST, inside: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node, f"{inside}{node.name}.")
        elif isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            yield inside + node.name, node


def annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    taken = function.args
    every = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
    for argument in every:
        if argument is not None and argument.annotation is not None:
            yield argument.annotation
    if function.returns is not None:
        yield function.returns


def says_any(annotation: ast.expr) -> bool:
    text = ast.unparse(annotation)
    return re.search(r"\bAny\b", text) is not None


def vague(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        f"{name(path)}:{function.lineno}: `{qualified}` says `{ast.unparse(found)}`"
        for qualified, function in public_functions(tree)
        for found in annotations(function)
        if says_any(found)
    ]


def without_reason(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        match = IGNORES.search(line)
        if match is None or "`" in line[: match.start()].split('"')[-1]:
            continue
        above = number > 1 and lines[number - 2].strip().startswith("#")
        beside = re.match(r"\s*[#-]\s*\S", line[match.end() :])
        if match["code"] is None or not (beside or above):
            found.append(f"{name(path)}:{number}: {line.strip()}")
    return found


@pytest.mark.parametrize("path", source_files(), ids=name)
def test_no_public_signature_says_any(path: Path) -> None:
    assert vague(path) == []


@pytest.mark.parametrize("path", source_files(), ids=name)
def test_each_ignored_check_has_its_reason(path: Path) -> None:
    assert without_reason(path) == []


def test_what_is_missing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "planted.py"
    path.write_text(
        "class A:\n    def f(self, x: dict[str, Any]) -> int:\n"
        "        return x  # type: ignore[return-value]\n"
    )
    assert vague(path) == ["planted.py:2: `A.f` says `dict[str, Any]`"]
    assert without_reason(path) == ["planted.py:3: return x  # type: ignore[return-value]"]
