"""A plan in a program: what steps raise, threads, memory, and modules that are called once."""

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import cast

import pytest
import torch
from tests.nn.plans import FORMS, X, call, make, module_calls, planned, same
from torch import Tensor, nn

from kd_core import TensorDict
from kd_nn import TensorDictModule, TensorDictSequential
from kd_nn._modules import base
from kd_nn._plan.program import UNPLANNED


def test_type_error_inside_a_step_is_not_swallowed() -> None:
    def broken(x: Tensor) -> Tensor:
        raise TypeError("inside")

    model = TensorDictSequential(TensorDictModule(broken, ["x"], ["y"]))
    for _ in range(2):
        with pytest.raises(TypeError, match="inside") as caught:
            model(x=X)
        assert caught.value.__notes__ == [
            "In step 0, `TensorDictModule(broken)`: reads `x` (2, 3) float32; writes `y`."
        ]


@pytest.mark.parametrize("form", FORMS)
def test_failing_step_leaves_the_container(form: str) -> None:
    switch: list[bool] = []

    def second(a: Tensor) -> Tensor:
        if switch:
            raise ValueError("off")
        return a

    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["a"]), TensorDictModule(second, ["a"], ["b"])
    )
    call(model, form)
    switch.append(True)
    td = TensorDict(x=X)
    with pytest.raises(ValueError, match="off"):
        model(td)
    assert list(td.keys()) == ["x"]


def test_output_that_does_not_fit_leaves_the_container() -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["a"]), TensorDictModule(torch.sum, ["x"], ["b"])
    )
    for _ in range(2):
        td = TensorDict({"x": X}, [2])
        with pytest.raises(ValueError, match="`b`"):
            model(td)
        assert list(td.keys()) == ["x"]


def test_output_that_a_later_step_replaces_must_fit_too() -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.sum, ["x"], ["y"]),
        TensorDictModule(torch.neg, ["x"], ["y"]),
        partial_tolerant=True,
    )
    for _ in range(3):
        with pytest.raises(ValueError, match="`y`") as caught:
            model(TensorDict({"x": X}, [2]))
        assert caught.value.__notes__[0].startswith("In step 0")


def test_a_plan_says_which_step_made_an_output_that_does_not_fit() -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["y"]),
        TensorDictModule(lambda y: y[:1], ["y"], ["z"]),
    )
    for rows in (1, 1, 2):  # the plan is made by the calls that fit
        td = TensorDict({"x": torch.zeros(rows, 3)}, [rows])
        if rows == 1:
            model(td)
    with pytest.raises(ValueError, match="`z`") as caught:
        model(td)
    step, remedy = caught.value.__notes__
    assert step.startswith("In step 1, `TensorDictModule(")
    assert step.endswith("writes `z`.")
    assert "td['y'].mean(0)" in remedy


@pytest.mark.parametrize("tolerant", [False, True])
def test_part_of_an_argument_is_read_by_every_call(tolerant: bool) -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, [("n", "a")], ["y"]),
        TensorDictModule(lambda n: n["a"], ["n"], ["z"]),
        partial_tolerant=tolerant,
    )
    model.select_out_keys("y")
    for _ in range(3):
        assert torch.equal(cast("Tensor", model(n={"a": X})), -X)


def test_a_step_that_has_a_plan_of_its_own_is_freed_without_the_cycle_collector() -> None:
    gc.disable()
    try:
        step = TensorDictModule(nn.Linear(3, 3), ["x"], ["y"])
        td = TensorDict({"x": torch.zeros(2, 3)}, [2])
        for _ in range(3):
            step(td.clone())
        found = weakref.ref(step)
        del step
        assert found() is None
    finally:
        gc.enable()


def test_module_is_freed_without_the_cycle_collector() -> None:
    twin = copy.deepcopy(planned("keyword"))
    twin(x=X)
    twin(TensorDict(x=X))
    gone = weakref.ref(twin)
    gc.disable()
    try:
        del twin
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def threads() -> Iterator[list[threading.Thread]]:
    started: list[threading.Thread] = []
    yield started
    for thread in started:
        thread.join()


def test_threads_share_a_plan(threads: list[threading.Thread]) -> None:
    model = make()
    found: list[bool] = []
    expected = call(make(), "keyword")

    def work() -> None:
        found.extend(same(call(model, "keyword"), expected) for _ in range(20))

    threads += [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


@pytest.mark.parametrize("form", FORMS)
def test_module_that_is_called_once_gets_no_plan(form: str) -> None:
    fresh = make()
    assert module_calls(lambda: call(fresh, form)) > 0


@pytest.mark.parametrize("form", FORMS)
def test_plan_is_made_once_it_pays(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "UNPLANNED", UNPLANNED)  # as users have it
    model, expected = make(), call(make(), form)

    def run() -> None:
        found = call(model, form)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)

    counts = [module_calls(run) for _ in range(UNPLANNED + 2)]
    assert all(counts[:UNPLANNED])
    assert counts[UNPLANNED:] == [0, 0]


def test_attributes_copied_by_hand_do_not_end_the_plans_of_the_original() -> None:
    model = planned("keyword")
    twin = object.__new__(TensorDictSequential)
    twin.__dict__ = dict(model.__dict__)
    for _ in range(3):
        model(x=X)
    assert module_calls(lambda: model(x=X)) == 0
