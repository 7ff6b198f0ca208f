"""Test inputs like those of an example.

Numbers drawn between the bounds of the example test a program best, but not every input may hold
any number: integers are indices, lengths or tokens, a mask holds two values, rows belong together.
So what is discrete is sampled from the rows of the example, and if the module still refuses the
inputs, all of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kd_export._running.torch_runner import numbers_of
from kd_export._schema.files import Number
from kd_export._schema.schema import MOST_STORED, Entry, Schema, Vector, axes_of, concrete

Change = Callable[[Tensor, int], Tensor]
_UNCHANGED: Change = lambda tensor, limit: tensor  # noqa: E731  # one of a list of functions
_CHANGES: tuple[Change, ...] = (
    _UNCHANGED,
    lambda tensor, limit: tensor % limit,  # indices into an axis that is shorter than before
    lambda tensor, limit: tensor.clamp(max=limit),  # lengths of it
)


def candidates(
    schema: Schema, example: Sequence[Tensor] | None, sizes: Mapping[str, int], seed: int
) -> Iterator[Vector]:
    """Generate inputs of given sizes, the most telling first, those nearest to the example last.

    Args:
        schema: What the program takes.
        example: The inputs of the example, if there is one; the sizes of its axes may differ.
        sizes: The size of each axis.
        seed: What is random about it.
    """
    if example is None:
        yield Vector(sizes, seed, {})
        return
    sampled = _sampled(schema, example, sizes, seed)
    limit = max(min(sizes.values(), default=1), 1)
    known: list[Vector] = []
    for drawn_floats in (True, False):
        for change in _CHANGES:
            inputs = {
                entry.wire: _numbers(tensor, change, limit)
                for entry, tensor, whole in zip(schema.inputs, sampled, example, strict=True)
                if tensor.numel() <= MOST_STORED
                and not tensor.is_complex()
                and not (drawn_floats and may_be_drawn(entry, whole))
            }
            vector = Vector(sizes, seed, {}, inputs)
            if vector not in known:
                known.append(vector)
                yield vector


def stored(schema: Schema, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Vector | None:
    """Return a test that holds all inputs, unless they are too large or complex."""
    numbers = max((tensor.numel() for tensor in tensors), default=0)
    if numbers > MOST_STORED or any(tensor.is_complex() for tensor in tensors):
        return None
    inputs = {
        entry.wire: _numbers(tensor, _UNCHANGED, 0)
        for entry, tensor in zip(schema.inputs, tensors, strict=True)
    }
    return Vector(sizes, 0, {}, inputs)


def may_be_drawn(entry: Entry, tensor: Tensor) -> bool:
    """Decide whether an input takes any number between its bounds: not a mask, not an index."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.is_complex() or not tensor.numel():
        return True
    if "mask" in entry.key[-1].lower() or not bool(tensor.isfinite().all()):
        return False
    low, high = tensor.min(), tensor.max()
    return bool(low == high) or not bool(((tensor == low) | (tensor == high)).all())


def _sampled(
    schema: Schema, example: Sequence[Tensor], sizes: Mapping[str, int], seed: int
) -> list[Tensor]:
    """Select rows of the example: of one axis the same ones from every input."""
    source = random.Random(seed)
    rows: dict[str, Tensor] = {}
    results = []
    for entry, whole in zip(schema.inputs, example, strict=True):
        tensor, wanted = whole, concrete(entry.shape, sizes)
        for dim, axis in enumerate(entry.shape):
            if not isinstance(axis, str):
                continue
            if axis not in rows:
                free = source if _is_leading(schema, axis) else None
                rows[axis] = _rows(tensor.shape[dim], wanted[dim], free)
            tensor = tensor.index_select(dim, rows[axis])
        results.append(tensor)
    return results


def _is_leading(schema: Schema, axis: str) -> bool:
    """Decide whether an axis is the first of every input that has it, so that rows may change.

    The rows of an axis that another follows from stay in their order, too.
    """
    shapes = [entry.shape for entry in schema.inputs]
    others = [size for shape in shapes for size in shape if size != axis]
    return all(axis not in shape[1:] for shape in shapes) and axis not in axes_of(others)


def _rows(have: int, wanted: int, source: random.Random | None) -> Tensor:
    """Choose rows: any of them, or without a source evenly, so that their order stays."""
    if source is None:
        return torch.tensor([row * have // wanted for row in range(wanted)], dtype=torch.int64)
    if wanted <= have:
        return torch.tensor(source.sample(range(have), wanted), dtype=torch.int64)
    return torch.tensor([row % have for row in range(wanted)], dtype=torch.int64)


def _numbers(tensor: Tensor, change: Change, limit: int) -> tuple[Number, ...]:
    integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    whole = change(tensor, limit) if integer else tensor
    return tuple(numbers_of(whole, range(whole.numel())))
