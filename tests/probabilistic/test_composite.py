import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch import distributions as d
from torch.distributions import Distribution

from kd_core import InvalidArgument, KeySetMismatch, NestedKey, TensorDict, lazy_stack
from kd_nn import Delta, TanhNormal
from kd_probabilistic import (
    CompositeDistribution,
    EntropyEstimateWarning,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    composite_lp_aggregate,
    set_composite_lp_aggregate,
)

GRIP = ("hand", "grip")
MAP: dict[NestedKey, Callable[..., Distribution]] = {"move": d.Normal, GRIP: d.Categorical}


def params() -> TensorDict:
    torch.manual_seed(0)
    move = {"loc": torch.randn(3, 2), "scale": torch.rand(3, 2) + 0.5}
    return TensorDict({"move": move, GRIP: {"logits": torch.randn(3, 4)}}, [3])


def composite(**options: object) -> CompositeDistribution:
    return CompositeDistribution(params(), MAP, **options)  # type: ignore[arg-type]  # any option


def parts() -> tuple[Distribution, Distribution]:
    td = params()
    return d.Normal(td["move", "loc"], td["move", "scale"]), d.Categorical(
        logits=td[*GRIP, "logits"]
    )


def density(dist: Distribution, value: Tensor) -> Tensor:
    result: Tensor = dist.log_prob(value)
    return result


def test_draws_are_containers_of_draws_of_the_components() -> None:
    torch.manual_seed(1)
    sample = composite().sample((5,))
    torch.manual_seed(1)
    move, grip = (part.sample(torch.Size([5])) for part in parts())
    assert sample.batch_size == (5, 3)
    assert torch.equal(sample["move"], move)
    assert torch.equal(sample[GRIP], grip)


@pytest.mark.parametrize("shape", [(), (5,), (2, 4)])
def test_log_prob_of_each_component_and_their_sum(shape: tuple[int, ...]) -> None:
    dist = composite()
    sample = dist.sample(shape)
    move, grip = parts()
    expected = density(move, sample["move"]), density(grip, sample[GRIP])
    each = dist.log_prob(sample, aggregate=False)
    assert each.batch_size == (*shape, 3)
    assert torch.equal(each["move_log_prob"], expected[0])
    assert torch.equal(each["hand", "grip_log_prob"], expected[1])
    torch.testing.assert_close(
        dist.log_prob(sample, aggregate=True), expected[0].sum(-1) + expected[1]
    )
    both = dist.log_prob_composite(sample, include_sum=True)
    torch.testing.assert_close(both["sample_log_prob"], dist.log_prob(sample, aggregate=True))


def test_containers_of_scores_have_the_device_of_the_values_and_draws_have_none() -> None:
    params = TensorDict({"a": {"loc": torch.zeros(3), "scale": torch.ones(3)}}, [3], "cpu")
    dist = CompositeDistribution(params, {"a": torch.distributions.Normal}, aggregate=False)
    draw = dist.sample()
    assert draw.device is dist.entropy_composite().device is dist.log_prob_composite(draw).device
    assert draw.device is None
    assert dist.log_prob_composite(draw.to("cpu")).device == torch.device("cpu")


def test_the_argument_of_the_distribution_decides_unless_the_call_says_otherwise() -> None:
    dist = composite(aggregate=True, log_prob_key="total", entropy_key=("n", "h"))
    value, score = dist.sample_and_log_prob()
    assert isinstance(score, Tensor)
    assert isinstance(dist.log_prob(value, aggregate=False), TensorDict)
    assert isinstance(dist.entropy(), Tensor)
    assert "total" in dist.log_prob_composite(value, include_sum=True)
    assert ("n", "h") in dist.entropy_composite(include_sum=True).keys(True)


def test_the_sum_does_not_replace_the_value_of_a_component() -> None:
    dist = CompositeDistribution(TensorDict(sample=params()["move"]), {"sample": d.Normal})
    with pytest.raises(InvalidArgument, match="`sample_log_prob`, which holds the value of"):
        dist.log_prob_composite(dist.sample(), include_sum=True)


def independent(loc: Tensor, scale: Tensor) -> Distribution:
    return d.Independent(d.Normal(loc, scale), 1)


def test_components_may_have_no_rows() -> None:
    dist = CompositeDistribution(params()[:0], {"move": independent, GRIP: d.Categorical})
    for found in (
        dist.log_prob(dist.sample((2,)), aggregate=True),
        dist.entropy(aggregate_probabilities=True),
    ):
        assert found.shape[-1] == 0


def test_a_batch_of_no_dimension_sums_over_all_of_them() -> None:
    dist = CompositeDistribution(params().auto_batch_size_(0), MAP)
    sample = dist.sample((5,))
    assert sample.batch_size == (5,)
    assert dist.log_prob(sample, aggregate=True).shape == (5,)
    assert dist.entropy(aggregate_probabilities=True).shape == ()


def test_events_of_several_dimensions() -> None:
    td = TensorDict(
        {"x": {"loc": torch.zeros(3, 2), "scale_tril": torch.eye(2).expand(3, 2, 2)}}, [3]
    )
    dist = CompositeDistribution(td, {"x": d.MultivariateNormal})
    each = dist.log_prob(dist.rsample((5,)), aggregate=False)
    assert each["x_log_prob"].shape == each.batch_size == (5, 3)
    assert dist.entropy(aggregate_probabilities=False).batch_size == (3,)


def test_entropy_of_each_component_and_their_sum() -> None:
    dist = composite()
    move, grip = parts()
    each = dist.entropy(aggregate_probabilities=False)
    torch.testing.assert_close(each["move_entropy"], move.entropy())
    torch.testing.assert_close(each["hand", "grip_entropy"], grip.entropy())
    total = move.entropy().sum(-1) + grip.entropy()
    torch.testing.assert_close(dist.entropy(aggregate_probabilities=True), total)


def test_estimates_are_containers() -> None:
    td = params()
    dist = composite()
    for value in (dist.mode, dist.deterministic_sample):
        assert torch.equal(value["move"], td["move", "loc"])
        assert torch.equal(value[GRIP], td[*GRIP, "logits"].argmax(-1))
    moves = CompositeDistribution(td, {"move": d.Normal})
    assert torch.equal(moves.mean["move"], moves.median["move"])
    torch.testing.assert_close(moves.stddev["move"], td["move", "scale"])


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda dist: dist.mean, "`Categorical` has no mean"),
        (lambda dist: dist.variance, "`Categorical` has no variance"),
        (lambda dist: dist.cdf(dist.sample()), "`Categorical` has no cdf.*'grip'"),
        (
            lambda dist: dist.rsample(),
            r"components `\('hand', 'grip'\)` cannot draw with gradients",
        ),
    ],
)
def test_what_a_component_does_not_offer_is_refused(compute, message: str) -> None:  # type: ignore[no-untyped-def]  # any call
    with pytest.raises(NotImplementedError, match=message):
        compute(composite())


def test_probabilities_and_quantiles_make_a_round_trip() -> None:
    td = params()
    dist = CompositeDistribution(td, {"move": TanhNormal}, name_map={"move": ("a", "b")})
    sample = dist.rsample((5,))
    assert dist.cdf(sample) is sample
    assert list(sample.keys(True, True)) == [("a", "b"), ("a", "b_cdf")]
    again = dist.icdf(sample.select(("a", "b_cdf")))
    assert again.batch_size == (5, 3)
    torch.testing.assert_close(again["a", "b_icdf"], sample["a", "b"], rtol=1e-3, atol=1e-4)
    bare = TensorDict({"a": {"b": sample["a", "b_cdf"]}}, [5, 3])
    assert (dist.icdf(bare)["a", "b_icdf"] == again["a", "b_icdf"]).all()


def test_draws_carry_gradients() -> None:
    loc = torch.zeros(3, requires_grad=True)
    td = TensorDict({"x": {"loc": loc, "scale": torch.ones(3)}}, [3])
    value, score = CompositeDistribution(td, {"x": d.Normal}, aggregate=True).rsample_and_log_prob()
    assert isinstance(score, Tensor)
    (slope,) = torch.autograd.grad(value["x"].sum() + score.sum(), loc)
    assert torch.equal(slope, torch.ones(3))


def test_it_is_a_mapping_by_the_keys_of_the_values() -> None:
    dist = composite(name_map={"move": ("a", "b")})
    keys: list[NestedKey] = [("a", "b"), GRIP]
    assert list(dist) == list(dist.keys()) == keys
    assert len(dist) == len(list(dist.values())) == 2
    assert dict(dist.items())[GRIP] is dist[GRIP] is dist.get(GRIP)
    assert ("a", "b") in dist
    assert "move" not in dist
    assert dist.get("move") is None
    assert dist.get("move", 3) == 3
    with pytest.raises(KeyError, match=r"component `move` not found; available keys: .*'grip'"):
        dist["move"]


def test_of_distributions_that_exist() -> None:
    move, grip = parts()
    built = CompositeDistribution.from_distributions(
        params(), {"move": move, GRIP: grip}, name_map={"move": "go"}, aggregate=True
    )
    assert built["go"] is move
    twin = composite(name_map={"move": "go"}, aggregate=True)
    torch.manual_seed(1)
    value, score = built.sample_and_log_prob((4,))
    torch.manual_seed(1)
    theirs = twin.sample((4,))
    assert (value == theirs).all()
    assert isinstance(score, Tensor)
    assert score.shape == (4, 3)
    with pytest.raises(
        TypeError, match=r"`x` must be a `torch.distributions.Distribution`, got type"
    ):
        CompositeDistribution.from_distributions(params(), {"x": d.Normal})  # type: ignore[dict-item]  # a class


def test_expand() -> None:
    wide = composite(aggregate=True).expand((4, 3))
    sample = wide.sample()
    assert sample["move"].shape == (4, 3, 2)
    score = wide.log_prob(sample)
    assert isinstance(score, Tensor)
    assert score.shape == (4, 3)


def test_further_arguments_by_name() -> None:
    td = TensorDict({"x": {"param": torch.zeros(3)}}, [3])
    with pytest.raises(ValueError, match=r"batch shape of `x` must start with .* \(3,\), got \(\)"):
        CompositeDistribution(td, {"x": Delta})
    dist = CompositeDistribution(td, {"x": Delta}, extra_kwargs={"x": {"event_shape": ()}})
    assert dist.sample()["x"].shape == (3,)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ({"mvoe": d.Normal}, {}, "parameters `mvoe` not found.*Did you mean `move`"),
        (MAP, {"name_map": {"x": "y"}}, "`name_map` renames a distribution that is missing: `x`"),
        (MAP, {"name_map": {"move": "hand"}}, "must not hold one another, got `hand` and"),
        (MAP, {"name_map": {"move": GRIP}}, "must differ, got .* twice"),
        (MAP, {"extra_kwargs": {"moev": {}}}, "`extra_kwargs` names a.*Did you mean `move`"),
        ({"move": d.Bernoulli}, {}, "`Bernoulli` has no argument `loc`"),
        ({"hand": d.Normal, GRIP: d.Normal}, {}, "must not hold one another"),
        ({("move", "loc"): d.Normal}, {}, "must be a container of the arguments.*got Tensor"),
    ],
)
def test_wrong_construction_is_explained(
    names: dict[NestedKey, type], options: dict[str, object], message: str
) -> None:
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        CompositeDistribution(params(), names, **options)  # type: ignore[arg-type]  # any option


def test_wrong_values_name_the_component() -> None:
    td = params()
    td["move", "scale"] = -td["move", "scale"]
    with pytest.raises(ValueError, match="Expected parameter scale") as caught:
        CompositeDistribution(
            td, {"move": d.Normal}, extra_kwargs={"move": {"validate_args": True}}
        )
    assert caught.value.__notes__ == ["This is the component `move` of a composite."]
    with pytest.raises(KeyError, match="value `move` not found; available keys: `mov`"):
        composite().log_prob(TensorDict(mov=torch.zeros(3)))


def test_a_lazy_stack_holds_parameters_too() -> None:
    stacked = lazy_stack([params(), params()])
    assert CompositeDistribution(stacked, MAP).sample().batch_size == (2, 3)


@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_entropy_without_a_formula_is_estimated_and_says_so(scale: float) -> None:
    td = TensorDict({"x": {"loc": torch.tensor(0.5), "scale": torch.tensor(scale)}})
    dist = CompositeDistribution(td, {"x": TanhNormal})
    with pytest.warns(EntropyEstimateWarning, match="entropy of `x` .`TanhNormal`. has no formula"):
        assert dist.entropy(aggregate_probabilities=True).shape == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        estimate = dist.entropy(20_000, aggregate_probabilities=True).item()
    # H(tanh x) = H(x) + E[log(1 - tanh(x)^2)], the second by quadrature.
    z = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    weight = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    slope = torch.log1p(-(torch.tanh(0.5 + scale * z).double().clamp(-1 + 1e-15, 1 - 1e-15) ** 2))
    exact = 0.5 * math.log(2 * math.pi * math.e) + math.log(scale)
    exact += torch.trapezoid(weight * slope, z).item()
    assert estimate == pytest.approx(exact, abs=0.05)
    with pytest.raises(ValueError, match="`samples_mc` must be a positive int or None, got 0"):
        dist.entropy(0)


class Opaque(d.Categorical):
    """A distribution that cannot say its entropy, nor draw with gradients."""

    def entropy(self) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Opaque, TanhNormal])
def test_gradients_of_an_estimated_entropy_are_those_of_the_entropy(kind: type) -> None:
    torch.manual_seed(0)
    if kind is Opaque:
        logits = torch.tensor([0.0, 1.0, -0.5], requires_grad=True)
        dist = CompositeDistribution(TensorDict({"x": {"logits": logits}}), {"x": kind})
        plain: Distribution = d.Categorical(logits=logits)
        exact = plain.entropy()
        (expected,) = torch.autograd.grad(exact, logits)
        (got,) = torch.autograd.grad(dist.entropy(200_000, aggregate_probabilities=True), logits)
    else:
        scale = torch.tensor(0.05, requires_grad=True)  # tanh is almost linear there
        td = TensorDict({"x": {"loc": torch.tensor(0.0), "scale": scale}})
        expected = 1 / scale.detach()
        total = CompositeDistribution(td, {"x": kind}).entropy(
            200_000, aggregate_probabilities=True
        )
        (got,) = torch.autograd.grad(total, scale)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.01)


def test_log_probs_of_countable_values_sum_to_one() -> None:
    td = TensorDict({"a": {"probs": torch.rand(4)}, "b": {"logits": torch.randn(4, 3)}}, [4])
    dist = CompositeDistribution(td, {"a": d.Bernoulli, "b": d.Categorical}, aggregate=True)
    total = torch.zeros(4)
    for a in range(2):
        for b in range(3):
            value = TensorDict({"a": torch.full((4,), float(a)), "b": torch.full((4,), b)}, [4])
            total += dist.log_prob(value, aggregate=True).exp()
    torch.testing.assert_close(total, torch.ones(4))


def test_divergence_is_the_sum_over_components() -> None:
    p, (move, grip) = composite(), parts()
    q = CompositeDistribution(params().apply(lambda leaf: leaf.abs() + 0.1), MAP)
    expected = d.kl_divergence(move, q["move"]).sum(-1) + d.kl_divergence(grip, q[GRIP])
    assert d.kl_divergence(p, q).allclose(expected)


def test_divergence_needs_the_same_components_and_their_formulas() -> None:
    other = CompositeDistribution(params(), {"move": d.Normal})
    with pytest.raises(KeySetMismatch, match=r"same components, got `move`, .*and `move`"):
        d.kl_divergence(composite(), other)
    delta = CompositeDistribution(
        TensorDict({"move": {"param": torch.zeros(3, 2)}}, [3]), {"move": Delta}
    )
    with pytest.raises(NotImplementedError, match=r"`Normal` has no divergence .*component `move`"):
        d.kl_divergence(other, delta)


def test_value_that_is_a_tensor_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"must be a container .*got Tensor"):
        composite().log_prob(torch.zeros(3, 2))  # type: ignore[call-overload]  # wrong on purpose


def test_names_of_tensordict_are_taken() -> None:
    params = TensorDict({"a": {"loc": torch.zeros(3), "scale": torch.ones(3)}}, [3])
    dist = CompositeDistribution(params, {"a": torch.distributions.Normal})
    value = dist.sample(shape=(2,))
    assert value.batch_size == (2, 3)
    assert torch.equal(
        dist.log_prob(sample=value, aggregate=True), dist.log_prob(value, aggregate=True)
    )
    total = dist.entropy(aggregate_probabilities=True)
    assert total.shape == (3,)
    with_sum = dist.entropy(include_sum=True)  # type: ignore[call-overload]  # as above
    assert list(with_sum.keys()) == ["a_entropy", "entropy"]
    assert list(dist.dists) == ["a"]


def test_the_switch_says_whether_a_distribution_sums() -> None:
    params = TensorDict({"a": {"loc": torch.zeros(3), "scale": torch.ones(3)}}, [3])
    dist = CompositeDistribution(params, {"a": torch.distributions.Normal})
    value = dist.sample()
    assert not composite_lp_aggregate(nowarn=True)
    assert isinstance(dist.log_prob(value), TensorDict)
    with set_composite_lp_aggregate(True):
        assert composite_lp_aggregate()
        assert isinstance(dist.log_prob(value), torch.Tensor)
        assert isinstance(dist.entropy(), torch.Tensor)
        assert isinstance(dist.log_prob(value, aggregate=False), TensorDict)
        module = ProbabilisticTensorDictModule(
            ["params"],
            ["a"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"a": torch.distributions.Normal}},
            return_log_prob=True,
        )
    assert module.out_keys == ["a", "sample_log_prob"]
    assert set_composite_lp_aggregate(True)(composite_lp_aggregate)()
    set_composite_lp_aggregate(True).set()
    try:
        assert composite_lp_aggregate()
    finally:
        set_composite_lp_aggregate(False).set()
    assert not composite_lp_aggregate()


def test_the_switch_writes_the_parts_before_their_sum() -> None:
    names = {"a": torch.distributions.Normal, ("n", "b"): torch.distributions.Categorical}
    params = TensorDict(
        {
            "a": {"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)},
            "n": {"b": {"logits": torch.zeros(3, 4)}},
        },
        [3],
    )

    def built(**options: object) -> ProbabilisticTensorDictModule:
        return ProbabilisticTensorDictModule(
            ["params"],
            ["a", ("n", "b")],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": names, "log_prob_key": "ignored"},
            **{"return_log_prob": True, **options},  # type: ignore[arg-type]  # several kinds
        )

    with set_composite_lp_aggregate(True):
        module, silent = built(), built(return_log_prob=False)
        sequence = ProbabilisticTensorDictSequential(module)
        assert module.out_keys == sequence.out_keys == ["a", ("n", "b"), "sample_log_prob"]
        for run in (module, sequence):
            td = run(TensorDict({"params": params.clone()}, [3]))
            keys = [key for key in td.keys(True, True) if "params" not in key]
            assert keys == ["a", ("n", "b"), ("n", "b_log_prob"), "a_log_prob", "sample_log_prob"]
            total = td["a_log_prob"].sum(-1) + td["n", "b_log_prob"]
            torch.testing.assert_close(td["sample_log_prob"], total)
        assert "a_log_prob" not in silent(TensorDict({"params": params.clone()}, [3]))
        chosen = built().select_out_keys("a")(TensorDict({"params": params.clone()}, [3]))
        assert list(chosen.keys()) == ["params", "a"]
        locked = TensorDict({"params": params.clone()}, [3]).lock_()
        with pytest.raises(RuntimeError):
            module(locked)
        assert list(locked.keys()) == ["params"]
    assert "a_log_prob" in built()(TensorDict({"params": params.clone()}, [3]))


def test_where_log_prob_sums_the_scores_are_written_beside_the_values() -> None:
    dist = composite()
    sample = dist.sample()
    apart = dist.log_prob_composite(sample)
    assert apart is not sample
    assert "sample_log_prob" not in apart
    assert "entropy" not in dist.entropy_composite()
    with set_composite_lp_aggregate(True):
        total = dist.log_prob(sample)
        assert dist.log_prob_composite(sample) is sample
        torch.testing.assert_close(sample["sample_log_prob"], total)
        assert torch.equal(sample["move_log_prob"], apart["move_log_prob"])
        torch.testing.assert_close(dist.entropy_composite()["entropy"], dist.entropy())
        alone = dist.log_prob_composite(dist.sample(), include_sum=False)
        assert "sample_log_prob" not in alone


def test_what_was_set_is_set_back() -> None:
    setting = set_composite_lp_aggregate(True)
    assert not composite_lp_aggregate()
    for _ in range(2):
        setting.set()
        assert composite_lp_aggregate()
        setting.unset()
        assert not composite_lp_aggregate()


def test_a_switch_that_is_entered_twice_restores_what_was() -> None:
    setting = set_composite_lp_aggregate(True)
    with setting, setting:
        assert composite_lp_aggregate()
        setting.set()
        setting.unset()
        assert composite_lp_aggregate()
    assert not composite_lp_aggregate()
    setting.set()
    setting.set()
    setting.unset()
    assert composite_lp_aggregate()
    setting.unset()
    assert not composite_lp_aggregate()
    setting.unset()  # nothing is left to restore
    assert not composite_lp_aggregate()


def test_compiled_code_switches() -> None:
    @set_composite_lp_aggregate(True)
    def inside() -> bool:
        return composite_lp_aggregate()

    def run(x: torch.Tensor) -> torch.Tensor:
        with set_composite_lp_aggregate(True):
            y = x + composite_lp_aggregate()
        return y + 10 * inside() + 100 * composite_lp_aggregate()

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())) == run(torch.zeros(())) == 11


def test_a_composite_is_asked_for_an_estimate_by_hasattr() -> None:
    params = TensorDict({"a": {"logits": torch.zeros(3)}})
    dist = CompositeDistribution(params, {"a": d.Categorical})
    assert not hasattr(dist, "median")
    assert hasattr(dist, "mode")
    with pytest.raises(NotImplementedError, match="has no median"):
        _ = dist.median
