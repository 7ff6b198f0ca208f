"""A distribution that is kept is used again only if a new one would be the same."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.distributions import Categorical, Normal

from kd_core import TensorDict
from kd_probabilistic import CompositeDistribution, ProbabilisticTensorDictModule


def module(**options: object) -> ProbabilisticTensorDictModule:
    settings: dict[str, object] = {"distribution_class": Normal, "cache_dist": True, **options}
    return ProbabilisticTensorDictModule(["loc", "scale"], ["x"], **settings)  # type: ignore[arg-type]  # any


def params() -> TensorDict:
    return TensorDict(loc=torch.zeros(3), scale=torch.ones(3))


def test_the_same_parameters_have_the_same_distribution() -> None:
    kept, td = module(), params()
    first = kept.get_dist(td)
    kept(td)
    assert kept.get_dist(td) is first
    assert kept.get_dist(td.copy()) is first
    assert module(cache_dist=False).get_dist(td) is not first


def test_anything_that_changes_it_builds_a_new_one() -> None:
    kept, td = module(), params()
    before = kept.get_dist(td)
    td["loc"].add_(1)
    after = kept.get_dist(td)
    assert after is not before
    assert torch.equal(after.mean, torch.ones(3))
    td["loc"] = torch.zeros(3)
    assert torch.equal(kept.get_dist(td).mean, torch.zeros(3))
    kept.distribution_kwargs = {"validate_args": False}  # type: ignore[misc]  # read-only for a type checker
    found = kept.get_dist(td)
    with torch.no_grad():
        assert kept.get_dist(td) is not found
    with torch.inference_mode():
        odd = params()
        assert kept.get_dist(odd) is not kept.get_dist(odd)


def test_gradients_are_recorded_whatever_was_kept() -> None:
    kept = ProbabilisticTensorDictModule(
        ["logits"], ["x"], distribution_class=Categorical, cache_dist=True
    )
    logits = torch.zeros(3, requires_grad=True)
    td = TensorDict(logits=logits, x=torch.tensor(1))
    with torch.no_grad():
        kept.log_prob(td)
    score = kept.log_prob(td, aggregate=True)
    (slope,) = torch.autograd.grad(score, logits)
    assert slope.tolist() == pytest.approx([-1 / 3, 2 / 3, -1 / 3])


def test_containers_of_parameters_are_looked_into() -> None:
    kept = ProbabilisticTensorDictModule(
        ["params"],
        ["x"],
        distribution_class=partial(CompositeDistribution, distribution_map={"x": Normal}),
        cache_dist=True,
    )
    td = TensorDict(params=TensorDict(x=params()))
    first = kept.get_dist(td)
    assert kept.get_dist(td) is first
    td["params", "x", "loc"] = torch.ones(3)
    assert kept.get_dist(td) is not first


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_nothing(copied) -> None:  # type: ignore[no-untyped-def]  # functions of two types
    kept = module()
    loc = torch.zeros(3, requires_grad=True) * 2  # a tensor that cannot be copied
    kept(loc, torch.ones(3))
    assert torch.equal(copied(kept)(loc, torch.ones(3)), loc)
