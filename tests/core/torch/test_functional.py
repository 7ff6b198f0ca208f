"""Activations and losses of torch treat containers leaf by leaf."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    UnsupportedFunction,
    lazy_stack,
)
from kd_core._torch_functions import ACTIVATIONS, LOSSES

KEYS = ("x", ("n", "y"))
F: Any = functional  # typed for tensors


def make(seed: int) -> TensorDict:
    torch.manual_seed(seed)
    source = {"x": torch.rand(3, 4) * 0.8 + 0.1, "n": {"y": torch.rand(3) * 0.8 + 0.1}}
    return TensorDict({**source, "s": ["a", "b", "c"]}, [3])


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # by torch, of `kl_div`
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES.split())
def test_a_loss_combines_leaves_of_the_same_key(name: str, reduction: str, lazy: bool) -> None:
    one, two, three = make(0), make(1), make(2)
    loss, per_row = getattr(F, name), torch.tensor([0.2, 0.3, 0.4])
    more: tuple[TensorDictBase, ...] = (three,) if name == "gaussian_nll_loss" else ()
    first: TensorDictBase = lazy_stack(one.unbind(0)) if lazy else one
    got = loss(first, two, *more, reduction=reduction)
    beside = loss(first, per_row, *more, reduction=reduction)
    other_side = loss(per_row, first, *more, reduction=reduction)
    assert got.batch_size == ((3,) if reduction == "none" else ())
    assert got["s"] == ["a", "b", "c"]
    for key in KEYS:
        leaves = [each[key] for each in (one, two, *more)]
        rows = per_row[:, None].expand(3, 4) if key == "x" else per_row
        assert torch.equal(got[key], loss(*leaves, reduction=reduction))
        wanted = loss(leaves[0], rows, *leaves[2:], reduction=reduction)
        assert torch.equal(beside[key], wanted)
        wanted = loss(rows, leaves[0], *leaves[2:], reduction=reduction)
        assert torch.equal(other_side[key], wanted)


@pytest.mark.parametrize("name", ACTIVATIONS.split())
def test_an_activation_maps_each_leaf(name: str) -> None:
    td, args = make(0) - 0.5, (0.1, 0.2) if name == "threshold" else ()
    torch.manual_seed(3)
    got = getattr(F, name)(td, *args)
    torch.manual_seed(3)
    for key in KEYS:
        assert torch.equal(got[key], getattr(F, name)(td[key], *args))
    assert got["s"] == td["s"]


def test_modules_of_torch_take_containers() -> None:
    td = make(0)
    squares: Any = nn.MSELoss(reduction="none")(td, make(1))
    assert torch.equal(squares["x"], (td - make(1))["x"] ** 2)
    shares: Any = nn.Softmax(0)(td)
    assert torch.equal(shares["x"], td["x"].softmax(0))
    assert torch.equal(F.log_softmax(td, "feature")["x"], td["x"].log_softmax(1))
    halves: Any = torch.relu
    assert torch.equal(halves(td - 0.5)["x"], (td["x"] - 0.5).relu())


def test_weights_are_containers_numbers_or_tensors_over_the_batch() -> None:
    td, target, weight = make(0), make(1), make(2)
    got = F.huber_loss(td, target, weight=weight)
    assert torch.equal(got["x"], F.huber_loss(td["x"], target["x"], weight=weight["x"]))
    assert torch.equal(F.mse_loss(td, 0.5)["x"], ((td["x"] - 0.5) ** 2).mean())
    classes = TensorDict({"x": torch.rand(4), "n": {"y": torch.tensor(2.0)}, "s": ""})
    loss = F.binary_cross_entropy_with_logits
    got = loss(td, target, pos_weight=classes)
    assert torch.equal(got["x"], loss(td["x"], target["x"], pos_weight=classes["x"]))
    with pytest.raises(InvalidArgument, match="`pos_weight` must be a container"):
        loss(td, target, pos_weight=torch.rand(3))


def test_gradients_reach_the_operands() -> None:
    x = torch.rand(3, requires_grad=True)
    total = F.mse_loss(TensorDict({"x": x}, [3]), 0.0)["x"]
    total.backward()
    assert torch.equal(x.grad if x.grad is not None else torch.empty(0), 2 / 3 * x.detach())


def test_what_does_not_fit_is_refused_and_named() -> None:
    td = make(0)
    with pytest.raises(KeySetMismatch, match="`x` only in the first"):
        F.mse_loss(td, td.exclude("x"))
    with pytest.raises(ShapeMismatch, match="batch sizes must be equal"):
        F.mse_loss(td, td[:2])
    with pytest.raises(ShapeMismatch, match="does not line up with batch_size"):
        F.mse_loss(td, torch.rand(3, 4))
    with pytest.raises(InvalidArgument, match="a number, a tensor or a container"):
        F.mse_loss(td, "x")
    with pytest.raises(InvalidValue, match="of entry `x` failed: all elements of input should"):
        F.binary_cross_entropy(td * 9, td)
    with pytest.raises(InvalidArgument, match="`size_average` is not supported"):
        F.mse_loss(td, td, size_average=True)
    with pytest.raises(InvalidArgument, match=r"Write `td.apply_\(torch.nn.functional.relu\)`"):
        nn.ReLU(inplace=True)(td)
    with pytest.raises(InvalidArgument, match="requires `dim`, a batch dimension"):
        F.softmax(td)
    with pytest.raises(UnsupportedFunction, match="cross_entropy` is not supported"):
        F.cross_entropy(td, td)


@pytest.mark.parametrize(
    "call",
    [
        lambda td: F.relu(td, True),
        lambda td: F.leaky_relu(td, 0.5, inplace=True),
        lambda td: F.threshold(td, 0.5, value=2.0, inplace=True),
    ],
)
def test_what_an_activation_in_place_advises_runs(call: Any) -> None:
    td = make(0) - 0.5
    expected, leaf = call(td["x"].clone()), td["x"]
    with pytest.raises(InvalidArgument, match="`inplace=True` is not supported") as caught:
        call(td)
    advice = str(caught.value).partition("Write `")[2].removesuffix("`.")
    assert eval(advice, {"td": td, "torch": torch}) is td
    assert torch.equal(leaf, expected)


def test_losses_are_traced_into_one_graph() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def step(td: TensorDict, target: TensorDict) -> Tensor:
        total: Tensor = F.mse_loss(F.relu(td), target).sum(reduce=True)
        return total

    one, two = make(0).exclude("s"), make(1).exclude("s")
    assert torch.allclose(step(one, two), F.mse_loss(F.relu(one), two).sum(reduce=True))


def test_losses_refuse_arguments_as_torch_does() -> None:
    td = TensorDict(x=1.0)
    for args, named in (
        ((td, td), {"target": td}),
        ((td, td, None, None, "mean", None, 1), {}),
        ((td,), {}),
        ((td, td), {"nothing": 1}),
    ):
        with pytest.raises(TypeError):
            F.mse_loss(*args, **named)
