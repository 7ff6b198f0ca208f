"""What stands beside a leaf: numbers, tensors over the batch, containers of the same keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import cast

import numpy
import torch
from tests.fuzz.checking import ITSELF, Refusal
from tests.fuzz.data import Batch, Data, Unknown, stored
from tests.fuzz.subjects import DTYPES, Node, Plain, Subject, build, twin, values
from tests.fuzz.subjects import plain as plain_of
from torch import Tensor

from kd_core import TensorDictBase


def each(plain: Plain, fn: Callable[[Tensor], Tensor]) -> Plain:
    """Apply a function to every leaf."""
    return plain.map(fn)


def write_each(plain: Plain, fn: Callable[[Tensor], object]) -> object:
    """Apply a function that writes to every leaf."""
    for leaf in plain.tensors():
        fn(leaf)
    return ITSELF


@dataclass
class Operand:
    """What stands on the right: as ours takes it, and as torch takes it beside each leaf."""

    ours: object
    beside: Callable[[Plain, tuple[str, ...], Tensor], object]
    text: str
    tree: Plain | None = None


def number(rng: Random) -> object:
    return rng.choice([2, 0, -1, 3, True, 1.5, 0.5, -2.0, 1e300, 2**40, 1 + 2j, float("inf"), 2.0])


def lined_up(shape: Batch, batch: Batch, mask: bool = False) -> Batch:
    """Return the shape of a tensor from the first batch dimension on; refuse what does not fit.

    One that fits in two ways is refused too, unless it is a mask, which means the first dimensions.
    """
    missing = len(batch) - len(shape)
    first = missing >= 0 and _fits(shape, batch[: len(shape)])
    last = missing >= 0 and _fits(shape, batch[missing:])
    if not mask and first and last and missing and any(size != 1 for size in shape):
        raise Refusal(f"shape {shape} fits {batch} in two ways")
    if not (first or last):
        if _enlarges(shape, batch):
            raise Unknown(f"shape {shape} may enlarge {batch}, or reach into its features")
        raise Refusal(f"shape {shape} does not broadcast over {batch}")
    return shape if first else (1,) * missing + shape


def _fits(shape: Batch, sizes: Batch) -> bool:
    return all(mine in (1, size) for mine, size in zip(shape, sizes, strict=True))


def _enlarges(shape: Batch, batch: Batch) -> bool:
    try:
        torch.broadcast_shapes(shape, batch)
    except RuntimeError:
        return len(shape) > len(batch)
    return True


def some_operand(rng: Random, s: Subject, boolean: bool = False) -> Operand:
    """Return a number, a tensor over the batch, or a container of the same keys."""
    draw = rng.random()
    dtype = torch.bool if boolean else rng.choice(DTYPES)
    if draw < 0.35 and not boolean:
        value = number(rng)
        if rng.random() < 0.1:
            value = rng.choice([numpy.float64(1.5), numpy.int64(2), numpy.float32(0.5)])
        if rng.random() < 0.03:
            value = rng.choice(["x", [1, 2]])
        return Operand(value, lambda plain, path, leaf: refuse_object(value), repr(value))
    if draw < 0.45:
        zero = values(rng, (), dtype)
        return Operand(zero, lambda plain, path, leaf: zero, repr(zero))
    if draw < 0.65 or boolean:
        count = rng.randint(0, len(s.batch))
        shape = s.batch[:count] if rng.random() < 0.7 else s.batch[len(s.batch) - count :]
        shape = tuple(1 if rng.random() < 0.2 else size for size in shape)
        if rng.random() < 0.05:
            shape = (*shape, 5)
        tensor = values(rng, shape, dtype)

        def beside(plain: Plain, path: tuple[str, ...], leaf: Tensor) -> Tensor:
            first = lined_up(shape, plain.batch, boolean)
            return tensor.reshape((*first, *(1,) * (leaf.ndim - len(first)))) if shape else tensor

        return Operand(tensor, beside, f"tensor{tuple(shape)} of {dtype}")
    return container_operand(rng, s)


def refuse_object(value: object) -> object:
    if isinstance(value, (list, str)) or value is None:
        raise Refusal("neither a number, a tensor nor a container")
    return value


def container_operand(rng: Random, s: Subject) -> Operand:
    """Return a container of the keys of another, of the same batch or of ()."""
    whole = rng.random() < 0.8
    how = rng.choice(["same", "same", "floats", "random"])
    drop = rng.random() < 0.05
    if s.ragged or rng.random() < 0.2:
        node = twin(s.node)
        tree = None if s.ragged else plain_of(node)
        text = "container of the same kind"
    else:
        node = operand_node(rng, plain_of(s.node), whole, how, drop)
        tree = plain_of(node)
        text = (
            f"container of {how}{'' if whole else ' without batch'}{', a key less' if drop else ''}"
        )

    def beside(plain: Plain, path: tuple[str, ...], leaf: Tensor) -> Tensor:
        found: object = tree
        for part in path:
            if not isinstance(found, Plain) or part not in found.entries:
                raise Refusal("a key is missing")
            found = found.entries[part]
        return cast("Tensor", found)

    return Operand(build(node), beside, text, tree)


def operand_node(
    rng: Random, tree: Plain, whole: bool, how: str, drop: bool, ndim: int | None = None
) -> Node:
    """Return a dense node of the keys of a tree."""
    ndim = len(tree.batch) if ndim is None else ndim
    new = Node(tree.batch if whole else ())
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            new.entries[key] = operand_node(rng, value, whole, how, False, ndim)
        elif isinstance(value, Data):
            new.entries[key] = value if whole or value.rows is None else stored("to", ())
        else:
            shape = value.shape if whole else value.shape[ndim:]
            dtype = {"same": value.dtype, "floats": torch.float32}.get(how) or rng.choice(DTYPES)
            new.entries[key] = values(rng, tuple(shape), dtype)
    if drop and new.entries:
        del new.entries[rng.choice(list(new.entries))]
    return new


def paired(
    plain: Plain,
    operands: list[Operand],
    fn: Callable[..., object],
    write: bool = False,
) -> object:
    """Call a function of each leaf and what stands beside it."""
    check_keys(plain, operands)
    found: dict[tuple[str, ...], object] = {}
    batch = plain.batch
    for path, leaf in plain.leaves():
        besides = [operand.beside(plain, path, leaf) for operand in operands]
        result = fn(leaf, *besides)
        if not write and isinstance(result, Tensor) and tuple(result.shape[: len(batch)]) != batch:
            raise Refusal("the batch would change")
        found[path] = result
    if write:
        return ITSELF
    results = iter(found.values())
    return plain.map(lambda leaf: cast("Tensor", next(results)))


def check_keys(plain: Plain, operands: list[Operand]) -> None:
    for operand in operands:
        if isinstance(operand.ours, TensorDictBase):
            same_keys(plain, operand.ours)
        elif isinstance(operand.ours, Tensor) and operand.ours.ndim:
            operand.beside(plain, (), torch.empty(plain.batch))  # refuses what does not fit
        else:
            refuse_object(operand.ours)


def same_keys(plain: Plain, other: TensorDictBase) -> None:
    if set(plain.entries) != set(other.keys()):
        raise Refusal("the keys differ")
    for key, value in plain.entries.items():
        if isinstance(value, Plain):
            same_keys(value, cast("TensorDictBase", other.get(key)))
