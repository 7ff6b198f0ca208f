"""Each private name of torch exists and says what is asked of it; without it modules run."""

import math

import pytest
import torch
from tests import children
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Categorical, Distribution, Independent, Normal, Uniform

from kd_probabilistic._torch_private import (
    READS_VALUES,
    build_categorical,
    build_normal,
    builds_plainly,
    computes_shapes_alone,
    without_checks,
)


def test_fake_tensors_are_seen() -> None:
    with FakeTensorMode():
        inside = computes_shapes_alone()
    assert (inside, computes_shapes_alone()) == (True, False)


def test_the_errors_of_a_branch_on_a_value_have_these_names() -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    named = {DataDependentOutputException.__name__, GuardOnDataDependentSymNode.__name__}
    assert named == READS_VALUES


def test_distributions_are_built_as_torch_builds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # what imports dynamo turns it off
    loc, scale, logits = torch.zeros(3), torch.ones(3), torch.tensor([[0.0, 1.0]])
    assert builds_plainly(Normal)
    assert builds_plainly(Categorical)
    for made, plain in (
        (build_normal([loc, scale]), Normal(loc, scale)),
        (build_categorical([logits]), Categorical(logits=logits)),
    ):
        assert made is not None
        assert vars(made).keys() == vars(plain).keys() - {"_validate_args"}
        assert (made.batch_shape, made.event_shape) == (plain.batch_shape, plain.event_shape)
        assert made.mean.equal(plain.mean) or bool(made.mean.isnan().all())
    assert build_normal([loc, -scale]) is None


def test_what_draws_from_its_support_is_copied_without_checks() -> None:
    normal = Normal(torch.zeros(3), torch.ones(3), validate_args=True)
    checked = Independent(normal, 1, validate_args=True)
    copy = without_checks(checked)
    assert copy is not None
    assert copy.log_prob(torch.full((3,), math.nan)).isnan()
    assert checked._validate_args
    assert without_checks(Normal(0.0, 1.0, validate_args=False)) is None
    assert without_checks(Uniform(0.0, 1.0, validate_args=True)) is None


WITHOUT = """
from tests import children
import torch
names = [(torch._C, "_get_dispatch_mode"), (torch._C, "_TorchDispatchModeKey")]
kept = [(owner, name, getattr(owner, name)) for owner, name in names]
import kd_nn
for owner, name, _ in kept:
    delattr(owner, name)
import kd_probabilistic
for owner, name, value in kept:
    setattr(owner, name, value)
normal = kd_probabilistic.ProbabilisticTensorDictModule(
    ["loc", "scale"], ["x"], distribution_class=torch.distributions.Normal, return_log_prob=True
)
value, score = normal(loc=torch.zeros(2), scale=torch.ones(2))
assert value.shape == score.shape == (2,)
"""


def test_a_torch_without_them_costs_a_feature_and_not_the_import() -> None:
    children.check_output("-W", "ignore", "-c", WITHOUT)
