"""Probabilistic modules on the device: every distribution, every estimate, generators."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu.device import DEVICE, assert_alike
from tests.probabilistic.cases import CASES, EVERY, SETTINGS
from torch import Tensor
from torch.distributions import Distribution, Normal

from kd_core import TensorDict
from kd_nn import TensorDictModule
from kd_probabilistic import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)

MEANS_OF_DRAWS = (
    *("squashed", "TanhNormal", "LogisticNormal"),
    *("RelaxedBernoulli", "RelaxedOneHotCategorical"),
)
"""Their mean has no formula: it is that of a thousand draws, which each device makes itself."""

TYPES = ("mode", "mean", "median", "deterministic")


def module(kind: Callable[..., Distribution], how: str) -> ProbabilisticTensorDictModule:
    settings = SETTINGS.get(kind, {}) if isinstance(kind, type) else {}
    return ProbabilisticTensorDictModule(
        in_keys=list(EVERY[kind]),
        out_keys=["sample"],
        distribution_class=kind,
        distribution_kwargs=settings,
        default_interaction_type=how,
        return_log_prob=True,
        log_prob_key="score",
    )


def outcome(kind: Callable[..., Distribution], how: str, where: torch.device | str) -> object:
    """Return what a module writes, or the kind of its error."""
    torch.manual_seed(0)
    params = {key: value.to(where) for key, value in EVERY[kind].items()}
    try:
        return module(kind, how)(TensorDict(params)).select("sample", "score").cpu()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return type(error).__name__


@pytest.mark.parametrize("how", TYPES)
@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_estimates_are_those_of_the_cpu(kind: Callable[..., Distribution], how: str) -> None:
    found, expected = outcome(kind, how, DEVICE), outcome(kind, how, "cpu")
    if how == "mean" and kind.__name__ in MEANS_OF_DRAWS and isinstance(expected, TensorDict):
        assert isinstance(found, TensorDict)
        torch.testing.assert_close(found["sample"], expected["sample"], atol=0.2, rtol=0)
    else:
        assert_alike(found, expected)


@pytest.mark.filterwarnings("ignore:Singular sample detected")  # of Wishart
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_draws_are_on_the_device_and_scored_there(kind: type[Distribution]) -> None:
    params = {key: value.to(DEVICE) for key, value in EVERY[kind].items()}
    td = module(kind, "random")(TensorDict(params))
    assert td["sample"].device == td["score"].device == DEVICE
    far = TensorDict({**EVERY[kind], "sample": td["sample"].cpu()})
    expected = module(kind, "random").log_prob(far)
    torch.testing.assert_close(td["score"].cpu(), expected, rtol=1e-3, atol=1e-4)


def normal(**options: object) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["x"],
        distribution_class=Normal,
        default_interaction_type="random",
        **options,  # type: ignore[arg-type]  # options of the class
    )


def params() -> TensorDict:
    return TensorDict(
        {"loc": torch.zeros(4, device=DEVICE), "scale": torch.ones(4, device=DEVICE)}, [4]
    )


@pytest.mark.parametrize("kind", ["generator", "seed"])
def test_a_generator_of_the_device_makes_draws_repeatable(kind: str) -> None:
    def draws() -> list[Tensor]:
        source = torch.Generator(DEVICE).manual_seed(3) if kind == "generator" else 3
        one = normal(generator=source)
        return [one(params())["x"] for _ in range(3)]

    first = draws()
    torch.manual_seed(1)
    expected = torch.randn(4, device=DEVICE)
    torch.manual_seed(1)
    again = draws()
    assert torch.equal(torch.randn(4, device=DEVICE), expected)  # the global one did not move
    assert_alike(again, first)
    assert not torch.equal(first[0], first[1])


def test_a_generator_may_be_an_entry() -> None:
    one = normal(generator="rng")
    draws = [
        one(params().set("rng", torch.Generator(DEVICE).manual_seed(7)))["x"] for _ in range(2)
    ]
    assert torch.equal(draws[0], draws[1])


def test_a_sequence_scores_what_it_drew() -> None:
    torch.manual_seed(0)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(torch.nn.Linear(3, 4), ["obs"], ["loc"]),
        TensorDictModule(torch.nn.functional.softplus, ["loc"], ["scale"]),
        normal(return_log_prob=True, log_prob_key="score"),
    ).to(DEVICE)
    td = actor(TensorDict({"obs": torch.rand(5, 3, device=DEVICE)}, [5]))
    assert_alike(actor.log_prob(td.select("obs", "x")), td["score"])
    assert_alike(actor.get_dist(td).log_prob(td["x"]), td["score"])


def test_a_composite_is_on_the_device() -> None:
    ones = torch.ones(3, device=DEVICE)
    composite = CompositeDistribution(
        TensorDict({"a": {"loc": ones, "scale": ones}, "b": {"loc": -ones, "scale": ones}}, [3]),
        distribution_map={"a": Normal, "b": Normal},
    )
    drawn: Any = composite.rsample()
    assert drawn["a"].device == drawn["b"].device == DEVICE
    scores: Any = composite.log_prob(drawn)
    for key, loc in {"a": ones, "b": -ones}.items():
        expected = -(drawn[key] - loc).square() / 2 - math.log(2 * math.pi) / 2
        assert_alike(scores[f"{key}_log_prob"], expected)
