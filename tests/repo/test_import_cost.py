"""Importing a package loads nothing heavy that plain `import torch` does not load."""

import pytest
from tests import children
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
    return set(children.check_output("-c", PROGRAM.format(name=name)).split())


def heavy_among(modules: set[str]) -> set[str]:
    return {m for m in modules if any(m == heavy or m.startswith(heavy + ".") for heavy in HEAVY)}


@pytest.mark.parametrize("name", IMPORT_NAMES)
def test_import_loads_nothing_heavy(name: str) -> None:
    added = modules_added_by(name)
    assert name in added
    assert heavy_among(added) == set()


def test_a_heavy_import_is_seen() -> None:
    assert "torch._dynamo" in heavy_among(modules_added_by("torch._dynamo"))
