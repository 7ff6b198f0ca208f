"""Each operator at the numbers where translations go wrong, over a dynamic batch.

One file for each kind of numbers holds all operators of that kind.
"""

import math
from pathlib import Path

import pytest
import torch
from tests.export.models import Do, Keyed
from tests.export.operators import INPUTS, KNOWN, OPERATORS
from torch import Tensor

import kd_export
from kd_export import Session


def named(inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip("abc", inputs, strict=False))


def opened(kind: str, path: Path) -> Session:
    """Write all operators of a kind as one file, and open it."""
    functions = OPERATORS[kind]

    def every(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(*inputs).clone() for function in functions.values())

    inputs = named(INPUTS[kind])
    module = Keyed(Do(every), list(inputs), list(functions))
    program = kd_export.export(module, {name: row[-5:] for name, row in inputs.items()})
    given = {name: row[-4:] for name, row in inputs.items()}
    program.save(path, vectors=[given], atol=math.inf)  # what differs is told below
    return kd_export.open(path)


def wrong(kind: str, session: Session) -> dict[str, str]:
    """List the operators whose results differ, each with the first numbers where they do."""
    inputs = INPUTS[kind]
    results = session.run(named(inputs))
    found = {}
    for name, function in OPERATORS[kind].items():
        got, expected = results[name], function(*inputs)
        assert got.shape == expected.shape, name
        assert got.dtype == expected.dtype, name
        near = close(got, expected)
        if name == "gelu":  # torch's own differs by machine: that of oneDNN is coarse, NaN at inf
            near |= close(got, function(*[value.double() for value in inputs]))
        for row in (~near).reshape(len(near), -1).any(1).nonzero()[:1].flatten().tolist():
            numbers = [value[row].tolist() for value in (*inputs, got, expected)]
            found[name] = f"{numbers[:-2]} gives {numbers[-2]}, not {numbers[-1]}"
    return found


def close(got: Tensor, expected: Tensor) -> Tensor:
    return torch.isclose(got.double(), expected.double(), rtol=1e-4, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_give_what_torch_gives(kind: str, tmp_path: Path) -> None:
    found = wrong(kind, opened(kind, tmp_path / "m.onnx"))
    assert found.keys() == KNOWN.get(kind, set()), found


def test_two_limits_of_one_value_stay_apart(tmp_path: Path) -> None:
    """A fusion of onnxscript names both after the value, and the second took the place of both."""

    def limited(x: Tensor) -> tuple[Tensor, ...]:
        zero, one = torch.zeros(()), torch.ones(())
        limits = [torch.minimum(torch.maximum(x, zero), one), torch.maximum(x, zero - 2)]
        return *limits, torch.minimum(torch.maximum(x, -one), one * 3)

    module = Keyed(Do(limited), ["x"], ["y", "z", "w"])
    path = tmp_path / "m.onnx"
    kd_export.save(module, path, {"x": torch.linspace(-9, 9, 32).reshape(8, 4)})
    assert kd_export.verify(path).ok
