"""Importing a package loads nothing heavy that plain `import torch` does not load.

What an import costs is held without a clock: how many modules it loads, how long their sources are,
and how often it compiles text, as each `NamedTuple` and each dataclass does when it is created.
"""

import subprocess
import sys

import pytest
from tests.repo.tree import IMPORT_NAMES

HEAVY = {
    "matplotlib",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "rich",
    "safetensors",
    "sklearn",
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._inductor",
    "torch.distributed",
    "torch.export",
    "torch.fx",
    "torch.onnx",
}
PROGRAM = """
import sys, torch
before = set(sys.modules)
import {name}
print(*sorted(set(sys.modules) - before))
"""


def modules_added_by(name: str) -> set[str]:
    command = [sys.executable, "-c", PROGRAM.format(name=name)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(result.stdout.split())


BUDGETS = {
    "kd_core": (103, 1_012_000, 11),
    "kd_nn": (135, 1_227_000, 13),
    "kd_probabilistic": (155, 1_378_000, 13),
}
"""For each package with those that it needs: modules, bytes of their sources, compiled texts.

They leave a little room. What few programs need is imported when it is first used: see `publish` in
`kd_core.extending`.
"""
COSTS = """
import os, sys, torch
compiled = []
def note(event, args):  # a module without bytecode is compiled, too, but under its path
    if event == "compile" and args[0] is not None and not os.path.isabs(str(args[1] or "")):
        compiled.append(args)
sys.addaudithook(note)
import {name}
made = [module for key, module in sys.modules.items() if key.startswith("kd_")]
print(len(made), sum(os.path.getsize(module.__file__) for module in made), len(compiled))
"""


def costs_of(name: str) -> list[int]:
    """Return what counts against the budget of a package."""
    command = [sys.executable, "-c", COSTS.format(name=name)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(number) for number in result.stdout.split()]


def heavy_among(modules: set[str]) -> set[str]:
    return {m for m in modules if any(m == heavy or m.startswith(heavy + ".") for heavy in HEAVY)}


@pytest.mark.parametrize("name", IMPORT_NAMES)
def test_import_loads_nothing_heavy(name: str) -> None:
    added = modules_added_by(name)
    assert name in added
    assert heavy_among(added) == set()


@pytest.mark.parametrize("name", BUDGETS)
def test_import_keeps_to_its_budget(name: str) -> None:
    costs = dict(zip(("modules", "bytes", "compiled"), costs_of(name), strict=True))
    budget = dict(zip(costs, BUDGETS[name], strict=True))
    assert {what: cost for what, cost in costs.items() if cost > budget[what]} == {}


def test_what_is_imported_besides_is_counted() -> None:
    alone, more = costs_of("kd_core"), costs_of("kd_core.store")
    assert all(cost < further for cost, further in zip(alone, more, strict=True))


def test_a_heavy_import_is_seen() -> None:
    assert "torch._dynamo" in heavy_among(modules_added_by("torch._dynamo"))
