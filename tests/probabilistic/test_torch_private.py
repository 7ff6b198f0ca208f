"""Each private name of torch exists and says what is asked of it; without it modules run."""

from tests import children
from torch._subclasses.fake_tensor import FakeTensorMode

from kd_probabilistic._torch_private import READS_VALUES, computes_shapes_alone


def test_fake_tensors_are_seen() -> None:
    with FakeTensorMode():
        inside = computes_shapes_alone()
    assert (inside, computes_shapes_alone()) == (True, False)


def test_the_errors_of_a_branch_on_a_value_have_these_names() -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    named = {DataDependentOutputException.__name__, GuardOnDataDependentSymNode.__name__}
    assert named == READS_VALUES


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
