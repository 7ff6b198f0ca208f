"""Public signatures say their types: no `Any` in what users call."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.repo.tree import IMPORT_NAMES

PACKAGES = [
    *IMPORT_NAMES,
    "kd_core.extending",
    "kd_core.testing",
    "kd_nn.distributions",
    "kd_nn.fx",
]


def is_ours(function: Callable[..., object]) -> bool:
    return getattr(function, "__module__", "").partition(".")[0] in IMPORT_NAMES


def functions(thing: object) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield a function, or the constructor, the public methods and the getters of a class."""
    if inspect.isfunction(thing):
        yield thing.__name__, thing
    if not inspect.isclass(thing):
        return
    for name in dir(thing):
        member = inspect.getattr_static(thing, name)
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        is_public = not name.startswith("_") or (name.startswith("__") and name.endswith("__"))
        if is_public and inspect.isfunction(member) and is_ours(member):
            yield f"{thing.__name__}.{name}", member


def vague(function: Callable[..., object]) -> list[str]:
    """Return the annotations of a function that contain `Any`."""
    shown = {
        name: note if isinstance(note, str) else inspect.formatannotation(note)
        for name, note in inspect.get_annotations(function).items()
    }
    return [f"{name}: {note}" for name, note in shown.items() if re.search(r"\bAny\b", note)]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_signature_has_any(package: str) -> None:
    module = importlib.import_module(package)
    things = [getattr(module, name) for name in dir(module) if not name.startswith("_")]
    found = {
        name: notes
        for thing in things
        for name, function in functions(thing)
        if is_ours(function) and (notes := vague(function))
    }
    assert found == {}


def test_any_is_seen_in_a_signature() -> None:
    def takes(given: dict[str, Any], plain: dict[str, object]) -> "list[Any]":
        return [given, plain]

    assert vague(takes) == ["given: dict[str, typing.Any]", "return: list[Any]"]
