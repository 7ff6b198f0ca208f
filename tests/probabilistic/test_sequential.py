"""Sequences with probabilistic modules: distributions, scores, and the values of several."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Normal

from kd_core import InvalidArgument, NestedKey, TensorDict, TensorDictBase
from kd_nn import (
    InputMissing,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
    WrapModule,
    set_skip_existing,
)
from kd_nn.fx import symbolic_trace
from kd_probabilistic import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    ScoringModule,
    interaction_type,
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


def seeded(key: str) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        ["loc", "scale"],
        [key],
        distribution_class=Normal,
        generator="seed",
        default_interaction_type="random",
    )


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", [TensorDictSequential, ProbabilisticTensorDictSequential])
def test_a_seed_advances_through_sequences(whole: bool, kind: type[TensorDictSequential]) -> None:
    """Each step draws other numbers, also after a sequence inside; so does the next call."""
    steps = (seeded("x"), seeded("y"))
    model = kind(*steps) if whole else kind(kind(steps[0]), steps[1])
    found = []
    for seed in (torch.tensor(49), 49):
        td = TensorDict({"loc": torch.zeros(3), "scale": torch.ones(3)}, [3])
        if isinstance(seed, Tensor):
            td.batch_size = []
            td.set("seed", seed)
        else:
            td.set_non_tensor("seed", seed)
        for _ in range(2):
            model(td)
            found += [td["x"].clone(), td["y"].clone()]
    assert len({tuple(draw.tolist()) for draw in found}) == 4
    assert all(torch.equal(a, b) for a, b in zip(found[:4], found[4:], strict=True))


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


def test_what_functions_write_before_the_distribution_is_in_the_input() -> None:
    inner = TensorDictSequential(
        WrapModule(lambda td: td.set("own", td["x"] + 1)), TensorDictModule(torch.neg, ["x"], ["m"])
    )
    actor = ProbabilisticTensorDictSequential(inner, *steps())
    for ask in (actor.get_dist, actor.get_dist_params):
        ask(td := data())
        assert list(td.keys())[:3] == ["x", "own", "m"]
        assert torch.equal(td["own"], td["x"] + 1)


@pytest.mark.parametrize("inplace", [False, "empty"])
def test_steps_that_write_elsewhere_leave_the_input_of_get_dist(inplace: Any) -> None:
    module = TensorDictModule(lambda x: (x, x.exp()), ["x"], ["loc", "scale"], inplace=inplace)
    draw = ProbabilisticTensorDictModule(["loc", "scale"], ["a"], distribution_class=Normal)
    td = TensorDict({"x": torch.zeros(3, 2)}, [3])
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["m"]), module, draw
    )
    params = actor.get_dist_params(td)
    assert actor.get_dist(td).mean.shape == (3, 2)
    assert (list(td.keys()), list(params.keys())) == (["x", "m"], ["loc", "scale"])
    whole = ProbabilisticTensorDictSequential(*actor, return_composite=True)
    assert cast(TensorDict, whole.get_dist(td).mean).batch_size == params.batch_size


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
    actor = ProbabilisticTensorDictSequential(first, *steps(return_log_prob=True))
    td = actor(data())
    assert torch.equal(td["action"], data()["x"].tanh())
    expected = log_density(Normal(td["loc"], td["scale"]), td["action"])
    torch.testing.assert_close(td["action_log_prob"], expected)
    torch.testing.assert_close(actor.log_prob(data()), expected)


def test_value_produced_earlier_is_scored_only_where_a_log_prob_is_asked_for() -> None:
    first = TensorDictModule(torch.tanh, ["x"], ["action"])
    actor = ProbabilisticTensorDictSequential(first, *steps())
    assert actor.out_keys == ["p", "loc", "scale", "action"]
    for _ in range(3):  # by the interpreter and by a plan
        td = actor(data())
        assert "action_log_prob" not in td
        assert torch.equal(td["action"], data()["x"].tanh())
    assert actor.log_prob_keys == ["action_log_prob"]
    expected = log_density(Normal(td["loc"], td["scale"]), td["action"])
    torch.testing.assert_close(actor.log_prob(data()), expected)
    last = actor[-1]
    assert isinstance(last, ProbabilisticTensorDictModule)
    last.return_log_prob = True
    for _ in range(3):
        torch.testing.assert_close(actor(data())["action_log_prob"], expected)
    assert copy.deepcopy(actor).out_keys == actor.out_keys


def test_scoring_by_keyword_and_in_a_dict_of_steps() -> None:
    named = dict(zip("abc", steps(return_log_prob=True), strict=True))
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
    mean: object = actor.get_dist(data()).mean
    assert isinstance(mean, TensorDictBase)
    assert torch.equal(mean["action"], td["loc"])
    alone = ProbabilisticTensorDictSequential(*actor, return_composite=False)
    assert torch.equal(alone.get_dist(data()).mean, td["loc"])


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


def recorded(seen: list[str], name: str) -> TensorDictModule:
    def step(x: Tensor) -> Tensor:
        kind = interaction_type()
        seen.append(f"{name} {'-' if kind is None else kind.value}")
        return x

    return TensorDictModule(step, ["x"], [name])


def valued(name: str, kind: str) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        {"loc": "x", "scale": "s"}, [name], distribution_class=Normal, default_interaction_type=kind
    )


@pytest.mark.parametrize("call", ["plan", "tensors", "get_dist", "params"])
@pytest.mark.parametrize("inner", [False, True])
def test_steps_before_the_last_one_see_its_interaction_type(call: str, inner: bool) -> None:
    seen: list[str] = []
    last: nn.Module = valued("a", "mean")
    if inner:
        last = ProbabilisticTensorDictSequential(recorded(seen, "q"), last)
    made = ProbabilisticTensorDictSequential(recorded(seen, "p"), last)
    td = TensorDict({"x": torch.zeros(3), "s": ONE}, [3])
    names = ["p mean", "q mean"][: 1 + inner]

    def run(model: ProbabilisticTensorDictSequential) -> None:
        if call == "tensors":
            model(x=td["x"], s=td["s"])
        elif call == "get_dist":
            model.get_dist(td)
        elif call == "params":
            model.get_dist_params(td)
        else:
            model(td)

    for _ in range(3 if call in ("plan", "tensors") else 1):
        seen.clear()
        run(made)
        assert seen == names
        assert interaction_type() is None
    with set_interaction_type("random"):
        seen.clear()
        run(made)
        assert seen == [name.replace("mean", "random") for name in names]
    assert interaction_type() is None


def test_compiled_steps_before_the_last_one_see_its_interaction_type() -> None:
    def step(x: Tensor) -> Tensor:
        return x + 1 if interaction_type() is InteractionType.MEAN else x

    made = ProbabilisticTensorDictSequential(
        TensorDictModule(step, ["x"], ["p"]),
        valued("a", "mean"),
        TensorDictModule(step, ["x"], ["q"]),
        return_composite=False,
    )
    made.compile(backend="eager", fullgraph=True)
    td = TensorDict({"x": torch.zeros(3), "s": ONE}, [3])
    for _ in range(2):
        found = made(td.copy())
        assert [found["p"][0].item(), found["q"][0].item()] == [1, 0]
    with set_interaction_type("median"):
        assert made(td.copy())["p"][0] == 0


def test_steps_of_a_composite_see_no_interaction_type() -> None:
    seen: list[str] = []
    made = ProbabilisticTensorDictSequential(
        recorded(seen, "p"), valued("a", "mean"), recorded(seen, "q"), valued("b", "random")
    )
    td = TensorDict({"x": torch.zeros(3), "s": ONE}, [3])
    made(td), made(td), made.get_dist(td)
    assert seen == ["p -", "q -"] * 3
    made.get_dist_params(td)
    assert seen[-2:] == ["p random", "q random"]


def test_an_earlier_value_is_taken_as_the_last_one_says() -> None:
    made = ProbabilisticTensorDictSequential(
        valued("a", "mean"), valued("b", "random"), return_composite=False
    )
    for _ in range(3):
        assert made(TensorDict({"x": torch.zeros(3), "s": ONE}, [3]))["a"].any()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_step_that_fails_or_changes_steps_leaves_the_scope(replaces: bool) -> None:
    seen: list[str] = []
    made = ProbabilisticTensorDictSequential(
        recorded(seen, "p"), recorded(seen, "q"), valued("a", "mean")
    )
    td = TensorDict({"x": torch.zeros(3), "s": ONE}, [3])
    made(td), made(td)

    def odd(x: Tensor) -> Tensor:
        if not replaces:
            raise RuntimeError("no")
        cast(nn.ModuleList, made.module)[1] = recorded(seen, "q")
        return x

    made[0] = TensorDictModule(odd, ["x"], ["p"])
    for _ in range(3):
        seen.clear()
        if replaces:
            made(td)
            assert seen == ["q mean"]
        else:
            with pytest.raises(RuntimeError, match="no"):
                made(td)
        assert interaction_type() is None


def test_sequence_without_a_distribution_runs() -> None:
    model = ProbabilisticTensorDictSequential(*steps()[:2])
    assert model.default_interaction_type is None
    assert model.num_samples is None
    assert model.log_prob_keys == model.dist_sample_keys == model.dist_params_keys == []
    assert set(model.out_keys) <= set(model(data()).keys())
    for read in (model.get_dist, model.log_prob):
        with pytest.raises(RuntimeError, match="must have a `ProbabilisticTensorDictModule` among"):
            read(data())
    with pytest.raises(TypeError, match="among its 0 steps"):
        ProbabilisticTensorDictSequential()


def test_compiled_actor_follows_the_interaction_type() -> None:
    torch.compiler.reset()  # other models were compiled, and they count together
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
    assert torch.equal(model(data())["action"], data()["x"].tanh())
    assert model[-1] is scored


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


@pytest.mark.parametrize("chosen", [None, ["loc", "_"], ["loc"]])
@pytest.mark.parametrize("nested", [False, True])
def test_a_value_at_the_discarded_key_is_stored_where_it_is_drawn(
    chosen: list[NestedKey] | None, nested: bool
) -> None:
    split = TensorDictModule(lambda x: (x, x.exp()), ["x"], ["loc", "scale"])
    draw = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["_"], distribution_class=Normal, return_log_prob=True
    )
    model = ProbabilisticTensorDictSequential(split, draw)
    model = ProbabilisticTensorDictSequential(model) if nested else model
    if chosen is not None:
        model.select_out_keys(*chosen)
    keys = ["loc", "scale", "_", "__log_prob"] if chosen is None else chosen
    for _ in range(2):
        assert list(model(TensorDict({"x": ONE}, [3])).keys()) == ["x", *keys]
        out = model(TensorDict({"x": ONE}, [3]), tensordict_out=TensorDict({}, [3]))
        assert list(out.keys()) == keys


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


def latents(**values: Tensor) -> TensorDict:
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
    dist = made.get_dist(latents())
    assert isinstance(dist, CompositeDistribution)
    assert list(dist) == ["z", "y"]
    assert made.dist_sample_keys == ["y", "z"]
    assert made.dist_params_keys == ["logits", "x", "s"]
    assert made.log_prob_keys == ["y_log_prob", "z_log_prob"]


@pytest.mark.parametrize("nested", [False, True])
def test_values_in_the_container_are_scored_and_not_drawn_again(nested: bool) -> None:
    made = ProbabilisticTensorDictSequential(model()) if nested else model()
    td = latents(**SCORED)
    scores = made.log_prob(td)
    assert isinstance(scores, TensorDict)
    assert scores.batch_size == (3,)
    torch.testing.assert_close((scores["z_log_prob"], scores["y_log_prob"]), exact())
    torch.testing.assert_close(made.log_prob(td, aggregate=True), sum(exact()))
    assert set(td.keys()) == {"x", "s", "z", "y"}


def test_the_last_alone_is_conditional_on_the_values_that_are_there() -> None:
    made = model(return_composite=False)
    assert isinstance(made.get_dist(latents()), Bernoulli)
    torch.testing.assert_close(made.log_prob(latents(**SCORED)), exact()[1])
    assert (made.dist_sample_keys, made.log_prob_keys[0]) == (["y", "z"], "y_log_prob")
    drawn = made.log_prob(latents(y=SCORED["y"]))  # the latent value is drawn
    torch.testing.assert_close(drawn, density(Bernoulli(logits=torch.zeros(3)), SCORED["y"]))


def test_one_module_can_be_asked_for_a_composite() -> None:
    made = ProbabilisticTensorDictSequential(latent(), return_composite=True)
    dist = made.get_dist(latents())
    assert isinstance(dist, CompositeDistribution)
    scores = made.log_prob(latents(**SCORED))
    assert isinstance(scores, TensorDict)
    torch.testing.assert_close(scores["z_log_prob"], exact()[0])


@pytest.mark.parametrize("missing", ["z", "y"])
def test_a_missing_value_is_not_scored(missing: str) -> None:
    values = {key: value for key, value in SCORED.items() if key != missing}
    with pytest.raises(KeyError, match=f"`{missing}`.* not found in the container"):
        model().log_prob(latents(**values))


def test_a_distribution_that_was_built_scores_too() -> None:
    made, td = model(), latents(**SCORED)
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
    out = TensorDict(batch_size=[3])
    made.get_dist(latents(), out)
    assert {"z", "z_log_prob", "logits", "y", "y_log_prob"} < set(out.keys())
    out = TensorDict(batch_size=[3])
    assert made.get_dist_params(latents(), out) is out
    assert set(out.keys()) == {"z", "z_log_prob", "logits", "y", "y_log_prob"}
    out = TensorDict(batch_size=[3])
    made.log_prob(latents(**SCORED), out)
    assert set(out.keys()) == {"logits", "loss"}
    assert torch.equal(out["logits"], 2 * SCORED["z"])


def test_one_value_drawn_and_scored_is_about_the_last_module() -> None:
    other = ProbabilisticTensorDictModule(
        {"loc": "x", "scale": "s"}, ["z"], distribution_class=Normal, log_prob_key="ratio"
    )
    made = ProbabilisticTensorDictSequential(latent(), ScoringModule(other))
    assert isinstance(made.get_dist(latents()), Normal)
    assert made.log_prob_keys == ["ratio", "z_log_prob"]
    with pytest.raises(TypeError, match="must have different keys, got `z` twice"):
        ProbabilisticTensorDictSequential(
            latent(), ScoringModule(other), return_composite=True
        ).get_dist(latents())


def test_discarded_values_have_no_place_in_a_composite() -> None:
    steps = latent(out_keys=None, log_prob_key="a"), outcome()
    assert isinstance(
        ProbabilisticTensorDictSequential(*steps).get_dist(latents(logits=ONE)), Bernoulli
    )
    with pytest.raises(TypeError, match=r"must have different keys, got `_`. Give each"):
        ProbabilisticTensorDictSequential(*steps, return_composite=True).get_dist(
            latents(logits=ONE)
        )


def test_the_deterministic_part_shares_the_steps_before_the_last_value() -> None:
    made = model()
    part = made.det_part
    assert type(part) is TensorDictSequential
    assert list(part) == list(made)[:3]
    assert part.out_keys == ["z", "z_log_prob", "logits", "y", "y_log_prob"]
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
    assert torch.equal(made.get_dist(latents()).stddev, ONE)


@pytest.mark.parametrize("nested", [False, True])
def test_a_missing_generator_leaves_out_a_draw_alone(nested: bool) -> None:
    drawn = latent(generator="seed", default_interaction_type="random")
    step = ProbabilisticTensorDictSequential(drawn) if nested else drawn
    made = ProbabilisticTensorDictSequential(
        step,
        outcome(default_interaction_type="random"),
        partial_tolerant=True,
        return_composite=False,
    )
    assert set(made(latents(logits=ONE)).keys()) == {"x", "s", "logits", "y", "y_log_prob"}
    assert isinstance(made.get_dist(latents(logits=ONE)), Bernoulli)
    out = TensorDict(batch_size=[3])
    made.get_dist_params(latents(logits=ONE), out)
    assert list(out.keys()) == []
    with set_interaction_type("deterministic"):
        assert torch.equal(made(latents(logits=ONE))["z"], torch.zeros(3))
        made.get_dist_params(latents(logits=ONE), out)
    assert set(out.keys()) == {"z", "z_log_prob"}


def test_a_value_whose_parameters_are_missing_is_left_out_unless_it_is_asked_for() -> None:
    steps = latent(in_keys={"loc": "missing", "scale": "s"}), outcome()
    last = ProbabilisticTensorDictSequential(*steps, partial_tolerant=True, return_composite=False)
    assert isinstance(last.get_dist(latents(logits=ONE)), Bernoulli)
    scored = last.log_prob(latents(logits=ONE, y=ONE))
    torch.testing.assert_close(scored, density(Bernoulli(logits=ONE), ONE))
    every = ProbabilisticTensorDictSequential(*steps, partial_tolerant=True)
    with pytest.raises(InputMissing, match="`Normal` reads `missing`, which was not found"):
        every.get_dist(latents(logits=ONE))


def test_values_of_several_draws() -> None:
    made = ProbabilisticTensorDictSequential(
        latent(num_samples=5, default_interaction_type="random"),
        TensorDictModule(lambda z: 2 * z, ["z"], ["logits"]),
        outcome(),
        return_composite=False,
    )
    td = made(latents())
    assert td["y"].shape == (5, 3)
    assert made.get_dist(latents()).batch_shape == (5, 3)
    whole = ProbabilisticTensorDictSequential(*made)
    with pytest.raises(
        ValueError, match=r"batch shape of `z` must start with .* \(5, 3\), got \(3,\)"
    ):
        whole.get_dist(latents())


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
        getattr(twice, name)(latents(z=ONE), out)
    assert list(out.keys()) == []


def test_a_value_that_cannot_be_scored_leaves_the_container_to_write() -> None:
    checked = outcome(distribution_kwargs={"validate_args": True})
    out = TensorDict(batch_size=[3])
    with pytest.raises(ValueError, match="to be within the support"):
        ProbabilisticTensorDictSequential(*model()[:2], checked).log_prob(
            latents(z=ONE, y=ONE / 2), out
        )
    assert list(out.keys()) == []


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.abs() + 1


def test_a_value_is_scored_after_a_step_with_a_container_of_its_own() -> None:
    last = ProbabilisticTensorDictModule(["loc", "scale"], ["a"], distribution_class=Normal)
    first = TensorDictModule(both, ["x"], ["loc", "scale"], inplace=False)
    model = ProbabilisticTensorDictSequential(first, last)
    td = TensorDict({"x": ONE, "a": ONE * 2}, [3])
    score = model.log_prob(td, aggregate=True)
    assert torch.equal(score, Normal(ONE, ONE * 2).log_prob(ONE * 2))
    td = TensorDict({"x": ONE}, [3])
    with pytest.raises(ValueError, match="reads `a`"):  # as torch says of a value of `None`
        model.log_prob(td)


def test_what_a_function_writes_is_there_after_get_dist() -> None:
    def write(td: TensorDictBase) -> TensorDictBase:
        return td.set("loc", td["x"]).set("scale", td["x"].exp())

    last = ProbabilisticTensorDictModule(["loc", "scale"], ["a"], distribution_class=Normal)
    model = ProbabilisticTensorDictSequential(write, last)  # type: ignore[arg-type]  # a function
    td = TensorDict({"x": ONE}, [3])
    assert torch.equal(model.get_dist(td).mean, ONE)
    assert list(td.keys()) == ["x", "loc", "scale"]
    assert list(model.get_dist_params(TensorDict({"x": ONE}, [3])).keys()) == ["x", "loc", "scale"]


class Squared(ProbabilisticTensorDictModule):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]  # as users write it
        made = super().forward(tensordict)
        return made.set("squared", made["action"] ** 2)


def test_what_a_subclass_of_a_draw_writes_too_is_there_in_each_call() -> None:
    first, second, _ = steps()
    draw = Squared(["loc", "scale"], ["action"], distribution_class=Normal)
    model = TensorDictSequential(first, second, draw)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in (*[model] * 10, cast("TensorDictSequential", compiled)):  # a plan runs later
        made = call(data())
        assert list(made.keys()) == ["x", "p", "loc", "scale", "action", "squared"]
        torch.testing.assert_close(made["squared"], made["action"] ** 2)


def test_steps_that_are_assigned_again_score_a_value_that_is_written_before() -> None:
    class Twice(ProbabilisticTensorDictSequential):
        def __init__(self, *modules: nn.Module) -> None:
            super().__init__(*modules)
            TensorDictModule.__init__(self, nn.ModuleList(modules), ["x"], ["loc", "scale", "a"])

    def net(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x.exp(), x + 7

    first = TensorDictModule(net, ["x"], ["loc", "scale", "a"])
    draw = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["a"], distribution_class=Normal, return_log_prob=True
    )
    assigned = ProbabilisticTensorDictSequential(first, draw)
    assigned.module = nn.ModuleList([first, draw])
    for sequence in Twice(first, draw), assigned:
        td = sequence(TensorDict({"x": torch.zeros(3)}, [3]))
        assert td["a"].tolist() == [7.0] * 3
        assert torch.equal(td["a_log_prob"], Normal(0.0, 1.0).log_prob(td["a"]))


# Steps that earlier ones feed: what they would draw is there.


class OwnForward(ProbabilisticTensorDictModule):
    """A distribution that a program extends."""

    def forward(  # type: ignore[override]  # a plain method where the base takes tensors too
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        _requires_sample: bool = True,
    ) -> TensorDictBase:
        tensordict["asked"] = torch.full((3,), _requires_sample)
        result = super().forward(tensordict, tensordict_out, _requires_sample)
        assert isinstance(result, TensorDictBase)
        return result


def drawing(
    kind: type[ProbabilisticTensorDictModule] = ProbabilisticTensorDictModule, **options: Any
) -> ProbabilisticTensorDictModule:
    options = {"default_interaction_type": "random", "return_log_prob": True, **options}
    return kind(["loc", "scale"], ["action"], distribution_class=Normal, **options)


def writing(*keys: str) -> TensorDictModule:
    values: dict[str, Callable[[Tensor], Tensor]] = {
        "loc": torch.neg,
        "scale": torch.exp,
        "action": torch.tanh,
    }
    return TensorDictModule(lambda x: tuple(values[key](x) for key in keys), ["x"], [*keys])


def sequence(*modules: nn.Module, **options: Any) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(*modules, **options)


def test_steps_are_those_that_were_given() -> None:
    draw = drawing()
    model = sequence(writing("loc", "scale", "action"), draw)
    assert model[-1] is draw
    assert [*model][-1] is draw
    assert [name for name, _ in model.named_modules()] == ["", "module", "module.0", "module.1"]
    assert model[1:].in_keys == ["loc", "scale"]
    assert model[1:].out_keys == ["action", "action_log_prob"]
    drawn = model[1:](TensorDict({"loc": ONE, "scale": ONE, "action": -ONE}, [3]))
    assert not torch.equal(drawn["action"], -ONE)
    assert model.select_subsequence(out_keys=["action"])[-1] is draw
    assert [*model.select_subsequence(in_keys=["loc", "scale"])] == [draw]


FED: dict[str, Callable[[], ProbabilisticTensorDictSequential]] = {
    "last": lambda: sequence(writing("loc", "scale", "action"), drawing()),
    "without score": lambda: sequence(
        writing("loc", "scale", "action"), drawing(return_log_prob=False)
    ),
    "sequence": lambda: sequence(writing("loc", "scale", "action"), sequence(drawing())),
    "sequences": lambda: sequence(
        writing("action"), sequence(writing("loc", "scale"), sequence(drawing()))
    ),
    "inside": lambda: sequence(writing("loc"), sequence(writing("scale", "action"), drawing())),
    "tolerant": lambda: sequence(
        writing("loc", "scale", "action"), drawing(), partial_tolerant=True
    ),
    "own": lambda: sequence(writing("loc", "scale", "action"), drawing(OwnForward)),
    "score alone": lambda: sequence(
        writing("loc", "scale", "action"), drawing().select_out_keys("action_log_prob")
    ),
    "value alone": lambda: sequence(
        writing("loc", "scale", "action"), drawing().select_out_keys("action")
    ),
}
NOT_FED: dict[str, Callable[[], ProbabilisticTensorDictSequential]] = {
    "not last": lambda: sequence(
        writing("loc", "scale"),
        writing("action"),
        TensorDictModule(torch.neg, ["action"], ["z"]),
        drawing(),
        TensorDictModule(torch.neg, ["action"], ["y"]),
    ),
    "plain inside": lambda: sequence(
        writing("loc", "scale", "action"),
        TensorDictModule(torch.neg, ["action"], ["z"]),
        sequence(drawing(), TensorDictModule(torch.neg, ["action"], ["y"])),
    ),
    "hidden": lambda: sequence(
        writing("loc", "scale", "action").select_out_keys("loc", "scale"), drawing()
    ),
}


@pytest.mark.parametrize("name", [*FED, *NOT_FED])
def test_all_ways_to_run_agree_on_what_is_drawn(name: str) -> None:
    torch.compiler.reset()
    model = (FED | NOT_FED)[name]()
    compiled = torch.compile(model, backend="eager")
    own = model(data(), tensordict_out=TensorDict({}, [3]))
    made = []
    runs: list[Callable[[TensorDict], TensorDict]] = [*[model] * 12, compiled, compiled]
    for run in runs:
        torch.manual_seed(0)
        td = run(data())
        made.append(td)
        assert torch.equal(td["action"], data()["x"].tanh()) is (name in FED)
        if "action_log_prob" in model.out_keys:
            expected = log_density(Normal(td["loc"], td["scale"]), td["action"])
            torch.testing.assert_close(td["action_log_prob"], expected)
        else:
            assert "action_log_prob" not in td
        assert list(td.keys()) == list(made[0].keys())
        assert (td == made[0]).all()
    assert ("asked" in made[0]) is (name == "own")
    assert name != "own" or not made[0]["asked"].any()
    assert set(own.keys()) == set(model.out_keys)


def test_a_sequence_that_draws_may_be_told_not_to() -> None:
    model = sequence(writing("loc", "scale"), drawing())
    td = data().set("action", ONE[:, None].expand(3, 4))
    assert model(td, _requires_sample=False) is td
    assert torch.equal(td["action"], ONE[:, None].expand(3, 4))
    expected = log_density(Normal(td["loc"], td["scale"]), td["action"])
    torch.testing.assert_close(td["action_log_prob"], expected)
    fed = FED["last"]()(data(), _requires_sample=True)
    assert torch.equal(fed["action"], data()["x"].tanh())
    with pytest.raises(KeyError, match="reads `action`, which was not found"):
        model(data(), _requires_sample=False)


def test_a_module_that_draws_nothing_scores() -> None:
    draw = drawing()
    td = TensorDict({"loc": ONE, "scale": ONE, "action": -ONE}, [3])
    out = TensorDict(batch_size=[3])
    assert draw(td, out, _requires_sample=False) is out
    expected = log_density(Normal(ONE, ONE), -ONE)
    assert list(out.keys()) == ["action_log_prob"]
    torch.testing.assert_close(out["action_log_prob"], expected)
    assert draw(td, None, False) is td
    torch.testing.assert_close(td["action_log_prob"], expected)
    assert torch.equal(td["action"], -ONE)
    silent = drawing(return_log_prob=False)
    td = silent(TensorDict(loc=ONE, scale=ONE), _requires_sample=False)
    assert list(td.keys()) == ["loc", "scale"]


def test_a_forward_that_does_not_take_it_is_refused() -> None:
    class Unaware(ProbabilisticTensorDictModule):
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]  # as some are written
            return tensordict

    model = sequence(writing("loc", "scale", "action"), drawing(Unaware))
    with pytest.raises(TypeError, match="_requires_sample"):
        model(data())


@pytest.mark.parametrize("after", [False, True])
def test_a_composite_scores_the_values_that_it_is_given(after: bool) -> None:
    further = [TensorDictModule(torch.neg, ["action"], ["action" if after else "y"])]
    model = sequence(writing("loc", "scale"), drawing(), *further, return_composite=True)
    td = data().set("action", ONE[:, None].expand(3, 4))
    scores = model.log_prob(td)
    assert isinstance(scores, TensorDict)
    x = data()["x"]
    torch.testing.assert_close(
        scores["action_log_prob"], log_density(Normal(-x, x.exp()), td["action"])
    )


@pytest.mark.parametrize("name", ["last", "without score", "sequences"])
def test_a_graph_draws_nothing_that_is_there(name: str) -> None:
    model = FED[name]()
    traced = symbolic_trace(model)
    found: TensorDict = traced(data())
    expected = model(data())
    assert (found == expected).all()
    assert ("action_log_prob" in found) is (name != "without score")
    again: TensorDict = pickle.loads(pickle.dumps(traced))(data())
    assert (again == expected).all()


def test_scores_of_a_composite_have_the_rows_of_the_input() -> None:
    apart = TensorDictModule(lambda x: (-x, x.exp()), ["x"], ["loc", "scale"], inplace=False)
    model = sequence(apart, drawing(), return_composite=True)
    assert model.get_dist(data()).batch_shape == ()
    scores = model.log_prob(data().set("action", torch.zeros(3, 4)))
    assert isinstance(scores, TensorDict)
    assert scores.batch_size == (3,)
