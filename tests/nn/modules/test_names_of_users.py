"""What a keyed module needs for itself begins with `_kd_`: other names are those of the user."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kd_core import TensorDict
from kd_nn import TensorDictModule, TensorDictSequential

NAMES = [
    "data",
    "nested",
    "schema",
    "fields",
    "spec",
    "plain_functions",
    "split_outputs",
    "checks",
    "defined",
    "infer",
    "key_graph",
    "may_skip",
    "node_label",
    "described_as",
    "call_wrapped",
    "has_value_form",
    "partly_read",
    "optional_in_keys",
    "replaces_container",
    "named_steps",
    "run_on_values",
    "continue_from",
    "writes_by_inplace",
    "changes_by_assignment",
    "announces_members",
    "config",
    "kind",
    "sample",
    "keys",
    "values",
    "items",
    "_plan",
    "_flags",
    "_graph",
    "_steps",
    "_cache",
    "_x",
    "_seen",
    "_resolved",
    "_prepare",
    "_settle",
    "_own_in_keys",
    "_plans_made",
]


def module() -> TensorDictModule:
    return TensorDictModule(torch.neg, ["x"], ["y"])


def sequence() -> TensorDictSequential:
    return TensorDictSequential(module(), TensorDictModule(nn.Tanh(), ["y"], ["z"]))


@pytest.mark.parametrize("make", [module, sequence])
@pytest.mark.parametrize("name", NAMES)
def test_an_attribute_of_any_name_is_that_of_the_user(
    name: str, make: Callable[[], nn.Module]
) -> None:
    plain, mine = make(), make()
    setattr(mine, name, "mine")
    for _ in range(4):
        expected, made = (model(TensorDict(x=torch.ones(2))) for model in (plain, mine))
        assert list(made.keys()) == list(expected.keys())
        assert torch.equal(made["y"], expected["y"])
    assert getattr(mine, name) == "mine"


@pytest.mark.parametrize("name", ["data", "spec", "nested", "split_outputs", "checks", "_plan"])
def test_a_property_of_a_subclass_is_that_of_the_user(name: str) -> None:
    kind = type("Mine", (TensorDictModule,), {name: property(lambda self: "mine")})
    made = kind(torch.neg, ["x"], ["y"])
    for _ in range(4):
        assert torch.equal(made(TensorDict(x=torch.ones(2)))["y"], -torch.ones(2))
    assert getattr(made, name) == "mine"
