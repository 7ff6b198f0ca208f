"""Random compositions of operators in `.onnx` files, at special values.

Each operator alone is in `tests/export/operators.py`. Here one is given what another makes of
signed zeros, infinities, NaN, halves and negative numbers. A number is compared where the module
itself is sure of it: in float64, with other roundings and with other signs of zeros in between.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from tests.export.models import Do, Keyed
from tests.export.operators import INPUTS, KNOWN, OPERATORS
from tests.fuzz.conftest import Seeds
from torch import Tensor

import kd_export

KINDS = ("float", "floats", "three", "row", "finite")
MANY = 8
"""How many compositions one file holds."""
Change = Callable[[Tensor], Tensor]

# What changes an intermediate result, and must not change what comes out: roundings, also of what
# cancels to nearly zero, the sign of a zero, which onnxruntime loses in `Where`, and that of NaN,
# which no operator of ONNX sees.
CHANGES: list[Change] = [
    lambda x: x,
    lambda x: x * (1 + 3e-7),
    lambda x: x * (1 - 3e-7),
    lambda x: torch.where((x == 0) | x.isnan(), x.abs(), x),
    lambda x: torch.where((x == 0) | x.isnan(), -x.abs(), x),
    lambda x: torch.where(x.abs() < 3e-7, 0 * x, x),
    lambda x: torch.where(x.abs() < 3e-7, -x, x),
    # An operator of torch may overflow inside, where the exact result does not.
    lambda x: torch.where(x.isfinite() & (x.abs() > 1e30), x / 1e5, x),
    # `Elu` of onnxruntime computes `exp(x) - 1`.
    lambda x: torch.where((x != 0) & (x.abs() < 1e-3), x + 2e-7, x),
    lambda x: torch.where((x != 0) & (x.abs() < 1e-3), x - 2e-7, x),
]
UNSURE = {"sort_descending", "argsort"}
"""Places of ties, which torch does not promise."""
BOUND = re.compile("clamp|clip|relu|hardtanh|threshold")
"""Not one after another: the exporter of torch makes one `Clip` of two, also where they have no
number in common. All results differ then, and `save` refuses the file."""


class Composition:
    """A few operators, one after another."""

    def __init__(self, rng: Random, kind: str) -> None:
        known = KNOWN.get(kind, set()) | UNSURE
        firsts = [name for name in OPERATORS[kind] if name not in known]
        self.names = [rng.choice(firsts)]
        self.calls = [OPERATORS[kind][self.names[0]]]
        for _ in range(rng.randint(1, 2)):
            bounded = BOUND.search(self.names[-1])
            name = rng.choice(
                [name for name in OPERATORS["float"] if not (bounded and BOUND.search(name))]
            )
            self.names.append(name)
            self.calls.append(OPERATORS["float"][name])
        # onnxruntime computes halves in float32 on a CPU, and rounds at the end alone.
        both = zip(self.names, self.calls, strict=True)
        self.without_halves = [CHANGES[0] if name == "as_half" else call for name, call in both]
        self.atol = 1e-3 if "as_half" in self.names else 1e-5
        """What counts as equal: of halves, an operator may round what is inside of it, too."""

    def __call__(self, *inputs: Tensor, change: Change = CHANGES[0], halves: bool = True) -> Tensor:
        first, *rest = self.calls if halves else self.without_halves
        found: Tensor = first(*inputs)
        for call in rest:
            found = found if found.is_floating_point() else found.to(inputs[0].dtype)
            found = call(change(found))
        return found.clone()

    def sure(self, inputs: Sequence[Tensor], expected: Tensor) -> Tensor:
        """Return where the module gives the same numbers however it rounds in between."""
        sure = torch.ones(expected.shape, dtype=torch.bool)
        for change in CHANGES[1:]:
            sure &= self.near(self(*inputs, change=change), expected)
        sure &= self.near(self(*inputs, halves=False), expected)
        return sure & self.near(self(*[x.double() for x in inputs]), expected)

    def near(self, got: Tensor, expected: Tensor) -> Tensor:
        """Return which numbers are equal, up to rounding."""
        return torch.isclose(
            got.double(), expected.double(), rtol=1e-3, atol=self.atol, equal_nan=True
        ).reshape(expected.shape)


def works(composition: Composition, inputs: Sequence[Tensor]) -> bool:
    """Return whether torch takes it, for any number of rows."""
    try:
        expected = composition(*inputs)
        composition.sure(inputs, expected)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return expected.shape[:1] == inputs[0].shape[:1]


def test_compositions_give_what_torch_gives_at_special_values(seeds: Seeds, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for seed in seeds(1):
        rng = Random(seed)
        kind = rng.choice(KINDS)
        inputs = INPUTS[kind]
        made = [Composition(rng, kind) for _ in range(MANY)]
        made = [each for each in made if works(each, inputs)]
        if not made:
            continue
        named = dict(zip("abc", inputs, strict=False))
        every = Do(lambda *given, made=made: tuple(each(*given) for each in made))
        module = Keyed(every, list(named), [f"y{at}" for at in range(len(made))])
        program = kd_export.export(module, {name: rows[-5:] for name, rows in named.items()})
        given = {name: rows[-4:] for name, rows in named.items()}
        try:
            program.save(path, vectors=[given], atol=math.inf)  # what differs is told below
        except kd_export.ExportError:
            seeds.count("refused")
            continue
        results = kd_export.open(path).run(named)
        for at, composition in enumerate(made):
            got, expected = results[f"y{at}"], composition(*inputs)
            seeds.count("compositions")
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype), composition.names
            sure = composition.sure(inputs, expected)
            seeds.count("numbers", int(sure.sum()))
            wrong = (
                (sure & ~composition.near(got, expected))
                .reshape(len(sure), -1)
                .any(1)
                .nonzero()[:1]
            )
            for row in wrong.flatten().tolist():
                numbers = [value[row].tolist() for value in (*inputs, got, expected)]
                raise AssertionError(f"{composition.names}: inputs, got, expected: {numbers}")
