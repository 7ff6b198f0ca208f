"""A plan is never used after something that it was made from has changed."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from kd_core import KeyNotFound, NestedKey, TensorDict, TensorDictBase
from kd_nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
)

X = torch.tensor([[1.0, -2.0]])


def warm(model: nn.Module) -> None:
    """Call a model until its plans are made, by tensors and by container."""
    for _ in range(4):
        model(x=X)
        model(TensorDict(x=X))


def same(left: object, right: Tensor) -> bool:
    """Return whether the one output of a call is equal to a tensor."""
    return isinstance(left, Tensor) and torch.equal(left, right)


def outputs(model: nn.Module) -> Iterator[Tensor]:
    """Yield `y` of each form of a call."""
    yield model(x=X)
    yield model(X)
    yield model(TensorDict(x=X))["y"]


class Tenfold(TensorDictModuleBase):
    """A module whose form on values exists in eval mode only, and says so."""

    in_keys = ["x"]  # noqa: RUF012 - a list, as users declare it
    out_keys = ["y"]  # noqa: RUF012 - likewise
    scale = 10

    @property
    def _kd_has_value_form(self) -> bool:
        return not self.training

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        (x,) = values
        assert isinstance(x, Tensor)
        return (x * self.scale,)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("y", tensordict["x"] * (1 if self.training else self.scale))


def test_a_form_on_values_that_depends_on_training_is_asked_again() -> None:
    model = TensorDictSequential(Tenfold()).eval()
    warm(model)
    model.train()
    assert all(torch.equal(y, X) for y in outputs(model))
    model.eval()
    assert all(torch.equal(y, X * 10) for y in outputs(model))


def test_a_class_attribute_of_the_users_is_read_at_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = TensorDictSequential(Tenfold()).eval()
    warm(model)
    monkeypatch.setattr(Tenfold, "scale", 3)
    assert all(torch.equal(y, X * 3) for y in outputs(model))


def test_keys_that_a_class_computes_are_compared() -> None:
    class Renamed(Tenfold):
        key = "y"

        @property
        def _kd_has_value_form(self) -> bool:
            return True

        @property
        def out_keys(self) -> list[NestedKey]:  # type: ignore[override]  # computed, not assigned
            return [type(self).key]

        @property
        def out_keys_source(self) -> list[NestedKey]:
            return self.out_keys

        def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
            (x,) = values
            return (x,)

    model = TensorDictSequential(Renamed())
    warm(model)
    Renamed.key = "z"
    assert set(model(TensorDict(x=X)).keys()) == {"x", "z"}


class Powers(nn.Module):
    def power(self, x: Tensor, exponent: int = 1) -> Tensor:
        return x**exponent


@pytest.mark.parametrize("before", [{}, {"exponent": 3}])
def test_method_kwargs_changed_in_place_are_passed(before: dict[str, int]) -> None:
    step = TensorDictModule(Powers(), ["x"], ["y"], method="power", method_kwargs=dict(before))
    model = TensorDictSequential(step)
    warm(model)
    step.__dict__["method_kwargs"]["exponent"] = 2  # typed as a mapping that is only read
    assert all(torch.equal(y, X**2) for y in outputs(model))


def weight_to_buffer(linear: nn.Linear) -> None:
    weight = linear.weight.detach() * 2
    del linear.weight
    linear.register_buffer("weight", weight)


def other_parameters(linear: nn.Linear) -> None:
    weight, bias = linear.weight.detach(), linear.bias.detach()
    linear._parameters = {"weight": nn.Parameter(weight * 3), "bias": nn.Parameter(bias * 3)}


def other_dict(linear: nn.Linear) -> None:
    linear.__dict__ = dict(linear.__dict__)
    other_parameters(linear)


def other_class(linear: nn.Linear) -> None:
    linear.__class__ = type("Negated", (nn.Linear,), {"__call__": lambda self, x: -x})


def patched_instance(linear: nn.Linear) -> None:
    del linear.in_features  # so that it has as many attributes as before
    setattr(linear, "forward", torch.neg)  # noqa: B010 - methods are read-only to a type checker


def patched_call_impl(linear: nn.Linear) -> None:
    setattr(linear, "_call_impl", torch.neg)  # noqa: B010 - likewise


def parametrised(linear: nn.Linear) -> None:
    nn.utils.parametrizations.weight_norm(linear)


CHANGES = [
    weight_to_buffer,
    other_parameters,
    other_dict,
    other_class,
    patched_instance,
    patched_call_impl,
    parametrised,
]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_sequential"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_wrapped_module_is_seen(
    change: Callable[[nn.Linear], None], inside: bool
) -> None:
    linear = nn.Linear(2, 2)
    wrapped = nn.Sequential(linear, nn.Tanh()) if inside else linear
    model = TensorDictSequential(TensorDictModule(wrapped, ["x"], ["y"]))
    warm(model)
    change(linear)
    assert all(torch.equal(y, wrapped(X)) for y in outputs(model))


@pytest.mark.parametrize("name", ["forward", "__call__", "_call_impl"])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Tanh, nn.Sequential])
def test_a_patched_class_of_torch_is_called(
    kind: type[nn.Module], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = TensorDictSequential(TensorDictModule(wrapped, ["x"], ["y"]))
    warm(model)
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, lambda self, x: x + 5, raising=False)
        assert all(torch.equal(y, wrapped(X)) for y in outputs(model))
    assert all(torch.equal(y, wrapped(X)) for y in outputs(model))


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_patched_call_of_all_modules_sees_what_is_wrapped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped, seen = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []
    model = TensorDictSequential(TensorDictModule(wrapped, ["x"], ["y"]))
    warm(model)
    original = getattr(nn.Module, name)

    def told(self: nn.Module, *args: object, **kwargs: object) -> object:
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, name, told)
    model(x=X)
    assert [module for module in seen if not hasattr(module, "in_keys")][-3:] == [
        wrapped,
        *wrapped,
    ]


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated, by another class in 2.15
def test_a_traced_graph_names_the_modules_of_a_planned_model() -> None:
    model = TensorDictSequential(TensorDictModule(nn.Linear(2, 2), ["x"], ["y"]))
    warm(model)
    traced = torch.jit.trace(model, (X,), check_trace=False)
    assert "scope: __module.module.0/__module.module.0.module" in str(traced.inlined_graph)


def test_a_patched_forward_of_a_keyed_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, tensordict: TensorDictBase, **_: object) -> TensorDictBase:
        return tensordict.set("y", tensordict["x"] + 5)

    model = TensorDictSequential(TensorDictModule(nn.Tanh(), ["x"], ["y"]))
    warm(model)
    monkeypatch.setattr(TensorDictModule, "forward", forward)
    assert torch.equal(model(TensorDict(x=X))["y"], X + 5)
    assert same(model(x=X), X + 5)


def test_a_copy_made_from_the_attributes_has_a_plan_of_its_own() -> None:
    model = TensorDictModule(nn.Tanh(), ["x"], ["y"])
    warm(model)
    copied = TensorDictModule.__new__(TensorDictModule)
    copied.__dict__.update(model.__dict__)
    copied.__dict__["_modules"] = {"module": nn.Sigmoid()}
    assert same(copied(x=X), X.sigmoid())
    assert same(model(x=X), X.tanh())


def test_members_of_a_sequential_may_change_their_order() -> None:
    wrapped = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = TensorDictSequential(TensorDictModule(wrapped, ["x"], ["y"]))
    warm(model)
    wrapped._modules["0"] = wrapped._modules.pop("0")
    assert all(torch.equal(y, wrapped(X)) for y in outputs(model))


def test_steps_may_be_deleted_and_assigned() -> None:
    keys = ["y", "z", "u", "v"]
    model = TensorDictSequential(*[TensorDictModule(torch.neg, ["x"], [key]) for key in keys])
    warm(model)
    del model[1:]
    model[0] = TensorDictModule(torch.tanh, ["x"], ["y"])
    assert all(torch.equal(y, X.tanh()) for y in outputs(model))


def test_a_selected_key_that_is_no_longer_written_is_named() -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["y"]), TensorDictModule(torch.exp, ["x"], ["z"])
    ).select_out_keys("y")
    warm(model)
    model[0].out_keys = ["w"]
    for _ in range(3):
        assert list(model(TensorDict(x=X)).keys()) == ["x"]
        with pytest.raises(KeyNotFound, match="key `y` not found"):
            model(x=X)


def test_an_assignment_during_a_call_is_not_lost() -> None:
    step = TensorDictModule(torch.neg, ["x"], ["y"])
    model = TensorDictSequential(step)
    data = TensorDict(x=X, b=X * 2)
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            model(data.copy())

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_ in range(300):
        step.in_keys = ["b"] if round_ % 2 else ["x"]
    stop.set()
    for thread in threads:
        thread.join()
    for _ in range(4):
        assert torch.equal(model(data.copy())["y"], -data["b"])


def test_training_of_a_class_of_this_library_keeps_the_plan() -> None:
    model = TensorDictSequential(TensorDictModule(nn.Dropout(), ["x"], ["y"]))
    warm(model)
    plan = model.__dict__["_kd_plan"]
    model.eval()
    assert same(model(x=X), X)
    assert model.__dict__["_kd_plan"] is plan


def test_weights_are_freed_with_the_model() -> None:
    model = TensorDictSequential(
        TensorDictModule(nn.Linear(2, 2), ["x"], ["h"]),
        TensorDictModule(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), ["h"], ["y"]),
    )
    warm(model)
    gc.collect()
    gc.disable()
    try:
        weights = [weakref.ref(weight) for weight in model.parameters()]
        del model
        assert [weight() for weight in weights] == [None] * 4
    finally:
        gc.enable()


def test_intermediate_values_live_until_they_are_last_read() -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def step(x: Tensor) -> Tensor:
        alive.append(sum(value() is not None for value in made))
        result = x + 1
        made.append(weakref.ref(result))
        return result

    steps = [TensorDictModule(step, [f"v{k}" if k else "x"], [f"v{k + 1}"]) for k in range(8)]
    model = TensorDictSequential(*steps).select_out_keys("v8")
    warm(model)
    for call in (lambda: model(x=X), lambda: model(TensorDict(x=X))):
        made.clear()
        alive.clear()
        call()
        assert max(alive) == 1


def write_past_the_attribute(model: TensorDictModule, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(model.__dict__, "_kd_out_keys", ("z",))


def replace_a_property(model: TensorDictModule, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TensorDictModuleBase, "_kd_own_out_keys", lambda self: ("z",))


@pytest.mark.parametrize("change", [write_past_the_attribute, replace_a_property])
def test_changes_that_the_guide_lists_are_seen_by_a_new_plan_only(
    change: Callable[[TensorDictModule, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(2, 2, bias=False)
    model = TensorDictModule(linear, ["x"], ["y"])
    warm(model)
    expected = linear(X)
    with monkeypatch.context() as patch:
        change(model, patch)
        assert torch.equal(model(TensorDict(x=X))["y"], expected)
        model.strict = False  # any assignment: seen
        result = model(TensorDict(x=X))
    assert "y" not in result or not torch.equal(result["y"], expected)
