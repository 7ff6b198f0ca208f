"""Count what a reader of the packages meets: modules, lines, suppressions, private names of torch.

    python tools/measure.py [FOLDER ...]    a table; one column for each copy of the repository

The first folder is this repository if none is given.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median

DISTRIBUTIONS = ("kd-core", "kd-nn", "kd-probabilistic", "kd-export")
PRIVATE = re.compile(r"torch(\.\w+)*?\._(?!_|foreach_|inductor\.aoti_)\w+(\.\w+)*")
"""Names that the documentation of torch gives, as `torch._foreach_add`, are not counted."""


def code_lines(tree: ast.Module, text: str) -> int:
    """Count the lines that hold code: no docstrings, comments or blank lines."""
    documented = set[int]()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        number not in documented and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in lines
    )


def imported(tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules of the distribution that one imports, for type checkers too."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{each.name}" for each in node.names}
            found |= (names & known) or ({node.module} & known)
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names} & known
    return found


def private_of_torch(tree: ast.Module) -> set[str]:
    """Return the private names of torch that a module reads or imports."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(ast.unparse(node)):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names = {each.name for each in node.names}
            found |= {name for name in names if PRIVATE.fullmatch(f"{node.module}.{name}")}
    return found


def measured(source: Path) -> dict[str, int]:
    """Return the counts of one distribution, by what is counted."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    names = {
        path: ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in texts
    }
    lines = [code_lines(trees[path], text) for path, text in texts.items()]
    known = set(names.values())
    importers = Counter(name for tree in trees.values() for name in imported(tree, known))
    private = {path: private_of_torch(tree) for path, tree in trees.items()}
    elsewhere = [found for path, found in private.items() if path.stem != "_torch_private"]
    return {
        "modules": len(texts),
        "lines of code": sum(lines),
        "median module": int(median(lines)),
        "longest module": max(lines),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "`cast`": sum(len(re.findall(r"\bcast\(", text)) for text in texts.values()),
        "`type: ignore`": sum(text.count("type: ignore[") for text in texts.values()),
        "private names of torch": len(set().union(*private.values())),
        "of them outside `_torch_private`": len(set().union(*elsewhere)),
    }


def main(folders: list[Path]) -> None:
    """Print the table."""
    for distribution in DISTRIBUTIONS:
        columns = [measured(folder / "packages" / distribution / "src") for folder in folders]
        print(f"\n{distribution}")
        for name in columns[0]:
            print(f"  {name:34}" + "".join(f"{column[name]:>8}" for column in columns))


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]] or [Path(__file__).parent.parent])
