from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Normal

from kd_core import TensorDict
from kd_nn import (
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
    set_skip_existing,
)
from kd_nn.fx import symbolic_trace
from kd_probabilistic import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    ScoringModule,
    set_interaction_type,
)

ONE = torch.ones(3)


def steps(**options: object) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        TensorDictModule(nn.Linear(4, 8), ["x"], ["p"]),
        TensorDictModule(NormalParamExtractor(), ["p"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=Normal,
            **options,  # type: ignore[arg-type]  # any option
        ),
    ]


def data() -> TensorDict:
    return TensorDict({"x": torch.linspace(-1, 1, 12).view(3, 4)}, [3])


def one(model: ProbabilisticTensorDictSequential) -> Tensor:
    """Call a model that has one output, by keyword."""
    output = model(x=data()["x"])
    assert isinstance(output, Tensor)
    return output


def log_density(dist: Distribution, value: Tensor) -> Tensor:
    result: Tensor = dist.log_prob(value)
    return result


def test_actor_writes_value_and_log_prob() -> None:
    actor = ProbabilisticTensorDictSequential(*steps(return_log_prob=True))
    td = actor(data())
    assert torch.equal(td["action"], td["loc"])
    expected = log_density(Normal(td["loc"], td["scale"]), td["action"])
    torch.testing.assert_close(td["action_log_prob"], expected)
    assert actor.out_keys[-2:] == ["action", "action_log_prob"]


def test_selected_outputs_are_returned_alone() -> None:
    actor = ProbabilisticTensorDictSequential(*steps(), selected_out_keys=["action"])
    assert one(actor).shape == (3, 4)
    assert set(actor(data()).keys()) == {"x", "action"}


def test_random_draws_differ_and_repeat_with_the_seed() -> None:
    actor = ProbabilisticTensorDictSequential(*steps()).select_out_keys("action")
    with set_interaction_type("random"):
        torch.manual_seed(1)
        first, second = one(actor), one(actor)
        torch.manual_seed(1)
        again = actor(data())["action"]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_distribution_and_its_parameters_are_accessible() -> None:
    actor = ProbabilisticTensorDictSequential(*steps())
    td = data()
    params = actor.get_dist_params(td, apart := TensorDict())
    assert params is apart
    assert {"loc", "scale"} <= set(params.keys())
    assert set(td.keys()) == {"x"}
    assert actor.get_dist_params(td) is td
    assert torch.equal(td["loc"], params["loc"])
    dist = actor.build_dist_from_params(params)
    torch.testing.assert_close(dist.mean, actor.get_dist(td).mean)
    assert (actor.dist_params_keys, actor.dist_sample_keys) == (["loc", "scale"], ["action"])


def test_parameters_of_a_distribution_are_in_the_container_afterwards() -> None:
    actor = ProbabilisticTensorDictSequential(*steps())
    for call in (actor.get_dist, actor.log_prob):
        td, out = data().set("action", torch.zeros(3, 4)), TensorDict()
        call(td, out)
        assert set(td.keys()) == {"x", "action"}
        call(td)
        written = set(td.keys()) - {"x", "action"}
        assert {"loc", "scale"} <= written == set(out.keys())
        assert torch.equal(td["action"], torch.zeros(3, 4))
    composite = ProbabilisticTensorDictSequential(*steps(), return_composite=True)
    td = data()
    composite.get_dist(td)
    assert set(td.keys()) == {"x"}


def test_log_prob_scores_the_value_in_the_container() -> None:
    actor = ProbabilisticTensorDictSequential(*steps())
    td = data().set("action", torch.zeros(3, 4))
    expected = log_density(actor.get_dist(td), torch.zeros(3, 4))
    assert torch.equal(actor.log_prob(td, aggregate=True), expected)
    assert torch.equal(actor.log_prob(td, dist=actor.get_dist(td), aggregate=True), expected)


def test_value_produced_earlier_is_scored() -> None:
    first = TensorDictModule(torch.tanh, ["x"], ["action"])
    actor = ProbabilisticTensorDictSequential(first, *steps())
    assert isinstance(actor[-1], ScoringModule)
    td = actor(data())
    assert torch.equal(td["action"], data()["x"].tanh())
    expected = log_density(Normal(td["loc"], td["scale"]), td["action"])
    torch.testing.assert_close(td["action_log_prob"], expected)
    torch.testing.assert_close(actor.log_prob(data()), expected)


def test_scoring_by_keyword_and_in_a_dict_of_steps() -> None:
    named = dict(zip("abc", steps(), strict=True))
    score = ProbabilisticTensorDictSequential(
        {"first": TensorDictModule(torch.tanh, ["x"], ["action"]), **named}
    ).select_out_keys("action_log_prob")
    assert one(score).shape == (3, 4)


def test_probabilistic_module_in_the_middle() -> None:
    actor = ProbabilisticTensorDictSequential(
        *steps(), TensorDictModule(torch.neg, ["action"], ["negative"])
    )
    td = actor(data())
    assert torch.equal(td["negative"], -td["action"])
    assert torch.equal(actor.get_dist(data()).mean, td["loc"])


def test_two_probabilistic_modules_use_the_value_of_the_first() -> None:
    latent = ProbabilisticTensorDictModule(
        {"loc": "x", "scale": "s"}, ["p"], distribution_class=Normal
    )
    actor = ProbabilisticTensorDictSequential(latent, *steps()[1:], return_composite=False)
    td = TensorDict({"x": torch.zeros(3, 4), "s": torch.ones(3, 4)}, [3])
    assert torch.equal(actor.get_dist(td).mean, torch.zeros(3, 2))


def test_nested_sequence_gives_its_distribution() -> None:
    inner = ProbabilisticTensorDictSequential(*steps()[1:])
    actor = ProbabilisticTensorDictSequential(steps()[0], inner)
    flat = ProbabilisticTensorDictSequential(*steps())
    torch.testing.assert_close(actor.get_dist(data()).mean, flat.get_dist(data()).mean)
    assert actor.dist_sample_keys == ["action"]


def test_slices_and_subsequences_keep_the_kind() -> None:
    actor = ProbabilisticTensorDictSequential(*steps())
    assert isinstance(actor[1:], ProbabilisticTensorDictSequential)
    cut = actor.select_subsequence(in_keys=["p"])
    assert cut.in_keys == ["p"]
    assert cut.dist_sample_keys == ["action"]


def test_subsequence_cuts_nested_sequences_too() -> None:
    aside = TensorDictModule(torch.neg, ["aside"], ["unread"])
    inner = ProbabilisticTensorDictSequential(aside, *steps())
    last = TensorDictModule(torch.neg, ["action"], ["cost"])
    model = ProbabilisticTensorDictSequential(inner, last)
    cut = model.select_subsequence(out_keys=["cost"])
    assert (cut.in_keys, len(cast("TensorDictSequential", cut[0]))) == (["x"], 3)
    torch.testing.assert_close(cut(data())["cost"], model(data().set("aside", ONE))["cost"])
    before = model.select_subsequence(in_keys=["x"], out_keys=["loc"])
    assert type(before) is type(before[0]) is TensorDictSequential
    assert before.out_keys == ["p", "loc", "scale"]
    assert model.select_subsequence(in_keys=["aside"]).out_keys == ["unread"]
    inner.select_out_keys("action")
    assert model.select_subsequence(out_keys=["cost"]).out_keys == ["action", "cost"]


def test_subsequence_needs_no_generator() -> None:
    model = ProbabilisticTensorDictSequential(*steps(generator="rng"))
    assert model.select_subsequence(in_keys=["x"]).out_keys[-1] == "action"


@pytest.mark.parametrize("mode", ["deterministic", "random"])
def test_fx_traces_an_actor_with_its_distribution_as_one_call(mode: str) -> None:
    actor = ProbabilisticTensorDictSequential(*steps(return_log_prob=True))
    traced = symbolic_trace(actor.select_out_keys("action", "action_log_prob"))
    assert [str(n.target) for n in traced.graph.nodes if n.op == "call_module"] == ["0.module", "2"]
    with set_interaction_type(mode):
        torch.manual_seed(1)
        expected = actor(data())
        torch.manual_seed(1)
        found = traced(data())
    assert set(found.keys()) == {"x", "action", "action_log_prob"}
    assert torch.equal(found["action"], expected["action"])
    assert torch.equal(found["action_log_prob"], expected["action_log_prob"])


def test_sequence_without_a_distribution_is_refused() -> None:
    with pytest.raises(TypeError, match="must have a `ProbabilisticTensorDictModule` among its 2"):
        ProbabilisticTensorDictSequential(*steps()[:2])


def test_compiled_actor_follows_the_interaction_type() -> None:
    actor = ProbabilisticTensorDictSequential(*steps()).select_out_keys("action")
    compiled = torch.compile(actor, fullgraph=True, backend="eager")
    td = data()
    torch.testing.assert_close(compiled(td)["action"], actor(data())["action"])
    with set_interaction_type("random"):
        torch.manual_seed(0)
        drawn = compiled(data())["action"]
        torch.manual_seed(0)
        torch.testing.assert_close(drawn, actor(data())["action"])


@pytest.mark.parametrize("kind", [tuple, nn.ModuleList])
def test_steps_in_one_list_score_too(kind: type) -> None:
    values = TensorDictModule(torch.tanh, ["x"], ["action"])
    *network, scored = steps(return_log_prob=True)
    model = ProbabilisticTensorDictSequential(kind([*network, values, scored]))
    assert isinstance(model[-1], ScoringModule)


def test_module_that_is_appended_scores_what_is_there() -> None:
    *network, drawn = steps(return_log_prob=True)
    values = TensorDictModule(torch.tanh, ["loc"], ["action"])
    other = ProbabilisticTensorDictModule(["loc", "scale"], ["y"], distribution_class=Normal)
    model = ProbabilisticTensorDictSequential(*network, other, values).append(drawn)
    td = model(data())
    assert torch.equal(td["action"], td["loc"].tanh())
    expected = log_density(Normal(td["loc"], td["scale"]), td["action"])
    torch.testing.assert_close(td["action_log_prob"], expected)


@pytest.mark.parametrize("first", ["draw", "step"])
def test_a_discarded_value_is_not_scored_for_another_that_was_discarded(first: str) -> None:
    def discarding(key: str) -> ProbabilisticTensorDictModule:
        return ProbabilisticTensorDictModule(
            ["loc", "scale"], distribution_class=Normal, return_log_prob=True, log_prob_key=key
        )

    before = discarding("p") if first == "draw" else TensorDictModule(torch.neg, ["loc"], ["_"])
    model = ProbabilisticTensorDictSequential(before, discarding("q"))
    assert isinstance(model[1], ProbabilisticTensorDictModule)
    td = model(TensorDict({"loc": ONE, "scale": ONE}, [3]))
    torch.testing.assert_close(td["q"], log_density(Normal(ONE, ONE), ONE))


def test_scores_that_exist_are_skipped() -> None:
    coin = ProbabilisticTensorDictModule(["probs"], ["toss"], distribution_class=Bernoulli)
    td = TensorDict(toss=ONE, toss_log_prob=ONE)
    with set_skip_existing(True):
        assert ScoringModule(coin)(td) is td
    assert torch.equal(td["toss_log_prob"], ONE)


def test_scores_of_checked_distributions_export_by_container() -> None:
    coin = ProbabilisticTensorDictModule(["probs"], ["toss"], distribution_class=Bernoulli)
    td = TensorDict({"probs": ONE / 4, "toss": ONE}, [3])
    checked = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    try:
        program = torch.export.export(ScoringModule(coin), (td,))
    finally:
        torch.distributions.Distribution.set_default_validate_args(checked)
    torch.testing.assert_close(program.module()(td)["toss_log_prob"].exp(), ONE / 4)


@pytest.mark.parametrize("nested", [False, True])
def test_several_draws_are_written_where_the_call_says(nested: bool) -> None:
    actor = ProbabilisticTensorDictSequential(*steps(num_samples=5))
    actor = ProbabilisticTensorDictSequential(actor) if nested else actor
    for batch in ([5, 3], []):
        td, out = data(), TensorDict({"kept": torch.ones(5, 3)}, batch)
        assert actor(td, tensordict_out=out) is out
        assert list(out.keys()) == ["kept", "p", "loc", "scale", "action"]
        assert out["action"].shape == (5, 3, 4)
        assert list(td.keys()) == ["x"]
    out = TensorDict(batch_size=[3])
    with pytest.raises(ValueError, match=r"must start with \(3,\), got \(5, 3, 8\)"):
        actor(data(), tensordict_out=out)
    assert out.is_empty()
    actor.inplace = "empty"
    made = actor(data())
    assert made.batch_size == (5, 3)
    assert list(made.keys()) == ["p", "loc", "scale", "action"]


@pytest.mark.parametrize("nested", [False, True])
def test_several_draws_come_without_what_is_not_selected(nested: bool) -> None:
    parts = steps(num_samples=5)
    hidden = TensorDictModule(torch.neg, ["x"], [("n", "m", "minus")])
    actor = ProbabilisticTensorDictSequential(hidden, *parts).select_out_keys("action", "loc")
    model = ProbabilisticTensorDictSequential(actor) if nested else actor
    made = model(data().set("scale", torch.ones(3, 4)))
    assert made.batch_size == (5, 3)
    assert set(made.keys()) == {"x", "loc", "scale", "action"}
