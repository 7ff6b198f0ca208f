"""Rewrite the imports of a program from tensordict to kd: `python -m kd_core.migrate PATH`.

The command shows a diff and writes nothing unless `--write` is given. It also lists, by file and
line, which of the decided differences the program touches, and which names kd lacks. It needs
`libcst`, which keeps comments and layout.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from kd_core import MissingDependency
from kd_core._naming import decided, homes

OLD: Final = "tensordict"
# Where a name that several packages have is imported from.
_ORDER: Final = ("kd_core", "kd_nn", "kd_probabilistic", "kd_nn.distributions")


@dataclass(frozen=True)
class Note:
    """A line of a program that must be changed by hand, and why."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def home_of(name: str) -> str | None:
    """Return the package of kd that a public name of tensordict is imported from.

    Returns:
        The package; `None` if kd has no such name.

    Example:
        >>> home_of("TensorDict"), home_of("TensorDictModule"), home_of("no_such")
        ('kd_core', 'kd_nn', None)
    """
    if name.startswith("_"):
        return None
    if name in homes():
        return homes()[name]
    for package in _ORDER:
        try:
            module = import_module(package)
            getattr(module, name)
        except (ImportError, AttributeError):
            continue
        return package
    return None


def migrate(source: str, path: Path = Path("program.py")) -> tuple[str, list[Note]]:
    """Return a program with its imports rewritten, and what to look at in it.

    Args:
        source: the text of the program.
        path: its file, for the notes.

    Raises:
        MissingDependency: if `libcst` is not installed.

    Example:
        >>> text = "from tensordict import TensorDict"
        >>> migrate(text)[0]  # doctest: +SKIP
        'from kd_core import TensorDict'
    """
    try:
        import libcst  # noqa: F401  # the module below is made of its classes
    except ImportError:
        raise MissingDependency("`libcst` is not installed. Run `pip install libcst`.") from None
    from kd_core._rewriting import rewritten

    result, found = rewritten(source, home_of, _about)
    return result, [Note(path, line, text) for line, text in found]


def _about(name: str) -> str | None:
    """Return what the list of differences says of a name, or of `"name(parameter)"`."""
    row = next((rows[name] for rows in decided().values() if name in rows), None)
    return None if row is None else f"{row['reason']} {row['instead']}".rstrip()


def programs(path: Path) -> Iterator[Path]:
    """Yield the Python files at a path: the file itself, or all in a folder."""
    if path.is_dir():
        yield from sorted(p for p in path.rglob("*.py") if not _is_hidden(p.relative_to(path)))
    else:
        yield path


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, 0, or 2 for wrong use.

    Args:
        arguments: the words of the command line; `None`: those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kd_core.migrate",
        description="Rewrite imports of tensordict to kd. Without `--write`: only show how.",
    )
    parser.add_argument("path", type=Path, help="a file, or a folder with Python files")
    parser.add_argument("--write", action="store_true", help="write the files")
    options = parser.parse_args(arguments)
    if not options.path.exists():
        print(f"`{options.path}` not found", file=sys.stderr)
        return 2
    changed, notes = 0, []
    for path in programs(options.path):
        source = path.read_text(encoding="utf-8")
        if OLD not in source:
            continue
        try:
            result, found = migrate(source, path)
        except MissingDependency as error:
            print(error, file=sys.stderr)
            return 2
        notes += found
        if result != source:
            changed += 1
            before, after = source.splitlines(keepends=True), result.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path)))
            if options.write:
                path.write_text(result, encoding="utf-8")
    for note in notes:
        print(note)
    did = "changed" if options.write else "to change (give `--write`)"
    print(f"{changed} files {did}, {len(notes)} lines to look at")
    return 0


if __name__ == "__main__":
    sys.exit(main())
