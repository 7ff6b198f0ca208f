"""Random composite distributions, beside their components asked one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import pytest
import torch
from tests.fuzz.conftest import Seeds
from torch import Size, Tensor, distributions
from torch.distributions import Distribution

from kd_core import InvalidArgument, NestedKey, TensorDict, TensorDictBase, unravel_key_to_tuple
from kd_nn.distributions import (
    Delta,
    OneHotCategorical,
    TanhNormal,
    TruncatedNormal,
    values_unchecked,
)
from kd_probabilistic import CompositeDistribution, InteractionType, estimate

Shape: TypeAlias = tuple[int, ...]
Params: TypeAlias = dict[str, Tensor]
Parts: TypeAlias = dict[NestedKey, Distribution]
Found: TypeAlias = dict[NestedKey, Tensor]


def loc_scale(shape: Shape) -> Params:
    return {"loc": torch.randn(shape), "scale": torch.rand(shape) + 0.1}


def logits(shape: Shape) -> Params:
    return {"logits": torch.randn((*shape, 3))}


def concentrations(shape: Shape) -> Params:
    return {"concentration": torch.rand((*shape, 3)) + 0.1}


def rate(shape: Shape) -> Params:
    return {"rate": torch.rand(shape) + 0.1}


def row(loc: Tensor, scale: Tensor) -> Distribution:
    return distributions.Independent(distributions.Normal(loc, scale), 1)


def rows(shape: Shape) -> Params:
    return loc_scale((*shape, 2))


def bounded(shape: Shape) -> Params:
    ends = {"a": torch.full((*shape, 2), -1.0), "b": torch.full((*shape, 2), 2.0)}
    return {**rows(shape), **ends}


@dataclass(frozen=True)
class Kind:
    """A distribution: what builds it, its parameters, and arguments that are no parameters."""

    build: Callable[..., Distribution]
    params: Callable[[Shape], Params]
    extra: dict[str, object]


KINDS = [
    Kind(distributions.Normal, loc_scale, {"validate_args": False}),
    Kind(distributions.Laplace, loc_scale, {}),
    Kind(distributions.Cauchy, loc_scale, {}),
    Kind(distributions.Categorical, logits, {}),
    Kind(distributions.Bernoulli, lambda shape: {"logits": torch.randn(shape)}, {}),
    Kind(distributions.Dirichlet, concentrations, {}),
    Kind(distributions.Exponential, rate, {}),
    Kind(distributions.Poisson, rate, {}),
    Kind(row, rows, {}),
    Kind(TanhNormal, rows, {"low": -2.0, "high": 3.0}),
    Kind(TruncatedNormal, bounded, {}),
    Kind(OneHotCategorical, logits, {}),
    Kind(Delta, lambda shape: {"param": torch.randn((*shape, 2))}, {}),
]
NAMES: list[NestedKey] = ["a", "b", ("a", "x"), ("n", "x"), ("n", "m", "y"), "sample", "a_log_prob"]
RENAMED: list[NestedKey] = ["z", ("n", "z"), ("new", "deep", "er"), "entropy"]


@dataclass
class Program:
    """A composite, and its components as they are made by hand."""

    dist: CompositeDistribution
    parts: Parts
    batch: Shape
    aggregate: bool

    @property
    def extra(self) -> dict[NestedKey, int]:
        """How many batch dimensions each component has beyond those of the composite."""
        return {key: len(part.batch_shape) - len(self.batch) for key, part in self.parts.items()}

    def summed(self, parts: Found) -> Tensor:
        """Sum over all components, and over those of their dimensions that are not the batch."""
        total = torch.zeros(())
        for key, value in parts.items():
            for _ in range(self.extra[key]):
                value = value.sum(-1)
            total = total + value
        return total


def separate(keys: list[NestedKey]) -> list[NestedKey]:
    """Leave out the keys that are held by, or hold, an earlier one."""
    kept: list[NestedKey] = []
    for key in keys:
        path = unravel_key_to_tuple(key)
        others = [unravel_key_to_tuple(other) for other in kept]
        if all(path[: len(o)] != o and o[: len(path)] != path for o in others):
            kept.append(key)
    return kept


def by_hand(kind: Kind, params: Params, options: dict[str, object]) -> Distribution:
    """Build a component; some checks of torch fail on no rows."""
    if all(value.numel() for value in params.values()):
        return kind.build(**params, **options)
    with values_unchecked():
        made = kind.build(**params, **options)
    made._validate_args = False
    return made


def program(rng: Random) -> Program:
    """Build a random composite."""
    batch = rng.choice([(), (3,), (2, 3), (0,), (1, 2)])
    names = separate(rng.sample(NAMES, rng.randint(1, 4)))
    values = separate([*names, *rng.sample(RENAMED, 4)])[len(names) :]
    name_map = {name: key for name, key in zip(names, values, strict=False) if rng.random() < 0.3}
    params = TensorDict(batch_size=batch)
    parts: Parts = {}
    classes: dict[NestedKey, Callable[..., Distribution]] = {}
    extra: dict[NestedKey, dict[str, object]] = {}
    for name in names:
        kind = rng.choice(KINDS)
        made = kind.params((*batch, *rng.choice([(), (), (2,), (1, 2)])))
        params[name] = made
        classes[name], options = kind.build, kind.extra if rng.random() < 0.7 else {}
        if options:
            extra[name] = options
        parts[name_map.get(name, name)] = by_hand(kind, made, options)
    aggregate = rng.random() < 0.5
    if rng.random() < 0.7:
        dist = CompositeDistribution(
            params, classes, name_map=name_map, extra_kwargs=extra, aggregate=aggregate
        )
    else:
        dist = CompositeDistribution.from_distributions(params, parts, aggregate=aggregate)
    result = Program(dist, parts, batch, aggregate)
    return expanded(result, rng.choice([4, 1])) if rng.random() < 0.3 else result


def expanded(made: Program, rows: int) -> Program:
    """Expand all."""
    batch = (rows, *made.batch)
    parts = {key: part.expand(Size((rows, *part.batch_shape))) for key, part in made.parts.items()}
    return Program(made.dist.expand(batch), parts, batch, made.aggregate)


def check_entries(got: TensorDictBase, expected: Found, batch: Shape) -> None:
    """Check that a container holds exactly these tensors."""
    assert tuple(got.batch_size) == batch
    assert set(got.keys(True, True)) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, equal_nan=True)


def suffixed(key: NestedKey, suffix: str) -> NestedKey:
    *above, last = unravel_key_to_tuple(key)
    return (*above, last + suffix) if above else last + suffix


def compare(
    call: Callable[[], TensorDictBase],
    each: Callable[[NestedKey], Tensor],
    made: Program,
    suffix: str,
    shape: Shape,
) -> Found | None:
    """Compare a call with what each component gives; where one refuses, the call must, too."""
    try:
        expected = {key: each(key) for key in made.parts}
    except NotImplementedError:
        with pytest.raises(NotImplementedError):
            call()
        return None
    named = {suffixed(key, suffix): value for key, value in expected.items()}
    check_entries(call(), named, (*shape, *made.batch))
    return expected


def check_draws(made: Program, rng: Random) -> None:
    """Draw, and score the draw in each way."""
    dist, parts = made.dist, made.parts
    shape = rng.choice([(), (2,), (2, 1)])
    seed = rng.randrange(100)
    draw = rng.choice(["sample", "rsample"])

    def drawn() -> TensorDict:
        torch.manual_seed(seed)
        found: TensorDict = getattr(dist, draw)(shape)
        return found

    assert dist.has_rsample is all(part.has_rsample for part in parts.values())
    torch.manual_seed(seed)
    value = compare(drawn, lambda key: getattr(parts[key], draw)(shape), made, "", shape)
    if value is None:
        return
    sample = drawn()
    each = compare(
        lambda: dist.log_prob(sample, aggregate=False),
        lambda key: scored(parts[key], value[key]),
        made,
        "_log_prob",
        shape,
    )
    assert each is not None
    total = dist.log_prob(sample, aggregate=True)
    assert total.shape == (*shape, *made.batch)
    torch.testing.assert_close(total, made.summed(each).expand(total.shape))
    assert isinstance(dist.log_prob(sample), Tensor) is made.aggregate
    torch.manual_seed(seed)
    again, score = getattr(dist, f"{draw}_and_log_prob")(shape)
    assert (again == sample).all()
    assert isinstance(score, Tensor) is made.aggregate
    check_sum(made, sample, total)
    probs = compare(
        lambda: added(dist.cdf, sample), lambda key: parts[key].cdf(value[key]), made, "_cdf", shape
    )
    if probs is not None:
        found = dist.cdf(sample.clone())
        compare(
            lambda: added(dist.icdf, found),
            lambda key: parts[key].icdf(probs[key]),
            made,
            "_icdf",
            shape,
        )


def added(
    call: Callable[[TensorDictBase], TensorDictBase], given: TensorDictBase
) -> TensorDictBase:
    """Return what a call adds to its argument, which it returns."""
    argument = given.clone()
    assert call(argument) is argument
    return argument.exclude(*given.keys(True, True))


def check_sum(made: Program, sample: TensorDict, total: Tensor) -> None:
    """Compare the sum beside the parts; where it would replace one, it is refused."""
    dist = made.dist
    if "sample" in made.parts:
        with pytest.raises(InvalidArgument, match="cannot be written to `sample_log_prob`"):
            dist.log_prob_composite(sample, include_sum=True)
    else:
        with_sum = dist.log_prob_composite(sample, include_sum=True)
        torch.testing.assert_close(with_sum["sample_log_prob"], total)


def scored(part: Distribution, value: Tensor) -> Tensor:
    """Return the log-probability, also of no rows, which `Independent` refuses."""
    if isinstance(part, distributions.Independent):
        return scored(part.base_dist, value).sum(-1)
    found: Tensor = part.log_prob(value)
    return found


def entropy(part: Distribution) -> Tensor:
    """Return the entropy, also of no rows, which `Independent` refuses."""
    if isinstance(part, distributions.Independent):
        return entropy(part.base_dist).sum(-1)
    return part.entropy()


def variance(part: Distribution) -> Tensor:
    """Return the variance; a composite has none where torch gives NaN."""
    found = part.variance
    if found.isnan().any():
        raise NotImplementedError
    return found


def check_values(made: Program) -> None:
    """Compare entropies and estimates."""
    dist, parts = made.dist, made.parts

    def estimated(name: str, kind: InteractionType) -> None:
        compare(lambda: getattr(dist, name), lambda key: estimate(parts[key], kind), made, "", ())

    estimated("mean", InteractionType.MEAN)
    estimated("mode", InteractionType.MODE)
    estimated("median", InteractionType.MEDIAN)
    estimated("deterministic_sample", InteractionType.DETERMINISTIC)
    compare(lambda: dist.variance, lambda key: variance(parts[key]), made, "", ())
    compare(lambda: dist.stddev, lambda key: variance(parts[key]).sqrt(), made, "", ())
    try:
        entropies = {key: entropy(part) for key, part in parts.items()}
    except NotImplementedError:
        assert dist.entropy(2, aggregate_probabilities=False).batch_size == made.batch
        return
    compare(
        lambda: dist.entropy(aggregate_probabilities=False),
        entropies.__getitem__,
        made,
        "_entropy",
        (),
    )
    total = dist.entropy(aggregate_probabilities=True)
    torch.testing.assert_close(total, made.summed(entropies).expand(total.shape))
    assert isinstance(dist.entropy(), Tensor) is made.aggregate


def test_a_random_composite_gives_what_its_components_give(seeds: Seeds) -> None:
    for seed in seeds(60):
        rng = Random(seed)
        torch.manual_seed(seed)
        made = program(rng)
        assert made.dist.batch_shape == made.batch
        assert list(made.dist.keys()) == list(made.parts)
        check_draws(made, rng)
        check_values(made)
        seeds.count("components", len(made.parts))
