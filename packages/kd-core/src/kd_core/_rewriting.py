"""Rewrites imports in the syntax tree of a program; needs `libcst`.

Knows the imports and attributes of a program; must not know which names kd has, or what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import libcst as cst
from libcst import helpers, metadata

OLD: Final = "tensordict"
_MODULES: Final = frozenset(f"{OLD}.{each}" for each in ("nn", "nn.distributions", "utils", "base"))


def rewritten(
    source: str, home_of: Callable[[str], str | None], about: Callable[[str], str | None]
) -> tuple[str, list[tuple[int, str]]]:
    """Return a program with its imports rewritten, and notes by line; see `Rewriter`."""
    tree = metadata.MetadataWrapper(cst.parse_module(source))
    rewriter = Rewriter(home_of, about)
    return tree.visit(rewriter).code, sorted(rewriter.notes, key=lambda note: note[0])


class Rewriter(cst.CSTTransformer):
    """Rewrites the imports of a program, and the names that it reads through them.

    Args:
        home_of: returns the package that has a name, or `None`.
        about: returns what the list of differences says of a name or a parameter, or `None`.
    """

    METADATA_DEPENDENCIES = (metadata.PositionProvider,)

    def __init__(
        self, home_of: Callable[[str], str | None], about: Callable[[str], str | None]
    ) -> None:
        super().__init__()
        self.home_of, self.about = home_of, about
        self.notes: list[tuple[int, str]] = []
        self.aliases: set[str] = set()
        self.needed: set[str] = set()
        self.kept = False

    def note(self, node: cst.CSTNode, text: str) -> None:
        position = self.get_metadata(metadata.PositionProvider, node)
        self.notes.append((position.start.line, text))

    def visit_Import(self, node: cst.Import) -> None:
        for each in node.names:
            name = helpers.get_full_name_for_node(each.name) or ""
            if name.split(".")[0] == OLD:
                alias = each.asname and helpers.get_full_name_for_node(each.asname.name)
                if alias and name != OLD:
                    self.note(node, f"rewrite `import {name} as {alias}` by hand")
                else:
                    self.aliases.add(alias or OLD)

    def visit_Call(self, node: cst.Call) -> None:
        name = (helpers.get_full_name_for_node(node.func) or "").rpartition(".")[2]
        for argument in node.args:
            if argument.keyword is not None:
                found = self.about(f"{name}({argument.keyword.value})")
                if found is not None:
                    self.note(argument, f"`{name}({argument.keyword.value}=)`: {found}")

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        full = helpers.get_full_name_for_node(updated_node) or ""
        top, _, name = full.partition(".")
        if top not in self.aliases or not name:
            return updated_node
        last = name.rpartition(".")[2]
        home = self.home_of(last)
        if home is None:
            if last[:1].islower() and f"{OLD}.{name}" in _MODULES:
                return updated_node  # a module on the way to a name
            self.explain(original_node, last)
            self.kept = True
            return updated_node
        self.needed.add(home)
        return cst.parse_expression(f"{home}.{last}")

    def leave_ImportFrom(
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
            home = self.home_of(name)
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

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        if len(updated_node.body) == len(original_node.body):
            return updated_node
        first, *rest = updated_node.body
        lines = [updated_node.with_changes(body=[first])]
        lines += [cst.SimpleStatementLine([statement]) for statement in rest]
        return cst.FlattenSentinel(lines)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        if not self.aliases or self.kept:
            return updated_node
        modules = sorted(self.needed or {"kd_core"})
        return updated_node.visit(_Imports(modules))

    def explain(self, node: cst.CSTNode, name: str) -> None:
        self.note(node, f"`{name}`: {self.about(name) or 'kd has no such name'}")


class _Imports(cst.CSTTransformer):
    """Replaces `import tensordict` by the packages whose names are used."""

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__()
        self.modules = modules

    def leave_Import(
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


def _dotted(name: str) -> cst.Attribute | cst.Name:
    parsed = cst.parse_expression(name)
    assert isinstance(parsed, cst.Attribute | cst.Name)
    return parsed


def _without_comma(aliases: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    default = cst.MaybeSentinel.DEFAULT
    return [alias.with_changes(comma=default) for alias in aliases]
