"""An `nn.Sequential` in a module runs in line, and whatever would be seen without it is seen."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from tests.nn.plans import module_calls
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from kd_core import TensorDict
from kd_nn import TensorDictModule

X = torch.linspace(-1, 1, 12).view(4, 3)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def make(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Double())
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), inner, nn.ELU(), nn.Identity(), *last)


def by_keyword(module: TensorDictModule) -> Tensor:
    return cast(Tensor, module(x=X))


def by_container(module: TensorDictModule) -> Tensor:
    return module(TensorDict({"x": X}, [4]))["y"]


@pytest.fixture(params=[by_keyword, by_container])
def call(request: pytest.FixtureRequest) -> Callable[[TensorDictModule], Tensor]:
    return cast("Callable[[TensorDictModule], Tensor]", request.param)


Call = Callable[[TensorDictModule], Tensor]


def planned(net: nn.Sequential, call: Call) -> TensorDictModule:
    module = TensorDictModule(net, ["x"], ["y"])
    for _ in range(3):
        call(module)
    return module


@pytest.mark.parametrize(
    ("net", "after"),
    [(make(), 2), (nn.Sequential(), 0), (nn.Sequential(nn.Sequential(), Double()), 0)],
)
def test_values_and_gradients_are_those_of_the_sequential(
    net: nn.Sequential, after: int, call: Call
) -> None:
    module = planned(net, call)
    # What comes after a user's module is called, as that one may have changed it.
    assert module_calls(lambda: call(module)) == after
    expected = net(X)
    assert torch.equal(call(module), expected)
    parameters = list(net.parameters())
    if parameters:
        got = torch.autograd.grad(call(module).sum(), parameters)
        assert all(map(torch.equal, got, torch.autograd.grad(expected.sum(), parameters)))


MEMBERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "sequential": lambda net: net,
    "first": lambda net: net[0],
    "inner sequential": lambda net: net[2],
    "inner member": lambda net: cast(nn.Sequential, net[2])[2],
    "without a form": lambda net: net[3],
}


@pytest.mark.parametrize("which", MEMBERS)
def test_a_hook_on_any_member_is_seen(which: str, call: Call) -> None:
    net = make()
    module = planned(net, call)
    before = call(module)
    handle = MEMBERS[which](net).register_forward_hook(lambda module, args, out: out * 0)
    assert torch.equal(call(module), net(X))
    handle.remove()
    assert torch.equal(call(module), before)


@pytest.mark.parametrize("which", MEMBERS)
def test_a_patched_forward_of_any_member_is_called(which: str, call: Call) -> None:
    net = make()
    module = planned(net, call)
    MEMBERS[which](net).forward = lambda x: torch.zeros(4, 4)
    assert torch.equal(call(module), net(X))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "replaced": lambda net: net.__setitem__(1, nn.ReLU()),
    "replaced inside": lambda net: cast(nn.Sequential, net[2]).__setitem__(1, nn.ReLU()),
    "appended": lambda net: net.append(Double()),
    "removed": lambda net: net.__delitem__(1),
    "of another class": lambda net: setattr(net[1], "__class__", nn.Sigmoid),
    "parametrised": lambda net: parametrizations.weight_norm(net[0]),
    "without bias": lambda net: net[0].register_parameter("bias", None),
    "with another weight": lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(4, 3))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_member_is_run(change: str, call: Call) -> None:
    net = make()
    module = planned(net, call)
    CHANGES[change](net)
    for _ in range(3):
        assert torch.equal(call(module), net(X))


def test_exchanged_parameters_are_used(call: Call) -> None:
    net = make()
    module = planned(net, call)
    zeros = TensorDict.from_module(net).data.clone().zero_()
    with zeros.to_module(net):
        assert torch.equal(call(module), net(X))
    assert torch.equal(call(module), net(X))


def test_the_mode_of_a_member_is_looked_up(call: Call) -> None:
    net = make(nn.Dropout(1.0))
    module = planned(net, call)
    assert not call(module).any()
    module.eval()
    assert torch.equal(call(module), net(X))
    assert call(module).any()


def test_a_member_with_a_call_of_its_own_is_called(call: Call) -> None:
    class Loud(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return cast(Tensor, super().__call__(x)) * 0

    assert not call(planned(nn.Sequential(Loud(3, 4)), call)).any()


def test_an_error_in_a_member_is_that_of_the_sequential(call: Call) -> None:
    net = make()
    module = planned(net, call)
    net[0] = nn.Linear(3, 5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call(module)


def test_the_dimensions_of_a_flatten_are_looked_up(call: Call) -> None:
    flatten = nn.Flatten(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2)), flatten, nn.Unflatten(0, (4, 4)))
    module = planned(net, call)
    assert torch.equal(call(module), net(X))
    flatten.start_dim = 1
    with pytest.raises(RuntimeError, match=r"unflatten"):
        call(module)


def recurrent(cell: nn.Module) -> TensorDictModule:
    return TensorDictModule(cell, ["x", "h"], ["h"])


def run_cell(module: TensorDictModule, x: Tensor, h: Tensor) -> Tensor:
    for _ in range(3):
        td = module(TensorDict({"x": x, "h": h}))
        assert torch.equal(td["h"], cast(Tensor, module(x=x, h=h)))
    return td["h"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_gru_cell_runs_in_line(bias: bool) -> None:
    torch.manual_seed(0)
    cell, h = nn.GRUCell(3, 5, bias), torch.randn(4, 5)
    module = recurrent(cell)
    assert torch.equal(run_cell(module, X, h), cell(X, h))
    assert module_calls(lambda: module(x=X, h=h)) == 0
    got, expected = (
        torch.autograd.grad(out.sum(), list(cell.parameters()))
        for out in (run_cell(module, X, h), cell(X, h))
    )
    assert all(map(torch.equal, got, expected))
    assert torch.equal(run_cell(module, X[0], h[0]), cell(X[0], h[0]))
    with pytest.raises(ValueError, match="Expected input to be 1D or 2D, got 3D"):
        module(x=X[None], h=h[None])


CELL_CHANGES: dict[str, Callable[[nn.GRUCell], object]] = {
    "hook": lambda cell: cell.register_forward_hook(lambda module, args, out: out * 0),
    "forward": lambda cell: setattr(cell, "forward", lambda x, h: h + 1),
    "weight": lambda cell: setattr(cell, "weight_ih", nn.Parameter(torch.ones(15, 3))),
    "no bias": lambda cell: cell.register_parameter("bias_ih", None),
    "normalised": lambda cell: parametrizations.weight_norm(cell, "weight_hh"),
}


@pytest.mark.parametrize("change", CELL_CHANGES)
def test_a_changed_gru_cell_is_run(change: str) -> None:
    torch.manual_seed(0)
    cell, h = nn.GRUCell(3, 5), torch.randn(4, 5)
    module = recurrent(cell)
    before = run_cell(module, X, h)
    CELL_CHANGES[change](cell)
    assert torch.equal(run_cell(module, X, h), cell(X, h))
    assert change == "normalised" or not torch.equal(cell(X, h), before)
