"""Schemas of spaces, without a framework."""

from __future__ import annotations

import numpy
import pytest
import torch
from tests.export.policies.frameworks import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import nn

import kd_export
from kd_export.policies import from_gymnasium
from kd_nn import TensorDictModule


@pytest.mark.parametrize(
    ("space", "described"),
    [
        (Box(-1, 2, (3,)), "float32 (batch, 3)"),
        (Box(-numpy.inf, 2, (3,), "float64"), "float64 (batch, 3)"),
        (Box(0, 255, (8, 9, 3), "uint8"), "uint8 (batch, 8, 9, 3)"),
        (Discrete(4, start=2), "int64 (batch,)"),
        (MultiDiscrete([2, 3]), "int64 (batch, 2)"),
        (MultiBinary(5), "int8 (batch, 5)"),
    ],
)
def test_a_space_has_a_schema(space: object, described: str) -> None:
    schema = from_gymnasium(space)
    assert schema.input("observation").describe() == described


def test_the_limits_are_in_the_metadata() -> None:
    schema = from_gymnasium(Dict(arm=Box([-1, -numpy.inf], [1, 2], (2,)), gear=Discrete(3)))
    assert [entry.wire for entry in schema.inputs] == ["observation.arm", "observation.gear"]
    assert schema.metadata["observation"] == {
        "space": "Dict",
        "entries": {
            "arm": {
                "space": "Box",
                "shape": [2],
                "dtype": "float32",
                "low": [-1, None],
                "high": [1, 2],
            },
            "gear": {"space": "Discrete", "shape": [], "dtype": "int64", "low": 0, "high": 2},
        },
    }


def test_a_schema_is_an_example() -> None:
    schema = from_gymnasium(Box(-1, 1, (3,)))
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    program = kd_export.export(module, schema)
    result = program({"observation": torch.zeros(5, 3)})
    assert result["action"].shape == (5, 2)
