"""What a keyed module needs for itself begins with `_kd_`: other names are those of the user."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from tests import children
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
    "_selected",
    "_in_spec",
    "_out_keys",
    "_out_names",
    "_settings",
    "_run",
    "_wrap",
    "_resolve",
    "_named",
    "_values",
    "forward_values",
    "dist_of_values",
    "log_prob_of_values",
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


PUBLIC = sorted({n for n in dir(TensorDictSequential) if n[0] != "_"} - set(dir(nn.Module)))
PEERS = {
    *("in_keys", "out_keys", "out_keys_source", "module", "select_out_keys", "reset_out_keys"),
    "inplace",
}
"""Names that mean to every user what they mean here; setting them sets what they say."""


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in PEERS])
def test_a_module_runs_whatever_its_class_calls_its_attributes(name: str) -> None:
    bases = (TensorDictModule, TensorDictSequential)
    kinds = [type("Mine", (kind,), {name: "mine"}) for kind in bases]
    step = kinds[0](torch.neg, ["x"], ["y"])
    made = kinds[1](step, kinds[0](nn.Tanh(), ["y"], ["z"]))
    for _ in range(4):
        found = made(TensorDict(x=torch.ones(2)))
        assert list(found.keys()) == ["x", "y", "z"]
        assert torch.equal(made(x=torch.ones(2))[1], -torch.ones(2).tanh())
    assert "tanh" in repr(made).lower()
    copied = copy.deepcopy(made)
    assert torch.equal(copied(x=torch.ones(2))[0], -torch.ones(2))


def test_a_copy_keeps_attributes_that_are_called_like_names_of_before() -> None:
    made = module()
    for name in ("_selected", "_out_keys", "_settings"):
        setattr(made, name, "mine")
    copies: list[TensorDictModule] = [copy.deepcopy(made), pickle.loads(pickle.dumps(made))]
    for other in copies:
        assert other._selected == other._out_keys == other._settings == "mine"
        assert torch.equal(other(TensorDict(x=torch.ones(2)))["y"], -torch.ones(2))


def test_private_names_of_modules_that_libraries_read() -> None:
    program = (
        "from kd_core import drop_in\n"
        "drop_in.install()\n"
        "from tensordict.nn import TensorDictModule as M, TensorDictModuleBase\n"
        "import torch\n"
        "module = M(torch.neg, ['x'], ['y'])\n"
        "class Own(TensorDictModuleBase):\n"
        "    in_keys = ['x']\n"
        "own = Own()\n"
        "own._out_keys = ['z']\n"
        "print(module._out_keys, own._out_keys)\n"
    )
    result = children.run("-W", "ignore", "-c", program)
    assert result.stdout == "['y'] ['z']\n", result.stderr


def test_keys_that_a_program_assigns_by_private_names_are_those_of_the_module() -> None:
    program = (
        "from kd_core import drop_in\n"
        "drop_in.install()\n"
        "from tensordict import TensorDict\n"
        "from tensordict.nn import TensorDictModuleBase, TensorDictSequential\n"
        "import torch\n"
        "class Both(TensorDictModuleBase):\n"
        "    in_keys = ['x']\n"
        "    @TensorDictModuleBase.out_keys.setter\n"
        "    def out_keys(self, keys):\n"
        "        self._out_keys = self._out_keys_apparent = list(keys)\n"
        "    def select_out_keys(self, *keys):\n"
        "        source = self.out_keys_source\n"
        "        super().select_out_keys(*keys)\n"
        "        self._out_keys = source\n"
        "        return self\n"
        "    def forward(self, td):\n"
        "        return td.set('y', td['x'] + 1).set('z', td['x'])\n"
        "class Computed(Both):\n"
        "    @property\n"
        "    def out_keys(self):\n"
        "        return self._out_keys or ['y', 'z']\n"
        "both, computed = Both(), Computed()\n"
        "both.out_keys = ['y', 'z']\n"
        "print(both.out_keys, both._out_keys, both._out_keys_apparent)\n"
        "both.select_out_keys('z')\n"
        "print(both.out_keys, both._out_keys, both._out_keys_apparent)\n"
        "print(*both(TensorDict(x=torch.ones(1))).keys())\n"
        "both._out_keys_apparent = ['y', 'z']\n"
        "print(both.out_keys, TensorDictSequential(both).out_keys)\n"
        "computed._out_keys = None\n"
        "print(computed.out_keys)\n"
        "computed._out_keys = ['y']\n"
        "print(computed.out_keys, computed._out_keys)\n"
    )
    result = children.run("-W", "ignore", "-c", program)
    assert result.stdout.splitlines() == [
        "['y', 'z'] ['y', 'z'] ['y', 'z']",
        "['z'] ['y', 'z'] ['z']",
        "x z",
        "['y', 'z'] ['y', 'z']",
        "['y', 'z']",
        "['y'] ['y']",
    ], result.stderr
