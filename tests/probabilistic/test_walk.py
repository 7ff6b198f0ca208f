"""Sequences with several probabilistic modules: the distribution of all values, and their score."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Normal

from kd_core import InvalidArgument, TensorDict
from kd_nn import InputMissing, TensorDictModule, TensorDictSequential
from kd_probabilistic import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    ScoringModule,
    set_interaction_type,
)

ONE = torch.ones(3)


def latent(**options: object) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        **{
            "in_keys": {"loc": "x", "scale": "s"},
            "out_keys": ["z"],
            "distribution_class": Normal,
            "return_log_prob": True,
            **options,
        },  # type: ignore[arg-type]  # any option
    )


def outcome(**options: object) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        ["logits"],
        **{"out_keys": ["y"], "distribution_class": Bernoulli, "return_log_prob": True, **options},  # type: ignore[arg-type]  # any option
    )


def model(**options: object) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        latent(),
        TensorDictModule(lambda z: 2 * z, ["z"], ["logits"]),
        outcome(),
        TensorDictModule(torch.neg, ["y"], ["loss"]),
        **options,  # type: ignore[arg-type]  # any option
    )


def data(**values: Tensor) -> TensorDict:
    return TensorDict({"x": torch.zeros(3), "s": ONE.clone(), **values}, [3])


def density(dist: Distribution, value: Tensor) -> Tensor:
    result: Tensor = dist.log_prob(value)
    return result


SCORED = {"z": torch.tensor([0.5, -1.0, 2.0]), "y": torch.tensor([0.0, 1.0, 1.0])}


def exact() -> tuple[Tensor, Tensor]:
    z, y = SCORED["z"], SCORED["y"]
    return density(Normal(0.0, 1.0), z), density(Bernoulli(logits=2 * z), y)


@pytest.mark.parametrize("nested", [False, True])
def test_the_distribution_of_all_values_is_composite(nested: bool) -> None:
    made = ProbabilisticTensorDictSequential(model()) if nested else model()
    dist = made.get_dist(data())
    assert isinstance(dist, CompositeDistribution)
    assert list(dist) == ["z", "y"]
    assert made.dist_sample_keys == ["z", "y"]
    assert made.dist_params_keys == ["x", "s", "logits"]
    assert made.log_prob_keys == ["z_log_prob", "y_log_prob"]


@pytest.mark.parametrize("nested", [False, True])
def test_values_in_the_container_are_scored_and_not_drawn_again(nested: bool) -> None:
    made = ProbabilisticTensorDictSequential(model()) if nested else model()
    td = data(**SCORED)
    scores = made.log_prob(td)
    assert isinstance(scores, TensorDict)
    assert scores.batch_size == (3,)
    torch.testing.assert_close((scores["z_log_prob"], scores["y_log_prob"]), exact())
    torch.testing.assert_close(made.log_prob(td, aggregate=True), sum(exact()))
    assert set(td.keys()) == {"x", "s", "z", "y"}


def test_the_last_alone_is_conditional_on_the_values_that_are_there() -> None:
    made = model(return_composite=False)
    assert isinstance(made.get_dist(data()), Bernoulli)
    torch.testing.assert_close(made.log_prob(data(**SCORED)), exact()[1])
    assert (made.dist_sample_keys, made.log_prob_key) == (["y"], "y_log_prob")
    drawn = made.log_prob(data(y=SCORED["y"]))  # the latent value is drawn
    torch.testing.assert_close(drawn, density(Bernoulli(logits=torch.zeros(3)), SCORED["y"]))


def test_one_module_can_be_asked_for_a_composite() -> None:
    made = ProbabilisticTensorDictSequential(latent(), return_composite=True)
    dist = made.get_dist(data())
    assert isinstance(dist, CompositeDistribution)
    scores = made.log_prob(data(**SCORED))
    assert isinstance(scores, TensorDict)
    torch.testing.assert_close(scores["z_log_prob"], exact()[0])


@pytest.mark.parametrize("missing", ["z", "y"])
def test_a_missing_value_is_not_scored(missing: str) -> None:
    values = {key: value for key, value in SCORED.items() if key != missing}
    with pytest.raises(KeyError, match=f"`{missing}`.* not found in the container"):
        model().log_prob(data(**values))


def test_a_distribution_that_was_built_scores_too() -> None:
    made, td = model(), data(**SCORED)
    dist = CompositeDistribution.from_distributions(
        td, {"z": Normal(torch.zeros(3), ONE), "y": Bernoulli(logits=2 * SCORED["z"])}
    )
    torch.testing.assert_close(made.log_prob(td, dist=dist, aggregate=True), sum(exact()))
    scores = made.log_prob(td, dist=dist)
    assert isinstance(scores, TensorDict)
    torch.testing.assert_close((scores["z_log_prob"], scores["y_log_prob"]), exact())
    with pytest.raises(TypeError, match="`CompositeDistribution` of all 2 probabilistic modules"):
        made.log_prob(td, dist=Normal(0.0, 1.0))
    with pytest.raises(TypeError, match=r"must be a container, got a distribution. Pass it as `di"):
        made.log_prob(td, dist)  # type: ignore[call-overload]  # the mistake


def test_what_the_steps_wrote_can_be_had() -> None:
    made = model()
    for call in (made.get_dist, made.get_dist_params):
        out = TensorDict(batch_size=[3])
        found = call(data(), out)
        assert set(out.keys()) == {"z", "z_log_prob", "logits"}
        assert call != made.get_dist_params or found is out
    out = TensorDict(batch_size=[3])
    made.log_prob(data(**SCORED), out)
    assert set(out.keys()) == {"logits"}
    assert torch.equal(out["logits"], 2 * SCORED["z"])


def test_one_value_drawn_and_scored_is_about_the_last_module() -> None:
    other = ProbabilisticTensorDictModule(
        {"loc": "x", "scale": "s"}, ["z"], distribution_class=Normal, log_prob_key="ratio"
    )
    made = ProbabilisticTensorDictSequential(latent(), ScoringModule(other))
    assert isinstance(made.get_dist(data()), Normal)
    assert made.log_prob_keys == ["ratio"]
    with pytest.raises(TypeError, match="must have different keys, got `z` twice"):
        ProbabilisticTensorDictSequential(
            latent(), ScoringModule(other), return_composite=True
        ).get_dist(data())


def test_discarded_values_have_no_place_in_a_composite() -> None:
    steps = latent(out_keys=None, log_prob_key="a"), outcome()
    assert isinstance(
        ProbabilisticTensorDictSequential(*steps).get_dist(data(logits=ONE)), Bernoulli
    )
    with pytest.raises(TypeError, match=r"must have different keys, got `_`. Give each"):
        ProbabilisticTensorDictSequential(*steps, return_composite=True).get_dist(data(logits=ONE))


def test_the_deterministic_part_shares_the_steps_before_the_last_value() -> None:
    made = model()
    part = made.det_part
    assert type(part) is TensorDictSequential
    assert list(part) == list(made)[:2]
    assert part.out_keys == ["z", "z_log_prob", "logits"]
    assert list(ProbabilisticTensorDictSequential(made).det_part[0]) == list(part)  # type: ignore[call-overload]  # a sequence
    named = ProbabilisticTensorDictSequential({"a": latent(), "b": outcome()})
    assert named.det_part["a"] is named["a"]


def test_settings_of_the_last_module_are_those_of_the_sequence() -> None:
    made = ProbabilisticTensorDictSequential(
        latent(), outcome(num_samples=4, default_interaction_type="random")
    )
    assert (made.num_samples, made.default_interaction_type) == (4, InteractionType.RANDOM)
    scored = ProbabilisticTensorDictSequential(ScoringModule(outcome(num_samples=3)))
    assert scored.num_samples == 3


def test_parts_without_a_distribution_are_plain_sequences() -> None:
    made = model(return_composite=False)
    assert type(made[1:2]) is TensorDictSequential
    assert type(made[3:]) is TensorDictSequential
    assert type(made.select_subsequence(["y"], ["loss"])) is TensorDictSequential
    part = made[1:]
    assert isinstance(part, ProbabilisticTensorDictSequential)
    assert part.return_composite is False
    assert part.dist_sample_keys == ["y"]


def test_steps_that_may_be_left_out_are_left_out() -> None:
    made = ProbabilisticTensorDictSequential(
        TensorDictModule(torch.neg, ["missing"], ["s"]), latent(), partial_tolerant=True
    )
    assert torch.equal(made.get_dist(data()).stddev, ONE)


@pytest.mark.parametrize("nested", [False, True])
def test_a_missing_generator_leaves_out_a_draw_alone(nested: bool) -> None:
    drawn = latent(generator="seed", default_interaction_type="random")
    step = ProbabilisticTensorDictSequential(drawn) if nested else drawn
    made = ProbabilisticTensorDictSequential(
        step, outcome(), partial_tolerant=True, return_composite=False
    )
    assert set(made(data(logits=ONE)).keys()) == {"x", "s", "logits", "y", "y_log_prob"}
    assert isinstance(made.get_dist(data(logits=ONE)), Bernoulli)
    out = TensorDict(batch_size=[3])
    made.get_dist_params(data(logits=ONE), out)
    assert list(out.keys()) == []
    with set_interaction_type("deterministic"):
        assert torch.equal(made(data(logits=ONE))["z"], torch.zeros(3))
        made.get_dist_params(data(logits=ONE), out)
    assert set(out.keys()) == {"z", "z_log_prob"}


def test_a_value_whose_parameters_are_missing_is_left_out_unless_it_is_asked_for() -> None:
    steps = latent(in_keys={"loc": "missing", "scale": "s"}), outcome()
    last = ProbabilisticTensorDictSequential(*steps, partial_tolerant=True, return_composite=False)
    assert isinstance(last.get_dist(data(logits=ONE)), Bernoulli)
    scored = last.log_prob(data(logits=ONE, y=ONE))
    torch.testing.assert_close(scored, density(Bernoulli(logits=ONE), ONE))
    every = ProbabilisticTensorDictSequential(*steps, partial_tolerant=True)
    with pytest.raises(InputMissing, match="`Normal` reads `missing`, which was not found"):
        every.get_dist(data(logits=ONE))


def test_values_of_several_draws() -> None:
    made = ProbabilisticTensorDictSequential(
        latent(num_samples=5, default_interaction_type="random"),
        TensorDictModule(lambda z: 2 * z, ["z"], ["logits"]),
        outcome(),
        return_composite=False,
    )
    td = made(data())
    assert td["y"].shape == (5, 3)
    assert made.get_dist(data()).batch_shape == (5, 3)
    whole = ProbabilisticTensorDictSequential(*made)
    with pytest.raises(
        ValueError, match=r"batch shape of `y` must start with .* \(3,\), got \(5, 3\)"
    ):
        whole.get_dist(data())


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
@pytest.mark.parametrize("name", ["get_dist", "log_prob"])
def test_a_container_to_write_is_untouched_by_an_error(name: str) -> None:
    twice = ProbabilisticTensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["m"]),
        latent(),
        ProbabilisticTensorDictSequential(latent(out_keys=["z"], log_prob_key="again")),
        return_composite=True,
    )
    out = TensorDict(batch_size=[3])
    with pytest.raises(InvalidArgument, match="must have different keys, got `z` twice"):
        getattr(twice, name)(data(z=ONE), out)
    assert list(out.keys()) == []


def test_a_value_that_cannot_be_scored_leaves_the_container_to_write() -> None:
    checked = outcome(distribution_kwargs={"validate_args": True})
    out = TensorDict(batch_size=[3])
    with pytest.raises(ValueError, match="to be within the support"):
        ProbabilisticTensorDictSequential(*model()[:2], checked).log_prob(
            data(z=ONE, y=ONE / 2), out
        )
    assert list(out.keys()) == []
