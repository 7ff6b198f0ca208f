"""Importing a name from the package that does not have it says which one does."""

import re
import sys
from importlib import import_module
from importlib.machinery import PathFinder

import pytest

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
