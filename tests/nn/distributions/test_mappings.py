import copy
import math
import pickle

import pytest
import torch
from torch import Tensor

from kd_nn import add_custom_mapping, biased_softplus, inv_softplus, mappings

GRID = torch.linspace(-30, 30, 601)
NAMES = ["softplus", "exp", "expln", "biased_softplus", "biased_softplus_0.5_0.1"]


def reference(name: str, x: Tensor) -> Tensor:
    """Compute the named mapping from its formula, in float64."""
    x = x.double()
    if name == "exp":
        return x.exp()
    if name == "expln":
        return torch.where(x > 0, (x + 1).log() + 1, x.exp())
    softplus = torch.logaddexp(x, torch.zeros_like(x))
    if name == "softplus":
        return softplus
    bias, low = (0.5, 0.1) if "0.5" in name else (1.0, 0.01)
    return torch.logaddexp(x + math.log(math.expm1(bias - low)), torch.zeros_like(x)) + low


@pytest.mark.parametrize("name", NAMES)
def test_mapping_follows_its_formula(name: str) -> None:
    torch.testing.assert_close(
        mappings(name)(GRID).double(), reference(name, GRID), rtol=2e-6, atol=1e-7
    )


@pytest.mark.parametrize("name", NAMES)
def test_mapping_is_positive_and_has_finite_gradients(name: str) -> None:
    x = torch.linspace(-80, 80, 99, requires_grad=True)
    y = mappings(name)(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert bool((y > 0).all())
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_biased_softplus_adds_the_same_numbers_in_every_dtype(dtype: torch.dtype) -> None:
    x = GRID.to(dtype)
    expected = torch.nn.functional.softplus(x + inv_softplus(0.99)) + 0.01
    assert torch.equal(biased_softplus(1.0)(x), expected)


def test_relu_and_none_are_what_they_say() -> None:
    x = torch.tensor([-1.0, 2.0])
    assert mappings("relu")(x).tolist() == [0.0, 2.0]
    assert mappings("none")(x) is x


def test_mapping_in_a_vmap_and_its_gradient_agree_with_a_loop() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    positive = biased_softplus(1.0)
    assert torch.equal(torch.vmap(positive)(x), positive(x))
    slope = torch.func.vmap(torch.func.grad(lambda v: positive(v).sum()))(x)
    torch.testing.assert_close(slope, torch.sigmoid(x + inv_softplus(0.99)))


def test_gradgrad_of_the_biased_softplus() -> None:
    x = torch.tensor([0.3, -0.2], requires_grad=True)
    (slope,) = torch.autograd.grad(mappings("biased_softplus")(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    s = torch.sigmoid(x + inv_softplus(0.99))
    torch.testing.assert_close(bend, s * (1 - s))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_mapping_survives_copies(copied) -> None:  # type: ignore[no-untyped-def]  # the parameter takes functions of several types
    again = copied(mappings("biased_softplus_2.0"))
    assert torch.equal(again(GRID), mappings("biased_softplus_2.0")(GRID))


@pytest.mark.parametrize("value", [1e-4, 0.99, 1.0, 19.0, 21.0, 200.0])
def test_inv_softplus_inverts_softplus(value: float) -> None:
    x = torch.tensor([value], dtype=torch.float64)
    assert torch.nn.functional.softplus(inv_softplus(x)).item() == pytest.approx(value, rel=1e-6)
    assert inv_softplus(value) == pytest.approx(inv_softplus(x).item(), rel=1e-4)


def test_inv_softplus_refuses_what_softplus_never_returns() -> None:
    with pytest.raises(ValueError, match=r"`bias` must be positive .* got 0"):
        inv_softplus(0.0)


def test_unknown_mapping_lists_the_names_and_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"`sofplus` is not a valid mapping.*`expln`.*Did you mean `softplus`"
    ):
        mappings("sofplus")


@pytest.mark.parametrize("name", ["biased_softplus_", "biased_softplus_a", "biased_softplus_1_2_3"])
def test_malformed_biased_softplus_is_an_unknown_name(name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid mapping"):
        mappings(name)


def test_bias_below_the_minimum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0 <= min_val < bias, got bias=0.1 and min_val=0.2"):
        mappings("biased_softplus_0.1_0.2")


def test_custom_mapping_is_found_and_its_name_is_protected() -> None:
    add_custom_mapping("test_square", torch.square)
    assert mappings("test_square") is torch.square
    add_custom_mapping("test_square", torch.square)
    with pytest.raises(ValueError, match="`test_square` is taken"):
        add_custom_mapping("test_square", torch.exp)


def test_custom_mapping_must_be_callable() -> None:
    with pytest.raises(TypeError, match=r"mapping `nothing` must be callable, got int"):
        add_custom_mapping("nothing", 1)  # type: ignore[arg-type]  # wrong on purpose
