"""Settings that are assigned are those of the constructor: the same checks, the same results."""

import copy
import pickle
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Laplace, Normal

from kd_core import InvalidArgument, TensorDict
from kd_nn import TensorDictModule, TensorDictSequential
from kd_probabilistic import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    ScoringModule,
    set_interaction_type,
)

LOC, SCALE = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([1.0, 2.0, 0.5])


def params() -> TensorDict:
    return TensorDict({"a": LOC, "loc": LOC, "scale": SCALE, "seed": 3})


def normal(**options: object) -> ProbabilisticTensorDictModule:
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
    module = normal(return_log_prob=name == "log_prob_key")
    used = place(module)
    for _ in range(3):  # with a plan, where one is made
        used(params())
    setattr(module, name, value)
    options = {"return_log_prob": name == "log_prob_key", name: value}
    fresh = place(normal(**options))
    for _ in range(3):
        assert results(used) == results(fresh)
    assert used.in_keys == fresh.in_keys
    assert used.out_keys == fresh.out_keys


def results(module: torch.nn.Module) -> object:
    """Return all that a call writes, or the error that it raises."""
    torch.manual_seed(0)
    try:
        made = module(params())
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
        normal(**{name: value})
    module = normal()
    before = dict(vars(module))
    with pytest.raises((TypeError, ValueError), match=message):
        setattr(module, name, value)
    assert vars(module) == before


def test_a_selection_survives_what_does_not_concern_it() -> None:
    module = normal(return_log_prob=True).select_out_keys("x_log_prob")
    module.num_samples = 2
    module.generator = 3
    assert module.out_keys == ["x_log_prob"]
    module.return_log_prob = False
    assert module.out_keys == ["x"]


def test_keys_can_be_assigned_as_they_are_read() -> None:
    module = normal(generator="seed", return_log_prob=True)
    module.in_keys, module.out_keys = module.in_keys, module.out_keys
    assert (module.in_keys, module.out_keys) == (["loc", "scale", "seed"], ["x", "x_log_prob"])
    module.out_keys = ["y", "score"]
    assert (module.dist_sample_keys, module.log_prob_key) == (["y"], "score")
    assert set(module(params()).keys()) == {*params().keys(), "y", "score"}


def test_values_include_that_of_the_generator() -> None:
    module = normal(generator="seed")
    (value,) = module._kd_forward_values(LOC, SCALE, 3)
    shape, found = cast("tuple[object, list[tuple[object, object]]]", results(module))
    expected = [*flat(params()), ("x", cast(Tensor, value).tolist())]
    assert shape == ()
    assert [pair for pair in found if pair[0] != "seed"] == [p for p in expected if p[0] != "seed"]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_settings_of_a_copy_are_its_own(
    copied: Callable[[ProbabilisticTensorDictModule], ProbabilisticTensorDictModule],
) -> None:
    module = normal(generator=torch.Generator().manual_seed(3))
    twin = copied(module)
    twin.num_samples = 2
    assert (module.num_samples, twin.num_samples) == (None, 2)
    assert torch.equal(twin(params())["x"][0], module(params())["x"])


def test_scoring_follows_the_settings_of_its_module() -> None:
    coin = ProbabilisticTensorDictModule(["probs"], ["toss"], distribution_class=Bernoulli)
    model = ProbabilisticTensorDictSequential(
        TensorDictModule(torch.sigmoid, ["logits"], ["probs"]), ScoringModule(coin)
    )
    for _ in range(3):
        model(TensorDict({"logits": LOC, "toss": torch.ones(3)}))
    coin.out_keys = ["flip"]
    setattr(coin, "log_prob_key", "score")  # noqa: B010 - read-only for a type checker
    assert (model.in_keys, model.out_keys) == (["logits", "flip"], ["probs", "score"])
    for _ in range(3):
        made = model(TensorDict({"logits": LOC, "flip": torch.ones(3)}))
        assert torch.allclose(made["score"], torch.nn.functional.logsigmoid(LOC))
    with pytest.raises(InvalidArgument, match="out_keys of a `ScoringModule` follow from"):
        model[1].out_keys = ["x"]


def test_interaction_types_stay_members() -> None:
    module = normal()
    module.default_interaction_type = "Mean"  # type: ignore[assignment]  # a name is converted
    assert module.default_interaction_type is InteractionType.MEAN
    with set_interaction_type("random"):
        assert not torch.equal(module(params())["x"], LOC)
    assert torch.equal(module(params())["x"], LOC)
