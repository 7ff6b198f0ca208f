"""Rewrite the imports of a program from tensordict to kd: `python -m kd_core.migrate PATH`.

The command shows a diff and writes nothing unless `--write` is given. It also lists, by file and
line, which of the decided differences the program touches, and which names kd lacks. It needs
`libcst`, which keeps comments and layout.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kd_core import MissingDependency
from kd_core._naming import decided, homes

if TYPE_CHECKING:
    import libcst as cst

OLD: Final = "tensordict"
# Where a name that several packages have is imported from.
_ORDER: Final = ("kd_core", "kd_nn", "kd_probabilistic", "kd_nn.distributions")


@dataclass(frozen=True)
class Note:
    """What somebody has to look at: a line of a program, and why."""

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
        import libcst
        from libcst import metadata
    except ImportError:
        raise MissingDependency("`libcst` is not installed. Run `pip install libcst`.") from None
    tree = metadata.MetadataWrapper(libcst.parse_module(source))
    rewriter = _rewriter(path)
    return tree.visit(rewriter).code, sorted(rewriter.notes, key=lambda note: note.line)


def _rewriter(path: Path) -> Any:  # a class of libcst, which is imported on demand
    import libcst as cst
    from libcst import helpers, metadata

    class Rewriter(cst.CSTTransformer):
        METADATA_DEPENDENCIES = (metadata.PositionProvider,)

        def __init__(self) -> None:
            super().__init__()
            self.notes: list[Note] = []
            self.aliases: set[str] = set()
            self.needed: set[str] = set()
            self.kept = False

        def note(self, node: cst.CSTNode, text: str) -> None:
            position: Any = self.get_metadata(metadata.PositionProvider, node)
            self.notes.append(Note(path, position.start.line, text))

        def visit_Import(self, node: cst.Import) -> None:  # noqa: N802  # libcst calls it so
            for each in node.names:
                name = helpers.get_full_name_for_node(each.name) or ""
                if name.split(".")[0] == OLD:
                    alias = each.asname and helpers.get_full_name_for_node(each.asname.name)
                    if alias and name != OLD:
                        self.note(node, f"rewrite `import {name} as {alias}` by hand")
                    else:
                        self.aliases.add(alias or OLD)

        def visit_Call(self, node: cst.Call) -> None:  # noqa: N802  # libcst calls it so
            name = (helpers.get_full_name_for_node(node.func) or "").rpartition(".")[2]
            for argument in node.args:
                if argument.keyword is not None:
                    row = _row(f"{name}({argument.keyword.value})")
                    if row is not None and "renamed" not in row:
                        text = f"`{name}({argument.keyword.value}=)`: {row['reason']}"
                        self.note(argument, f"{text} {row['instead']}")

        def leave_Attribute(  # noqa: N802  # libcst calls it so
            self, original_node: cst.Attribute, updated_node: cst.Attribute
        ) -> cst.BaseExpression:
            full = helpers.get_full_name_for_node(updated_node) or ""
            top, _, name = full.partition(".")
            if top not in self.aliases or not name:
                return updated_node
            last = name.rpartition(".")[2]
            home = home_of(last)
            if home is None:
                if last[:1].islower() and f"{OLD}.{name}" in _MODULES:
                    return updated_node  # a module on the way to a name
                self.explain(original_node, last)
                self.kept = True
                return updated_node
            self.needed.add(home)
            return cst.parse_expression(f"{home}.{last}")

        def leave_ImportFrom(  # noqa: N802  # libcst calls it so
            self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
        ) -> cst.ImportFrom | cst.FlattenSentinel[cst.BaseSmallStatement]:
            module = updated_node.module
            place = helpers.get_full_name_for_node(module) if module is not None else None
            if place is None or place.split(".")[0] != OLD or updated_node.relative:
                return updated_node
            if isinstance(updated_node.names, cst.ImportStar):
                self.note(original_node, f"`from {place} import *`: name what is used")
                return updated_node
            groups: dict[str, list[cst.ImportAlias]] = {}
            for each in updated_node.names:
                name = helpers.get_full_name_for_node(each.name) or ""
                home = home_of(name)
                if home is None:
                    self.explain(original_node, name)
                groups.setdefault(home or place, []).append(each)
            if list(groups) == [place]:
                return updated_node
            if len(groups) == 1:
                (home,) = groups
                return updated_node.with_changes(module=_dotted(home))
            return cst.FlattenSentinel(
                [
                    cst.ImportFrom(module=_dotted(home), names=_without_comma(groups[home]))
                    for home in sorted(groups)
                ]
            )

        def leave_SimpleStatementLine(  # noqa: N802  # libcst calls it so
            self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
        ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
            if len(updated_node.body) == len(original_node.body):
                return updated_node
            first, *rest = updated_node.body
            lines = [updated_node.with_changes(body=[first])]
            lines += [cst.SimpleStatementLine([statement]) for statement in rest]
            return cst.FlattenSentinel(lines)

        def leave_Module(  # noqa: N802  # libcst calls it so
            self, original_node: cst.Module, updated_node: cst.Module
        ) -> cst.Module:
            if not self.aliases or self.kept:
                return updated_node
            modules = sorted(self.needed or {"kd_core"})
            return updated_node.visit(_Imports(modules))

        def explain(self, node: cst.CSTNode, name: str) -> None:
            row = _row(name)
            reason = "kd has no such name" if row is None else f"{row['reason']} {row['instead']}"
            self.note(node, f"`{name}`: {reason}")

    class _Imports(cst.CSTTransformer):
        """Replaces `import tensordict` by the packages whose names are used."""

        def __init__(self, modules: Sequence[str]) -> None:
            super().__init__()
            self.modules = modules

        def leave_Import(  # noqa: N802  # libcst calls it so
            self, original_node: cst.Import, updated_node: cst.Import
        ) -> cst.BaseSmallStatement | cst.FlattenSentinel[cst.BaseSmallStatement]:
            names = [helpers.get_full_name_for_node(n.name) or "" for n in updated_node.names]
            if not any(name.split(".")[0] == OLD for name in names):
                return updated_node
            rest = [
                alias
                for alias, name in zip(updated_node.names, names, strict=True)
                if name.split(".")[0] != OLD
            ]
            added = [cst.ImportAlias(name=_dotted(module)) for module in self.modules]
            return updated_node.with_changes(names=_without_comma([*rest, *added]))

    def _dotted(name: str) -> Any:
        return cst.parse_expression(name)

    def _without_comma(aliases: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
        default = cst.MaybeSentinel.DEFAULT
        return [alias.with_changes(comma=default) for alias in aliases]

    return Rewriter()


_MODULES: Final = frozenset(f"{OLD}.{each}" for each in ("nn", "nn.distributions", "utils", "base"))


def _row(name: str) -> Mapping[str, str] | None:
    """Return the row of the decided list about a name, or about `"name(parameter)"`."""
    return next((rows[name] for rows in decided().values() if name in rows), None)


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
