"""What the peer takes by position, kd takes by position, in the same order."""

import importlib
import inspect
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Final

import pytest

import kd_core
import kd_nn
import kd_probabilistic

pytest.importorskip("tensordict")

DECIDED: Final = {
    "*.init_remote": "the last parameter there is private, `_tensorclass_type`",
    "ProbabilisticTensorDictSequential.forward": "the last one is private, `_requires_sample`",
    "PackLayout.__init__": "`pack` makes layouts; programs do not",
    "TensorDictModule.forward": "`*args` belongs to the decorator of both, `dispatch`",
    "TensorClassModuleWrapper.forward": "likewise",
    "TensorDictParams.map": "all containers take it by keyword",
    "TensorDictParams.memmap_": "likewise",
    "TensorClass.from_tensordict": "a function there, which names the class, and a method here",
    "MetaData.*": "has no keys and no leaves that are copied",
}
"""What is let alone, and why."""

SAME_PLACE: Final = frozenset({"out", "alpha", "lock", "strict", "inplace", "non_blocking", "dim"})
"""Names that both libraries give to the same thing."""


def homes() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    yield importlib.import_module("tensordict"), (kd_core, kd_nn)
    yield importlib.import_module("tensordict.nn"), (kd_nn, kd_probabilistic, kd_core)


def pairs() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each public callable of the peer that kd has, and both of them."""
    for theirs, ours in homes():
        for name in dir(theirs):
            there = getattr(theirs, name)
            here = next((getattr(each, name) for each in ours if hasattr(each, name)), None)
            if name.startswith("_") or here is None or not callable(there):
                continue
            if not inspect.isclass(there):
                yield name, there, here
            elif inspect.isclass(here):
                for method in ("__init__", *(n for n in dir(there) if not n.startswith("_"))):
                    if callable(getattr(here, method, None)):
                        yield f"{name}.{method}", getattr(there, method), getattr(here, method)


def positional(function: Any) -> tuple[list[str], bool] | None:
    """Return the names of what is passed by position, and whether more of it is."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    more = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return [each.name for each in parameters if each.kind in kinds], more


def test_what_is_passed_by_position_is_taken_by_position() -> None:
    wrong, count = [], 0
    for name, there, here in pairs():
        theirs, ours = positional(there), positional(here)
        if theirs is None or ours is None or any(fnmatchcase(name, each) for each in DECIDED):
            continue
        count += 1
        fewer = len(ours[0]) < len(theirs[0]) and not ours[1]
        both = zip(theirs[0], ours[0], strict=False)
        moved = [pair for pair in both if pair[0] != pair[1] and SAME_PLACE.intersection(pair)]
        if fewer or moved:
            wrong.append(f"{name}: {theirs[0]} there, {ours[0]} here")
    assert count > 1500
    assert not wrong, "\n".join(wrong)
