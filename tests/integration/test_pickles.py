"""Pickles name public places alone, so that they outlive a move of private modules."""

import pickle
import pickletools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from kd_core import (
    NO_DEFAULT,
    KeyNotFound,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    from_module,
    lazy_stack,
)
from kd_nn import (
    EnsembleModule,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictParams,
    TensorDictSequential,
    WrapModule,
    biased_softplus,
    make_functional,
    mappings,
)
from kd_nn.distributions import (
    AddStateIndependentNormalScale,
    Delta,
    NormalParamExtractor,
    NormalParamWrapper,
)
from kd_probabilistic import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    ScoringModule,
    set_interaction_type,
)

# Written once by `pickle.dumps((containers(), modules()), 2)`; it must load for ever.
SAVED = Path(__file__).parent / "saved.pkl"

# Where a name may stand: `_pickled` keeps those that are private.
PLACES = {
    "kd_core",
    "kd_core.extending",
    "kd_nn",
    "kd_nn.distributions",
    "kd_nn._pickled",
    "kd_probabilistic",
    "kd_probabilistic._pickled",
}


class Point(TensorClass):
    """A declared container that a file may hold."""

    x: torch.Tensor
    label: str


def containers() -> dict[str, TensorDictBase]:
    entries = {"a": torch.arange(6.0).reshape(2, 3), "n": {"b": torch.ones(2), "word": "reach"}}
    dense = TensorDict(entries, [2], device="cpu")
    linear = nn.Linear(2, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(2))
        linear.bias.fill_(0.5)
    return {
        "dense": dense,
        "locked": dense.clone().lock_(),
        "lazy": lazy_stack([dense, dense.clone()], 1),
        "params": TensorDictParams(from_module(linear)),
    }


def modules() -> dict[str, TensorDictModuleBase]:
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(6.0).reshape(2, 3))
        linear.bias.fill_(0.5)
    first = TensorDictModule(linear, ["a"], ["h"])
    extract = TensorDictModule(NormalParamExtractor(), ["h"], ["loc", "scale"])
    draw = ProbabilisticTensorDictModule(
        ["loc", "scale"],
        ["x"],
        distribution_class=Normal,
        default_interaction_type=InteractionType.MEAN,
        return_log_prob=True,
    )
    return {
        "sequence": TensorDictSequential(first, extract),
        "probabilistic": ProbabilisticTensorDictSequential(first, extract, draw),
    }


def others() -> dict[str, object]:
    draw = ProbabilisticTensorDictModule(["loc", "scale"], ["x"], distribution_class=Normal)
    functional = nn.Linear(2, 2)
    make_functional(functional)
    names = ("softplus", "exp", "relu", "expln", "biased_softplus", "none", "biased_softplus_2_1")
    return {
        "declared": Point(x=torch.zeros(2), label="a", batch_size=[2]),
        "data": NonTensorData("a"),
        "descriptor": TensorDict(batch_size=[2])._kd_desc,
        "marker": NO_DEFAULT,
        "error": KeyNotFound("a"),
        "method": TensorDict.exp,
        "bound method": TensorDict().exp,
        "ensemble": EnsembleModule(modules()["sequence"], 2),
        "wrapped": WrapModule(nn.Identity()),
        "scored": ScoringModule(draw),
        "functional": functional,
        "delta": Delta(torch.zeros(2)),
        "wrapper": NormalParamWrapper(nn.Linear(2, 4)),
        "scale": AddStateIndependentNormalScale(2),
        "softplus": biased_softplus(1.0),
        "interaction": set_interaction_type(InteractionType.MODE),
        "mappings": [mappings(name) for name in names],
    }


def places(pickled: bytes) -> set[str]:
    """Return the modules of ours that a pickle names."""
    found = {
        str(argument).split(" ")[0]
        for opcode, argument, _ in pickletools.genops(pickled)
        if opcode.name == "GLOBAL"
    }
    return {place for place in found if place.startswith("kd_")}


@pytest.mark.parametrize("name", [*containers(), *modules(), *others()])
def test_a_pickle_names_public_places(name: str) -> None:
    pickled = pickle.dumps({**containers(), **modules(), **others()}[name], 2)
    assert places(pickled) <= PLACES
    pickle.loads(pickled)


def test_a_private_place_is_seen() -> None:
    assert places(b"ckd_core._keys\nis_prefix\n.") == {"kd_core._keys"}


@pytest.mark.parametrize("name", containers())
def test_a_saved_container_loads(name: str) -> None:
    loaded, expected = pickle.loads(SAVED.read_bytes())[0][name], containers()[name]
    assert type(loaded) is type(expected)
    assert (loaded.batch_size, loaded.device) == (expected.batch_size, expected.device)
    assert loaded.is_locked == expected.is_locked
    assert (loaded == expected).all()


@pytest.mark.parametrize("name", modules())
def test_a_saved_module_loads(name: str) -> None:
    loaded, expected = pickle.loads(SAVED.read_bytes())[1][name], modules()[name]
    assert type(loaded) is type(expected)
    assert (loaded.in_keys, loaded.out_keys) == (expected.in_keys, expected.out_keys)
    td = TensorDict({"a": torch.ones(4, 3)}, [4])
    assert (loaded(td.clone()) == expected(td.clone())).all()
