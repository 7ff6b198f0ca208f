"""Operations on the names of dimensions, beside a list of names."""

from __future__ import annotations

from random import Random
from typing import TypeAlias

from tests.fuzz.checking import Call, Refusal
from tests.fuzz.registry import operation
from tests.fuzz.subjects import Plain, Subject, read

from kd_core import KdError, TensorDictBase

Names: TypeAlias = "list[str | None]"

WORDS = ("time", "env", "agent", "step")


def some_names(rng: Random, ndim: int) -> Names:
    """Return a name or none for each dimension, now and then wrong ones."""
    chosen: Names = [rng.choice([word, None]) for word in rng.sample(WORDS, min(ndim, len(WORDS)))]
    if rng.random() < 0.1:
        return [*chosen, "more"] if rng.random() < 0.5 else ["time"] * ndim
    return chosen


def checked(names: Names, ndim: int) -> Names:
    real = [name for name in names if name is not None]
    if len(names) != ndim or len(set(real)) < len(real):
        raise Refusal("one for each dimension, no two the same")
    return names


def refined(old: Names, new: Names) -> Names:
    if len(old) != len(new) or any(a and b and a != b for a, b in zip(old, new, strict=True)):
        raise Refusal("a dimension has another name")
    return checked([b or a for a, b in zip(old, new, strict=True)], len(old))


def renamed(old: Names, change: dict[str, str]) -> Names:
    if not set(change) <= set(old):
        raise Refusal("no such name")
    return checked([change.get(name or "", name) for name in old], len(old))


@operation("names", "refine_names", "rename", "rename_", "rename by keyword")
def name_dimensions(rng: Random, s: Subject, name: str) -> Call:
    """Name the dimensions of a container twice, and read what names it has then."""
    ndim = len(s.batch)
    first, second = some_names(rng, ndim), some_names(rng, ndim)
    change = {rng.choice(WORDS): rng.choice(WORDS)}

    def theirs(tree: Plain) -> object:
        names = checked(first, ndim)
        if name == "refine_names":
            names = refined(names, second)
        elif name == "rename by keyword":
            names = renamed(names, change)
        elif second or name == "names":  # no name at all changes nothing
            names = checked(second, ndim)
        return names, tree

    def ours(td: TensorDictBase) -> object:
        td = td.clone(recurse=False)
        td.names = first
        before = list(td.names)
        try:
            found = named_again(td)
        except KdError:
            assert list(td.names) == before
            raise
        return found, (read(td) if not s.ragged else None)

    def named_again(td: TensorDictBase) -> Names:
        if name == "names":
            td.names = second
        elif name == "refine_names":
            assert td.refine_names(*second) is td
        elif name == "rename_":
            assert td.rename_(*second) is td
        else:
            made = td.rename(*second) if name == "rename" else td.rename(**change)
            assert td.names == first
            return list(made.names)
        return list(td.names)

    text = f"{name} of {first} to {change if name.endswith('keyword') else second}"
    return Call(name, text, ours, theirs, memberwise=False, unchecked=s.ragged)
