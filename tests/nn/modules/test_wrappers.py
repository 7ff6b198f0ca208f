import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from kd_core import InvalidArgument, NestedKey, TensorClass, TensorDict, TensorDictBase
from kd_nn import (
    DispatchError,
    NotKeyed,
    TensorClassModuleBase,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    as_tensordict_module,
    dispatch,
)

X = torch.arange(6.0).reshape(2, 3)


def make() -> TensorDictModule:
    return TensorDictModule(lambda x: (x + 1, x - 1), ["x"], ["up", "down"])


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch call it deprecated
        return torch.jit.script(module)


SPECIAL = {
    "parametrised": lambda: weight_norm(nn.Linear(3, 4)),
    "scripted": lambda: scripted(Scale()),
    "traced by fx": lambda: torch.fx.symbolic_trace(Scale()),
    "functional": lambda: partial(torch.add, other=1.0),
}
WRAPPED = {
    "module": lambda inner: TensorDictModule(inner, ["x"], ["y"]),
    "wrapper": lambda inner: TensorDictModuleWrapper(TensorDictModule(inner, ["x"], ["y"])),
    "sequence": lambda inner: TensorDictSequential(TensorDictModule(inner, ["x"], ["y"])),
}


@pytest.mark.parametrize("inner", SPECIAL.values(), ids=list(SPECIAL))
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=list(WRAPPED))
def test_a_copy_is_of_the_module_and_not_of_what_it_wraps(
    wrap: Callable[[object], nn.Module], inner: Callable[[], object]
) -> None:
    module = wrap(inner())
    for twin in (copy.deepcopy(module), copy.copy(module)):
        assert type(twin) is type(module)
        assert torch.equal(twin(TensorDict(x=X))["y"], module(TensorDict(x=X))["y"])


class Odd(nn.Module):
    """Has every special method that Python, torch or a notebook may look for."""

    def forward(self, x: Tensor) -> Tensor:
        return -x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return lambda *args: args
        return super().__getattr__(name)


@pytest.mark.parametrize(
    "name",
    ["__deepcopy__", "__len__", "__torch_function__", "__getstate_for_test__", "__array__"],
)
def test_special_methods_are_not_passed_on(name: str) -> None:
    inner = TensorDictModule(Odd(), ["x"], ["y"])
    assert hasattr(inner.module, name)
    assert not hasattr(inner, name)
    assert not hasattr(TensorDictModuleWrapper(inner), name)


def test_what_a_wrapped_sequence_reads_in_part_is_its_own_affair() -> None:
    sequence = TensorDictSequential(
        TensorDictModule(torch.neg, ["b"], [("n", "c")]),
        WrapModule(lambda td: td, in_keys=["n"]),
    )
    assert sequence._kd_partly_read == ["n"]
    assert TensorDictModule(sequence, ["x"], ["y"])._kd_partly_read == []


class Doubling(TensorDictModuleBase):
    """Runs a keyed module on bare values, under its keys."""

    def __init__(self, inner: TensorDictModule) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.inner(tensordict)

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        return self.inner._kd_forward_values(*values)

    def _kd_own_in_keys(self) -> tuple[NestedKey, ...]:
        return tuple(self.inner.in_keys)

    def _kd_own_out_keys(self) -> tuple[NestedKey, ...]:
        return tuple(self.inner.out_keys)


def test_wrapper_passes_calls_keys_and_attributes_on() -> None:
    inner = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
    wrapper = TensorDictModuleWrapper(inner)
    assert (wrapper.in_keys, wrapper.out_keys) == (["x"], ["y"])
    assert wrapper.out_features == 4
    assert torch.equal(wrapper(TensorDict(x=X))["y"], inner(TensorDict(x=X))["y"])
    assert list(wrapper.state_dict()) == ["td_module.module.weight", "td_module.module.bias"]


def test_wrapper_selects_on_the_wrapped_module() -> None:
    wrapper = TensorDictModuleWrapper(make()).select_out_keys("down")
    assert wrapper.out_keys == ["down"]
    assert wrapper.out_keys_source == ["up", "down"]
    assert torch.equal(torch.as_tensor(wrapper(x=X)), X - 1)
    assert wrapper.reset_out_keys().out_keys == ["up", "down"]


def test_wrapper_adds_to_forward_and_is_run_in_a_sequence() -> None:
    class Scaled(TensorDictModuleWrapper):
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]  # narrower than the base allows
            out: TensorDictBase = self.td_module(tensordict)
            return out.set("up", out["up"] * 10)

    td = TensorDictSequential(Scaled(make()))(TensorDict(x=X))
    assert torch.equal(td["up"], (X + 1) * 10)


def test_missing_attribute_of_a_wrapper_is_named() -> None:
    with pytest.raises(AttributeError, match="nope"):
        TensorDictModuleWrapper(make()).nope  # noqa: B018  # reading it raises


def test_wrapped_function_gets_and_gives_a_container() -> None:
    module = WrapModule(lambda td: td[0])
    out = module(TensorDict({"x": X}, [2]))
    assert out.batch_size == ()
    assert (module.in_keys, module.out_keys) == ([], [])


def test_wrapped_function_takes_a_tensor_as_it_is() -> None:
    for keys in ([], ["x"]):
        assert torch.equal(WrapModule(lambda td: td * 2, in_keys=keys)(X), X * 2)


def test_wrapped_function_in_place_writes_into_the_input() -> None:
    module = WrapModule(lambda td: TensorDict(y=td["x"] + 1), True, ["x"], ["y"])
    td = TensorDict(x=X)
    assert module(td) is td
    assert torch.equal(td["y"], X + 1)
    assert torch.equal(torch.as_tensor(module(x=X)), X + 1)


def test_decorated_function_keeps_its_name_in_messages() -> None:
    @as_tensordict_module(["x", "y"], ["sum"])
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    assert torch.equal(torch.as_tensor(add(x=X, y=X)), 2 * X)
    with pytest.raises(KeyError, match=r"`TensorDictModule\(add\)` reads `y`"):
        add(TensorDict(x=X))


def test_what_is_not_keyed_is_not_wrapped() -> None:
    with pytest.raises(NotKeyed, match=r"got `Linear` without in_keys .* Wrap it first"):
        TensorDictModuleWrapper(nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match="`func` must be a function of a container, got int"):
        WrapModule(3)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("result", [None, X])
def test_wrapped_function_that_gives_no_container_is_told(
    inplace: bool, result: Tensor | None
) -> None:
    def lost(tensordict: TensorDictBase) -> object:
        return result

    with pytest.raises(InvalidArgument, match=r"`lost` must return a container, got"):
        WrapModule(lost, inplace)(TensorDict(x=X))  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("kind", [TensorDictModuleWrapper, Doubling])
def test_sequence_follows_the_keys_of_what_a_step_wraps(
    kind: Callable[[TensorDictModule], TensorDictModuleBase],
) -> None:
    inner = TensorDictModule(torch.neg, ["x"], ["y"])
    model = TensorDictSequential(kind(inner), TensorDictModule(torch.exp, ["a"], ["b"]))
    for _ in range(3):
        model(TensorDict(x=X, a=X))
    inner.in_keys, inner.out_keys = ["u"], ["v"]
    assert (model.in_keys, model.out_keys) == (["u", "a"], ["v", "b"])
    for _ in range(3):
        assert torch.equal(model(TensorDict(u=X, a=X))["v"], -X)


class Part(TensorClass):
    p: torch.Tensor


class Given(TensorClass):
    x: torch.Tensor
    n: Part
    word: str = "none"


class Made(TensorClass):
    z: torch.Tensor
    n: Part | None = None


class Sums(TensorClassModuleBase[Given, Made]):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Given, /) -> Made:
        assert isinstance(x.n, Part)
        return Made(z=x.x * 2 + x.n.p, n=x.n, batch_size=x.batch_size)


def fields() -> TensorDict:
    return TensorDict({"x": torch.ones(3), "n": {"p": torch.ones(3)}, "more": torch.ones(3)}, [3])


def test_a_module_of_tensor_classes_has_a_form_on_containers() -> None:
    module = Sums()
    direct = module(Given(x=torch.ones(3), n=Part(p=torch.ones(3)), batch_size=[3]))
    keyed, td = module.as_td_module(), fields()
    assert (keyed.in_keys, keyed.out_keys) == (["x", ("n", "p"), "word"], ["z", "n"])
    assert list(keyed.state_dict()) == ["tc_module.linear.weight", "tc_module.linear.bias"]
    for _ in range(4):
        made = keyed(td)
        assert {type(made), made.entry_class("n")} == {TensorDict}
        assert list(made.keys()) == ["z", "n"]
        assert torch.equal(made["z"], direct.z)
    assert list(td.keys()) == ["x", "n", "more"]
    alone = keyed.select_out_keys("z")(x=torch.ones(3), n_p=torch.ones(3))
    assert isinstance(alone, Tensor)
    assert alone.tolist() == [3, 3, 3]


def test_steps_after_a_module_of_tensor_classes_read_its_outputs() -> None:
    keyed = Sums().as_td_module()
    model = TensorDictSequential(keyed, TensorDictModule(torch.neg, ["z"], ["y"]))
    for _ in range(4):
        assert list(model(fields()).keys()) == ["z", "n", "y"]
    late = TensorDictSequential(keyed, TensorDictModule(torch.neg, ["more"], ["y"]))
    with pytest.raises(KeyError, match="more"):
        late(fields())


In = TypeVar("In")


class Open(TensorClassModuleBase[In, Made], Generic[In]):
    def forward(self, x: In, /) -> Made:
        return Made(z=getattr(x, "x"))  # noqa: B009  # of what is filled in


class Filled(Open[Given]):
    pass


class Bare(TensorClassModuleBase[torch.Tensor, Made]):
    def forward(self, x: torch.Tensor, /) -> Made:
        return Made(z=x)


def test_types_of_a_module_of_tensor_classes_come_from_the_brackets() -> None:
    assert [getattr(Filled, name) for name in ("input_type", "output_type")] == [Given, Made]
    assert Filled().as_td_module().in_keys == ["x", ("n", "p"), "word"]
    assert Bare()(torch.ones(2)).z.tolist() == [1, 1]
    with pytest.raises(ValueError, match="must be tensor classes, got Tensor and Made"):
        Bare().as_td_module()
    with pytest.raises(TypeError, match="abstract"):
        TensorClassModuleBase()  # type: ignore[abstract]  # the point of the test


class Scaled(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012  # as users write it
    out_keys = ["y"]  # noqa: RUF012  # as users write it

    @dispatch
    def forward(self, tensordict: TensorDictBase, k: float = 1.0) -> TensorDictBase:
        return tensordict.set("y", tensordict["x"] * k)


def test_further_arguments_reach_the_module() -> None:
    x = torch.ones(2)
    inner: Any = Scaled()
    for module in (inner, TensorDictModuleWrapper(inner)):
        call: Any = module
        assert call(TensorDict({"x": x}, [2]), 2.0)["y"].tolist() == [2, 2]
        assert call(TensorDict({"x": x}, [2]), k=2.0)["y"].tolist() == [2, 2]
        assert call(x, k=2.0).tolist() == [2, 2]
        with pytest.raises(DispatchError, match="no argument `q`"):
            call(x, q=2.0)
    assert inner(x, 3.0).tolist() == [3, 3]
    with pytest.raises(DispatchError, match="at most 1 tensor"):
        inner(x, 3.0, 4.0)
