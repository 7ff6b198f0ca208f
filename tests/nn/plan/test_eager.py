"""After a plan exists, whatever would have been seen without it is still seen."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, cast

import pytest
import torch
from tests.nn.plans import FORMS, X, call, leaf, make, module_calls, planned, same
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrizations, parametrize

from kd_core import Locked, NestedKey, TensorDict, TensorDictBase
from kd_nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential, dispatch
from kd_nn._plan.plans import by_level


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(form: str) -> TensorDictSequential:
    return planned(form)


def test_values_and_gradients_equal_the_long_way(model: TensorDictSequential, form: str) -> None:
    fast = call(model, form)
    sum(value.sum() for value in fast.values()).backward()  # type: ignore[union-attr]  # `sum` may be 0
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    handle = model.register_forward_hook(lambda *_: None)
    slow = call(model, form)
    handle.remove()
    sum(value.sum() for value in slow.values()).backward()  # type: ignore[union-attr]  # `sum` may be 0
    assert same(fast, slow)
    for got, parameter in zip(gradients, model.parameters(), strict=True):
        assert got is not None
        assert parameter.grad is not None
        assert torch.equal(got, parameter.grad)


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], object]] = {
    "forward": lambda m, f: m.register_forward_hook(f),
    "forward with keywords": lambda m, f: m.register_forward_hook(f, with_kwargs=True),
    "forward always": lambda m, f: m.register_forward_hook(f, always_call=True),
    "pre": lambda m, f: m.register_forward_pre_hook(f),
    "pre with keywords": lambda m, f: m.register_forward_pre_hook(f, with_kwargs=True),
}
WHERE: dict[str, Callable[[TensorDictSequential], nn.Module]] = {
    "sequence": lambda model: model,
    "step": lambda model: model[0],
    "inner sequence": lambda model: model[2],
    "wrapped": leaf,
    "deep": lambda model: leaf(cast(TensorDictSequential, model[2])),
    "extractor": lambda model: leaf(model, 3),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("where", WHERE)
def test_hook_is_seen(model: TensorDictSequential, form: str, kind: str, where: str) -> None:
    seen: list[object] = []
    handle = HOOKS[kind](WHERE[where](model), lambda *args: seen.append(args))
    expected = call(make(), form)
    assert same(call(model, form), expected)
    assert len(seen) == 1
    handle.remove()  # type: ignore[attr-defined]  # parametrised as `object`
    call(model, form)
    assert len(seen) == 1
    assert module_calls(lambda: call(model, form)) == 0


def test_replaced_function_is_run(form: str) -> None:
    model = TensorDictSequential(TensorDictModule(torch.neg, ["x"], ["h"]))
    for function in (torch.neg, torch.tanh):
        model[0].module = function
        assert torch.equal(call(model, form)["h"], function(X))


@pytest.mark.parametrize("where", ["deep", "extractor"])
def test_backward_hooks_are_seen(model: TensorDictSequential, form: str, where: str) -> None:
    seen: list[str] = []
    module = WHERE[where](model)
    module.register_full_backward_hook(lambda *_: seen.append("after"))
    module.register_full_backward_pre_hook(lambda *_: seen.append("before"))
    sum(value.sum() for value in call(model, form).values()).backward()  # type: ignore[union-attr]  # `sum` may be 0
    assert seen == ["before", "after"]


@pytest.mark.parametrize(
    "register",
    [hooks.register_module_forward_hook, hooks.register_module_forward_pre_hook],
)
def test_global_forward_hooks_see_every_module(
    model: TensorDictSequential, form: str, register: Callable[..., object]
) -> None:
    seen: list[str] = []
    handle = register(lambda module, *_: seen.append(type(module).__name__))
    try:
        call(model, form)
    finally:
        handle.remove()  # type: ignore[attr-defined]  # parametrised as `object`
    assert seen.count("Linear") == 2
    assert seen.count("TensorDictModule") == 4
    assert seen.count("TensorDictSequential") == 2


@pytest.mark.filterwarnings("ignore:.*backward hook")
def test_global_backward_hooks_are_seen(model: TensorDictSequential, form: str) -> None:
    seen: list[str] = []
    handle = hooks.register_module_full_backward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        sum(value.sum() for value in call(model, form).values()).backward()  # type: ignore[union-attr]  # `sum` may be 0
    finally:
        handle.remove()
    assert seen.count("Linear") == 2


@pytest.mark.parametrize("where", ["step", "wrapped"])
def test_hooks_in_a_dict_that_was_assigned_are_seen(
    model: TensorDictSequential, form: str, where: str
) -> None:
    module = model[0] if where == "step" else leaf(model)
    module._forward_hooks = OrderedDict()
    call(model, form)
    seen: list[int] = []
    module.register_forward_hook(lambda *_: seen.append(1))
    call(model, "container")
    assert seen == [1]


def test_hook_may_change_the_result(model: TensorDictSequential, form: str) -> None:
    leaf(model).register_forward_hook(lambda module, args, out: -out)
    expected = -nn.functional.linear(X, *leaf(model).parameters())
    assert torch.equal(call(model, form)["h"], expected.relu())


@pytest.mark.parametrize("where", ["wrapped", "extractor"])
def test_forward_patched_on_an_instance_is_called(
    model: TensorDictSequential, form: str, where: str
) -> None:
    module = WHERE[where](model)
    original, seen = module.forward, []

    def patched(*args: Tensor) -> object:
        seen.append(args)
        return original(*args)

    module.forward = patched
    call(model, form)
    assert len(seen) == 1
    del module.forward
    call(model, form)
    assert len(seen) == 1


def test_forward_patched_on_a_step_is_called(model: TensorDictSequential, form: str) -> None:
    step = model[1]
    step.forward = lambda td, **_: td.set("h", td["h"] + 100)
    assert torch.equal(call(model, form)["h"], leaf(model)(X) + 100)


def test_forward_patched_on_a_class_is_called(
    model: TensorDictSequential, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: torch.zeros(2, 4))
    assert not call(model, form)["p"].any()


CHANGES: dict[str, Callable[[TensorDictSequential], None]] = {
    "set item": lambda m: m.__setitem__(1, TensorDictModule(nn.Tanh(), ["h"], ["h"])),
    "wrapped": lambda m: setattr(m[1], "module", nn.Tanh()),
    "wrapped, behind the back": lambda m: m[1]._modules.__setitem__("module", nn.Tanh()),
    "list of modules": lambda m: setattr(m.module, "1", TensorDictModule(nn.Tanh(), ["h"], ["h"])),
    "all modules": lambda m: setattr(
        m, "module", nn.ModuleList([m[0], TensorDictModule(nn.Tanh(), ["h"], ["h"]), m[2], m[3]])
    ),
    "class": lambda m: setattr(leaf(m, 1), "__class__", nn.Tanh),
}


@pytest.mark.parametrize("change", CHANGES)
def test_replaced_module_is_run(model: TensorDictSequential, form: str, change: str) -> None:
    CHANGES[change](model)
    assert torch.equal(call(model, form)["h"], leaf(model)(X).tanh())
    assert torch.equal(call(model, form)["h"], leaf(model)(X).tanh())


def test_replaced_parameters_are_used(model: TensorDictSequential, form: str) -> None:
    leaf(model).weight = nn.Parameter(torch.zeros(4, 3))
    leaf(model).register_parameter("bias", None)
    assert not call(model, form)["h"].any()


def test_parametrised_weight_is_used(model: TensorDictSequential, form: str) -> None:
    parametrizations.weight_norm(leaf(model))
    with torch.no_grad():
        for name, parameter in leaf(model).named_parameters():
            if name == "bias" or name.endswith("original0"):
                parameter.zero_()
    assert not call(model, form)["h"].any()
    parametrize.remove_parametrizations(leaf(model), "weight")
    assert not call(model, form)["h"].any()


def test_functional_call_swaps_parameters(model: TensorDictSequential, form: str) -> None:
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    h, *_ = torch.func.functional_call(model, zeros, (X,))
    assert not h.any()
    assert call(model, form)["h"].any()


def test_changed_keys_are_read_and_written(model: TensorDictSequential, form: str) -> None:
    model[0].in_keys = ["y"]
    assert model.in_keys == ["y"]
    assert torch.equal(model(y=X)[0], call(make(), form)["h"])
    model[0].in_keys = ["x"]
    model[3].out_keys = ["loc", "scale"]
    assert list(call(model, form)) == ["h", "p", "loc", "scale"]


def test_changed_selection_is_returned(model: TensorDictSequential, form: str) -> None:
    model.select_out_keys("loc")
    assert list(call(model, form)) == ["loc"]
    model.reset_out_keys()
    cast(TensorDictModule, model[3]).select_out_keys("loc")
    assert list(call(model, form)) == ["h", "p", "loc"]


def test_changed_order_is_run(model: TensorDictSequential, form: str) -> None:
    first, second = model[0], model[1]
    model.append(TensorDictModule(torch.neg, ["h"], ["h"]))
    assert torch.equal(call(model, form)["h"], -leaf(model)(X).relu())
    del model[-1]
    assert [model[0], model[1]] == [first, second]
    assert torch.equal(call(model, form)["h"], leaf(model)(X).relu())


def test_custom_call_of_a_wrapped_module_is_used(form: str) -> None:
    class Loud(nn.Linear):
        def __call__(self, *args: Tensor) -> Tensor:
            return cast(Tensor, super().__call__(*args)) * 0

    model = TensorDictSequential(TensorDictModule(Loud(3, 4), ["x"], ["h"]))
    for _ in range(3):
        assert not call(model, form)["h"].any()


def test_custom_call_of_a_step_is_used(form: str) -> None:
    class Loud(TensorDictModule):
        def __call__(self, td: TensorDict) -> TensorDict:  # type: ignore[override]  # narrower than the base allows
            return super().__call__(td).set("h", td["x"] * 0)

    model = TensorDictSequential(Loud(nn.Linear(3, 4), ["x"], ["h"]))
    for _ in range(3):
        assert not call(model, form)["h"].any()


def test_overridden_forward_of_a_step_is_used(form: str) -> None:
    class Zero(TensorDictModule):
        def forward(self, tensordict: TensorDict) -> TensorDict:  # type: ignore[override]  # narrower than the base allows
            return tensordict.set("h", tensordict["x"] * 0)

    model = TensorDictSequential(Zero(nn.Linear(3, 4), ["x"], ["h"]))
    for _ in range(3):
        assert not call(model, form)["h"].any()


@pytest.mark.parametrize(
    "twin_of", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_have_plans_of_their_own(
    model: TensorDictSequential, form: str, twin_of: Callable[[nn.Module], TensorDictSequential]
) -> None:
    twin = twin_of(model)
    before = call(model, form)
    assert same(call(twin, form), before)
    twin.module = nn.ModuleList([TensorDictModule(torch.neg, ["x"], ["h"])])
    assert torch.equal(call(twin, form)["h"], -X)
    assert same(call(model, form), before)


def test_replica_for_data_parallel_does_not_run_the_original(
    model: TensorDictSequential, form: str
) -> None:
    replica = model._replicate_for_data_parallel()
    replica._modules["module"] = nn.ModuleList([TensorDictModule(torch.neg, ["x"], ["h"])])
    assert torch.equal(call(replica, form)["h"], -X)


def test_attributes_copied_by_hand_do_not_run_the_original(
    model: TensorDictSequential, form: str
) -> None:
    twin = object.__new__(TensorDictSequential)
    twin.__dict__ = dict(model.__dict__)
    twin.__dict__["_modules"] = {"module": copy.deepcopy(model.module)}
    next(twin.parameters()).data.fill_(torch.nan)
    assert call(twin, form)["h"].isnan().any()
    assert not call(model, form)["h"].isnan().any()


def test_training_mode_is_looked_up(form: str) -> None:
    model = TensorDictSequential(TensorDictModule(nn.Dropout(1.0), ["x"], ["h"]))
    call(model, form)
    assert not call(model, form)["h"].any()
    assert torch.equal(call(model.eval(), form)["h"], X)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_submodule_is_called(form: str, how: str) -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    seen: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(graph)
        return graph.forward

    model = TensorDictSequential(TensorDictModule(Shift(), ["x"], ["h"]))
    call(model, form)
    if how == "in place":
        leaf(model).compile(backend=backend)
    else:
        model[0].module = torch.compile(Shift(), backend=backend)
    for _ in range(2):
        assert torch.equal(call(model, form)["h"], X + 1)
    assert len(seen) == 1


def test_module_that_gains_attributes_keeps_running(form: str) -> None:
    class Grows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            setattr(self, f"seen{len(self.__dict__)}", True)
            return x + 1

    model = TensorDictSequential(TensorDictModule(Grows(), ["x"], ["h"]))
    for _ in range(60):
        assert torch.equal(call(model, form)["h"], X + 1)


def test_lazy_module_is_initialised_by_the_first_call(form: str) -> None:
    model = TensorDictSequential(TensorDictModule(nn.LazyLinear(4), ["x"], ["h"]))
    first = call(model, form)
    assert same(call(model, form), first)
    assert isinstance(leaf(model), nn.Linear)
    assert same(call(model, form), first)


def test_subclass_of_tensor_keeps_its_class(model: TensorDictSequential) -> None:
    class Tagged(Tensor):
        pass

    out = model(X.as_subclass(Tagged))
    assert all(isinstance(value, Tagged) for value in out)


def test_vmap_runs_over_members(model: TensorDictSequential) -> None:
    batch = torch.stack([X, 2 * X])
    h, *_ = torch.vmap(lambda x: model(x=x))(batch)
    assert torch.allclose(h, torch.stack([model(X)[0], model(2 * X)[0]]))


def test_other_keywords_raise_as_before(model: TensorDictSequential) -> None:
    with pytest.raises(TypeError, match="no argument `y`"):
        model(y=X)
    with pytest.raises(TypeError, match="expected at most 1 tensor"):
        model(X, X)
    with pytest.raises(TypeError, match="is missing `x`"):
        model()


@pytest.mark.parametrize("inplace", [False, "empty", "mine"])
def test_attribute_of_a_users_class_does_not_say_where_a_plan_writes(inplace: object) -> None:
    class Mine(TensorDictModuleBase):
        in_keys, out_keys = ["x"], ["y"]

        def __init__(self) -> None:
            super().__init__()
            self.inplace = inplace

        @dispatch
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("y", -tensordict["x"])

        def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
            return (-cast(Tensor, values[0]),)

    module = Mine()
    for _ in range(3):
        data = TensorDict(x=torch.ones(2))
        assert module(data) is data
        assert set(data.keys()) == {"x", "y"}


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        (["a", ("n", "x"), ("n", "y")], {"a": 0, "n": {"x": 1, "y": 2}}),
        ([("n", "x"), ("m", "x"), "a"], {"n": {"x": 0}, "m": {"x": 1}, "a": 2}),
        (["a", "b"], None),
        ([("n", "x"), "a", ("n", "y")], None),
        ([("n", "x"), ("n", "m", "y")], None),
        (["n", ("n", "x")], None),
        ([("n", "x"), "n"], None),
    ],
)
def test_outputs_are_sorted_by_level_where_their_order_stays(
    keys: list[NestedKey], want: object
) -> None:
    assert by_level(list(zip(keys, range(len(keys)), strict=True))) == want


@pytest.mark.parametrize("locked", [False, True])
def test_outputs_below_a_key_are_those_of_the_long_way(locked: bool) -> None:
    model = TensorDictSequential(
        TensorDictModule(lambda x: x + 1, ["x"], ["y"]),
        TensorDictModule(lambda y: (y + 1, y + 2), ["y"], [("next", "y"), ("next", "z")]),
    )

    def run(watched: bool) -> dict[str, object]:
        td = TensorDict({"x": torch.zeros(3), "next": {"done": torch.ones(3)}}, [3], lock=locked)
        handle = model.register_forward_hook(lambda *_: None) if watched else None
        try:
            model(td)
        except Locked as error:
            return {"error": str(error), "notes": getattr(error, "__notes__", []), **td.to_dict()}
        finally:
            if handle is not None:
                handle.remove()
        return td.to_dict()

    run(False)
    assert str(run(False)) == str(run(True))
    assert ("error" in run(False)) is locked


@pytest.mark.parametrize("inplace", [False, "empty"])
def test_what_goes_elsewhere_is_in_the_order_of_the_input(
    inplace: Literal[False, "empty"],
) -> None:
    steps = (
        TensorDictModule(lambda x: (x + 1, x + 2), ["x"], [("n", "y"), "x"]),
        TensorDictModule(lambda y: y + 1, [("n", "y")], ["z"]),
    )
    model = TensorDictSequential(*steps, inplace=inplace)
    x = torch.ones(2)
    td = TensorDict({"k": x, "x": x, "n": {"h": x}}, [2])
    for _ in range(12):
        made = model(td)
        assert list(made.keys(True)) == ["x", "n", ("n", "h"), ("n", "y"), "z"]
        assert made.batch_size == (() if inplace is False else (2,))
    assert list(td.keys(True)) == ["k", "x", "n", ("n", "h")]
