"""Probabilistic modules: settings, calls, values, scores, generators and printing."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, distributions, nn
from torch.distributions import Bernoulli, Categorical, Laplace, Normal, Uniform

from kd_core import InvalidArgument, NonTensorData, TensorClass, TensorDict
from kd_nn import (
    NormalParamWrapper,
    OneHotCategorical,
    SupportsInteraction,
    TanhNormal,
    TensorDictModule,
    TensorDictSequential,
)
from kd_probabilistic import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    ScoringModule,
    interaction_type,
    set_interaction_type,
)

LOC = torch.tensor([[0.0, 1.0], [-2.0, 3.0], [0.5, 0.5]])
SCALE = torch.tensor([[1.0, 2.0], [0.5, 1.0], [3.0, 0.1]])


def params() -> TensorDict:
    return TensorDict({"loc": LOC.clone(), "scale": SCALE.clone()}, [3])


def normal(**options: object) -> ProbabilisticTensorDictModule:
    settings: dict[str, object] = {"out_keys": ["x"], "distribution_class": Normal, **options}
    return ProbabilisticTensorDictModule(["loc", "scale"], **settings)  # type: ignore[arg-type]  # any option


def one(module: ProbabilisticTensorDictModule, *values: Tensor) -> Tensor:
    """Call a module that has one output."""
    output = module(*values)
    assert isinstance(output, Tensor)
    return output


def log_density(dist: distributions.Distribution, value: Tensor) -> Tensor:
    result: Tensor = dist.log_prob(value)
    return result


def test_seed_example_of_a_recurrent_actor() -> None:
    td = TensorDict({"input": torch.randn(3, 4), "hidden": torch.randn(3, 8)}, [3])
    net = torch.nn.GRUCell(4, 8)
    module = TensorDictModule(
        NormalParamWrapper(net), in_keys=["input", "hidden"], out_keys=["loc", "scale"]
    )
    prob_module = ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["sample"],
        distribution_class=Normal,
        return_log_prob=True,
    )
    td_module = ProbabilisticTensorDictSequential(module, prob_module)
    td_module(td)
    assert set(td.keys()) == {"input", "hidden", "loc", "scale", "sample", "sample_log_prob"}
    assert td["sample_log_prob"].shape == td["sample"].shape == (3, 4)


def test_default_value_is_deterministic() -> None:
    td = normal()(params())
    assert torch.equal(td["x"], LOC)
    assert "x_log_prob" not in td


@pytest.mark.parametrize("form", ["container", "keywords", "positions"])
def test_every_calling_form_gives_value_and_log_prob(form: str) -> None:
    module = normal(return_log_prob=True)
    if form == "container":
        td = module(params())
        value, log_prob = td["x"], td["x_log_prob"]
    elif form == "keywords":
        value, log_prob = module(scale=SCALE, loc=LOC)
    else:
        value, log_prob = module(LOC, SCALE)
    assert torch.equal(value, LOC)
    torch.testing.assert_close(log_prob, log_density(Normal(LOC, SCALE), LOC))


def test_log_prob_agrees_with_scipy_on_a_grid() -> None:
    grid = torch.linspace(-4, 4, 33).expand(3, 33)
    td = TensorDict({"loc": LOC[:, :1], "scale": SCALE[:, :1], "x": grid}, [3])
    expected = scipy.stats.norm(LOC[:, :1].numpy(), SCALE[:, :1].numpy()).logpdf(grid.numpy())
    torch.testing.assert_close(
        normal().log_prob(td), torch.as_tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-5
    )


def test_moments_of_draws_lie_within_four_standard_errors() -> None:
    torch.manual_seed(0)
    count = 20_000
    td = normal(default_interaction_type="random", num_samples=count)(params())
    error = SCALE / math.sqrt(count)
    assert bool(((td["x"].mean(0) - LOC).abs() < 4 * error).all())
    assert bool(((td["x"].std(0) - SCALE).abs() < 4 * error / math.sqrt(2)).all())


def test_random_draws_carry_gradients_to_the_parameters() -> None:
    loc, scale = LOC.clone().requires_grad_(), SCALE.clone().requires_grad_()
    torch.manual_seed(0)
    value, log_prob = normal(default_interaction_type="random", return_log_prob=True)(loc, scale)
    (slope,) = torch.autograd.grad(value.sum(), loc, retain_graph=True)
    assert torch.equal(slope, torch.ones_like(LOC))
    (slope,) = torch.autograd.grad(log_prob.sum(), scale)
    torch.testing.assert_close(slope, -1 / SCALE)


@pytest.mark.parametrize("checked", [True, False])
def test_quick_normal_draws_and_scores_as_torch_does(checked: bool) -> None:
    before = distributions.Distribution._validate_args
    distributions.Distribution.set_default_validate_args(checked)
    try:
        torch.manual_seed(0)
        value, log_prob = normal(default_interaction_type="random", return_log_prob=True)(
            LOC, SCALE
        )
        torch.manual_seed(0)
        reference = Normal(LOC, SCALE)
        assert torch.equal(value, reference.rsample())
        assert torch.equal(log_prob, log_density(reference, value))
    finally:
        distributions.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize(
    ("loc", "scale"),
    [
        (LOC, -SCALE),
        (LOC, SCALE * 0),
        (LOC, SCALE * math.nan),
        (LOC * math.nan, SCALE),
        (LOC, torch.zeros(())),
    ],
)
@pytest.mark.parametrize("validate", [None, True])
def test_invalid_parameters_raise_what_torch_raises(
    loc: Tensor, scale: Tensor, validate: bool | None
) -> None:
    settings = {} if validate is None else {"validate_args": validate}
    before = distributions.Distribution._validate_args
    distributions.Distribution.set_default_validate_args(True)
    try:
        with pytest.raises(ValueError, match="Expected parameter") as ours:
            normal(distribution_kwargs=settings)(loc, scale)
        with pytest.raises(ValueError, match="Expected parameter") as theirs:
            Normal(loc, scale)
    finally:
        distributions.Distribution.set_default_validate_args(before)
    assert str(ours.value).splitlines() == str(theirs.value).splitlines()


def test_validation_can_be_switched_off() -> None:
    module = normal(distribution_kwargs={"validate_args": False})
    assert torch.equal(one(module, LOC, -SCALE), LOC)


def test_infinite_locations_of_both_signs_are_accepted_as_by_torch() -> None:
    loc = torch.tensor([math.inf, -math.inf])
    assert torch.equal(one(normal(), loc, torch.ones(2)), loc)


def test_context_beats_the_default_of_the_module() -> None:
    module = normal(default_interaction_type="random")
    with set_interaction_type("mean"):
        assert torch.equal(one(module, LOC, SCALE), LOC)
    assert not torch.equal(one(module, LOC, SCALE), LOC)


def test_mean_without_a_formula_is_averaged_over_draws() -> None:
    torch.manual_seed(0)
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"],
        ["x"],
        distribution_class=lambda loc, scale: distributions.TransformedDistribution(
            Normal(loc, scale), [distributions.ExpTransform()]
        ),
        default_interaction_type="mean",
        n_empirical_estimate=40_000,
    )
    value = one(module, torch.zeros(1), torch.full((1,), 0.5))
    spread = scipy.stats.lognorm(0.5).std() / math.sqrt(40_000)
    assert abs(value.item() - scipy.stats.lognorm(0.5).mean()) < 4 * spread


def test_mean_is_averaged_where_asking_for_a_mode_fails() -> None:
    class Own(distributions.TransformedDistribution):
        def __init__(self, loc: Tensor) -> None:
            super().__init__(Normal(loc, 1.0), [distributions.TanhTransform()])

        @property
        def mode(self) -> Tensor:
            raise RuntimeError("there is no formula")

    def module(kind: str) -> ProbabilisticTensorDictModule:
        return ProbabilisticTensorDictModule(
            ["loc"], ["x"], distribution_class=Own, default_interaction_type=kind
        )

    torch.manual_seed(0)
    value = module("mean")(TensorDict(loc=torch.ones(2)))["x"]
    torch.manual_seed(0)
    assert torch.equal(value, Own(torch.ones(2)).rsample(torch.Size([1000])).mean(0))
    with pytest.raises(RuntimeError, match="there is no formula"):
        module("mode")(TensorDict(loc=torch.ones(2)))


def test_mean_inside_independent_is_averaged_too() -> None:
    torch.manual_seed(0)
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"],
        ["x"],
        distribution_class=lambda loc, scale: distributions.Independent(TanhNormal(loc, scale), 1),
        default_interaction_type="mean",
        n_empirical_estimate=20_000,
    )
    value = one(module, torch.zeros(3, 2), torch.ones(3, 2))
    assert value.shape == (3, 2)
    assert value.abs().max() < 5 * 0.63 / math.sqrt(20_000)  # 0.63 is the standard deviation


def test_mapping_names_arguments_and_one_key_may_feed_two() -> None:
    module = ProbabilisticTensorDictModule(
        {"low": ("bounds", "a"), "high": "b"}, ["x"], distribution_class=distributions.Uniform
    )
    td = module(TensorDict({"bounds": {"a": torch.zeros(2)}, "b": torch.ones(2)}, [2]))
    assert td["x"].tolist() == [0.5, 0.5]
    twice = ProbabilisticTensorDictModule(
        {"loc": "p", "scale": "p"}, ["x"], distribution_class=Normal
    )
    assert twice.in_keys == ["p"]
    assert one(twice, torch.ones(2)).tolist() == [1.0, 1.0]


def test_last_part_of_a_nested_key_names_the_argument() -> None:
    module = ProbabilisticTensorDictModule(
        [("a", "loc"), ("a", "scale")],
        [("b", "x")],
        distribution_class=Normal,
        return_log_prob=True,
    )
    td = module(TensorDict({"a": params()}, [3]))
    assert torch.equal(td["b", "x"], LOC)
    assert module.log_prob_key == ("b", "x_log_prob")
    assert module.dist_params_keys == [("a", "loc"), ("a", "scale")]
    assert module.dist_sample_keys == [("b", "x")]


def test_log_prob_key_can_be_chosen_and_the_value_discarded() -> None:
    module = normal(out_keys=None, return_log_prob=True, log_prob_key=("score", "lp"))
    td = module(params())
    assert "x" not in td
    assert td["score", "lp"].shape == (3, 2)


def test_selected_outputs_alone_are_written() -> None:
    module = normal(return_log_prob=True).select_out_keys("x_log_prob")
    td = module(params())
    assert "x" not in td
    assert one(module, LOC, SCALE).shape == (3, 2)
    assert module.reset_out_keys().out_keys == ["x", "x_log_prob"]


def test_num_samples_puts_a_dimension_in_front() -> None:
    source = params()
    td = normal(num_samples=5, default_interaction_type="random")(source)
    assert td.batch_size == (5, 3)
    assert td["x"].shape == (5, 3, 2)
    assert "x" not in source
    mean = normal(num_samples=5)(params())
    assert torch.equal(mean["x"][4], LOC)


def test_num_samples_may_be_several_sizes() -> None:
    source = params()
    td = normal(num_samples=(2, 5), default_interaction_type="random", return_log_prob=True)(source)
    assert td.batch_size == (2, 5, *source.batch_size)
    assert td["x"].shape == td["x_log_prob"].shape == (2, 5, *source["loc"].shape)
    assert td["x"].std(0).min() > 0
    assert normal(num_samples=[2, 0])(params())["x"].shape == (2, 0, *source["loc"].shape)
    assert normal(num_samples=(2,)).num_samples == (2,)
    alone = normal(num_samples=())(source)
    assert alone is not source
    assert "x" not in source
    assert alone.batch_size == source.batch_size


def test_num_samples_inside_a_sequence() -> None:
    sequence = ProbabilisticTensorDictSequential(
        TensorDictModule(torch.exp, ["raw"], ["scale"]),
        normal(num_samples=5, default_interaction_type="random"),
    )
    td = sequence(TensorDict({"raw": LOC, "loc": LOC}, [3]))
    assert td["x"].shape == (5, 3, 2)
    assert td.batch_size == (5, 3)


@pytest.mark.parametrize("kind", ["generator", "seed"])
def test_generator_makes_draws_repeatable_and_leaves_the_global_one(kind: str) -> None:
    def module() -> ProbabilisticTensorDictModule:
        source = torch.Generator().manual_seed(3) if kind == "generator" else 3
        return normal(generator=source, default_interaction_type="random")

    state = torch.get_rng_state()
    left, right = module(), module()
    first, second = one(left, LOC, SCALE), one(left, LOC, SCALE)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one(right, LOC, SCALE), first)
    assert not torch.equal(first, second)


def test_generator_may_be_an_entry() -> None:
    module = normal(generator="rng", default_interaction_type="random")
    draws = [module(params().set("rng", NonTensorData(7)))["x"] for _ in range(2)]
    assert torch.equal(*draws)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(module(params().set("rng", generator))["x"], draws[0])
    with pytest.raises(TypeError, match=r"`rng` must hold a `torch.Generator` or one integer seed"):
        module(params().set("rng", "dice"))


def test_entry_of_the_generator_is_read_like_any_other() -> None:
    module = normal(generator="rng", default_interaction_type="random")
    assert module.in_keys == ["loc", "scale", "rng"]
    assert module.dist_params_keys == ["loc", "scale"]
    sequence = ProbabilisticTensorDictSequential(
        TensorDictModule(lambda loc: torch.tensor(7), ["loc"], ["rng"]), module
    ).select_out_keys("x")
    draws = [
        sequence(TensorDict(loc=LOC, scale=SCALE))["x"],
        one(module, LOC, SCALE, torch.tensor(7)),
    ]
    assert torch.equal(*draws)
    with pytest.raises(
        KeyError, match="`Normal` reads `rng`, which was not found in the container"
    ):
        module(params())
    with set_interaction_type("mean"):
        assert torch.equal(module(params())["x"], LOC)


def test_missing_parameter_is_named_with_the_nearest_entry() -> None:
    td = TensorDict({"loc": LOC, "scales": SCALE}, [3])
    with pytest.raises(KeyError, match=r"`Normal` reads `scale`.*Did you mean `scales`\?"):
        normal()(td)
    with pytest.raises(KeyError, match="reads `x`"):
        normal().log_prob(params())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distribution_class": "Normal"}, "must be a distribution class or a callable.*'Normal'"),
        ({"distribution_kwargs": {"loc": 0.0}}, "`loc` of `Normal` is given by `in_keys` and"),
        ({"out_keys": ["a", "b"]}, "must be the one key of the value, got 2 keys"),
    ],
)
def test_wrong_construction_is_explained(options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        normal(**options)


@pytest.mark.parametrize(
    ("in_keys", "options", "message"),
    [
        (["lok", "scale"], {}, r"no argument `lok`;.*Did you mean `loc`"),
        (
            ["loc", "scale"],
            {"distribution_class": distributions.LogNormal, "distribution_kwargs": {"mean": 0.0}},
            r"`LogNormal` has no argument `mean`; it takes `loc`, `scale`, `v.*mapping",
        ),
        (
            ["loc", "scale"],
            {"distribution_class": distributions.StudentT},
            "`StudentT` also requires `df`, got `loc`, `scale`. Add parameters",
        ),
    ],
)
def test_wrong_arguments_are_told_when_the_distribution_is_built(
    in_keys: list[str], options: dict[str, Any], message: str
) -> None:
    module = ProbabilisticTensorDictModule(
        in_keys, ["x"], **{"distribution_class": Normal, **options}
    )
    with pytest.raises(TypeError, match=message):
        module(LOC, SCALE)


def test_parameters_of_the_distribution_may_come_later() -> None:
    module = ProbabilisticTensorDictModule(["loc"], ["x"], distribution_class=Normal)
    module.distribution_kwargs["scale"] = 2.0
    assert (module.get_dist(params()).stddev == 2).all()


def test_a_seed_in_an_entry_advances() -> None:
    module = normal(generator="seed", default_interaction_type="random")
    for td in (
        TensorDict(loc=LOC, scale=SCALE, seed=torch.tensor(3)),
        params().set_non_tensor("seed", 3),
    ):
        first, second = (module(td)["x"].clone() for _ in range(2))
        assert not torch.equal(first, second)
        again = module(params().set_non_tensor("seed", 3))["x"]
        assert torch.equal(first, again)
        assert td["seed"] != 3


@pytest.mark.parametrize("seed", [torch.tensor(49), 49])
def test_seeds_that_follow_are_those_of_tensordict(seed: object) -> None:
    """Recorded with tensordict 0.15.3: programs that were seeded draw the same numbers."""
    module = normal(generator="seed", default_interaction_type="random")
    td = TensorDict(loc=torch.zeros(3), scale=torch.ones(3))
    td.set_non_tensor("seed", seed) if isinstance(seed, int) else td.set("seed", seed)
    found = [int(module(td)["seed"]) for _ in range(3)]
    assert found == [3380859464913313669, 312134705481047885, 2096099584778670680]


def test_the_container_to_write_may_be_given_by_position() -> None:
    td, out = params(), TensorDict()
    assert normal().forward(td, None) is td
    assert normal()(td, out) is out
    assert list(out.keys()) == ["x"]
    with pytest.raises(TypeError, match="next to a container"):
        normal()(td, LOC)


@pytest.mark.parametrize("options", [{"num_samples": -1}, {"n_empirical_estimate": 0}])
def test_impossible_number_of_samples_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be a (non-negative int, .*|positive int), got"):
        normal(**options)


def test_callable_that_returns_no_distribution_is_told() -> None:
    def build(loc: Tensor, scale: Tensor) -> Tensor:
        return loc + scale

    with pytest.raises(TypeError, match=r"`build` must return a .*Distribution`, got Ten"):
        normal(distribution_class=build)(LOC, SCALE)


def test_log_probability_that_is_not_selected_is_not_computed() -> None:
    seen: list[Tensor] = []

    class Watched(Normal):
        def log_prob(self, value: Tensor) -> Tensor:
            seen.append(value)
            return super().log_prob(value)  # type: ignore[no-untyped-call, no-any-return]  # torch has no types here

    module = normal(distribution_class=Watched, return_log_prob=True).select_out_keys("x")
    sequence = ProbabilisticTensorDictSequential(module)
    for _ in range(3):
        assert list(module(params()).keys()) == ["loc", "scale", "x"]
        assert torch.equal(one(module, LOC, SCALE), LOC)
        assert list(sequence(params()).keys()) == ["loc", "scale", "x"]
    assert seen == []
    module.reset_out_keys()
    assert len(sequence(LOC, SCALE)) == 2
    assert len(seen) == 1


def test_two_keys_for_one_argument_are_refused() -> None:
    with pytest.raises(TypeError, match="name the same argument"):
        ProbabilisticTensorDictModule([("a", "loc"), ("b", "loc")], distribution_class=Normal)


def test_get_dist_builds_from_a_container() -> None:
    dist = normal().get_dist(params())
    assert isinstance(dist, Normal)
    assert torch.equal(dist.mean, LOC)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_module_survives_copies(copied) -> None:  # type: ignore[no-untyped-def]  # the parameter takes functions of several types
    assert torch.equal(copied(normal())(LOC, SCALE), LOC)


def test_module_follows_the_protocol_of_exporters() -> None:
    module = normal()
    assert isinstance(module, SupportsInteraction)
    with module.interaction("random"):
        assert interaction_type() is not None


def test_hooks_on_the_module_are_honoured_in_a_sequence() -> None:
    module = normal()
    sequence = TensorDictSequential(TensorDictModule(torch.exp, ["raw"], ["scale"]), module)
    sequence(raw=LOC, loc=LOC)
    calls: list[str] = []
    module.register_forward_hook(lambda *_: calls.append("hook"))
    sequence(TensorDict({"raw": LOC, "loc": LOC}, [3]))
    assert calls == ["hook"]


def test_vmap_over_parameters_needs_no_setting() -> None:
    value = torch.vmap(lambda loc, scale: normal()(loc, scale))(LOC, SCALE)
    assert torch.equal(value, LOC)


@pytest.mark.parametrize("kind", ["deterministic", "random", "mode"])
def test_shapes_are_inferred_without_values(kind: str) -> None:
    module = normal(default_interaction_type=kind, return_log_prob=True)
    sample = TensorDict(loc=LOC.to("meta"), scale=SCALE)
    made = module.infer(sample)
    assert made["x"].shape == made["x_log_prob"].shape == LOC.shape


def test_field_that_is_not_set_is_a_missing_parameter() -> None:
    class Policy(TensorClass):
        loc: Tensor
        scale: Tensor | None = None
        action: Tensor | None = None

    module = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal)
    policy = Policy(loc=torch.zeros(2), batch_size=[2])
    with pytest.raises(KeyError, match="reads `scale`, which was not found"):
        module(policy)
    policy.scale = torch.ones(2)
    assert module(policy) is policy
    assert policy.action is not None


@pytest.mark.parametrize("kind", [distributions.Categorical, distributions.OneHotCategorical])
def test_no_rows_are_not_checked(kind: Callable[..., distributions.Distribution]) -> None:
    module = ProbabilisticTensorDictModule(
        ["logits"], ["a"], distribution_class=kind, return_log_prob=True
    )
    td = module(TensorDict({"logits": torch.zeros(0, 3)}, [0]))
    assert td["a_log_prob"].shape == (0,)


def test_one_hot_vectors_are_drawn_as_integers() -> None:
    """As by torch's Categorical: a buffer or an environment takes integers."""
    td = TensorDict({"logits": torch.zeros(4, 3, requires_grad=True)}, [4])
    module = ProbabilisticTensorDictModule(
        ["logits"], ["a"], distribution_class=OneHotCategorical, default_interaction_type="random"
    )
    assert module(td)["a"].dtype is torch.int64
    both = CompositeDistribution(
        TensorDict({"a": {"logits": td["logits"]}}, [4]), {"a": OneHotCategorical}
    )
    assert both.sample()["a"].dtype is torch.int64
    assert both.rsample()["a"].requires_grad


def test_log_prob_of_no_rows_has_none() -> None:
    def normal(loc: Tensor, scale: Tensor) -> distributions.Distribution:
        return distributions.Independent(distributions.Normal(loc, scale), 1)

    module = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["a"], distribution_class=normal, return_log_prob=True
    )
    loc = torch.zeros(0, 2, requires_grad=True)
    td = module(TensorDict({"loc": loc, "scale": torch.ones(0, 2)}, [0]))
    assert td["a_log_prob"].shape == (0,)
    assert td["a_log_prob"].requires_grad


@pytest.mark.parametrize(
    ("call", "read"),
    [
        (lambda module, td: module(td), "`loc` (2, 3) float32, `scale` (2, 4) float32"),
        (lambda module, td: module(loc=td["loc"], scale=td["scale"]), "`loc` (2, 3) float32"),
        (lambda module, td: module.get_dist(td), "`scale` (2, 4) float32"),
        (
            lambda module, td: module.log_prob(td.replace({"scale": torch.ones(2, 3)})),
            "reads `x` (2, 5) float32",
        ),
    ],
)
def test_error_of_torch_says_what_was_read(
    call: Callable[[ProbabilisticTensorDictModule, TensorDict], object], read: str
) -> None:
    module = ProbabilisticTensorDictModule(["loc", "scale"], ["x"], distribution_class=Normal)
    td = TensorDict(loc=torch.zeros(2, 3), scale=torch.ones(2, 4), x=torch.zeros(2, 5))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call(module, td)
    (note,) = caught.value.__notes__
    assert note.startswith("`ProbabilisticTensorDictModule(Normal)`: reads ")
    assert read in note


class Squashed(distributions.Normal):
    """A normal distribution that scores what it drew before it rounds it."""

    def rsample_and_log_prob(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        value = self.rsample(shape)
        return value.round(), log_density(self, value)


class Unpathed(Squashed):
    """One without gradients of its draws."""

    has_rsample = False

    def sample_and_log_prob(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        value = torch.normal(self.loc, self.scale)
        return value.round(), torch.full_like(value, 7.0)


@pytest.mark.parametrize("kind", [Squashed, Unpathed])
def test_a_distribution_that_scores_its_draws_is_asked_to(kind: type[Squashed]) -> None:
    module = ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["x"],
        distribution_class=kind,
        return_log_prob=True,
        default_interaction_type="random",
    )
    torch.manual_seed(0)
    got = module(params())
    torch.manual_seed(0)
    drawn = torch.normal(LOC, SCALE)
    assert torch.equal(got["x"], drawn.round())
    dist = Normal(LOC, SCALE)
    expected = log_density(dist, drawn) if kind is Squashed else torch.full_like(drawn, 7.0)
    assert torch.equal(got["x_log_prob"], expected)
    with set_interaction_type("mode"):
        got = module(params())
    assert torch.equal(got["x_log_prob"], log_density(dist, got["x"]))


def test_components_that_score_their_draws_are_asked_to() -> None:
    module = ProbabilisticTensorDictModule(
        in_keys=["params"],
        out_keys=["x", "y"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"x": Unpathed, "y": Normal}},
        return_log_prob=True,
        default_interaction_type="random",
    )
    got = module(TensorDict(params={"x": params(), "y": params()}))
    assert got["x_log_prob"].eq(7.0).all()
    assert torch.equal(got["y_log_prob"], log_density(Normal(LOC, SCALE), got["y"]))


LOCS, SCALES = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([1.0, 2.0, 0.5])


def seeded() -> TensorDict:
    return TensorDict({"a": LOCS, "loc": LOCS, "scale": SCALES, "seed": 3})


def drawing_normal(**options: object) -> ProbabilisticTensorDictModule:
    settings: dict[str, object] = {
        "in_keys": ["loc", "scale"],
        "out_keys": ["x"],
        "distribution_class": Normal,
        "default_interaction_type": "random",
        **options,
    }
    return ProbabilisticTensorDictModule(**settings)  # type: ignore[arg-type]  # any of them


def alone(module: ProbabilisticTensorDictModule) -> torch.nn.Module:
    return module


def in_a_sequence(module: ProbabilisticTensorDictModule) -> torch.nn.Module:
    return TensorDictSequential(TensorDictModule(torch.neg, ["a"], ["b"]), module)


def nested(module: ProbabilisticTensorDictModule) -> torch.nn.Module:
    return TensorDictSequential(in_a_sequence(module))


SETTINGS: list[tuple[str, object]] = [
    ("num_samples", 4),
    ("num_samples", 0),
    ("num_samples", torch.Size((2, 3))),
    ("generator", "seed"),
    ("generator", 7),
    ("default_interaction_type", "mean"),
    ("n_empirical_estimate", 3),
    ("return_log_prob", True),
    ("log_prob_key", ("n", "score")),
    ("in_keys", {"loc": "a", "scale": "scale"}),
    ("in_keys", {"loc": "loc", "scale": "loc"}),
    ("out_keys", ["z"]),
    ("out_keys", None),
    ("distribution_class", Laplace),
    ("distribution_kwargs", {"validate_args": False}),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("place", [alone, in_a_sequence, nested])
def test_an_assigned_setting_is_that_of_the_constructor(
    place: Callable[[ProbabilisticTensorDictModule], torch.nn.Module], name: str, value: object
) -> None:
    module = drawing_normal(return_log_prob=name == "log_prob_key")
    used = place(module)
    for _ in range(3):  # with a plan, where one is made
        used(seeded())
    setattr(module, name, value)
    options = {"return_log_prob": name == "log_prob_key", name: value}
    fresh = place(drawing_normal(**options))
    for _ in range(3):
        assert results(used) == results(fresh)
    assert used.in_keys == fresh.in_keys
    assert used.out_keys == fresh.out_keys


def results(module: torch.nn.Module) -> object:
    """Return all that a call writes, or the error that it raises."""
    torch.manual_seed(0)
    try:
        made = module(seeded())
    except ValueError as error:
        return str(error)
    return tuple(made.batch_size), flat(made)


def flat(td: TensorDict) -> list[tuple[object, object]]:
    return [(key, leaf.tolist()) for key, leaf in td.items(True, True)]


WRONG: list[tuple[str, object, str]] = [
    ("num_samples", -1, "`num_samples` must be a non-negative int, a tuple of.*got -1"),
    ("num_samples", 2.0, "`num_samples` must be a non-negative int, a tuple of.*got 2.0"),
    ("num_samples", (2, -1), r"must be a non-negative int, a tuple of.*got \(2, -1\)"),
    ("num_samples", True, "`num_samples` must be a non-negative int, a tuple of.*got True"),
    ("n_empirical_estimate", 0, "`n_empirical_estimate` must be a positive int, got 0"),
    ("generator", 1.5, "`generator` must be a `torch.Generator`.*got float: 1.5"),
    ("generator", True, "`generator` must be a `torch.Generator`.*got bool"),
    ("default_interaction_type", "maen", "`maen` is"),
    ("default_interaction_type", 3, "got 3"),
    ("return_log_prob", "yes", "`return_log_prob` must be True or False, got 'yes'"),
    ("log_prob_key", "x", "cannot have one key, `x`"),
    ("in_keys", 3, "`in_keys` must be a key or a list of keys, got int: 3"),
    ("in_keys", {3: "loc"}, "names each argument by a str, got 3"),
    ("out_keys", ["x", "y"], "must be the one key of the value, got 2 keys"),
    ("out_keys", 3, "`out_keys` must be a key or a list of keys, got int: 3"),
    (
        "distribution_class",
        "Normal",
        "`distribution_class` must be.*Pass the class, such as `Normal`",
    ),
    ("distribution_kwargs", [1], "`distribution_kwargs` must be a dict of arguments by name"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=lambda value: str(value)[:25])
def test_a_wrong_setting_is_refused_and_changes_nothing(
    name: str, value: object, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        drawing_normal(**{name: value})
    module = drawing_normal()
    before = dict(vars(module))
    with pytest.raises((TypeError, ValueError), match=message):
        setattr(module, name, value)
    assert vars(module) == before


def test_a_selection_survives_what_does_not_concern_it() -> None:
    module = drawing_normal(return_log_prob=True).select_out_keys("x_log_prob")
    module.num_samples = 2
    module.generator = 3
    assert module.out_keys == ["x_log_prob"]
    module.return_log_prob = False
    assert module.out_keys == ["x"]


def test_keys_can_be_assigned_as_they_are_read() -> None:
    module = drawing_normal(generator="seed", return_log_prob=True)
    module.in_keys, module.out_keys = module.in_keys, module.out_keys
    assert (module.in_keys, module.out_keys) == (["loc", "scale", "seed"], ["x", "x_log_prob"])
    module.out_keys = ["y", "score"]
    assert (module.dist_sample_keys, module.log_prob_key) == (["y"], "score")
    assert set(module(seeded()).keys()) == {*seeded().keys(), "y", "score"}


def test_values_include_that_of_the_generator() -> None:
    module = drawing_normal(generator="seed")
    (value,) = module._kd_forward_values(LOCS, SCALES, 3)
    shape, found = cast("tuple[object, list[tuple[object, object]]]", results(module))
    expected = [*flat(seeded()), ("x", cast(Tensor, value).tolist())]
    assert shape == ()
    assert [pair for pair in found if pair[0] != "seed"] == [p for p in expected if p[0] != "seed"]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_settings_of_a_copy_are_its_own(
    copied: Callable[[ProbabilisticTensorDictModule], ProbabilisticTensorDictModule],
) -> None:
    module = drawing_normal(generator=torch.Generator().manual_seed(3))
    twin = copied(module)
    twin.num_samples = 2
    assert (module.num_samples, twin.num_samples) == (None, 2)
    assert torch.equal(twin(seeded())["x"][0], module(seeded())["x"])


def test_scoring_follows_the_settings_of_its_module() -> None:
    coin = ProbabilisticTensorDictModule(["probs"], ["toss"], distribution_class=Bernoulli)
    model = ProbabilisticTensorDictSequential(
        TensorDictModule(torch.sigmoid, ["logits"], ["probs"]), ScoringModule(coin)
    )
    for _ in range(3):
        model(TensorDict({"logits": LOCS, "toss": torch.ones(3)}))
    coin.out_keys = ["flip"]
    setattr(coin, "log_prob_key", "score")  # noqa: B010 - read-only for a type checker
    assert (model.in_keys, model.out_keys) == (["logits", "flip"], ["probs", "score"])
    for _ in range(3):
        made = model(TensorDict({"logits": LOCS, "flip": torch.ones(3)}))
        assert torch.allclose(made["score"], torch.nn.functional.logsigmoid(LOCS))
    with pytest.raises(InvalidArgument, match="out_keys of a `ScoringModule` follow from"):
        model[1].out_keys = ["x"]


def test_interaction_types_stay_members() -> None:
    module = drawing_normal()
    module.default_interaction_type = "Mean"  # type: ignore[assignment]  # a name is converted
    assert module.default_interaction_type is InteractionType.MEAN
    with set_interaction_type("random"):
        assert not torch.equal(module(seeded())["x"], LOCS)
    assert torch.equal(module(seeded())["x"], LOCS)


def writer() -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        ["loc", "scale"], ["x"], distribution_class=torch.distributions.Normal
    )


def standard() -> TensorDict:
    return TensorDict(loc=torch.zeros(2), scale=torch.ones(2))


def test_the_container_to_write_comes_by_position() -> None:
    out = TensorDict()
    assert writer()(standard(), out) is out
    assert torch.equal(out["x"], torch.zeros(2))
    assert "x" in writer()(standard(), None)


def test_a_subclass_that_draws_itself_asks_for_no_value() -> None:
    td = standard()
    assert writer()(td, None, _requires_sample=False) is td
    assert "x" not in td


def by_data(loc: nn.Parameter) -> None:
    loc.data.copy_(torch.ones(3))


def by_numpy(loc: nn.Parameter) -> None:
    loc.detach().numpy()[:] = np.ones(3)


def by_storage(loc: nn.Parameter) -> None:
    source = torch.ones(3)
    loc.untyped_storage().copy_(source.untyped_storage())


def by_swap(loc: nn.Parameter) -> None:
    torch.utils.swap_tensors(loc, nn.Parameter(torch.ones(3)))


def by_fused_optimiser(loc: nn.Parameter) -> None:
    loc.grad = -torch.ones(3)
    torch.optim.SGD([loc], lr=1.0, fused=True).step()


@pytest.mark.parametrize("write", [by_data, by_numpy, by_storage, by_swap, by_fused_optimiser])
def test_a_distribution_is_that_of_the_parameters_of_now(
    write: Callable[[nn.Parameter], None],
) -> None:
    module = ProbabilisticTensorDictModule(
        ["logits"], ["x"], distribution_class=Categorical, cache_dist=True
    )
    logits = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]) - 1)
    if write is by_fused_optimiser:
        logits = nn.Parameter(torch.zeros(3))
    td = TensorDict(logits=logits)
    module.get_dist(td)
    module(td.copy())
    write(logits)
    assert torch.equal(module.get_dist(td).probs, torch.full((3,), 1 / 3))  # type: ignore[attr-defined]  # of this class


def test_tensors_among_the_further_arguments_are_read_anew() -> None:
    high = torch.ones(2)
    module = ProbabilisticTensorDictModule(
        ["low"],
        ["x"],
        distribution_class=Uniform,
        distribution_kwargs={"high": high},
        default_interaction_type="mean",
        cache_dist=True,
    )
    low = torch.zeros(2)
    module(low)
    high.data.fill_(3.0)
    assert cast(Tensor, module(low)).tolist() == [1.5, 1.5]


def test_the_default_dtype_of_now_is_used() -> None:
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["x"], distribution_class=Normal, cache_dist=True
    )
    td = TensorDict(loc=0.0, scale=1.0)
    assert module.get_dist(td).mean.dtype is torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        made: Tensor = module.get_dist(TensorDict(loc=0.0, scale=1.0)).mean
    finally:
        torch.set_default_dtype(before)
    assert made.dtype is torch.float64


def test_several_keys_of_log_probabilities_come_before_one() -> None:
    module = normal(log_prob_key="one", log_prob_keys=["first"], return_log_prob=True)
    assert module.log_prob_keys == ["first"]
    assert "first" in module(params())
