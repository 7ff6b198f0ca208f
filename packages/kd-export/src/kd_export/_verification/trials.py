"""Which sizes a program is tried at, and on which inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kd_export._errors import VerifyError
from kd_export._schema.schema import RANDOM, Number, Schema, Vector
from kd_export._schema.vectors import draw, positions

if TYPE_CHECKING:
    from torch import Tensor

    Reference = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]

BATCH_SIZES = (1, 2, 3, 7)


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs to try a program on, and what must come out, by wire name."""

    sizes: Mapping[str, int]
    seed: int
    inputs: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]

    def vector(self, schema: Schema) -> Vector:
        """Return what a file keeps of this trial."""
        from kd_export._running.torch_runner import numbers_of

        outputs: dict[str, tuple[Number, ...]] = {}
        if schema.mode != RANDOM:
            outputs = {
                name: tuple(numbers_of(value, positions(value.numel())))
                for name, value in self.expected.items()
            }
        return Vector(self.sizes, self.seed, outputs)


def trials(schema: Schema, reference: Reference, batch_sizes: Sequence[int]) -> Iterator[Trial]:
    """Run the reference on drawn inputs at each size.

    Raises:
        VerifyError: The reference itself fails.
    """
    from kd_export._running.torch_runner import build_tensor

    for seed, sizes in enumerate(trial_sizes(schema, batch_sizes)):
        tensors = [build_tensor(drawn) for drawn in draw(schema, sizes, seed)]
        try:
            expected = reference(tensors)
        except Exception as error:
            raise VerifyError(
                f"the module itself fails at {shown(sizes)}: {error}",
                got=dict(sizes),
                hint="Give the axis the range that the module can serve, as in "
                "`dynamic={'batch': (2, None)}`, or an example whose values it accepts.",
            ) from error
        wires = (entry.wire for entry in schema.inputs)
        yield Trial(sizes, seed, dict(zip(wires, tensors, strict=True)), expected)


def trial_sizes(schema: Schema, batch_sizes: Sequence[int]) -> Iterator[dict[str, int]]:
    """Choose sizes for the axes: each axis runs through all batch sizes, out of step.

    >>> from kd_export._schema.schema import Axis
    >>> list(trial_sizes(Schema((), (), {"a": Axis(), "b": Axis()}), (1, 2, 7)))
    [{'a': 1, 'b': 2}, {'a': 2, 'b': 7}, {'a': 7, 'b': 1}]
    """
    if not schema.axes:
        yield {}
        return
    distinct = dict.fromkeys(batch_sizes)
    allowed = {
        name: [size for size in distinct if axis.holds(size)] or [axis.min]
        for name, axis in schema.axes.items()
    }
    count = max(map(len, allowed.values()))
    for turn in range(count):
        yield {
            name: sizes[(turn + shift) % len(sizes)]
            for shift, (name, sizes) in enumerate(allowed.items())
        }


def chosen_vectors(schema: Schema, batch_sizes: Sequence[int] | None) -> Sequence[Vector]:
    """Choose the stored tests of all sizes asked for; without sizes, all tests.

    Raises:
        VerifyError: There is none of a size.
    """
    stored = {tuple(sorted(vector.sizes.items())): vector for vector in schema.vectors}
    if batch_sizes is None:
        wanted = list(stored)
    else:
        wanted = [tuple(sorted(sizes.items())) for sizes in trial_sizes(schema, batch_sizes)]
    missing = [dict(sizes) for sizes in wanted if sizes not in stored]
    if missing or not wanted or not schema.outputs:
        known = "; ".join(shown(vector.sizes) for vector in schema.vectors) or "none"
        raise VerifyError(
            f"the file holds no stored test for "
            f"{shown(missing[0]) if missing else 'any output'}; stored are: {known}.",
            expected=missing,
            got=tuple(dict(vector.sizes) for vector in schema.vectors),
            hint="Pass the module as `reference`, or sizes that are stored.",
        )
    return [stored[sizes] for sizes in wanted]


def shown(sizes: Mapping[str, int]) -> str:
    """Print sizes.

    >>> shown({"batch": 2, "time": 5}), shown({})
    ('batch=2, time=5', "the example's size")
    """
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the example's size"
