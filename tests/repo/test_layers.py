"""Imports follow the arrows of docs/design.md: "What may import what"."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.repo.tree import IMPORT_NAMES, ROOT, SOURCES, source_files
from torch import fx, nn
from torch.distributions import Distribution
from torch.export import ExportedProgram


def test_import_contracts_hold() -> None:
    command = shutil.which("lint-imports", path=Path(sys.executable).parent)
    assert command, "import-linter is not installed beside this Python"
    search = os.pathsep.join(map(str, SOURCES))
    environment = os.environ | {"PYTHONPATH": search, "NO_COLOR": "1"}
    result = subprocess.run(
        [command, "--no-cache"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything that `tree` imports absolutely."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@functools.cache
def parsed(source: str) -> ast.Module:
    """Parse a module once for all checks."""
    return ast.parse(source)


def private_siblings(source: str, own: str) -> list[str]:
    """Return the private names of other distributions that `source` imports."""
    found = []
    for line, dotted in imported(parsed(source)):
        top, *rest = dotted.split(".")
        is_sibling = top in IMPORT_NAMES and top != own
        if is_sibling and any(part.startswith("_") and part != "__version__" for part in rest):
            found.append(f"line {line}: {dotted}")
    return found


@pytest.mark.parametrize("own", IMPORT_NAMES)
def test_only_public_names_cross_a_border(own: str) -> None:
    crossings = {
        str(path.relative_to(ROOT)): found
        for path in source_files()
        if own in path.parts and (found := private_siblings(path.read_text(encoding="utf-8"), own))
    }
    assert crossings == {}


def test_a_private_crossing_is_seen() -> None:
    source = "import kd_core._keys\nfrom kd_core import _keys\nfrom kd_core import TensorDict\n"
    assert len(private_siblings(source, "kd_nn")) == 2


BELOW = {
    "core": {"kd_core"},
    "nn": {"kd_core", "kd_nn"},
    "probabilistic": {"kd_core", "kd_nn", "kd_probabilistic"},
    "export": {"kd_core", "kd_nn", "kd_export"},
}


@pytest.mark.parametrize("area", BELOW)
def test_tests_of_a_package_need_what_its_wheel_brings(area: str) -> None:
    above = {
        f"{path.relative_to(ROOT)}, line {line}: {dotted}"
        for path in (ROOT / "tests" / area).rglob("*.py")
        for line, dotted in imported(parsed(path.read_text(encoding="utf-8")))
        if dotted.split(".")[0] in set(IMPORT_NAMES) - BELOW[area]
    }
    assert above == set()


# The documentation of torch gives these names, though they begin with an underscore.
DOCUMENTED = ("foreach_", "inductor.aoti_")


def spelt(node: ast.expr) -> str:
    """Return names and attributes as they are written, `?` for what else they are read from."""
    if isinstance(node, ast.Attribute):
        return f"{spelt(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def private_torch_names(source: str) -> list[str]:
    """Return the private names of torch that `source` imports, reads or has as text, by line."""
    tree = parsed(source)
    dotted = [*imported(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted.append((node.lineno, spelt(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            dotted.append((node.lineno, node.value))
    documented = "|".join(map(re.escape, DOCUMENTED))
    private = re.compile(rf"torch(\.\w+)*?\._(?!_|{documented})\w+(\.\w+)*")
    return [f"line {line}: {name}" for line, name in sorted(dotted) if private.fullmatch(name)]


def test_private_names_of_torch_stand_in_one_module_of_each_distribution() -> None:
    elsewhere = {
        str(path.relative_to(ROOT)): found
        for path in source_files()
        if path.name != "_torch_private.py"
        and (found := private_torch_names(path.read_text(encoding="utf-8")))
    }
    assert elsewhere == {}


# What the documentation of torch names: the version of a tensor, dicts of a module; and what those
# override who write modules or distributions.
IN_PLACE = {"_version", "_parameters", "_buffers", "_modules", "_apply"}
IN_PLACE |= {"_validate_args", "_get_checked_instance"}
OWNERS = (torch.Tensor, nn.Module(), Distribution, ExportedProgram, fx.Graph, fx.GraphModule)
"""What has private attributes that could be read."""


def private_attributes(source: str) -> dict[str, int]:
    """Return the private attributes that `source` reads of others than itself, with a line."""
    nodes = list(ast.walk(parsed(source)))
    return {
        node.attr: node.lineno
        for node in nodes
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_|kd_)", node.attr)
        and spelt(node.value) != "self"
        and not (isinstance(node.value, ast.Call) and spelt(node.value.func) == "super")
    } | {
        str(node.args[1].value): node.lineno
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and isinstance(node.args[1], ast.Constant)
        and re.match(r"_(?!_|kd_)", str(node.args[1].value))
    }


def test_private_attributes_of_torch_are_read_in_one_module_of_each_distribution() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in source_files()}
    of_torch = {
        name
        for path, text in texts.items()
        if path.name == "_torch_private.py"
        for name in private_attributes(text)
    } | {name for owner in OWNERS for name in dir(owner) if re.match(r"_(?!_|kd_)", name)}
    elsewhere = {
        f"{path.relative_to(ROOT)}, line {line}: {name}"
        for path, text in texts.items()
        if path.name != "_torch_private.py"
        for name, line in private_attributes(text).items()
        if name in of_torch - IN_PLACE
    }
    assert {"_cdata", "_base", "_call_impl", "_schema"} <= of_torch
    assert elsewhere == set()


def test_a_private_name_of_torch_is_seen() -> None:
    source = "from torch.utils import _pytree\nimport torch\ntorch._C._is_tracing()\ntorch.add\n"
    source += "torch._foreach_add\nnames = ['torch._dynamo', 'torch.fx']\n"
    assert [found.partition(":")[0] for found in private_torch_names(source)] == [
        "line 1",
        "line 3",
        "line 3",
        "line 6",
    ]
