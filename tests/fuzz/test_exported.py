"""Random sequences, exported and opened again, beside the same sequences run eagerly.

The sequences are those of `test_plans.py`: nested, with keys that are written twice, outputs that
are selected or discarded, arguments by name, shared steps, containers as inputs and outputs. They
are exported at one batch size and run at others.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TypeAlias, cast

import pytest
import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.plain_models import Tally, every_leaf, flat
from tests.fuzz.plan_events import KEYS, World, a_graph, key
from torch import Tensor, nn

import kd_export
from kd_core import NestedKey, TensorDict, unravel_key_to_tuple
from kd_nn import TensorDictSequential

Values: TypeAlias = dict[tuple[str, ...], Tensor]


def a_model(rng: random.Random) -> TensorDictSequential:
    """Build a random sequence of steps that have no state of their own to change."""
    while True:
        world = World(a_graph(rng, 2))
        if not any(isinstance(world.mine[leaf.net], Tally) for leaf in every_leaf(world.graph)):
            return world.model().eval()


def inputs(model: nn.Module, batch: int) -> TensorDict:
    """Return values for what a model reads."""
    torch.manual_seed(batch)
    td = TensorDict({}, [batch])
    for path in KEYS:
        td.set(key(path), torch.randn(batch, 2))
    read = [unravel_key_to_tuple(name) for name in cast("list[NestedKey]", model.in_keys)]
    return td.select(*[key(path) for path in read])


def run(model: nn.Module, batch: int) -> Values:
    """Return the outputs of a model, by path."""
    td = model(inputs(model, batch)).select(*cast("list[NestedKey]", model.out_keys))
    return cast(Values, flat(td.to_dict()))


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_files_do_what_their_models_do(seeds: Seeds, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    for seed in seeds(2):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        model = a_model(rng)
        try:
            expected = {batch: run(model, batch) for batch in (3, 1, 2, 7)}
        except Exception:  # what fails eagerly is the matter of another harness
            seeds.count("fail eagerly")
            continue
        if not model.in_keys or not expected[3]:
            continue
        assert kd_export.save(model, path, inputs(model, 3)).ok
        seeds.count("files")
        session = kd_export.open(path, trusted=True)
        for batch, wanted in expected.items():
            found = cast(Values, flat(session.run(inputs(model, batch)).to_dict()))
            assert found.keys() == wanted.keys()
            for place, value in wanted.items():
                torch.testing.assert_close(found[place], value, rtol=1e-5, atol=1e-5)
