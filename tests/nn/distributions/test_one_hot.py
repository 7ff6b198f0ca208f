import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution, RelaxedOneHotCategorical
from torch.nn import functional

from kd_nn import OneHotCategorical, rand_one_hot

LOGITS = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]])


def log_density(dist: Distribution, value: Tensor) -> Tensor:
    result: Tensor = dist.log_prob(value)
    return result


def test_it_is_that_of_torch_with_the_logits_first() -> None:
    ours: Distribution = OneHotCategorical(LOGITS)
    theirs: Distribution = torch.distributions.OneHotCategorical(logits=LOGITS)
    every = theirs.enumerate_support()
    torch.testing.assert_close(log_density(ours, every), log_density(theirs, every))
    torch.testing.assert_close(log_density(ours, every).exp().sum(0), torch.ones(2))
    for name in ("mean", "variance", "probs", "logits", "param_shape"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    for value in (OneHotCategorical(LOGITS).deterministic_sample, OneHotCategorical(LOGITS).mode):
        assert torch.equal(value, theirs.mode.long())
    assert OneHotCategorical(LOGITS).sample((4,)).dtype is torch.int64
    torch.testing.assert_close(OneHotCategorical(probs=LOGITS.softmax(-1)).mean, ours.mean)


def test_straight_through_draws_are_one_hot_with_the_gradients_of_the_probabilities() -> None:
    logits = LOGITS.clone().requires_grad_()
    torch.manual_seed(0)
    draw = OneHotCategorical(logits).rsample((50,))
    assert bool(((draw == 0) | (draw == 1)).all())
    assert bool((draw.sum(-1) == 1).all())
    weights = torch.randn(3)
    (got,) = torch.autograd.grad((draw * weights).sum(), logits)
    (expected,) = torch.autograd.grad(50 * (logits.softmax(-1) * weights).sum(), logits)
    torch.testing.assert_close(got, expected)
    plain: Distribution = OneHotCategorical(logits)
    assert not plain.sample().requires_grad
    assert not plain.has_rsample  # as that of torch: modules draw integers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (4,), (3, 2)])
def test_straight_through_draws_are_those_of_a_relaxed_distribution(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    logits = torch.randn(2, 5, dtype=dtype)
    made = []
    for dist in (
        OneHotCategorical(logits),
        RelaxedOneHotCategorical(torch.ones(()), logits=logits),
    ):
        torch.manual_seed(0)
        made.append(dist.rsample(shape))
    drawn, relaxed = made
    assert drawn.dtype == dtype
    assert torch.equal(drawn.argmax(-1), relaxed.argmax(-1))
    assert bool((drawn.sum(-1) == 1).all())
    frequencies = OneHotCategorical(logits).rsample((4000,)).mean(0)
    torch.testing.assert_close(frequencies, logits.softmax(-1), atol=0.04, rtol=0)


def test_expand_keeps_the_kind() -> None:
    wide = OneHotCategorical(LOGITS).expand((4, 2))
    assert type(wide) is OneHotCategorical
    assert wide.rsample((5,)).shape == (5, 4, 2, 3)


@pytest.mark.parametrize(("given", "said"), [(None, "neither"), (LOGITS, "both")])
def test_exactly_one_of_logits_and_probs_is_given(given: Tensor | None, said: str) -> None:
    with pytest.raises(TypeError, match=f"either `logits` or `probs`, got {said}"):
        OneHotCategorical(given, given)


@pytest.mark.parametrize("do_softmax", [True, False])
def test_rand_one_hot_draws_each_class_as_often_as_it_should(do_softmax: bool) -> None:
    torch.manual_seed(0)
    probs, count = LOGITS.softmax(-1), 20_000
    values = LOGITS if do_softmax else 3 * probs
    draws = rand_one_hot(values.expand(count, 2, 3), do_softmax)
    assert draws.dtype is torch.int64
    assert bool((draws.sum(-1) == 1).all())
    error = torch.sqrt(probs * (1 - probs) / count)
    assert bool(((draws.double().mean(0) - probs).abs() < 5 * error).all())


def test_rand_one_hot_of_any_shape() -> None:
    assert rand_one_hot(torch.zeros(0, 4)).shape == (0, 4)
    assert rand_one_hot(torch.tensor([-math.inf, 0.0])).tolist() == [0, 1]
    with pytest.raises(TypeError, match="must have a last dimension, that of the classes"):
        rand_one_hot(torch.tensor(1.0))


def test_checks_follow_the_argument() -> None:
    bad = LOGITS * math.nan
    with pytest.raises(ValueError, match="Expected parameter logits"):
        OneHotCategorical(bad, validate_args=True)
    assert OneHotCategorical(bad, validate_args=False).probs.isnan().all()


@pytest.mark.parametrize("strict", [False, True])
def test_deterministic_value_exports(strict: bool) -> None:
    class Best(torch.nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return OneHotCategorical(logits).deterministic_sample

    program = torch.export.export(Best(), (LOGITS,), strict=strict)
    expected = functional.one_hot(LOGITS.argmax(-1), 3)
    assert torch.equal(program.module()(LOGITS), expected)


def test_a_network_gives_one_number_for_each_class() -> None:
    assert OneHotCategorical.num_params == 1
