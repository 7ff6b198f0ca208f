"""A keyed module as one graph of `torch.fx`."""

import copy
import pickle
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.fx.proxy import TraceError

from kd_core import InvalidArgument, TensorClass, TensorDict, TensorDictBase
from kd_nn import (
    AddStateIndependentNormalScale,
    EnsembleModule,
    NormalParamExtractor,
    NormalParamWrapper,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    WrapModule,
    dispatch,
)
from kd_nn.fx import symbolic_trace

Module = TensorDictModule
Sequence = TensorDictSequential
LAYER = nn.Linear(3, 4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(3, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor, by: float = 1.0) -> Tensor:
        result: Tensor = self.layer(x) * self.weight * by
        return result


class Double(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012 - as keys are declared
    out_keys = ["y"]  # noqa: RUF012 - as keys are declared

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("y", tensordict["x"] * 2)

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        assert isinstance(values[0], Tensor)  # never a proxy
        return (values[0] * 2,)


class Twice(TensorDictModule):
    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        return tuple(2 * value for value in super()._kd_forward_values(*values))  # type: ignore[operator]  # a tensor


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x * 2


def by_name(x: Tensor) -> Mapping[str, Tensor]:
    return {"a": x + 1, "b": x * 2}


MODELS: dict[str, Callable[[], TensorDictModuleBase]] = {
    "module of torch": lambda: Module(LAYER, ["x"], ["y"]),
    "own module": lambda: Module(Scaled(), ["x"], ["y"]),
    "method": lambda: Module(
        Scaled(), ["x"], ["y"], method="encode", method_kwargs={"by": 3.0}, inplace=False
    ),
    "lambda": lambda: Module(lambda x: x.tanh() + 1, ["x"], ["y"]),
    "function of torch": lambda: Module(torch.neg, ["x"], ["y"]),
    "two outputs": lambda: Module(two, ["x"], ["y", "_"]),
    "outputs by name": lambda: Module(by_name, ["x"], {"b": ("n", "y")}),
    "outputs of a module of torch": lambda: Module(nn.LSTM(3, 4), ["x"], ["y", "_"]),
    "arguments by name": lambda: Module(torch.add, {"input": "x", "other": ("n", "z")}, ["y"]),  # type: ignore[arg-type]  # mypy joins the keys too far
    "one key twice": lambda: Module(torch.add, {"input": "x", "other": "x"}, ["y"]),
    "extractor": lambda: Module(NormalParamExtractor(), ["p"], ["loc", "scale"]),
    "selected": lambda: Module(NormalParamExtractor(), ["p"], ["loc", "scale"]).select_out_keys(
        "scale"
    ),
    "wrapper of a network": lambda: Module(NormalParamWrapper(LAYER), ["x"], ["loc", "scale"]),
    "free scale": lambda: Module(AddStateIndependentNormalScale(3), ["x"], ["loc", "scale"]),
    "sequence": lambda: Sequence(Module(LAYER, ["x"], ["h"]), Module(nn.ReLU(), ["h"], ["y"])),
    "named steps": lambda: Sequence({"a": Module(LAYER, ["x"], ["h"]), "b": Double()}),
    "selected sequence": lambda: Sequence(
        Module(LAYER, ["x"], ["h"]), Double(), Module(nn.Tanh(), ["h"], ["z"])
    ).select_out_keys("z"),
    "sequences in sequences": lambda: Sequence(
        Sequence(Module(LAYER, ["x"], ["h"])),
        Sequence(Sequence(Module(nn.ReLU(), ["h"], ["g"])), Module(Scaled(), ["x"], ["y"])),
    ),
    "key written twice": lambda: Sequence(
        Module(torch.neg, ["x"], ["y"]), Module(two, ["y"], ["y", "z"])
    ),
    "one module twice": lambda: Sequence(Module(LAYER, ["x"], ["h"]), Module(LAYER, ["x"], ["g"])),
    "own class": Double,
    "own class of a callable": lambda: Twice(torch.neg, ["x"], ["y"]),
    "keyed in keyed": lambda: Module(Module(torch.neg, ["x"], ["y"]), ["x"], ["z"]),
}


def data() -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(2, 3, generator=generator) for key in ("x", "z")}
    return TensorDict(
        {"x": tensors["x"], "n": {"z": tensors["z"]}, "p": torch.zeros(2, 4)}, batch_size=[2]
    )


def tuple_of(outputs: object) -> tuple[object, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("name", MODELS)
def test_graph_does_what_the_module_does(name: str) -> None:
    module = MODELS[name]()
    traced = symbolic_trace(module)
    assert traced.out_keys == [key for key in module.out_keys if key != "_"]
    for each in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        expected, found = module(data()), each(data())
        assert set(found.keys(True, True)) == set(expected.keys(True, True))
        for key, value in expected.items(True, True):
            assert torch.equal(found.get(key), value)  # type: ignore[arg-type]  # it is there
        values = [data().get(key) for key in traced.in_keys]
        pairs = zip(tuple_of(each(*values)), tuple_of(module(*values)), strict=True)
        assert all(torch.equal(mine, own) for mine, own in pairs)  # type: ignore[arg-type]  # tensors


def test_first_example_of_the_guide_has_this_graph_and_this_code() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.LazyLinear(1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.linear(x)
            return logits, torch.sigmoid(logits)

    out_keys = [("outputs", "logits"), ("outputs", "probabilities")]
    module = TensorDictModule(Net(), ["input"], out_keys)
    traced = symbolic_trace(module)
    assert str(traced.graph).strip().splitlines() == [
        "graph():",
        "    %tensordict : [num_users=1] = placeholder[target=tensordict]",
        "    %getitem : [num_users=1] = call_function[target=operator.getitem]"
        "(args = (%tensordict, input), kwargs = {})",
        "    %linear : [num_users=2] = call_module[target=linear](args = (%getitem,), kwargs = {})",
        "    %sigmoid : [num_users=1] = call_function[target=torch.sigmoid]"
        "(args = (%linear,), kwargs = {})",
        "    return (linear, sigmoid)",
    ]
    assert traced.code.strip().splitlines() == [
        "def forward(self, tensordict):",
        "    getitem = tensordict['input'];  tensordict = None",
        "    linear = self.linear(getitem);  getitem = None",
        "    sigmoid = torch.sigmoid(linear)",
        "    return (linear, sigmoid)",
    ]
    given = TensorDict({"input": torch.randn(32, 100)}, [32])
    expected = module(given, tensordict_out=TensorDict())
    found = traced(given, tensordict_out=TensorDict())
    assert list(found.keys()) == ["outputs"]
    for key in out_keys:
        assert torch.equal(found[key], expected[key])


def test_second_example_of_the_guide_is_one_graph() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(100, 50), nn.Linear(50, 10)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fc2(torch.relu(self.fc1(x)))
            return result

    class Masker(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.softmax(x * mask, dim=1)

    module = TensorDictSequential(
        TensorDictModule(Net(), [("input", "x")], [("intermediate", "x")]),
        TensorDictModule(
            Masker(), [("intermediate", "x"), ("input", "mask")], [("output", "probabilities")]
        ),
    )
    assert symbolic_trace(module).code.strip().splitlines() == [
        "def forward(self, tensordict):",
        "    getitem = tensordict[('input', 'x')]",
        '    _0_fc1 = getattr(self, "0").module.fc1(getitem);  getitem = None',
        "    relu = torch.relu(_0_fc1);  _0_fc1 = None",
        '    _0_fc2 = getattr(self, "0").module.fc2(relu);  relu = None',
        "    getitem_1 = tensordict[('input', 'mask')];  tensordict = None",
        "    mul = _0_fc2 * getitem_1;  getitem_1 = None",
        "    softmax = torch.softmax(mul, dim = 1);  mul = None",
        "    return (_0_fc2, softmax)",
    ]


def test_step_that_no_selected_output_needs_is_in_the_graph() -> None:
    """It runs, as it does without a graph: it may draw, and have hooks."""
    traced = symbolic_trace(MODELS["selected sequence"]())
    assert [node.op for node in traced.graph.nodes] == [
        "placeholder",
        "call_function",
        "call_module",
        "call_module",
        "call_module",
        "output",
    ]


def test_parameters_are_shared_and_trained() -> None:
    module = MODELS["sequences in sequences"]()
    traced = symbolic_trace(module)
    assert {id(p) for p in traced.parameters()} == {id(p) for p in module.parameters()}
    traced(data())["y"].sum().backward()
    assert all(p.grad is not None for p in module[1].parameters())  # type: ignore[index]  # a sequence


def test_constants_of_a_graph_are_not_added_to_the_module() -> None:
    constant = torch.ones(3)
    module = TensorDictSequential(TensorDictModule(lambda x: x + constant, ["x"], ["y"]))
    before = [set(vars(member)) for member in module.modules()]
    traced = symbolic_trace(module)
    assert [set(vars(member)) for member in module.modules()] == before
    assert torch.equal(traced(data())["y"], data()["x"] + 1)


def test_hook_of_a_step_runs_in_the_graph() -> None:
    seen: list[object] = []
    module = MODELS["sequence"]()
    module[0].register_forward_hook(lambda *_: seen.append(1))  # type: ignore[index]  # a sequence
    symbolic_trace(module)(data())
    assert seen == [1]


def test_traced_module_is_a_step_and_takes_typed_containers() -> None:
    class Data(TensorClass):
        x: Tensor
        y: Tensor | None = None

    traced = symbolic_trace(MODELS["own module"]())
    model = TensorDictSequential(traced, TensorDictModule(torch.neg, ["y"], ["y"]))
    given = Data(x=torch.ones(2, 3), batch_size=[2])
    assert model(given) is given
    assert given.y is not None
    assert traced.layer is traced.graph_module.layer
    with pytest.raises(AttributeError, match="nothing"):
        _ = traced.nothing


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "`module` must be a keyed module, got ReLU. Trace other modules with"),
        (
            Sequence(Module(torch.neg, ["x"], ["y"]), partial_tolerant=True),
            "`TensorDictSequential` skips steps. Set `partial_tolerant` to False",
        ),
        (
            Sequence(Double(), WrapModule(lambda td: td, False, ["y"], ["z"])),
            "`WrapModule` must be given a container. Trace the steps before and after it",
        ),
        (
            EnsembleModule(Module(nn.Linear(3, 3), ["x"], ["y"]), 2, False),
            "`EnsembleModule` must be given a container",
        ),
        (
            Sequence(
                Module(torch.neg, ["x"], [("n", "a")]), Module(lambda n: n["a"], ["n"], ["y"])
            ),
            "the keys of some steps hold one another",
        ),
        (Module(lambda x: LAYER(x), ["x"], ["y"]), "uses a module that it does not hold"),
    ],
)
def test_module_without_one_graph_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        symbolic_trace(module)  # type: ignore[arg-type]  # wrong on purpose


def test_step_that_depends_on_values_is_named() -> None:
    module = Sequence(Double(), Module(lambda y: y if y.sum() > 0 else -y, ["y"], ["z"]))
    with pytest.raises(TraceError) as caught:
        symbolic_trace(module)
    assert caught.value.__notes__ == ["In step 1, `TensorDictModule(<lambda>)`: writes `z`."]
