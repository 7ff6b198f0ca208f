"""What a sequence knows about its steps follows each change of them."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from kd_core import NestedKey
from kd_nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
)
from kd_nn._modules.sequence import Resolved, resolve_sequence


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


def assign_members(model: TensorDictSequential) -> None:
    model.module._modules = dict(reversed(model.module._modules.items()))
    model.module._modules = {"0": step("new", "y")}


def write_member_of_a_plain_list(model: TensorDictSequential) -> None:
    model.module = torch.nn.ModuleList([step("old", "y")])
    assert model.in_keys == ["old"]
    model.module._modules["0"] = step("new", "y")


CHANGES = [
    *[assign_in_keys, assign_member, delete_member],
    *[assign_members, write_member_of_a_plain_list],
]


@pytest.mark.parametrize("change", CHANGES)
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


def test_in_keys_of_a_sequence_are_a_list_of_the_caller() -> None:
    module = TensorDictSequential(step("x", "y"))
    module.in_keys.append("mine")
    assert module.in_keys == ["x"]


def test_keys_inside_a_wrapper_are_followed() -> None:
    inner = TensorDictSequential(step("x", "h"))
    outer = TensorDictSequential(TensorDictModuleWrapper(inner), step("h", "y"))
    assert outer.in_keys == ["x"]
    inner.module[0] = step("new", "h")  # type: ignore[index]  # a list here
    assert outer.in_keys == ["new"]


def test_keys_that_a_sequence_of_the_user_computes_are_followed() -> None:
    class More(TensorDictSequential):
        more = "a"

        @property
        def in_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
            return [*super().in_keys, self.more]

    inner = More(step("x", "h"))
    outer = TensorDictSequential(inner)
    assert outer.in_keys == ["x", "a"]
    More.more = "b"
    assert outer.in_keys == ["x", "b"]


def test_a_shallow_copy_has_steps_of_its_own() -> None:
    model = TensorDictSequential(step("x", "h"))
    copied = copy.copy(model).append(step("h", "y"))
    assert (len(model), len(copied)) == (1, 2)
    assert (model.out_keys, copied.out_keys) == (["h"], ["h", "y"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("named", [False, True])
def test_a_copy_holds_its_steps_like_the_original(
    copied: Callable[[TensorDictSequential], TensorDictSequential], named: bool
) -> None:
    steps: dict[str, torch.nn.Module] = {"0": step("x", "h")}
    model = TensorDictSequential(steps) if named else TensorDictSequential(*steps.values())
    made = copied(model)
    assert type(made.module) is type(model.module)
    assert repr(made) == repr(model)
    assert made.in_keys == ["x"]
    setattr(made.module, "0", step("new", "h"))
    assert (made.in_keys, model.in_keys) == (["new"], ["x"])


def test_flags_of_sequences_that_are_gone_are_dropped() -> None:
    shared = step("x", "h")
    for _ in range(1000):
        assert TensorDictSequential(shared).in_keys == ["x"]
    assert len(shared.__dict__["_kd_flags"]) < 50


@pytest.mark.parametrize("number", range(1, 7))
def test_an_edit_while_keys_are_read_gives_no_mix(number: int) -> None:
    class Interrupting(TensorDictModuleBase):
        out_keys = ["c"]  # noqa: RUF012 - a list, as users declare it
        asked = 0

        @property
        def in_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
            self.__dict__["asked"] = self.asked + 1
            if self.asked == number:  # as another thread could
                first.in_keys = ["new a"]
                last.in_keys = ["new b"]
            return []

    first, last, between = step("a", "h"), step("b", "y"), Interrupting()
    model = TensorDictSequential(first, between, last)
    first.in_keys, last.in_keys = ["a"], ["b"]
    between.__dict__["asked"] = 0
    assert model.in_keys in (["a", "b"], ["new a", "b"], ["new a", "new b"])


def test_edits_that_come_in_between_many_times_give_no_mix() -> None:
    class Interrupting(TensorDictModuleBase):
        out_keys = ["c"]  # noqa: RUF012 - a list, as users declare it
        _kd_changes_by_assignment = (
            True  # it computes nothing; the edits are those of other threads
        )
        asked = 0

        @property
        def in_keys(self) -> list[NestedKey]:  # type: ignore[override]  # as above
            self.__dict__["asked"] = self.asked + 1
            if self.asked <= 50:
                first.in_keys, last.in_keys = [f"a{self.asked}"], [f"b{self.asked}"]
            return []

    first, last, between = step("a", "h"), step("b", "y"), Interrupting()
    model = TensorDictSequential(first, between, last)
    between.__dict__["asked"] = 0
    first.in_keys = ["a"]
    assert model.in_keys == ["a50", "b50"]


def test_an_export_resolves_a_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an export reads of a module is another object each time: nothing is ever current."""
    tried: list[Resolved] = []

    def is_current(resolved: Resolved) -> bool:
        tried.append(resolved)
        return False

    model = TensorDictSequential(step("a", "b"), step("b", "c"))
    monkeypatch.setattr(Resolved, "is_current", is_current)
    monkeypatch.setattr("kd_nn._modules.sequence.is_compiling", lambda: True)
    assert resolve_sequence(model).in_keys == ("a",)
    assert len(tried) == 1
