import copy

import pytest
import torch
from torch import Tensor, nn

from kd_core import TensorDict
from kd_nn import (
    ParametersMissing,
    TensorDictModule,
    TensorDictSequential,
    get_functional,
    is_functional,
    make_functional,
    repopulate_module,
)

X = torch.linspace(-1, 1, 30).view(10, 3)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def test_seed_example_of_a_functional_model() -> None:
    layer1 = nn.Linear(3, 4)
    layer2 = nn.Linear(4, 4)
    net = nn.Sequential(layer1, layer2)
    params = make_functional(net)
    x = torch.randn(10, 3)
    out = net(x, params=params)
    intermediate = net[0](x, params["0"])
    out2 = net[1](intermediate, params["1"])
    torch.testing.assert_close(out, out2)
    torch.testing.assert_close(net(x, params), out)


def test_parameters_from_names_or_state_dict_serve_as_well() -> None:
    net = model().eval()
    expected = net(X)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    params = make_functional(net)
    assert set(params.flatten_keys(".").keys()) == set(state)
    torch.testing.assert_close(net(X, TensorDict(state, []).unflatten_keys(".")), expected)


def test_module_is_emptied_and_marked() -> None:
    net = model()
    make_functional(net)
    assert not list(net.parameters())
    assert not list(net.buffers())
    assert is_functional(net)
    assert is_functional(net[0])
    assert not is_functional(nn.Linear(1, 1))


def test_call_without_parameters_is_explained() -> None:
    net = model()
    make_functional(net)
    with pytest.raises(TypeError, match=r"`Sequential` is functional .* of `0.weight`, `0.bias`"):
        net(X)
    with pytest.raises(TypeError, match="must be a container of parameters, got dict"):
        net(X, params={})


def test_repopulated_module_runs_as_before_and_takes_parameters_by_keyword() -> None:
    net = model().eval()
    expected = net(X)
    params = make_functional(net)
    assert repopulate_module(net, params) is net
    torch.testing.assert_close(net(X), expected)
    assert isinstance(net.get_parameter("0.weight"), nn.Parameter)
    other = make_functional(model().eval())
    other["2", "bias"] = torch.full((4,), 7.0)
    assert not torch.equal(net(X, params=other), expected)
    torch.testing.assert_close(net(X), expected)


def test_plain_tensors_become_parameters_and_computed_ones_stay() -> None:
    net = nn.Linear(3, 4)
    make_functional(net)
    computed = torch.ones(4, requires_grad=True) * 2
    repopulate_module(net, TensorDict({"weight": torch.ones(4, 3), "bias": computed}))
    assert isinstance(net.weight, nn.Parameter)
    assert net.bias is computed


def test_repopulating_with_a_wrong_name_changes_nothing() -> None:
    net = nn.Linear(3, 4)
    make_functional(net)
    with pytest.raises(KeyError, match="Did you mean `weight`"):
        repopulate_module(net, TensorDict({"bias": torch.ones(4), "wieght": torch.ones(4, 3)}))
    assert not list(net.parameters())


def test_get_functional_keeps_the_module_stateful() -> None:
    net = get_functional(model().eval())
    assert is_functional(net)
    assert len(list(net.parameters())) == 6
    zero = TensorDict({"2": {"weight": torch.zeros(4, 4), "bias": torch.ones(4)}})
    assert torch.equal(net(X, params=zero), torch.ones(10, 4))


def test_recurrent_layer_goes_there_and_back() -> None:
    net = nn.LSTM(3, 4)
    expected = net(X)[0]
    params = make_functional(net)
    torch.testing.assert_close(net(X, params=params)[0], expected)
    torch.testing.assert_close(repopulate_module(net, params)(X)[0], expected)


def test_keyed_modules_take_parameters_after_the_container_or_by_keyword() -> None:
    net = TensorDictSequential(TensorDictModule(model().eval(), ["x"], ["y"]))
    td = TensorDict({"x": X}, [10])
    expected = net(td.copy())["y"]
    params = make_functional(net)
    torch.testing.assert_close(net(td, params)["y"], expected)
    by_keyword = net(x=X, params=params)
    torch.testing.assert_close(by_keyword, expected)


def test_functional_module_survives_a_copy() -> None:
    net = model().eval()
    params = make_functional(net)
    again = copy.deepcopy(net)
    torch.testing.assert_close(again(X, params), net(X, params))


def test_vmap_over_three_sets_of_parameters() -> None:
    net = nn.Linear(3, 4)
    make_functional(net)
    stacked = TensorDict({"weight": torch.randn(5, 4, 3), "bias": torch.randn(5, 4)}, [5])
    out = torch.vmap(lambda params, x: net(x, params), (0, None))(stacked, X)
    expected = torch.einsum("nij,bj->nbi", stacked["weight"], X) + stacked["bias"][:, None]
    torch.testing.assert_close(out, expected)


def test_data_alone_is_not_taken_for_parameters() -> None:
    net = TensorDictSequential(TensorDictModule(nn.Linear(3, 4), ["x"], ["y"]))
    make_functional(net)
    with pytest.raises(ParametersMissing, match=r"container of `module.0.module.weight`"):
        net(TensorDict({"x": X}, [10]))


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("by", ["place", "keyword"])
# Of a strict export, which sees values exchanged and restored; it warns of `functional_call`, too.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_functional_module_compiles_and_exports_in_one_graph(keyed: bool, by: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    module: nn.Module = TensorDictModule(net, ["x"], ["y"]) if keyed else net
    params = make_functional(module).detach()

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, params: TensorDict, x: Tensor) -> object:
            given = TensorDict(x=x) if keyed else x
            if by == "place":
                result = self.module(given, params)
            else:
                result = self.module(given, params=params)
            return result["y"] if isinstance(result, TensorDict) else result

    call = Call()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    program = torch.export.export(call, (params, X), strict=True).module()
    for weights in (params, params * 2):
        torch.testing.assert_close(compiled(weights, X), call(weights, X))
        torch.testing.assert_close(program(weights, X), call(weights, X))
