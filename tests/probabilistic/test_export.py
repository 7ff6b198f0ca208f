"""Every distribution that can, exports by keyword in deterministic mode, checks left alone."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import pytest
import torch
from tests.probabilistic.cases import EVERY, LOC_SCALE, POSITIVE, REAL, SETTINGS, build
from torch import Tensor, nn
from torch import distributions as d
from torch.distributions import Distribution
from torch.export import Dim, export

from kd_core import TensorDict
from kd_nn import NormalParamExtractor, TensorDictModule
from kd_probabilistic import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_interaction_type,
)

DETERMINISTIC = [kind for kind in EVERY if kind not in (d.Wishart, d.LKJCholesky)]
RANDOM = [kind for kind in EVERY if kind not in (d.Wishart, d.VonMises)]
Params: TypeAlias = dict[str, Tensor] | TensorDict


pytestmark = pytest.mark.usefixtures("checks_values")


def module(kind: Callable[..., Distribution], mode: str) -> ProbabilisticTensorDictModule:
    settings = SETTINGS.get(kind) if isinstance(kind, type) else None
    return ProbabilisticTensorDictModule(
        list(EVERY[kind]),
        ["x"],
        distribution_class=kind,
        distribution_kwargs=settings,
        default_interaction_type=mode,
        return_log_prob=mode == "random",
    )


class Every(nn.Module):
    """One module for each kind, so that all are exported at once."""

    def __init__(self) -> None:
        super().__init__()
        made = {kind.__name__: module(kind, "deterministic") for kind in DETERMINISTIC}
        self.named = nn.ModuleDict(made)

    def forward(self, given: Mapping[str, Params]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, made in self.named.items():
            params = given[name]
            try:
                found[name] = made(**params) if isinstance(params, dict) else made(params)["x"]
            except Exception as error:
                error.add_note(f"It is raised for {name}.")
                raise
        return found


@pytest.mark.parametrize("form", [dict, TensorDict])
def test_deterministic_values_export(form: Callable[[dict[str, Tensor]], Params]) -> None:
    every = Every()
    given = {kind.__name__: form(EVERY[kind]) for kind in DETERMINISTIC}
    found = export(every, (given,)).module()(given)
    for kind in DETERMINISTIC:
        expected = every.named[kind.__name__](**EVERY[kind])
        assert torch.allclose(found[kind.__name__], expected, equal_nan=True), kind
    assert Distribution._validate_args is True


@pytest.mark.parametrize("kind", RANDOM, ids=lambda kind: getattr(kind, "__name__", ""))
def test_draws_export_with_their_log_prob(kind: Callable[..., Distribution]) -> None:
    made, params = module(kind, "random"), EVERY[kind]
    program = export(made, (), params).module()
    value, score = program(**params)
    dist = build(kind)
    assert value.shape == dist.batch_shape + dist.event_shape
    torch.testing.assert_close(score, made.log_prob(TensorDict({**params, "x": value})))


@pytest.mark.parametrize("mode", ["deterministic", "random"])
@pytest.mark.parametrize("kind", [d.Wishart, d.VonMises, d.LKJCholesky])
def test_what_cannot_be_exported_is_refused_with_a_message(
    kind: Callable[..., Distribution], mode: str
) -> None:
    made, params = module(kind, mode), EVERY[kind]
    if kind in (DETERMINISTIC if mode == "deterministic" else RANDOM):
        return
    with pytest.raises(NotImplementedError, match=f"{kind.__name__}.* (reads values of|has no)"):
        export(made, (), params)


@pytest.mark.parametrize("strict", [False, True])
def test_actor_exports_with_a_dynamic_batch_and_its_log_prob(strict: bool) -> None:
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 6), ["x"], ["p"]),
        TensorDictModule(NormalParamExtractor(), ["p"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["a"], distribution_class=d.Normal, return_log_prob=True
        ),
    ).select_out_keys("a", "a_log_prob")
    shapes = {"x": {0: Dim("batch")}}
    program = export(actor, (), {"x": torch.randn(3, 4)}, dynamic_shapes=shapes, strict=strict)
    x = torch.randn(7, 4)
    for got, expected in zip(program.module()(x=x), actor(x=x), strict=True):
        torch.testing.assert_close(got, expected)


def test_random_draw_exports() -> None:
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["x"], distribution_class=d.Normal, default_interaction_type="random"
    )
    program = export(module, (), LOC_SCALE, strict=False)
    assert not torch.equal(program.module()(**LOC_SCALE), program.module()(**LOC_SCALE))


def test_interaction_type_around_the_export_decides() -> None:
    module = ProbabilisticTensorDictModule(["loc", "scale"], ["x"], distribution_class=d.LogNormal)
    with set_interaction_type("mode"):
        program = export(module, (), LOC_SCALE, strict=False)
    expected = (REAL - POSITIVE**2).exp()
    torch.testing.assert_close(program.module()(**LOC_SCALE), expected)


def test_values_are_checked_again_after_an_export() -> None:
    module = ProbabilisticTensorDictModule(["rate"], ["x"], distribution_class=d.Exponential)
    export(module, (), {"rate": POSITIVE}, strict=False)
    with pytest.raises(ValueError, match="Expected parameter rate"):
        module(rate=-POSITIVE)


class Scored(nn.Module):
    """Returns the log-probability of values in a container, by keyword."""

    def __init__(self, model: ProbabilisticTensorDictSequential, aggregate: bool | None) -> None:
        super().__init__()
        self.model, self.aggregate = model, aggregate

    def forward(self, **values: torch.Tensor) -> object:
        td = TensorDict(values)
        score = self.model.log_prob(td, aggregate=self.aggregate)
        return score.to_dict() if isinstance(score, TensorDict) else score


def one_value() -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        ProbabilisticTensorDictModule(
            {"loc": "x", "scale": "s"}, ["z"], distribution_class=d.Normal
        )
    )


def two_values() -> ProbabilisticTensorDictSequential:
    coin = ProbabilisticTensorDictModule({"logits": "z"}, ["y"], distribution_class=d.Bernoulli)
    return ProbabilisticTensorDictSequential(*one_value(), coin)


@pytest.mark.parametrize("aggregate", [None, False, True])
@pytest.mark.parametrize("make", [one_value, two_values])
def test_a_score_of_given_values_exports(
    make: Callable[[], ProbabilisticTensorDictSequential], aggregate: bool | None
) -> None:
    values = {"x": REAL, "s": POSITIVE, "z": REAL / 2, "y": torch.ones_like(REAL)}
    scored = Scored(make(), aggregate)
    program = export(scored, (), values, strict=False)
    torch.testing.assert_close(program.module()(**values), scored(**values))
    assert Distribution._validate_args is True
    rows = torch.vmap(lambda x, s, z, y: scored(x=x, s=s, z=z, y=y))(*values.values())
    assert torch.utils._pytree.tree_leaves(rows)[0].shape[0] == REAL.shape[0]
    if make is two_values:
        with pytest.raises(ValueError, match="to be within the support"):
            scored(**{**values, "y": REAL / 3})
