"""Building and editing the list of steps of a sequence."""

import pytest
import torch
from torch import nn

from kd_core import InvalidArgument, KeyNotFound, OutOfRange, TensorDict, TensorDictBase
from kd_nn import NotKeyed, TensorDictModule, TensorDictModuleBase, TensorDictSequential


def neg(reads: str = "x", writes: str = "y") -> TensorDictModule:
    return TensorDictModule(torch.neg, [reads], [writes])


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
def test_steps_come_in_one_list(kind: type) -> None:
    step = neg()
    assert TensorDictSequential(kind([step]))[0] is step


@pytest.mark.parametrize("kind", [dict, nn.ModuleDict])
def test_steps_come_by_name(kind: type) -> None:
    step = neg()
    assert TensorDictSequential(kind({"flip": step}))["flip"] is step


@pytest.mark.parametrize("name", [1, "", "a.b"])
def test_names_are_those_of_sub_modules(name: object) -> None:
    message = "named by a str without a dot"
    with pytest.raises(InvalidArgument, match=message):
        TensorDictSequential({name: neg()})  # type: ignore[dict-item]  # wrong on purpose
    if isinstance(name, str):
        model = TensorDictSequential({"flip": neg()})
        with pytest.raises(InvalidArgument, match=message):
            model.insert(name, neg("y", "z"))
        with pytest.raises(InvalidArgument, match=message):
            model[name] = neg("y", "z")
        assert len(model) == 1


@pytest.mark.parametrize(("place", "order"), [(0, "nxy"), (1, "xny"), (2, "xyn"), (-1, "xny")])
def test_step_is_inserted_at_a_place(place: int, order: str) -> None:
    model = TensorDictSequential(neg("x", "a"), neg("y", "b"))
    model.insert(place, neg("n", "c"))
    assert "".join(str(key) for key in model.in_keys) == order


@pytest.mark.parametrize("place", [3, -3])
def test_place_that_there_is_not_is_refused(place: int) -> None:
    model = TensorDictSequential(neg("x", "a"), neg("y", "b"))
    with pytest.raises(IndexError, match=f"index {place} is out of range for the 2 steps"):
        model.insert(place, neg("n", "c"))


def test_extend_adds_steps_and_recomputes_the_keys() -> None:
    model = TensorDictSequential(neg("x", "a"))
    assert model.extend(neg(*keys) for keys in (("a", "b"), ("c", "d"))) is model
    assert model.in_keys == ["x", "c"]
    assert model.out_keys == ["a", "b", "d"]
    assert torch.equal(model(TensorDict(x=torch.ones(1), c=torch.ones(1)))["b"], torch.ones(1))
    assert len(model.extend(model)) == 6


def test_extend_continues_the_names_of_steps() -> None:
    model = TensorDictSequential({"first": neg("x", "a")})
    model.extend([neg("a", "b")]).extend({"last": neg("b", "c")})
    assert [name for name, _ in model._kd_named_steps()] == ["first", "1", "last"]
    assert TensorDictSequential(neg()).extend({"last": neg("y", "z")})["last"].in_keys == ["y"]


def test_extend_adds_all_steps_or_none() -> None:
    model = TensorDictSequential(neg("x", "a"))
    with pytest.raises(NotKeyed, match=r"step `2` \(`ReLU`\) has no keys. Wrap it"):
        model.extend([neg("a", "b"), nn.ReLU()])
    with pytest.raises(InvalidArgument, match="has a step `0` already"):
        model.extend({"new": neg("a", "b"), "0": neg("b", "c")})
    with pytest.raises(InvalidArgument, match="expected several keyed modules, got TensorDictMod"):
        model.extend(neg("a", "b"))  # type: ignore[arg-type]  # wrong on purpose
    assert len(model) == 1
    assert model.out_keys == ["a"]


def test_pop_returns_the_step_that_it_removes() -> None:
    steps = [neg("x", "a"), neg("a", "b"), neg("b", "c")]
    model = TensorDictSequential(*steps)
    assert model.pop() is steps[2]
    assert model.pop(0) is steps[0]
    assert (model.in_keys, model.out_keys) == (["a"], ["b"])
    assert TensorDictSequential({"one": steps[0]}).pop("one") is steps[0]


def test_pop_of_a_step_that_there_is_not_changes_nothing() -> None:
    model = TensorDictSequential({"one": neg("x", "a"), "two": neg("a", "b")})
    with pytest.raises(OutOfRange, match="index 2 is out of range for the 2 steps"):
        model.pop(2)
    with pytest.raises(KeyNotFound, match=r"step `too` of .* not found.* Did you mean `two`"):
        model.pop("too")
    model.select_out_keys("b")
    with pytest.raises(KeyNotFound, match="`b`"):
        model.pop("two")
    assert len(model) == 2
    assert model.out_keys == ["b"]


def test_class_is_no_step() -> None:
    with pytest.raises(NotKeyed, match=r"`0` is the class `ReLU`. Give an instance: `ReLU\(...\)`"):
        TensorDictSequential(nn.ReLU)  # type: ignore[arg-type]  # wrong on purpose


def test_custom_module_without_keys_is_told_to_declare_them() -> None:
    class Custom(TensorDictModuleBase):
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict

    with pytest.raises(
        NotKeyed, match=r"`Custom`\) declares no in_keys. Declare them in the class"
    ):
        TensorDictSequential(Custom())
    assert Custom()(TensorDict()).is_empty()


def test_keys_of_a_plain_module_are_read_as_those_of_every_other() -> None:
    class Plain(nn.Module):
        in_keys, out_keys = "ab", ("n", "y")  # one key each, as everywhere

        def forward(self, tensordict: TensorDict) -> TensorDict:
            return tensordict.set(("n", "y"), tensordict["ab"] + 1)

    class Silent(nn.Module):
        in_keys: tuple[()] = ()
        out_keys: tuple[()] = ()

        def forward(self, tensordict: TensorDict) -> TensorDict:
            return tensordict

    model = TensorDictSequential(Silent(), Plain())
    assert (model.in_keys, model.out_keys) == (["ab"], [("n", "y")])
    assert model(ab=torch.ones(1)) == 2


def test_keys_that_a_class_declares_stand_before_the_property_of_its_base() -> None:
    class Computed(TensorDictModuleBase):
        out_keys = ["y"]  # noqa: RUF012 - as keys are declared

        @property
        def in_keys(self) -> list[str]:  # type: ignore[override]  # as users write it
            return ["a"]

    class Declared(Computed):
        in_keys = ["x"]  # noqa: RUF012 - as users write it

    class Below(Declared):
        pass

    assert Computed().in_keys == ["a"]
    assert Below.in_keys == Below().in_keys == ["x"]
    module = Below()
    module.in_keys = ["q"]
    assert (module.in_keys, Below.in_keys) == (["q"], ["x"])
