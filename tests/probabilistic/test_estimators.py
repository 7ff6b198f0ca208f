import gc
import math
import weakref

import pytest
import scipy.stats
import torch
from torch import Tensor, distributions, tensor
from torch.distributions import Distribution

from kd_probabilistic import EstimateNotOffered, InteractionType, estimate, register_estimator

HALF = torch.tensor([0.5, 2.0])
ONES = torch.ones(2)


def transformed() -> Distribution:
    return distributions.TransformedDistribution(
        distributions.Normal(HALF, ONES), [distributions.TanhTransform()]
    )


DETERMINISTIC: list[tuple[Distribution, Tensor]] = [
    (distributions.Normal(HALF, ONES), HALF),
    (distributions.Bernoulli(tensor([0.2, 0.7, 0.5])), tensor([0.0, 1.0, 1.0])),
    (distributions.Categorical(logits=tensor([0.0, 2.0, 1.0])), tensor(1)),
    (distributions.OneHotCategorical(logits=tensor([0.0, 2.0])), tensor([0.0, 1.0])),
    (distributions.Multinomial(4, tensor([0.25, 0.75])), tensor([1.0, 3.0])),
    (distributions.Poisson(tensor(2.5)), tensor(2.0)),
    (distributions.Cauchy(HALF, ONES), HALF),
    (distributions.HalfCauchy(ONES), torch.zeros(2)),
    (distributions.StudentT(tensor([0.5, 3.0]), HALF, ONES), HALF),
    (distributions.Pareto(ONES, tensor([0.5, 2.0])), tensor([1.0, 2.0])),
    (distributions.InverseGamma(tensor([0.5, 3.0]), ONES), tensor([1 / 1.5, 0.5])),
    (distributions.FisherSnedecor(ONES, tensor([1.0, 4.0])), tensor([0.0, 2.0])),
    (distributions.Independent(distributions.Cauchy(HALF, ONES), 1), HALF),
    (distributions.Independent(distributions.Bernoulli(tensor([0.2, 0.7])), 1), tensor([0.0, 1.0])),
    (transformed(), HALF.tanh()),
    (distributions.RelaxedBernoulli(tensor(2.0), logits=HALF), (HALF / 2).sigmoid()),
    (distributions.RelaxedOneHotCategorical(tensor(2.0), logits=HALF), (HALF / 2).softmax(-1)),
]


@pytest.mark.parametrize(
    ("distribution", "expected"), DETERMINISTIC, ids=lambda v: type(v).__name__
)
def test_deterministic_value(distribution: Distribution, expected: Tensor) -> None:
    torch.testing.assert_close(estimate(distribution, InteractionType.DETERMINISTIC), expected)


@pytest.mark.parametrize(
    ("distribution", "reference"),
    [
        (distributions.Normal(0.5, 2.0), scipy.stats.norm(0.5, 2.0)),
        (distributions.Laplace(0.5, 2.0), scipy.stats.laplace(0.5, 2.0)),
        (distributions.Cauchy(0.5, 2.0), scipy.stats.cauchy(0.5, 2.0)),
        (distributions.StudentT(1.5, 0.5, 2.0), scipy.stats.t(1.5, 0.5, 2.0)),
        (distributions.Exponential(3.0), scipy.stats.expon(scale=1 / 3)),
        (distributions.Gumbel(0.5, 2.0), scipy.stats.gumbel_r(0.5, 2.0)),
        (distributions.Pareto(2.0, 0.5), scipy.stats.pareto(0.5, scale=2.0)),
        (distributions.HalfCauchy(2.0), scipy.stats.halfcauchy(scale=2.0)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_median_agrees_with_scipy(distribution: Distribution, reference: object) -> None:
    median = estimate(distribution, InteractionType.MEDIAN).item()
    assert median == pytest.approx(reference.median(), rel=1e-5)  # type: ignore[attr-defined]  # scipy has no types


def test_median_of_a_vector_is_by_element() -> None:
    vector = distributions.Independent(distributions.Cauchy(HALF, ONES), 1)
    torch.testing.assert_close(estimate(vector, InteractionType.MEDIAN), HALF)


@pytest.mark.parametrize("concentration", [0.5, 1.0])
def test_weibull_mode_is_zero_where_the_density_falls(concentration: float) -> None:
    weibull = distributions.Weibull(1.0, concentration)
    assert estimate(weibull, InteractionType.MODE).item() == 0.0


@pytest.mark.parametrize(("a", "b"), [(2.0, 3.0), (1.5, 1.1), (0.5, 2.0), (2.0, 0.5), (1.0, 2.0)])
def test_kumaraswamy_mode_is_where_the_density_is_largest(a: float, b: float) -> None:
    dist: Distribution = distributions.Kumaraswamy(a, b)
    grid = torch.linspace(1e-4, 1 - 1e-4, 9999)
    largest = grid[dist.log_prob(grid).argmax()]
    assert abs(estimate(dist, InteractionType.MODE) - largest) < 2e-4


@pytest.mark.parametrize(
    ("distribution", "interaction", "message"),
    [
        (
            distributions.Uniform(0.0, 1.0),
            "mode",
            "`Uniform` has no mode; available: `mean`, `median`",
        ),
        (
            distributions.Cauchy(0.0, 1.0),
            "mean",
            "`Cauchy` has no mean; available: `median`, `mode`",
        ),
        (distributions.Categorical(ONES), "mean", "`Categorical` has no mean; available: `mode`"),
        (
            distributions.Gamma(1.0, 1.0),
            "median",
            "`Gamma` has no median; available: `mean`, `mode`",
        ),
        (
            distributions.LKJCholesky(3),
            "deterministic",
            "finite deterministic value; available: `random`",
        ),
        (distributions.ContinuousBernoulli(0.3), "mode", "`ContinuousBernoulli` has no mode"),
    ],
)
def test_absent_estimate_names_the_distribution_and_what_it_offers(
    distribution: Distribution, interaction: str, message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        estimate(distribution, InteractionType(interaction))


def test_mean_that_is_nan_is_never_returned_in_silence() -> None:
    mixture = distributions.MixtureSameFamily(
        distributions.Categorical(ONES), distributions.Categorical(torch.ones(2, 3))
    )
    with pytest.raises(EstimateNotOffered, match="no finite deterministic value"):
        estimate(mixture, InteractionType.DETERMINISTIC)


class HeavyTail(Distribution):
    """A user's distribution whose mean diverges."""

    arg_constraints = {}  # noqa: RUF012  # as torch declares it

    @property
    def mean(self) -> Tensor:
        return tensor(math.inf)

    @property
    def mode(self) -> Tensor:
        return tensor(3.0)


class Choosy(distributions.Normal):
    """A user's distribution that says itself what its deterministic value is."""

    @property
    def deterministic_sample(self) -> Tensor:
        return tensor(7.0)


def test_a_users_distribution_falls_back_to_its_finite_mode() -> None:
    heavy = HeavyTail(validate_args=False)
    assert estimate(heavy, InteractionType.DETERMINISTIC) == 3


def test_deterministic_sample_of_the_class_wins() -> None:
    assert estimate(Choosy(0.0, 1.0), InteractionType.DETERMINISTIC) == 7


def test_registered_estimator_serves_subclasses_and_replaces_the_known_one() -> None:
    class Parent(distributions.Normal):
        pass

    class Child(Parent):
        pass

    child = Child(0.0, 1.0)
    assert estimate(child, InteractionType.DETERMINISTIC) == 0
    register_estimator(Parent, "deterministic", lambda d: tensor(5.0))
    assert estimate(child, InteractionType.DETERMINISTIC) == 5


def test_random_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="cannot be RANDOM, which uses `rsample`"):
        register_estimator(distributions.Normal, "random", lambda d: tensor(0.0))


def test_what_is_kept_for_ever_new_classes_is_bounded() -> None:
    kinds = [type(f"Normal{number}", (distributions.Normal,), {}) for number in range(600)]
    for kind in kinds:
        estimate(kind(0.0, 1.0), InteractionType.MEAN)
    gone = [weakref.ref(kind) for kind in kinds]
    del kinds, kind
    gc.collect()
    assert sum(ref() is not None for ref in gone) <= 256
