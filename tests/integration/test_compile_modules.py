"""Keyed modules under `torch.compile`: no graph breaks, and no needless recompiling."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributions import Normal

from kd_core import TensorDict
from kd_nn import (
    EnsembleModule,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictParams,
    TensorDictSequential,
    set_skip_existing,
)
from kd_probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make() -> TensorDictSequential:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], ["hidden"]),
        TensorDictModule(nn.ReLU(), ["hidden"], ["hidden"]),
        TensorDictModule(nn.Linear(4, 4), ["hidden"], ["latent"]),
        TensorDictModule(NormalParamExtractor(), ["latent"], ["loc", ("out", "scale")]),
    )


def compiled(function: Callable[..., object]) -> tuple[Callable[..., object], CompileCounter]:
    counter = CompileCounter()
    return torch.compile(function, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("eager_first", [False, True])
def test_keyword_call_is_one_graph(eager_first: bool) -> None:
    model = make()
    if eager_first:
        model(x=X)
    run, counter = compiled(model)
    torch.testing.assert_close(run(x=X), model(x=X))
    run(x=X + 1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("eager_first", [False, True])
def test_container_call_is_one_graph(eager_first: bool) -> None:
    model = make()
    if eager_first:
        model(TensorDict({"x": X}, [2]))
    run, counter = compiled(model)
    td = TensorDict({"x": X}, [2])
    assert run(td) is td
    expected = model(TensorDict({"x": X}, [2]))
    for key in model.out_keys:
        torch.testing.assert_close(td[key], expected[key])
    assert counter.frame_count == 1


@pytest.mark.parametrize("inplace", [True, False])
def test_unrelated_key_does_not_recompile(inplace: bool) -> None:
    model = make()
    model.inplace = inplace
    run, counter = compiled(model)
    run(TensorDict({"x": X}, [2]))
    run(TensorDict({"x": X, "other": X}, [2]))
    run(TensorDict({"other": X, "more": {"deep": X}, "x": X}, [2]))
    run(TensorDict({"x": X}, [2]))
    assert counter.frame_count == 1


def loss_of(model: nn.Module, x: Tensor, by: str) -> Tensor:
    if by == "keyword":
        _, _, loc, scale = model(x=x)
    else:
        td = model(TensorDict({"x": x}, [2]))
        loc, scale = td["loc"], td["out", "scale"]
    loss: Tensor = ((loc - 1) ** 2 / scale + scale.log()).sum()
    return loss


@pytest.mark.parametrize("by", ["keyword", "container"])
def test_training_step_is_one_graph(by: str) -> None:
    model, reference = make(), make()
    run = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimiser.zero_grad()
        torch.autograd.backward(run(model, X, by))
        reference.zero_grad()
        torch.autograd.backward(loss_of(reference, X, by))
        for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)
        optimiser.step()
        reference.load_state_dict(model.state_dict())


def test_training_step_with_its_gradient_inside_is_one_graph() -> None:
    model = make()
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        _, _, loc, scale = torch.func.functional_call(model, parameters, kwargs={"x": x})
        value: Tensor = ((loc - 1) ** 2 / scale).sum()
        return value

    step = torch.func.grad(loss)
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(parameters, X), step(parameters, X))


def test_custom_step_compiles() -> None:
    class Custom(nn.Module):
        in_keys = ("hidden",)
        out_keys = ("y",)

        def forward(self, tensordict: TensorDict) -> TensorDict:
            return tensordict.set("y", tensordict["hidden"] + 1)

    model = TensorDictSequential(TensorDictModule(torch.neg, ["x"], ["hidden"]), Custom())
    run, counter = compiled(model)
    torch.testing.assert_close(run(x=X), (-X, 1 - X))
    assert counter.frame_count == 1


def test_selection_made_after_compiling_is_honoured() -> None:
    model = make()
    run, _ = compiled(model)
    assert len(run(x=X)) == 4  # type: ignore[arg-type]  # of the form that was called
    model.select_out_keys("loc")
    torch.testing.assert_close(run(x=X), model(x=X))


def test_hook_on_a_wrapped_module_is_seen() -> None:
    model = make()
    model[0].module.register_forward_hook(lambda module, args, out: -out)  # type: ignore[union-attr]  # a module of torch
    run, _ = compiled(model)
    torch.testing.assert_close(run(x=X), model(x=X))


def negate_hidden(module: nn.Module, args: object, out: TensorDict) -> TensorDict:
    return out.set("hidden", -out["hidden"])


@pytest.mark.parametrize("by", ["keyword", "container"])
def test_hook_on_a_keyed_step_is_seen(by: str) -> None:
    model = make()
    plain = model(TensorDict({"x": X}, [2]))
    model[0].register_forward_hook(negate_hidden)
    run, _ = compiled(model)
    if by == "keyword":
        torch.testing.assert_close(run(x=X), model(x=X))
    else:
        td = run(TensorDict({"x": X}, [2]))
        assert not torch.equal(td["loc"], plain["loc"])  # type: ignore[index]  # of the form that was called
        torch.testing.assert_close(td["loc"], model(TensorDict({"x": X}, [2]))["loc"])  # type: ignore[index]  # of the form that was called


def test_partial_tolerance_compiles() -> None:
    model = TensorDictSequential(*make(), partial_tolerant=True)
    model.append(TensorDictModule(torch.neg, ["absent"], ["never"]))
    run, counter = compiled(model)
    td = run(TensorDict({"x": X}, [2]))
    assert "never" not in td  # type: ignore[operator]  # of the form that was called
    assert counter.frame_count == 1


def edited(model: TensorDictSequential) -> TensorDictSequential:
    model[0].module = nn.Linear(3, 4)
    return model


def pickled(model: TensorDictSequential) -> TensorDictSequential:
    return cast("TensorDictSequential", pickle.loads(pickle.dumps(model)))


def unseen(model: TensorDictSequential) -> TensorDictSequential:
    draw = ProbabilisticTensorDictModule(
        {"loc": "loc", "scale": ("out", "scale")}, ["action"], distribution_class=Normal
    )
    return ProbabilisticTensorDictSequential(model, draw)


WAYS: list[Callable[[TensorDictSequential], TensorDictSequential]] = [
    edited,
    copy.deepcopy,
    pickled,
    unseen,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_training_resolves_the_keys_of_a_model(
    way: Callable[[TensorDictSequential], TensorDictSequential],
) -> None:
    model = way(make())
    run, counter = compiled(lambda td: model(td)["loc"] + model(x=td["x"])[-2])
    td = TensorDict({"x": X}, [2])
    made = run(td.clone())
    torch.testing.assert_close(made, model(td)["loc"] + model(x=X)[-2])
    assert counter.frame_count == 1


def test_flattened_outputs_are_one_graph() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return x + 1, (x + 2, x + 3)

    model = TensorDictSequential(
        TensorDictModule(Nested(), ["x"], ["y", ("state", "h"), ("state", "c")]),
        TensorDictModule(torch.neg, [("state", "c")], ["z"]),
    )
    run, counter = compiled(model)
    td = run(TensorDict({"x": X}, [2]))
    assert isinstance(td, TensorDict)
    assert torch.equal(td["state", "h"], X + 2)
    assert torch.equal(td["z"], -X - 3)
    assert counter.frame_count == 1


def test_vmap_over_a_container_is_one_graph() -> None:
    model = TensorDictModule(nn.Linear(3, 2), ["x"], ["y"])
    params = TensorDict.from_module(model).data.expand(4).clone()

    def one(params: TensorDict, x: Tensor) -> Tensor:
        with params.to_module(model):
            return model(TensorDict({"x": x}))["y"]

    run, counter = compiled(torch.vmap(one))
    rows = torch.arange(12.0).reshape(4, 3)
    torch.testing.assert_close(run(params, rows), torch.vmap(one)(params, rows))
    run(params + 1, rows)
    assert counter.frame_count == 1


class Own(nn.Linear):
    """A layer that is not one of torch."""


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize(
    ("layer", "function"), [(nn.Linear, torch.baddbmm), (Own, torch._C._nn.linear)]
)
def test_copies_of_an_ensemble_are_traced_once(
    layer: type[nn.Linear], function: object, expand: bool
) -> None:
    ensemble = EnsembleModule(
        TensorDictModule(layer(3, 2), ["x"], ["y"]), num_copies=5, expand_input=expand
    )
    td = TensorDict({"x": X if expand else X.expand(5, 2, 3)}, [2] if expand else [5, 2])
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(ensemble, fullgraph=True, backend=keep)
    assert torch.equal(run(td.clone())["y"], ensemble(td.clone())["y"])
    (graph,) = graphs
    assert sum(node.target is function for node in graph.graph.nodes) == 1
    with torch.no_grad():
        ensemble.params.mul_(2)
    assert torch.equal(run(td.clone())["y"], ensemble(td.clone())["y"])
    with set_skip_existing(True):
        assert torch.equal(run(td.clone())["y"], ensemble(td.clone())["y"])


def exchanged_back(net: nn.Module, params: TensorDict) -> tuple[object, ...]:
    before = params.to_module(net)
    made = net(X)
    kept = before["0", "weight"] * 1  # what is read later is what was there
    before.to_module(net)
    return made, kept, net(X), list(before.keys(True, True))


def exchanged_twice(net: nn.Module, params: TensorDict) -> tuple[object, ...]:
    with params.to_module(net) as before:
        inside = net(X), before["1", "bias"] + 1
    with before:
        again = net(X)
    return *inside, again, net(X)


def exchanged_into(net: nn.Module, params: TensorDict) -> tuple[object, ...]:
    return params.to_module(net, swap_dest=TensorDict())["0", "bias"], net(X)


@pytest.mark.parametrize("program", [exchanged_back, exchanged_twice, exchanged_into])
def test_an_exchange_of_parameters_holds_those_before(
    program: Callable[[nn.Module, TensorDict], tuple[object, ...]],
) -> None:
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    params = TensorDict.from_module(nets[0]).data * 2
    expected = program(nets[0], params)
    got = torch.compile(program, fullgraph=True, backend="eager")(nets[1], params)
    torch.testing.assert_close(got[:-1], expected[:-1])
    assert isinstance(got[-1], Tensor) or got[-1] == expected[-1]


def test_an_exchange_leaves_compiled_code_with_the_tensors_before() -> None:
    net = nn.Linear(3, 4)
    weight, params = net.weight, TensorDict.from_module(net).data * 2
    before = torch.compile(lambda: params.to_module(net), fullgraph=True, backend="eager")()
    assert before["weight"] is weight
    assert torch.equal(net.weight, weight * 2)
    before.to_module(net)
    assert net.weight is weight


def test_parameters_in_a_module_are_made_in_one_graph() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def shrunk() -> Tensor:
        params = TensorDictParams.of_module(net)
        weight: Tensor = params["0", "weight"]
        return weight * len(list(params.parameters()))

    run, _ = compiled(shrunk)
    torch.testing.assert_close(run(), shrunk())


def err(run: Callable[[], object]) -> str:
    try:
        run()
    except RuntimeError:
        return "caught"
    return ""


@pytest.mark.parametrize("alone", [True, False])
def test_an_error_of_a_module_is_caught_in_compiled_code(alone: bool) -> None:
    model = make()[0] if alone else make()

    def run(td: TensorDict) -> str:
        return err(lambda: model(td))

    td = TensorDict({"x": X}, [2]).lock_()
    assert torch.compile(run, fullgraph=True, backend="eager", dynamic=True)(td) == "caught"
    assert list(td.keys()) == ["x"]


def test_vmap_calls_a_sequence_in_one_graph() -> None:
    model = make()
    run, counter = compiled(torch.vmap(model))
    td = TensorDict({"x": X}, [2])
    torch.testing.assert_close(run(td.clone())["loc"], model(td)["loc"])  # type: ignore[index]  # of the form that was called
    assert counter.frame_count == 1


class Doubled(TensorDictModule):
    """A subclass that names its base class, as the guide says."""

    def forward(self, tensordict: TensorDict) -> TensorDict:  # type: ignore[override]  # a method
        TensorDictModule.forward(self, tensordict)
        return tensordict.set("twice", tensordict["y"] * 2)


def test_a_subclass_calls_its_base_in_one_graph() -> None:
    model = Doubled(nn.Linear(3, 2), ["x"], ["y"])
    run, counter = compiled(model)
    td = run(TensorDict({"x": X}, [2]))
    assert isinstance(td, TensorDict)
    torch.testing.assert_close(td["twice"], model(TensorDict({"x": X}, [2]))["twice"])
    assert counter.frame_count == 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_dict_takes_the_place_of_a_container(alone: bool) -> None:
    model = make()[0] if alone else make()
    run, counter = compiled(model)
    td = run({"x": X})
    assert isinstance(td, TensorDict)
    torch.testing.assert_close(td["hidden"], model(TensorDict({"x": X}))["hidden"])
    assert counter.frame_count == 1
