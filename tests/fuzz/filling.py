"""Operations that cast leaves, and that write or choose values."""

from __future__ import annotations

import operator
from dataclasses import replace
from random import Random
from typing import cast

import torch
from tests.fuzz.checking import ITSELF, Call, Refusal
from tests.fuzz.data import Batch, Data, chosen_data
from tests.fuzz.operands import (
    Operand,
    container_operand,
    number,
    paired,
    same_keys,
    some_operand,
    write_each,
)
from tests.fuzz.registry import given, operation
from tests.fuzz.subjects import DTYPES, Plain, Subject, values
from tools.operations import CASTS
from torch import Tensor

from kd_core import TensorDict, TensorDictBase


@operation(*(row.name for row in CASTS), "type", "to")
def cast_to(rng: Random, s: Subject, name: str) -> Call:
    rows = {row.name: getattr(torch, row.dtype) for row in CASTS}
    dtype = rows.get(name) or rng.choice(DTYPES)
    args: tuple[object, ...] = () if name in rows else (dtype,)
    device = False
    if name == "to":
        device = rng.random() < 0.3
        args = (
            rng.choice([(dtype,), ("cpu", dtype), (torch.zeros(1, dtype=dtype),)])
            if not device
            else ("cpu",)
        )

    def theirs(plain: Plain) -> object:
        return plain if device else plain.map(lambda leaf: leaf.to(dtype))

    return Call(
        name,
        f"td.{name}{given(args)}",
        lambda td: getattr(td, name)(*args),
        theirs,
        memberwise=True,
        unchecked=not device and is_undefined(s, dtype),
    )


def is_undefined(s: Subject, dtype: torch.dtype) -> bool:
    """Whether a cast is left to the machine: of what is not a number, or negative, to integers."""
    if dtype.is_floating_point or dtype.is_complex:
        return False
    floats = [leaf for leaf in s.node.tensors() if leaf.is_floating_point() or leaf.is_complex()]
    return any(bool((~torch.isfinite(leaf) | (leaf.real < 0)).any()) for leaf in floats)


@operation("zero_", "fill_")
def constant(rng: Random, s: Subject, name: str) -> Call:
    value = number(rng) if rng.random() < 0.7 else values(rng, (), rng.choice(DTYPES))
    args = (value,) if name == "fill_" else ()
    write = operator.methodcaller(name, *args)
    return Call(
        name,
        f"td.{name}{args}",
        write,
        lambda plain: write_each(plain, write),
        writes=True,
        memberwise=True,
    )


@operation("copy_")
def copy_over(rng: Random, s: Subject, name: str) -> Call:
    operand = container_operand(rng, s)

    def theirs(plain: Plain) -> object:
        found = plain if operand.tree is None else shared(plain, operand.tree)
        paired(found, [operand], lambda leaf, other: leaf.copy_(other), write=True)
        if operand.tree is not None:
            copy_data(found, operand.tree)
            plain.entries |= found.entries
        return ITSELF

    return Call(
        name,
        f"td.copy_({operand.text})",
        lambda td: td.copy_(cast("TensorDict", operand.ours)),
        theirs,
        writes=True,
    )


def shared(tree: Plain, other: Plain) -> Plain:
    """Return a tree without the entries that another one lacks: `copy_` leaves them."""
    kept = {key: value for key, value in tree.entries.items() if key in other.entries}
    return replace(tree, entries=kept)


def copy_data(tree: Plain, other: Plain) -> None:
    """Copy data of rows over that of a container of the same keys."""
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            copy_data(value, cast("Plain", other.entries[key]))
        elif isinstance(value, Data):
            tree.entries[key] = value.written(..., other.entries[key])


@operation("masked_fill", "masked_fill_")
def fill(rng: Random, s: Subject, name: str) -> Call:
    mask, value = some_operand(rng, s, boolean=True), number(rng)
    write = name.endswith("_")

    def beside(leaf: Tensor, chosen: object) -> object:
        return getattr(leaf, name)(chosen, value)

    return Call(
        name,
        f"td.{name}({mask.text}, {value!r})",
        lambda td: getattr(td, name)(mask.ours, value),
        lambda plain: paired(plain, [mask], beside, write=write),
        writes=write,
    )


def instead(rng: Random, s: Subject, shape: Batch) -> Operand:
    """Return what stands where a condition is false."""
    draw = rng.random()
    if draw < 0.4:
        value = number(rng)
        return Operand(value, lambda plain, path, leaf: value, repr(value))
    if draw > 0.6:
        return container_operand(rng, s)
    tensor = values(rng, shape, rng.choice(DTYPES))
    return Operand(
        tensor,
        lambda plain, path, leaf: behind(tensor, leaf) if shape else tensor,
        f"tensor {tuple(shape)} of {tensor.dtype}",
    )


def behind(tensor: Tensor, leaf: Tensor) -> Tensor:
    return tensor.reshape((*tensor.shape, *(1,) * (leaf.ndim - tensor.ndim)))


def choose_data(tree: Plain, other: Plain, condition: Tensor) -> None:
    """Replace data of rows where a condition is false."""
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            choose_data(value, cast("Plain", other.entries[key]), condition)
        elif isinstance(value, Data):
            tree.entries[key] = chosen_data(
                value,
                other.entries[key],
                lambda rows, more: torch.where(behind(condition, rows), rows, more),
                tree.batch,
            )


@operation("where")
def where(rng: Random, s: Subject, name: str) -> Call:
    shape = s.batch[: rng.randint(0, len(s.batch))]
    shape = shape if rng.random() < 0.95 else (*shape, 5)
    condition = values(rng, shape, torch.bool if rng.random() < 0.97 else torch.int64)
    other = instead(rng, s, shape)

    def theirs(plain: Plain) -> object:
        if condition.dtype is not torch.bool or plain.batch[: len(shape)] != shape:
            raise Refusal("the mask does not fit")
        if isinstance(other.ours, TensorDictBase):
            if tuple(other.ours.batch_size) != plain.batch:
                raise Refusal("another batch size")
            same_keys(plain, other.ours)
        found = [
            torch.where(
                behind(condition, leaf),
                leaf,
                cast("Tensor", other.beside(plain, path, leaf)),
            )
            for path, leaf in plain.leaves()
        ]
        results = iter(found)
        made = plain.map(lambda leaf: next(results))
        if isinstance(other.ours, TensorDictBase) and other.tree is not None:
            choose_data(made, other.tree, condition)
        return made

    return Call(
        "where",
        f"td.where({condition.dtype} {tuple(shape)}, {other.text})",
        lambda td: td.where(condition, cast("float", other.ours)),
        theirs,
    )
