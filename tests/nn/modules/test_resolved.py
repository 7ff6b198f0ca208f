"""What a sequence knows about its steps follows each change of them."""

from collections.abc import Callable

import pytest
import torch

from kd_nn import TensorDictModule, TensorDictSequential


def step(reads: str, writes: str) -> TensorDictModule:
    return TensorDictModule(torch.neg, [reads], [writes])


def assign_in_keys(model: TensorDictSequential) -> None:
    model[0].in_keys = ["new"]


def assign_member(model: TensorDictSequential) -> None:
    model.module[0] = step("new", "h")  # type: ignore[index]  # a list here


def delete_member(model: TensorDictSequential) -> None:
    model.module = torch.nn.ModuleList([step("old", "x"), step("new", "y")])
    assert model.in_keys == ["old", "new"]
    del model.module[0]  # replaces `_modules` of the list


def write_member(model: TensorDictSequential) -> None:
    model.module._modules["0"] = step("new", "h")  # as quantization swaps modules


@pytest.mark.parametrize("change", [assign_in_keys, assign_member, delete_member, write_member])
def test_in_keys_follow_a_change(change: Callable[[TensorDictSequential], None]) -> None:
    model = TensorDictSequential(step("x", "h"), step("h", "y"))
    outer = TensorDictSequential(model, step("y", "z"))
    assert model.in_keys == outer.in_keys == ["x"]
    change(model)
    assert model.in_keys == outer.in_keys == ["new"]


def test_in_keys_follow_a_shared_step_while_other_modules_change() -> None:
    shared, other = step("x", "h"), step("a", "b")
    models = [TensorDictSequential(shared, step("h", "y")) for _ in range(2)]
    other_model = TensorDictSequential(other)
    for key in ("first", "second"):
        shared.in_keys = [key]
        other.in_keys = [f"other {key}"]
        assert other_model.in_keys == [f"other {key}"]
        assert [model.in_keys for model in models] == [[key], [key]]


@pytest.mark.parametrize(
    "module", [step("x", "y"), TensorDictSequential(step("x", "y"))], ids=["module", "sequence"]
)
def test_in_keys_are_a_list_of_the_caller(
    module: TensorDictModule | TensorDictSequential,
) -> None:
    module.in_keys.append("mine")
    assert module.in_keys == ["x"]
