"""Every public name is re-exported on purpose, shown by an example and has a place in the docs."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import TypeGuard

import pytest
from tests import children
from tests.repo.tree import IMPORT_NAMES, ROOT

from kd_core import TensorDictBase
from kd_core._naming import LeftOut

AUTODOC = re.compile(
    r"^\.\. auto(?:class|function|exception|data)::\s+(?:\w+\.)*(\w+)", re.MULTILINE
)
METHOD = re.compile(r"^\.\. auto(?:method|property):: TensorDictBase\.(\w+)", re.MULTILINE)

PACKAGES = [*IMPORT_NAMES, "kd_nn.distributions"]


def init_of(name: str) -> Path:
    package = name.partition(".")[0].replace("_", "-")
    return ROOT.joinpath("packages", package, "src", *name.split("."), "__init__.py")


def strangers(source: str) -> list[str]:
    """Return what an `__init__` holds beside re-exports, registrations, `publish` and a version.

    Names that are imported when they are first used are re-exported under `TYPE_CHECKING`.
    """
    found = []
    for position, node in enumerate(ast.parse(source).body):
        is_docstring = (
            position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        )
        allowed = (
            is_hidden(node)
            or is_reexport(node)
            or (is_for_type_checkers(node) and all(map(is_reexport, node.body)))
            or is_publishing(node)
            or is_version(node)
        )
        if not (is_docstring or allowed):
            found.append(ast.unparse(node))
    return found


def is_reexport(node: ast.stmt) -> bool:
    return is_own_import(node) and all(alias.asname == alias.name for alias in node.names)


def is_hidden(node: ast.stmt) -> bool:
    """Check for what is loaded for its effect: `from kd_core import _pytree as _x`."""
    return is_own_import(node) and all((alias.asname or "").startswith("_") for alias in node.names)


def is_publishing(node: ast.stmt) -> bool:
    return ast.unparse(node).startswith("_publish(__name__")


def is_for_type_checkers(node: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_own_import(node: ast.stmt) -> TypeGuard[ast.ImportFrom]:
    if not isinstance(node, ast.ImportFrom):
        return False
    return node.level == 1 or (node.module or "").split(".")[0] in IMPORT_NAMES


def is_version(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "typing" and {"Final", "TYPE_CHECKING"}.issuperset(
            alias.name for alias in node.names
        )
    return isinstance(node, (ast.Assign, ast.AnnAssign)) and ast.unparse(node).startswith(
        "__version__"
    )


# Classes of torch under a name that users of tensordict look for.
OF_TORCH = {"Buffer"}


def exported(name: str) -> set[str]:
    tree = ast.parse(init_of(name).read_text(encoding="utf-8"))
    imports = [node for node in tree.body if is_own_import(node) and not is_hidden(node)]
    found = {alias.name for node in imports for alias in node.names} | later(name).keys()
    return found - OF_TORCH


def later(name: str) -> dict[str, str | None]:
    """Return the names that a package imports when they are first used, with their modules."""
    tree = ast.parse(init_of(name).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if is_for_type_checkers(node)]
    imports = [node for block in blocks for node in block.body if is_own_import(node)]
    return {alias.name: node.module for node in imports for alias in node.names}


def documented(name: str) -> set[str]:
    return {found for page in reference(name) for found in AUTODOC.findall(page)}


def reference(name: str) -> list[str]:
    """Return the reference pages of a distribution: one, and one more for each topic of methods."""
    topic = name.removeprefix("kd_")
    pages = sorted((ROOT / "docs" / "reference").glob(f"{topic}*.md"))
    return [page.read_text(encoding="utf-8") for page in pages if page.stem.split("-")[0] == topic]


@pytest.mark.parametrize("name", IMPORT_NAMES)
def test_init_holds_reexports_only(name: str) -> None:
    assert strangers(init_of(name).read_text(encoding="utf-8")) == []


def test_code_in_an_init_is_seen() -> None:
    source = '"""Doc."""\nfrom ._x import y\nimport os\nz = 1\n__version__ = "1"\n'
    assert strangers(source) == ["from ._x import y", "import os", "z = 1"]


@pytest.mark.parametrize("name", [*IMPORT_NAMES, "kd_core.extending", "kd_nn.distributions"])
def test_exported_names_say_that_they_are_public(name: str) -> None:
    package = importlib.import_module(name)
    exports = [getattr(package, key) for key in dir(package) if not key.startswith("_")]
    homes = {
        value.__module__
        for value in exports
        if callable(value) and value.__module__.startswith("kd_")
    }
    assert homes - {"kd_core.convert", "kd_nn.distributions"} <= {name}


@pytest.mark.parametrize("name", PACKAGES)
def test_names_are_imported_later_from_the_modules_that_type_checkers_see(name: str) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(init_of(name).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_publish"
    ]
    tables = [ast.literal_eval(option.value) for call in calls for option in call.keywords]
    homes = {
        found: home for table in tables for home, held in table.items() for found in held.split()
    }
    assert homes == later(name)


@pytest.mark.parametrize("name", PACKAGES)
def test_classes_say_that_they_are_public_before_their_names_are_used(name: str) -> None:
    program = (
        f"import importlib, {name}\n"
        f"for found, home in {later(name)!r}.items():\n"
        "    thing = getattr(importlib.import_module(home), found)\n"
        "    if isinstance(thing, type): print(thing.__module__)"
    )
    told = children.check_output("-c", program)
    assert [home for home in told.split() if "._" in home] == []


@pytest.mark.parametrize("name", IMPORT_NAMES)
def test_no_exported_name_is_private(name: str) -> None:
    assert {found for found in exported(name) if found.startswith("_")} == set()


@pytest.mark.parametrize("name", IMPORT_NAMES)
def test_reference_lists_each_exported_name(name: str) -> None:
    assert exported(name) - documented(name) == set()


def test_each_method_of_containers_stands_on_one_page() -> None:
    listed = [found for page in reference("kd_core") for found in METHOD.findall(page)]
    methods = {
        key
        for key, value in inspect.getmembers_static(TensorDictBase)
        if not key.startswith("_") and not isinstance(value, LeftOut)
    }
    assert sorted(listed) == sorted(methods)


def test_each_family_of_methods_shows_an_example() -> None:
    families = [
        family
        for page in reference("kd_core")
        for family in re.split(r"^## ", page, flags=re.MULTILINE)
        if METHOD.search(family)
    ]
    assert len(families) > 30
    assert [family.split("\n")[0] for family in families if ">>>" not in family] == []


@pytest.mark.parametrize("name", IMPORT_NAMES)
def test_each_exported_name_shows_an_example(name: str) -> None:
    package = importlib.import_module(name)
    lacking = set()
    for found in exported(name):
        thing = getattr(package, found)
        is_error = inspect.isclass(thing) and issubclass(thing, Exception)
        is_code = inspect.isclass(thing) or inspect.isfunction(thing)
        if is_code and not is_error and ">>>" not in (thing.__doc__ or ""):
            lacking.add(found)
    assert lacking == set()
