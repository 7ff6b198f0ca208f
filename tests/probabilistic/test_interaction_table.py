"""Every interaction type on every distribution: the table of the guide is made here.

`python -m tests.probabilistic.test_interaction_table` writes it.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.probabilistic.cases import CASES, FACTORIES, build
from torch import Tensor, tensor
from torch import distributions as d
from torch.distributions import Distribution

from kd_core import TensorDict
from kd_probabilistic import (
    CompositeDistribution,
    EstimateNotOffered,
    InteractionType,
    ProbabilisticTensorDictModule,
    estimate,
)

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "interaction-types.md"
START, END = "<!-- table: start -->\n", "<!-- table: end -->\n"
BASES = {"Distribution", "ExponentialFamily", "Independent", "TransformedDistribution"}
EVERY: list[Callable[..., Distribution]] = [*CASES, *FACTORIES]
TYPES = list(InteractionType)


def module(dist: Distribution, kind: InteractionType, count: int = 50) -> Tensor:
    """Return what a module takes of a distribution."""
    taker = ProbabilisticTensorDictModule(
        ["x"],
        ["y"],
        distribution_class=lambda x: dist,
        default_interaction_type=kind,
        n_empirical_estimate=count,
    )
    value = taker(torch.zeros(()))
    assert isinstance(value, Tensor)
    return value


def value_or_message(dist: Distribution, kind: InteractionType) -> Tensor | str:
    try:
        return module(dist, kind)
    except EstimateNotOffered as error:
        return str(error)


def what(dist: Distribution, kind: InteractionType) -> str:
    """Return how a value is found: by a formula, from draws, or not at all."""
    if kind is InteractionType.RANDOM:
        return "draw, with gradients" if dist.has_rsample else "draw"
    try:
        estimate(dist, kind)
    except EstimateNotOffered:
        pass
    else:
        return "formula"
    try:
        module(dist, kind)
    except EstimateNotOffered:
        return "refused"
    return "average of draws"


def name_of(kind: Callable[..., Distribution]) -> str:
    made = type(build(kind))
    return f"`{made.__name__}`" + (" (kd)" if made.__module__.startswith("kd_") else "")


def table() -> str:
    """Return the table as Markdown."""
    head = " | ".join(f"`{kind.name}`" for kind in TYPES)
    lines = [f"| Distribution | {head} |", "| --- |" + " --- |" * len(TYPES)]
    for each in sorted(EVERY, key=lambda each: name_of(each).lower()):
        dist = build(each)
        cells = " | ".join(what(dist, kind) for kind in TYPES)
        lines.append(f"| {name_of(each)} | {cells} |")
    return "\n".join(lines) + "\n"


def test_every_distribution_of_torch_has_a_case() -> None:
    names = {name for name in d.__all__ if name not in BASES and name[0].isupper()}
    kinds = {name for name in names if issubclass(getattr(d, name), Distribution)}
    covered = {type(build(each)).__name__ for each in EVERY}
    assert kinds - {"Transform"} <= covered


def test_the_table_of_the_guide_is_true() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(START)[2].partition(END)[0] == table()


# Torch says so of valid draws of a Wishart distribution, and draws again.
SINGULAR = pytest.mark.filterwarnings("ignore:Singular sample detected:UserWarning")


@SINGULAR
@pytest.mark.parametrize("each", EVERY, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.value)
def test_a_value_is_finite_and_of_the_right_shape_or_it_is_refused(
    each: Callable[..., Distribution], kind: InteractionType
) -> None:
    torch.manual_seed(0)
    dist = build(each)
    value = value_or_message(dist, kind)
    if isinstance(value, str):
        assert kind is not InteractionType.RANDOM
        assert f"`{type(dist).__name__}` has no" in value
        assert "; available: " in value
    else:
        assert value.shape == dist.batch_shape + dist.event_shape
        assert not value.isnan().any()
        assert kind is InteractionType.MEAN or bool(value.isfinite().all())


ODD: list[Distribution] = [
    d.Beta(tensor([1.0, 2.0]), tensor([1.0, 2.0])),
    d.Dirichlet(torch.ones(3)),
    d.Kumaraswamy(tensor([0.5, 2.0]), tensor([0.5, 2.0])),
    d.Wishart(tensor(3.0), torch.eye(3)),
    d.StudentT(tensor([0.5, 3.0])),
    d.FisherSnedecor(tensor([3.0, 3.0]), tensor([1.0, 5.0])),
    d.GeneralizedPareto(tensor([0.0, 0.0]), tensor([1.0, 1.0]), tensor([0.5, 2.0])),
    d.InverseGamma(tensor([0.5, 3.0]), tensor(1.0)),
    d.Pareto(tensor(1.0), tensor([0.5, 3.0])),
    d.HalfCauchy(tensor(1.0)),
    d.Cauchy(tensor(0.0), tensor(1.0)),
    d.Uniform(0.0, 1.0),
    d.Categorical(torch.ones(3)),
    d.Bernoulli(tensor([0.0, 0.5, 1.0])),
    d.Geometric(tensor([0.01, 1.0])),
    d.MixtureSameFamily(d.Categorical(torch.ones(2)), d.Cauchy(torch.zeros(2), torch.ones(2))),
    d.MixtureSameFamily(d.Categorical(torch.ones(2)), d.Categorical(torch.ones(2, 3))),
    d.Independent(d.StudentT(tensor([0.5, 3.0])), 1),
    d.TransformedDistribution(d.Cauchy(tensor(0.0), tensor(1.0)), [d.ExpTransform()]),
]


@SINGULAR
@pytest.mark.parametrize("dist", ODD, ids=lambda dist: type(dist).__name__)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.value)
def test_what_does_not_exist_is_never_nan_in_silence(
    dist: Distribution, kind: InteractionType
) -> None:
    torch.manual_seed(0)
    value = value_or_message(dist, kind)
    assert "; available: " in value if isinstance(value, str) else not value.isnan().any()


def test_a_mean_that_does_not_exist_is_not_averaged() -> None:
    for dist in (d.StudentT(tensor([0.5, 3.0])), d.Cauchy(0.0, 1.0), ODD[-4], ODD[-2]):
        with pytest.raises(EstimateNotOffered, match="has no mean"):
            module(dist, InteractionType.MEAN)
    with pytest.raises(EstimateNotOffered, match="`Beta` has no mode for some of its parameters"):
        estimate(ODD[0], InteractionType.MODE)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.value)
def test_a_composite_takes_each_component(kind: InteractionType) -> None:
    td = TensorDict({"p": {"a": {"loc": torch.zeros(3), "scale": torch.ones(3)}}}, [3])
    taker = ProbabilisticTensorDictModule(
        {"params": "p"},
        ["a"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"a": d.Normal}},
        default_interaction_type=kind,
    )
    value = taker(td)["a"]
    assert torch.equal(value, torch.zeros(3)) == (kind is not InteractionType.RANDOM)


def test_an_average_of_draws_comes_near_the_mean() -> None:
    torch.manual_seed(0)
    for each in EVERY:
        dist = build(each)
        if what(dist, InteractionType.MEAN) == "average of draws":
            few, many = (module(dist, InteractionType.MEAN, n) for n in (20_000, 80_000))
            assert float((few - many).abs().max()) < 5 * 2 / math.sqrt(20_000)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    PAGE.write_text(before + START + table() + END + rest.partition(END)[2], encoding="utf-8")
    sys.stdout.write(table())
