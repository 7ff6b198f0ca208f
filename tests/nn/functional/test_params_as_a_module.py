"""`TensorDictParams` says of its tensors what the module that they come from says."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from kd_core import FormatError, TensorDict
from kd_nn import TensorDictParams
from kd_nn._params import build


class Unsaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("mean", torch.zeros(2))


def net() -> nn.Sequential:
    return nn.Sequential(Unsaved(), nn.Sequential(Unsaved()))


MAKERS: list[Callable[[nn.Module], object]] = [
    TensorDictParams.of_module,
    lambda module: TensorDict.from_module(module, as_module=True),
    lambda module: TensorDict.from_modules(module, net(), as_module=True, lock=False),
    lambda module: TensorDictParams(TensorDictParams.of_module(module), no_convert=True),
    lambda module: copy.deepcopy(TensorDictParams.of_module(module)),
    lambda module: pickle.loads(pickle.dumps(TensorDictParams.of_module(module))),
    lambda module: TensorDictParams.of_module(module).to(torch.float64),
]


@pytest.mark.parametrize("make", MAKERS)
def test_buffers_that_a_module_does_not_save_are_not_saved(
    make: Callable[[nn.Module], TensorDictParams],
) -> None:
    params = make(net())
    assert list(params.state_dict()) == list(net().state_dict())
    assert ("0", "cache") in params.keys(True)
    params["0", "cache"] = torch.ones_like(params["0", "cache"])
    assert "0.cache" not in params.state_dict()
    params["0", "cache"] = nn.Buffer(torch.ones(params["0", "mean"].shape))
    assert "0.cache" in params.state_dict()


def test_checkpoints_of_a_module_with_unsaved_buffers_load_both_ways() -> None:
    module = net()
    params = TensorDictParams.of_module(net())
    assert not module.load_state_dict(params.state_dict()).unexpected_keys
    assert params.load_state_dict(module.state_dict()) is params


def test_a_buffer_says_itself_whether_it_is_saved() -> None:
    params = TensorDictParams({"a": nn.Buffer(torch.ones(1), persistent=False)})
    assert not params.state_dict()
    params.pop("a")
    params.no_convert = True
    params["a"] = torch.ones(1)
    assert list(params.state_dict()) == ["a"]


def test_a_file_keeps_which_buffers_are_not_saved(tmp_path: Path) -> None:
    TensorDictParams.of_module(net()).save(tmp_path / "a.kd")
    found = TensorDictParams.load(tmp_path / "a.kd")
    assert list(found.state_dict()) == list(net().state_dict())
    assert ("0", "cache") in found.keys(True)


@pytest.mark.parametrize("wrong", ["cache", ["nowhere"], [3], [["mean"]], [{}], None])
@pytest.mark.parametrize("field", ["parameters", "frozen", "unsaved"])
def test_a_state_that_is_not_one_of_these_entries_is_refused(field: str, wrong: object) -> None:
    level = TensorDictParams.of_module(Unsaved())
    state = {"no_convert": True, "parameters": ["weight"], "frozen": [], "unsaved": ["cache"]}
    build(dict(level._kd_entries), level._kd_desc, state)
    with pytest.raises(FormatError, match="is not the state of a `TensorDictParams`"):
        build(dict(level._kd_entries), level._kd_desc, {**state, field: wrong})


def test_a_weight_with_two_names_moves_once() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    norm = nn.BatchNorm1d(2)
    params = TensorDictParams.of_module(nn.Sequential(one, two, norm, norm))
    with torch.no_grad():
        one.weight.zero_()
        params.lerp_(params.clone().apply(torch.ones_like), 0.25)
    assert torch.equal(one.weight, torch.full((2, 2), 0.25))
    assert norm.running_mean is not None
    assert torch.equal(norm.running_mean, torch.full((2,), 0.25))


def test_a_module_with_two_names_stays_one() -> None:
    norm = nn.BatchNorm1d(2)
    params = TensorDictParams.of_module(nn.Sequential(norm, nn.Sequential(norm)))
    assert params.get("0") is params.get(("1", "0"))
    params.double()
    assert params["0", "running_mean"] is params["1", "0", "running_mean"]
    assert len(list(params.buffers())) == 3


def test_an_entry_that_is_replaced_keeps_its_place() -> None:
    params = TensorDictParams.of_module(nn.Linear(2, 2))
    params["weight"] = nn.Parameter(torch.ones(2, 2))
    assert list(params.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("name", ["_data", "_descriptor", "_get_hooks", "no_convert"])
def test_a_tensor_may_have_the_name_of_an_attribute(name: str) -> None:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.ones(2)))
    params = TensorDictParams.of_module(module)
    params.load_state_dict({name: torch.zeros(2)}, assign=True)
    assert params[name].tolist() == [0, 0]
    assert isinstance(params[name], nn.Parameter)


def test_replace_gives_parameters_with_what_is_given() -> None:
    params = TensorDictParams(TensorDict({"a": torch.ones(2), "n": {"c": torch.ones(3)}}))
    made = params.replace({"a": torch.zeros(2)}, n={"d": nn.Parameter(torch.ones(1))})
    assert isinstance(made, TensorDictParams)
    assert dict(made.named_buffers()).keys() == {"a"}
    assert dict(made.named_parameters()).keys() == {"n.c", "n.d"}
    assert dict(params.named_parameters()).keys() == {"a", "n.c"}
    assert params.replace({}) is params


def test_what_is_built_like_parameters_may_have_names() -> None:
    params = TensorDictParams(TensorDict({"a": torch.ones(2)}))
    made = params.from_dict_instance({"a": torch.ones(3, 2)}, batch_size=[3], names=["t"])
    assert isinstance(made, TensorDictParams)
    assert made.names == ["t"]


def test_sharing_memory_locks_parameters_no_more_than_those_of_a_module() -> None:
    params = TensorDictParams(TensorDict({"n": {"w": torch.ones(2)}}))
    assert params.share_memory_() is params
    assert params.is_shared()
    assert not params.is_locked
    params["n", "b"] = torch.zeros(2)
    params.lock_().share_memory_()
    assert params.is_locked


@pytest.mark.parametrize(
    "move",
    [
        lambda params: params.to("cpu"),
        lambda params: params.cpu(),
        lambda params: params.to(device="cpu"),
    ],
)
def test_params_that_were_moved_know_their_device(
    move: Callable[[TensorDictParams], TensorDictParams],
) -> None:
    params = TensorDictParams(TensorDict({"a": torch.zeros(2), "n": TensorDict(b=torch.zeros(1))}))
    assert params.to(torch.float64).device is None
    params.lock_()
    moved = move(params)
    assert [moved.device, moved.nested("n", TensorDictParams).device] == [torch.device("cpu")] * 2
    below = moved.nested("n", TensorDictParams)
    assert [moved.is_locked, below.is_locked] == [True, True]
    moved.unlock_()
    assert [moved.is_locked, below.is_locked] == [False, False]


@pytest.mark.parametrize("inside", [False, True])
def test_params_do_not_name_a_device_that_they_left(inside: bool) -> None:
    source = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(1)}}, device="cpu")
    params = TensorDictParams(source)
    module = nn.ModuleList([params]) if inside else params
    module.to("meta")
    assert [params.device, params.nested("n", TensorDictParams).device] == [
        torch.device("meta")
    ] * 2
    assert params["a"].device == params.device
