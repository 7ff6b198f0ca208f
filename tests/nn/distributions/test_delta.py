import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, TransformedDistribution, transforms

from kd_core import InvalidValue
from kd_nn import Delta, OneHotCategorical

POINT = torch.tensor([[0.0, 1.0], [2.0, -3.0], [4.0, 5.0]])


@pytest.mark.parametrize(
    ("batch", "event", "expected"),
    [
        (None, None, ((3,), (2,))),
        ((3, 2), None, ((3, 2), ())),
        (None, (3, 2), ((), (3, 2))),
        ((3,), (2,), ((3,), (2,))),
    ],
)
def test_shapes(
    batch: tuple[int, ...] | None,
    event: tuple[int, ...] | None,
    expected: tuple[tuple[int, ...], ...],
) -> None:
    delta = Delta(POINT, batch_shape=batch, event_shape=event)
    assert (delta.batch_shape, delta.event_shape) == expected
    assert delta.log_prob(POINT).shape == delta.cdf(POINT).shape == delta.batch_shape
    assert delta.entropy().tolist() == torch.full(delta.batch_shape, -math.inf).tolist()


def test_shapes_must_make_up_the_parameter() -> None:
    with pytest.raises(
        ValueError, match=r"must be the shape of `param`, \(3, 2\), got \(2,\) and \(2,\)"
    ):
        Delta(POINT, batch_shape=(2,), event_shape=(2,))


def test_log_prob_is_infinite_at_the_point_alone() -> None:
    value = POINT.clone()
    value[1, 1] += 1e-3
    assert Delta(POINT).log_prob(value).tolist() == [math.inf, -math.inf, math.inf]


@pytest.mark.parametrize("offset", [0.0, 5e-4, 2e-3])
def test_log_prob_follows_the_tolerances(offset: float) -> None:
    delta = Delta(torch.tensor([1.0]), atol=0.0, rtol=1e-3)
    assert (delta.log_prob(torch.tensor([1.0 + offset])).item() > 0) == (offset < 1e-3)


def test_moments_are_the_point_and_zero() -> None:
    delta = Delta(POINT)
    for value in (delta.mean, delta.mode, delta.median, delta.icdf(torch.tensor(0.3))):
        assert torch.equal(value, POINT)
    assert not delta.variance.any()
    assert not delta.stddev.any()


def test_samples_repeat_the_point_and_rsample_carries_gradients() -> None:
    param = POINT.clone().requires_grad_()
    delta = Delta(param)
    assert delta.sample((5, 1)).shape == (5, 1, 3, 2)
    assert not delta.sample().requires_grad
    (slope,) = torch.autograd.grad(delta.rsample((5,)).sum(), param)
    assert torch.equal(slope, torch.full((3, 2), 5.0))


def test_no_rows_have_log_probs_too() -> None:
    none = torch.zeros(0, 2)
    assert Delta(none).log_prob(none).shape == (0,)
    assert Delta(none).cdf(none).shape == (0,)
    choice: Any = OneHotCategorical(none)
    assert choice.sample().shape == choice.mode.shape == (0, 2)
    assert choice.log_prob(choice.sample()).shape == choice.entropy().shape == (0,)


def test_cdf_is_a_step() -> None:
    delta = Delta(torch.tensor([1.0]), event_shape=())
    assert [delta.cdf(torch.tensor([v])).item() for v in (0.9, 1.0, 1.1)] == [0.0, 1.0, 1.0]


def test_integer_points_have_floating_log_probs() -> None:
    delta = Delta(torch.tensor([1, 2]))
    assert delta.log_prob(torch.tensor([1, 2])).item() == math.inf


def test_expand_keeps_tolerances_and_event_shape() -> None:
    delta = Delta(torch.zeros(1, 2), atol=0.5).expand((4, 3))
    assert (delta.batch_shape, delta.event_shape, delta.atol) == ((4, 3), (2,), 0.5)
    assert delta.log_prob(torch.full((4, 3, 2), 0.4)).shape == (4, 3)


def test_values_are_validated_as_in_torch() -> None:
    with pytest.raises(ValueError, match="Expected parameter param"):
        Delta(torch.tensor([math.nan]), validate_args=True)
    with pytest.raises(ValueError, match="within the support"):
        Delta(torch.zeros(2), validate_args=True).log_prob(torch.tensor([math.nan, 0.0]))
    assert Delta(torch.tensor([math.nan]), validate_args=False).mean.isnan().all()


def test_delta_combines_with_the_distributions_of_torch() -> None:
    shifted = TransformedDistribution(Delta(POINT), [transforms.AffineTransform(1.0, 2.0)])
    assert torch.equal(shifted.rsample(), 1 + 2 * POINT)
    assert Independent(Delta(POINT, event_shape=()), 1).event_shape == (2,)


@pytest.mark.parametrize("strict", [False, True])
def test_delta_exports_although_it_validates(strict: bool) -> None:
    class Point(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Delta(x).rsample() + 1

    program = torch.export.export(Point(), (POINT,), strict=strict)
    assert torch.equal(program.module()(POINT), POINT + 1)


def test_update_moves_the_point() -> None:
    delta = Delta(POINT, atol=0.5)
    delta.update(POINT + 3)
    assert torch.equal(delta.deterministic_sample, POINT + 3)
    assert delta.log_prob(POINT + 3.2).tolist() == [math.inf] * 3


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.zeros(2), r"the shape of the old one, \(3, 2\), got \(2,\)"),
        (POINT / 0, "not be NaN"),
    ],
)
def test_update_with_a_wrong_point_changes_nothing(param: Tensor, message: str) -> None:
    delta = Delta(POINT, validate_args=True)
    with pytest.raises(ValueError, match=message):
        delta.update(param)
    assert delta.param is POINT


def test_a_number_is_a_point_of_no_dimension() -> None:
    point = Delta(3.0)
    assert point.batch_shape == point.event_shape == torch.Size([])
    assert point.sample() == 3


@pytest.mark.parametrize(("atol", "rtol"), [(-1.0, 0.0), (0.0, float("nan"))])
def test_negative_tolerances_are_refused(atol: float, rtol: float) -> None:
    with pytest.raises(InvalidValue, match="`atol` and `rtol` must be non-negative"):
        Delta(torch.zeros(2), atol, rtol)
