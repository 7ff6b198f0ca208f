"""Accelerate moves, joins and slices containers, and its loaders yield them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from kd_core import TensorDict

operations: Any = pytest.importorskip("accelerate.utils.operations")


def batch() -> TensorDict:
    return TensorDict({"x": torch.arange(8.0).reshape(4, 2), "n": {"y": torch.arange(4.0)}}, [4])


def test_a_container_is_moved_as_one() -> None:
    moved = operations.send_to_device(batch(), "cpu")
    assert isinstance(moved, TensorDict)
    assert moved.batch_size == (4,)
    assert torch.equal(moved["n", "y"], batch()["n", "y"])


def test_containers_are_joined_and_sliced() -> None:
    joined = operations.concatenate([batch(), batch()])
    assert torch.equal(joined["x"], torch.cat([batch()["x"], batch()["x"]]))
    assert joined["n"]["y"].shape == (8,)
    part = operations.slice_tensors(batch(), slice(1, 3))
    assert part["x"].shape == (2, 2)
    assert part["n"]["y"].tolist() == [1, 2]
    assert operations.find_batch_size(batch()) == 4


def test_a_prepared_loop_trains() -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data: Any = batch()
    loader: Any = DataLoader(data, batch_size=2)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    before = [parameter.clone() for parameter in net.parameters()]
    seen = 0
    for part in loader:
        assert isinstance(part, TensorDict)
        seen += len(part)
        loss = (net(part["x"]).squeeze(-1) - part["n", "y"]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == 4
    assert not torch.equal(before[0], next(iter(net.parameters())))
