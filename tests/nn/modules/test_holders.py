"""The list of steps of a sequence announces its edits; a direct write counts in each call."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kd_core import NestedKey, TensorDict
from kd_nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    dispatch,
)


def step(reads: str, writes: str) -> TensorDictModule:
    return TensorDictModule(torch.neg, [reads], [writes])


class Reading(TensorDictModuleBase):
    """A class of the user that says the keys of a sequence inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.nets = nn.ModuleList([inner])

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
        return list(self.inner.in_keys)

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
        return list(self.inner.out_keys)

    @property
    def inner(self) -> Any:
        return self.nets[0]

    @dispatch
    def forward(self, tensordict: TensorDict) -> TensorDict:
        result: TensorDict = self.inner(tensordict)
        return result


class ReadingValues(Reading):
    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        found: tuple[object, ...] = self.inner._kd_forward_values(*values)
        return found

    @property
    def out_keys_source(self) -> list[NestedKey]:
        return self.out_keys


class OwnSequence(TensorDictSequential):
    """A sequence of the user."""


new = step("new", "h")
last = step("y", "z")
EDITS_OF_LISTS: dict[str, Callable[[nn.ModuleList], object]] = {
    "__setitem__": lambda held: held.__setitem__(0, new),
    "__delitem__": lambda held: held.__delitem__(0),
    "__delitem__ slice": lambda held: held.__delitem__(slice(1, 2)),
    "__iadd__": lambda held: held.__iadd__([last]),
    "append": lambda held: held.append(last),
    "extend": lambda held: held.extend([last]),
    "insert": lambda held: held.insert(0, step("new", "x")),
    "pop": lambda held: held.pop(0),
}
EDITS_OF_DICTS: dict[str, Callable[[nn.ModuleDict], object]] = {
    "__setitem__": lambda held: held.__setitem__("0", new),
    "__delitem__": lambda held: held.__delitem__("0"),
    "clear": lambda held: held.clear(),
    "pop": lambda held: held.pop("0"),
    "update": lambda held: held.update({"0": new}),
}
EDITS_OF_MODULES: dict[str, Callable[[nn.Module], object]] = {
    "__delattr__": lambda held: held.__delattr__("0"),
    "__setattr__": lambda held: held.__setattr__("0", new),
    "__dict__": lambda held: setattr(held, "__dict__", {**held.__dict__, "_modules": {}}),
    "add_module": lambda held: held.add_module("0", new),
    "register_module": lambda held: held.register_module("0", new),
    "set_submodule": lambda held: held.set_submodule("0", new),
}
READING = {
    *("__init__", "__doc__", "__module__", "__annotations__", "__getitem__", "__len__"),
    *("__iter__", "__add__", "__repr__", "__dir__", "__contains__", "keys", "items", "values"),
    *("_get_abs_string_index", "__dict__", "__weakref__", "__static_attributes__", "forward"),
    *("__firstlineno__",),
}


@pytest.mark.parametrize("named", [False, True])
def test_every_edit_of_the_list_is_announced(named: bool) -> None:
    edits: dict[str, Callable[[Any], object]] = {**EDITS_OF_MODULES}
    edits |= EDITS_OF_DICTS if named else EDITS_OF_LISTS
    for name, edit in edits.items():
        steps: dict[str, nn.Module] = {"0": step("x", "h"), "1": step("h", "y")}
        model = TensorDictSequential(steps) if named else TensorDictSequential(*steps.values())
        inside = OwnSequence(TensorDictSequential(TensorDictModuleWrapper(model)))
        outer = [TensorDictSequential(model), TensorDictSequential(inside)]
        before = model.in_keys, model.out_keys
        assert [(m.in_keys, m.out_keys) for m in outer] == [before] * 2
        edit(model.module)
        known = TensorDictSequential(*model.module._modules.values())
        assert (model.in_keys, model.out_keys) == (known.in_keys, known.out_keys) != before, name
        after = [(m.in_keys, m.out_keys) for m in outer]
        assert after == [(known.in_keys, known.out_keys)] * 2, name


@pytest.mark.parametrize(
    ("kind", "edits"), [(nn.ModuleList, EDITS_OF_LISTS), (nn.ModuleDict, EDITS_OF_DICTS)]
)
def test_every_method_of_torch_is_known_to_edit_or_to_read(
    kind: type[nn.Module], edits: dict[str, object]
) -> None:
    assert {*vars(kind)} <= READING | {name.split()[0] for name in edits}


def write_directly(model: TensorDictSequential) -> None:
    """Write `_modules` of the list, as quantization does when it swaps modules."""
    model.module._modules["0"] = step("new", "h")
    model.module._modules["1"] = step("h", "z")


AROUND: dict[str, Callable[[TensorDictSequential], Any]] = {
    "itself": lambda inner: inner,
    "sequence": TensorDictSequential,
    "sequence of the user": OwnSequence,
    "named": lambda inner: TensorDictSequential({"a": inner}),
    "wrapper": TensorDictModuleWrapper,
    "wrapper in a sequence": lambda inner: TensorDictSequential(TensorDictModuleWrapper(inner)),
    "computed": Reading,
    "computed in a wrapper": lambda inner: TensorDictModuleWrapper(Reading(inner)),
    "computed in a sequence": lambda inner: TensorDictSequential(Reading(inner)),
    "computed on values": ReadingValues,
    "computed on values in a sequence": lambda inner: TensorDictSequential(ReadingValues(inner)),
}
USES: dict[str, Callable[[Any], object]] = {
    "container": lambda model: model(TensorDict(new=torch.ones(2)))["z"],
    "tensor": lambda model: model(torch.ones(2))[-1],
    "keyword": lambda model: model(new=torch.ones(2))[-1],
}


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("around", AROUND)
def test_a_call_counts_what_was_written_into_the_list_directly(
    around: str, use: str, calls: int
) -> None:
    for kind in (TensorDictSequential, OwnSequence):
        inner = kind(step("x", "h"), step("h", "y"))
        model = AROUND[around](inner)
        for _ in range(calls):
            model(torch.ones(2))
        assert model.in_keys == inner.in_keys == ["x"]
        write_directly(inner)
        assert torch.equal(USES[use](model), torch.ones(2))  # type: ignore[arg-type]  # a tensor
        assert (model.in_keys, model.out_keys) == (["new"], ["h", "z"])
        assert (inner.in_keys, inner.out_keys) == (["new"], ["h", "z"])


@pytest.mark.parametrize("around", AROUND)
def test_what_is_built_later_counts_what_was_written_directly(around: str) -> None:
    inner = TensorDictSequential(step("x", "h"), step("h", "y"))
    model = AROUND[around](inner)
    assert model.in_keys == inner.in_keys == ["x"]
    write_directly(inner)
    later = TensorDictSequential(model)
    assert (later.in_keys, later.out_keys) == (["new"], ["h", "z"])
    assert (model.in_keys, inner.in_keys) == (["new"], ["new"])


def test_a_call_of_the_inner_sequence_announces_what_was_written_directly() -> None:
    inner = TensorDictSequential(step("x", "h"), step("h", "y"))
    outer = TensorDictSequential(inner)
    write_directly(inner)
    inner(torch.ones(2))
    assert outer.in_keys == ["new"]


def test_compiled_code_follows_an_edit_of_the_list() -> None:
    model = TensorDictSequential(step("x", "h"), step("h", "y"))
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    data = {"x": torch.zeros(2), "new": torch.ones(2)}
    assert compiled(TensorDict(data))["y"].sum() == 0
    model.module[0] = step("new", "h")  # type: ignore[index]  # a list here
    assert compiled(TensorDict(data))["y"].sum() == 2


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_a_list_of_steps_is_copied_and_pickled_as_a_list_of_torch(
    kind: type[nn.Module], copied: Callable[[nn.Module], nn.Module]
) -> None:
    named = {"a": step("x", "h")}
    model = TensorDictSequential(named if kind is nn.ModuleDict else [*named.values()])  # type: ignore[arg-type]  # steps
    holder = model.module
    made = copied(holder)
    assert isinstance(holder, kind)
    assert type(made) is kind
    assert type(made._modules) is type(holder._modules) is dict
    assert vars(made).keys() == vars(kind()).keys()
    assert repr(made) == repr(holder)
    assert repr(holder).startswith(f"{kind.__name__}(")


def test_a_copy_of_a_sequence_announces_edits() -> None:
    model = TensorDictSequential(step("x", "h"), step("h", "y"))
    copies: list[Any] = [copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for made in copies:
        assert made.in_keys == ["x"]
        assert repr(type(made.module)) == repr(type(model.module))
        made.module.insert(0, step("new", "x"))
        assert made.in_keys == ["new"]
        made.module.pop(0)
