"""`TensorDictParams` are saved and loaded as what they are, in every form of file."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.core.content import assert_same
from torch import nn

from kd_core import FormatError, NonTensorData, TensorDict, TensorDictBase
from kd_nn import TensorDictParams
from kd_nn._params import build


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def sample() -> TensorDictParams:
    params = TensorDictParams.of_module(net())
    params["0", "weight"].requires_grad_(False)
    params["count"] = nn.Parameter(torch.arange(3), requires_grad=False)
    params["note"] = NonTensorData("a")
    return params


def holds(found: object, params: TensorDictParams) -> None:
    """Check that what was read is of the same kind in every leaf."""
    assert isinstance(found, TensorDictParams)
    assert_same(found, params)
    assert found.no_convert is params.no_convert
    kinds = [
        {name: leaf.requires_grad for name, leaf in each.named_parameters()}
        for each in (found, params)
    ]
    assert kinds[0] == kinds[1]
    assert {name for name, _ in found.named_buffers()} == {
        name for name, _ in params.named_buffers()
    }


def by_save(params: TensorDictParams, path: Path) -> object:
    params.save(path)
    return TensorDictParams.load(path, verify="full")


def by_file(params: TensorDictParams, path: Path) -> object:
    return by_save(params, path / "params.safetensors")


def by_memmap(params: TensorDictParams, path: Path) -> object:
    params.memmap(path)
    return TensorDictParams.load_memmap(path)


def by_torch(params: TensorDictParams, path: Path) -> object:
    torch.save(params, path / "params.pt")
    return torch.load(path / "params.pt", weights_only=True)


@pytest.mark.parametrize("there_and_back", [by_save, by_file, by_memmap, by_torch])
def test_parameters_buffers_and_frozen_ones_come_back(
    there_and_back: Callable[[TensorDictParams, Path], object], tmp_path: Path
) -> None:
    params = sample()
    holds(there_and_back(params, tmp_path), params)
    holds(there_and_back(TensorDictParams(), tmp_path), TensorDictParams())


def test_what_was_loaded_is_trained(tmp_path: Path) -> None:
    module = net()
    TensorDictParams.of_module(module).save(tmp_path / "params")
    loaded = TensorDictParams.load(tmp_path / "params")
    optimizer = torch.optim.SGD(loaded.parameters(), lr=1.0)
    with loaded.to_module(module):
        module(torch.arange(8.0).view(4, 2)).square().sum().backward()
    before = loaded["1", "weight"].detach().clone()
    optimizer.step()
    assert not torch.equal(loaded["1", "weight"], before)
    assert TensorDictParams.load(tmp_path / "params")["1", "weight"].tolist() == before.tolist()


def test_it_is_an_entry_and_a_part_of_it_is_plain(tmp_path: Path) -> None:
    params = sample()
    TensorDict({"step": 3, "params": params}).save(tmp_path / "td")
    holds(TensorDict.load(tmp_path / "td").get("params"), params)
    part: object = TensorDict.load(tmp_path / "td", keys=[("params", "note")]).get("params")
    assert type(part) is TensorDict


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"no_convert": True, "parameters": ["x"], "frozen": []},
        {"no_convert": True, "parameters": [], "frozen": ["w"]},
        {"no_convert": True, "parameters": ["n"], "frozen": []},
        {"no_convert": 1, "parameters": [], "frozen": []},
    ],
)
def test_a_state_of_other_entries_is_refused(state: object) -> None:
    td = TensorDict({"w": torch.ones(2), "n": {"w": torch.ones(2)}})
    with pytest.raises(FormatError, match="is not the state of a `TensorDictParams`"):
        build(dict(td._kd_entries), td._kd_desc, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_fills_parameters_in_place(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    params, target = (TensorDictParams.of_module(net()) for _ in range(2))
    save({"params": params, "plain": params.data}, checkpoint_id=tmp_path, no_dist=True)
    weight = target["0", "weight"]
    plain: TensorDictBase = target.data.clone()
    load({"params": target, "plain": plain}, checkpoint_id=tmp_path, no_dist=True)
    assert target["0", "weight"] is weight
    assert torch.equal(weight, params["0", "weight"])
    assert bool((plain == params.data).all())
