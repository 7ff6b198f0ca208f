"""Every kind of container keeps the contract."""

from collections.abc import Sequence

from tests.core.kinds import FACTORIES

from kd_core import TensorDictBase, lazy_stack
from kd_core.testing import ContainerContract, StackContract


class TestTensorDict(ContainerContract):
    def make(self) -> TensorDictBase:
        return FACTORIES["dense"]()


class TestLazyStack(StackContract):
    def make_stack(self, members: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
        return lazy_stack(members, dim)


class TestLazyStackOfColumns(ContainerContract):
    def make(self) -> TensorDictBase:
        return FACTORIES["stacked_last"]()


class TestTensorClass(ContainerContract):
    fixed_keys = True

    def make(self) -> TensorDictBase:
        return FACTORIES["declared"]()


class TestTypedTensorDict(ContainerContract):
    def make(self) -> TensorDictBase:
        return FACTORIES["typed"]()
