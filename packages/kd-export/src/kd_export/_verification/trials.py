"""Which sizes a program is tried at, and on which inputs.

Numbers drawn between the bounds of the example test a program best, but not every input may hold
any number: integers are indices, lengths or tokens, a mask holds two values, rows belong together.
So what is discrete is sampled from the rows of the example, and if the module still refuses the
inputs, all of it.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from kd_export._errors import ExportError, VerifyError
from kd_export._schema.files import Number
from kd_export._schema.schema import (
    MOST_STORED,
    RANDOM,
    Axis,
    Entry,
    Schema,
    Vector,
    axes_of,
    axis_sizes,
    concrete,
    draw,
    positions,
)

if TYPE_CHECKING:
    from torch import Tensor

    Change = Callable[[Tensor, int], Tensor]
    Reference = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]

BATCH_SIZES = (1, 2, 3, 7)
LEAST_ABOVE = 33
"""The least size that counts as well above the example."""
MOST_SIZES = 16
"""How many further sizes of an axis are tried at most."""
MOST_DRAWN = 1 << 16
"""How many numbers the inputs have at most where a further size is tried."""
EXAMPLE, GIVEN = "(the example)", "(a given vector)"
_UNCHANGED: Change = lambda tensor, limit: tensor  # noqa: E731  # one of a list of functions
_CHANGES: tuple[Change, ...] = (
    _UNCHANGED,
    lambda tensor, limit: tensor % limit,  # indices into an axis that is shorter than before
    lambda tensor, limit: tensor.clamp(max=limit),  # lengths of it
)


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs to try a program on, and the expected outputs, by wire name.

    Attributes:
        sizes: The size of each axis.
        inputs: The inputs.
        expected: What the reference gives.
        kept: The part of it that a file keeps.
        note: Where the inputs are from, if they are not made for the trial.
    """

    sizes: Mapping[str, int]
    inputs: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    kept: Vector | None
    note: str = ""

    def vector(self, schema: Schema) -> Vector | None:
        """Return what a file keeps of this trial."""
        from kd_export._running.torch_runner import numbers_of

        if self.kept is None or schema.mode == RANDOM:
            return self.kept
        outputs: dict[str, tuple[Number, ...]] = {
            name: tuple(numbers_of(value, positions(value.numel())))
            for name, value in self.expected.items()
        }
        return replace(self.kept, outputs=outputs)


def trials(
    schema: Schema,
    reference: Reference,
    batch_sizes: Sequence[int],
    *,
    pool: Sequence[Tensor] | None,
    example: Sequence[Tensor] | None = None,
    given: Sequence[Sequence[Tensor]] | None,
) -> Iterator[Trial]:
    """Run the reference on inputs of each size, or on those given, and on the example.

    Args:
        schema: What the program takes.
        reference: The module.
        batch_sizes: The sizes to try.
        pool: Inputs whose rows may be taken for those of each size.
        example: Inputs to be tried as they are.
        given: Inputs to be tried in place of those of each size.

    Raises:
        VerifyError: The reference itself fails.
        ShapeMismatch: A given input does not fit the schema.
    """
    if given is None:
        for seed, sizes in enumerate(trial_sizes(schema, batch_sizes)):
            yield _accepted(schema, reference, sizes, seed, pool)
    for tensors in given or ():
        sizes = axis_sizes(schema, [tuple(tensor.shape) for tensor in tensors])
        kept = stored(schema, tensors, sizes)
        yield _trial(schema, reference, sizes, tensors, kept, GIVEN)
    if example is not None:
        sizes = axis_sizes(schema, [tuple(tensor.shape) for tensor in example])
        yield _trial(schema, reference, sizes, example, None, EXAMPLE)


class Further(NamedTuple):
    """Trials at further sizes, and the reasons for the sizes that have none."""

    made: list[Trial]
    notes: tuple[str, ...]


def trials_at(
    schema: Schema,
    reference: Reference,
    chosen: Sequence[Mapping[str, int]],
    *,
    pool: Sequence[Tensor] | None,
) -> Further:
    """Run the reference at sizes where a program may differ; not where the module itself fails.

    Args:
        schema: What the program takes.
        reference: The module.
        chosen: Sizes of some of the axes.
        pool: Inputs whose rows may be taken.
    """
    (others,) = trial_sizes(schema, BATCH_SIZES[:1])
    made: list[Trial] = []
    notes: list[str] = []
    for seed, sizes in enumerate(chosen, len(BATCH_SIZES)):
        whole = {**others, **sizes}
        try:
            made.append(_accepted(schema, reference, whole, seed, pool))
        except VerifyError:
            notes.append(f"not compared at {shown(whole)}: the module itself fails there.")
    return Further(made, tuple(notes))


def telling_sizes(
    schema: Schema, thresholds: Mapping[str, Sequence[int]], known: Sequence[Mapping[str, int]]
) -> list[dict[str, int]]:
    """Choose sizes that tell most of a program: around its numbers, and well above the example.

    Args:
        schema: What the program takes.
        thresholds: The numbers that sizes of an axis may be compared with.
        known: The sizes that are tried anyway, the example among them.
    """
    (others,) = trial_sizes(schema, BATCH_SIZES[1:2])
    chosen: list[dict[str, int]] = []
    for name, axis in schema.axes.items():
        tried = {sizes[name] for sizes in known}
        numbers = thresholds.get(name, ())
        wanted = [n + more for n in numbers for more in (1, n + 1, 0, -1)]
        above = max(LEAST_ABOVE, *(4 * size + 1 for size in tried))
        ends = [] if axis.max is None else [axis.max]
        fitting = [
            {**others, name: size}
            for size in dict.fromkeys([above, *ends, *wanted])
            if axis.holds(size) and size not in tried
        ]
        affordable = [sizes for sizes in fitting if _count(schema, sizes) <= MOST_DRAWN]
        chosen += sorted(affordable[:MOST_SIZES], key=lambda sizes: sizes[name])
    return chosen


def _count(schema: Schema, sizes: Mapping[str, int]) -> int:
    return sum(math.prod(concrete(entry.shape, sizes)) for entry in schema.inputs)


def _accepted(
    schema: Schema,
    reference: Reference,
    sizes: Mapping[str, int],
    seed: int,
    pool: Sequence[Tensor] | None,
) -> Trial:
    """Find inputs that the reference accepts, and that give finite numbers if any do."""
    from kd_export._running.torch_runner import build_tensor

    fallback: Trial | None = None
    first: VerifyError | None = None
    for vector in candidates(schema, pool, sizes, seed):
        tensors = [build_tensor(drawn) for drawn in draw(schema, vector)]
        try:
            trial = _trial(schema, reference, sizes, tensors, vector)
        except VerifyError as error:
            first = first or error
            continue
        if all(bool(value.isfinite().all()) for value in trial.expected.values()):
            return trial
        fallback = fallback or trial
    if fallback is not None:
        return fallback
    assert first is not None  # there is at least one candidate
    raise first


def _trial(
    schema: Schema,
    reference: Reference,
    sizes: Mapping[str, int],
    tensors: Sequence[Tensor],
    kept: Vector | None,
    note: str = "",
) -> Trial:
    try:
        expected = reference(tensors)
    except Exception as error:
        raise VerifyError(
            f"the module itself fails at {shown(sizes)}: {str(error).strip().rstrip('.')}.",
            got=dict(sizes),
            hint=_remedy(schema, sizes, error),
        ) from error
    wires = (entry.wire for entry in schema.inputs)
    return Trial(sizes, dict(zip(wires, tensors, strict=True)), expected, kept, note)


def _remedy(schema: Schema, sizes: Mapping[str, int], error: Exception) -> str:
    """Return what helps a module that fails on the inputs of a trial."""
    if re.search(r"dtype|scalar type|type \(", str(error)):
        floats = [e for e in schema.inputs if "float" in e.dtype]
        given = ", ".join(f"`{entry.wire}` as {entry.dtype}" for entry in floats)
        return (
            f"The example gives {given or 'no floats'}. Give it in the dtype that the module "
            "computes in, as in `x.float()`, or cast the module, as in `module.double()`."
        )
    axis = next(iter(sizes), "batch")
    return (
        f"Give the axis the range that the module can serve, as in `dynamic={{{axis!r}: (2, "
        "None)}`, say how a size follows from an axis, as in `2*n + 1`, or give an example whose "
        "rows it accepts, or inputs of your own as `vectors=[...]`."
    )


def trial_sizes(schema: Schema, batch_sizes: Sequence[int]) -> Iterator[dict[str, int]]:
    """Choose sizes for the axes: each axis runs through all batch sizes, out of step.

    >>> list(trial_sizes(Schema((), (), {"a": Axis(), "b": Axis()}), (1, 2, 7)))
    [{'a': 1, 'b': 2}, {'a': 2, 'b': 7}, {'a': 7, 'b': 1}]
    """
    check_sizes(batch_sizes)
    if not schema.axes:
        yield {}
        return
    allowed = {name: _axis_sizes(axis, batch_sizes) for name, axis in schema.axes.items()}
    count = max(map(len, allowed.values()))
    for turn in range(count):
        yield {
            name: sizes[(turn + shift) % len(sizes)]
            for shift, (name, sizes) in enumerate(allowed.items())
        }


def check_sizes(batch_sizes: object) -> None:
    """Check the argument ``batch_sizes``.

    Raises:
        ExportError: It is not a list of sizes.
    """
    sizes = batch_sizes if isinstance(batch_sizes, Sequence) else "none"
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ExportError(
            f"expected a list of non-negative sizes for `batch_sizes`, got {batch_sizes!r}.",
            expected="sizes",
            got=batch_sizes,
            hint="Pass several sizes to try, such as `(1, 64)`.",
        )


def _axis_sizes(axis: Axis, batch_sizes: Sequence[int]) -> list[int]:
    """Return the sizes that an axis allows; if it allows none, as many from its smallest on.

    >>> _axis_sizes(Axis(2, 5), (1, 2, 3, 7)), _axis_sizes(Axis(11, 13), (1, 2, 3, 7))
    ([2, 3], [11, 12, 13])
    """
    wanted = dict.fromkeys(batch_sizes)
    shifted = dict.fromkeys(axis.min - 1 + size for size in wanted)
    allowed = [size for size in wanted if axis.holds(size)]
    return allowed or [size for size in shifted if axis.holds(size)] or [axis.min]


def chosen_vectors(schema: Schema, batch_sizes: Sequence[int] | None) -> Sequence[Vector]:
    """Choose the stored tests in which some axis has a size asked for; without sizes, all tests.

    Raises:
        VerifyError: A size has no trial.
    """
    if batch_sizes is not None:
        check_sizes(batch_sizes)
    asked = (
        {}
        if batch_sizes is None
        else {n: _axis_sizes(a, batch_sizes) for n, a in schema.axes.items()}
    )
    missing = [
        {name: size}
        for name, sizes in asked.items()
        for size in sizes
        if all(vector.sizes[name] != size for vector in schema.vectors)
    ]
    if missing or not schema.vectors or not schema.outputs:
        known = "; ".join(shown(vector.sizes) for vector in schema.vectors) or "none"
        raise VerifyError(
            f"the file holds no stored test for "
            f"{shown(missing[0]) if missing else 'any output'}; stored are: {known}.",
            expected=missing,
            got=tuple(dict(vector.sizes) for vector in schema.vectors),
            hint="Pass the module as `reference`, or sizes that are stored.",
        )
    if not asked:
        return schema.vectors
    return [
        v for v in schema.vectors if any(v.sizes[name] in sizes for name, sizes in asked.items())
    ]


def pool_of(schema: Schema) -> list[Tensor] | None:
    """Build the inputs of the largest stored test, if there is one."""
    if not schema.vectors:
        return None
    return stored_tensors(schema, max(schema.vectors, key=lambda v: sum(v.sizes.values())))


def stored_tensors(schema: Schema, vector: Vector) -> list[Tensor]:
    """Build the inputs of a stored test, in the order of the schema."""
    from kd_export._running.torch_runner import build_tensor

    return [build_tensor(drawn) for drawn in draw(schema, vector)]


def shown(sizes: Mapping[str, int]) -> str:
    """Print sizes.

    >>> shown({"batch": 2, "time": 5}), shown({})
    ('batch=2, time=5', "the example's size")
    """
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the example's size"


# Test inputs like those of an example.


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
    import torch

    if source is None:
        return torch.tensor([row * have // wanted for row in range(wanted)], dtype=torch.int64)
    if wanted <= have:
        return torch.tensor(source.sample(range(have), wanted), dtype=torch.int64)
    return torch.tensor([row % have for row in range(wanted)], dtype=torch.int64)


def _numbers(tensor: Tensor, change: Change, limit: int) -> tuple[Number, ...]:
    import torch

    from kd_export._running.torch_runner import numbers_of

    integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    whole = change(tensor, limit) if integer else tensor
    return tuple(numbers_of(whole, range(whole.numel())))
