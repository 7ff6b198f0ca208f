"""Importing a name from the package that does not have it says which one does."""

import re
import sys
from importlib import import_module
from importlib.machinery import PathFinder

import pytest
from tests import children

from kd_core._naming import homes

PACKAGES = ("kd_core", "kd_nn", "kd_nn.distributions", "kd_probabilistic")
PAIRS = [
    (package, name)
    for package in PACKAGES
    for name in homes()
    if not hasattr(import_module(package), name)
]


@pytest.mark.parametrize(("package", "name"), PAIRS)
def test_the_error_says_an_import_that_works(package: str, name: str) -> None:
    with pytest.raises(ImportError) as imported:
        exec(f"from {package} import {name}")
    with pytest.raises(AttributeError) as read:
        getattr(import_module(package), name)
    assert str(imported.value) == str(read.value)
    statement = re.fullmatch(rf"`{name}` is not in `{package}`\. Write `(.*)`", str(read.value))
    assert statement
    exec(statement[1])


def test_each_package_names_what_another_one_lacks() -> None:
    assert {package for package, _ in PAIRS} == set(PACKAGES)


def test_a_package_that_is_not_installed_is_installed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PathFinder, "find_spec", lambda *_: None)
    monkeypatch.delitem(sys.modules, "kd_probabilistic", raising=False)
    with pytest.raises(ImportError, match="`pip install kd-probabilistic`, then `from kd_prob"):
        from kd_nn import InteractionType  # type: ignore[attr-defined]  # noqa: F401  # the promise


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("kd_core.nn", "from `kd_nn`, and distributions from `kd_probabilistic`"),
        ("kd_core.tensorclass", "Import its names from `kd_core`"),
        ("kd_nn.nn", "Import its names from `kd_nn`"),
        ("kd_nn.probabilistic", "Import its names from `kd_probabilistic`"),
        ("kd_probabilistic.modules", "Import its names from `kd_probabilistic`"),
        ("kd_export.onnx", "The format is the suffix of the file"),
    ],
)
def test_a_module_written_from_habit_says_what_to_import(module: str, instead: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"No module named '{module}'\. .*{instead}"):
        import_module(module)


@pytest.mark.parametrize(
    ("package", "misspelt", "meant"),
    [
        ("kd_core", "Tensordict", "TensorDict"),
        ("kd_nn", "TensorDictSequental", "TensorDictSequential"),
        ("kd_probabilistic", "InteractionTypes", "InteractionType"),
    ],
)
def test_a_misspelt_import_says_the_name_that_is_meant(
    package: str, misspelt: str, meant: str
) -> None:
    said = f"`{misspelt}` is not in `{package}`. Did you mean `from {package} import {meant}`?"
    with pytest.raises(ImportError, match=re.escape(said)):
        exec(f"from {package} import {misspelt}")


@pytest.mark.parametrize("name", ["kd_core.store", "kd_core.distributed", "kd_nn.fx"])
def test_a_public_module_is_an_attribute_of_its_package(name: str) -> None:
    package, _, part = name.rpartition(".")
    program = f"import {package}; print({name}.__name__, hasattr({package}, '{part}s'))"
    assert children.check_output("-W", "ignore", "-c", program).split() == [name, "False"]
