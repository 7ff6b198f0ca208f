"""A call that is refused leaves the parameters of a container bit-equal."""

from typing import cast

import pytest
from tests.core.refusals import LOCKED, REFUSED, unharmed
from tests.core.test_failures import dense
from torch import nn

from kd_core import TensorDictBase
from kd_nn import TensorDictParams


@pytest.mark.parametrize("no_convert", [False, True])
def test_a_refused_call_leaves_the_parameters(no_convert: bool) -> None:
    def make() -> TensorDictBase:
        return cast("TensorDictBase", TensorDictParams(dense(), no_convert=no_convert))

    assert list(unharmed(make, REFUSED)) == list(REFUSED)
    # A state dict is loaded as that of any module of torch, which loads what fits.
    locked = {name: call for name, call in LOCKED.items() if name != "load_state_dict"}
    assert list(unharmed(lambda: make().lock_(), locked)) == list(locked)


def test_a_module_is_refused_with_what_takes_it() -> None:
    with pytest.raises(TypeError, match=r"got the module `Linear`. Write `TensorDictParams.of_mod"):
        TensorDictParams(nn.Linear(2, 2))  # type: ignore[arg-type]  # wrong on purpose
