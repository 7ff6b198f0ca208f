"""A compiled sequence sees what has changed, and returns what any other call returns."""

import copy
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from tests.nn.plans import X
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from kd_core import TensorDict, TensorDictBase
from kd_nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential, dispatch


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


def test_keyword_arguments_that_are_added_in_place_are_passed() -> None:
    model = TensorDictSequential(TensorDictModule(scaled, ["x"], ["y"]))
    compiled = cast("Callable[..., Tensor]", torch.compile(model, backend="eager"))
    compiled(x=X)
    cast("dict[str, object]", model[0].method_kwargs)["by"] = 3.0
    torch.testing.assert_close(compiled(x=X), 3 * X)


def test_step_that_is_replaced_in_its_list_is_run() -> None:
    model = TensorDictSequential(TensorDictModule(torch.neg, ["x"], ["y"]))
    compiled = torch.compile(model, backend="eager")
    compiled(TensorDict(x=X))
    model.module._modules["0"] = TensorDictModule(torch.exp, ["x"], ["z"])
    assert list(compiled(TensorDict(x=X)).keys()) == ["x", "z"]


def parts(x: Tensor) -> dict[str, Tensor]:
    return {"a": x, "b": x + 1}


def test_a_nested_result_is_returned_by_a_call_of_tensors() -> None:
    model = TensorDictSequential(TensorDictModule(parts, ["x"], ["n"]))
    compiled = cast("Callable[..., TensorDict]", torch.compile(model, backend="eager"))
    made = compiled(x=X)
    assert list(made.keys()) == ["a", "b"]
    torch.testing.assert_close(made["b"], X + 1)


def test_a_step_inside_that_gets_another_module_is_traced_anew() -> None:
    step = TensorDictModule(torch.neg, ["a"], ["b"])
    inner = TensorDictSequential(step, TensorDictModule(torch.tanh, ["b"], ["c"]))
    model = TensorDictSequential(inner, partial_tolerant=True)  # interpreted, unlike the inner one
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    on_tensors = cast("Callable[..., list[Tensor]]", compiled)
    a = torch.ones(3, 2)
    for function in (torch.exp, torch.sin):
        td = model(TensorDict(a=a, batch_size=[3]))
        assert torch.equal(compiled(TensorDict(a=a, batch_size=[3]))["c"], td["c"])
        assert torch.equal(on_tensors(a=a)[1], td["c"])
        step.module = function


traces_assignments = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.10 does not trace writes into `__dict__`"
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()  # other models were compiled, and they count together
    yield
    torch.compiler.reset()


@pytest.fixture(params=["alone", "in a sequence", "in a copy"])
def model(request: pytest.FixtureRequest) -> TensorDictModule:
    step = TensorDictModule(torch.neg, ["x"], ["y"])
    if request.param == "alone":
        return step
    sequence = TensorDictSequential(step)
    return sequence if request.param == "in a sequence" else copy.deepcopy(sequence)


def step_of(model: TensorDictModule) -> TensorDictModule:
    return cast(TensorDictModule, model[0]) if isinstance(model, TensorDictSequential) else model


@traces_assignments
def test_an_attribute_is_assigned_in_compiled_code(model: TensorDictModule) -> None:
    def run(td: TensorDict) -> Tensor:
        model.calls = 1
        step_of(model).calls = 2
        return model(td)["y"]

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(TensorDict(x=X)), -X)


@traces_assignments
def test_keys_that_compiled_code_assigns_are_read_and_written(model: TensorDictModule) -> None:
    def run(td: TensorDict) -> TensorDict:
        step_of(model).out_keys = ["z"]
        return model(td)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for _ in range(2):
        assert list(compiled(TensorDict(x=X)).keys()) == ["x", "z"]
    assert model.out_keys == ["z"]


def test_a_setting_that_changes_between_calls_is_seen(model: TensorDictModule) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(TensorDict(x=X))["y"], -X)
    step_of(model).module = torch.exp
    torch.testing.assert_close(compiled(TensorDict(x=X))["y"], X.exp())
    step_of(model).out_keys = ["z"]
    assert list(compiled(TensorDict(x=X)).keys()) == ["x", "z"]
    step_of(model).register_forward_hook(lambda module, args, td: td.set("seen", X))
    torch.compiler.reset()  # dynamo has no guard of hooks
    assert "seen" in compiled(TensorDict(x=X))


def test_a_lone_module_writes_where_it_is_told_in_compiled_code() -> None:
    td, out = TensorDict(x=X), TensorDict()
    fresh = TensorDictModule(torch.neg, ["x"], [("n", "y")], inplace=False)
    compiled = torch.compile(fresh, backend="eager", fullgraph=True)
    assert list(compiled(td).keys(True)) == ["n", ("n", "y")]
    assert list(td.keys()) == ["x"]
    assert compiled(td, tensordict_out=out) is out
    torch.testing.assert_close(out["n", "y"], -X)


def test_a_lone_module_that_changes_between_calls_is_compiled_few_times() -> None:
    model = TensorDictModule(torch.neg, ["x"], ["y"])
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for number in range(12):
        model.count = number
        torch.testing.assert_close(compiled(TensorDict(x=X))["y"], -X)
    assert counter.frame_count <= 5
    model.out_keys = ["z"]
    assert list(compiled(TensorDict(x=X)).keys()) == ["x", "z"]


class Declared(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012  # as users write it
    out_keys = ["y", "z"]  # noqa: RUF012  # as users write it

    def get_kwargs(self) -> float:
        return 2.0

    def forward(self, td: TensorDict) -> TensorDict:
        x = td[self.in_keys[0]] * self.get_kwargs()
        for number, key in enumerate(self.out_keys_source):
            td.set(key, x + number)
        return td


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (lambda model: model.select_out_keys("z"), ["x", "b", "z"]),
        (lambda model: setattr(model, "out_keys", ["v", "w"]), ["x", "b", "v", "w"]),
        (lambda model: setattr(model, "in_keys", ["b"]), ["x", "b", "y", "z"]),
    ],
)
def test_keys_that_replace_those_of_the_class_are_seen(
    change: Callable[[Declared], object], keys: list[str]
) -> None:
    model, counter = Declared(), CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for _ in range(2):
        compiled(TensorDict(x=X, b=X + 1))
    assert counter.frame_count == 1
    change(model)
    found, want = compiled(TensorDict(x=X, b=X + 1)), model(TensorDict(x=X, b=X + 1))
    assert list(found.keys()) == list(want.keys()) == keys
    assert all(torch.equal(found[key], want[key]) for key in keys)


def test_get_kwargs_that_are_assigned_later_are_passed() -> None:
    model = TensorDictModule(torch.neg, ["x"], ["y"])
    compiled = torch.compile(model, backend="eager")
    for number in range(8):  # in the end it has no plan, which would see the change
        model.count = number
        compiled(TensorDict(x=X))
    model.get_kwargs = {"no_such_option": 1}
    with pytest.raises(TypeError, match="no_such_option"):
        compiled(TensorDict(x=X))


class Shifted(TensorDictModule):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]  # takes a container alone
        made = super().forward(tensordict)
        return made.set("y", made["y"] + 1)


class Logged(TensorDictSequential):
    def forward(  # type: ignore[override]  # takes a container alone
        self, tensordict: TensorDictBase, **options: object
    ) -> TensorDictBase:
        made = super().forward(tensordict, **options)
        return made.set("seen", made["y"].sum())


class Doubled(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012  # as users write it
    out_keys = ["y"]  # noqa: RUF012  # as users write it

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("y", tensordict["x"] * 2)


class Quadrupled(Doubled):
    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        made = super().forward(tensordict)
        return made.set("y", made["y"] * 2)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Shifted(torch.neg, ["x"], ["y"]),
        lambda: Logged(Shifted(torch.neg, ["x"], ["y"])),
        Quadrupled,
    ],
    ids=["module", "sequence", "dispatched"],
)
def test_a_subclass_calls_the_forward_of_its_base(made: Callable[[], TensorDictModuleBase]) -> None:
    model = made()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found, expected = compiled(TensorDict(x=X)), model(TensorDict(x=X))
    assert list(found.keys()) == list(expected.keys())
    assert (found == expected).all()
