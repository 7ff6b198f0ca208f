"""Modules and sequences whose distribution has several values, in every way to run them."""

import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as d
from torch.distributions import Distribution
from torch.export import Dim, export

from kd_core import NestedKey, TensorDict
from kd_nn import TensorDictModule, TensorDictSequential
from kd_probabilistic import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_composite_lp_aggregate,
    set_interaction_type,
)

GRIP = ("hand", "grip")
MAP: dict[NestedKey, Callable[..., Distribution]] = {"move": d.Normal, GRIP: d.Categorical}
GRIP_SCORE = ("hand", "grip_log_prob")
LOG_PROBS: list[NestedKey] = ["move_log_prob", GRIP_SCORE]


def split(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return hidden[..., :2], hidden[..., 2:4].exp(), hidden[..., 4:]


def network() -> list[nn.Module]:
    torch.manual_seed(0)
    heads: list[NestedKey] = [
        ("params", "move", "loc"),
        ("params", "move", "scale"),
        ("params", *GRIP, "logits"),
    ]
    return [
        TensorDictModule(nn.Linear(4, 7), ["obs"], ["hidden"]),
        TensorDictModule(split, ["hidden"], heads),
    ]


def module(**options: object) -> ProbabilisticTensorDictModule:
    settings: dict[str, object] = {
        "distribution_class": CompositeDistribution,
        "distribution_kwargs": {"distribution_map": MAP},
        "return_log_prob": True,
        **options,
    }
    return ProbabilisticTensorDictModule(["params"], **settings)  # type: ignore[arg-type]  # any option


def actor(**options: object) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(*network(), module(**options))


def data() -> TensorDict:
    return TensorDict(obs=torch.linspace(-1, 1, 12).view(3, 4), batch_size=[3])


def test_one_value_and_one_log_prob_of_each_component() -> None:
    model = actor()
    assert model.out_keys[-4:] == ["move", GRIP, *LOG_PROBS]
    td = model(data())
    move = d.Normal(td["params", "move", "loc"], td["params", "move", "scale"])
    assert torch.equal(td["move"], move.mean)
    assert torch.equal(td["hand", "grip_log_prob"], model.get_dist(data())[GRIP].log_prob(td[GRIP]))  # type: ignore[index]  # a composite
    for _ in range(3):
        assert (model(data()) == td).all()
    values = model(obs=data()["obs"])
    assert torch.equal(values[-4], td["move"])
    assert torch.equal(values[-1], td["hand", "grip_log_prob"])


@pytest.mark.parametrize(
    "options",
    [
        {"log_prob_key": "lp"},
        {"log_prob_keys": ["lp"]},
        {
            "distribution_kwargs": {
                "distribution_map": MAP,
                "aggregate": True,
                "log_prob_key": "lp",
            }
        },
        {
            "distribution_class": partial(
                CompositeDistribution, distribution_map=MAP, aggregate=True, log_prob_key="lp"
            ),
            "distribution_kwargs": None,
        },
    ],
)
def test_one_log_prob_of_all(options: dict[str, object]) -> None:
    model = actor(**options)
    assert model.out_keys[-3:] == ["move", GRIP, "lp"]
    assert model.log_prob_key == "lp"
    td, each = model(data()), actor()(data())
    torch.testing.assert_close(
        td["lp"], each["move_log_prob"].sum(-1) + each["hand", "grip_log_prob"]
    )
    assert torch.equal(model.log_prob(td, aggregate=True), td["lp"])
    apart = model.log_prob(td, aggregate=False)
    assert isinstance(apart, TensorDict)
    assert list(apart.keys(True, True)) == LOG_PROBS


def test_keys_of_log_probs_can_be_chosen() -> None:
    model = actor(log_prob_keys=["a", ("b", "c")])
    td = model(data())
    assert model.log_prob_keys == ["a", ("b", "c")]
    scores = model.log_prob(td)
    assert isinstance(scores, TensorDict)
    assert torch.equal(scores["b", "c"], td["b", "c"])
    with pytest.raises(TypeError, match="has 2 keys of log-probabilities, `a`"):
        model.log_prob_key  # noqa: B018 - read for its error


def test_selected_outputs_alone_are_made() -> None:
    model = actor().select_out_keys(GRIP, "move_log_prob")
    grip, score = model(obs=data()["obs"])
    assert grip.shape == (3,)
    assert score.shape == (3, 2)
    assert set(model(data()).keys(True, True)) == {"obs", GRIP, "move_log_prob"}


def test_number_of_samples_and_generator() -> None:
    def draw() -> TensorDict:
        result = actor(num_samples=5, generator=3, default_interaction_type="random")(data())
        assert isinstance(result, TensorDict)
        return result

    first = draw()
    assert first["move"].shape == (5, 3, 2)
    assert first[GRIP_SCORE].shape == (5, 3)
    assert (first == draw()).all()
    assert not torch.equal(first["move"][0], first["move"][1])


def test_the_interaction_type_is_taken_of_each_component() -> None:
    model = actor()
    with set_interaction_type("mode"):
        assert (model(data()) == actor()(data())).all()
    with (
        set_interaction_type("mean"),
        pytest.raises(NotImplementedError, match="`Categorical` has no mean"),
    ):
        model(data())


def test_values_written_earlier_are_scored() -> None:
    def choose(obs: Tensor) -> tuple[Tensor, Tensor]:
        return obs[..., :2], (obs[..., 0] > 0).long()

    chosen = TensorDictModule(choose, ["obs"], ["move", GRIP])
    for steps in ([chosen, *network()], [*network(), chosen]):
        model = ProbabilisticTensorDictSequential(*steps, module())
        td = model(data())
        assert torch.equal(td["move"], data()["obs"][..., :2])
        expected = actor().log_prob(td)
        assert isinstance(expected, TensorDict)
        assert torch.equal(expected["move_log_prob"], td["move_log_prob"])
        assert torch.equal(expected[GRIP_SCORE], td[GRIP_SCORE])
        model.select_out_keys("move_log_prob")
        assert torch.equal(model(obs=data()["obs"]), td["move_log_prob"])


def test_one_value_alone_written_earlier_is_replaced() -> None:
    move = TensorDictModule(lambda obs: obs[..., :2], ["obs"], ["move"])
    model = ProbabilisticTensorDictSequential(
        *network(), move, TensorDictModule(torch.neg, ["move"], ["back"]), module()
    )
    td = model(data())
    assert not torch.equal(td["move"], td["obs"][..., :2])


def test_the_distribution_says_where_its_values_are_written() -> None:
    """An actor of TorchRL names the container of its actions, whatever they are."""
    built = module(out_keys=["action"])
    assert built.out_keys == ["move", GRIP, *LOG_PROBS]
    params = actor().get_dist_params(data())["params"]
    assert (built(TensorDict(params=params))[GRIP] == actor()(data())[GRIP]).all()


def test_a_callable_may_build_it() -> None:
    built = module(
        out_keys=["move", GRIP],
        distribution_class=lambda params: CompositeDistribution(params, MAP),
        distribution_kwargs=None,
    )
    params = actor().get_dist_params(data())["params"]
    made = built(TensorDict(params=params))
    assert (made[GRIP] == actor()(data())[GRIP]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_keys": []}, "at least one value"),
        ({"log_prob_keys": ["a", "b", "c"]}, "one for each of the 2 values, got `a`, `b`, `c`"),
        ({"log_prob_keys": ["a", "a"]}, "`log_prob_keys` must differ, got `a` twice"),
        ({"log_prob_keys": ["a", "move"]}, "cannot have one key, `move`"),
        (
            {"distribution_kwargs": {"distribution_map": MAP, "name_map": {"x": "y"}}},
            "`x` not found",
        ),
    ],
)
def test_wrong_keys_are_refused_when_it_is_built(options: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, KeyError), match=message):
        module(**options)


def test_keys_of_log_probs_are_refused_where_the_switch_says_to_sum() -> None:
    keys = ["a", "b"]
    with set_composite_lp_aggregate(True):
        with pytest.raises(RuntimeError, match="asks for one sum, got `a`, `b`"):
            module(log_prob_keys=keys)
        own = {"distribution_map": MAP, "aggregate": False}
        assert module(log_prob_keys=keys, distribution_kwargs=own).log_prob_keys == keys
    built = module(log_prob_keys=keys)
    with set_composite_lp_aggregate(True):
        again = pickle.loads(pickle.dumps(built))
    assert again.log_prob_keys == keys


@pytest.mark.parametrize(
    ("keys", "build", "message"),
    [
        (
            ["move"],
            lambda params: CompositeDistribution(params, MAP),
            "must be the keys of the val",
        ),
        (["a", "b"], lambda params: d.Normal(0.0, 1.0), "has 2 out_keys, but .* returned a Normal"),
    ],
)
def test_wrong_keys_are_refused_when_it_is_called(
    keys: list[NestedKey], build: Callable[..., Distribution], message: str
) -> None:
    wrong = module(out_keys=keys, distribution_class=build, distribution_kwargs=None)
    td = TensorDict(params=actor().get_dist_params(data())["params"])
    before = set(td.keys(True, True))
    with pytest.raises(TypeError, match=message):
        wrong(td)
    assert set(td.keys(True, True)) == before


def test_missing_parameters_are_named() -> None:
    with pytest.raises(KeyError, match="`CompositeDistribution` reads `params`"):
        module()(data())
    with pytest.raises(KeyError, match="parameters `move` not found; available keys: `hand`"):
        module()(TensorDict({"params": {GRIP: {"logits": torch.zeros(3)}}}))


def test_settings_can_be_assigned() -> None:
    changed = module()
    changed.out_keys = ["move", GRIP, "a", "b"]
    assert changed.log_prob_keys == ["a", "b"]
    setattr(changed, "log_prob_key", "total")  # noqa: B010 - read-only for a type checker
    assert changed.out_keys == ["move", GRIP, "total"]
    setattr(changed, "log_prob_keys", ["c", "d"])  # noqa: B010 - read-only for a type checker
    assert changed.out_keys == ["move", GRIP, "c", "d"]
    changed.return_log_prob = False
    assert changed.out_keys == ["move", GRIP]


def alone() -> tuple[nn.Module, TensorDict]:
    params = actor().get_dist_params(data())["params"].detach()
    return module(), TensorDict(params=params, batch_size=[3])


def in_a_sequence() -> tuple[nn.Module, TensorDict]:
    return actor(log_prob_key="lp"), data()


@pytest.mark.parametrize("place", [alone, in_a_sequence])
@pytest.mark.parametrize("strict", [False, True])
def test_export_by_container(
    place: Callable[[], tuple[nn.Module, TensorDict]], strict: bool
) -> None:
    model, td = place()
    program = export(model, (td.copy(),), strict=strict)
    assert (program.module()(td.copy()) == model(td.copy())).all()


@pytest.mark.parametrize("strict", [False, True])
def test_export_by_keyword(strict: bool) -> None:
    model = actor().select_out_keys("move", GRIP, *LOG_PROBS)
    shapes = {"obs": {0: Dim("batch")}}
    program = export(model, (), {"obs": data()["obs"]}, strict=strict, dynamic_shapes=shapes)
    obs = torch.randn(5, 4)
    for got, expected in zip(program.module()(obs=obs), model(obs=obs), strict=True):
        torch.testing.assert_close(got, expected)
    built, td = alone()
    program = export(built, (), {"params": td["params"]}, strict=strict)
    for got, expected in zip(
        program.module()(params=td["params"]), built(params=td["params"]), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("place", [alone, in_a_sequence])
def test_compiled_as_one_graph(place: Callable[[], tuple[nn.Module, TensorDict]]) -> None:
    model, td = place()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with set_interaction_type("random"):
        torch.manual_seed(0)
        expected = model(td.copy())
        torch.manual_seed(0)
        got = compiled(td.copy())
    torch.testing.assert_close(got["move"], expected["move"])
    assert torch.equal(got[GRIP], expected[GRIP])


def test_vmap_over_observations_and_parameters() -> None:
    model = actor()
    obs = torch.randn(5, 3, 4)
    mapped = torch.vmap(lambda x: model(obs=x))(obs)
    for got, expected in zip(mapped, model(obs=obs), strict=True):
        torch.testing.assert_close(got, expected)
    built, td = alone()
    params = td["params"]
    mapped = torch.vmap(lambda part: built(params=part))(params)
    for got, expected in zip(mapped, built(params=params), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_module_inside_a_plain_sequence() -> None:
    sequence = TensorDictSequential(*network(), module())
    assert (sequence(data()) == actor()(data())).all()
