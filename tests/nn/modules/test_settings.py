"""Settings are checked whenever they are assigned; nothing changes if one is refused."""

import pytest
import torch

from kd_core import InvalidArgument, TensorDictBase
from kd_nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential, WrapModule


def echo(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        (TensorDictModule(torch.neg, ["x"], ["y"]), "strict", 1, "must be True or False, got 1"),
        (TensorDictSequential(), "inplace", "emtpy", 'must be True, False, None or "empty"'),
        (TensorDictSequential(), "partial_tolerant", 1, "must be True or False, got 1"),
        (WrapModule(echo), "inplace", "empty", "must be True or False, got 'empty'"),
    ],
)
def test_wrong_setting_is_refused(
    module: TensorDictModuleBase, name: str, value: object, message: str
) -> None:
    before = getattr(module, name)
    with pytest.raises(InvalidArgument, match=rf"`{name}` {message}"):
        setattr(module, name, value)
    assert getattr(module, name) is before
