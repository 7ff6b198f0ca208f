"""The operations that programs are made of, by the public name that each covers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeAlias

import numpy
import torch
from tests.fuzz.checking import Call
from tests.fuzz.subjects import Subject

Make: TypeAlias = Callable[[Random, Subject, str], Call]

OPERATIONS: dict[str, Make] = {}


def operation(*names: str) -> Callable[[Make], Make]:
    """Enter what makes a random call of each of these methods or functions."""

    def enter(make: Make) -> Make:
        for name in names:
            OPERATIONS[name] = make
        return make

    return enter


def odd(rng: Random, number: int) -> object:
    """Return a number, now and then in a form that may or may not be taken for one."""
    if rng.random() < 0.9:
        return number
    forms = [
        float(number),
        True,
        False,
        numpy.int64(number),
        torch.tensor(number),
        "1",
        None,
        number + 7,
        -9,
    ]
    return rng.choice(forms)


def dim(rng: Random, ndim: int) -> object:
    """Return a dimension of a batch, counted from either end, now and then a wrong one."""
    if rng.random() < 0.08:
        return odd(rng, rng.choice([ndim, -ndim - 1, 0]))
    return odd(rng, rng.randrange(-ndim, ndim) if ndim else 0)


def dims(rng: Random, ndim: int, most: int | None = None) -> tuple[object, ...]:
    """Return several dimensions, mostly different ones."""
    count = rng.randint(0, ndim if most is None else most)
    if rng.random() < 0.1:
        return tuple(dim(rng, ndim) for _ in range(count))
    chosen = rng.sample(range(ndim), min(count, ndim))
    return tuple(odd(rng, each - ndim * rng.randrange(2)) for each in chosen)


def given(args: object, kwargs: object = None) -> str:
    shown = ", ".join(map(repr, args)) if isinstance(args, tuple) else repr(args)
    return f"({shown}{', ' if kwargs and shown else ''}{kwargs or ''})"


def lax(args: object) -> bool:
    """Whether an argument is of a type that torch takes for a number in some places only."""
    if isinstance(args, (tuple, list)):
        return any(map(lax, args))
    if isinstance(args, dict):
        return lax(list(args.values()))
    if isinstance(args, torch.Tensor):
        return args.ndim == 0 and args.dtype is torch.int64
    return args is None or isinstance(args, (bool, numpy.generic))
