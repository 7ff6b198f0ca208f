"""The parameters of lazy modules, stacked before they have shapes."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_tree

from kd_core import InvalidArgument, TensorDict
from kd_nn import TensorDictParams

AS_MODULE = pytest.mark.parametrize("as_module", [False, True])
PRESERVE = pytest.mark.parametrize("preserve", [False, True])


def lazy_net() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2))


def over_rows(
    net: nn.Module, preserve: bool = False
) -> Callable[[TensorDict | TensorDictParams, Tensor], Tensor]:
    def run(params: TensorDict | TensorDictParams, x: Tensor) -> Tensor:
        with params.to_module(net, preserve_module_state=preserve):
            made: Tensor = net(x)
            return made

    return torch.vmap(run, randomness="same")


@PRESERVE
@AS_MODULE
def test_stacked_lazy_modules_get_their_shapes_from_the_first_call(
    as_module: bool, preserve: bool
) -> None:
    params = TensorDict.from_modules(lazy_net(), lazy_net(), as_module=as_module)
    weight, mean = params["0", "weight"], params["1", "running_mean"]
    with pytest.raises(RuntimeError, match="shape of an uninitialized"):
        _ = weight.shape
    net, x = lazy_net(), torch.randn(2, 5, 4)
    run = over_rows(net, preserve)
    made = run(params, x)
    assert params["0", "weight"] is weight
    assert type(weight) is nn.Parameter
    assert weight.shape == (2, 3, 4)
    assert weight.is_leaf
    assert not torch.equal(weight[0], weight[1])
    assert params["1", "running_mean"] is mean
    assert mean.shape == (2, 3)
    assert not mean.equal(torch.zeros(2, 3))
    for row in range(2):
        hidden = x[row] @ weight[row].T + params["0", "bias"][row]
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
        expected = hidden @ params["2", "weight"][row].T + params["2", "bias"][row]
        torch.testing.assert_close(made[row], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run(params, x), made)
    made.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert not any(module._forward_pre_hooks for module in net.modules())


def lazy_dict() -> nn.ModuleDict:
    return nn.ModuleDict({"used": nn.LazyLinear(3), "other": nn.LazyLinear(3)})


def test_the_state_of_a_lazy_module_is_restored_when_it_is_not_called() -> None:
    net = lazy_dict()
    params = TensorDict.from_modules(lazy_dict(), lazy_dict())
    before = len(net["other"]._forward_pre_hooks), net["other"].weight

    def run(params: TensorDict, x: Tensor) -> Tensor:
        with params.to_module(net):
            made: Tensor = net["used"](x)
            return made

    assert torch.vmap(run, randomness="same")(params, torch.ones(2, 1, 4)).shape == (2, 1, 3)
    assert (len(net["other"]._forward_pre_hooks), net["other"].weight) == before
    fresh = TensorDict.from_modules(lazy_dict(), lazy_dict())
    with pytest.raises(ValueError, match="uninitialized parameter"):  # the module is not lazy now
        torch.vmap(run, randomness="same")(fresh, torch.ones(2, 1, 4))


def test_the_vmap_that_maps_the_rows_gives_each_call_its_row() -> None:
    params = TensorDict.from_modules(nn.LazyLinear(3), nn.LazyLinear(3))
    inner_net, x = nn.LazyLinear(3), torch.randn(2, 5, 4)

    def run(params: TensorDict, x: Tensor) -> Tensor:
        with params.to_module(inner_net):
            made: Tensor = inner_net(x)
            return made

    def outer(params: TensorDict, x: Tensor) -> Tensor:
        return torch.vmap(run, (None, 0), randomness="same")(params, x)

    made = torch.vmap(outer, randomness="same")(params, x)
    expected = torch.einsum("rof,rbf->rbo", params["weight"], x) + params["bias"][:, None]
    torch.testing.assert_close(made, expected)


def test_lazy_modules_are_copied_and_stay_in_a_tree() -> None:
    params = TensorDict.from_modules(lazy_net(), lazy_net(), expand_identical=True)
    copied = copy.deepcopy(params)
    mapped = torch_tree.tree_map(lambda leaf: leaf, params)
    for other in (copied, mapped):
        assert over_rows(lazy_net())(other, torch.randn(2, 5, 4)).shape == (2, 5, 2)
        assert other["0", "weight"].shape == (2, 3, 4)
        assert type(other["1", "running_var"]) is Tensor


def test_lazy_modules_must_be_all_new_or_all_called() -> None:
    called = nn.LazyLinear(3)
    called(torch.zeros(1, 2))
    for modules in ([called, nn.LazyLinear(3)], [nn.LazyLinear(3), called]):
        with pytest.raises(InvalidArgument, match="Call each lazy module once"):
            TensorDict.from_modules(*modules)

    made: object = TensorDictParams.from_modules(called, called)
    assert type(made) is TensorDict


@AS_MODULE
def test_they_are_pickled_before_they_have_shapes(as_module: bool) -> None:
    params = TensorDict.from_modules(lazy_net(), lazy_net(), as_module=as_module)
    again = pickle.loads(pickle.dumps(params))
    assert again.batch_size == (2,)
    net, x = lazy_net(), torch.randn(2, 5, 4)
    made = over_rows(net)(again, x)
    assert again["0", "weight"].shape == (2, 3, 4)
    torch.testing.assert_close(over_rows(net)(again, x), made)
